"""The same curvature under other priors and scales: values, gradients, and what is computed once."""

import math

import pytest
import torch
from goldcases import load
from matrixcases import FLOAT64, STRUCTURES, dense, gram, low_rank, patterned

from posterity.errors import NotPositiveDefinite
from posterity.precisions import Dense, Diagonal, Kronecker, LowRank

SCALABLE = {name: build for name, build in STRUCTURES.items() if name not in ("dense alone", "low rank covariance")}


def new_prior(case, kind):
    """A leaf and the prior made of it: one number expanded, or one for each weight."""
    if kind == "expanded":
        leaf = torch.tensor(0.8, dtype=FLOAT64, requires_grad=True)
        return leaf, leaf.expand(case.prior.shape[-1])
    leaf = torch.full_like(case.prior, 0.8) if kind == "equal" else 1.9 * case.prior
    return leaf.requires_grad_(), leaf


def is_possible(structure, kind):
    """Corrected eigenvalues are those of one pattern."""
    return structure != "kronecker, corrected" or kind == "multiple"


@pytest.mark.parametrize(
    ("structure", "kind"), [(s, k) for s in SCALABLE for k in ("expanded", "equal", "multiple") if is_possible(s, k)]
)
def test_values_and_gradients(structure, kind):
    case = SCALABLE[structure](0, ())
    leaf, prior = new_prior(case, kind)
    scale = torch.tensor(1.6, dtype=FLOAT64, requires_grad=True)
    rescaled = case.precision.rescaled(scale, prior)
    matrix = scale * case.curvature + torch.diag(prior)
    wanted = torch.logdet(matrix)
    torch.testing.assert_close(rescaled.logdet, wanted, rtol=1e-10, atol=1e-10)
    mine = torch.autograd.grad(rescaled.logdet, (scale, leaf))
    theirs = torch.autograd.grad(wanted, (scale, leaf))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    plain = case.precision.rescaled(1.6, prior.detach())
    torch.testing.assert_close(plain.logdet, wanted.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(plain.covariance(), torch.linalg.inv(matrix.detach()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", SCALABLE)
def test_rescaled_twice_multiplies_the_scales_and_keeps_the_last_prior(structure):
    case = SCALABLE[structure](1, ())
    twice = case.precision.rescaled(3.0, 2.0 * case.prior).rescaled(0.5, 1.5 * case.prior)
    matrix = 1.5 * case.curvature + torch.diag(1.5 * case.prior)
    torch.testing.assert_close(twice.covariance(), torch.linalg.inv(matrix), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(twice.logdet, torch.logdet(matrix), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("structure", SCALABLE)
def test_members_with_scales_of_their_own(structure):
    case = SCALABLE[structure](2, (2,))
    scale = torch.tensor([0.5, 2.0], dtype=FLOAT64)
    prior = case.prior * torch.tensor([[3.0], [0.7]], dtype=FLOAT64)
    rescaled = case.precision.rescaled(scale, prior)
    matrix = scale[:, None, None] * case.curvature + torch.diag_embed(prior)
    torch.testing.assert_close(rescaled.logdet, torch.logdet(matrix), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(rescaled.covariance(), torch.linalg.inv(matrix), rtol=1e-9, atol=1e-9)
    one = rescaled.member(1)
    torch.testing.assert_close(one.covariance(), torch.linalg.inv(matrix[1]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("build", [dense, low_rank])
@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_one_decomposition_serves_all(build, lead, monkeypatch):
    case = build(3, lead)
    calls = []
    original = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda matrix: calls.append(1) or original(matrix))
    first = case.precision.rescaled(2.0, torch.ones_like(case.prior))
    monkeypatch.setattr(torch.linalg, "cholesky_ex", None)
    monkeypatch.setattr(torch.linalg, "cholesky", None)
    for number in (0.1, 1.0, 7.0):
        prior = torch.full_like(case.prior, number)
        matrix = 3.0 * case.curvature + torch.diag_embed(prior)
        for other in (case.precision.rescaled(3.0, prior), first.rescaled(1.5, prior)):
            torch.testing.assert_close(other.logdet, torch.linalg.slogdet(matrix)[1], rtol=1e-10, atol=1e-10)
    assert len(calls) == 1


def test_a_kronecker_matrix_is_decomposed_only_for_new_proportions(monkeypatch):
    case = patterned(4, ())
    calls = []
    original = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: calls.append(1) or original(matrix))
    case.precision.rescaled(2.0, 3.0 * case.prior)
    assert len(calls) == 0
    case.precision.rescaled(2.0, torch.ones_like(case.prior))
    assert len(calls) == 2


def test_a_low_rank_factor_of_fewer_independent_rows():
    """Rows that repeat: the eigenvalues of zero belong to the directions outside."""
    row = torch.tensor([[1.0, 2.0, 0.0, -1.0]], dtype=FLOAT64)
    factor = torch.cat([row, 2.0 * row, torch.eye(4, dtype=FLOAT64)[:1]])
    prior = torch.full((4,), 0.6, dtype=FLOAT64, requires_grad=True)
    scale = torch.tensor(1.2, dtype=FLOAT64, requires_grad=True)
    got = LowRank(factor, torch.ones(4)).rescaled(scale, prior).logdet
    wanted = torch.logdet(scale * factor.T @ factor + torch.diag(prior))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    mine, theirs = (torch.autograd.grad(value, (scale, prior)) for value in (got, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_low_rank_factor_without_rows_is_the_prior():
    prior = torch.full((3,), 2.0, dtype=FLOAT64, requires_grad=True)
    rescaled = LowRank(torch.zeros(0, 3), torch.ones(3)).rescaled(5.0, prior)
    torch.testing.assert_close(rescaled.logdet, prior.log().sum())
    torch.testing.assert_close(torch.autograd.grad(rescaled.logdet, prior)[0], 1.0 / prior)
    torch.testing.assert_close(rescaled.variance(), 1.0 / prior)


def test_tiny_prior_precisions_leave_the_null_space_to_the_prior():
    """Where the data say nothing the log determinant is that of the prior, however small it is."""
    factor = gram(5, "f", 6)[:3]
    curvature, tiny = 1e6 * factor.T @ factor, torch.full((6,), 1e-12, dtype=FLOAT64)
    values = torch.linalg.eigvalsh(1e6 * factor @ factor.T)
    wanted = (values + 1e-12).log().sum() + 3 * torch.tensor(1e-12, dtype=FLOAT64).log()
    for precision in (Dense(curvature, torch.ones(6)), LowRank(1e3 * factor, torch.ones(6))):
        torch.testing.assert_close(precision.rescaled(1.0, tiny).logdet, wanted, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("prior", [0.9, [0.9, 0.8]])
def test_an_indefinite_curvature_is_refused_under_a_small_prior(prior):
    matrix = Dense(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.full((2,), 2.0))
    with pytest.raises(NotPositiveDefinite, match=r"smallest eigenvalue is -0\.1"):
        matrix.rescaled(1.0, torch.tensor(prior, dtype=FLOAT64).expand(2))
    assert float(matrix.rescaled(1.0, torch.full((2,), 1.5)).logdet) == pytest.approx(math.log(1.25))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: Dense(torch.eye(2), torch.ones(2)).rescaled(1.0, p), "not finite"),
        (lambda p: Diagonal(torch.ones(2), torch.ones(2)).rescaled(1.0, p), "not finite"),
        (lambda p: LowRank(torch.ones(1, 2), torch.ones(2)).rescaled(1.0, p), "must be positive and finite"),
        (lambda p: Kronecker.of(torch.ones(1, 1, 1), torch.eye(2)[None], torch.ones(2)).rescaled(1.0, p), "not finite"),
    ],
)
@pytest.mark.parametrize("bad", [[float("nan")] * 2, [1.0, float("nan")], [float("inf")] * 2])
def test_a_prior_that_is_not_finite_is_refused(build, message, bad):
    with pytest.raises(NotPositiveDefinite, match=message):
        build(torch.tensor(bad))


@pytest.mark.parametrize("structure", SCALABLE)
@pytest.mark.parametrize("entries", [1, 2])
def test_a_prior_of_another_size_is_refused(structure, entries):
    precision = SCALABLE[structure](0, ()).precision
    with pytest.raises(
        ValueError, match=rf"one entry for each of the {precision.size} weights\. Got tensor\({entries},\)"
    ):
        precision.rescaled(1.0, torch.ones(entries))


@pytest.mark.parametrize("rank", [1, 4, 7])
def test_low_rank_factors_with_more_rows_than_weights(rank):
    factor = gram(6, "f", 7)[:rank, :4]
    prior = torch.full((4,), 0.7, dtype=FLOAT64, requires_grad=True)
    got = LowRank(factor, torch.ones(4)).rescaled(2.0, prior).logdet
    wanted = torch.logdet(2.0 * factor.T @ factor + torch.diag(prior))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    mine, theirs = (torch.autograd.grad(value, prior) for value in (got, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("number", [1e-3, 1.0, 1e3])
def test_small_eigenvalues_do_not_blur_the_prior(number):
    """Derivatives asked for or not, the value is the same, eigenvalues near rounding included."""
    rows = torch.linalg.qr(gram(7, "q", 6))[0][:4]
    factor = torch.tensor([1.0, 1e-3, 1e-6, 2e-7], dtype=FLOAT64).unsqueeze(-1) * rows
    precision = LowRank(factor, torch.ones(6))
    prior = torch.full((6,), number, dtype=FLOAT64)
    with_gradient = precision.rescaled(1.0, prior.clone().requires_grad_())
    torch.testing.assert_close(with_gradient.logdet, precision.rescaled(1.0, prior).logdet, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(with_gradient.logdet, Dense(factor.T @ factor, prior).logdet, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Dense, LowRank])
def test_derivatives_in_the_curvature_are_not_lost(kind):
    """A curvature that depends on something keeps its derivatives, at the price of a decomposition each time."""
    leaf = torch.tensor(2.0, dtype=FLOAT64, requires_grad=True)
    root = leaf * torch.tensor([[1.0, 2.0]], dtype=FLOAT64)
    precision = Dense(root.T @ root, torch.ones(2)) if kind is Dense else LowRank(root, torch.ones(2))
    (got,) = torch.autograd.grad(precision.rescaled(1.0, torch.full((2,), 3.0)).logdet, leaf)
    assert float(got) == pytest.approx(20.0 / 23.0)  # d log(3 + 5 leaf^2) / d leaf


def test_singular_matrices_are_refused():
    for precision in (
        Dense(torch.diag(torch.tensor([1.0, 0.0])), torch.ones(2)),
        Kronecker.of(torch.ones(1, 1, 1), torch.diag(torch.tensor([1.0, 0.0]))[None], torch.ones(2)),
    ):
        with pytest.raises(NotPositiveDefinite, match="singular"):
            precision.rescaled(1.0, torch.zeros(2))
    with pytest.raises(NotPositiveDefinite, match="must be positive"):
        LowRank(torch.ones(1, 2), torch.zeros(2))
    with pytest.raises(NotPositiveDefinite, match="not finite"):
        LowRank(torch.full((1, 2), float("nan")), torch.ones(2))
    with pytest.raises(NotPositiveDefinite, match="scale must be finite and not negative"):
        LowRank(torch.ones(1, 2), torch.ones(2)).rescaled(-1.0, torch.ones(2))


def test_gold_log_determinant():
    """A layer's block of the gold's Gauss-Newton matrix under its prior precision."""
    case = load("kfac_linear_network")
    ggn = case.expected["ggn_full"]
    block = ggn[:6, :6]
    got = Dense(block, torch.ones(6)).rescaled(1.0, torch.full((6,), case.inputs["alpha"])).logdet
    case.check("posterior.0.logdet_exact", got)
