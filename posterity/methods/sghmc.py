"""Stochastic gradient Hamiltonian Monte Carlo."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.errors import fraction
from posterity.inference.method import Info
from posterity.methods.parts.gradient_runs import SETTLED_LATER
from posterity.methods.parts.minibatch_chains import (
    MinibatchChains,
    chain_gradients,
    chain_info,
    loss_factor,
    step_number,
)
from posterity.methods.parts.preconditioners import Preconditioner
from posterity.model import Batch, Buffers, Problem
from posterity.numerics.random import Key
from posterity.optim.schedules import Constant, Schedule


class SGHMCState(NamedTuple):
    """theta and velocity (C, P), statistics of the preconditioner, batch-norm statistics of each chain, steps done."""

    theta: Tensor
    velocity: Tensor
    known: Any
    buffers: Buffers
    step: int


@dataclass(frozen=True)
class SGHMC(MinibatchChains):
    """Stochastic gradient Hamiltonian Monte Carlo: SGD with momentum, and the noise that makes it a sampler.

    **Math**: Langevin dynamics with friction, d theta = v dt, d v = grad dt - c v dt + sqrt(2 c) dW, in steps of h =
    `step_size` times the factor of `schedule`, split as BAOAB with its two half kicks at one point made one: v <- v + h
    grad; theta <- theta + h v / 2; v <- a v + sqrt(1 - a^2) eps; theta <- theta + h v / 2. `momentum` is the share a of
    the velocity that is left after a step of `step_size`, so that c = -log(momentum) / step_size; grad is the gradient
    of the whole tempered log density, estimated from `batch_size` rows. The diagonal G of the `preconditioner` is an
    inverse mass: grad and v are multiplied by sqrt(G) where they are used; it is 1, or with `Fisher()` or `RMSprop()`
    learnt in the warm-up. For SGD with momentum on the mean loss (nats per datum), h^2 is learning rate / (num_data
    likelihood_power): `step_size_for` converts. `step_size=None` amounts to a rate of 0.3 (1 - momentum) with Fisher,
    0.001 sqrt(1 - momentum) with RMSprop, else 0.03 sqrt(1 - momentum).

    **Defaults**: where neither step size nor preconditioner is set, `Fisher()` learns both in the warm-up, which begins
    with a search for a mode. With r batches in a pass over the data the warm-up has 100 r steps, at least 2,000 and at
    most 20,000; 100 draws of each chain are 10 r steps apart, at least 20 and at most 200. A step size alone, a warm-up
    below 100 steps or `Cycles` mean G = 1. After the run a warning tells of a loss above its start, of temperatures
    below 0.5 or above 2 over the last half, and of chains that have not mixed (R-hat of the loss above 1.2).

    **Limit**: on a quadratic bowl of curvature k theta has the exact variance 1 / k, and v the exact 1, for every
    h < 2 / sqrt(G k), beyond which it is without bound; else the bias is of order h^2. Gradient noise of variance s
    that is drawn anew each step adds heat, which is not subtracted: h G s / (2 c) to the temperature for small h. In
    the trace, "kinetic_temperature" and "configurational_temperature" are 1 on average where all is well, whatever the
    tempering of the joint. More than 1 in the former: h is too large for the curvature or the rows of a batch, or
    momentum too near 1. Less in the latter: chains have not come far enough from their starts. Draws count alike,
    whatever their step size. Batch norm in training mode makes the gradient one of another density for each batch.

    **Cost**: one forward and one backward pass a step; all draws are kept, `draws` times the size of theta a chain.

    **References**: Chen et al. (2014), Stochastic gradient Hamiltonian Monte Carlo, eq. 13 (with no estimate of the
    gradient noise); Leimkuhler and Matthews (2013), Rational construction of stochastic numerical methods for molecular
    sampling (BAOAB); Wenzel et al. (2020), How good is the Bayes posterior in deep neural networks really?, section 3.

    **Example**:

    >>> import torch, posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (1,)})
    >>> method = po.methods.SGHMC(draws=20, warmup=50, chains=200, step_size=1.0, momentum=0.5, thin=10)
    >>> q, trace = po.infer(method, density, None)
    >>> 0.92 < float(q.theta.var()) < 1.08
    True
    """

    vectors: ClassVar[int] = 2
    scratch: ClassVar[int] = 6

    draws: int = SETTLED_LATER
    warmup: int = SETTLED_LATER
    chains: int = 4
    step_size: float | None = None
    batch_size: int | None = 128
    thin: int = SETTLED_LATER
    schedule: Schedule = field(default_factory=Constant)
    preconditioner: Preconditioner | None = None
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("SGHMC.momentum", self.momentum)

    @property
    def usual_rate(self) -> float:
        """Less than without momentum, which carries each gradient further; see the class."""
        return self.rule.usual_rate(self.momentum)

    @staticmethod
    def step_size_for(learning_rate: float, joint: Problem) -> float | Tensor:
        """sqrt(learning_rate / (num_data likelihood_power)), whatever the momentum."""
        return (learning_rate / loss_factor(joint)) ** 0.5

    def init(self, joint: Problem, theta: Tensor, key: Key) -> SGHMCState:
        """Chains at theta, with velocities drawn from their law."""
        theta = self.each_chain(joint, theta)
        velocity = key.normal(tuple(theta.shape), torch.float32, theta.device).to(theta.dtype)
        return SGHMCState(theta, velocity, self.rule.init(theta), joint.starting_buffers(theta), 0)

    def step(self, joint: Problem, state: SGHMCState, batch: Batch, key: Key) -> tuple[SGHMCState, Info]:
        theta, number = state.theta, step_number(state.step, state.theta.device)
        value, grad, buffers = chain_gradients(joint, theta, batch, state.buffers)
        size = self.step_size_at(joint, number)
        left = self.momentum ** self.schedule.factor(number, self.steps)
        known, matrix = self.preconditioned(joint, state.known, theta, grad, number)
        about = self.rule.reference(known, number, self.warmup)
        scaled = size * matrix**0.5
        kicked = state.velocity + scaled * grad
        # Before it is refreshed, so that the heat of the last gradient is all in it.
        kinetic = kicked.square().mean(-1)
        info = {**chain_info(joint, theta, value, grad, size, about), "kinetic_temperature": kinetic}
        noise = self.noise_at(theta, number, key)
        velocity = left * kicked + (1.0 - left * left) ** 0.5 * noise
        sampled = theta + (0.5 * scaled) * (kicked + velocity)
        theta = self.rule.moved(theta, sampled, known, number, self.warmup)
        return SGHMCState(theta, velocity, known, buffers, state.step + 1), info
