"""Stationary points of the tempered bound, for many widths and temperatures at once."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole
from posterity.evidence.wide.neurons import Neurons, parts
from posterity.evidence.wide.problem import WideProblem

_FLAT = 1e-8  # least curvature that a step believes, relative to the largest
_ROUNDING = 1e-14  # differences of the objective that say nothing
_HALVINGS = 40
_LONGEST = 2.0  # change of a mean or of a scale's log in one step


class Optimum(NamedTuple):
    """Where the search ended, for each of the leading axes (...)."""

    neurons: Neurons  # with shares as they were
    gradient: Tensor  # (...), the largest entry, of -elbo / (eta N) in means and logs of scales
    rounds: int


def optimum(
    problem: WideProblem, start: Neurons, width: float | Tensor, tau: float | Tensor, *, rounds: int = 200
) -> Optimum:
    """A maximum of elbo / p = -(1/p) sum G^N - tau KL over the parameters of the neurons, near `start`.

    Widths and temperatures (...) broadcast with the leading axes of `start`, and every combination has its own search,
    all in one. The bound at a temperature eta is tau = `problem.tau(eta, width)`; an infinite width is the limit
    `problem.balanced`. J kinds of neurons keep their shares; one kind is the optimum among networks of equal neurons,
    which is a stationary point among all.

    **Math**: Newton's method on KL + sum G^N / (p tau) in means and logs of scales; directions of negative curvature
    are taken upside down, and steps are halved until they descend.

    **Limit**: a local maximum. The digits are those of float64: gradients end near 1e-15.

    **Cost**: a round is one gradient for each parameter of the J neurons.
    """
    positive("optimum: tau", tau)
    positive_whole("optimum: rounds", rounds)
    scale = torch.as_tensor(tau, dtype=torch.float64, device=problem.inputs.device)
    widths = torch.as_tensor(width, dtype=torch.float64, device=problem.inputs.device)
    lead = torch.broadcast_shapes(scale.shape, widths.shape, start.inner_mean.shape[:-2])  # type: ignore[no-untyped-call]
    outputs, shape = start.num_outputs, start.theta.shape[-2:]

    def neurons(point: Tensor) -> Neurons:
        return Neurons.from_theta(_swapped(point.reshape(*lead, *shape), outputs, torch.exp), outputs, start.shares)

    def objective(point: Tensor) -> Tensor:
        place = neurons(point)
        return problem.kl(place) + problem.data_terms(place, widths).mean(-1) / scale

    point = _swapped(start.theta, outputs, torch.log).detach().expand(*lead, *shape).reshape(*lead, -1)
    value, gradient, curvature = _derivatives(objective, point)
    taken = 0
    while taken < rounds:
        step = _newton(gradient, curvature)
        moved = _descended(objective, point, value, gradient, step)
        before, taken = gradient.abs().amax(-1), taken + 1
        value, gradient, curvature = _derivatives(objective, moved)
        still = (moved - point).abs().amax(-1) <= _ROUNDING
        point = moved
        # Newton's method squares the error: once tiny gradients no longer halve they are rounding.
        if bool((still | ((before < 1e-9) & (gradient.abs().amax(-1) > 0.5 * before))).all()):
            break
    return Optimum(neurons(point), gradient.abs().amax(-1), taken)


def _swapped(theta: Tensor, outputs: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """theta with its scales through a function."""
    outer_mean, outer_scale, inner_mean, inner_scale = parts(theta, outputs)
    return torch.cat([outer_mean, change(outer_scale), inner_mean, change(inner_scale)], -1)


def _derivatives(objective: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value (...), gradient (..., K) and Hessian (..., K, K); the searches do not touch each other."""
    with torch.enable_grad():
        leaf = point.detach().requires_grad_()
        value = objective(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
        columns = [
            torch.autograd.grad(gradient[..., k].sum(), leaf, retain_graph=True)[0] for k in range(point.shape[-1])
        ]
    return value.detach(), gradient.detach(), torch.stack(columns, -1)


def _newton(gradient: Tensor, curvature: Tensor) -> Tensor:
    """-|H|^-1 gradient, where |H| has the absolute eigenvalues of H, none of them tiny; shortened where it is long."""
    eigenvalues, vectors = torch.linalg.eigh(0.5 * (curvature + curvature.mT))
    sizes = eigenvalues.abs()
    sizes = torch.maximum(sizes, _FLAT * sizes.amax(-1, keepdim=True))
    step: Tensor = -(vectors @ ((vectors.mT @ gradient.unsqueeze(-1)) / sizes.unsqueeze(-1))).squeeze(-1)
    return step * (_LONGEST / step.abs().amax(-1, keepdim=True).clamp_min(_LONGEST))


def _descended(
    objective: Callable[[Tensor], Tensor], point: Tensor, value: Tensor, gradient: Tensor, step: Tensor
) -> Tensor:
    """The point after the step, halved for each search until its objective falls (or could not be seen to)."""
    promised = -(gradient * step).sum(-1)  # at least 0
    fraction, unseen = torch.ones_like(value), _ROUNDING * value.abs().clamp_min(1.0)
    for _ in range(_HALVINGS):
        with torch.no_grad():
            reached = objective(point + fraction.unsqueeze(-1) * step)
        # not finite counts as no descent
        good = (reached <= value - 1e-4 * fraction * promised) | ((promised <= unseen) & (reached <= value + unseen))
        if bool(good.all()):
            break
        fraction = torch.where(good, fraction, 0.5 * fraction)
    return point + fraction.unsqueeze(-1) * step
