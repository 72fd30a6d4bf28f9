"""Sums of penalties, and penalties given as functions."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.penalties.penalty import Penalty, checked_shape, density_of, matched_factor, summable
from posterity.priors.prior import Prior
from posterity.priors.tabulated import Tabulated


@dataclass(frozen=True)
class Sum(Penalty):
    """The sum of `factors` times `terms`; with one term, that penalty with a factor.

    **Math**: by points, exp(-r) / Z is the product of the terms' priors over its integral; the factor that gives a
    weight the variance v solves Var(w) = v by bisection on a table of that density.

    **Limit**: where groups differ, as with a group lasso beside L1, there is a value but no prior, nor a factor.

    **Cost**: the cost of the terms; a prior of several kinds of terms is tabulated once.

    **References**: Zou and Hastie (2005), Regularization and variable selection via the elastic net.

    **Example**:

    >>> from posterity.penalties.norms import L1, SquaredL2
    >>> net = Sum((SquaredL2(), L1()), (2.0, 0.5))
    >>> net(torch.tensor([[1.0, -2.0]])), str(net)
    (tensor(11.5000), '2 sum of w^2 + 0.5 sum of |w|')
    >>> Sum((SquaredL2(),), (2.0,)).prior()
    Normal(scale=0.5, mean=0.0)
    """

    terms: tuple[Penalty, ...]
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        terms = tuple(self.terms) if isinstance(self.terms, (tuple, list)) else ()
        if not terms or not all(isinstance(term, Penalty) for term in terms):
            raise TypeError(f"Sum.terms must be a tuple of penalties. Got {shown(self.terms)}.")
        factors = tuple(self.factors) or (1.0,) * len(terms)
        if len(factors) != len(terms):
            raise ValueError(f"Sum.factors must be one for each of the {len(terms)} terms. Got {len(factors)}.")
        for index, factor in enumerate(factors):
            positive(f"Sum.factors[{index}]", factor)
        object.__setattr__(self, "terms", terms)
        object.__setattr__(self, "factors", tuple(map(float, factors)))

    @property
    def parts(self) -> dict[Penalty, float]:
        """Each kind of term once, sums within it opened, with its whole factor."""
        parts: dict[Penalty, float] = {}
        for term, factor in zip(self.terms, self.factors, strict=True):
            for part, inner in (term.parts if isinstance(term, Sum) else {term: 1.0}).items():
                parts[part] = parts.get(part, 0.0) + factor * inner
        return parts

    def __call__(self, weight: Tensor) -> Tensor:
        weight = summable(weight)  # converted once, so that gradients of the terms add up in that dtype
        return torch.stack([factor * term(weight) for term, factor in self.parts.items()]).sum()

    def of(self, mean: Tensor, scale: Tensor) -> Tensor:
        return torch.stack([factor * term.of(mean, scale) for term, factor in self.parts.items()]).sum()

    @property
    def separates(self) -> bool:
        return all(term.separates for term in self.terms)

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        return torch.stack([factor * term.each(mean, scale) for term, factor in self.parts.items()]).sum(0)

    def prior(self, factor: float | Tensor = 1.0) -> Prior:
        term, own = kind_of(self)
        if term is not self:
            return term.prior(own * factor)
        if not self.separates:
            raise ValueError(
                f"Sum: no prior of this library is exp(-r) for r = {self}, because its groups differ. "
                "Penalise by groups or by single weights, not both."
            )
        return density_of(lambda w: self.each(w, torch.zeros_like(w)), factor, "Sum")

    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        checked_shape(shape)
        term, own = kind_of(self)
        if term is not self:
            return term.factor(variance, shape) / own
        like = torch.zeros(1, dtype=torch.float64, device="cpu")
        return matched_factor(lambda factor: float(self.prior(factor).variance(like)), variance)

    @property
    def formula(self) -> str:
        return " + ".join(str(term) if factor == 1.0 else f"{factor:g} {term}" for term, factor in self.parts.items())


def kind_of(penalty: Penalty) -> tuple[Penalty, float]:
    """Return the term and factor of a sum of one kind of term; any other penalty itself, and 1."""
    if isinstance(penalty, Sum) and len(penalty.parts) == 1:
        ((term, factor),) = penalty.parts.items()
        return term, factor
    return penalty, 1.0


@dataclass(frozen=True)
class Function(Penalty):
    """The sum over weights of r(mu, nu), a function of the posterior's mean and scale at each weight.

    `r` takes two tensors of one shape and gives one of that shape, entry by entry; it must be finite, and nothing but
    mu and nu may decide it (no data, no random numbers, no other weight). For a posterior without width nu is 0.

    **Math**: by points, exp(-r(w, 0)) / Z, tabulated where exp(-r) integrates. For a family with a width `to_prior`
    asks whether r(mu, nu) + K is a KL(beta_{mu, nu} || alpha) for one alpha, and finds it.

    **Limit**: one function of one weight at a time; groups and norms of tensors are `GroupLasso` and `Sum`.

    **Cost**: one call of r for all weights of a tensor.

    **References**: Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in
    variational inference.

    **Example**:

    >>> quartic = Function(lambda mu, nu: mu**4, "w^4")
    >>> quartic(torch.tensor([[1.0, -2.0]])), str(quartic)
    (tensor(17.), 'sum of w^4')
    >>> quartic.prior(0.25).variance(torch.zeros(1))
    tensor([0.6760])
    """

    r: Callable[[Tensor, Tensor], Tensor]
    name: str = "r(mu, nu)"

    def __post_init__(self) -> None:
        if not callable(self.r):
            raise TypeError(f"Function.r must be a function of (mu, nu). Got {shown(self.r)}.")

    def __call__(self, weight: Tensor) -> Tensor:
        return self.of(weight, torch.zeros_like(weight))

    def of(self, mean: Tensor, scale: Tensor) -> Tensor:
        return self._evaluated(summable(mean), summable(scale)).sum()

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        return self._checked(mean, scale, math.inf)

    def _checked(self, mean: Tensor, scale: Tensor, bound: float) -> Tensor:
        """Return r(mu, nu), checked; values of at least `bound` are refused (inf is accepted with a bound of nan)."""
        values = self._evaluated(mean, scale)
        bad = torch.isnan(values) | (values == -math.inf) | (values >= bound)
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            raise ValueError(
                f"Function.r must be finite for every mu and nu. Got {float(values[tuple(where)])} at "
                f"mu = {float(mean[tuple(where)]):g}, nu = {float(scale[tuple(where)]):g}."
            )
        if not torch.equal(values, self._evaluated(mean, scale)):
            raise ValueError(
                "Function.r must be a function of (mu, nu) alone. Got two answers to one question: "
                "take random numbers and data out of it."
            )
        flat, flat_mean, flat_scale = values.reshape(-1), mean.reshape(-1), scale.reshape(-1)
        some = slice(0, None, max(1, len(flat) // 3))
        alone = self._evaluated(flat_mean[some], flat_scale[some])
        if not torch.allclose(alone, flat[some], rtol=1e-6, atol=1e-9):
            raise ValueError(
                "Function.r must work entry by entry. Got values that depend on the other entries: "
                "leave sums over the weights to the penalty."
            )
        return values

    def prior(self, factor: float | Tensor = 1.0) -> Tabulated:
        return density_of(lambda w: self._checked(w, torch.zeros_like(w), math.nan), factor, self.name)

    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        checked_shape(shape)
        return matched_factor(lambda factor: self.prior(factor).standard_variance, variance)

    @property
    def formula(self) -> str:
        return f"sum of {self.name}"

    def _evaluated(self, mean: Tensor, scale: Tensor) -> Tensor:
        try:
            values = self.r(mean.clone(), scale.clone())  # it may work in place
        except TypeError as error:
            raise TypeError(f"Function.r must take two tensors, mu and nu. Got an error: {error}.") from error
        if not isinstance(values, Tensor) or values.shape != mean.shape:
            raise ValueError(
                f"Function.r must give a tensor of the shape of mu, {tuple(mean.shape)}. Got {shown(values)}."
            )
        if values.is_complex():
            raise ValueError(f"Function.r must give real numbers. Got {values.dtype}. Take abs() or .real of it.")
        return values if values.is_floating_point() else values.to(mean.dtype)  # as of a count, (mu != 0)
