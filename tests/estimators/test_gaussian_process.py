"""Gaussian processes for tables against closed forms."""

from dataclasses import replace

import drawn
import numpy as np
import pytest
import torch
from torch import Tensor

from posterity.estimators import GaussianProcess
from posterity.estimators.gaussian_process import JITTER
from posterity.numerics.random import Key


def normal(label: str, *shape: int) -> Tensor:
    return drawn.normal(Key(3).fold(label), *shape)


def process(rough: bool, rows: int = 40, columns: int = 3, targets: int = 2) -> GaussianProcess:
    inputs, weights = normal("inputs", rows, columns), normal("weights", rows).exp()
    made = GaussianProcess.of(rough, inputs, normal("targets", rows, targets), weights)
    return replace(made, values=made.values + 0.3 * normal("values", columns + 4))


def by_hand(gp: GaussianProcess, inputs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Mean (N, T) and variance (N,) of noisy targets, entry by entry in numpy."""
    columns = gp.inputs.shape[1]
    lengths, (spread, slope, noise, power) = (
        gp.values[:columns].exp().cpu().numpy(),
        gp.values[columns:].exp().cpu().numpy(),
    )

    def kernel(x: np.ndarray, z: np.ndarray) -> float:
        square = float((((x - z) / lengths) ** 2).sum())
        shape = np.exp(-np.sqrt(square)) if gp.rough else (1.0 + square / (2.0 * power)) ** -power
        return 1.0 + slope**2 * float(x @ z) + spread**2 * shape

    rows, new = gp.inputs.cpu().numpy(), inputs.cpu().numpy()
    inside = np.array([[kernel(x, z) for z in rows] for x in rows])
    inside += np.diag((noise**2 + JITTER) / gp.weights.cpu().numpy())
    cross = np.array([[kernel(x, z) for z in rows] for x in new])
    inverse = np.linalg.inv(inside)
    own = np.array([kernel(x, x) for x in new])
    return cross @ inverse @ gp.targets.cpu().numpy(), own - np.einsum(
        "ij,jk,ik->i", cross, inverse, cross
    ) + noise**2 + JITTER


@pytest.mark.parametrize("rough", [False, True])
def test_prediction_is_the_conditional_normal(rough: bool) -> None:
    gp, inputs = process(rough), normal("new", 7, 3)
    mean, variance = by_hand(gp, inputs)
    moments = gp.predict(inputs)
    np.testing.assert_allclose(moments.mean.cpu().numpy(), mean, atol=1e-5)  # distances of equal rows are 1e-6, not 0
    np.testing.assert_allclose(moments.variance[:, 0].cpu().numpy(), variance, atol=1e-5)
    noise = float((2.0 * gp.values[5]).exp()) + JITTER
    np.testing.assert_allclose((moments.variance - moments.epistemic).cpu().numpy(), noise, rtol=1e-9)


@pytest.mark.parametrize("rough", [False, True])
def test_all_rows_as_neighbours_are_exact(rough: bool) -> None:
    gp, inputs = process(rough), normal("new", 7, 3)
    nearby = replace(gp, exact=10, neighbours=len(gp.inputs)).predict(inputs)
    for ours, exact in zip(nearby, gp.predict(inputs), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-7, atol=1e-9)


def test_neighbours_are_the_nearest_in_units_of_the_length_scales() -> None:
    gp = process(True)
    gp = replace(gp, values=gp.values + torch.tensor([3.0, 0.0, -3.0, 0.0, 0.0, 0.0, 0.0]), exact=10, neighbours=5)
    row = normal("new", 1, 3)
    nearest = ((gp.inputs - row) / gp.values[:3].exp()).square().sum(1).argsort()[:5]
    torch.testing.assert_close(gp.predict(row).mean, gp.on(nearest).predict(row).mean)


def test_evidence_finds_noise_and_columns_that_matter() -> None:
    inputs = normal("many", 300, 4)
    targets = (2.0 * inputs[:, :1]).sin() + 0.2 * normal("noise", 300, 1)
    gp = GaussianProcess.of(False, inputs, targets, torch.ones(300)).settled(300, 60, Key(0))
    assert abs(float(gp.values[6].exp()) - 0.2) < 5 * 0.2 / 600**0.5  # standard error of a scale from 300 rows
    assert float(gp.values[0]) < float(gp.values[1:4].min()) - 0.5
    few = normal("few", 20, 4)
    error = (gp.predict(few).mean - (2.0 * few[:, :1]).sin()).square().mean().sqrt()
    assert float(error) < 0.1


def test_a_row_of_weight_two_is_the_row_twice() -> None:
    gp = process(False)
    twice = gp.on(torch.cat([torch.arange(40), torch.tensor([4])]))
    heavier = replace(gp, weights=gp.weights * (1.0 + (torch.arange(40) == 4)))
    new = normal("new", 5, 3)
    torch.testing.assert_close(twice.predict(new).mean, heavier.predict(new).mean, rtol=1e-4, atol=1e-4)
