"""Numerical inversion: the spline's forward fit, Fourier's division, and what is refused."""

import math
from collections.abc import Callable

import pytest
import torch
from goldcases import load
from torch import Tensor

from posterity.penalties.expansion import Expansion, Member, expansion_log_kappa, grid_log_kappa
from posterity.penalties.families import Dirac, Gaussian, Translation
from posterity.penalties.inversion import invert, invert_expansions
from posterity.penalties.spline import forward_fit, interpolate
from posterity.special.quadrature import normal_expectation

GOLD = load("penalty_to_prior_deconvolution")
MU = torch.linspace(-4.0, 4.0, 81, dtype=torch.float64)


def member(scale: float) -> Member:
    return Member(Gaussian(scale), scale)


def divergence(log_alpha: Callable[[Tensor], Tensor], scale: float, width: float | None, mu: Tensor = MU) -> Tensor:
    """KL(N(mu, scale^2) || alpha), up to the constant of alpha."""
    return -normal_expectation(log_alpha, mu, torch.full_like(mu, scale), 2001, width) - member(scale).entropy


def cauchy(t: Tensor) -> Tensor:
    return -torch.log1p(t.square())


def student(t: Tensor) -> Tensor:
    return -2.0 * torch.log1p(t.square() / 3.0)


def laplace(t: Tensor) -> Tensor:
    return -t.abs()


def spike_and_slab(t: Tensor) -> Tensor:
    return torch.logaddexp(-0.5 * t.square(), math.log(20.0) - 200.0 * t.square())


def slab(t: Tensor) -> Tensor:
    """A spike of scale 0.1 on a slab of 2."""
    return torch.logaddexp(-t.square() / 8.0, math.log(80.0) - 50.0 * t.square())


@pytest.mark.parametrize("route", ["spline", "fourier"])
@pytest.mark.parametrize("name", ["quadratic", "quartic", "quadratic_plus_cosine", "laplace_prior"])
@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
def test_gold_from_values_on_the_grid(name: str, which: list[int], route: str) -> None:
    example = GOLD.inputs["examples"][name]
    scales = example["sigma"][which].tolist()
    verdict = invert(example["mu"], example["r"][which], [member(scale) for scale in scales], route)  # type: ignore[arg-type]
    kink = name == "laplace_prior"
    limits = GOLD.tolerance["overrides"][
        "laplace_prior.log_alpha" if kink else "grid_route (quadratic, quartic, quadratic_plus_cosine).log_alpha"
    ]
    limit = limits["atol_sigma_le_0_5" if min(scales) <= 0.5 else "atol_sigma_gt_0_5"]
    theta = example["theta"]
    compared = (theta.abs() <= 2.0) & (theta.abs() >= (0.5 if kink else 0.0))
    error = (verdict.log_alpha(theta) - GOLD.at(f"{name}.log_alpha"))[compared].abs().max()
    assert float(error) <= limit
    assert verdict.satisfies_star
    assert verdict.kappa == pytest.approx(1.0, abs=0.03)
    assert pytest.approx(-math.log(verdict.kappa), abs=1e-12) == verdict.K
    assert 1.0 < verdict.noise_amplification < 1e4
    assert verdict.route == route


def test_penalties_with_a_kink_are_no_kl_of_gaussians() -> None:
    star = load("condition_star")
    verdict = invert(MU, star.inputs["lam"] * MU.abs().unsqueeze(0), [member(0.5)])
    assert verdict.satisfies_star is star.at("satisfies_star_l1_gaussian")
    assert verdict.route == "spline"
    assert verdict.prior is None
    assert verdict.residual > 0.05
    assert math.isnan(verdict.kappa)
    assert "no KL of this family" in verdict.explanation
    assert "near mu = 0." in verdict.explanation
    assert "2.7e+05" in verdict.explanation  # exp(5^2 / 2), five standard deviations
    # E 2 |mu + X| - 2 |mu| falls from 2 sqrt(2 / pi) sigma at 0 to nothing: half of it either way
    assert f"up to {0.5 * 2.0 * math.sqrt(2.0 / math.pi) * 0.5:.2g} either way" in str(verdict.nearest)
    assert "is no prior (spline)" in str(verdict)
    free = invert(MU, (2.0 * MU.abs()).expand(2, -1), [member(0.3), member(0.8)])
    assert not free.satisfies_star
    assert "near mu = 0." in free.explanation


@pytest.mark.parametrize("scale", [0.2, 0.3, 0.8])
@pytest.mark.parametrize(
    "penalty",
    [
        lambda mu, scale: mu.abs() ** 1.5,
        lambda mu, scale: mu.abs() ** 3,
        lambda mu, scale: mu.clamp_min(0.0).square(),
        lambda mu, scale: torch.nn.functional.huber_loss(mu, torch.zeros_like(mu), reduction="none"),
    ],
)
def test_what_is_less_smooth_than_the_family_is_refused(
    penalty: Callable[[Tensor, float], Tensor], scale: float
) -> None:
    verdict = invert(MU, penalty(MU, scale).unsqueeze(0), [member(scale)])
    assert not verdict.satisfies_star
    assert verdict.decided
    assert "no KL of this family" in verdict.explanation


@pytest.mark.parametrize("scales", [(0.2,), (0.3,), (0.8,), (0.2, 0.5, 1.0)])
@pytest.mark.parametrize(
    ("log_alpha", "width", "kappa", "error"),
    [
        (student, 1.0, 1.5 * math.sqrt(3.0) * math.pi / 3.0, 2e-4),
        (cauchy, 1.0, math.pi, 2e-3),
        (laplace, 0.0, 2.0, 0.1),
        (spike_and_slab, 0.05, None, None),
    ],
)
def test_heavy_tails_kinks_and_spikes_are_priors(
    log_alpha: Callable[[Tensor], Tensor],
    width: float,
    kappa: float | None,
    error: float | None,
    scales: tuple[float, ...],
) -> None:
    values = torch.stack([divergence(log_alpha, scale, width) for scale in scales])
    verdict = invert(MU, values, [member(scale) for scale in scales])
    assert verdict.route == "spline"
    assert verdict.satisfies_star
    if kappa is not None:
        assert verdict.kappa == pytest.approx(kappa, rel=0.03)
        inside = MU[(MU.abs() <= 3.0) & (MU.abs() >= 0.5)]
        found = verdict.log_alpha(inside) - verdict.K
        torch.testing.assert_close(found, log_alpha(inside), rtol=0.0, atol=error or 0.0)


@pytest.mark.parametrize(
    ("penalty", "scale"),
    [
        (lambda mu: torch.cosh(mu), 1.0),  # a KL: log alpha is -exp(-1/2) cosh
        (lambda mu: divergence(slab, 0.5, 0.05), 0.5),  # a KL by construction
        (lambda mu: mu.square() - 2.0 * torch.exp(-mu.square()), 0.75),  # none, by little: 0.75^2 is above 1 / 2
        (lambda mu: divergence(laplace, 0.24, 0.0), 0.3),  # none: less smooth than this family makes it
    ],
)
def test_what_values_cannot_tell_is_said_to_be_unknown(penalty: Callable[[Tensor], Tensor], scale: float) -> None:
    verdict = invert(MU, penalty(MU).unsqueeze(0), [member(scale)])
    assert verdict.route == "spline"
    assert not verdict.satisfies_star
    assert not verdict.decided
    assert "is not known" in verdict.explanation
    assert "may be a prior or none" in str(verdict)


@pytest.mark.parametrize("offset", [-1e9, -1e3, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("amplitude", [0.0, 0.3])
def test_a_constant_in_the_penalty_is_in_K_and_nowhere_else(offset: float, amplitude: float) -> None:
    penalty = MU.square() + amplitude * torch.cos(2.0 * MU)
    plain, moved = (invert(MU, (penalty + c).unsqueeze(0), [member(0.5)]) for c in (0.0, offset))
    assert moved.satisfies_star
    assert moved.route == plain.route
    assert moved.K - offset == pytest.approx(plain.K, abs=1e-6)
    torch.testing.assert_close(moved.log_alpha(MU), plain.log_alpha(MU), rtol=0.0, atol=1e-5)
    assert f"kappa = exp({-moved.K:.6g})" in str(moved)
    kinked = invert(MU, (penalty + offset + 1e-2 * MU.abs()).unsqueeze(0), [member(0.5)])
    assert not kinked.satisfies_star
    assert kinked.decided


@pytest.mark.parametrize("factor", [1e4, 1e8])
def test_a_normaliser_beyond_all_numbers_has_a_logarithm(factor: float) -> None:
    verdict = invert(MU, factor * MU.square().unsqueeze(0), [member(0.5)])
    assert verdict.satisfies_star
    assert float(verdict.prior.scale) == pytest.approx((2.0 * factor) ** -0.5)
    # theory 002-06: r = KL + K at mu = 0, where the KL to N(0, s^2) is log(s / sigma) + (sigma^2 / s^2 - 1) / 2.
    kl = -0.5 * math.log(2.0 * factor * 0.25) + 0.5 * (0.25 * 2.0 * factor - 1.0)
    assert pytest.approx(-kl, rel=1e-9) == verdict.K


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_the_verdict_does_not_depend_on_the_unit_of_weights(unit: float) -> None:
    values = divergence(student, 0.5, 1.0)
    verdict, expected = (invert(MU * u, values.unsqueeze(0), [member(0.5 * u)]) for u in (unit, 1.0))
    assert verdict.satisfies_star
    assert pytest.approx(expected.K, abs=1e-6) == verdict.K
    assert verdict.explanation == expected.explanation


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_tails_too_heavy_for_the_grid_are_densities_all_the_same(scale: float) -> None:
    verdict = invert(MU, divergence(lambda t: cauchy(t / 0.3), scale, 0.3).unsqueeze(0), [member(scale)])
    assert verdict.satisfies_star
    assert verdict.kappa == pytest.approx(0.3 * math.pi, rel=0.2)


def test_a_penalty_that_fits_each_scale_but_not_both() -> None:
    values = torch.stack([divergence(student, 0.3, 1.0), divergence(cauchy, 0.8, 1.0)])
    verdict = invert(MU, values, [member(0.3), member(0.8)])
    assert not verdict.satisfies_star
    assert "asks for another prior" in verdict.explanation
    assert "0.3, 0.8" in verdict.explanation


@pytest.mark.parametrize(
    "penalty",
    [
        Expansion((1.0,)),
        Expansion((0.0, 1.0)),
        Expansion((0.0, 0.0, 1.0, 0.0, -0.1)),
        Expansion((0.0, 0.0, 0.0, 1.0)),
        Expansion((0.0,), (2.0,), (1.0,), (0.0,)),
    ],
)
def test_log_alpha_that_does_not_fall_on_both_sides_is_no_density(penalty: Expansion) -> None:
    verdict = invert_expansions([penalty], [member(0.5)])
    assert not verdict.satisfies_star
    assert verdict.kappa == math.inf
    assert -math.inf == verdict.K
    assert verdict.residual < 1e-12
    assert "kappa is infinite" in verdict.explanation
    assert "kappa = infinite" in str(verdict)


def test_a_tail_too_heavy_is_no_density() -> None:
    verdict = invert(MU, divergence(lambda t: 0.25 * cauchy(t), 0.3, 1.0).unsqueeze(0), [member(0.3)])
    assert verdict.residual < 1e-8
    assert verdict.kappa == math.inf
    assert not verdict.satisfies_star


def test_waves_raised_beyond_all_numbers_are_no_density() -> None:
    verdict = invert_expansions([Expansion((0.0, 0.0, 1.0), (10.0,), (1.0,), (0.0,))], [member(1.0)])
    assert verdict.noise_amplification > 1e15
    assert not verdict.satisfies_star
    assert "overflows" in verdict.explanation


@pytest.mark.parametrize("shift", [-1.5, 0.0, 2.0])
def test_kappa_of_polynomials_with_cosines(shift: float) -> None:
    scale = 0.4
    coefficients = (-0.5 * shift**2 / scale**2, shift / scale**2, -0.5 / scale**2)
    wanted = math.log(scale * math.sqrt(2.0 * math.pi))
    assert expansion_log_kappa(Expansion(coefficients)) == pytest.approx(wanted, abs=1e-10)
    example = GOLD.inputs["examples"]["quadratic_plus_cosine"]
    waves = Expansion((0.0, 0.0, -0.5 / example["s0"] ** 2), (example["k"],), (-example["A"],), (0.0,))
    GOLD.check("quadratic_plus_cosine.logZ", expansion_log_kappa(waves))


@pytest.mark.parametrize("depth", [1.0, 1e3, 1e6, 1e8])
@pytest.mark.parametrize("place", [4.0, 5.123])
def test_kappa_of_narrow_wells(place: float, depth: float) -> None:
    """The integral of exp(-depth (t^2 - place)^2), twice that over one of its wells."""
    found = expansion_log_kappa(Expansion((-depth * place**2, 0.0, 2.0 * depth * place, 0.0, -depth)))
    half = 12.0 / math.sqrt(8.0 * depth * place)
    grid = torch.linspace(max(0.0, place**0.5 - half), place**0.5 + half, 100_001, dtype=torch.float64)
    wanted = torch.logsumexp(-depth * (grid.square() - place).square(), dim=0) + (2.0 * (grid[1] - grid[0])).log()
    assert found == pytest.approx(float(wanted), abs=1e-5)  # A loses digits: its terms are of the size of depth


@pytest.mark.parametrize("amplitude", [0.3, 3.0, 30.0, 300.0])
def test_kappa_of_high_waves(amplitude: float) -> None:
    """The integral of exp(-t^2 / 2 + A cos(2 pi t)): for high waves a sum over their peaks, each nearly Gaussian."""
    frequency = 2.0 * math.pi
    found = expansion_log_kappa(Expansion((0.0, 0.0, -0.5), (frequency,), (amplitude,), (0.0,)))
    grid = torch.linspace(-40.0, 40.0, 2_000_001, dtype=torch.float64)
    values = amplitude * torch.cos(frequency * grid) - 0.5 * grid.square()
    wanted = float(torch.logsumexp(values, dim=0)) + math.log(80.0 / 2_000_000)
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("log_alpha", "kappa", "error"),
    [
        (lambda t: -0.5 * t.square(), math.sqrt(2.0 * math.pi), 2e-3),
        (laplace, 2.0, 1e-4),
        (cauchy, math.pi, 0.06),
        (student, 1.5 * math.sqrt(3.0) * math.pi / 3.0, 0.03),
    ],
)
def test_kappa_with_guessed_tails(log_alpha: Callable[[Tensor], Tensor], kappa: float, error: float) -> None:
    assert math.exp(grid_log_kappa(log_alpha, -3.0, 3.0)) == pytest.approx(kappa, rel=error)
    assert math.exp(grid_log_kappa(log_alpha, -3.0, 3.0)) > math.exp(grid_log_kappa(log_alpha, -40.0, 40.0)) * 0.9
    assert grid_log_kappa(lambda t: 0.5 * cauchy(t), -40.0, 40.0) == math.inf


@pytest.mark.parametrize(
    ("density", "lowest", "highest", "scale"),
    [
        (lambda z: torch.exp(-z.abs()) / (1.0 + torch.exp(-z.abs())).square(), -36.0, 36.0, 0.3),
        (lambda z: torch.exp(-z - torch.exp(-z)), -5.0, 38.0, 0.4),
        (lambda z: torch.exp(-z - 1.0), -1.0, 36.0, 0.5),
        (lambda z: (1.0 - z.abs()).clamp_min(0.0), -1.0, 1.0, 1.0),
    ],
)
def test_other_families_by_their_density(
    density: Callable[[Tensor], Tensor], lowest: float, highest: float, scale: float
) -> None:
    one = Member(Translation(density, lowest, highest, scale=scale), scale)
    for log_alpha, error in ((student, 1e-3), (lambda t: 0.3 * t + 2.0 * laplace(t), 0.15)):
        values = -one.entropy - one.smooth(log_alpha, MU)
        verdict = invert(MU, values.unsqueeze(0), [one])
        assert verdict.route == "spline"
        assert verdict.satisfies_star
        inside = MU[MU.abs() <= 2.0]
        found = verdict.log_alpha(inside) - verdict.K
        torch.testing.assert_close(found, log_alpha(inside), rtol=0.0, atol=error)


def test_the_same_penalty_has_the_same_verdict_each_time() -> None:
    values = divergence(student, 0.3, 1.0).unsqueeze(0)
    first, second = (invert(MU, values, [member(0.3)]) for _ in range(2))
    assert first.noise_amplification == second.noise_amplification
    assert torch.equal(first.log_alpha(MU), second.log_alpha(MU))


def test_splines_reproduce_cubics_and_go_on_as_parabolas() -> None:
    t = torch.linspace(-1.0, 2.0, 31, dtype=torch.float64, device="cpu")
    between = torch.linspace(-1.0, 2.0, 77, dtype=torch.float64)
    found = interpolate(t, 1.0 + t - 2.0 * t.square())
    torch.testing.assert_close(found(between), 1.0 + between - 2.0 * between.square(), rtol=0.0, atol=1e-12)
    beyond = torch.tensor([-4.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(found(beyond), 1.0 + beyond - 2.0 * beyond.square(), rtol=0.0, atol=1e-9)
    upward = interpolate(t, t.square())
    torch.testing.assert_close(upward(beyond), torch.tensor([7.0, 16.0], dtype=torch.float64), rtol=0.0, atol=1e-9)
    assert found(between.float()).dtype == torch.float32


def test_the_matrix_of_the_forward_fit_smooths() -> None:
    one = member(0.4)
    mu = MU.cpu()
    fit = forward_fit(mu, [one])
    assert 120 <= fit.matrix.shape[1] - 3 <= 240
    coefficients = torch.sin(torch.arange(fit.matrix.shape[1], dtype=torch.float64, device="cpu"))
    torch.testing.assert_close(fit.matrix @ coefficients, one.smooth(fit.spline(coefficients), mu))
    torch.testing.assert_close(fit.matrix.sum(1), torch.ones_like(mu))


@pytest.mark.parametrize(
    ("mu", "values", "members", "match"),
    [
        (MU[:10], MU[:10].unsqueeze(0), [member(0.5)], "at least 16 finite points"),
        (MU**3, MU.unsqueeze(0), [member(0.5)], "must rise in equal steps"),
        (MU, MU, [member(0.5)], r"\(1, 81\). Got \(81,\)"),
        (MU, MU.log().unsqueeze(0), [member(0.5)], "finite at every mu"),
        (MU, MU.abs().unsqueeze(0), [member(0.1)], "steps of at most half the family's standard deviation, 0.05"),
        (MU, MU.abs().unsqueeze(0), [Member(Dirac(), 0.0)], "log alpha is -r"),
    ],
)
def test_bad_input_is_refused(mu: Tensor, values: Tensor, members: list[Member], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        invert(mu, values, members)


@pytest.mark.parametrize(
    ("route", "match"),
    [
        ("catalogue", "looked up by to_prior"),
        ("furier", "Unknown route 'furier'. Did you mean 'fourier'"),
        ("polynomial", "is no polynomial to the last digits"),
        ("trigonometric", "is no polynomial with cosines"),
    ],
)
def test_routes_that_do_not_lead_there(route: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        invert(MU, MU.abs().unsqueeze(0), [member(0.5)], route)  # type: ignore[arg-type]


@pytest.mark.parametrize("log_alpha", [student, laplace, lambda t: -0.3 * t.square() - 0.2 * torch.cos(2.0 * t)])
def test_the_residual_is_that_of_the_divergence_from_the_prior_found(log_alpha: Callable[[Tensor], Tensor]) -> None:
    scale = 0.7
    values = divergence(log_alpha, scale, 0.0 if log_alpha is laplace else 1.0)
    verdict = invert(MU, values.unsqueeze(0), [member(scale)])
    missed = divergence(verdict.log_alpha, scale, None) + verdict.K - values
    assert float(missed.abs().max()) == pytest.approx(verdict.residual, rel=0.02, abs=1e-9)


def test_a_verdict_reads_as_a_few_lines() -> None:
    lines = str(invert(MU, 1.0 + 2.0 * (MU - 1.0).square().unsqueeze(0), [member(0.5)])).splitlines()
    assert lines[0] == "penalty: is a prior (polynomial)"
    assert "its KL plus the constant 1 to one prior" in lines[1]
    assert lines[2].startswith("  kappa = ")
    assert lines[3].startswith("  prior: Normal(scale=")
    assert len(lines) == 4
