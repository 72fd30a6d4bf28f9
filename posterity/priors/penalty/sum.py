"""Penalties added up, each with a factor of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.priors.penalty.matching import checked_shape, density_of, matched_factor
from posterity.priors.penalty.penalty import Penalty, summable
from posterity.priors.prior import Prior


@dataclass(frozen=True)
class Sum(Penalty):
    """The sum of `factors` times `terms`; with one term, that penalty with a factor.

    **Math**: by points, exp(-r) / Z is the product of the terms' priors over its integral; the factor that gives a
    weight the variance v solves Var(w) = v by bisection on a table of that density.

    **Limit**: where groups differ, as with a group lasso beside L1, there is a value but no prior, nor a factor.

    **Cost**: that of the terms; a prior of several takes a table of one density, made once.

    **References**: Zou and Hastie (2005), Regularization and variable selection via the elastic net.

    **Example**:

    >>> from posterity.priors.penalty.l1 import L1
    >>> from posterity.priors.penalty.squared_l2 import SquaredL2
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
        found: dict[Penalty, float] = {}
        for term, factor in zip(self.terms, self.factors, strict=True):
            for part, inner in (term.parts if isinstance(term, Sum) else {term: 1.0}).items():
                found[part] = found.get(part, 0.0) + factor * inner
        return found

    def __call__(self, weight: Tensor) -> Tensor:
        """The sum of factor times r(w)."""
        weight = summable(weight)  # once, so that the terms' gradients are added in that type, too
        return torch.stack([factor * term(weight) for term, factor in self.parts.items()]).sum()

    def of(self, mean: Tensor, scale: Tensor) -> Tensor:
        """The sum of factor times r of the posterior."""
        return torch.stack([factor * term.of(mean, scale) for term, factor in self.parts.items()]).sum()

    @property
    def separates(self) -> bool:
        """Whether every term does."""
        return all(term.separates for term in self.terms)

    def each(self, mean: Tensor, scale: Tensor) -> Tensor:
        """The sum of factor times r of each weight."""
        return torch.stack([factor * term.each(mean, scale) for term, factor in self.parts.items()]).sum(0)

    def prior(self, factor: float | Tensor = 1.0) -> Prior:
        """That of the one term where there is one; else exp(-factor r) / Z by a table."""
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
        """That of the one term, over its own factor; else by bisection."""
        checked_shape(shape)
        term, own = kind_of(self)
        if term is not self:
            return term.factor(variance, shape) / own
        like = torch.zeros(1, dtype=torch.float64, device="cpu")
        return matched_factor(lambda factor: float(self.prior(factor).variance(like)), variance)

    @property
    def formula(self) -> str:
        """In plain text."""
        return " + ".join(str(term) if factor == 1.0 else f"{factor:g} {term}" for term, factor in self.parts.items())


def kind_of(penalty: Penalty) -> tuple[Penalty, float]:
    """The penalty and the factor that a sum of one kind of term is; any other penalty, and 1."""
    if isinstance(penalty, Sum) and len(penalty.parts) == 1:
        ((term, factor),) = penalty.parts.items()
        return term, factor
    return penalty, 1.0
