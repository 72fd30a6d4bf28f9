"""From penalties to priors and back: the catalogue, the exact and the numerical inversion, and refusals."""

import math
import re

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import posterity as po
from posterity.penalties import (
    L1,
    Dirac,
    Divergence,
    Function,
    Gaussian,
    GroupLasso,
    SquaredL2,
    Sum,
    Translation,
    from_prior,
    to_prior,
)
from posterity.priors import (
    Cauchy,
    Correlated,
    Horseshoe,
    Laplace,
    Layerwise,
    Logistic,
    Normal,
    Prior,
    ScaleMixture,
    StudentT,
    Tabulated,
)
from posterity.priors import GroupLasso as GroupLassoPrior
from posterity.special.quadrature import normal_expectation

STAR = load("condition_star")
LAMBDA, S0, SIGMAS = STAR.inputs["lam"], STAR.inputs["s0"], tuple(STAR.inputs["sigma"].tolist())
SKEWED = Translation(lambda z: torch.exp(-(z + 1.0)) * (z > -1.0), lowest=-1.0, highest=40.0)

scales = st.floats(0.05, 10.0)
means = st.floats(-3.0, 3.0)


def points() -> Tensor:
    return torch.linspace(-2.0, 2.0, 17, dtype=torch.float64)


def unnamed(penalty: Divergence) -> Function:
    """The same numbers, from an object that does not know its prior."""
    return Function(penalty.each, "a KL")


def constant(penalty: Function | Sum, sigma: float) -> float:
    """A(0) of a penalty at one fixed sigma."""
    verdict = to_prior(penalty, Gaussian(sigma))
    return float(verdict.log_alpha(torch.zeros(1, dtype=torch.float64))) + math.log(verdict.kappa)


def test_gold_squared_means_with_a_trained_scale() -> None:
    decay = Sum((SquaredL2(),), (LAMBDA,))
    verdict = to_prior(decay, Gaussian(SIGMAS))
    assert verdict.satisfies_star is STAR.at("satisfies_star_l2_free_sigma")
    assert verdict.prior is None
    assert "0.27 at 0.2, -0.226 at 0.5, 0.581 at 1" in verdict.explanation
    assert "N(0, 0.25)" in verdict.explanation
    assert verdict.nearest == from_prior(Normal(0.5), Gaussian(SIGMAS))
    STAR.check(
        "A_constant_l2_free_sigma", torch.tensor([constant(decay, sigma) for sigma in SIGMAS], dtype=torch.float64)
    )


def test_gold_the_corollary_as_corrected() -> None:
    def a(sigma: Tensor) -> Tensor:
        return 0.5 * ((sigma / S0) ** 2 + 2.0 * (S0 / sigma).log() - 1.0)

    STAR.check("a_correct", a(STAR.inputs["sigma"]))
    penalty = Function(lambda mu, sigma: a(sigma) + mu**2 / (2.0 * S0**2), "a(sigma) + mu^2 / (2 s0^2)")
    verdict = to_prior(penalty, Gaussian(SIGMAS))
    assert verdict.satisfies_star is STAR.at("satisfies_star_correct")
    assert isinstance(verdict.prior, Normal)
    assert float(verdict.prior.scale) == pytest.approx(S0, rel=1e-8)
    assert pytest.approx(0.0, abs=1e-8) == verdict.K
    STAR.check("log_density_at_0", float(verdict.log_alpha(torch.zeros(1).double())))
    STAR.check("A_constant_correct", torch.tensor([constant(penalty, sigma) for sigma in SIGMAS], dtype=torch.float64))
    swapped = Function(lambda mu, sigma: 1.0 / (2.0 * S0**2) + a(sigma) * mu**2, "a and b exchanged")
    assert to_prior(swapped, Gaussian(SIGMAS)).satisfies_star is STAR.at("satisfies_star_swapped")


@pytest.mark.parametrize("family", [Gaussian(0.4), Gaussian(), Translation(lambda z: torch.exp(-(z**4)))])
@pytest.mark.parametrize("penalty", [L1(), GroupLasso("columns"), Sum((SquaredL2(), L1()), (1.0, 2.0))])
def test_norms_of_means_are_no_prior(penalty: Sum, family: Gaussian) -> None:
    verdict = to_prior(penalty, family, shape=(3, 2))
    assert verdict.satisfies_star is STAR.at("satisfies_star_l1_gaussian")
    assert verdict.prior is None
    assert "kink at 0" in verdict.explanation
    if isinstance(family, Gaussian):
        assert verdict.nearest == Divergence(penalty.prior(), family)
        assert "- entropy + log Z" in verdict.explanation


def test_gold_kl_to_laplace_and_heavy_tails() -> None:
    gold = load("kl_gaussian_laplace")
    rows = gold.inputs["grid"]
    found = [from_prior(Laplace(float(b)), Gaussian()).of(m.reshape(1, 1), s.reshape(1, 1)) for m, s, b in rows]
    gold.check("kl", torch.stack(found))
    gold = load("kl_gaussian_heavy_tailed")
    mean, scale = gold.inputs["mu_sigma"].unbind(-1)
    named = gold.inputs["priors"]
    mixture = named["scale_mixture"]
    priors = {
        "student_t": StudentT(named["student_t"]["df"], named["student_t"]["scale"]),
        "cauchy": Cauchy(named["cauchy"]["scale"]),
        "logistic": Logistic(named["logistic"]["scale"]),
        "scale_mixture": ScaleMixture((mixture["pi"], 1.0 - mixture["pi"]), (mixture["s1"], mixture["s2"])),
    }
    for name, prior in priors.items():
        gold.check(f"{name}.kl", from_prior(prior, Gaussian()).each(mean, scale))


def test_gold_kl_to_group_lasso() -> None:
    gold = load("kl_gaussian_group_lasso")
    for index, group in enumerate(gold.inputs["groups"]):
        penalty = from_prior(GroupLassoPrior(group["lam"]), Gaussian())
        gold.check(f"groups.{index}.kl", penalty.of(group["mu"].unsqueeze(0), group["s"].unsqueeze(0)))


CATALOGUE = st.one_of(
    st.builds(Normal, scales, means),
    st.builds(Laplace, scales, means),
    st.builds(GroupLassoPrior, scales, st.sampled_from(["rows", "columns", "channels"])),
    st.builds(StudentT, st.floats(0.5, 20.0), scales),
    st.builds(Logistic, scales),
    st.builds(Cauchy, scales),
    st.builds(Horseshoe, scales),
    st.builds(lambda a, b, s: ScaleMixture((0.25, 0.75), (a, b), s), scales, scales, scales),
)


@given(CATALOGUE, st.sampled_from([Gaussian(0.3), Gaussian((0.2, 1.1))]), scales)
@settings(deadline=None, max_examples=60)
def test_round_trip_of_every_catalogued_prior(prior: Prior, family: Gaussian, sigma: float) -> None:
    penalty = from_prior(prior, family)
    assert (
        to_prior(penalty, Gaussian(sigma)).prior == prior
    )  # the KL is a function of sigma: any sigma may be asked for
    verdict = to_prior(penalty, family)
    assert (verdict.prior, verdict.K, verdict.satisfies_star) == (prior, 0.0, True)
    assert from_prior(prior, family) == penalty


@given(scales, st.sampled_from(["rows", "columns", "channels"]))
@settings(deadline=None, max_examples=30)
def test_round_trip_by_points(scale: float, over: str) -> None:
    for prior in (Normal(scale), Laplace(scale), GroupLassoPrior(scale, over)):
        penalty = from_prior(prior, Dirac())
        assert isinstance(penalty, Sum)
        verdict = to_prior(penalty, Dirac(), shape=(2, 3))
        field = "rate" if isinstance(prior, GroupLassoPrior) else "scale"
        assert type(verdict.prior) is type(prior)
        assert getattr(verdict.prior, field) == pytest.approx(scale, rel=1e-12)
        assert getattr(verdict.prior, "over", None) == getattr(prior, "over", None)


@pytest.mark.parametrize("prior", [Normal(0.6, 0.3), Laplace(0.6, -0.2), Logistic(0.4), StudentT(3.0, 0.5)])
def test_minus_log_densities_give_the_prior_back_by_points(prior: Prior) -> None:
    verdict = to_prior(from_prior(prior, Dirac()), Dirac())
    values = points().unsqueeze(-1)
    assert verdict.prior is not None
    torch.testing.assert_close(verdict.prior.log_prob(values), prior.log_prob(values), rtol=1e-7, atol=1e-7)
    assert verdict.kappa == pytest.approx(1.0, abs=1e-7)


def test_points_know_the_normaliser_of_a_group() -> None:
    verdict = to_prior(Sum((GroupLasso(),), (3.0,)), Dirac(), shape=(5, 2))
    assert verdict.kappa == pytest.approx(2.0 * math.pi / 9.0)  # exp(-3 |w|) over the plane
    lengths = torch.tensor([0.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(verdict.log_alpha(lengths), -3.0 * lengths - math.log(verdict.kappa))
    assert "variance 0.333333" in verdict.explanation


def test_a_normaliser_beyond_the_largest_number_is_known_by_its_logarithm() -> None:
    n = 400
    found = to_prior(GroupLasso(), Dirac(), shape=(3, n))
    log_sphere = math.log(2.0) + 0.5 * n * math.log(math.pi) - math.lgamma(0.5 * n)
    assert found.satisfies_star
    assert found.kappa == math.inf
    torch.testing.assert_close(found.K, -(log_sphere + math.lgamma(n)))


def test_the_kl_to_a_group_prior_gives_the_density_of_a_group() -> None:
    verdict = to_prior(from_prior(GroupLassoPrior(3.0), Gaussian()), Gaussian(), shape=(5, 2))
    lengths = torch.tensor([0.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(verdict.log_alpha(lengths), -3.0 * lengths - math.log(2.0 * math.pi / 9.0))
    assert "variance 0.333333" in verdict.explanation


def test_a_density_too_narrow_for_a_table_is_one_all_the_same() -> None:
    verdict = to_prior(Function(lambda mu, nu: 1e4 * (mu.square() - 4.0).square()), Gaussian(1e-3))
    assert verdict.satisfies_star
    assert verdict.prior is None
    assert "too narrow for a table" in verdict.explanation


@given(scales, means, st.floats(0.1, 2.0), st.floats(-2.0, 2.0))
@settings(deadline=None, max_examples=25)
def test_an_unnamed_kl_to_a_normal_is_recognised(scale: float, mean: float, sigma: float, shift: float) -> None:
    penalty = unnamed(Divergence(Normal(scale, mean), Gaussian()))
    moved = Function(lambda mu, nu: penalty.r(mu, nu) + shift, "a KL and a constant")
    verdict = to_prior(moved, Gaussian((sigma, 1.5 * sigma)))
    assert verdict.satisfies_star
    assert isinstance(verdict.prior, Normal)
    assert float(verdict.prior.scale) == pytest.approx(scale, rel=1e-6)
    assert float(verdict.prior.mean) == pytest.approx(mean, rel=1e-5, abs=1e-6 * scale)
    assert pytest.approx(shift, abs=1e-5) == verdict.K


# theory 002-13: for |t| <= 2 and sigma <= 0.5 at most 3e-3; a kink is seen only as sharply as sigma allows.
NUMERICAL: dict[str, tuple[Prior, float, float]] = {
    "logistic": (Logistic(0.8), 0.0, 3e-3),
    "student-t": (StudentT(5.0, 1.0), 0.0, 3e-3),
    "scale mixture": (ScaleMixture((0.5, 0.5), (1.0, 0.4)), 0.0, 3e-3),
    "laplace": (Laplace(0.6), 0.5, 0.05),
}


@pytest.mark.parametrize("name", NUMERICAL)
@pytest.mark.parametrize("sigmas", [0.5, (0.3, 0.5)], ids=["fixed", "trained"])
def test_an_unnamed_kl_is_inverted_numerically(name: str, sigmas: float | tuple[float, ...]) -> None:
    prior, away, tolerance = NUMERICAL[name]
    verdict = to_prior(unnamed(Divergence(prior, Gaussian())), Gaussian(sigmas))
    assert verdict.satisfies_star
    assert abs(verdict.K) < 2e-3
    values = points()[points().abs() >= away]
    expected = prior.log_prob(values.unsqueeze(-1))
    torch.testing.assert_close(verdict.log_alpha(values), expected, rtol=0.0, atol=tolerance)
    assert isinstance(verdict.prior, Tabulated)
    torch.testing.assert_close(verdict.prior.log_prob(values.unsqueeze(-1)), expected, rtol=0.0, atol=tolerance)
    assert verdict.prior.standard_variance == pytest.approx(float(prior.variance(values[:1])), rel=0.05)


CLOSED: dict[str, tuple[Function, float, float]] = {  # with the sigma, and what r may be missed by
    "logistic": (unnamed(Divergence(Logistic(1.0), Gaussian())), 1.0, 1e-5),
    "student-t": (unnamed(Divergence(StudentT(3.0, 1.0), Gaussian())), 0.5, 1e-5),
    "one side grows faster": (Function(lambda mu, nu: mu.square() + 0.1 * mu.exp()), 1.0, 1e-2),
    "wavy": (Function(lambda mu, nu: mu.square() + 0.1 * mu * mu.cos()), 1.0, 1e-3),
    "log cosh": (Function(lambda mu, nu: mu.cosh().log()), 0.3, 1e-6),
}


@pytest.mark.parametrize("name", CLOSED)
def test_the_kl_to_the_prior_found_is_the_penalty_up_to_its_constant(name: str) -> None:
    """By a quadrature of its own: tails beyond the grid were guessed twice, once for K and once for the prior."""
    penalty, sigma, tolerance = CLOSED[name]
    verdict = to_prior(penalty, Gaussian(sigma))
    mu = torch.linspace(-4.0, 4.0, 33, dtype=torch.float64)
    scale = torch.full_like(mu, sigma)
    entropy = math.log(sigma * math.sqrt(2.0 * math.pi * math.e))
    expected = normal_expectation(lambda w: verdict.prior.log_prob(w.unsqueeze(-1)), mu, scale, 4001, None)
    torch.testing.assert_close(verdict.K - expected - entropy, penalty.each(mu, scale), rtol=0.0, atol=tolerance)
    near = points()
    torch.testing.assert_close(
        verdict.log_alpha(near), verdict.prior.log_prob(near.unsqueeze(-1)), rtol=0.0, atol=10.0 * tolerance
    )


def test_how_much_of_the_tails_is_guessed_is_told() -> None:
    seen = to_prior(unnamed(Divergence(Logistic(0.3), Gaussian())), Gaussian(0.5))
    hardly = to_prior(unnamed(Divergence(Logistic(3.0), Gaussian())), Gaussian(0.5))
    assert "guessed" not in seen.explanation
    assert re.search(
        "About 4[0-9] % of the prior lies beyond -4 and 4, where its tails are guessed", hardly.explanation
    )
    flat = to_prior(Function(lambda mu, nu: 1e-4 * mu.cosh().log()), Gaussian(0.5))
    assert flat.satisfies_star
    assert "guessed" in flat.explanation


def test_a_table_whose_kl_is_not_the_penalty_is_not_given() -> None:
    verdict = to_prior(Function(lambda mu, nu: 1e4 * mu**4), Gaussian(0.5))
    assert verdict.satisfies_star
    assert verdict.prior is None
    assert "is not given" in verdict.explanation or "too narrow" in verdict.explanation


@given(st.floats(0.05, 2.0), st.floats(0.2, 0.6), st.floats(0.7, 1.2))
@settings(deadline=None, max_examples=15)
def test_a_quartic_has_another_prior_for_another_sigma(c: float, small: float, large: float) -> None:
    # theory 002-19: the log densities differ by 6 c (difference of sigma^2) t^2 and a constant.
    penalty = Function(lambda mu, nu: c * mu**4, "c w^4")
    first, second = (to_prior(penalty, Gaussian(sigma)) for sigma in (small, large))
    difference = second.log_alpha(points()) - first.log_alpha(points())
    expected = 6.0 * c * (large**2 - small**2) * points().square()
    torch.testing.assert_close(difference - difference[8], expected, rtol=1e-8, atol=1e-7)
    for verdict in (first, second):
        assert isinstance(verdict.prior, Tabulated)
        found = verdict.prior.log_prob(points().unsqueeze(-1))
        torch.testing.assert_close(found, verdict.log_alpha(points()), rtol=1e-6, atol=1e-6)
    assert not to_prior(penalty, Gaussian((small, large))).satisfies_star


def test_a_squared_mean_gives_one_prior_for_every_fixed_sigma() -> None:
    assert {to_prior(Sum((SquaredL2(),), (2.0,)), Gaussian(sigma)).prior for sigma in (1e-4, 0.7, 3.0)} == {Normal(0.5)}


def test_a_skewed_family_moves_the_prior() -> None:
    # X = Z - 1 for an exponential Z has mean 0 and E X^3 = 2: mu^3 + 9 mu^2 + ... deconvolves with its reflection.
    penalty = from_prior(Normal(0.7, 0.4), SKEWED)
    verdict = to_prior(Function(penalty.each, "a KL"), SKEWED)
    assert verdict.satisfies_star
    values = points()
    torch.testing.assert_close(
        verdict.log_alpha(values), Normal(0.7, 0.4).log_prob(values.unsqueeze(-1)), rtol=1e-4, atol=1e-4
    )
    assert to_prior(penalty, SKEWED).prior == Normal(0.7, 0.4)


def test_a_bounded_penalty_does_not_integrate() -> None:
    wave = Function(lambda mu, nu: 1.0 - torch.cos(mu), "1 - cos w")
    for family in (Dirac(), Gaussian(0.3)):
        verdict = to_prior(wave, family)
        assert not verdict.satisfies_star
        assert verdict.prior is None
        assert verdict.kappa == math.inf


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: to_prior(lambda w: w, Dirac()), TypeError, r"Function\(r\) for one of your own"),
        (lambda: to_prior(Function(lambda mu, nu: -nu.log()), Dirac()), ValueError, "r is infinite .* with a width"),
        (lambda: to_prior(L1(), "gaussian"), TypeError, "needs a family"),
        (lambda: to_prior(L1(), Dirac(), shape=()), ValueError, "shape must be that of a weight tensor"),
        (
            lambda: to_prior(Function(lambda mu, nu: (1.0 + mu**2).log()), Gaussian(1e-3)),
            ValueError,
            "reach must be at most 400 times",
        ),
        (lambda: to_prior(L1(), Translation(torch.ones_like, -1.0, 1.0)), ValueError, "has an edge, .* Dirac"),
        (
            lambda: to_prior(unnamed(Divergence(Logistic(0.4), Gaussian())), Gaussian(3.0)),
            ValueError,
            "reach must be at least 2 times .* Give reach=9",
        ),
        (lambda: to_prior(Sum((L1(), GroupLasso())), Dirac()), ValueError, "no prior of this library .* not both"),
        (lambda: to_prior(Function(lambda mu, nu: mu + torch.rand_like(mu)), Dirac()), ValueError, "two answers"),
        (lambda: to_prior(Function(lambda mu, nu: mu.log()), Dirac()), ValueError, "must be finite"),
        (lambda: to_prior(L1(), Gaussian(0.3), reach=-1.0), ValueError, "reach must be a positive number"),
        (lambda: from_prior(0.5, Dirac()), TypeError, "needs a prior"),
        (lambda: from_prior(Normal(), None), TypeError, "needs a family"),
        (lambda: from_prior(Normal(torch.ones(3)), Dirac()), ValueError, "hyper-parameters for 3 members"),
        (lambda: from_prior(Normal(torch.ones(1, 3)), Dirac()), ValueError, "not the same for every weight"),
        (lambda: from_prior(Layerwise.of(Normal()), Gaussian()), ValueError, "not the same for every weight"),
        (
            lambda: from_prior(Correlated(torch.zeros(2), po.precisions.Dense(torch.eye(2))), Dirac()),
            ValueError,
            "weight",
        ),
        (lambda: from_prior(GroupLassoPrior(), SKEWED), ValueError, "known for Dirac"),
        (lambda: to_prior(Function(lambda mu, nu: mu.log()), Gaussian(1.0)), ValueError, "must be finite"),
        (lambda: to_prior(from_prior(GroupLassoPrior(), Dirac()), Gaussian(1.0), shape=(0,)), ValueError, "shape"),
    ],
)
def test_bad_input_is_explained(call: object, kind: type[Exception], message: str) -> None:
    assert callable(call)
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
