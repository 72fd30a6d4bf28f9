"""Stochastic gradient Langevin dynamics."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

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


class SGLDState(NamedTuple):
    """theta (C, P), statistics of the preconditioner, batch-norm statistics of each chain, number of steps done."""

    theta: Tensor
    known: Any
    buffers: Buffers
    step: int


@dataclass(frozen=True)
class SGLD(MinibatchChains):
    """Stochastic gradient Langevin dynamics: gradient steps with noise of the size that makes them a sampler.

    **Math**: theta <- theta + s G grad + sqrt(2 s G) eps, with s = `step_size` times the factor of `schedule`, grad the
    gradient of the whole tempered log density, estimated from `batch_size` rows, eps ~ N(0, I), and G the diagonal of
    the `preconditioner`: 1, or with `Fisher()` or `RMSprop()` a step size for each weight, learnt in the warm-up. For G
    = 1 it is SGD on the mean loss (nats per datum) with learning rate s num_data likelihood_power, with RMSprop it is
    RMSprop at that rate: `step_size_for` converts; s is half the epsilon of Welling and Teh. `step_size=None` amounts
    to a rate of 0.3 with Fisher, 0.001 with RMSprop, else 0.03. The only temperature is that of the joint:
    `Tempering.cold(T)` is the cold posterior of Wenzel et al.

    **Defaults**: where neither step size nor preconditioner is set, `Fisher()` learns both in the warm-up, which begins
    with a search for a mode. With r batches in a pass over the data the warm-up has 100 r steps, at least 2,000 and at
    most 20,000; 100 draws of each chain are 10 r steps apart, at least 20 and at most 200. A step size alone, a warm-up
    below 100 steps or `Cycles` mean G = 1. After the run a warning tells of a loss above its start, of temperatures
    below 0.5 or above 2 over the last half, and of chains that have not mixed (R-hat of the loss above 1.2).

    **Limit**: exact for s -> 0. On a quadratic bowl of curvature h the variance is 1 / (h (1 - s G h / 2)), without
    bound from s G = 2 / h on. Gradient noise of variance v that is drawn anew each step adds
    s G v / (2 h (1 - s G h / 2)); with shuffled rows it adds less, as the batches of a pass make up for each other.
    Draws count alike, whatever their step size. Batch norm in training mode makes the gradient one of another density
    for each batch. In the trace, "configurational_temperature" is 1 on average where steps are small enough and chains
    have forgotten their starts: smaller before that, larger where steps or gradient noise are too large. With G = 1
    chains are as slow as the weight of the largest curvature makes them. With `Fisher` that temperature is taken about
    the mean of theta in the warm-up, else about 0, where its noise is larger.

    **Cost**: one forward and one backward pass a step; all draws are kept, `draws` times the size of theta a chain.

    **References**: Welling and Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics, eq. 4; Li et
    al. (2016), Preconditioned stochastic gradient Langevin dynamics for deep neural networks; Wenzel et al. (2020), How
    good is the Bayes posterior in deep neural networks really?, section 3; Zhang et al. (2020), Cyclical stochastic
    gradient MCMC, Algorithm 1 (`schedule=Cycles(...)`).

    **Example**:

    >>> import torch, posterity as po
    >>> density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (1,)})
    >>> method = po.methods.SGLD(draws=20, warmup=50, chains=200, step_size=0.1, thin=25)
    >>> q, trace = po.infer(method, density, None)
    >>> 0.92 < float(q.theta.var()) * (1 - 0.1 / 2) < 1.08
    True
    """

    vectors: ClassVar[int] = 1
    scratch: ClassVar[int] = 4

    draws: int = SETTLED_LATER
    warmup: int = SETTLED_LATER
    chains: int = 4
    step_size: float | None = None
    batch_size: int | None = 128
    thin: int = SETTLED_LATER
    schedule: Schedule = field(default_factory=Constant)
    preconditioner: Preconditioner | None = None

    @staticmethod
    def step_size_for(learning_rate: float, joint: Problem) -> float | Tensor:
        return learning_rate / loss_factor(joint)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> SGLDState:
        theta = self.each_chain(joint, theta)
        return SGLDState(theta, self.rule.init(theta), joint.starting_buffers(theta), 0)

    def step(self, joint: Problem, state: SGLDState, batch: Batch, key: Key) -> tuple[SGLDState, Info]:
        theta, number = state.theta, step_number(state.step, state.theta.device)
        value, grad, buffers = chain_gradients(joint, theta, batch, state.buffers)
        size = self.step_size_at(joint, number)
        known, matrix = self.preconditioned(joint, state.known, theta, grad, number)
        info = chain_info(joint, theta, value, grad, size, self.rule.reference(known, number, self.warmup))
        scaled = size * matrix
        sampled = theta + scaled * grad + (2.0 * scaled) ** 0.5 * self.noise_at(theta, number, key)
        theta = self.rule.moved(theta, sampled, known, number, self.warmup)
        return SGLDState(theta, known, buffers, state.step + 1), info
