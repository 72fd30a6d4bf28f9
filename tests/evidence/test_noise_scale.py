"""The noise that fits expected squares of residuals."""

import math

import pytest
import torch
from scipy import optimize
from torch import nn

import posterity as po
from posterity.evidence import Expected, Gamma, NoiseScale
from posterity.likelihoods import Bernoulli, Gaussian, Likelihood, StudentT
from posterity.posteriors import Point

SQUARES = torch.tensor([3.0, 0.5, 7.0])
FOUND = Expected(torch.tensor([-10.0]), SQUARES, torch.tensor(12.5))  # rows of weights that sum to 12.5


def problem(likelihood: Likelihood, tempering: po.Tempering | None = None) -> po.Joint:
    tempering = po.Tempering.bayes() if tempering is None else tempering
    return po.Joint(nn.Linear(2, 3), likelihood, po.priors.Normal(), num_data=10, tempering=tempering)


def at(joint: po.Joint) -> Point:
    return Point(joint, torch.zeros(joint.num_weights))


def expected_log_likelihood(precision: float, squares: float, count: float) -> float:
    return 0.5 * count * math.log(precision / (2.0 * math.pi)) - 0.5 * precision * squares


@pytest.mark.parametrize("scale", [0.3, torch.tensor(2.0)])
@pytest.mark.parametrize("learn", [False, True])
def test_one_scale_is_the_mean_square_of_all_entries(scale: float | torch.Tensor, learn: bool) -> None:
    joint = problem(Gaussian(scale, learn=learn))
    after = NoiseScale()(joint, at(joint), FOUND)
    assert after.likelihood == Gaussian(math.sqrt(10.5 / 37.5))
    assert after.prior is joint.prior
    best = optimize.minimize_scalar(
        lambda u: -expected_log_likelihood(math.exp(u), 10.5, 37.5), options={"xtol": 1e-10}
    )
    assert after.likelihood.scale**-2 == pytest.approx(math.exp(best.x), rel=1e-6)


@pytest.mark.parametrize("scale", [(1.0, 2.0, 3.0), torch.ones(3)])
def test_one_scale_for_each_output(scale: tuple[float, ...] | torch.Tensor) -> None:
    joint = problem(Gaussian(scale))
    after = NoiseScale()(joint, at(joint), FOUND)
    expected = tuple(math.sqrt(each / 12.5) for each in SQUARES.tolist())
    assert after.likelihood.scale == pytest.approx(expected, rel=1e-7)
    with pytest.raises(ValueError, match=r"3 scales\. Got squares of 1"):
        NoiseScale()(joint, at(joint), FOUND._replace(squares=torch.ones(1)))


@pytest.mark.parametrize("scale", [0.3, (1.0, 2.0, 3.0)])
def test_a_hyper_prior_gives_the_maximum_of_the_whole_bound(scale: float | tuple[float, ...]) -> None:
    joint, step = problem(Gaussian(scale)), NoiseScale(Gamma(2.0, 0.7))

    def bound(scales: list[float]) -> float:
        there = problem(Gaussian(scales[0] if len(scales) == 1 else tuple(scales)))
        sums = [(10.5, 37.5)] if len(scales) == 1 else [(each, 12.5) for each in SQUARES.tolist()]
        fit = sum(expected_log_likelihood(s**-2, *each) for s, each in zip(scales, sums, strict=True))
        return fit + step.bound_terms(there, at(there), FOUND)

    found = step(joint, at(joint), FOUND).likelihood.scale
    found = list(found) if isinstance(found, tuple) else [found]
    for index in range(len(found)):
        for factor in (0.7, 0.99, 1.01, 1.4):
            moved = [each * (factor if place == index else 1.0) for place, each in enumerate(found)]
            assert bound(moved) < bound(found)
    squares, count = (10.5, 37.5) if len(found) == 1 else (3.0, 12.5)
    assert found[0] ** -2 == pytest.approx((2.0 + 0.5 * count) / (0.7 + 0.5 * squares), rel=1e-12)


def test_tempering_changes_the_weight_of_the_hyper_prior_in_the_bound_alone() -> None:
    step = NoiseScale(Gamma(2.0, 0.7))
    plain, tempered = problem(Gaussian(0.3)), problem(Gaussian(0.3), po.Tempering.tempered(0.25))
    assert step(tempered, at(tempered), FOUND).likelihood == step(plain, at(plain), FOUND).likelihood
    terms = step.bound_terms(plain, at(plain), FOUND)
    assert step.bound_terms(tempered, at(tempered), FOUND) == pytest.approx(4.0 * terms, rel=1e-12)
    assert NoiseScale().bound_terms(plain, at(plain)) == 0.0


def test_what_has_no_closed_form_is_refused() -> None:
    for likelihood in (Bernoulli(), StudentT(4.0)):
        joint = problem(likelihood)
        with pytest.raises(ValueError, match="NoiseScale is for a Gaussian likelihood"):
            NoiseScale()(joint, at(joint), FOUND)
    joint = problem(Gaussian(1.0, learn=True, log_scale_prior=(0.0, 1.0)))
    with pytest.raises(ValueError, match="hyper_prior=Gamma"):
        NoiseScale()(joint, at(joint), FOUND)
    joint = problem(Gaussian(torch.ones(2, 1, 3)))
    with pytest.raises(ValueError, match="noise of 2 members"):
        NoiseScale()(joint, at(problem(Gaussian())), FOUND)
    joint = problem(Gaussian())
    with pytest.raises(ValueError, match="expected squares"):
        NoiseScale()(joint, at(joint), None)
    with pytest.raises(ValueError, match="expected squares"):
        NoiseScale(Gamma(1.0, 1.0)).bound_terms(joint, at(joint))
    exact = FOUND._replace(squares=torch.zeros(3))
    with pytest.raises(ValueError, match="must have positive squares"):
        NoiseScale()(joint, at(joint), exact)
    assert NoiseScale(Gamma(1.0, 1.0))(joint, at(joint), exact).likelihood.scale > 0.0
    with pytest.raises(TypeError, match=r"NoiseScale\.hyper_prior must be of kind Gamma"):
        NoiseScale(3.0)  # type: ignore[arg-type]
