"""Groups of weights whose prior has one free scale, and what a posterior says of it."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.evidence.marginal import Groups, grouped
from posterity.model.joint import Joint
from posterity.numerics.layout import Layout, Slice
from posterity.posteriors.gaussian import Gaussian, Linearized
from posterity.posteriors.mixture import Mixture
from posterity.posteriors.point import Point
from posterity.posteriors.posterior import Posterior
from posterity.posteriors.samples import LARGE, Samples
from posterity.precisions.diagonal import Diagonal
from posterity.priors import Normal, Prior


class Family(NamedTuple):
    """The random weights of one tensor: their prior with its mode moved to zero, of -log p homogeneous of `degree`."""

    places: Tensor  # (n,) in theta
    prior: Prior
    mode: float | Tensor
    degree: int
    log_scales: float  # summed over the weights


class ScaleGroup(NamedTuple):
    """A group of n weights with p(w | tau) = const tau^(n / k) exp(-tau A1(w)); tau = s^-k of degree k.

    s is the geometric mean of the weights' scales: tau is the precision of a normal, 1 / b of a Laplace prior, the rate
    of a group lasso. A1 is what A = log p(mode) - log p(w) would be at tau = 1, with the same pattern of scales.
    """

    name: str
    families: tuple[Family, ...]

    @property
    def degree(self) -> int:
        """k."""
        return self.families[0].degree

    @property
    def power(self) -> float:
        """n / k, the power of tau."""
        return sum(len(family.places) for family in self.families) / self.degree

    @property
    def tau(self) -> float:
        """The present one."""
        total = torch.tensor(sum(family.log_scales for family in self.families), dtype=torch.float64)
        return float(torch.exp(-total / self.power))


def scale_groups(joint: Joint, groups: Groups) -> tuple[ScaleGroup, ...]:
    """The groups of the joint's random weights; a ValueError where a prior has no scale of its own to find."""
    if joint.num_members is not None:
        raise ValueError(
            f"PriorScale is for one problem. Got a joint of {joint.num_members} members. Use joint.member(i) for each."
        )
    names, group = grouped(joint, groups)
    layout = joint.network.layout
    chosen = torch.arange(layout.size, device=group.device) if joint.random_indices is None else joint.random_indices
    ends = torch.searchsorted(chosen, torch.tensor([p.offset + p.size for p in layout], device=group.device)).tolist()
    found: list[list[Family]] = [[] for _ in names]
    for own, part, low, high in zip(joint.prior.by_tensor(layout), layout, [0, *ends], ends, strict=False):
        if low < high:
            found[int(group[low])].append(_family(own, part, chosen[low:high]))
    for name, families in zip(names, found, strict=True):
        if len({family.degree for family in families}) > 1:
            raise ValueError(
                f"PriorScale: the weights of {name} have priors of several kinds, whose scales have no closed form "
                "together. Use groups=PerTensor()."
            )
    return tuple(ScaleGroup(name, tuple(families)) for name, families in zip(names, found, strict=True))


def _family(prior: Prior, part: Slice, places: Tensor) -> Family:
    if prior.degree is None:
        raise ValueError(
            f"PriorScale: a Normal, Laplace or GroupLasso has a scale that is found in closed form. Got {shown(prior)} "
            f"for '{part.name}'. Use one of these for it, or leave PriorScale out."
        )
    whole = len(places) == part.size
    if not whole and not isinstance(prior, Normal):
        raise ValueError(
            f"PriorScale: only part of '{part.name}' is random, and its other weights keep their scale, which takes a "
            f"Normal prior. Got {shown(prior)}. Choose whole tensors by Joint.random."
        )
    own, mode = prior.bound(Layout.of({part.name: part.shape})).centred()
    inside = places - part.offset
    if isinstance(own, Normal) and isinstance(own.scale, Tensor) and own.scale.dim() == 2:
        own = Normal(own.scale.to(places.device)[:, inside])
    if isinstance(mode, Tensor) and mode.dim():
        mode = mode.reshape(-1).to(places.device)[inside]
    return Family(places, own, mode, prior.degree, float(own.log_scale.mean()) * len(places))


def expected_penalties(groups: tuple[ScaleGroup, ...], posterior: Posterior) -> list[float]:
    """E_q A(w) of each group, under its present scale."""
    families = [family for group in groups for family in group.families]
    total = torch.zeros(len(families), dtype=torch.float64)
    with torch.no_grad():
        for share, weights, spread, factorised in _pieces(posterior):
            for index, family in enumerate(families):
                if spread is not None and not factorised and not family.prior.factorises:
                    raise TypeError(
                        f"PriorScale: {shown(family.prior)} needs the weights of a group to be independent under q. "
                        "Use a factorised Gaussian (MeanField), samples, or a Normal or Laplace prior."
                    )
                away = weights[..., family.places] - family.mode
                own = None if spread is None else spread[family.places]
                total[index] += share * float(family.prior.penalty(away, own)[1].mean())
    ends = iter(total.tolist())
    return [sum(next(ends) for _ in group.families) for group in groups]


def _pieces(posterior: Posterior, share: float = 1.0) -> Iterator[tuple[float, Tensor, Tensor | None, bool]]:
    """Parts of q by their probability: weights (P,) or draws (S, P), the spread (P,) around them, if any.

    The last says whether weights are independent in that part.
    """
    if isinstance(posterior, Mixture):
        for one, part in zip(posterior.posteriors, posterior.shares.tolist(), strict=True):
            yield from _pieces(one, share * part)
        return
    posterior = posterior.gaussian if isinstance(posterior, Linearized) else posterior
    if not isinstance(posterior, (Gaussian, Point, Samples)):
        raise TypeError(
            "PriorScale: the posterior must be over weights: Gaussian, Linearized, Point, Samples or a Mixture of "
            f"them. Got {type(posterior).__name__}."
        )
    if posterior.num_members is not None:
        raise TypeError(f"PriorScale: this holds {posterior.num_members} separate posteriors. Choose one: q.member(0).")
    if isinstance(posterior, Gaussian):
        mean, index = posterior.mean.to(torch.float64), posterior.joint.random_indices
        spread = posterior.variance.to(mean).sqrt()
        spread = spread if index is None else torch.zeros_like(mean).index_copy(0, index, spread)
        yield share, mean, spread, isinstance(posterior.precision, Diagonal)
    elif isinstance(posterior, Point):
        yield share, posterior.theta.to(torch.float64), None, True
    else:
        every = posterior.theta.flatten(0, 1)  # (C D, P)
        for some in torch.split(every, max(1, LARGE // every.shape[1])):
            draws = some.to(posterior.joint.device, torch.float64)
            yield share * len(draws) / len(every), draws, None, True
