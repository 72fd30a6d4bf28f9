"""The integral of the softmax against finer grids and symmetries."""

import math

import pytest
import torch
from torch import Tensor

from posterity.numerics.random import Key
from posterity.predictive import sigmoid_gaussian, softmax_gaussian


def moments(rows: int, classes: int, scale: float) -> tuple[Tensor, Tensor]:
    root = scale * Key(3).normal((rows, classes, classes), torch.float64, torch.get_default_device())
    return scale * Key(4).normal((rows, classes), torch.float64, torch.get_default_device()), root @ root.mT


def test_two_classes_are_one_difference() -> None:
    mean, covariance = moments(5, 2, 1.5)
    gap = mean[:, 1] - mean[:, 0]
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    torch.testing.assert_close(softmax_gaussian(mean, covariance)[:, 1], sigmoid_gaussian(gap, variance))


def test_a_third_class_out_of_reach_leaves_two() -> None:
    mean, covariance = moments(5, 2, 1.5)
    far = torch.cat([mean, torch.full((5, 1), -300.0).double()], dim=-1)
    wide = torch.nn.functional.pad(covariance, (0, 1, 0, 1))
    torch.testing.assert_close(softmax_gaussian(far, wide)[:, :2], softmax_gaussian(mean, covariance))


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_against_a_grid_over_other_differences(scale: float) -> None:
    mean, covariance = moments(3, 3, scale)
    axis = torch.linspace(-8.5, 8.5, 701, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    change = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
    factor = torch.linalg.cholesky(change @ covariance @ change.T)
    gaps = mean @ change.T + torch.einsum("nij,gj->gni", factor, points)  # (G, N, 2)
    logits = torch.stack([gaps.sum(-1), gaps[..., 1], torch.zeros_like(gaps[..., 0])], dim=-1)
    weight = torch.exp(-0.5 * points.square().sum(-1))
    wanted = torch.einsum("gnc,g->nc", logits.softmax(-1), weight / weight.sum())
    torch.testing.assert_close(softmax_gaussian(mean, covariance), wanted, rtol=0, atol=1e-9)


def test_against_a_grid_over_all_logits() -> None:
    mean, covariance = moments(3, 3, 1.0)
    axis = torch.linspace(-8.0, 8.0, 61, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis, axis)
    logits = mean + torch.einsum("nij,gj->gni", torch.linalg.cholesky(covariance), points)
    weight = torch.exp(-0.5 * points.square().sum(-1))
    wanted = torch.einsum("gnc,g->nc", logits.softmax(-1), weight / weight.sum())
    torch.testing.assert_close(softmax_gaussian(mean, covariance), wanted, rtol=0, atol=1e-6)


def test_classes_may_be_named_in_any_order() -> None:
    mean, covariance = moments(4, 3, 3.0)
    order = torch.tensor([2, 0, 1])
    value = softmax_gaussian(mean, covariance)
    shuffled = softmax_gaussian(mean[:, order], covariance[:, order][:, :, order])
    torch.testing.assert_close(shuffled, value[:, order], rtol=0, atol=1e-11)
    torch.testing.assert_close(value.sum(-1), torch.ones(4).double(), rtol=0, atol=1e-12)


def test_rows_of_different_width_keep_their_places() -> None:
    mean, covariance = moments(70, 3, 0.3)
    covariance[::7] *= 100.0
    value = softmax_gaussian(mean, covariance)
    for row in (0, 6, 7, 69):
        alone = softmax_gaussian(mean[row : row + 1], covariance[row : row + 1])
        torch.testing.assert_close(value[row : row + 1], alone, rtol=0, atol=1e-10)


def test_known_logits_and_equal_ones() -> None:
    mean = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    covariance = torch.stack([torch.zeros(3, 3), 4.0 * torch.eye(3)]).double()
    value = softmax_gaussian(mean, covariance)
    torch.testing.assert_close(value, mean.softmax(-1))
    shared = softmax_gaussian(mean, torch.full((2, 3, 3), 9.0).double())  # one number added to all logits
    torch.testing.assert_close(shared, mean.softmax(-1), rtol=0, atol=1e-7)


def test_what_cannot_be_integrated_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 or 3 classes\. Got 4\. Use MonteCarlo"):
        softmax_gaussian(torch.zeros(1, 4), torch.eye(4).unsqueeze(0))
    with pytest.raises(ValueError, match=r"below 80 or so\. Got 1\.?\d*e\+03"):
        softmax_gaussian(torch.zeros(1, 3), 1e6 * torch.eye(3).unsqueeze(0))
    assert softmax_gaussian(torch.zeros(0, 3), torch.zeros(0, 3, 3)).shape == (0, 3)


def test_float32_moments_are_integrated_in_float64() -> None:
    value = softmax_gaussian(torch.zeros(1, 3), torch.eye(3).unsqueeze(0))
    assert value.dtype == torch.float64
    assert value.tolist()[0] == pytest.approx([1 / 3] * 3, abs=1e-12)
    assert math.isclose(float(value.sum()), 1.0)
