"""Optima over many widths and temperatures, and how quantities fall with the width."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.theory import CollapseLaw, Neurons, collapse_law, optimum
from posterity_studies.collapse.cases import Case

WIDTHS = (12, 36, 120, 360, 1200, 3600, 12_000, 36_000, 120_000)  # whole numbers of 2, 3 and 4 kinds of neurons
FROM = 1000  # the width from which slopes are fitted
TAUS = (0.01, 0.03, 0.1)
_SAME = 1e-10  # relative differences of the bound that make no start better than another


@dataclass(frozen=True, eq=False)
class Optima:
    """The best neurons found (..., J, .) for each width and temperature, and what the bound is made of there, (...).

    `kl` is the average of a neuron: that of the network is N times it. `gap` = `functional` - `elbo`, computed without
    the difference, is at least 0 and at most `gap_bound`. `gradient` is what the search left of it.
    """

    neurons: Neurons
    kl: Tensor
    data_term: Tensor
    elbo: Tensor
    functional: Tensor
    gap: Tensor
    gap_bound: Tensor
    gradient: Tensor


@dataclass(frozen=True, eq=False)
class Untempered:
    """Optima at eta = 1 for widths (W,), and the law by which the KL of the whole network falls."""

    case: Case
    widths: Tensor
    law: CollapseLaw
    optima: Optima

    @property
    def network_kl(self) -> Tensor:
        """KL(q* || P0) of all neurons, (W,)."""
        return self.widths * self.optima.kl

    @property
    def ratio(self) -> Tensor:
        """It divided by the law, (W,): to 1."""
        return self.network_kl / self.law.kl(self.widths)

    @property
    def slope(self) -> float:
        """Its exponent, fitted."""
        return fitted_slope(self.widths, self.network_kl)


@dataclass(frozen=True, eq=False)
class Balanced:
    """Optima at eta = tau p/N for temperatures and widths (T, W), and those of the limit (T,)."""

    case: Case
    widths: Tensor
    taus: Tensor
    optima: Optima
    limit: Optima

    @property
    def distance(self) -> Tensor:
        """Of the neurons' parameters from those of the limit, (T, W)."""
        difference = self.optima.neurons.theta - self.limit.neurons.theta.unsqueeze(1)
        return difference.square().sum((-1, -2)).sqrt()

    @property
    def slopes(self) -> list[float]:
        """The exponent of that for each tau, fitted: theory says O(1/N)."""
        return [fitted_slope(self.widths, row) for row in self.distance]

    @property
    def outputs(self) -> tuple[Tensor, Tensor]:
        """E f at the rows, (T, W, P, C), and in the limit, (T, P, C)."""
        problem = self.case.problem
        return problem.law(self.optima.neurons, self.widths).mean, problem.law(self.limit.neurons, torch.inf).mean

    @property
    def moved(self) -> Tensor:
        """The largest difference of E f from its limit over all rows, (T, W)."""
        found, limit = self.outputs
        return (found - limit.unsqueeze(1)).abs().flatten(-2).amax(-1)


def widths() -> Tensor:
    """All of them, (W,)."""
    return torch.tensor(WIDTHS, dtype=torch.float64, device="cpu")


def untempered(case: Case) -> Untempered:
    """The optima at eta = 1."""
    at = widths()
    found = _best(case, case.starts, at, case.problem.tau(1.0, at))
    return Untempered(case, at, collapse_law(case.problem, case.outputs), found)


def balanced(case: Case) -> Balanced:
    """The optima at each tau: of the limit, and from there those of all widths."""
    at, taus = widths(), torch.tensor(TAUS, dtype=torch.float64, device="cpu")
    limit = _best(case, case.starts, torch.full_like(taus, torch.inf), taus)
    near = limit.neurons.theta.unsqueeze(1).unsqueeze(0)  # (1, T, 1, J, .)
    return Balanced(case, at, taus, _best(case, near, at, taus.unsqueeze(-1)), limit)


def fitted_slope(at: Tensor, values: Tensor) -> float:
    """Least squares of log values on log widths, from the width `FROM` on."""
    x, y = at[at >= FROM].log(), values[at >= FROM].log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def _best(case: Case, starts: Tensor, at: Tensor, taus: Tensor) -> Optima:
    """Of the searches from all starts (S, ..., J, .) the best one for each width and temperature; if equal, the first.

    Neurons that are equal at the start, as at the prior, stay equal: narrow networks do better from elsewhere.
    """
    problem = case.problem
    lead = (at + taus).dim() - (starts.dim() - 3)
    theta = starts.reshape(len(starts), *([1] * lead), *starts.shape[1:])
    search = optimum(problem, Neurons.from_theta(theta, case.outputs), at, taus)
    value = -problem.data_terms(search.neurons, at).mean(-1) - taus * problem.kl(search.neurons)  # (S, ...)
    ahead = value - value[0]
    chosen = torch.where(ahead.amax(0) > _SAME * value[0].abs(), ahead.argmax(0), 0).unsqueeze(0)
    theta = torch.take_along_dim(search.neurons.theta, chosen[..., None, None], 0).squeeze(0)
    neurons = Neurons.from_theta(theta, case.outputs)
    divergence, data_term = problem.kl(neurons), problem.data_terms(neurons, at).sum(-1)
    return Optima(
        neurons,
        divergence,
        data_term,
        -data_term - problem.num_data * taus * divergence,  # eta N = tau p, at infinite width too
        problem.num_data * problem.balanced(neurons, taus),
        problem.gap(neurons, at),
        problem.gap_bound(neurons, at),
        torch.take_along_dim(search.gradient, chosen, 0).squeeze(0),
    )
