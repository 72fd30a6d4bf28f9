"""Subsets of weights that a posterior is over; the others stay at their values."""

import glob
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from posterity.curvature.survey import last_layer
from posterity.errors import positive_whole
from posterity.model.batch import Inputs
from posterity.model.joint import Joint


class Subset(ABC):
    """A choice among the random weights of a joint."""

    @abstractmethod
    def of(self, joint: Joint, inputs: Inputs) -> Joint:
        """The joint over the chosen weights; `inputs` serve to run the network."""

    @property
    def count(self) -> int | None:
        """Number of single weights to choose after a pass over the data; None where there is no such choice."""
        return None


@dataclass(frozen=True)
class AllWeights(Subset):
    """Every weight that the joint has as random."""

    def of(self, joint: Joint, inputs: Inputs) -> Joint:
        return joint


@dataclass(frozen=True)
class KnownCurvature(Subset):
    """Every random weight, but the last layer alone where the Kronecker factors of `Laplace` say little of some layers.

    The structure that `Laplace` chooses for more than 3,000 weights has no factors for layers without a rule, such as
    convolutions over three axes, and for an embedding tied to the output layer. Factors of recurrent layers and of the
    projections of attention are rough: uses of a weight count as if they were independent. With either, networks were
    calibrated worse and told foreign inputs less well than by their last layer (`python -m benchmarks.posthoc`).
    """

    def of(self, joint: Joint, inputs: Inputs) -> Joint:
        return joint


@dataclass(frozen=True)
class LastLayer(Subset):
    """The last linear or convolutional layer that the network runs.

    Outputs are linear in its weights, so that the linearised posterior is exact in them.
    """

    def of(self, joint: Joint, inputs: Inputs) -> Joint:
        names = last_layer(joint, inputs)
        patterns = tuple(glob.escape(part.name) for part in joint.random_slices if part.name in names)
        if not patterns:
            raise ValueError(
                f"The last layer ({', '.join(names)}) is not among the random weights of the joint. "
                "Make the joint with random='*', or name a subset by Matching('...')."
            )
        return joint.with_weights(random=patterns)


@dataclass(frozen=True)
class Matching(Subset):
    """The tensors whose names match a shell pattern, such as `head.*`."""

    pattern: str

    def of(self, joint: Joint, inputs: Inputs) -> Joint:
        return joint.with_weights(random=self.pattern)


@dataclass(frozen=True)
class LargestVariance(Subset):
    """The `number` single weights with the largest marginal variances under a diagonal Laplace approximation.

    Daxberger et al. (2021), Bayesian deep learning via subnetwork inference. It takes one more pass over the data.
    """

    number: int

    def __post_init__(self) -> None:
        positive_whole("LargestVariance.number", self.number)

    @property
    def count(self) -> int | None:
        return self.number

    def of(self, joint: Joint, inputs: Inputs) -> Joint:
        return joint


def largest(joint: Joint, variance: Tensor, number: int) -> Tensor:
    """Sorted indices into theta of the `number` random weights of largest variance (R,)."""
    if number > variance.numel():
        raise ValueError(
            f"LargestVariance.number must be at most the number of weights, {variance.numel()}. Got {number}. "
            "Use AllWeights()."
        )
    best = variance.topk(number).indices.sort().values
    return best if joint.random_indices is None else joint.random_indices[best]
