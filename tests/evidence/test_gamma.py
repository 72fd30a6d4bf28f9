"""The Gamma density of a precision: moments, entropy and its part in a bound, against scipy."""

import math

import pytest
from scipy import integrate, stats

from posterity.evidence import Gamma


@pytest.mark.parametrize(("shape", "rate"), [(0.7, 2.0), (3.0, 0.5), (40.0, 10.0)])
def test_moments_and_entropy(shape: float, rate: float) -> None:
    q, truth = Gamma(shape, rate), stats.gamma(shape, scale=1.0 / rate)
    assert q.mean == pytest.approx(truth.mean(), rel=1e-12)
    assert q.entropy == pytest.approx(float(truth.entropy()), rel=1e-10)
    assert q.mean_log == pytest.approx(float(truth.expect(math.log)), rel=1e-6)


def test_an_expected_log_density_is_that_by_quadrature_and_lowest_for_others() -> None:
    p, q = Gamma(1.5, 2.0), Gamma(4.0, 3.0)
    density = stats.gamma(1.5, scale=0.5)
    truth = stats.gamma(4.0, scale=1.0 / 3.0).expect(density.logpdf)
    assert p.expected_log_density(q) == pytest.approx(float(truth), rel=1e-8)
    assert p.expected_log_density(q) + q.entropy < 0.0  # minus a Kullback-Leibler divergence
    assert p.expected_log_density(p) + p.entropy == pytest.approx(0.0, abs=1e-12)


def test_the_updated_density_makes_the_bound_tight() -> None:
    """log of the integral of p(tau) tau^n exp(-tau a) is the bound at q = its normalised integrand."""
    p, count, total = Gamma(1.5, 2.0), 6.0, 1.3
    q = p.updated(count, total)
    prior = stats.gamma(1.5, scale=0.5)
    evidence = math.log(
        integrate.quad(lambda t: math.exp(count * math.log(t) - total * t) * prior.pdf(t), 0.0, 60.0)[0]
    )

    def bound(mean: float) -> float:
        return count * math.log(mean) - total * mean + p.bound_terms(count, mean)

    assert bound(q.mean) == pytest.approx(evidence, abs=1e-9)
    assert all(bound(q.mean * factor) < evidence for factor in (0.5, 0.9, 1.1, 2.0))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, "1"])
def test_shape_and_rate_must_be_positive(bad: object) -> None:
    with pytest.raises(ValueError, match=r"Gamma\.shape must be a positive number"):
        Gamma(bad, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Gamma\.rate must be a positive number"):
        Gamma(1.0, bad)  # type: ignore[arg-type]
