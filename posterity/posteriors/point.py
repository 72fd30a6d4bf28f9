"""One weight vector as a posterior, and a module filled with it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from posterity.model.batch import Inputs
from posterity.model.joint import Joint
from posterity.model.module import copied
from posterity.model.network import Buffers, Network
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior, WeightPart


def filled(network: Network, theta: Tensor, buffers: Buffers | None = None) -> nn.Module:
    """A new module in evaluation mode with the weights theta (P,), the frozen ones, and buffers (or the network's own).

    >>> filled(Network(nn.Linear(2, 1)), torch.tensor([3.0, 4.0, 5.0])).weight
    Parameter containing:
    tensor([[3., 4.]], requires_grad=True)
    """
    module = copied(network.module).eval()  # a step may have left batch norm in training mode
    values = {**network.frozen, **network.buffers, **(buffers or {}), **network.layout.unflatten(theta)}
    own: dict[str, Tensor] = dict(module.named_parameters())
    own.update(module.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
    return module


@dataclass(frozen=True, eq=False)
class Point(Posterior):
    """One weight vector theta (P,), or one for each member, (M, P): what MAP finds.

    **Math**: q(w) = delta(w - theta); the predictive is the plug-in p(y | f_theta(x)).

    **Limit**: knows no uncertainty of the weights: class probabilities saturate far from the data.

    **Cost**: one forward pass.

    **References**: Bishop (2006), section 4.5.

    **Example**:

    >>> import torch
    >>> from posterity.likelihoods import Bernoulli
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Bernoulli(), Normal(), num_data=1)
    >>> Point(joint, torch.tensor([0.0])).predict(torch.ones(2, 1)).probs
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """

    joint: Problem
    theta: Tensor
    buffers: Buffers = field(default_factory=dict)

    @property
    def num_members(self) -> int | None:
        return self.theta.shape[0] if self.theta.dim() > 1 else None

    def member(self, index: int) -> "Point":
        if self.num_members is None:
            return self
        return Point(self.joint.member(index), self.theta[index], {k: b[index] for k, b in self.buffers.items()})

    def weight_parts(self) -> Iterator[WeightPart]:
        self._alone()
        yield WeightPart(1.0, self.theta.to(torch.float64))

    def point(self) -> Tensor:
        return self.theta

    def module(self) -> nn.Module:
        """A new module in evaluation mode with these weights: for `model.pruned`, or to go on without this library."""
        self._alone()
        if not isinstance(self.joint, Joint):
            raise TypeError("Point.module needs the point of a Joint: a Density has no module.")
        return filled(self.joint.network, self.theta, self.buffers)

    def sample(self, draws: int, key: Key) -> Tensor:
        self._alone()
        return self.theta.expand(draws, -1)

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        self._alone()
        assert isinstance(self.joint, Joint)
        return self.joint.outputs(self.theta, inputs, self.buffers or None).unsqueeze(0)
