"""The theorem: the bound of a network of N neurons is below its limit F~ by O(p/N)."""

from dataclasses import dataclass

from torch import Tensor

from posterity.numerics.random import Key
from posterity.theory import WideProblem
from posterity_studies.collapse.cases import Case, fixed_neurons, signs
from posterity_studies.collapse.optima import Balanced, Optima, Untempered, fitted_slope, widths

ETA = 0.1  # of the bounds at fixed neurons; the gap is the same at each


@dataclass(frozen=True, eq=False)
class Gap:
    """F~ - ELBO over widths (W,), by the formula of it and by the difference of the two, with what bounds it."""

    case: str  # "" where neurons are the same at all widths, and not the optimum of each
    name: str
    widths: Tensor
    gap: Tensor
    difference: Tensor
    bound: Tensor

    @property
    def slope(self) -> float:
        """Its exponent, fitted: -1."""
        return fitted_slope(self.widths, self.gap)

    @property
    def of_bound(self) -> float:
        """The largest share of the bound that it takes, at most 1."""
        return float((self.gap / self.bound).max())


def gaps(case: Case, classes: Case, untempered: list[Untempered], balanced: list[Balanced], key: Key) -> list[Gap]:
    """At neurons that the key fixes, for three losses; and at all optima."""
    found = [
        _fixed("square loss", case.problem, 1, key.fold("square")),
        _fixed("logistic loss", signs(key), 1, key.fold("logistic")),
        _fixed("softmax loss, second order", classes.problem, classes.outputs, key.fold("softmax")),
    ]
    found += [_at(one.case.name, "eta = 1", one.widths, one.optima) for one in untempered]
    for one in balanced:
        for place, tau in enumerate(one.taus.tolist()):
            found.append(_at(one.case.name, f"tau = {tau:g}", one.widths, one.optima, place))
    return found


def _fixed(name: str, problem: WideProblem, outputs: int, key: Key) -> Gap:
    at, neurons = widths(), fixed_neurons(key, outputs)
    difference = problem.functional(neurons, at, ETA) - problem.elbo(neurons, at, ETA)
    return Gap("", name, at, problem.gap(neurons, at), difference, problem.gap_bound(neurons, at))


def _at(case: str, name: str, at: Tensor, optima: Optima, place: int | None = None) -> Gap:
    values = (optima.gap, optima.functional - optima.elbo, optima.gap_bound)
    return Gap(case, name, at, *(value if place is None else value[place] for value in values))
