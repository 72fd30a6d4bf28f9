"""Structured precision matrices against explicit inverses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posterity.errors import NotPositiveDefinite
from posterity.numerics import Key
from posterity.precisions import Dense, Diagonal

LEADS = st.sampled_from([(), (2,), (3, 2)])


def random_case(kind, size, lead, seed, dtype=torch.float64):
    """A precision of the kind, and the dense matrix it stands for."""
    key = Key(seed)
    if kind is Diagonal:
        entries = key.uniform((*lead, size), dtype).to(torch.get_default_device()) * 3 + 0.1
        return Diagonal(entries), torch.diag_embed(entries.double())
    factor = key.normal((*lead, size, size), torch.float64).to(torch.get_default_device())
    matrix = factor @ factor.transpose(-2, -1) + 0.5 * torch.eye(size, dtype=torch.float64)
    matrix = (0.5 * (matrix + matrix.transpose(-2, -1))).to(dtype)
    return Dense(matrix), matrix.double()


@pytest.mark.parametrize("kind", [Dense, Diagonal])
@given(st.integers(1, 6), LEADS, st.integers(0, 10**6), st.sampled_from([torch.float64, torch.float32]))
@settings(deadline=None, max_examples=40)
def test_against_the_explicit_inverse(kind, size, lead, seed, dtype):
    precision, matrix = random_case(kind, size, lead, seed, dtype)
    inverse = torch.linalg.inv(matrix)
    close = torch.testing.assert_close
    vector = Key(seed).fold("v").normal((*lead, size), dtype).to(matrix.device)
    assert precision.size == size
    close(precision.logdet, torch.logdet(matrix), rtol=1e-9, atol=1e-9)
    close(precision.matvec(vector), (matrix @ vector.double().unsqueeze(-1)).squeeze(-1), rtol=1e-9, atol=1e-9)
    close(precision.solve(vector), (inverse @ vector.double().unsqueeze(-1)).squeeze(-1), rtol=1e-8, atol=1e-8)
    close(precision.covariance(), inverse, rtol=1e-8, atol=1e-8)
    close(precision.variance(), inverse.diagonal(dim1=-2, dim2=-1), rtol=1e-8, atol=1e-8)
    assert torch.equal(precision.covariance(), precision.covariance().transpose(-2, -1))
    jacobian = Key(seed).fold("j").normal((4, 3, size), dtype).to(matrix.device).double()
    wanted = jacobian @ inverse[..., None, :, :] @ jacobian.transpose(-2, -1)
    close(precision.quadratic(jacobian), wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", [Dense, Diagonal])
@given(st.integers(1, 6), LEADS, st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_coloured_noise_has_exactly_the_covariance(kind, size, lead, seed):
    precision, matrix = random_case(kind, size, lead, seed)
    basis = precision.colour(torch.eye(size, dtype=torch.float64))  # row s is A e_s, so rows^T rows = A A^T
    torch.testing.assert_close(basis.transpose(-2, -1) @ basis, torch.linalg.inv(matrix), rtol=1e-8, atol=1e-8)
    noise = Key(seed).normal((*lead, 5, size), torch.float64).to(matrix.device)
    draws = precision.colour(noise)
    assert draws.shape == noise.shape
    white = (draws * (matrix @ draws.transpose(-2, -1)).transpose(-2, -1)).sum(-1)
    torch.testing.assert_close(white, noise.square().sum(-1), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", [Dense, Diagonal])
def test_members_are_the_single_matrices(kind):
    precision, matrix = random_case(kind, 4, (3,), 0)
    vector = Key(1).normal((3, 4), torch.float64).to(matrix.device)
    noise = Key(2).normal((5, 4), torch.float64).to(matrix.device)
    jacobian = Key(3).normal((6, 2, 4), torch.float64).to(matrix.device)
    for index in range(3):
        one = precision.member(index)
        assert type(one) is kind
        for mine, all_ in (
            (one.logdet, precision.logdet),
            (one.solve(vector[index]), precision.solve(vector)),
            (one.matvec(vector[index]), precision.matvec(vector)),
            (one.colour(noise), precision.colour(noise)),
            (one.variance(), precision.variance()),
            (one.quadratic(jacobian), precision.quadratic(jacobian)),
        ):
            torch.testing.assert_close(mine, all_[index], rtol=1e-12, atol=1e-12)


def test_everything_is_in_float64():
    for precision in (Dense(torch.eye(2)), Diagonal(torch.ones(2))):
        ones = torch.ones(2)
        results = [precision.logdet, precision.matvec(ones), precision.solve(ones), precision.colour(torch.ones(3, 2))]
        results += [precision.variance(), precision.covariance(), precision.quadratic(torch.ones(1, 1, 2))]
        assert {result.dtype for result in results} == {torch.float64}


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1.0, 2.0], [2.0, 1.0]], "smallest eigenvalue is -1"),
        ([[1.0, 1.0], [1.0, 1.0]], "not positive definite"),
        ([[1.0, 0.0], [0.0, float("nan")]], "not finite"),
        ([[float("inf"), 0.0], [0.0, 1.0]], "not finite"),
    ],
)
def test_dense_refuses_what_is_not_positive_definite(matrix, message):
    with pytest.raises(NotPositiveDefinite, match=message):
        Dense(torch.tensor(matrix))
    one_bad = torch.stack([torch.eye(2), torch.tensor(matrix)])
    with pytest.raises(NotPositiveDefinite, match=message):
        Dense(one_bad)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([1.0, 0.0], r"not positive \(smallest 0\)"),
        ([1.0, -2.0], r"smallest -2"),
        ([1.0, float("nan")], "not finite"),
        ([1.0, float("inf")], "not finite"),
    ],
)
def test_diagonal_refuses_what_is_not_positive(entries, message):
    with pytest.raises(NotPositiveDefinite, match=message):
        Diagonal(torch.tensor(entries))


def test_the_matrix_given_is_not_changed():
    matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    copy = matrix.clone()
    precision = Dense(matrix)
    precision.covariance(), precision.solve(torch.ones(2)), precision.colour(torch.ones(1, 2))
    assert torch.equal(matrix, copy)


@pytest.mark.parametrize("kind", [Dense, Diagonal])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_have_the_covariance_in_the_number_type_asked_for(kind, dtype):
    precision, matrix = random_case(kind, 3, (), 5)
    count, like = 20_000, torch.empty(0, dtype=dtype)
    draws = precision.draws(count, Key(1), like)
    assert draws.dtype == dtype
    white = draws.double() @ torch.linalg.cholesky(matrix)  # standard normal numbers
    assert float(white.mean(0).abs().max()) < 5 / count**0.5
    products = white.T @ white / count - torch.eye(3, dtype=torch.float64)
    assert float(products.abs().max()) < 5 * (2 / count) ** 0.5
    assert not torch.equal(draws, precision.draws(count, Key(2), like))


def test_a_diagonal_draws_alike_in_all_number_types():
    precision, _ = random_case(Diagonal, 4, (), 5)
    kinds = [torch.float32, torch.float64, torch.bfloat16]
    single, double, half = (precision.draws(6, Key(1), torch.empty(0, dtype=kind)) for kind in kinds)
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(half.double(), double, rtol=2e-2, atol=1e-2)
    assert not torch.equal(precision.draws(6, Key(2), single), single)
