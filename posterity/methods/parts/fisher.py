"""The preconditioner that samplers on mini-batches learn where nothing is set: Fisher scoring of the gradients."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive
from posterity.methods.parts.preconditioners import Preconditioner

_SEARCH, _HEAT = 0.5, 0.75  # shares of the warm-up after which the search ends, and the heating
_BETA1, _BETA2, _EPSILON = 0.9, 0.99, 1e-8  # of the search, by Adam
_RECENT = 0.98  # decay of the mean squares while chains heat up
_FALL = 2.0 ** (-1 / 25)  # by which the mean squares in use fall in a step at most
_PRIOR = 0.1  # weight of the mean squares after the heating in the final ones, in steps of the rest
_POWER = 0.5  # step of the power iteration, over the number of weights
_FLOOR = 1e-10  # mean squares at least, relative to their mean


class FisherState(NamedTuple):
    """What is learnt in the warm-up, for chains (C, P).

    `direction` is the momentum of the search, later the direction in which gradients vary most; `squares` are running
    squares of gradients; `scale` is the last gradient of the search, later the mean squares in use. `numbers` (C, 2)
    are the largest curvature that the search met, and the mean square along `direction`.
    """

    direction: Tensor
    squares: Tensor
    scale: Tensor
    numbers: Tensor


@dataclass(frozen=True)
class Fisher(Preconditioner):
    """Inverse mean square of the gradients of each weight in each chain, with steps that their largest variance bounds.

    **Math**: V = E[grad^2] for each weight and lambda the largest eigenvalue of E[g g^T], g = grad / sqrt(V), found by
    a power iteration on the gradients as they come; G = num_data / (lambda V). In a chain that has come to rest
    E[grad grad^T] is the curvature H plus the covariance of the gradients of batches, which is H (rows / batch - 1) for
    a model that is right. So at a learning rate e a step of SGLD widens no direction by more than e / 2 in variance, by
    its length and the noise of its gradients together.

    **Warm-up**: in the first half Adam looks for a mode, with steps of `rate` that fall to 0 along a cosine, and the
    largest curvature |difference of gradients| / |step| is noted. Then the sampler starts cold, at steps that this
    curvature allows, and V falls to the squares of the gradients, by half in 25 steps at most. In the last quarter V
    and lambda are averaged. All is constant while draws are kept.

    **References**: Ahn, Korattikara and Welling (2012), Bayesian posterior sampling via stochastic gradient Fisher
    scoring; Oja (1982), A simplified neuron model as a principal component analyzer.

    >>> rule, grad = Fisher(), torch.tensor([[2.0, -1.0]])
    >>> rule.moved(torch.zeros(1, 2), grad, rule.learn(rule.init(grad), grad, torch.tensor(0.0), 100), torch.tensor(0.0), 100)
    tensor([[ 0.0100, -0.0100]])
    """

    learning_rate: ClassVar[float] = 0.3
    learns: ClassVar[bool] = True

    rate: float = 0.01

    def __post_init__(self) -> None:
        positive("Fisher.rate", self.rate)

    def usual_rate(self, momentum: float = 0.0) -> float:
        """As far as gradients are concerned, steps with momentum are longer by 1 / (1 - momentum)."""
        return self.learning_rate * (1.0 - momentum)

    def init(self, theta: Tensor) -> FisherState:
        zeros = torch.zeros_like(theta)
        return FisherState(zeros, zeros.clone(), zeros.clone(), theta.new_zeros((len(theta), 2)))

    def learn(self, known: FisherState, grad: Tensor, step: Tensor, warmup: int) -> FisherState:
        search, heat = math.ceil(_SEARCH * warmup), math.ceil(_HEAT * warmup)
        parts = [
            (step < search, self._searched(known, grad, step, search)),
            (step < heat, _heated(known, grad, step, search)),
            (step < warmup, _averaged(known, grad, step, heat, warmup)),
        ]
        result = known
        for now, part in reversed(parts):
            result = FisherState(*(torch.where(now, new, old) for new, old in zip(part, result, strict=True)))
        return result

    def _searched(self, known: FisherState, grad: Tensor, step: Tensor, search: int) -> FisherState:
        moved = self._move(known, step - 1.0, search).norm(dim=-1)
        change = (grad - known.scale).norm(dim=-1) / moved.clamp_min(torch.finfo(grad.dtype).tiny)
        met = torch.where((step > 0) & (step < 0.5 * search) & (moved > 0), change, torch.zeros_like(change))
        numbers = torch.stack([torch.maximum(known.numbers[:, 0], met), known.numbers[:, 1]], dim=1)
        direction = _BETA1 * known.direction + (1.0 - _BETA1) * grad
        return FisherState(direction, _BETA2 * known.squares + (1.0 - _BETA2) * grad.square(), grad, numbers)

    def _move(self, known: FisherState, step: Tensor, search: int) -> Tensor:
        """Return the step of the search after the gradient of this step is learnt."""
        count = (step + 1.0).clamp_min(1.0)
        first = known.direction / (1.0 - _BETA1**count).to(known.direction.dtype)
        second = known.squares / (1.0 - _BETA2**count).to(known.direction.dtype)
        size = 0.5 * self.rate * (1.0 + torch.cos(math.pi * step / search))
        return size.to(first.dtype) * first / (second.sqrt() + _EPSILON)

    def matrix(self, known: FisherState, step: Tensor, warmup: int, num_data: float | Tensor) -> Tensor:
        largest = known.numbers[:, 1:].clamp_min(1.0)
        floor = _FLOOR * known.scale.abs().mean(-1, keepdim=True) + torch.finfo(known.scale.dtype).tiny
        return num_data / (largest * torch.maximum(known.scale.abs(), floor))

    def moved(self, theta: Tensor, sampled: Tensor, known: FisherState, step: Tensor, warmup: int) -> Tensor:
        search = math.ceil(_SEARCH * warmup)
        return torch.where(step < search, theta + self._move(known, step, search), sampled)


def _heated(known: FisherState, grad: Tensor, step: Tensor, search: int) -> FisherState:
    """Let the mean squares fall from the curvature that the search met to those of the gradients."""
    begins = step == search
    corrected = known.squares / (1.0 - _BETA2**search)
    squares = _RECENT * torch.where(begins, corrected, known.squares) + (1.0 - _RECENT) * grad.square()
    before = torch.where(begins, known.numbers[:, :1].expand_as(grad), _FALL * known.scale)
    scale = torch.maximum(squares, before)
    first = torch.where(begins, grad, known.direction)  # any vector with a part along the one looked for
    size = math.sqrt(grad.shape[-1])  # no direction is larger at the start
    largest = torch.where(begins, torch.full_like(known.numbers[:, 1], size), known.numbers[:, 1])
    direction, along = _iterated(first, grad, scale)
    largest = _RECENT * largest + (1.0 - _RECENT) * along
    return FisherState(direction, squares, scale, torch.stack([known.numbers[:, 0], largest], dim=1))


def _averaged(known: FisherState, grad: Tensor, step: Tensor, heat: int, warmup: int) -> FisherState:
    """Average the squares, and the mean square along the direction, over the rest of the warm-up."""
    weight = (1.0 / (step - heat + 1.0 + _PRIOR * (warmup - heat))).to(grad.dtype)
    scale = known.scale + weight * (grad.square() - known.scale)
    direction, along = _iterated(known.direction, grad, scale)
    largest = known.numbers[:, 1] + weight * (along - known.numbers[:, 1])
    return FisherState(direction, known.squares, scale, torch.stack([known.numbers[:, 0], largest], dim=1))


def _iterated(direction: Tensor, grad: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the direction after a step of Oja's rule, and the square (C,) of the scaled gradient along the old one."""
    tiny = torch.finfo(grad.dtype).tiny
    scaled = grad / scale.abs().clamp_min(tiny).sqrt()
    along = (direction * scaled).sum(-1, keepdim=True) / direction.norm(dim=-1, keepdim=True).clamp_min(tiny)
    unit = direction / direction.norm(dim=-1, keepdim=True).clamp_min(tiny)
    after = unit + (_POWER / grad.shape[-1]) * along * scaled
    return after / after.norm(dim=-1, keepdim=True).clamp_min(tiny), along.squeeze(-1).square()
