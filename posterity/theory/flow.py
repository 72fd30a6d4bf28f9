"""The Wasserstein gradient flow of the mean-field functional, by particles."""

from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.theory.neurons import Neurons, parts
from posterity.theory.wide import WideProblem

_ROUNDING = 1e-13  # falls of F below this are rounding, relative to |F| or 1
_SHORTEST = 1e-12  # of the time still to go: no step is shorter
_STAGES = ((1.0 / 2.0,), (0.0, 3.0 / 4.0), (2.0 / 9.0, 1.0 / 3.0, 4.0 / 9.0))  # the last is the step of order 3
_ERROR = (-5.0 / 72.0, 1.0 / 12.0, 1.0 / 9.0, -1.0 / 8.0)  # order 3 minus order 2
_GROWTH, _SHRINK, _SAFETY = 5.0, 0.2, 0.9


class Flow(NamedTuple):
    """The particles of a flow at some times."""

    times: Tensor  # (T,)
    neurons: Neurons  # leading axis T
    values: Tensor  # F(nu), (T, ...)
    steps: int


def particle_flow(
    problem: WideProblem, start: Neurons, tau: float | Tensor, times: Tensor, *, tolerance: float = 1e-6
) -> Flow:
    """Follow the particles theta_j of nu along d theta_j / ds = grad F'(nu)(theta_j), from `start` at s = 0.

    `times` (T,) ascend from 0 or later. The particles at each are returned with F(nu) = `problem.balanced` there. One
    step size serves all leading axes of the neurons.

    **Math**: nu_s is the gradient flow of F in the Wasserstein metric, and dF/ds = integral of |grad F'|^2 d nu >= 0.
    It is integrated by the pair of Runge-Kutta methods of order 3 and 2 of Bogacki and Shampine, whose difference
    in any parameter stays below `tolerance` in each step. A step that would lower F, or make a scale negative, is
    halved.

    **Limit**: a stationary point of F over the places of the particles, at which F' need not be constant over them:
    the flow moves mass and does not create it elsewhere. With particles that are spread out, F is that of the best nu
    if the loss is convex and the flow converges (Chizat and Bach, 2018).

    **Cost**: three gradients of all particles at all rows in each step.

    **References**: Huix, Majewski, Durmus, Moulines and Korba (2022); Chizat and Bach (2018), On the global convergence
    of gradient descent for over-parameterized models using optimal transport; Bogacki and Shampine (1989).

    **Example**:

    >>> problem = WideProblem(torch.tensor([[1.0]]), torch.tensor([0.5]))
    >>> start = Neurons(torch.ones(2, 1), torch.ones(2, 1), torch.tensor([[0.5], [1.5]]), torch.ones(2, 1))
    >>> flow = particle_flow(problem, start, 0.1, torch.tensor([0.0, 0.1, 1.0]))
    >>> bool((flow.values.diff() > 0).all()), flow.neurons.theta.shape
    (True, torch.Size([3, 2, 4]))
    """
    positive("particle_flow: tau", tau)
    positive("particle_flow: tolerance", tolerance)
    moments = torch.as_tensor(times, dtype=torch.float64, device=problem.inputs.device)
    if moments.dim() != 1 or not len(moments) or bool((moments < 0.0).any()) or bool((moments.diff() <= 0.0).any()):
        raise ValueError(f"particle_flow: times must be (T,), ascending, and at least 0. Got {shown(times)}.")
    particles = _Particles(problem, start, problem._tensor(tau))
    thetas, values = [], []
    for moment in moments.tolist():
        particles.move_to(moment, tolerance)
        thetas.append(particles.theta)
        values.append(particles.value)
    neurons = Neurons.from_theta(torch.stack(thetas), start.num_outputs, start.shares)
    return Flow(moments, neurons, torch.stack(values), particles.steps)


class _Particles:
    """Particles at a time, with the gradient and F there, and the length of the next step."""

    def __init__(self, problem: WideProblem, start: Neurons, tau: Tensor) -> None:
        self.problem, self.start, self.tau = problem, start, tau
        lead = torch.broadcast_shapes(tau.shape, start.theta.shape[:-2])  # type: ignore[no-untyped-call]
        self.theta = start.theta.detach().expand(*lead, *start.theta.shape[-2:]).clone()
        self.time, self.steps, self.length = 0.0, 0, 1e-2
        self.velocity, self.value = self._velocity(self.theta), self._value(self.theta)

    def move_to(self, time: float, tolerance: float) -> None:
        """Take steps until the time is reached."""
        while self.time < time:
            rest = time - self.time
            length = min(self.length, rest)
            if length < _SHORTEST * rest:
                raise RuntimeError(
                    f"particle_flow: no step from time {self.time:.6g} on raises F. Give a smaller tolerance."
                )
            error = self._step(length, tolerance)
            factor = _SAFETY * error ** (-1.0 / 3.0) if error > 0.0 else _GROWTH
            proposed = length * min(_GROWTH, max(_SHRINK, factor))
            self.length = max(self.length, proposed) if error <= 1.0 and length == rest else proposed
            if error <= 1.0:
                self.time = time if length == rest else self.time + length

    def _step(self, length: float, tolerance: float) -> float:
        """Move by a step if its error, the number returned, is at most 1 tolerance."""
        stages, reached = [self.velocity], self.theta
        for weights in _STAGES:
            reached = self.theta + length * _combined(weights, stages)
            if not self._possible(reached):
                return torch.inf
            stages.append(self._velocity(reached))
        off = length * _combined(_ERROR, stages)
        error, value = float(off.abs().max()) / tolerance, self._value(reached)
        if bool((value < self.value - _ROUNDING * self.value.abs().clamp_min(1.0)).any()):
            error = torch.inf
        if error <= 1.0:
            self.theta, self.velocity, self.value, self.steps = reached, stages[-1], value, self.steps + 1
        return error

    def _possible(self, theta: Tensor) -> bool:
        """Whether all scales are positive."""
        _, outer, _, inner = parts(theta, self.start.num_outputs)
        return bool((outer > 0.0).all() & (inner > 0.0).all())

    def _velocity(self, theta: Tensor) -> Tensor:
        return self.problem.particle_gradient(self._neurons(theta), self.tau)

    def _value(self, theta: Tensor) -> Tensor:
        return self.problem.balanced(self._neurons(theta), self.tau)

    def _neurons(self, theta: Tensor) -> Neurons:
        return Neurons.from_theta(theta, self.start.num_outputs, self.start.shares)


def _combined(weights: tuple[float, ...], stages: list[Tensor]) -> Tensor:
    return torch.stack([weight * stage for weight, stage in zip(weights, stages, strict=True)]).sum(0)
