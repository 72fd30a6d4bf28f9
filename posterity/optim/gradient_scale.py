"""Scales of gradients, learnt in a warm-up that first looks for a mode: what steps of a sampler, or of SGD, may be."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive

_SEARCH, _HEAT = 0.5, 0.75  # shares of the warm-up after which the search ends, and the heating
_BETA1, _BETA2, _EPSILON = 0.9, 0.95, 1e-8  # of the search, by Adam
_RECENT = 0.98  # decay of the mean squares while chains heat up
_COLD = 3.0  # mean squares in use at least, in running ones, while chains heat up
_OUTLIER = 4.0  # square of a gradient, in mean squares, beyond which these rise at once: some rows matter rarely
_MARGIN = 2.0  # of the first mean squares over the curvature that the search met
_HALVINGS, _QUICKEST, _SLOWEST = 20, 5, 25  # of the mean squares in use at most, and steps for one of them
_PRIOR = 0.1  # weight of the mean squares after the heating in the final ones, in steps of the rest
_POWER = 0.5  # step of the power iteration, over the number of weights
_FLOOR = 1e-10  # mean squares at least, relative to their mean
_LEAST = 0.001  # share of its rate that a search from a mode has

READ_ON = ("cpu",)
"""Devices where one of three parts of the work is done, by the number of the step; on others all are."""


class ScaleState(NamedTuple):
    """What is learnt in the warm-up, for rows (C, P).

    `direction` is the momentum of the search, later the direction in which gradients vary most; `squares` are running
    squares of gradients, in the last quarter the mean of theta; `scale` is the last gradient of the search, later the
    mean squares in use. `numbers` (C, 3) are the sums of squared changes of gradients and of squared steps in the
    search, and the share of its rate that the search has, later the mean square along `direction`.
    """

    direction: Tensor
    squares: Tensor
    scale: Tensor
    numbers: Tensor


@dataclass(frozen=True)
class GradientScale:
    """Mean squares V = E[grad^2] of the gradients of each weight, and the largest eigenvalue lambda of their spread.

    **Math**: lambda is that of E[g g^T], g = grad / sqrt(V), by a power iteration on the gradients as they come. In the
    first half of the warm-up Adam looks for a mode, with steps of `rate` that fall to 0 along a cosine, and the
    curvature |difference of gradients| / |step| is noted. Then V starts at twice that and falls to 3 times the squares
    of the gradients, by half in 25 steps at most (less where the warm-up is short); a gradient beyond 2 sqrt(V) raises
    it at once. In the last quarter V, lambda and theta are averaged. All is constant after the warm-up.

    With `batches`, the number of them in a pass, the first pass does not move: it measures the distance of the start
    to a mode in standard deviations, whose square is the mean over the weights of batches E[grad]^2 / E[grad^2]. Below
    1 the rate is multiplied by this square: steps as long as those that look for a mode would lose one.

    **References**: Kingma and Ba (2015); Oja (1982), A simplified neuron model as a principal component analyzer.
    """

    rate: float = 0.01
    batches: float = 0.0

    def __post_init__(self) -> None:
        positive("GradientScale.rate", self.rate)

    def init(self, theta: Tensor) -> ScaleState:
        """Return the state before the first gradient at theta (C, P)."""
        zeros = torch.zeros_like(theta)
        return ScaleState(zeros, zeros.clone(), zeros.clone(), theta.new_zeros((len(theta), 3)))

    def learn(self, known: ScaleState, theta: Tensor, grad: Tensor, step: Tensor, warmup: int) -> ScaleState:
        """Return the state after the gradient at theta of a step, whose number from 0 stays a tensor ()."""
        search, heat = math.ceil(_SEARCH * warmup), math.ceil(_HEAT * warmup)
        parts: tuple[tuple[int, Callable[[], ScaleState]], ...] = (
            (search, lambda: self._searched(known, grad, step, search)),
            (heat, lambda: _heated(known, grad, step, search, heat)),
            (warmup, lambda: _averaged(known, theta, grad, step, heat, warmup)),
        )
        if step.device.type in READ_ON:  # elsewhere the number is never read, so that a step can be recorded
            return next((part() for until, part in parts if step < until), known)
        result = known
        for until, part in reversed(parts):
            result = ScaleState(*(torch.where(step < until, new, old) for new, old in zip(part(), result, strict=True)))
        return result

    def squares(self, known: ScaleState) -> Tensor:
        """Return V (C, P), positive; of no meaning in the search."""
        floor = _FLOOR * known.scale.abs().mean(-1, keepdim=True) + torch.finfo(known.scale.dtype).tiny
        return torch.maximum(known.scale.abs(), floor)

    def largest(self, known: ScaleState) -> Tensor:
        """Return lambda (C, 1), at least 1; of no meaning in the search."""
        return known.numbers[:, 2:].clamp_min(1.0)

    def reference(self, known: ScaleState, step: Tensor, warmup: int) -> Tensor:
        """Return the mean of theta in the last quarter of the warm-up, zeros before that."""
        return torch.where(step < math.ceil(_HEAT * warmup), torch.zeros_like(known.squares), known.squares)

    def searched(self, theta: Tensor, otherwise: Tensor, known: ScaleState, step: Tensor, warmup: int) -> Tensor:
        """Return theta after a step of the search, or `otherwise` when that has ended."""
        search = math.ceil(_SEARCH * warmup)
        return torch.where(step < search, theta + self._move(known, step, search), otherwise)

    def _searched(self, known: ScaleState, grad: Tensor, step: Tensor, search: int) -> ScaleState:
        look = self._look(search)
        moved = self._move(known, step - 1.0, search).norm(dim=-1)
        change = (grad - known.scale).norm(dim=-1)
        share = torch.ones_like(moved)
        if look:
            signal = look * known.direction.square() / known.squares.clamp_min(torch.finfo(grad.dtype).tiny)
            share = torch.where(step == look, signal.mean(-1).clamp(_LEAST, 1.0), known.numbers[:, 2])
        met = torch.stack([change.square(), moved.square()], dim=1)
        counted = (step > look) & (step <= look + 0.5 * (search - look))
        numbers = torch.cat([known.numbers[:, :2] + met * counted, share.unsqueeze(1)], dim=1)
        looks, weight = step < look, 1.0 / max(1, look)
        first, second = (torch.where(step == look, 0.0, tensor) for tensor in (known.direction, known.squares))
        direction = torch.where(looks, known.direction + weight * grad, _BETA1 * first + (1.0 - _BETA1) * grad)
        adams = _BETA2 * second + (1.0 - _BETA2) * grad.square()
        squares = torch.where(looks, known.squares + weight * grad.square(), adams)
        return ScaleState(direction, squares, grad, numbers)

    def _look(self, search: int) -> int:
        """Return the number of first steps that do not move."""
        return min(math.ceil(self.batches), search // 2)

    def _move(self, known: ScaleState, step: Tensor, search: int) -> Tensor:
        """Return the step of the search after the gradient of this step is learnt."""
        look = self._look(search)
        count = (step + 1.0 - look).clamp_min(1.0)
        first = known.direction / (1.0 - _BETA1**count).to(known.direction.dtype)
        second = known.squares / (1.0 - _BETA2**count).to(known.direction.dtype)
        size = 0.5 * self.rate * (1.0 + torch.cos(math.pi * (step - look) / (search - look)))
        size = torch.where(step < look, 0.0, size).to(first.dtype)
        return size * known.numbers[:, 2:] * first / (second.sqrt() + _EPSILON)


def _heated(known: ScaleState, grad: Tensor, step: Tensor, search: int, heat: int) -> ScaleState:
    """Let the mean squares fall from the curvature that the search met to those of the gradients."""
    begins = step == search
    corrected = known.squares / (1.0 - _BETA2**search)
    squares = _RECENT * torch.where(begins, corrected, known.squares) + (1.0 - _RECENT) * grad.square()
    changes, moves, largest = known.numbers.unbind(1)
    met = _MARGIN * (changes / moves.clamp_min(torch.finfo(grad.dtype).tiny)).sqrt().unsqueeze(1)
    curvature = torch.maximum(met, corrected.mean(-1, keepdim=True))
    fall = 2.0 ** (-1.0 / min(_SLOWEST, max(_QUICKEST, (heat - search) / _HALVINGS)))
    before = torch.where(begins, curvature.expand_as(grad), fall * known.scale)
    scale = torch.maximum(torch.maximum(_COLD * squares, before), grad.square() / _OUTLIER)
    first = torch.where(begins, grad, known.direction)  # any vector with a part along the one looked for
    size = math.sqrt(grad.shape[-1])  # no direction is larger at the start
    largest = torch.where(begins, torch.full_like(largest, size), largest)
    direction, along = _iterated(first, grad, scale)
    largest = _RECENT * largest + (1.0 - _RECENT) * along
    return ScaleState(direction, squares, scale, torch.stack([changes, moves, largest], dim=1))


def _averaged(known: ScaleState, theta: Tensor, grad: Tensor, step: Tensor, heat: int, warmup: int) -> ScaleState:
    """Average the squares, the mean square along the direction, and theta, over the rest of the warm-up."""
    weight = (1.0 / (step - heat + 1.0 + _PRIOR * (warmup - heat))).to(grad.dtype)
    scale = known.scale + weight * (grad.square() - known.scale)
    direction, along = _iterated(known.direction, grad, scale)
    changes, moves, largest = known.numbers.unbind(1)
    largest = largest + weight * (along - largest)
    mean = torch.where(step == heat, torch.zeros_like(theta), known.squares)
    mean = mean + (1.0 / (step - heat + 1.0).clamp_min(1.0)).to(theta.dtype) * (theta - mean)
    return ScaleState(direction, mean, scale, torch.stack([changes, moves, largest], dim=1))


def _iterated(direction: Tensor, grad: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the direction after a step of Oja's rule, and the square (C,) of the scaled gradient along the old one."""
    tiny = torch.finfo(grad.dtype).tiny
    scaled = grad / scale.abs().clamp_min(tiny).sqrt()
    along = (direction * scaled).sum(-1, keepdim=True) / direction.norm(dim=-1, keepdim=True).clamp_min(tiny)
    unit = direction / direction.norm(dim=-1, keepdim=True).clamp_min(tiny)
    after = unit + (_POWER / grad.shape[-1]) * along * scaled
    return after / after.norm(dim=-1, keepdim=True).clamp_min(tiny), along.squeeze(-1).square()
