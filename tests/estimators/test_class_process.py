"""Gaussian processes of log odds against quadrature, finite differences and duplicated rows."""

import math
from dataclasses import replace

import drawn
import pytest
import torch
from torch import Tensor

from posterity.estimators import ClassProcess
from posterity.estimators.gaussian_process import JITTER
from posterity.numerics.random import Key


def normal(label: str, *shape: int) -> Tensor:
    return drawn.normal(Key(11).fold(label), *shape)


def process(rows: int, classes: int = 1, rough: bool = False) -> ClassProcess:
    targets = (normal("targets", rows, classes) > 0).double()
    made = ClassProcess.of(rough, normal("inputs", rows, 2), targets, normal("weights", rows).exp())
    return replace(made, values=made.values + 0.3 * normal("values", 6))


def by_quadrature(gp: ClassProcess, new: Tensor) -> tuple[float, float, float]:
    """Log evidence of two rows, and mean and variance of the log odds at a new one, by a fine grid over both."""
    kernel = gp.kernel(gp.inputs, gp.inputs) + JITTER * torch.eye(2)
    ends = torch.linspace(-9, 9, 601, dtype=torch.float64)
    z = torch.cartesian_prod(ends, ends)
    values = z @ torch.linalg.cholesky(kernel).T
    logs = -0.5 * z.square().sum(1) - math.log(2 * math.pi) + 2 * math.log(float(ends[1] - ends[0]))
    signs = 2.0 * gp.targets[:, 0] - 1.0
    logs = logs + (gp.weights * torch.nn.functional.logsigmoid(signs * values)).sum(1)
    evidence = logs.logsumexp(0)
    mass = (logs - evidence).exp()
    solved = torch.linalg.solve(kernel, gp.kernel(gp.inputs, new)).T  # (1, 2)
    at_new = values @ solved[0]
    mean = mass @ at_new
    rest = gp.prior_variance(new) - solved @ gp.kernel(gp.inputs, new)[:, 0]
    return float(evidence), float(mean), float(mass @ (at_new - mean).square() + rest)


def test_close_to_the_exact_posterior_where_it_is_near_normal() -> None:
    gp = process(2)
    gp = replace(gp, values=gp.values - 0.5)  # a kernel of moderate size
    new = normal("new", 1, 2)
    evidence, mean, variance = by_quadrature(gp, new)
    moments = gp.predict(new)
    assert abs(float(gp.log_evidence()) - evidence) < 0.02
    assert abs(float(moments.mean) - mean) < 0.05
    assert abs(float(moments.variance) / variance - 1.0) < 0.05


@pytest.mark.parametrize("rough", [False, True])
def test_mode_and_curvature_are_those_of_the_log_posterior(rough: bool) -> None:
    """Against dense formulas: the gradient vanishes, and the evidence has the determinant of the Hessian."""
    gp = process(12, rough=rough)
    kernel = gp.kernel(gp.inputs, gp.inputs) + JITTER * torch.eye(12)
    precision = torch.linalg.inv(kernel)
    mode = gp.predict(gp.inputs).mean[:, 0]

    probs, targets = mode.sigmoid(), gp.targets[:, 0]
    slope = gp.weights * (targets - probs) - precision @ mode
    assert float((kernel @ slope).abs().max()) < 1e-4  # predictions leave out the jitter
    hessian = precision + torch.diag(gp.weights * probs * (1.0 - probs))
    fit = (gp.weights * torch.distributions.Bernoulli(probs).log_prob(targets)).sum()
    evidence = fit - 0.5 * mode @ precision @ mode - 0.5 * torch.logdet(kernel) - 0.5 * torch.logdet(hessian)
    assert math.isclose(float(gp.log_evidence()), float(evidence), abs_tol=1e-4)
    torch.testing.assert_close(
        gp.predict(gp.inputs).variance[:, 0], torch.linalg.inv(hessian).diagonal(), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("classes", [1, 3])
def test_gradient_of_the_evidence_counts_how_the_mode_moves(classes: int) -> None:
    gp = process(25, classes)
    values = gp.values.clone().requires_grad_()
    replace(gp, values=values).log_evidence().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    for index in range(len(values)):
        step = 1e-4 * torch.nn.functional.one_hot(torch.tensor(index), len(values))
        up, down = (float(replace(gp, values=gp.values + sign * step).log_evidence()) for sign in (1, -1))
        assert math.isclose(float(values.grad[index]), (up - down) / 2e-4, rel_tol=1e-4, abs_tol=1e-6)


def test_classes_are_fitted_one_by_one_and_weights_count_rows() -> None:
    gp, new = process(15, 3), normal("new", 4, 2)
    for index in range(3):
        alone = replace(gp, targets=gp.targets[:, index : index + 1]).predict(new)
        torch.testing.assert_close(alone.mean[:, 0], gp.predict(new).mean[:, index], rtol=1e-5, atol=1e-6)
    plain = replace(gp, weights=torch.ones_like(gp.weights))
    twice = plain.on(torch.cat([torch.arange(15), torch.tensor([4])]))
    heavier = replace(plain, weights=1.0 + (torch.arange(15) == 4).double())
    torch.testing.assert_close(twice.predict(new).mean, heavier.predict(new).mean, rtol=1e-4, atol=1e-4)


def test_separable_rows_have_a_mode() -> None:
    """A wide prior and classes far apart: steps of Newton's method alone may overshoot."""
    gp = process(30)
    apart = replace(gp, targets=(gp.inputs[:, :1] > 0).double(), values=gp.values + torch.tensor([0, 0, 5, 5, 0, 0]))
    moments = apart.predict(gp.inputs)
    assert bool(torch.isfinite(moments.mean).all())
    assert bool(((moments.mean > 0) == (gp.inputs[:, :1] > 0)).all())


def test_classes_that_a_plane_separates_do_not_drive_the_slope_to_its_bound() -> None:
    x = normal("plane", 60, 10)
    start = ClassProcess.of(False, x, (x.sum(1, keepdim=True) > 0).double(), torch.ones(60))
    settled = start.settled(60, 60, Key(0))
    assert 1.0 < float(settled.values[11] - start.values[11]) < 4.0  # 4.6 of 5 by the evidence alone


def test_evidence_finds_the_column_that_matters() -> None:
    x = normal("many", 300, 3)
    y = ((2.0 * x[:, :1]).sin() + 0.3 * normal("noise", 300, 1) > 0).double()
    gp = ClassProcess.of(False, x, y, torch.ones(300)).settled(300, 25, Key(0))
    assert float(gp.values[0]) < float(gp.values[1:3].min()) - 0.5
    new = normal("test", 400, 3)
    right = (gp.predict(new).mean > 0) == ((2.0 * new[:, :1]).sin() > 0)
    assert float(right.double().mean()) > 0.9


def test_rows_are_predicted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    gp, new = process(12, classes=2), normal("pieces", 7, 2)
    whole = gp.predict(new)
    monkeypatch.setattr("posterity.estimators.class_process.CELLS", 48)
    for part, expected in zip(gp.predict(new), whole, strict=True):
        torch.testing.assert_close(part, expected)
