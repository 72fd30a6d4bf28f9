"""Exact inversion: polynomials by moments, cosines by the characteristic function."""

import math

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial.hermite_e import herme2poly
from torch import Tensor

from posterity.penalties.expansion import (
    Expansion,
    Member,
    invert_expansion,
    invert_polynomial,
    smooth_expansion,
    smooth_polynomial,
)
from posterity.penalties.explanation import recognise_polynomial, recognise_trigonometric
from posterity.penalties.families import Gaussian, Translation
from posterity.penalties.inversion import invert, invert_expansions, log_alpha_up_to_constant
from posterity.priors import Normal

GOLD = load("penalty_to_prior_deconvolution")
STAR = load("condition_star")
EXACT = 1e-8  # the gold's tolerance of the exact route
SKEWED = (1.0, 0.0, 1.0, 2.0, 9.0, 44.0, 265.0)  # central moments of Exp(1)
COEFFICIENTS = st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=7).map(tuple)
MEMBERS = st.one_of(
    st.floats(0.05, 2.0).map(lambda scale: Member(Gaussian(scale), scale)),
    st.floats(0.05, 1.5).map(lambda scale: Member(skewed(scale), scale)),
)


def skewed(scale: float) -> Translation:
    return Translation(standard_moments=SKEWED, standard_entropy=1.0, scale=scale)


def gaussians(scales: Tensor) -> list[Member]:
    return [Member(Gaussian(tuple(scales.tolist())), scale) for scale in scales.tolist()]


def close(got: object, wanted: object, atol: float) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64), rtol=0.0, atol=atol
    )


@pytest.mark.parametrize("name", ["quadratic", "quartic"])
def test_polynomials_of_the_gold_give_one_prior_at_both_scales(name: str) -> None:
    example = GOLD.inputs["examples"][name]
    members = gaussians(example["sigma"])
    for coefficients, member in zip(example["r_poly"].tolist(), members, strict=True):
        found = log_alpha_up_to_constant(Expansion(tuple(coefficients)), member)
        close(found.coefficients, GOLD.at(f"{name}.log_alpha_poly_normalised"), EXACT)
    verdict = invert_expansions([Expansion(tuple(row)) for row in example["r_poly"].tolist()], members)
    assert verdict.satisfies_star
    assert verdict.route == "polynomial"
    assert verdict.kappa == pytest.approx(1.0, abs=EXACT)
    assert verdict.residual < 1e-12
    close(verdict.log_alpha(example["theta"]), GOLD.at(f"{name}.log_alpha"), EXACT)


@pytest.mark.parametrize("name", ["quadratic", "quartic", "quadratic_plus_cosine"])
@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
def test_values_on_a_grid_are_recognised_and_inverted_exactly(name: str, which: list[int]) -> None:
    example = GOLD.inputs["examples"][name]
    members = gaussians(example["sigma"])
    verdict = invert(example["mu"], example["r"][which], [members[i] for i in which])
    assert verdict.satisfies_star
    assert verdict.route == ("trigonometric" if "cosine" in name else "polynomial")
    assert verdict.kappa == pytest.approx(1.0, abs=EXACT)
    close(verdict.log_alpha(example["theta"]), GOLD.at(f"{name}.log_alpha"), EXACT)


def test_a_skewed_family_is_inverted_with_its_reflection() -> None:
    example = GOLD.inputs["examples"]["skewed_beta"]
    family = Translation(
        standard_moments=tuple((example["central_moments"] / 0.5 ** torch.arange(5)).tolist()),
        standard_entropy=example["entropy"] - math.log(example["s"]),
        scale=example["s"],
    )
    found = log_alpha_up_to_constant(Expansion(tuple(example["r_poly"].tolist())), Member(family, example["s"]))
    close(found.coefficients, GOLD.at("skewed_beta.log_alpha_poly_normalised"), EXACT)
    wrong = GOLD.must_not_equal["skewed_beta_poly_if_reflection_ignored"]
    assert abs(found.coefficients[1] - float(wrong[1])) > 0.1
    verdict = invert_expansions([Expansion(tuple(example["r_poly"].tolist()))], [Member(family, example["s"])])
    assert verdict.satisfies_star
    assert pytest.approx(0.0, abs=EXACT) == verdict.K


def test_weight_decay_on_the_means_is_a_prior_for_a_fixed_scale_only() -> None:
    scales, factor = STAR.inputs["sigma"], STAR.inputs["lam"]
    members = gaussians(scales)
    decay = Expansion((0.0, 0.0, factor))
    constants = [log_alpha_up_to_constant(decay, member).coefficients[0] for member in members]
    STAR.check("A_constant_l2_free_sigma", torch.tensor(constants, dtype=torch.float64))
    verdict = invert_expansions([decay] * 3, members)
    assert verdict.satisfies_star is STAR.at("satisfies_star_l2_free_sigma")
    assert verdict.prior is None
    assert math.isnan(verdict.kappa)
    assert "0.2705, -0.2258, 0.5811" in verdict.explanation
    assert "constants only" in verdict.explanation
    fixed = invert_expansions([decay], members[1:2])
    assert fixed.satisfies_star
    assert fixed.prior == Normal(math.sqrt(0.5 / factor), 0.0)
    assert fixed.nearest is None


def test_the_corrected_corollary_is_a_prior_and_the_printed_one_is_not() -> None:
    scales, target = STAR.inputs["sigma"], STAR.inputs["s0"]
    members = gaussians(scales)
    constants = 0.5 * (scales**2 / target**2 + torch.log(target**2 / scales**2) - 1.0)
    STAR.check("a_correct", constants)
    right = [Expansion((a, 0.0, 0.5 / target**2)) for a in constants.tolist()]
    found = [log_alpha_up_to_constant(r, m).coefficients[0] for r, m in zip(right, members, strict=True)]
    STAR.check("A_constant_correct", torch.tensor(found, dtype=torch.float64))
    verdict = invert_expansions(right, members)
    assert verdict.satisfies_star is STAR.at("satisfies_star_correct")
    STAR.check("log_density_at_0", verdict.log_alpha(torch.zeros(1, dtype=torch.float64)).squeeze())
    assert verdict.prior == Normal(target, 0.0)
    swapped = [Expansion((0.5 / target**2, 0.0, a)) for a in constants.tolist()]
    curvatures = [log_alpha_up_to_constant(r, m).coefficients[2] for r, m in zip(swapped, members, strict=True)]
    STAR.check("theta2_coefficient_if_swapped", torch.tensor(curvatures, dtype=torch.float64))
    assert invert_expansions(swapped, members).satisfies_star is STAR.at("satisfies_star_swapped")


def test_gain_of_the_inversion() -> None:
    scale = STAR.inputs["sigma_for_freq"]
    STAR.check("deconvolution_gain", Member(Gaussian(scale), scale).gain(STAR.inputs["freq"]))


def test_one_quartic_penalty_means_another_prior_at_each_scale() -> None:
    factor, first, second = 0.15, 0.3, 0.8
    found = [
        log_alpha_up_to_constant(Expansion((0.0, 0.0, 0.0, 0.0, factor)), Member(Gaussian(s), s)).coefficients
        for s in (first, second)
    ]
    assert found[1][2] - found[0][2] == pytest.approx(6.0 * factor * (second**2 - first**2), rel=1e-12)
    assert found[0][4] == found[1][4] == -factor


@pytest.mark.parametrize("degree", [2, 3, 4, 6, 9])
def test_gaussian_inversion_is_hermite(degree: int) -> None:
    scale = 0.7
    found = invert_polynomial((0.0,) * degree + (1.0,), Member(Gaussian(scale), scale))
    hermite = herme2poly([0.0] * degree + [1.0])
    close(found, [value * scale ** (degree - power) for power, value in enumerate(hermite)], 1e-10)


@given(COEFFICIENTS, MEMBERS)
@settings(max_examples=60, deadline=None)
def test_smoothing_undoes_inversion(coefficients: tuple[float, ...], member: Member) -> None:
    inverse = invert_polynomial(coefficients, member)
    size = max(map(abs, inverse)) * max(1.0, float(member.moments(len(coefficients) - 1).abs().max())) + 1.0
    close(smooth_polynomial(inverse, member), coefficients, 1e-12 * size)


@given(COEFFICIENTS, st.floats(-2.0, 2.0), st.floats(-2.0, 2.0), MEMBERS)
@settings(max_examples=60, deadline=None)
def test_inversion_is_linear(coefficients: tuple[float, ...], factor: float, other: float, member: Member) -> None:
    second = tuple(math.cos(3.0 * n) for n in range(len(coefficients)))
    mixed = invert_polynomial([factor * a + other * b for a, b in zip(coefficients, second, strict=True)], member)
    parts = [invert_polynomial(part, member) for part in (coefficients, second)]
    wanted = [factor * a + other * b for a, b in zip(*parts, strict=True)]
    size = 1.0 + max(max(map(abs, part)) for part in parts)
    close(mixed, wanted, 1e-11 * size)


@given(st.floats(-1.5, 1.5), st.floats(0.05, 0.9), st.floats(0.5, 5.0), st.floats(-1.0, 1.0), st.floats(-1.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_a_moved_penalty_means_a_moved_prior(
    shift: float, scale: float, frequency: float, cosine: float, sine: float
) -> None:
    member = Member(Gaussian(scale), scale)
    penalty = Expansion((0.3, -0.2, 0.5, 0.1, 0.2), (frequency,), (cosine,), (sine,))
    phase = frequency * shift
    moved = Expansion(
        _moved(penalty.coefficients, shift),
        (frequency,),
        (cosine * math.cos(phase) + sine * math.sin(phase),),
        (sine * math.cos(phase) - cosine * math.sin(phase),),
    )
    t = torch.linspace(-3.0, 3.0, 41, dtype=torch.float64)
    close(moved(t), penalty(t + shift), 1e-11)
    size = 1.0 + float(member.gain(torch.tensor(frequency)))
    close(invert_expansion(moved, member)(t), invert_expansion(penalty, member)(t + shift), 1e-10 * size)


def _moved(coefficients: tuple[float, ...], shift: float) -> tuple[float, ...]:
    return tuple(
        sum(math.comb(n, m) * shift ** (n - m) * coefficients[n] for n in range(m, len(coefficients)))
        for m in range(len(coefficients))
    )


def test_cosines_of_a_skewed_density_turn_in_phase() -> None:
    family = Translation(lambda z: torch.exp(-z - torch.exp(-z)), lowest=-5.0, highest=40.0, scale=0.4)
    member = Member(family, 0.4)
    target = Expansion((0.0, 0.2, -0.5), (2.0,), (0.4,), (-0.3,))
    mu = torch.linspace(-2.0, 2.0, 21, dtype=torch.float64)
    smoothed = smooth_expansion(target, member)
    close(smoothed(mu), member.smooth(target, mu), 1e-10)
    assert abs(smoothed.sines[0] / smoothed.cosines[0] - target.sines[0] / target.cosines[0]) > 0.1
    close(invert_expansion(smoothed, member)(mu), target(mu), 1e-10)


def test_a_frequency_that_the_family_removes_is_refused() -> None:
    with pytest.raises(ValueError, match="smooths the frequency 40 away"):
        invert_expansion(Expansion((0.0,), (40.0,), (1.0,), (0.0,)), Member(Gaussian(1.0), 1.0))


def test_moments_alone_invert_polynomials_alone() -> None:
    member = Member(skewed(0.5), 0.5)
    with pytest.raises(ValueError, match="Give Translation its density"):
        invert_expansion(Expansion((0.0,), (2.0,), (1.0,), (0.0,)), member)
    with pytest.raises(ValueError, match="must go up to order 8"):
        invert_polynomial((0.0,) * 8 + (1.0,), member)


@given(COEFFICIENTS, st.floats(0.8, 8.0), st.floats(0.1, 2.0), st.floats(-2.0, 2.0))
@settings(max_examples=25, deadline=None)
def test_polynomials_with_a_cosine_are_recognised(
    coefficients: tuple[float, ...], frequency: float, cosine: float, sine: float
) -> None:
    mu = torch.linspace(-4.0, 4.0, 101, dtype=torch.float64, device="cpu")
    values = Expansion(coefficients[:5], (frequency,), (cosine,), (sine,))(mu)
    found = recognise_trigonometric(mu, values)
    assert found is not None
    close(found(mu), values, 1e-11 * float(values.abs().max()))
    assert min(abs(one - frequency) for one in found.frequencies) < 1e-6


def test_rounding_is_no_term() -> None:
    mu = torch.linspace(-4.0, 4.0, 81, dtype=torch.float64, device="cpu")
    found = recognise_polynomial(mu, 0.3 - 2.0 * mu.square())
    assert found is not None
    assert len(found.coefficients) == 3
    assert found.coefficients[1] == 0.0
    close(found.coefficients, (0.3, 0.0, -2.0), 1e-12)


@pytest.mark.parametrize("values", [torch.abs, torch.exp, lambda mu: mu.square() + 1e-8 * torch.sin(1e4 * mu.square())])
def test_what_is_no_polynomial_with_cosines_is_not_taken_for_one(values: object) -> None:
    mu = torch.linspace(-4.0, 4.0, 81, dtype=torch.float64, device="cpu")
    assert recognise_polynomial(mu, values(mu)) is None  # type: ignore[operator]
    assert recognise_trigonometric(mu, values(mu)) is None  # type: ignore[operator]
