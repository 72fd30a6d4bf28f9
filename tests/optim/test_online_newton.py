"""The online Newton step against its formula, whole and in pieces."""

import pytest
import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from posterity.numerics import Key
from posterity.optim import online_newton
from posterity.optim.online_newton import online_newton_

FLOAT64 = torch.float64


def vectors(size: int) -> tuple[torch.Tensor, ...]:
    curvature, momentum, pull, product = (normal(Key(0).fold(i), size) for i in range(4))
    curvature = curvature.exp()
    return curvature, curvature.rsqrt(), momentum, pull, product


@pytest.mark.parametrize("size", [0, 1, 7, 8, 30])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("bend", "radius"), [(0.5, 0.3), (0.0, float("inf"))])
def test_pieces_follow_the_formula(monkeypatch, size, spread, bend, radius):
    monkeypatch.setattr(online_newton, "_PIECE", 8)
    curvature, scale, momentum, pull, product = vectors(size)
    if not bend:
        product = product.abs()  # without the bend an estimate below zero may leave nothing
    decay = Key(9).uniform((size,), FLOAT64) if spread else 0.3
    rate, weight = 0.2, 5.0
    change = rate * (weight * product / scale + decay - curvature)
    wanted = curvature + change + bend * change.square() / curvature
    step = ((momentum + 0.7 * pull) / wanted).clamp(-radius, radius)
    options = {"weight": weight, "rate": rate, "pull_factor": 0.7, "bend": bend, "radius": radius}
    online_newton_(curvature, scale, momentum, pull, product, decay, **options)
    torch.testing.assert_close(curvature, wanted)
    torch.testing.assert_close(product, step)
    torch.testing.assert_close(scale, wanted.rsqrt())


@given(st.floats(0.0, 1.0), st.floats(-1e6, 1e6), st.floats(1e-3, 1e3))
@settings(deadline=None, max_examples=50)
def test_half_of_the_curvature_is_always_left(rate, product, start):
    curvature = torch.tensor([start], dtype=FLOAT64)
    given_product = torch.tensor([product], dtype=FLOAT64)
    zeros = torch.zeros(1, dtype=FLOAT64)
    online_newton_(
        curvature, curvature.rsqrt(), zeros, zeros, given_product, 1e-3, weight=1.0, rate=rate, pull_factor=1.0
    )
    assert float(curvature) >= 0.499999 * start


def test_members_are_single_vectors():
    many = [torch.stack([v, 2.0 * v]) for v in vectors(6)]
    many[1] = many[0].rsqrt()
    one = [v[1].clone() for v in many]
    options = {"weight": -1.0, "rate": 0.1, "pull_factor": -0.5}
    online_newton_(*many, 0.2, **options)
    online_newton_(*one, 0.2, **options)
    for together, alone in zip(many, one, strict=True):
        assert torch.equal(together[1], alone)
