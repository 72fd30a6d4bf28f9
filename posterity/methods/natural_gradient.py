"""Variational inference by natural gradients: a factorised Gaussian whose precision follows the Hessian."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.errors import fraction, of_kinds, positive, shown
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
from posterity.methods.parts.variational_fit import Start, VariationalFit, sampling
from posterity.model import Batch, Buffers, Data, Problem
from posterity.numerics.random import Key
from posterity.numerics.workspace import workspace
from posterity.optim import Adam, Optimizer, Schedule
from posterity.optim.online_newton import online_newton_
from posterity.posteriors.gaussian import Gaussian
from posterity.precisions.diagonal import Diagonal

_SMALL, _LARGE = (2.0, 0.05), (0.1, 0.1)  # (step_size, radius) where they were left out, by the kind of problem
_RATE = 0.02  # 1 - beta2 where that was left out, times the factor of the schedule


class NaturalGradientState(NamedTuple):
    """Means (T,) of theta, precisions and momentum (R,) of the random weights, or (M, ...) of each.

    `optimizer` holds the moments of the entries that are points (None without any), `memory` the estimator's state.
    """

    mean: Tensor
    precision: Tensor
    momentum: Tensor
    optimizer: Any
    buffers: Buffers
    memory: Memory
    step: int


@dataclass(frozen=True)
class NaturalGradient(VariationalFit):
    """Natural-gradient variational inference (improved variational online Newton) of independent Gaussian weights.

    **Math**: q(w) = prod N(mean, 1 / precision), for the ELBO lp E_q log p(D | w) - pp E_q[-log p(w)] + H(q). With
    g = d/dmean lp E log p(D | w) and h = -(d/dscale lp E log p(D | w)) / scale from `estimator` (by weight sampling: g
    eps / scale at draws), and the prior's own pull d = d/dmean pp E[-log p(w)] and Hessian e = (d/dscale pp E[-log
    p(w)]) / scale in closed form (from a draw where the prior has no cross-entropy; for N(m0, s0^2) they are
    pp (mean - m0) / s0^2 and pp / s0^2),

    - momentum v <- beta1 v + (1 - beta1) g
    - precision <- precision (1 + x + x^2 / 2), x = (1 - beta2) (h + e - precision) / precision
    - mean <- mean + step_size (v / (1 - beta1^t) - d) / precision.

    The term x^2 / 2 keeps precisions positive, whatever the noise of h. Without it (`bend=0`) the second line is the
    plain natural gradient of the ELBO: a moving average of h + e, for estimators whose h + e is positive. Weights that
    the joint does not have as random, and the likelihood's learnt parameters, are trained points, moved by `optimizer`.
    `schedule` multiplies the steps of means and points. Trace and start are as in `MeanField`.

    **Limit**: a local optimum of the bound. Where -log p(D, w) is quadratic, the exact estimates of `SecondOrder` on
    all rows with bend=0, beta1=0, beta2=0 and step_size=1 have the precisions of the optimum after one step, and its
    means too if the Hessian is diagonal; else the means follow by Jacobi iterations, which a step_size below 1 makes
    converge. Members that train together draw the same noise.

    **Defaults**: settings left out (None, "auto") are chosen as `VariationalFit` says. `radius` is the most that a mean
    moves in a step of size 1 (None: no bound). In small problems, whose steps take all rows and eight draws, step_size
    is 2 and radius 0.05, in others 0.1 and 0.1; beta2 left out is 1 - 0.02 times the factor of the schedule, so that
    the noise of the precisions falls with it. With a step size or an optimiser that is given the others are those of
    one draw and a constant schedule: step_size 0.01, radius 1 and beta2 0.99, chosen for a low loss on two moons, a
    UCI table and a thousand digits with mini-batches (`python -m benchmarks.natural_gradient_settings`). Precisions
    fall by no more than 1 - beta2 a step: one that begins at a hundred times the fan-in takes log(100 fan-in) /
    (1 - beta2) steps to come to 1.

    **Cost**: the cost of `estimator`, and some passes over means and precisions; one momentum.

    **References**: Shen et al. (2024), Variational learning is effective for large deep networks, Algorithm 1; Khan and
    Rue (2023), The Bayesian learning rule, section 4; Lin, Schmidt and Khan (2020), Handling the positive-definite
    constraint in the Bayesian learning rule, eq. 9.

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(1.0), num_data=20)
    >>> exact = 20 / 0.5**2 + 1  # precision of the bias
    >>> method = po.methods.NaturalGradient(
    ...     steps=1, batch_size=None, estimator=po.methods.SecondOrder(), step_size=1.0,
    ...     beta1=0.0, beta2=0.0, bend=0.0, radius=None,
    ... )
    >>> q, trace = po.infer(method, joint, (x, 2 * x))
    >>> bool((q.precision.entries[1] - exact).abs() < 1e-4)
    True
    """

    steps: int | None = None
    batch_size: BatchSize = "auto"
    step_size: float | None = None
    schedule: Schedule | None = None
    estimator: Estimator | None = None
    beta1: float = 0.9
    beta2: float | None = None
    bend: float = 0.5
    radius: float | Literal["auto"] | None = "auto"
    initial_scales: Start | None = None
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is not None:
            positive("NaturalGradient.step_size", self.step_size)
        if self.radius is not None and self.radius != "auto":
            positive("NaturalGradient.radius", self.radius, "or None, the most that a mean moves in a step of size 1")
        fraction("NaturalGradient.beta1", self.beta1)
        if self.beta2 is not None:
            fraction("NaturalGradient.beta2", self.beta2)
        if self.bend not in (0.0, 0.5):
            raise ValueError(f"NaturalGradient.bend must be 0.5 or 0, for the plain update. Got {shown(self.bend)}.")
        if self.estimator is not None:
            of_kinds(self, estimator=Estimator)

    @property
    def _optimizer_given(self) -> bool:
        return self.step_size is not None or super()._optimizer_given

    def _companions(self) -> dict[str, Any]:
        return {"optimizer": Adam(), "estimator": WeightSampling(), "step_size": 0.01, "radius": 1.0, "beta2": 0.99}

    def _choices(self, joint: Problem, draws: int) -> dict[str, Any]:
        step_size, radius = _SMALL if draws > 1 else _LARGE
        return {
            "step_size": step_size if self.step_size is None else self.step_size,
            "radius": radius if self.radius == "auto" else self.radius,
            "estimator": sampling(draws) if self.estimator is None else self.estimator,
        }

    @property
    def traits(self) -> Traits:
        return replace(super().traits, recordable=not self.search)

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        count, size = joint.num_random, joint.size
        held = {
            "means, precisions and momentum": theta_bytes(joint, size + 3 * count),
            "gradient": theta_bytes(joint, 2 * size + 2 * count),
        }
        posterior = theta_bytes(joint, 2 * size + count) + 8 * (joint.num_members or 1) * count
        return self._sampled_footprint(joint, data, held, size - count, theta_bytes(joint, 4 * count), posterior)

    def work(self, joint: Problem, data: Data) -> Work | None:
        return self._sampled_work(joint, data, vectors=14)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> NaturalGradientState:
        log_scales = initial_log_scales(joint, self.scale_rule, theta)
        precision = (-2.0 * log_scales).exp().expand(*theta.shape[:-1], -1).clone()
        points = _points(joint, theta.device)
        moments = self._moments(theta, theta[..., :0] if points is None else theta.index_select(-1, points))
        moments = None if points is None and not self.search else moments
        buffers = joint.starting_buffers(theta)
        return NaturalGradientState(theta.clone(), precision, torch.zeros_like(precision), moments, buffers, {}, 0)

    def step(
        self, joint: Problem, state: NaturalGradientState, batch: Batch, key: Key
    ) -> tuple[NaturalGradientState, Info]:
        mean, precision, momentum = state.mean, state.precision, state.momentum
        if self.search and state.step < self.search:  # a recorded step is a tensor, whose value must not be read
            return self._search_step(joint, state, batch)
        scale = torch.rsqrt(precision, out=workspace(joint, "scale", precision))
        q = Factorised(mean, scale, joint.random_indices)
        term = self.chosen("estimator").data_term(joint, q, batch, state.buffers, state.memory, key.fold("data"))
        pulls = Gradients(workspace(joint, "pull", mean).zero_(), workspace(joint, "pull_scale", scale).zero_())
        prior = divergence(joint, q, scale.log(), key.fold("prior"), pulls, 1.0)
        step = self._number(state)
        factor = self.chosen("schedule").factor(step, self.chosen("steps"))
        if term.divergence_grads is None:
            pull, hessian = pulls.mean, pulls.scale.div_(scale)
        else:  # at the draws, the entropy with its -1 / scale among them
            pull, hessian = term.divergence_grads.mean, term.divergence_grads.scale / scale + precision
        moments, points = state.optimizer, _points(joint, mean.device)
        if points is not None:
            # They are the entries that the update of the random weights below leaves as they are.
            moved, ascent = mean.index_select(-1, points), (term.grad_mean - pull).index_select(-1, points)
            moments = self._ascended(joint, moved, ascent, state)
            mean.index_copy_(-1, points, moved)
        momentum.lerp_(q.random(term.grad_mean), 1.0 - self.beta1)
        correction = 1.0 - self.beta1 ** (step + 1)
        product = term.grad_scale.contiguous()
        online_newton_(
            precision,
            scale,
            momentum,
            q.random(pull).contiguous(),
            product,
            hessian,
            weight=-1.0,  # these are gradients of the log-likelihood, not of a loss
            rate=_RATE * factor if self.beta2 is None else 1.0 - self.beta2,
            pull_factor=-correction,
            bend=self.bend,
            radius=math.inf if self.radius is None else self.chosen("radius") * correction,
        )
        product.mul_(self.chosen("step_size") * factor / correction)
        if q.places is None:
            mean[..., : product.shape[-1]].add_(product)
        else:
            mean.index_add_(-1, q.places, product)
        after = NaturalGradientState(mean, precision, momentum, moments, term.buffers, term.memory, state.step + 1)
        return after, prior.info(joint, term.value)

    def _search_step(
        self, joint: Problem, state: NaturalGradientState, batch: Batch
    ) -> tuple[NaturalGradientState, Info]:
        """Look for the mode; the last step also takes the precisions from the curvature there."""
        result, moments, info = self._searched(joint, state.mean, batch, state)
        if state.step + 1 == self.search and result.curvature is not None:
            state.precision.copy_(result.curvature.diagonal(dim1=-2, dim2=-1))
        return state._replace(mean=result.theta, optimizer=moments, step=state.step + 1), info

    def keep(self, state: NaturalGradientState) -> NaturalGradientState:
        return state._replace(momentum=state.momentum[..., :0], optimizer=None, memory={})

    def posterior(self, joint: Problem, kept: Sequence[NaturalGradientState]) -> Gaussian:
        last = kept[-1]
        theta, precision = last.mean.clone(), Diagonal(last.precision.double())
        return Gaussian(joint.fitted(theta), theta[..., : joint.num_weights], precision, last.buffers)


_POINTS: WeakKeyDictionary[Problem, Tensor] = WeakKeyDictionary()  # made once: a recorded step cannot look for them


def _points(joint: Problem, device: torch.device) -> Tensor | None:
    """Indices into theta of the entries without a distribution; None where there are none."""
    if joint.num_random == joint.size:
        return None
    if joint.random_indices is None:
        return torch.arange(joint.num_random, joint.size, device=device)
    if joint not in _POINTS:
        fixed = torch.ones(joint.size, dtype=torch.bool, device=device)
        fixed[joint.random_indices] = False
        _POINTS[joint] = fixed.nonzero().squeeze(-1)
    return _POINTS[joint]
