"""Where the prior of a penalty is in doubt: families with edges and kinks, tails, numbers beyond all, bad input."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from posterity.penalties import (
    L1,
    Dirac,
    Function,
    Gaussian,
    GroupLasso,
    Sum,
    Translation,
    from_prior,
    layer_factors,
    to_prior,
)
from posterity.penalties.families import halved, panel_rule, panelled
from posterity.priors import Horseshoe, Laplace, Normal, StudentT, Tabulated

UNIFORM = Translation(torch.ones_like, -1.0, 1.0, scale=0.3)
TRIANGLE = Translation(lambda z: (1.0 - z.abs()).clamp_min(0.0), -1.0, 1.0, scale=0.3)
LAPLACE = Translation(lambda z: torch.exp(-z.abs()), scale=0.3)
GAMMA = Translation(lambda z: z * torch.exp(-z), 0.0, 40.0, scale=0.3)
GUMBEL = Translation(lambda z: torch.exp(-z - torch.exp(-z)), -5.0, 38.0, scale=0.4)
EXPONENTIAL = Translation(lambda z: torch.exp(-z - 1.0), -1.0, 36.0, scale=0.5)


def of_means(r: Callable[[Tensor], Tensor], name: str = "r") -> Function:
    return Function(lambda mu, nu: r(mu), name)


def log_cosh(mu: Tensor) -> Tensor:
    return 2.0 * (mu.abs() + torch.log1p(torch.exp(-2.0 * mu.abs())))


def huber(mu: Tensor) -> Tensor:
    return 3.0 * torch.nn.functional.huber_loss(mu, torch.zeros_like(mu), reduction="none")


@pytest.mark.parametrize("reach", [2.0, 3.0, 4.0, 5.0, 8.0])
def test_a_kink_under_a_density_with_an_edge_is_not_known(reach: float) -> None:
    # E g(mu + X) = |mu| for a staircase g, and for many others beside it.
    verdict = to_prior(of_means(torch.abs), UNIFORM, reach=reach)
    assert not verdict.satisfies_star
    assert not verdict.decided
    assert "not known" in verdict.explanation


@pytest.mark.parametrize("reach", [3.0, 4.0, 6.5])
@pytest.mark.parametrize(
    ("family", "penalty"),
    [
        (TRIANGLE, lambda mu: mu.abs() ** 1.5),  # waves that leave no trace
        (TRIANGLE, huber),
        (LAPLACE, lambda mu: mu.abs() ** 1.5),  # by (1 - s^2 d^2) a pole in log alpha, which does not integrate
        (GAMMA, torch.abs),
        (LAPLACE, torch.abs),  # a spike without end
        (GUMBEL, lambda mu: mu.abs() ** 3),  # less smooth than this family makes it
    ],
)
def test_what_hardly_smooths_does_not_decide(
    family: Translation, penalty: Callable[[Tensor], Tensor], reach: float
) -> None:
    verdict = to_prior(of_means(penalty), family, reach=reach)
    assert not verdict.satisfies_star
    assert not verdict.decided


def test_many_knots_do_not_make_a_prior() -> None:
    narrow = Translation(lambda z: torch.exp(-z.abs()), scale=0.1)
    assert not to_prior(of_means(torch.abs), narrow).satisfies_star


@pytest.mark.parametrize("family", [UNIFORM, TRIANGLE, LAPLACE, GAMMA, GUMBEL, EXPONENTIAL])
def test_smooth_penalties_have_one_prior_at_every_reach(family: Translation) -> None:
    short, long = (to_prior(of_means(log_cosh), family, reach=reach) for reach in (4.0, 8.0))
    assert short.satisfies_star
    assert long.satisfies_star
    assert pytest.approx(long.K, abs=1e-3) == short.K
    assert short.prior.standard_variance == pytest.approx(long.prior.standard_variance, rel=1e-3)


@pytest.mark.parametrize("family", [LAPLACE, GAMMA, GUMBEL, EXPONENTIAL])
@pytest.mark.parametrize("prior", [Laplace(0.5), StudentT(3.0, 1.0)])
def test_the_kl_to_a_prior_is_still_one(family: Translation, prior: Laplace) -> None:
    verdict = to_prior(Function(from_prior(prior, family).each, "a KL"), family)
    assert verdict.satisfies_star
    t = torch.tensor([-2.0, -0.8, 1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(verdict.log_alpha(t), prior.log_prob(t.unsqueeze(-1)), rtol=0.0, atol=5e-3)


def test_a_jump_of_the_log_density_is_found_by_its_formula() -> None:
    # For this family log alpha is -(1 - s^2 d^2) r, up to its constant.
    verdict = to_prior(of_means(huber), LAPLACE)
    assert verdict.satisfies_star
    t = torch.tensor([0.0, 0.4, -0.7, 1.5, 2.5], dtype=torch.float64)
    wanted = 0.09 * 3.0 * (t.abs() < 1.0) - huber(t)
    found = verdict.log_alpha(t)
    torch.testing.assert_close(found - found[0], wanted - wanted[0], rtol=0.0, atol=0.02)


@pytest.mark.parametrize(
    ("family", "penalty", "reach"),
    [
        (LAPLACE, huber, 4.0),
        (TRIANGLE, log_cosh, 4.0),
        (EXPONENTIAL, huber, 8.0),
        (Gaussian(0.3), log_cosh, 4.0),
        (UNIFORM, lambda mu: (1.0 + mu.square()).log() * 2.0, 4.0),
    ],
)
def test_log_alpha_is_the_density_of_the_prior(
    family: Translation, penalty: Callable[[Tensor], Tensor], reach: float
) -> None:
    verdict = to_prior(of_means(penalty), family, reach=reach)
    assert isinstance(verdict.prior, Tabulated)
    t = 0.1 * torch.sinh(torch.linspace(-12.0, 12.0, 100_001, dtype=torch.float64))
    density = verdict.log_alpha(t).exp()
    assert float(torch.trapezoid(density, t)) == pytest.approx(1.0, abs=1e-3)
    torch.testing.assert_close(verdict.log_alpha(t), verdict.prior.log_prob(t.unsqueeze(-1)))


def test_log_alpha_is_normalised_where_its_table_is_not_given() -> None:
    verdict = to_prior(of_means(lambda mu: 1e-6 * log_cosh(mu)), Gaussian(0.3))
    assert verdict.satisfies_star
    assert verdict.prior is None
    t = torch.sinh(torch.linspace(-25.0, 25.0, 200_001, dtype=torch.float64))
    assert float(torch.trapezoid(verdict.log_alpha(t).exp(), t)) == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize(("power", "reach"), [(3.0, 20.0), (5.0, 10.0)])
def test_what_is_small_beside_a_long_reach_is_not_overlooked(power: float, reach: float) -> None:
    verdict = to_prior(of_means(lambda mu: mu.abs() ** power), Gaussian(0.3), reach=reach)
    assert not verdict.satisfies_star
    assert not verdict.decided


def test_tails_that_are_guessed_in_two_ways_are_not_known() -> None:
    verdict = to_prior(of_means(lambda mu: 0.3 * mu * torch.cos(3.0 * mu) + 0.1 * mu.square()), Gaussian(0.3))
    assert not verdict.satisfies_star
    assert not verdict.decided
    assert "tails are not seen" in verdict.explanation


@pytest.mark.parametrize(
    ("density", "lowest", "highest", "second", "fourth", "entropy"),
    [
        (lambda z: torch.exp(-z.abs()), -40.0, 40.0, 2.0, 24.0, 1.0 + math.log(2.0)),
        (lambda z: torch.exp(-(z - 0.3).abs()), -40.0, 40.0, 2.09, 24.0 + 6.0 * 2.0 * 0.09 + 0.3**4, 1.0 + math.log(2)),
        (lambda z: (1.0 - z.abs()).clamp_min(0.0), -3.0, 3.3, 1.0 / 6.0, 1.0 / 15.0, 0.5),
        (lambda z: (1.0 - z.square()).clamp_min(0.0).sqrt(), -1.0, 1.0, 0.25, 0.125, math.log(math.pi) - 0.5),
        (lambda z: z * torch.exp(-z), 0.0, 60.0, 6.0, 120.0, 1.5772156649015329),
        (lambda z: torch.exp(-0.5 * z.square()), -1e3, 1e3, 1.0, 3.0, 0.5 * math.log(2.0 * math.pi * math.e)),
        (lambda z: z.abs() <= 1.0, -1.0, 1.0, 1.0 / 3.0, 0.2, math.log(2.0)),
    ],
)
def test_densities_with_kinks_are_integrated_to_the_last_digits(
    density: Callable[[Tensor], Tensor], lowest: float, highest: float, second: float, fourth: float, entropy: float
) -> None:
    family = Translation(density, lowest, highest)
    assert family.moments(1.0, 4)[2] == pytest.approx(second, rel=1e-11)
    assert family.moments(1.0, 4)[4] == pytest.approx(fourth, rel=1e-11)
    assert family.entropy(1.0) == pytest.approx(entropy, abs=1e-11)
    points, weights = family.finer_nodes(1.0)
    assert float(weights @ points.square()) == pytest.approx(second, rel=1e-11)


def test_the_default_limits_hold_a_laplace_density() -> None:
    assert Translation(lambda z: torch.exp(-z.abs())).moments(1.0, 4)[4] == pytest.approx(24.0, rel=1e-9)


def test_the_kl_of_a_laplace_family_is_the_polynomial_that_was_asked_for() -> None:
    family = Translation(lambda z: torch.exp(-z.abs()), -40.0, 40.0, scale=0.5)
    verdict = to_prior(of_means(lambda mu: mu**4 + mu**3), family)
    assert verdict.residual < 1e-10
    mu = torch.linspace(-2.0, 2.0, 9, dtype=torch.float64, device="cpu")
    points, weights = panel_rule(torch.linspace(0.0, 40.0, 400, dtype=torch.float64, device="cpu"))
    sides = [verdict.log_alpha(mu.unsqueeze(-1) + sign * 0.5 * points) for sign in (-1.0, 1.0)]
    kl = -(1.0 + math.log(2.0 * 0.5)) - 0.5 * (sides[0] + sides[1]) @ (weights * torch.exp(-points))
    torch.testing.assert_close(kl + verdict.K, mu**4 + mu**3, rtol=0.0, atol=1e-9)


def test_a_density_without_known_integrals_is_refused() -> None:
    with pytest.raises(ValueError, match=r"smooth but for a few kinks.*known to 1e-05 .*standard_moments"):
        Translation(lambda z: torch.exp(-z.abs()) * (1.0 + 1e-4 * torch.sin(1e7 * z)), -20.0, 20.0)


def test_panels_are_narrow_at_kinks_and_can_be_halved() -> None:
    edges = panelled(lambda z: torch.exp(-(z - 0.3).abs()), -20.0, 20.0)
    assert bool((edges == 0.0).any())
    assert float(edges.diff().min()) < 1e-5
    assert abs(float(edges[edges.diff().argmin()]) - 0.3) < 1e-4
    assert len(halved(edges)) == 2 * len(edges) - 1


@pytest.mark.parametrize(
    ("power", "moments"), [(4, (1.0, 0.0, 1.0, 0.0, 3.0)), (6, (1.0, 0.0, 1.0, 0.0, 3.0, 0.0, 15.0))]
)
def test_moments_alone_give_the_prior_of_a_polynomial(power: int, moments: tuple[float, ...]) -> None:
    entropy = Gaussian(1.0).entropy(1.0)
    by_moments = Translation(standard_moments=moments, standard_entropy=entropy)
    found, wanted = (to_prior(of_means(lambda mu: mu**power), family) for family in (by_moments, Gaussian(1.0)))
    assert found.satisfies_star
    assert pytest.approx(wanted.K, abs=1e-9) == found.K
    assert found.prior.standard_variance == pytest.approx(wanted.prior.standard_variance, rel=1e-9)


def test_a_density_that_is_infinite_at_its_mode_comes_back_by_points() -> None:
    verdict = to_prior(from_prior(Horseshoe(0.3), Dirac()), Dirac())
    assert (verdict.K, verdict.kappa, verdict.prior) == (0.0, 1.0, Horseshoe(0.3))
    assert to_prior(from_prior(Normal(0.5), Gaussian()), Dirac()).prior == Normal(0.5)


def test_a_density_that_is_infinite_at_its_mode_has_no_power_in_a_table() -> None:
    with pytest.raises(ValueError, match=r"^Horseshoe: exp\(-r\) is infinite at 0, and no table"):
        to_prior(Sum((from_prior(Horseshoe(0.3), Dirac()),), (2.0,)), Dirac())


def test_waves_beyond_all_numbers_are_not_denied() -> None:
    verdict = to_prior(of_means(lambda mu: mu.square() + 0.3 * torch.cos(5.0 * mu)), Gaussian(1.0))
    assert not verdict.satisfies_star
    assert not verdict.decided
    assert "overflows" in verdict.explanation


def test_a_fit_says_how_close_it_is() -> None:
    # sqrt(1 + mu^2) has poles at +-i, which no KL of Gaussians has.
    verdict = to_prior(of_means(lambda mu: (1.0 + mu.square()).sqrt()), Gaussian(0.3))
    assert verdict.explanation.startswith(f"To within {verdict.residual:.1g} the penalty is its KL")
    assert "whether there is one to the last digit is not known" in verdict.explanation
    assert f"is a prior, to within {verdict.residual:.1g} (spline)" in str(verdict)
    assert "To within" not in to_prior(of_means(torch.square), Gaussian(0.3)).explanation


def test_a_sum_over_groups_and_weights_has_no_factor_and_says_why() -> None:
    with pytest.raises(ValueError, match=r"^Sum: no prior of this library .* groups differ"):
        layer_factors(nn.Linear(3, 2), Sum((GroupLasso(), L1())))


def test_a_penalty_with_two_wells_has_no_factor_and_says_why() -> None:
    wells = of_means(lambda w: w**4 + 0.3 * torch.cos(2.0 * w))
    with pytest.raises(ValueError, match=r"lowest, which is at more than one place, and their variance stays at 0\.25"):
        wells.factor(0.04, (1, 1))


def test_counts_are_numbers_and_complex_ones_are_refused() -> None:
    count = Function(lambda mu, nu: mu != 0.0, "(w != 0)")
    assert float(count(torch.tensor([[0.0, 2.0, -1.0]]))) == 2.0
    assert to_prior(count, Dirac()).kappa == math.inf
    with pytest.raises(ValueError, match=r"must give real numbers\. Got torch\.complex"):
        to_prior(Function(lambda mu, nu: mu + 1j), Dirac())


def test_a_factor_of_one_is_not_written() -> None:
    assert "r(mu, sigma) = E|w| -" in to_prior(L1(), Gaussian(0.3)).explanation
