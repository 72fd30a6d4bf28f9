"""Groups of weights that share a prior scale, and priors with rescaled groups."""

import glob
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.model.joint import Joint
from posterity.numerics.layout import Layout, Slice
from posterity.priors import Layerwise, Prior


class Groups(ABC):
    """A partition of the weights by the tensor that they are in; each part has a prior precision of its own."""

    @abstractmethod
    def name(self, part: Slice) -> str:
        """Name of the group that a tensor belongs to."""

    def names(self, layout: Layout) -> tuple[str, ...]:
        """The groups of these tensors, in the order of the weights."""
        return tuple(dict.fromkeys(self.name(part) for part in layout))

    def index(self, layout: Layout) -> Tensor:
        """Number of the group of each weight, (P,)."""
        names = self.names(layout)
        places = torch.tensor([names.index(self.name(part)) for part in layout])
        return places.repeat_interleave(torch.tensor([part.size for part in layout]))


@dataclass(frozen=True)
class Shared(Groups):
    """One prior precision for all weights.

    >>> Shared().names(Layout.of({"0.weight": (2, 1), "0.bias": (2,)}))
    ('all weights',)
    """

    def name(self, part: Slice) -> str:
        return "all weights"


@dataclass(frozen=True)
class PerLayer(Groups):
    """One prior precision for each layer, its bias included.

    >>> PerLayer().names(Layout.of({"0.weight": (2, 1), "0.bias": (2,), "2.weight": (1, 2)}))
    ('0', '2')
    """

    def name(self, part: Slice) -> str:
        """The module that the tensor is in; that of a module's own tensor is the whole."""
        return part.name.rpartition(".")[0] or "the module"


@dataclass(frozen=True)
class PerTensor(Groups):
    """One prior precision for each named tensor.

    >>> PerTensor().names(Layout.of({"0.weight": (2, 1), "0.bias": (2,)}))
    ('0.weight', '0.bias')
    """

    def name(self, part: Slice) -> str:
        return part.name


def grouped(joint: Joint, groups: Groups) -> tuple[tuple[str, ...], Tensor]:
    """(names of the groups that the random weights are in, number of the group of each of those, (R,))."""
    layout = Layout.of({part.name: part.shape for part in joint.random_slices})
    names, index = groups.names(layout), groups.index(layout).to(joint.device)
    if isinstance(joint.random, Tensor):  # single weights of these tensors
        places = torch.cat([torch.arange(part.offset, part.offset + part.size) for part in joint.random_slices])
        index = index[torch.searchsorted(places.to(joint.device), joint.random.to(joint.device))]
    return names, index


def rescaled_prior(joint: Joint, groups: Groups, factors: Tensor) -> Prior:
    """The joint's prior with the scales of each group of random weights times its factor, (G,).

    Patterns of scales and means inside a group stay, and so do the priors of weights that are points. One group of all
    weights keeps the kind of prior (a `Layerwise` with its rules); several make a `Layerwise` with one for each tensor.
    """
    if len(factors) == 1 and joint.random_indices is None:
        return joint.prior.rescaled(float(factors))
    layout = joint.network.layout
    every = torch.arange(layout.size, device=factors.device) if joint.random_indices is None else joint.random_indices
    each = factors.new_ones(layout.size).index_copy(0, every, factors[grouped(joint, groups)[1]])  # (P,)
    alone = zip(joint.prior.by_tensor(layout), layout, strict=True)
    return Layerwise({glob.escape(p.name): own.rescaled_each(each[p.offset : p.offset + p.size]) for own, p in alone})
