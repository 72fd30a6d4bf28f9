"""Student-t, Cauchy, logistic, scale mixture: independent weights with a cross-entropy by quadrature."""

import math

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posterity.numerics.random import Key
from posterity.priors import Cauchy, Horseshoe, Logistic, Normal, ScaleMixture, StudentT
from posterity.priors.independent import Independent

GOLD = load("kl_gaussian_heavy_tailed")
PARAMETERS = GOLD.inputs["priors"]
PRIORS: dict[str, Independent] = {
    "student_t": StudentT(PARAMETERS["student_t"]["df"], PARAMETERS["student_t"]["scale"]),
    "cauchy": Cauchy(PARAMETERS["cauchy"]["scale"]),
    "logistic": Logistic(PARAMETERS["logistic"]["scale"]),
    "scale_mixture": ScaleMixture(
        (PARAMETERS["scale_mixture"]["pi"], 1.0 - PARAMETERS["scale_mixture"]["pi"]),
        (PARAMETERS["scale_mixture"]["s1"], PARAMETERS["scale_mixture"]["s2"]),
    ),
}

numbers = st.floats(-5.0, 5.0)
scales = st.floats(0.05, 20.0)
every_prior = pytest.mark.parametrize("name", PRIORS)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@every_prior
def test_gold_kl(name: str) -> None:
    mean, scale = (part.unsqueeze(-1) for part in GOLD.inputs["mu_sigma"].unbind(-1))  # four members of one weight
    GOLD.check(f"{name}.kl", PRIORS[name].kl(mean, scale))


@given(st.sampled_from(sorted(PRIORS)), numbers, scales, st.floats(0.1, 10.0))
@settings(deadline=None, max_examples=60)
def test_kl_is_positive_and_free_of_units(name: str, mean: float, scale: float, unit: float) -> None:
    prior = PRIORS[name]
    kl = prior.kl(column(mean), column(scale))
    rescaled = type(prior)(**{**vars(prior), "scale": prior.scale * unit})
    torch.testing.assert_close(rescaled.kl(column(mean * unit), column(scale * unit)), kl, rtol=1e-9, atol=1e-9)
    assert float(kl) > 0.0


@given(st.lists(numbers, min_size=1, max_size=6), st.floats(0.3, 50.0), scales)
@settings(deadline=None, max_examples=40)
def test_student_t_equals_torch(values: list[float], degrees: float, scale: float) -> None:
    theta = column(*values)
    expected = torch.distributions.StudentT(column(degrees), column(0.0), column(scale)).log_prob(theta).sum()
    torch.testing.assert_close(StudentT(degrees, scale).log_prob(theta), expected, rtol=1e-9, atol=1e-9)


def test_student_t_has_its_limits() -> None:
    theta, scale = column(0.3, -1.2, 4.0), column(0.2, 1.0, 3.0)
    for method in ("log_prob", "precision"):
        torch.testing.assert_close(getattr(StudentT(1.0, 0.7), method)(theta), getattr(Cauchy(0.7), method)(theta))
        wide, normal = getattr(StudentT(1e9, 0.7), method)(theta), getattr(Normal(0.7), method)(theta)
        torch.testing.assert_close(wide, normal, rtol=1e-6, atol=1e-6)
    for prior, limit in ((StudentT(1.0, 0.7), Cauchy(0.7)), (StudentT(1e9, 0.7), Normal(0.7))):
        torch.testing.assert_close(
            prior.cross_entropy(theta, scale), limit.cross_entropy(theta, scale), rtol=1e-6, atol=0.0
        )


@pytest.mark.parametrize(
    ("degrees", "variance"), [(0.5, math.nan), (1.0, math.nan), (1.5, math.inf), (2.0, math.inf), (4.0, 2.0 * 0.25)]
)
def test_student_t_says_when_there_is_no_variance(degrees: float, variance: float) -> None:
    value = StudentT(degrees, 0.5).variance(torch.zeros(1)).item()
    assert value == pytest.approx(variance, nan_ok=True)


@pytest.mark.parametrize("prior", [Cauchy(0.4), Horseshoe(0.4)], ids=str)
def test_no_variance_where_there_is_no_mean(prior: Independent) -> None:
    assert prior.variance(torch.zeros(2)).isnan().all()


@pytest.mark.parametrize("prior", [StudentT(2.5, 0.7), StudentT(0.8, 0.7), Cauchy(0.4), Logistic(0.3)], ids=str)
def test_draws_have_the_quantiles_of_the_density(prior: Independent) -> None:
    # Counts below fixed points are binomial, whatever the tails.
    draws = prior.sample((100_000,), Key(3), torch.zeros(1).double())
    for point in (-3.0, -0.2, 0.0, 0.5, 2.0, 10.0):
        grid = torch.linspace(-60.0, math.asinh(point), 20_001, dtype=torch.float64)
        density = prior.log_prob(grid.sinh().unsqueeze(-1)).exp() * grid.cosh()
        chance = min(float(torch.trapezoid(density, grid)), 1.0)
        spread = math.sqrt(chance * (1.0 - chance) / len(draws))
        assert abs(float((draws < point).double().mean()) - chance) <= 5.0 * spread + 1e-5


def test_logistic_is_precise_far_out() -> None:
    # log p0(x) = -|x| - 2 log(1 + e^-|x|): beyond 20 a thresholded softplus would be off by 4e-9.
    theta = column(0.0, 21.0, -700.0)
    expected = -theta.abs() - 2.0 * torch.log1p(torch.exp(-theta.abs()))
    torch.testing.assert_close(Logistic().log_prob(theta.unsqueeze(-1)), expected, rtol=1e-15, atol=1e-15)
    assert Logistic(2.0).precision(torch.zeros(1)).item() == pytest.approx(0.5 / 4.0)


@given(st.lists(numbers, min_size=1, max_size=4), scales, scales)
@settings(deadline=None, max_examples=40)
def test_mixture_of_one_or_of_equals_is_normal(values: list[float], scale: float, own: float) -> None:
    theta = column(*values)
    for mixture in (
        ScaleMixture((1.0,), (own,)),
        ScaleMixture((0.25, 0.75), (own, own)),
        ScaleMixture((1.0,), (1.0,), own),
    ):
        normal = Normal(own)
        torch.testing.assert_close(mixture.log_prob(theta), normal.log_prob(theta), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(mixture.precision(theta), normal.precision(theta), rtol=1e-9, atol=1e-9)
        expected = normal.cross_entropy(theta, torch.full_like(theta, scale))
        torch.testing.assert_close(
            mixture.cross_entropy(theta, torch.full_like(theta, scale)), expected, rtol=1e-9, atol=1e-9
        )


def test_mixture_weights_belong_to_their_scales() -> None:
    prior = ScaleMixture((0.9, 0.1), (0.1, 3.0))
    draws = prior.sample((100_000,), Key(4), torch.zeros(1).double())
    wide = (draws.abs() > 0.6).double().mean()  # six deviations of the narrow one
    expected = 0.1 * math.erfc(0.6 / 3.0 / math.sqrt(2.0))
    assert abs(float(wide) - expected) <= 5.0 * math.sqrt(expected / len(draws))


@pytest.mark.parametrize("narrow", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (0.3, 0.01), (2.0, 30.0)])
def test_mixture_with_a_narrow_spike(narrow: float, mean: float, scale: float) -> None:
    # By halves: the sum over the nodes of an independent rule, fine enough for the spike on either side of zero.
    prior = ScaleMixture((0.5, 0.5), (1.0, narrow))
    grid = torch.linspace(-40.0, 8.0, 40_001, dtype=torch.float64)
    weights = torch.cat([-grid.exp(), grid.exp()])
    density = torch.exp(-0.5 * ((weights - mean) / scale).square()) / (math.sqrt(2.0 * math.pi) * scale)
    lengths = weights.abs() * (grid[1] - grid[0])
    expected = -(density * lengths * prior.log_prob(weights.unsqueeze(-1))).sum()
    assert float(prior.cross_entropy(column(mean), column(scale))) == pytest.approx(float(expected), rel=1e-7)


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e8])
@every_prior
def test_cross_entropy_of_extreme_widths_is_finite(name: str, scale: float) -> None:
    mean, deviation = column(0.7).requires_grad_(), column(scale).requires_grad_()
    value = PRIORS[name].cross_entropy(mean, deviation)
    grads = torch.autograd.grad(value.sum(), (mean, deviation))
    assert all(torch.isfinite(tensor).all() for tensor in (value, *grads))
    if scale < 1e-3:
        torch.testing.assert_close(value, -PRIORS[name].log_prob(mean), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grads[0], -PRIORS[name].value_and_grad(mean)[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StudentT(0.0), r"StudentT\.degrees must be a positive number\. Got 0\.0"),
        (lambda: StudentT(3.0, -1.0), r"StudentT\.scale must be a positive number .*Got -1\.0"),
        (lambda: Cauchy(math.inf), r"Cauchy\.scale must be .*Got inf"),
        (lambda: Logistic("1"), r"Logistic\.scale must be .*Got '1'"),
        (lambda: Horseshoe(torch.zeros(2)), r"Horseshoe\.scale must be .*Got tensor\(2,\) \[0\.0, 0\.0\]"),
        (
            lambda: ScaleMixture((0.5, 0.6), (1.0, 2.0)),
            r"weights must sum to 1\. Got \(0\.5, 0\.6\), which sum to 1\.1",
        ),
        (lambda: ScaleMixture((1.0,), (1.0, 2.0)), r"Got 1 weights and 2 scales"),
        (lambda: ScaleMixture((), ()), r"ScaleMixture\.weights must be a tuple.*Got \(\)"),
        (
            lambda: ScaleMixture((0.5, 0.5), (1.0, 0.0)),
            r"ScaleMixture\.scales\[1\] must be a positive number\. Got 0\.0",
        ),
        (lambda: ScaleMixture(0.5, (1.0, 2.0)), r"ScaleMixture\.weights must be a tuple.*Got 0\.5"),
    ],
)
def test_refuses_bad_arguments(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
