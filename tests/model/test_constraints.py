"""Bijections and their log-Jacobians."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posterity.model import Interval, Ordered, Positive, Real, Simplex
from posterity.numerics import Key

CASES = {
    "real": (Real(), (3,)),
    "positive": (Positive(), (3,)),
    "unit": (Interval(), (3,)),
    "interval": (Interval(-2.0, 5.0), (3,)),
    "ordered": (Ordered(), (4,)),
    "simplex": (Simplex(), (4,)),
    "pair": (Simplex(), (2,)),
}
EVERY = pytest.mark.parametrize("name", list(CASES))


def points(name, lead=(), scale=1.5, seed=0):
    constraint, shape = CASES[name]
    return scale * Key(seed).normal((*lead, *constraint.unconstrained_shape(shape)), torch.float64)


@EVERY
@given(st.integers(0, 10**6), st.floats(0.1, 4.0))
@settings(deadline=None, max_examples=25)
def test_there_and_back(name, seed, scale):
    constraint, shape = CASES[name]
    u = points(name, scale=scale, seed=seed)
    value, _ = constraint.forward(u)
    assert value.shape == shape
    torch.testing.assert_close(constraint.inverse(value), u, rtol=1e-8, atol=1e-8)


@EVERY
@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_log_jacobian_is_that_of_autograd(name, seed):
    constraint, _ = CASES[name]
    u = points(name, seed=seed)
    jacobian = torch.autograd.functional.jacobian(lambda t: constraint.forward(t)[0], u)
    if isinstance(constraint, Simplex):
        jacobian = jacobian[:-1]  # the last part is one minus the others
    _, log_jacobian = constraint.forward(u)
    torch.testing.assert_close(log_jacobian.sum(), torch.linalg.slogdet(jacobian).logabsdet, rtol=1e-10, atol=1e-10)


@EVERY
def test_values_are_where_they_should_be(name):
    constraint, _ = CASES[name]
    value, _ = constraint.forward(points(name, (500,), scale=4.0))
    inside = {
        "positive": lambda v: v > 0,
        "unit": lambda v: (v > 0) & (v < 1),
        "interval": lambda v: (v > -2) & (v < 5),
        "ordered": lambda v: v.diff(dim=-1) > 0,
        "simplex": lambda v: (v > 0) & ((v.sum(-1, keepdim=True) - 1).abs() < 1e-12),
        "pair": lambda v: (v > 0) & ((v.sum(-1, keepdim=True) - 1).abs() < 1e-12),
        "real": torch.isfinite,
    }[name]
    assert bool(inside(value).all())


@EVERY
def test_leading_axes_are_batches(name):
    constraint, _ = CASES[name]
    u = points(name, (2, 3))
    value, log_jacobian = constraint.forward(u)
    for i in range(2):
        for j in range(3):
            one, one_log = constraint.forward(u[i, j])
            torch.testing.assert_close(value[i, j], one, rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(log_jacobian[i, j], one_log, rtol=1e-14, atol=1e-14)


DENSITIES = {  # an unnormalised density of one number, and its integral
    "real": (Real(), lambda v: -0.5 * v**2, math.sqrt(2 * math.pi)),
    "positive": (Positive(), lambda v: -2.0 * v + 1.5 * v.log(), math.gamma(2.5) / 2.0**2.5),
    "interval": (Interval(-1.0, 3.0), lambda v: torch.zeros_like(v), 4.0),
    "beta": (Interval(), lambda v: v.log() + 3 * (1 - v).log(), math.gamma(2) * math.gamma(4) / math.gamma(6)),
}


@pytest.mark.parametrize("name", list(DENSITIES))
def test_the_normaliser_is_the_same_in_both_spaces(name):
    constraint, log_density, wanted = DENSITIES[name]
    u = torch.linspace(-30.0, 30.0, 20_001, dtype=torch.float64)
    value, log_jacobian = constraint.forward(u)
    integral = torch.trapezoid((log_density(value) + log_jacobian).exp().nan_to_num(), u)
    assert float(integral) == pytest.approx(wanted, rel=1e-8)


def test_the_normaliser_of_a_pair_on_the_simplex():
    u = torch.linspace(-30.0, 30.0, 20_001, dtype=torch.float64).unsqueeze(-1)
    value, log_jacobian = Simplex().forward(u)
    integral = torch.trapezoid((value[:, 0].log() + 3 * value[:, 1].log() + log_jacobian).exp(), u[:, 0])
    assert float(integral) == pytest.approx(1 / 20, rel=1e-8)


def test_zero_is_the_middle():
    assert Interval(-2.0, 4.0).forward(torch.zeros(()))[0] == 1.0
    torch.testing.assert_close(Simplex().forward(torch.zeros(4))[0], torch.full((5,), 0.2))
    assert Positive().forward(torch.zeros(()))[0] == 1.0


def test_small_parts_of_a_simplex_come_back():
    value = torch.tensor([1 - 1e-12, 0.6e-12, 0.4e-12], dtype=torch.float64)
    back, _ = Simplex().forward(Simplex().inverse(value))
    torch.testing.assert_close(back, value, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Interval(1.0, 1.0), r"upper - lower must be a positive number\. Got 0\.0"),
        (lambda: Interval(0.0, math.inf), r"upper - lower must be a positive number\. Got inf"),
        (lambda: Ordered().unconstrained_shape(()), "Ordered needs an axis"),
        (lambda: Simplex().unconstrained_shape(()), "at least two parts"),
        (lambda: Simplex().unconstrained_shape((3, 1)), r"at least two parts .*Got shape \(3, 1\)"),
    ],
)
def test_bad_constraints_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_constraints_are_values():
    assert Interval(0.0, 2.0) == Interval(0.0, 2.0) != Interval()
    assert hash(Positive()) == hash(Positive())
