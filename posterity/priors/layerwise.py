"""Priors by layer, and priors around pretrained weights."""

import fnmatch
import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NoReturn

import torch
from torch import Tensor

from posterity.errors import shown, unknown
from posterity.numerics.layout import Layout, Slice
from posterity.numerics.random import Key
from posterity.options import LEFT_OUT
from posterity.priors.fan import ScaleRule, fans
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior


@dataclass(frozen=True, eq=False)
class Layerwise(Prior):
    """A prior, or a rule for its scale, for each tensor by name.

    **Math**: log p(theta) = sum over tensors of log p_t(theta_t), where p_t is the first of `rules` whose shell
    pattern matches the tensor's name. A `ScaleRule` (`FanIn`, `Glorot`, `He`) gives N(0, variance of the fans); a
    tensor `<module>.bias` takes the fans of `<module>.weight`.

    **Limit**: exact. Every tensor must be matched, and every pattern must be the first match of a tensor (except a
    last `*`).

    **Cost**: normal priors are fused into one `Normal`; else one call for each tensor.

    **References**: Neal (1996), Bayesian Learning for Neural Networks, section 2.1.

    **Example**:

    >>> from posterity.priors import FanIn
    >>> prior = Layerwise({"*.weight": FanIn(), "*": Normal(1.0)})
    >>> layout = Layout.of({"first.weight": (1, 4), "first.bias": (1,)})
    >>> prior.bound(layout).variance(torch.zeros(5))
    tensor([0.2500, 0.2500, 0.2500, 0.2500, 1.0000])
    """

    rules: Mapping[str, Prior | ScaleRule]

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping) or not self.rules:
            raise ValueError(
                f'Layerwise.rules must map name patterns to priors, such as {{"*": FanIn()}}. Got {shown(self.rules)}.'
            )
        for pattern, rule in self.rules.items():
            if not isinstance(rule, (Prior, ScaleRule)):
                raise ValueError(
                    f"Layerwise.rules[{pattern!r}] must be a prior or a scale rule, such as Normal(1.0) or FanIn(). "
                    f"Got {shown(rule)}."
                )
        object.__setattr__(self, "rules", dict(self.rules))

    def __eq__(self, other: object) -> bool:
        return [*self.rules.items()] == [*other.rules.items()] if isinstance(other, Layerwise) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.rules.items()))

    @classmethod
    def of(cls, rule: Prior | ScaleRule) -> "Layerwise":
        """Return a `Layerwise` with one prior or scale rule for every tensor."""
        return cls({"*": rule})

    def bound(self, layout: Layout) -> Prior:
        """Return one `Normal` over all tensors where every prior is normal, else a prior that calls each of them."""
        priors = bound_by_tensor(self.by_tensor(layout), layout)
        normals = [prior for prior in priors if isinstance(prior, Normal)]
        return (
            _fused(normals, [part.size for part in layout]) if len(normals) == len(priors) else _Blocks(layout, priors)
        )

    def by_tensor(self, layout: Layout) -> tuple[Prior, ...]:
        chosen = [self._pattern(part) for part in layout]
        for pattern in self.rules:
            if pattern in chosen or pattern == "*":
                continue
            if layout.matching(pattern):
                raise ValueError(
                    f"Layerwise: every tensor that '{pattern}' matches is taken by an earlier pattern. "
                    "The first match wins, so put the narrower pattern first."
                )
            raise ValueError(
                f"Layerwise: every pattern must match a tensor. {unknown('pattern', pattern, layout.names)}"
            )
        return tuple(self._prior(pattern, part, layout) for pattern, part in zip(chosen, layout, strict=True))

    def rescaled(self, factor: Any) -> "Layerwise":
        return Layerwise({pattern: rule.rescaled(factor) for pattern, rule in self.rules.items()})

    def as_chosen(self, way: str) -> "Layerwise":
        rules = self.rules.items()
        return Layerwise({pattern: r.as_chosen(way) if isinstance(r, Prior) else r for pattern, r in rules})

    @property
    def num_members(self) -> int | None:
        return _common_members(rule for rule in self.rules.values() if isinstance(rule, Prior))

    def member(self, index: int) -> "Layerwise":
        return Layerwise({k: rule.member(index) if isinstance(rule, Prior) else rule for k, rule in self.rules.items()})

    def _pattern(self, part: Slice) -> str:
        for pattern in self.rules:
            if fnmatch.fnmatchcase(part.name, pattern):
                return pattern
        raise ValueError(
            f"Layerwise: no pattern matches tensor '{part.name}'. Patterns: {', '.join(self.rules)}. "
            'Add a rule for it, or a last one "*" for all that is left.'
        )

    def _prior(self, pattern: str, part: Slice, layout: Layout) -> Prior:
        rule = self.rules[pattern]
        if isinstance(rule, Layerwise):
            return rule.by_tensor(Layout.of({part.name: part.shape}))[0]
        if isinstance(rule, Prior):
            return rule
        sizes = fans(part, layout)
        if sizes is None:
            module = part.name.rpartition(".")[0]
            example = f"{module}.*" if module else part.name
            raise ValueError(
                f"Layerwise: {rule} needs fans, and tensor '{part.name}' of shape {part.shape} has none. "
                f'Give it a prior of its own before that rule, such as {{"{example}": Normal(1.0)}}.'
            )
        return Normal(sqrt(rule.variance(*sizes)))

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(
            "Layerwise must know the names and shapes of the tensors first. Give it to a Joint, or call bound(layout)."
        )

    log_prob = sample = variance = cross_entropy = precision = _refuse


@dataclass(frozen=True)
class _Blocks(Prior):
    """A bound `Layerwise` whose priors are of several kinds: each sees its own slice of theta."""

    layout: Layout
    priors: tuple[Prior, ...]

    def __post_init__(self) -> None:
        self.num_members  # noqa: B018  the priors must agree on M

    def bound(self, layout: Layout) -> Prior:
        if layout != self.layout:
            raise ValueError(
                f"Layerwise: bound to tensors {self.layout.names}. Got {layout.names}. Bind the unbound Layerwise."
            )
        return self

    @property
    def num_members(self) -> int | None:
        return _common_members(self.priors)

    def member(self, index: int) -> Prior:
        return _Blocks(self.layout, tuple(prior.member(index) for prior in self.priors))

    def log_prob(self, theta: Tensor) -> Tensor:
        return _total([prior.log_prob(piece) for prior, piece in self._pieces(theta)])

    def value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        return _joined([prior.value_and_grad(piece) for prior, piece in self._pieces(theta)])

    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        draws = [
            prior.sample((*shape[:-1], part.size), key.fold(part.name), like)
            for prior, part in zip(self.priors, self.layout, strict=True)
        ]
        return torch.cat(draws, dim=-1)

    def variance(self, like: Tensor) -> Tensor:
        return torch.cat([prior.variance(piece) for prior, piece in self._pieces(like)], dim=-1)

    @property
    def has_cross_entropy(self) -> bool:
        return all(prior.has_cross_entropy for prior in self.priors)

    @property
    def factorises(self) -> bool:
        return all(prior.factorises for prior in self.priors)

    def cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        scales = self._pieces(scale)
        return _total([p.cross_entropy(m, s) for (p, m), (_, s) in zip(self._pieces(mean), scales, strict=True)])

    @property
    def nonsmooth(self) -> bool:
        return any(prior.nonsmooth for prior in self.priors)

    def smooth_value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        return _joined([prior.smooth_value_and_grad(piece) for prior, piece in self._pieces(theta)])

    def proximal(self, theta: Tensor, step: float | Tensor) -> Tensor:
        pieces = self._pieces(theta)
        steps: list[float | Tensor] = [step] * len(pieces)
        if isinstance(step, Tensor) and step.dim() and step.shape[-1] > 1:  # one for each weight
            steps = [piece for _, piece in self._pieces(step)]
        return torch.cat([prior.proximal(z, s) for (prior, z), s in zip(pieces, steps, strict=True)], dim=-1)

    def precision(self, theta: Tensor) -> Tensor:
        return torch.cat([prior.precision(piece) for prior, piece in self._pieces(theta)], dim=-1)

    def _pieces(self, theta: Tensor) -> list[tuple[Prior, Tensor]]:
        pieces = torch.split(theta, [part.size for part in self.layout], dim=-1)
        return list(zip(self.priors, pieces, strict=True))


def _total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(values)).sum(0)


def _joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join the values and gradients of the tensors to the value (...) and gradient (..., P) of the whole."""
    values, grads = zip(*pairs, strict=True)
    return _total(values), torch.cat(grads, dim=-1)


def bound_by_tensor(priors: Sequence[Prior], layout: Layout) -> tuple[Prior, ...]:
    """Bind each prior to its own tensor of the layout."""
    return tuple(prior.bound(Layout.of({part.name: part.shape})) for prior, part in zip(priors, layout, strict=True))


def _common_members(priors: Iterable[Prior]) -> int | None:
    counts = {prior.num_members for prior in priors} - {None}
    if len(counts) > 1:
        raise ValueError(
            f"Layerwise: all priors must have the same number of members. Got {shown(counts)}. "
            "Give each one value for each member, or a plain number."
        )
    return next(iter(counts), None)


def _fused(priors: Sequence[Normal], sizes: Sequence[int]) -> Normal:
    """Return one normal prior over all tensors: scale (1, P) or (M, P), and mean a number, (P,) or (M, P)."""
    _common_members(priors)
    scale = _per_weight([prior.scale for prior in priors], sizes, axis=-1)
    ways = {prior.chosen for prior in priors}
    chosen = LEFT_OUT if LEFT_OUT in ways else ", ".join(sorted(ways - {""}))
    means = [prior.mean for prior in priors]
    if not any(isinstance(mean, Tensor) for mean in means) and len(set(means)) == 1:
        return Normal(scale, means[0], chosen)
    mean = _per_weight(means, sizes, axis=0)
    return Normal(scale, mean if len(mean) > 1 else mean[0], chosen)


def _per_weight(values: Sequence[float | Tensor], sizes: Sequence[int], axis: int) -> Tensor:
    """Return the hyper-parameters of all weights as float64 (1, P) or (M, P).

    A vector gains `axis`: that of the weights for scales (M,), that of the members for means (size,).
    """
    parts = []
    for value, size in zip(values, sizes, strict=True):
        part = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        part = part.unsqueeze(axis) if part.dim() == 1 else part
        parts.append(part.expand(len(part) if part.dim() else 1, size))
    rows = max(len(part) for part in parts)
    return torch.cat([part.expand(rows, -1) for part in parts], dim=-1)


def around(
    weights: Mapping[str, Tensor] | Tensor, scale: float = 1.0, others: Prior | ScaleRule | None = None
) -> Prior:
    """Return a normal prior whose mean is pretrained weights.

    - `weights`: flat theta (P,), as `q.point()` gives it, or tensors by name, as `dict(module.named_parameters())`.
    - `scale`: standard deviation of how far the weights may go from there.
    - `others`: the prior of tensors that `weights` does not name, such as those of a new head.

    >>> import torch
    >>> pretrained = torch.nn.Linear(2, 1)
    >>> prior = around(dict(pretrained.named_parameters()), scale=0.1)
    >>> from posterity.numerics import Layout
    >>> bound = prior.bound(Layout.of({"weight": (1, 2), "bias": (1,)}))
    >>> theta = torch.cat([pretrained.weight.flatten(), pretrained.bias]).detach()
    >>> bool(bound.log_prob(theta) > bound.log_prob(theta + 0.1))
    True
    """
    if isinstance(weights, Tensor):
        if others is not None:
            raise ValueError("around: a flat theta names no tensors, so there are no others. Give weights by name.")
        return Normal(scale, weights.detach().clone())
    if not isinstance(weights, Mapping) or not weights or not all(isinstance(w, Tensor) for w in weights.values()):
        raise TypeError(
            "around: weights must be a flat theta (P,) or tensors by name, such as dict(module.named_parameters()). "
            f"Got {shown(weights)}."
        )
    rules: dict[str, Prior | ScaleRule] = {
        glob.escape(name): Normal(scale, weight.detach().flatten().clone()) for name, weight in weights.items()
    }
    return Layerwise(rules if others is None else {**rules, "*": others})
