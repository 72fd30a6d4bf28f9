"""A penalty of the user's own."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.priors.penalty.matching import checked_shape, density_of, matched_factor
from posterity.priors.penalty.penalty import Penalty, summable
from posterity.priors.tabulated import Tabulated


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
        """The sum of r(w, 0)."""
        return self.of(weight, torch.zeros_like(weight))

    def of(self, mean: Tensor, scale: Tensor) -> Tensor:
        """The sum of r(mu, nu)."""
        return self._evaluated(summable(mean), summable(scale)).sum()

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        """r(mu, nu), once it is known to be such a function."""
        return self._checked(mean, scale, math.inf)

    def _checked(self, mean: Tensor, scale: Tensor, bound: float) -> Tensor:
        """r(mu, nu) below `bound`; beyond the largest number it may be infinite where exp(-r) is wanted, not r."""
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
        """exp(-factor r(w, 0)) / Z, by a table."""
        return density_of(lambda w: self._checked(w, torch.zeros_like(w), math.nan), factor, self.name)

    def factor(self, variance: float, shape: tuple[int, ...]) -> float:
        """By bisection."""
        checked_shape(shape)
        return matched_factor(lambda factor: self.prior(factor).standard_variance, variance)

    @property
    def formula(self) -> str:
        """In plain text."""
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
