"""Student-t noise against scipy and its limits."""

import math

import pytest
import torch
from scipy import stats

from posterity.likelihoods import Gaussian, StudentT
from posterity.numerics.random import Key

DEGREES = [0.3, 1.0, 2.5, 4.0, 30.0, 1e4]


@pytest.mark.cpu
@pytest.mark.parametrize("degrees", DEGREES)
def test_log_prob_and_cdf_are_those_of_scipy(degrees: float) -> None:
    z = torch.cat([-torch.logspace(-3, 6, 40).flip(0), torch.zeros(1), torch.logspace(-3, 6, 40)]).double()
    outputs, targets = torch.full_like(z, 0.5), 0.5 + 1.7 * z
    likelihood = StudentT(degrees, 1.7)
    density = torch.from_numpy(stats.t(degrees, 0.5, 1.7).logpdf(targets.numpy()))
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), density, rtol=1e-11, atol=1e-11)
    below = torch.from_numpy(stats.t(degrees, 0.5, 1.7).cdf(targets.numpy()))
    torch.testing.assert_close(likelihood.cdf(outputs, targets), below, rtol=1e-9, atol=1e-13)


def test_cdf_at_the_ends_and_of_nan() -> None:
    value = StudentT(3.0).cdf(torch.zeros(4), torch.tensor([-torch.inf, 0.0, torch.inf, torch.nan]))
    assert value[:3].tolist() == [0.0, 0.5, 1.0]
    assert value[3].isnan()


def test_many_degrees_are_gaussian() -> None:
    outputs, targets = torch.zeros(5, 1).double(), torch.linspace(-3, 3, 5).double().unsqueeze(1)
    near, limit = StudentT(1e8, 0.6), Gaussian(0.6)
    for function in ("log_prob", "output_hessian", "cdf"):
        torch.testing.assert_close(
            getattr(near, function)(outputs, targets), getattr(limit, function)(outputs, targets), rtol=0, atol=1e-5
        )


def test_an_outlier_pulls_less_than_under_a_gaussian() -> None:
    outputs = torch.zeros(1, 1, requires_grad=True)
    pulls = []
    for target in (1.0, 10.0, 100.0):
        (grad,) = torch.autograd.grad(StudentT(4.0).log_prob(outputs, torch.tensor([[target]])).sum(), outputs)
        pulls.append(float(grad))
    assert pulls == pytest.approx([5.0 / 5.0, 50.0 / 104.0, 500.0 / 10004.0])
    hessian = StudentT(4.0).output_hessian(torch.zeros(2, 1), torch.tensor([[1.9], [2.1]])).reshape(2)
    assert float(hessian[0]) > 0.0 > float(hessian[1])  # it changes sign at scale sqrt(degrees)


def test_fisher_is_smaller_than_under_a_gaussian_of_the_same_scale() -> None:
    assert float(StudentT(4.0, 0.5).output_fisher(torch.zeros(1, 1))) == pytest.approx(5.0 / 7.0 * 4.0)


def test_moments_where_there_are_none() -> None:
    outputs = torch.tensor([[1.0]])
    assert StudentT(3.0, 2.0).variance(outputs).item() == pytest.approx(12.0)
    assert StudentT(2.0).variance(outputs).item() == math.inf
    assert StudentT(0.5).mean(outputs).item() == 1.0


@pytest.mark.parametrize("degrees", [0.7, 3.0, 50.0])
def test_samples_follow_the_cdf(degrees: float) -> None:
    size = 20_000
    outputs = torch.full((size,), 2.0, dtype=torch.float64)
    likelihood = StudentT(degrees, 0.3)
    below = likelihood.cdf(outputs, likelihood.sample(outputs, Key(0)))
    for p in (0.001, 0.1, 0.5, 0.95):
        assert abs(float((below <= p).double().mean()) - p) <= 5.0 * (p * (1 - p) / size) ** 0.5


@pytest.mark.parametrize("degrees", [0.0, -1.0, math.inf, math.nan, "4", torch.tensor([1.0, 2.0])])
def test_bad_degrees_are_refused(degrees: object) -> None:
    with pytest.raises(ValueError, match=r"StudentT\.degrees must be a positive number"):
        StudentT(degrees)


def test_the_scale_is_checked_as_that_of_a_gaussian() -> None:
    with pytest.raises(ValueError, match=r"StudentT\.scale\[1\] must be a positive number"):
        StudentT(4.0, (1.0, 0.0))
    with pytest.raises(ValueError, match="Give learn=True"):
        StudentT(4.0, log_scale_prior=(0.0, 1.0))


def test_degrees_stay_when_the_scale_is_fitted() -> None:
    learnt = StudentT(7, 0.5, learn=True)
    assert learnt.fixed(torch.zeros(1)) == StudentT(7.0, 1.0)
    assert learnt.with_free(torch.zeros(1)).degrees == 7.0
    assert learnt.fixed(torch.zeros(3, 1)).member(2) == StudentT(7.0, 1.0)


def test_equality_is_by_kind_and_content() -> None:
    assert StudentT(4) == StudentT(4.0)
    assert StudentT(4.0) != StudentT(5.0)
    assert StudentT(4.0) != Gaussian(1.0)
    assert len({StudentT(4.0), StudentT(4.0, torch.tensor(1.0)), Gaussian(1.0)}) == 2
    like = torch.zeros(1)
    assert StudentT(4.0, 2.0, learn=True).free_from(Gaussian(5.0), like).item() == pytest.approx(math.log(2.0))
    assert StudentT(4.0, 2.0, learn=True).free_from(StudentT(9.0, 5.0), like).item() == pytest.approx(math.log(5.0))
