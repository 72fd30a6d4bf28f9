"""Conjugate regression on inputs far from 0, and after earlier data: against rational arithmetic."""

import logging
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

import posterity as po
from posterity.likelihoods import Gaussian
from posterity.methods import Conjugate
from posterity.numerics.random import Key
from posterity.priors import Normal

ROWS = 30


def data(shift: float) -> tuple[Tensor, Tensor]:
    x = (Key(0).normal((ROWS, 2), torch.float64, "cpu") * 64).round() / 64 + shift  # exact in binary
    y = (Key(1).normal((ROWS, 1), torch.float64, "cpu") * 64).round() / 64
    return x, y


def solved(matrix: list[list[Fraction]], right: list[Fraction]) -> tuple[list[Fraction], Fraction]:
    """Solution and determinant by elimination, in rationals."""
    size, determinant = len(right), Fraction(1)
    table = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        determinant *= table[i][i]
        for j in range(i + 1, size):
            ratio = table[j][i] / table[i][i]
            table[j] = [a - ratio * b for a, b in zip(table[j], table[i], strict=True)]
    solution = [Fraction(0)] * size
    for i in reversed(range(size)):
        solution[i] = (table[i][-1] - sum(table[i][k] * solution[k] for k in range(i + 1, size))) / table[i][i]
    return solution, determinant


def exact(x: Tensor, y: Tensor, noise: Fraction, scale: Fraction) -> tuple[float, list[float], float]:
    """Log evidence, posterior mean and variance of f(x_0) of y ~ N(X w + b, noise^2) with w, b ~ N(0, scale^2)."""
    rows = [[Fraction(v) for v in row] + [Fraction(1)] for row in x.tolist()]
    targets = [Fraction(row[0]) for row in y.tolist()]
    size = len(rows[0])
    precision = [
        [sum(r[i] * r[j] for r in rows) / noise**2 + (1 / scale**2 if i == j else 0) for j in range(size)]
        for i in range(size)
    ]
    linear = [sum(r[i] * t for r, t in zip(rows, targets, strict=True)) / noise**2 for i in range(size)]
    mean, determinant = solved(precision, linear)
    square = sum(t * t for t in targets) / noise**2 - sum(a * b for a, b in zip(linear, mean, strict=True))
    log_determinant = math.log(determinant.numerator) - math.log(determinant.denominator)
    value = -0.5 * float(square) - 0.5 * log_determinant - size * math.log(float(scale))
    value -= len(targets) * (math.log(float(noise)) + 0.5 * math.log(2.0 * math.pi))
    variance = sum(a * b for a, b in zip(rows[0], solved(precision, rows[0])[0], strict=True))
    return value, [float(m) for m in mean], float(variance)


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e6, 2.0**27])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_inputs_far_from_zero(shift: float, batch_size: int | None) -> None:
    x, y = data(shift)
    joint = po.Joint(torch.nn.Linear(2, 1).double(), Gaussian(scale=0.5), Normal(2.0), num_data=ROWS)
    q, _ = po.infer(Conjugate(batch_size=batch_size), joint, (x, y))
    evidence, mean, variance = exact(x, y, Fraction(1, 2), Fraction(2))
    assert float(q.log_evidence) == pytest.approx(evidence, abs=min(1e-6, 1e-9 * (1.0 + shift)))
    wanted = torch.tensor(mean, dtype=torch.float64)
    assert bool(((q.point() - wanted).abs() <= 1e-5 * q.gaussian.variance.sqrt()).all())
    assert float(q.predict(x).epistemic[0]) == pytest.approx(variance, rel=1e-5)


def test_a_stored_posterior_keeps_the_digits_of_its_factor(tmp_path: Path) -> None:
    rows = data(1e5)
    joint = po.Joint(torch.nn.Linear(2, 1, dtype=torch.float64), Gaussian(0.5), Normal(1.0), ROWS)
    q, _ = po.infer(Conjugate(), joint, rows)
    q.save(tmp_path / "run")
    loaded = po.load(tmp_path / "run", torch.nn.Linear(2, 1, dtype=torch.float64))
    assert torch.equal(loaded.sample(3, Key(2)), q.sample(3, Key(2)))
    assert torch.equal(loaded.predict(rows[0]).variance, q.predict(rows[0]).variance)
    assert torch.equal(loaded.gaussian.precision.logdet, q.gaussian.precision.logdet)


def test_lost_digits_are_said(caplog: pytest.LogCaptureFixture) -> None:
    joint = po.Joint(torch.nn.Linear(2, 1).double(), Gaussian(scale=0.5), Normal(2.0), num_data=ROWS)
    single = po.Joint(torch.nn.Linear(2, 1), Gaussian(scale=0.5), Normal(2.0), num_data=ROWS)
    with caplog.at_level(logging.WARNING, "posterity"):
        x, y = data(1e3)
        po.infer(Conjugate(), joint, (x, y))
        po.infer(Conjugate(), single, ((x - 1e3).float(), y.float()))
        assert not caplog.text
        x, y = data(1e12)
        po.infer(Conjugate(), joint, (x, y))
        assert "nearly dependent" in caplog.text
        caplog.clear()
        x, y = data(1e6)
        po.infer(Conjugate(), single, (x.float(), y.float()))
        assert "torch.float32 rounds the mean" in caplog.text


@pytest.mark.parametrize("shift", [0.0, 1e6])
@pytest.mark.parametrize("parts", [(30,), (11, 19), (10, 5, 15)])
def test_data_in_several_parts(shift: float, parts: tuple[int, ...]) -> None:
    x, y = data(shift)
    network, noise = torch.nn.Linear(2, 1).double(), Gaussian(scale=0.5)
    whole, _ = po.infer(Conjugate(), po.Joint(network, noise, Normal(2.0, 0.3), num_data=ROWS), (x, y))
    joint = po.Joint(network, noise, Normal(2.0, 0.3), num_data=parts[0])
    q, _ = po.infer(Conjugate(), joint, (x[: parts[0]], y[: parts[0]]))
    total, low = float(q.log_evidence), parts[0]
    for count in parts[1:]:
        joint = po.continued(po.Joint(network, noise, Normal(), num_data=count), q)
        q, _ = po.infer(Conjugate(), joint, (x[low : low + count], y[low : low + count]))
        total, low = total + float(q.log_evidence), low + count
    assert total == pytest.approx(float(whole.log_evidence), abs=1e-10 * (1.0 + shift))
    torch.testing.assert_close(q.predict(x).mean, whole.predict(x).mean, rtol=0.0, atol=1e-9 * (1.0 + shift))
    torch.testing.assert_close(q.predict(x).epistemic, whole.predict(x).epistemic, rtol=1e-9 * (1.0 + shift), atol=0.0)


def test_part_of_the_weights_under_a_correlated_prior() -> None:
    """The other weights are points, on which the prior of the rest depends."""
    x, y = data(0.0)
    network, noise = torch.nn.Linear(2, 1).double(), Gaussian(scale=0.5)
    first, _ = po.infer(Conjugate(), po.Joint(network, noise, Normal(2.0), num_data=10), (x[:10], y[:10]))
    whole = po.continued(po.Joint(network, noise, Normal(), num_data=20), first)
    part = po.Joint(network, noise, whole.prior, num_data=20, random="weight")
    start = po.posteriors.Point(part, torch.tensor([0.2, -0.1, 0.7], dtype=torch.float64))
    q, _ = po.infer(Conjugate(), part, (x[10:], y[10:]), start=start)
    both, _ = po.infer(Conjugate(), whole, (x[10:], y[10:]))
    precision = both.gaussian.precision.matrix
    mean = both.point()
    given = mean[:2] - torch.linalg.solve(precision[:2, :2], precision[:2, 2] * (0.7 - mean[2]))
    torch.testing.assert_close(q.point()[:2], given)
    assert float(q.point()[2]) == 0.7
    torch.testing.assert_close(q.gaussian.precision.matrix, precision[:2, :2])


def test_other_priors_are_refused() -> None:
    x, y = data(0.0)
    joint = po.Joint(torch.nn.Linear(2, 1).double(), Gaussian(scale=0.5), po.priors.Laplace(1.0), num_data=ROWS)
    with pytest.raises(ValueError, match="needs a Normal or Correlated prior"):
        po.infer(Conjugate(), joint, (x, y))
