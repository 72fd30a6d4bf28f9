"""Losses: their derivatives, and the excess E l(f) - l(E f) by closed form, quadrature and draws."""

import math

import numpy as np
import pytest
import torch
from drawn import normal
from torch import Tensor

from posterity.numerics import Key
from posterity.theory import (
    Activation,
    Logistic,
    Loss,
    Neurons,
    OutputLaw,
    Rectified,
    Smooth,
    Softmax,
    Square,
    sampled_excess,
)
from posterity.theory import losses as output_law

ROWS, INPUTS = 6, 2


def neurons(kinds: int, outputs: int, seed: int = 0, size: float = 1.0) -> Neurons:
    key = Key(seed)
    outer, inner = (normal(key.fold(name), kinds, count) for name, count in (("outer", outputs), ("inner", INPUTS)))
    return Neurons(size * outer, 0.5 * (0.5 * outer).exp(), size * inner, 0.5 * (0.3 * inner).exp())


def law(kinds: int, outputs: int, width: float, activation: Activation | None = None, size: float = 1.0) -> OutputLaw:
    inputs = normal(Key(9), ROWS, INPUTS)
    widths = torch.tensor(width, dtype=torch.float64)
    return OutputLaw(neurons(kinds, outputs, size=size), activation or Rectified(), inputs, widths)


def targets(loss: Loss) -> Tensor:
    if isinstance(loss, Softmax):
        return torch.tensor([0, 2, 1, 1, 0, 2])
    return torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64).unsqueeze(-1)


LOSSES = [(Square(), 1), (Square(0.7), 3), (Logistic(), 1), (Softmax(), 3)]


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_slope_and_curvature_are_derivatives_of_the_value(loss: Loss, outputs: int) -> None:
    at, rows = 2.0 * normal(Key(3), ROWS, outputs), targets(loss)
    rows = rows if isinstance(loss, (Softmax, Logistic)) else normal(Key(4), ROWS, outputs)
    for row in range(ROWS):

        def value(point: Tensor, row: int = row) -> Tensor:
            return loss.value(point.unsqueeze(0), rows[row : row + 1])[0]

        slope = torch.autograd.functional.jacobian(value, at[row])
        curvature = torch.autograd.functional.hessian(value, at[row])
        torch.testing.assert_close(loss.slope(at, rows)[row], slope)
        torch.testing.assert_close(loss.curvature(at)[row], curvature)
        assert torch.linalg.eigvalsh(curvature).max() <= loss.smoothness * (1.0 + 1e-12)


@pytest.mark.parametrize("activation", [Rectified(), Smooth("tanh")], ids=repr)
@pytest.mark.parametrize(("loss", "outputs"), [(Square(), 2), (Logistic(), 1)])
@pytest.mark.parametrize("width", [3, 12])
def test_excess_equals_averages_of_networks(loss: Loss, outputs: int, activation: Activation, width: int) -> None:
    place, rows = law(3, outputs, width, activation), targets(loss)
    rows = rows if isinstance(loss, Logistic) else normal(Key(4), ROWS, outputs)
    found, estimate = loss.excess(place), sampled_excess(loss, place, rows, 4000, Key(5))
    assert ((found - estimate.value).abs() <= 5.0 * estimate.standard_error + 1e-13).all()
    assert (estimate.standard_error < 0.05 * found).all()  # the control variate works


def test_the_control_variate_is_all_of_the_square_loss() -> None:
    place, rows = law(2, 1, 4), targets(Square())
    estimate = sampled_excess(Square(), place, rows, 10, Key(0))
    torch.testing.assert_close(estimate.value, Square().excess(place), rtol=1e-12, atol=1e-14)
    assert estimate.standard_error.max() < 1e-14


def test_plain_averages_agree_with_the_control_variate() -> None:
    """Networks of that width themselves: f by hand, and the mean of l(f)."""
    width, draws, rows = 6, 20_000, targets(Softmax())
    place = law(2, 3, width)
    kinds = torch.arange(2).repeat_interleave(3)
    q = place.neurons
    outer = q.outer_mean[kinds] + q.outer_scale[kinds] * Key(1).normal((draws, width, 3), torch.float64)
    inner = q.inner_mean[kinds] + q.inner_scale[kinds] * Key(2).normal((draws, width, INPUTS), torch.float64)
    outputs = torch.einsum("snc,snp->spc", outer, torch.relu(inner @ place.inputs.mT)) / width
    values = Softmax().value(outputs, rows) - Softmax().value(place.mean, rows)
    estimate = sampled_excess(Softmax(), place, rows, 4000, Key(5))
    error = (values.var(0) / draws + estimate.standard_error.square()).sqrt()
    assert ((values.mean(0) - estimate.value).abs() <= 5.0 * error).all()
    deviation = outputs - place.mean
    covariance = torch.einsum("spc,spd->pcd", deviation, deviation) / draws
    spread = torch.einsum("spc,spd->spcd", deviation, deviation).std(0) / draws**0.5
    assert ((covariance - place.covariance).abs() <= 5.0 * spread).all()
    assert (deviation.mean(0).abs() <= 5.0 * outputs.std(0) / draws**0.5).all()


def test_second_order_of_the_softmax_errs_by_the_square_of_the_width() -> None:
    errors = []
    for width in (4, 40):
        place = law(2, 3, width)
        estimate = sampled_excess(Softmax(), place, targets(Softmax()), 20_000, Key(7))
        errors.append(((estimate.value - Softmax().excess(place)).abs().sum(), estimate.standard_error.norm()))
    (coarse, coarse_error), (fine, fine_error) = errors
    assert coarse > 10.0 * coarse_error  # there is something to see
    assert fine <= coarse / 100.0 * 2.0 + 5.0 * fine_error


@pytest.mark.parametrize("width", [1, 2])
def test_logistic_excess_of_one_and_two_neurons_equals_quadrature(width: int) -> None:
    """f = a max(u, 0): for given u it is normal, and so is the sum of two."""
    place = law(1, 1, width, size=2.0)
    mean, scale = (value[0] for value in place.pre_activations)  # (P,)
    grid = torch.linspace(-9.0, 9.0, 401, dtype=torch.float64)
    bell = torch.exp(-0.5 * grid.square())
    outer_mean, outer_scale = (float(value[0, 0]) for value in (place.neurons.outer_mean, place.neurons.outer_scale))
    nodes, weights = (torch.from_numpy(value).to(grid) for value in np.polynomial.legendre.leggauss(80))

    def given(center: Tensor, spread: Tensor) -> Tensor:
        """E log(2 cosh(f / 2)) for f normal."""
        f = (center.unsqueeze(-1) + spread.unsqueeze(-1) * grid).abs()
        return (bell / bell.sum() * (0.5 * f + torch.log1p(torch.exp(-f)))).sum(-1)

    for row in range(ROWS):
        lowest = max(-9.0, float(-mean[row] / scale[row]))  # the kink
        half = 0.5 * (9.0 - lowest)
        z = lowest + half * (1.0 + nodes)
        masses = half * weights * torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)
        heights, masses = (
            torch.cat([first.reshape(1), rest])
            for first, rest in ((0.0 * z[0], mean[row] + scale[row] * z), (1.0 - masses.sum(), masses))
        )
        if width == 2:
            pairs = (heights.unsqueeze(-1) + heights) / 2, (heights.unsqueeze(-1).square() + heights.square()) / 4
            center, variance, mass = pairs[0].flatten(), pairs[1].flatten(), (masses.unsqueeze(-1) * masses).flatten()
        else:
            center, variance, mass = heights, heights.square(), masses
        expected = (mass * given(outer_mean * center, outer_scale * variance.sqrt())).sum()
        middle = place.mean[row, 0].abs()
        expected = expected - 0.5 * middle - torch.log1p(torch.exp(-middle))
        assert float(Logistic().excess(place)[row]) == pytest.approx(float(expected), rel=1e-8)


def test_logistic_excess_is_that_of_a_normal_output_where_many_neurons_add_up() -> None:
    """A wide network with variance of order 1 has nearly Gaussian outputs; far out the loss is straight."""
    q = Neurons(*(torch.full((1, size), value, dtype=torch.float64) for size, value in ((1, 4.0), (1, 60.0))), *(
        torch.full((1, 2), value, dtype=torch.float64) for value in (0.3, 0.9)
    ))  # fmt: skip
    inputs = torch.tensor([[1.0, 0.5], [3.0, 1.0], [30.0, 10.0]], dtype=torch.float64)
    place = OutputLaw(q, Rectified(), inputs, torch.tensor(4000.0, dtype=torch.float64))
    grid = torch.linspace(-9.0, 9.0, 4001, dtype=torch.float64)
    bell = torch.exp(-0.5 * grid.square())
    f = (place.mean + place.total_variance.sqrt().unsqueeze(-1) * grid).abs()
    middle = place.mean.squeeze(-1).abs()
    softplus = (bell / bell.sum() * (0.5 * f + torch.log1p(torch.exp(-f)))).sum(-1)
    expected = softplus - 0.5 * middle - torch.log1p(torch.exp(-middle))
    torch.testing.assert_close(Logistic().excess(place), expected, rtol=0.02, atol=1e-6)  # kurtosis of 1/N is left


def test_pieces_of_rows_and_times_make_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    place = law(3, 1, 6)
    whole = Logistic().excess(place)
    for budget in (1, 7, 20):
        monkeypatch.setattr(output_law, "_BUDGET", budget)
        torch.testing.assert_close(Logistic().excess(place), whole, rtol=1e-13, atol=1e-16)


def test_sampled_excess_refuses_what_is_no_network() -> None:
    with pytest.raises(
        ValueError, match=r"^sampled_excess takes one network at a time, with a whole number of neurons"
    ):
        sampled_excess(Softmax(), law(2, 3, 5), targets(Softmax()), 10, Key(0))
    with pytest.raises(ValueError, match=r"^sampled_excess: draws must be a positive whole number\. Got 0\.$"):
        sampled_excess(Softmax(), law(2, 3, 4), targets(Softmax()), 0, Key(0))
