"""One weight vector as a posterior."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Inputs
from posterity.model.joint import Joint
from posterity.model.network import Buffers, Network
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.options import LEFT_OUT
from posterity.posteriors.functions import Evaluation
from posterity.posteriors.posterior import Posterior, WeightPart
from posterity.posteriors.standalone import Draws, module_at
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior


def problem_of(
    owner: str, network: nn.Module | Network, likelihood: Likelihood, prior: Prior | None, num_data: int
) -> Joint:
    """The problem of a network that was trained elsewhere, whose likelihood must be known; `owner` is for messages."""
    joint = Joint(network, likelihood, Normal() if prior is None else prior, num_data)
    if likelihood.chosen == LEFT_OUT or likelihood.num_free:
        raise ValueError(
            f"{owner}: the noise must be given, since no fit chooses it. Got {likelihood}. Give the error of the "
            "network on rows that it was not trained on: Gaussian(scale=float((y - net(x)).square().mean().sqrt()))."
        )
    return joint


@dataclass(frozen=True, eq=False, repr=False)
class Point(Posterior):
    """A point estimate theta (P,), or one for each member, (M, P): the result of MAP.

    **Math**: q(w) = delta(w - theta); the predictive is the plug-in p(y | f_theta(x)).

    **Limit**: no uncertainty of the weights: class probabilities saturate far from the data.

    **Cost**: one forward pass.

    **References**: Bishop (2006), section 4.5.

    **Example**:

    >>> from posterity.likelihoods import Bernoulli
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Bernoulli(), Normal(), num_data=1)
    >>> q = Point(joint, torch.tensor([0.0]))
    >>> q.predict(torch.ones(2, 1)).probs
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    >>> q.module().weight.tolist()
    [[0.0]]
    """

    joint: Problem
    theta: Tensor
    buffers: Buffers = field(default_factory=dict)

    tensor_shapes: ClassVar[dict[str, str]] = {"theta": "mP"}

    def __post_init__(self) -> None:
        shape, size = tuple(self.theta.shape), self.joint.num_weights
        if len(shape) not in (1, 2) or shape[-1] not in (size, self.joint.size):
            raise ValueError(
                f"Point.theta must be ({size},), the weights of the joint, or (members, {size}). Got {shape}."
            )

    @classmethod
    def of(
        cls, module: nn.Module | Network, likelihood: Likelihood, *, prior: Prior | None = None, num_data: int = 1
    ) -> "Point":
        """Return the point at the weights of a module that was trained elsewhere; predictions need no prior.

        >>> from posterity.likelihoods import Categorical
        >>> Point.of(torch.nn.Linear(2, 3), Categorical()).predict(torch.zeros(5, 2)).probs.shape
        torch.Size([5, 3])
        """
        joint = problem_of("Point.of", module, likelihood, prior, num_data)
        theta = joint.network.initial.clone()
        return cls(joint, theta, joint.starting_buffers(theta))

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

    def module(self, draws: int | None = None, *, seed: int = 0) -> nn.Module:
        """A new module in evaluation mode with these weights, frozen ones and buffers, for use without posterity.

        With `draws`, however many, the module of predictions: see `Posterior.module`.
        """
        if draws is not None:
            return super().module(draws, seed=seed)
        self._alone()
        if not isinstance(self.joint, Joint):
            raise TypeError("Point.module needs the point of a Joint: a Density has no module.")
        return module_at(self.joint.network, self.theta, self.buffers)

    def standalone(self, draws: int | None, share: float, key: Key) -> nn.Module:
        joint = self.joint.as_joint("module")
        return Draws(joint.network, joint.likelihood, self.theta.unsqueeze(0), self.buffers)

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        self._alone()
        return self.theta.expand(draws, -1)

    def prediction_draws(self, draws: int | None, share: float = 1.0) -> int:
        return 1

    def drawn_functions(self, draws: int, key: Key) -> Evaluation:
        def evaluate(inputs: Inputs, numbers: Tensor) -> Tensor:
            outputs = self.outputs(inputs, 1, key)
            return outputs.expand(len(numbers), *outputs.shape[1:])

        return evaluate

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        self._alone()
        assert isinstance(self.joint, Joint)
        return self.joint.outputs(self.theta, inputs, self.buffers or None).unsqueeze(0)
