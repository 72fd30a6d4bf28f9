"""Mean-field variational inference: the factorised Gaussian that maximises the ELBO."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import of_kinds, positive
from posterity.inference.method import BatchSize, Footprint, Info, Traits, Work, theta_bytes
from posterity.methods.parts.gradients.drawn_weights import WeightSampling
from posterity.methods.parts.gradients.estimator import (
    Estimator,
    Factorised,
    Gradients,
    Memory,
    divergence,
    initial_log_scales,
)
from posterity.methods.parts.variational_fit import Start, VariationalFit, mean_units, sampling
from posterity.model import Batch, Buffers, Data, Problem
from posterity.numerics.random import Key
from posterity.numerics.workspace import workspace
from posterity.optim import Constant, Optimizer, ScaledAdam, Schedule
from posterity.posteriors.gaussian import Gaussian
from posterity.precisions.diagonal import Diagonal

_PER_OCTAVE = 1.0 / math.log(2.0)


class MeanFieldState(NamedTuple):
    """`parameters` (T + R,) or (M, T + R): means (T,) of theta, then log-scales (R,) of the random weights.

    `optimizer` holds the moments, `buffers` batch-norm statistics, `memory` the estimator's state.
    """

    parameters: Tensor
    optimizer: Any
    buffers: Buffers
    memory: Memory
    step: int


@dataclass(frozen=True)
class MeanField(VariationalFit):
    """Mean-field variational inference (Bayes by Backprop): independent Gaussian weights that maximise the ELBO.

    **Math**: q(w) = prod N(mean, scale^2); ascent on lp E_q log p(D | w) - pp E_q[-log p(w)] + H(q) by `optimizer`
    in (mean, log scale). The first term comes from `estimator`, on a batch; cross-entropy and entropy are in closed
    form (from one draw where the prior has no cross-entropy) with their gradients. `kl_schedule` multiplies the last
    two terms during the run. The trace has, in nats per datum, "loss" (minus the tempered ELBO) and untempered
    "data_fit" E log p(D | w), "kl" and "elbo" = data_fit - kl. Weights that the joint does not have as random, and the
    likelihood's learnt parameters, are trained points: their log prior is in "kl", with a minus. Scales begin at
    the standard deviations of `initial_scales`, means at the weights; with `AtMode` both at a mode, and the first
    steps record minus the log density as "loss". Steps in the log-scales are longer by the factor `scale_step`:
    in large networks their gradients are mostly noise, and steps that suit the means hardly move them. At the end
    "elbo_gap" estimates what more steps would add, in nats; if that is much, a warning says so. "width_cost" is what q
    costs beside its mean in predictions of rows, in nats a row, with a warning where it does harm. Settings left out
    (None, "auto") are chosen as `VariationalFit` says.

    **Limit**: a local optimum of a bound; scales are conditional, too small where weights are correlated.
    Members that train together draw the same noise.

    **Cost**: the cost of `estimator`, and some passes over means and scales; two moments for each of them.

    **References**: Graves (2011), Practical variational inference; Blundell et al. (2015), eq. 2-9.

    **Example**:

    >>> import torch, posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(), num_data=20)
    >>> method = po.methods.MeanField(steps=1500, batch_size=None, optimizer=po.optim.Adam(0.02))
    >>> q, trace = po.infer(method, joint, (x, 2 * x))
    >>> exact = (20 / 0.5**2 + 1) ** -0.5  # of the bias
    >>> bool((q.variance[1].sqrt() / exact - 1).abs() < 0.2)
    True
    """

    steps: int | None = None
    batch_size: BatchSize = "auto"
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    estimator: Estimator | None = None
    kl_schedule: Schedule = field(default_factory=Constant)
    initial_scales: Start | None = None
    scale_step: float = field(default=1.0, repr=False)

    def __repr__(self) -> str:
        # `scale_step` only where it is set: a run is known by this text, and runs of 0.1.0 have no such field.
        shown = (own.name for own in fields(self) if own.repr or getattr(self, own.name) != own.default)
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __post_init__(self) -> None:
        super().__post_init__()
        of_kinds(self, kl_schedule=Schedule)
        positive("MeanField.scale_step", self.scale_step)
        if self.estimator is not None:
            of_kinds(self, estimator=Estimator)

    def _companions(self) -> dict[str, Any]:
        return {"estimator": WeightSampling()}

    def _choices(self, joint: Problem, draws: int) -> dict[str, Any]:
        return {"estimator": sampling(draws) if self.estimator is None else self.estimator}

    @property
    def traits(self) -> Traits:
        return replace(super().traits, recordable=not self.search)

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        count, size = joint.num_random, joint.size + joint.num_random
        held = {"means and scales": theta_bytes(joint, size + count), "gradient": theta_bytes(joint, size)}
        posterior = theta_bytes(joint, size + joint.size + count) + 8 * (joint.num_members or 1) * count
        return self._sampled_footprint(joint, data, held, size, theta_bytes(joint, 3 * count), posterior)

    def work(self, joint: Problem, data: Data) -> Work | None:
        return self._sampled_work(joint, data, vectors=20)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> MeanFieldState:
        log_scales = initial_log_scales(joint, self.scale_rule, theta)
        parameters = torch.cat([theta, log_scales.expand(*theta.shape[:-1], -1)], dim=-1)
        return MeanFieldState(parameters, self._moments(theta, parameters), joint.starting_buffers(theta), {}, 0)

    def step(self, joint: Problem, state: MeanFieldState, batch: Batch, key: Key) -> tuple[MeanFieldState, Info]:
        parameters, size = state.parameters, joint.size
        if self.search and state.step < self.search:  # a recorded step is a tensor, whose value must not be read
            return self._search_step(joint, state, batch)
        log_scale = parameters[..., size:]
        scale = torch.mul(log_scale, _PER_OCTAVE, out=workspace(joint, "scale", log_scale)).exp2_()  # faster than exp
        q = Factorised(parameters[..., :size], scale, joint.random_indices)
        grad = workspace(joint, "parameters", parameters)
        grads = Gradients(grad[..., :size], grad[..., size:])
        term = self.chosen("estimator").data_term(joint, q, batch, state.buffers, state.memory, key.fold("data"), grads)
        term = term.written(grads)
        weight = self.kl_schedule.factor(state.step, self.chosen("steps"))
        at_draws = term.divergence_grads
        closed = -weight if at_draws is None else 0.0
        prior = divergence(joint, q, log_scale, key.fold("prior"), grads, closed)
        if at_draws is not None:
            grads.mean.sub_(at_draws.mean.mul_(weight))
            grads.scale.sub_(at_draws.scale.mul_(weight))
        grads.scale.mul_(q.scale)  # d scale / d log scale
        if at_draws is None:
            grads.scale.add_(weight)  # the entropy's gradient
        info = prior.info(joint, term.value)
        units = None
        if isinstance(self.optimizer, ScaledAdam):
            units = torch.ones_like(parameters)
            spread = mean_units(scale)
            if q.places is None:
                units[..., : scale.shape[-1]] = spread
            else:
                units.index_copy_(-1, q.places, spread)
        before = None if self.scale_step == 1.0 else log_scale.clone()
        moments = self._ascended(joint, parameters, grad, state, units)
        if before is not None:
            log_scale.copy_(torch.lerp(before, log_scale, self.scale_step))
        return MeanFieldState(parameters, moments, term.buffers, term.memory, state.step + 1), info

    def _search_step(self, joint: Problem, state: MeanFieldState, batch: Batch) -> tuple[MeanFieldState, Info]:
        """Look for the mode; the last step also takes the scales from the curvature there."""
        parameters, size = state.parameters, joint.size
        result, moments, info = self._searched(joint, parameters[..., :size], batch, state)
        parameters[..., :size] = result.theta
        if state.step + 1 == self.search and result.curvature is not None:
            parameters[..., size:] = -0.5 * result.curvature.diagonal(dim1=-2, dim2=-1).log()
        return state._replace(parameters=parameters, optimizer=moments, step=state.step + 1), info

    def keep(self, state: MeanFieldState) -> MeanFieldState:
        return state._replace(optimizer=None, memory={})

    def posterior(self, joint: Problem, kept: Sequence[MeanFieldState]) -> Gaussian:
        last = kept[-1]
        theta, log_scales = last.parameters[..., : joint.size].clone(), last.parameters[..., joint.size :]
        precision = Diagonal((-2.0 * log_scales).double().exp_())
        return Gaussian(joint.fitted(theta), theta[..., : joint.num_weights], precision, last.buffers)
