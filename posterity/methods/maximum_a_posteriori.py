"""The mode of the posterior: penalised maximum likelihood."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.errors import of_kinds, positive_whole
from posterity.inference.memory import activation_bytes, count_members, moment_bytes
from posterity.inference.method import Info, Method, Target
from posterity.methods.buffers import starting_buffers
from posterity.model.data import Batch, Data, Feed, check_batch_size
from posterity.model.network import Buffers
from posterity.numerics.adam import Adam
from posterity.numerics.optimizer import Optimizer
from posterity.numerics.random import Key
from posterity.numerics.schedules import Constant, Schedule
from posterity.posteriors.point import Point


class MAPState(NamedTuple):
    """theta (P,) or (M, P), the optimiser's moments, batch-norm statistics and the number of steps done."""

    theta: Tensor
    optimizer: Any
    buffers: Buffers
    step: int


@dataclass(frozen=True)
class MAP(Method):
    """Maximum a posteriori: the mode of the tempered log density, by gradient ascent.

    **Math**: theta* = argmax lp log p(D | theta) + pp log p(theta), by steps along grad / num_data. The trace's "loss"
    is minus the (batch estimate of the) log density in nats per datum. With a N(0, s^2) prior it is training with
    weight decay 1 / s^2 on the summed loss; the likelihood's learnt noise is fitted along with the weights.

    **Limit**: a local mode; `Adam` reaches it only with a schedule that goes to zero.

    **Cost**: one forward and one backward pass a step; two moments of the size of theta.

    **References**: Bishop (2006), section 5.2; Kingma and Ba (2015).

    **Example**:

    >>> import torch, posterity as po
    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> joint = po.Joint(po.networks.MLP([2, 8, 2]), po.likelihoods.Categorical(), po.priors.Normal(), num_data=50)
    >>> q, trace = po.infer(po.methods.MAP(steps=300, batch_size=None), joint, (x, y))
    >>> po.metrics.accuracy(q.predict(x), y) > 0.9
    True
    """

    recordable: ClassVar[bool] = True

    steps: int = 2000
    batch_size: int | None = 128
    optimizer: Optimizer = field(default_factory=Adam)
    schedule: Schedule = field(default_factory=Constant)

    def __post_init__(self) -> None:
        positive_whole("MAP.steps", self.steps)
        check_batch_size("MAP.batch_size", self.batch_size)
        of_kinds(self, optimizer=Optimizer, schedule=Schedule)

    def bytes(self, joint: Target, data: Data) -> dict[str, int]:
        """With the optimiser's moments and what a batch leaves for its backward pass, which makes as much again."""
        like = torch.empty(joint.size, dtype=joint.dtype, device="meta")
        moments = moment_bytes(self.optimizer, like)
        members = count_members(joint)
        return {
            **super().bytes(joint, data),
            "optimiser": members * moments,
            "activations of a batch": 2 * activation_bytes(joint, data, self.batch_size),
        }

    def batches(self, data: Data, key: Key) -> Feed:
        """Shuffled mini-batches, or all rows each time."""
        return data.minibatches(self.batch_size, self.steps, key)

    def init(self, joint: Target, theta: Tensor, key: Key) -> MAPState:
        """At theta, with fresh moments."""
        theta = theta.clone()
        return MAPState(theta, self.optimizer.init(theta), starting_buffers(joint, theta), 0)

    def step(self, joint: Target, state: MAPState, batch: Batch, key: Key) -> tuple[MAPState, Info]:
        """One ascent step."""
        value, grad, buffers = joint.value_and_grad(state.theta, batch, state.buffers)
        step_size = self.optimizer.step_size * self.schedule.factor(state.step, self.steps)
        optimizer = self.optimizer.ascend(state.theta, grad, state.optimizer, step_size, joint.num_data)
        return MAPState(state.theta, optimizer, buffers, state.step + 1), {"loss": -value / joint.num_data}

    def keep(self, state: MAPState) -> MAPState:
        """theta and the buffers; the moments are not needed any more."""
        return state._replace(optimizer=None)

    def posterior(self, joint: Target, kept: Sequence[MAPState]) -> Point:
        """The last theta, with the noise fitted in its joint."""
        last = kept[-1]
        theta = last.theta.detach().clone()
        return Point(joint.fitted(theta), theta[..., : joint.num_weights], last.buffers)
