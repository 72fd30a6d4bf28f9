"""Maximum a posteriori, with proximal steps for priors that have kinks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import of_kinds
from posterity.inference.memory import fit_bytes
from posterity.inference.method import Footprint, GradientFit, Info, Traits, theta_bytes
from posterity.model import Batch, Buffers, Data, Joint, Problem
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam, Optimizer, Proximal
from posterity.optim.schedules import Constant, Schedule
from posterity.posteriors.point import Point


def smooth_value_and_grad(
    joint: Joint, theta: Tensor, batch: Batch, buffers: Buffers
) -> tuple[Tensor, Tensor, Buffers]:
    """`Joint.value_and_grad` with the gradient of all but the prior's kinks."""
    value, grad, buffers = joint.data_value_and_grad(theta, batch, buffers)
    weights, raw = joint.split(theta.detach())
    prior_value, prior_grad = joint.bound_prior.smooth_value_and_grad(weights)
    if raw.shape[-1]:
        extra, raw_grad = joint.free_value_and_grad(raw)
        prior_value, prior_grad = prior_value + extra, torch.cat([prior_grad, raw_grad], dim=-1)
    power = joint.powers[1]
    grad.add_(prior_grad * (power.unsqueeze(-1) if isinstance(power, Tensor) else power))
    return value + power * prior_value, grad, buffers


def proximal_of(joint: Joint) -> Proximal:
    """The proximal operator of -prior_power / num_data times the part of the log prior with kinks.

    The likelihood's own parameters, at the end of theta, are left as they are.
    """
    power = joint.powers[1]
    factor = (power.unsqueeze(-1) if isinstance(power, Tensor) else power) / joint.num_data

    def proximal(theta: Tensor, step: float | Tensor) -> Tensor:
        weights, raw = joint.split(theta)
        if isinstance(step, Tensor) and step.dim():
            step = step[..., : joint.num_weights]
        return torch.cat([joint.bound_prior.proximal(weights, step * factor), raw], dim=-1)

    return proximal


class MAPState(NamedTuple):
    """theta (P,) or (M, P), the optimiser's moments, batch-norm statistics and the number of steps done."""

    theta: Tensor
    optimizer: Any
    buffers: Buffers
    step: int


@dataclass(frozen=True)
class MAP(GradientFit):
    """Maximum a posteriori: the mode of the tempered log density, by gradient ascent.

    **Math**: theta* = argmax lp log p(D | theta) + pp log p(theta), by steps along grad / num_data. The trace's "loss"
    is minus the (batch estimate of the) log density in nats per datum. With a N(0, s^2) prior it is training with
    weight decay 1 / s^2 on the summed loss; the likelihood's learnt noise is fitted along with the weights.

    Under `Laplace` and `GroupLasso` priors, and tables with a kink, such as an elastic net (also as parts of
    `Layerwise`), the mode has weights that are exactly zero, which gradient steps only circle. With `proximal` each
    step goes along the gradient of all that is smooth, to z, and then to theta = argmin over w of sum of d_i (w_i -
    z_i)^2 / 2 - (pp / num_data) log p_k(w), p_k the part of the prior with kinks and 1 / d the optimiser's step size
    (`Adam`: by weight, step_size / (sqrt(v^) + epsilon)). For `Laplace` that is z moved towards the mean by (pp /
    num_data) / (scale d_i), and no further. For a group of `GroupLasso`, with k = rate pp / num_data, it is zero if ||d
    z|| <= k, else w_i = d_i z_i / (d_i + k / ||w||). Steps rest at stationary points of the log density and nowhere
    else. The trace has the fraction of "zeros" among weights, and `model.pruned` the smaller network.

    **Limit**: a local mode; `Adam` reaches it only with a schedule that goes to zero. Priors without kinks change
    nothing under `proximal`. A weight that no row has moved yet has the longest step by weight in `Adam`, step_size /
    epsilon, and is zero at once. A group vanishes only in a run that is long enough to bring it there, step size by
    step size. Where batch norm follows a layer, the mode has hardly any length: its weights, all shorter, compute the
    same (but for the norm's epsilon) under a higher prior density, so that the result depends on step size and
    length of the run.

    **Cost**: one forward and one backward pass a step; two moments of the size of theta. A proximal step adds a few
    passes over theta, or some tens for `GroupLasso` with `Adam`.

    **References**: Bishop (2006), section 5.2; Kingma and Ba (2015); Parikh and Boyd (2014), Proximal algorithms,
    sections 4.2 and 6.5; Yun, Lozano and Yang (2021), Adaptive proximal gradient methods for structured networks.

    **Example**:

    >>> import torch, posterity as po
    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> joint = po.Joint(po.networks.MLP([2, 8, 2]), po.likelihoods.Categorical(), po.priors.Normal(), num_data=50)
    >>> q, trace = po.infer(po.methods.MAP(steps=300, batch_size=None), joint, (x, y))
    >>> po.metrics.accuracy(q.predict(x), y) > 0.9
    True
    """

    steps: int = 2000
    batch_size: int | None = 128
    optimizer: Optimizer = field(default_factory=Adam)
    schedule: Schedule = field(default_factory=Constant)
    proximal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        of_kinds(self, proximal=bool)

    @property
    def traits(self) -> Traits:
        return Traits(recordable=True)

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        from posterity.methods.parts.scales import by_evidence  # which is made of this method

        return by_evidence(joint, data, start, key)

    def prepared(self, joint: Problem, data: Data) -> Problem:
        return joint.as_joint("MAP(proximal=True)", "Use MAP without proximal.") if self.proximal else joint

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        fit = super().footprint(joint, data).plus(fit_bytes(self.optimizer, joint, data, self.batch_size))
        return fit.plus({"proximal step": 6 * theta_bytes(joint)}) if self.proximal else fit

    def init(self, joint: Problem, theta: Tensor, key: Key) -> MAPState:
        theta = theta.clone()
        return MAPState(theta, self.optimizer.init(theta), joint.starting_buffers(theta), 0)

    def step(self, joint: Problem, state: MAPState, batch: Batch, key: Key) -> tuple[MAPState, Info]:
        theta = state.theta
        if not self.proximal:
            value, grad, buffers = joint.value_and_grad(theta, batch, state.buffers)
            moments = self._ascended(joint, theta, grad, state)
            return MAPState(theta, moments, buffers, state.step + 1), {"loss": -value / joint.num_data}
        joint = joint.as_joint("MAP(proximal=True)")
        value, grad, buffers = smooth_value_and_grad(joint, theta, batch, state.buffers)
        moments = self.optimizer.ascend_proximal(
            theta, grad, state.optimizer, self._step_size(state), joint.num_data, proximal_of(joint)
        )
        zeros = (theta[..., : joint.num_weights] == 0).to(joint.dtype).mean(-1)
        info = {"loss": -value / joint.num_data, "zeros": zeros}
        return MAPState(theta, moments, buffers, state.step + 1), info

    def posterior(self, joint: Problem, kept: Sequence[MAPState]) -> Point:
        last = kept[-1]
        theta = last.theta.detach().clone()
        return Point(joint.fitted(theta), theta[..., : joint.num_weights], last.buffers)
