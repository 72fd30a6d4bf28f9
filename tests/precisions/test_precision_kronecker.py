"""Kronecker precisions: gold numbers, damping, factored Jacobians, memory, refusals."""

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from matrixcases import FLOAT64, between, corrected, gram, kron, kronecker, normal, patterned
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posterity.errors import NotPositiveDefinite
from posterity.jacobians.linear import Lookup, Matrix
from posterity.numerics import Key
from posterity.precisions import Factor, Kronecker

ROWS, OUTPUTS = 4, 3


def close(got, wanted, tolerance=1e-9):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layer", [0, 1])
def test_gold_linear_network(layer):
    case = load("kfac_linear_network")
    outer, inner = case.expected["G"][layer], case.expected["A"][layer]
    num_data, size = case.inputs["X"].shape[0], outer.shape[0] * inner.shape[0]
    prior = torch.full((size,), case.inputs["alpha"], dtype=FLOAT64)
    for factored, name in ((False, "exact"), (True, "ritter_split")):
        precision = Kronecker.of(outer[None], inner[None], prior, scale=num_data, factored_damping=factored)
        case.check(f"posterior.{layer}.logdet_{name}", precision.logdet)
        case.check(f"posterior.{layer}.cov_diag_{name}", precision.variance())
        case.check(f"posterior.{layer}.cov_diag_{name}", precision.covariance().diagonal())
        again = Kronecker.of(outer[None], inner[None], 3.0 * prior, 1.0, factored).rescaled(num_data, prior)
        case.check(f"posterior.{layer}.logdet_{name}", again.logdet)


def damped(outer, inner, scale, prior):
    """Ritter's matrix for one number."""
    return kron(
        *(
            scale.sqrt() * m + prior.sqrt() * torch.eye(m.shape[-1], dtype=FLOAT64, device=m.device)
            for m in (outer, inner)
        )
    )


def test_dense_derivatives_in_single_precision_are_taken_in_double():
    precision = Kronecker.of(gram(0, "o", 2, 3), gram(0, "i", 2, 2), torch.ones(12))
    single = normal(0, "j", ROWS, OUTPUTS, 12).float()
    for form in (precision.quadratic, precision.marginal, precision.joint_quadratic):
        close(form(single), form(single.double()), 1e-13)


@given(st.integers(0, 10**6), st.floats(0.1, 10.0), st.floats(0.01, 10.0))
@settings(deadline=None, max_examples=20)
def test_factored_damping(seed, scale, number):
    outer, inner = gram(seed, "o", 2, 3), gram(seed, "i", 2, 2)
    scale, number = (torch.tensor(v, dtype=FLOAT64, requires_grad=True) for v in (scale, number))
    first = Kronecker.of(outer, inner, torch.ones(12), factored_damping=True)
    precision = first.rescaled(scale, number.expand(12))
    matrix = damped(outer, inner, scale, number)
    close(precision.logdet, torch.logdet(matrix))
    mine, theirs = (torch.autograd.grad(v, (scale, number)) for v in (precision.logdet, torch.logdet(matrix)))
    close(mine, theirs)
    vector = normal(seed, "v", 12)
    close(precision.matvec(vector), matrix @ vector)
    jacobian = Matrix(normal(seed, "a", 3, 1, 2, 2), normal(seed, "g", 2, 3, 1, 2, 3), bias=False)
    close(precision.quadratic(jacobian), jacobian.rows() @ torch.linalg.inv(matrix) @ jacobian.rows().mT)


def test_factored_damping_of_a_patterned_prior_is_that_of_the_scaled_weights():
    case = patterned(0, ())
    precision = case.precision
    root = case.prior.sqrt()
    damping = Kronecker.of(precision.outer.matrix, precision.inner.matrix, case.prior, 0.7, factored_damping=True)
    scaled = [(f.vectors * f.values.unsqueeze(-2)) @ f.vectors.mT for f in (precision.outer, precision.inner)]
    multiple = case.prior[0] / (precision.outer.pattern[0, 0] * precision.inner.pattern[0, 0])
    wanted = root[:, None] * damped(*scaled, torch.tensor(0.7, dtype=FLOAT64), multiple) * root / multiple
    close(torch.linalg.inv(damping.covariance()), wanted, 1e-8)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("build", [kronecker, patterned, corrected])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_quadratic_forms_on_matrices(build, positions, groups, bias, dtype):
    case = build(1, (), (groups, 2, 4))
    features = normal(1, "a", ROWS, positions, groups, 4 - bias).to(dtype)
    jacobian = Matrix(features, normal(1, "g", OUTPUTS, ROWS, positions, groups, 2).to(dtype), bias)
    rows, inverse = jacobian.rows().double(), torch.linalg.inv(case.matrix)
    tolerance = 1e-9 if dtype == FLOAT64 else 1e-4
    quadratic, joint = case.precision.quadratic(jacobian), case.precision.joint_quadratic(jacobian)
    assert quadratic.dtype == joint.dtype == FLOAT64
    close(quadratic, rows @ inverse @ rows.mT, tolerance)
    close(joint, rows.flatten(0, 1) @ inverse @ rows.flatten(0, 1).mT, tolerance)


def test_quadratic_form_on_a_bias_alone():
    case = kronecker(1, (), (1, 3, 1))
    jacobian = Matrix(None, normal(1, "g", OUTPUTS, ROWS, 2, 1, 3), bias=True)
    rows = jacobian.rows()
    close(case.precision.quadratic(jacobian), rows @ torch.linalg.inv(case.matrix) @ rows.mT)


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("positions", [1, 5])
def test_quadratic_forms_on_lookups(positions, diagonal):
    counts, inner = between(2, "n", 4), gram(2, "i", 3)
    prior = (between(2, "r", 4, 1) * between(2, "c", 1, 3)).flatten()
    outer = torch.diag(counts) if diagonal else gram(2, "o", 4)
    matrix = torch.kron(outer, inner) + torch.diag(prior)
    whole = Kronecker.table(counts, inner, prior) if diagonal else Kronecker.of(outer[None], inner[None], prior)
    index = between(2, "x", ROWS, positions).mul(7).long() % 4
    jacobian = Lookup(index, normal(2, "g", OUTPUTS, ROWS, positions, 3), entries=4)
    rows, inverse = jacobian.rows(), torch.linalg.inv(matrix)
    close(whole.quadratic(jacobian), rows @ inverse @ rows.mT)
    close(whole.joint_quadratic(jacobian), rows.flatten(0, 1) @ inverse @ rows.flatten(0, 1).mT)


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation gives."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.entries = max([self.entries, *sizes])
        return result


def test_nothing_larger_than_the_layer_is_formed():
    out, width, num = 20, 30, 40
    outer, inner = gram(0, "o", 1, out), gram(0, "i", 1, width)
    jacobian = Matrix(normal(0, "a", num, 1, 1, width), normal(0, "g", OUTPUTS, num, 1, 1, out), bias=False)
    vector = normal(0, "v", out * width)
    with Largest() as largest:
        precision = Kronecker.of(outer, inner, torch.ones(out * width)).rescaled(2.0, torch.full((out * width,), 3.0))
        precision.logdet, precision.variance(), precision.solve(vector), precision.matvec(vector)
        precision.colour(vector.unsqueeze(0))
        assert largest.entries <= max(out * width, width**2)
        precision.quadratic(jacobian)
    assert largest.entries <= OUTPUTS * num * out  # gradients; dense rows would be 30 times that


def test_a_large_table_is_never_squared():
    entries = 5000
    precision = Kronecker.table(between(0, "n", entries), gram(0, "i", 2), torch.ones(2 * entries))
    index = torch.tensor([[3, 4999, 3]])
    jacobian = Lookup(index, normal(0, "g", 1, 1, 3, 2), entries)
    with Largest() as largest:
        precision.logdet, precision.variance()
        got, joint = precision.quadratic(jacobian), precision.joint_quadratic(jacobian)
    assert largest.entries <= 2 * entries
    wanted = (jacobian.rows() * precision.solve(jacobian.rows())).sum()
    close(got.sum(), wanted)
    close(joint.sum(), wanted)


def test_rounding_of_the_factors_is_forgiven():
    root = normal(0, "r", 1, 4, 2)
    matrix = root @ root.mT  # rank 2: two eigenvalues are rounding, here below zero
    shifted = matrix - 1e-12 * torch.eye(4, dtype=FLOAT64)
    factor = Factor.of(shifted, torch.ones(1, 4))
    assert torch.equal(factor.values[0, :2], torch.zeros(2, dtype=FLOAT64))
    close(factor.matrix, matrix, 1e-11)
    close(Factor.of(matrix.float(), torch.ones(1, 4)).matrix, matrix, 1e-5)


def test_rounding_of_the_smallest_numbers_is_rounding():
    tiny = torch.diag(torch.tensor([5e-324, -5e-324], dtype=FLOAT64))[None]
    assert Factor.of(tiny, torch.ones(1, 2)).values.flatten().tolist() == [0.0, 5e-324]


def test_factors_that_are_not_semidefinite_are_refused():
    good = torch.eye(2)[None]
    for bad, message in (
        (torch.diag(torch.tensor([1.0, -0.01]))[None], r"smallest eigenvalue is -0\.01"),
        (torch.full((1, 2, 2), float("nan")), "not finite"),
    ):
        for outer, inner in ((good, bad), (bad, good)):
            with pytest.raises(NotPositiveDefinite, match=message):
                Kronecker.of(outer, inner, torch.ones(4))
    with pytest.raises(NotPositiveDefinite, match=r"smallest eigenvalue is -2"):
        Kronecker.table(torch.tensor([1.0, -2.0]), good[0], torch.ones(4))


@pytest.mark.parametrize(
    "prior", [[1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 1.0, 0.0], [1.0, -1.0, 1.0, -1.0], [0.0, 1.0, 1.0, 1.0]]
)
def test_a_prior_that_is_no_outer_product_is_refused(prior):
    good = torch.eye(2)[None]
    message = r"positive and an outer product.*Diagonal or Full"
    with pytest.raises(ValueError, match=message):
        Kronecker.of(good, good, torch.tensor(prior))
    with pytest.raises(ValueError, match=message):
        Kronecker.of(good, good, torch.ones(4)).rescaled(1.0, torch.tensor(prior))


def test_negative_prior_precision_of_one_number_needs_enough_curvature():
    good = torch.eye(2, dtype=FLOAT64)[None]
    precision = Kronecker.of(good, good, torch.full((4,), -0.5))
    close(precision.variance(), torch.full((4,), 2.0, dtype=FLOAT64))
    with pytest.raises(NotPositiveDefinite, match=r"smallest eigenvalue is -0\.5"):
        precision.rescaled(1.0, torch.full((4,), -1.5))
    with pytest.raises(NotPositiveDefinite, match=r"smallest eigenvalue is -0\.5"):
        Kronecker.of(good, good, torch.full((4,), -0.5), factored_damping=True)


def test_corrected_eigenvalues_belong_to_their_basis():
    precision = kronecker(0, (), (1, 2, 2)).precision.corrected(torch.ones(1, 2, 2))
    with pytest.raises(ValueError, match=r"corrected eigenvalues belong to one basis"):
        precision.rescaled(1.0, torch.tensor([1.0, 2.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match="factored_damping needs the factors' own eigenvalues"):
        Kronecker(precision.outer, precision.inner, precision.prior, precision.values, factored_damping=True)
    with pytest.raises(ValueError, match=r"Kronecker\.prior must be a multiple"):
        Kronecker(precision.outer, precision.inner, torch.tensor([1.0, 2.0, 1.0, 2.0]))
    with pytest.raises(NotPositiveDefinite, match="smallest eigenvalue"):
        precision.corrected(torch.full((1, 2, 2), -100.0))


def test_products_of_eigenvalues_are_what_correction_starts_from():
    """The diagonal of B^T C B, computed from the curvature itself, corrects nothing where C is a product."""
    case = patterned(3, ())
    outer, inner = case.precision.outer, case.precision.inner
    basis = kron(outer.basis, inner.basis)
    values = (basis * ((case.curvature / 0.7) @ basis)).sum(0).view(2, 2, 3)
    close(case.precision.corrected(values).covariance(), torch.linalg.inv(case.matrix))


def test_factored_damping_has_derivatives_in_precisions_of_weights_and_bias():
    outer, inner = gram(0, "outer", 1, 3), gram(0, "inner", 1, 4)
    bias = torch.arange(12) % 4 == 3

    def logdet(both):
        first = Kronecker.of(outer, inner, torch.ones(12, dtype=FLOAT64), factored_damping=True)
        return first.rescaled(2.0, torch.where(bias, both[1], both[0])).logdet

    for point in ([1.0, 1.0], [0.5, 2.0]):
        both = torch.tensor(point, dtype=FLOAT64, requires_grad=True)
        (got,) = torch.autograd.grad(logdet(both), both)
        steps = 1e-5 * torch.eye(2, dtype=FLOAT64)
        with torch.no_grad():
            wanted = torch.stack([(logdet(both + step) - logdet(both - step)) / 2e-5 for step in steps])
        close(got, wanted, 1e-7)


def test_factored_damping_of_a_table_is_that_of_ritter():
    counts = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    factor = Key(21).normal((4, 2), torch.float64)
    inner, tau, scale = factor.T @ factor, 0.7, 5.0
    table = Kronecker.table(counts, inner, torch.full((6,), tau, dtype=torch.float64), scale, factored_damping=True)
    rows = scale**0.5 * torch.diag(counts) + tau**0.5 * torch.eye(3, dtype=torch.float64)
    columns = scale**0.5 * inner + tau**0.5 * torch.eye(2, dtype=torch.float64)
    wanted = torch.linalg.inv(torch.kron(rows, columns))
    torch.testing.assert_close(table.covariance(), wanted, rtol=1e-10, atol=1e-12)
