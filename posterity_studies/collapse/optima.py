"""The optima of wide networks, the confidence of their predictions, and the gap of their bounds."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.numerics.random import Key
from posterity.theory import (
    Activation,
    CollapseLaw,
    Logistic,
    Neurons,
    OutputLaw,
    Rectified,
    Smooth,
    Softmax,
    Square,
    WideProblem,
    collapse_law,
    optimum,
)

ROWS = 30
REACH, NOISE = 2.0, 0.2
CLASS_ROWS = 150  # enough for confident predictions of the narrowest networks at eta = 1
CENTRES = ((4.8, 0.6), (-2.4, 4.2), (-2.4, -4.2))
SHARES = (0.5, 0.3, 0.2)  # unequal class sizes: a collapsed network does not even find the most frequent class
SPREAD = 1.5
FIXED = 4  # kinds of neurons that are not fitted


@dataclass(frozen=True, eq=False)
class Case:
    """A problem with the starts (S, J, 2 (C + D)) of the search for its optimum, the prior first."""

    name: str
    problem: WideProblem
    outputs: int
    starts: Tensor


def rectified(key: Key) -> Case:
    """Return a noisy |x| with inputs (x, 1), fitted by rectifiers of two kinds, one for each side."""
    inputs, targets = _bend(key)
    problem = WideProblem(inputs, targets, Square(), activation=Rectified())
    return Case("ReLU", problem, 1, _starts(problem, _sides(), 1))


def odd(key: Key) -> Case:
    """Return the same rows, fitted by equal neurons with an odd activation."""
    inputs, targets = _bend(key)
    problem = WideProblem(inputs, targets, Square(), activation=Smooth("erf"))
    return Case("erf", problem, 1, _starts(problem, _sides()[:1], 1))


def classes(key: Key) -> Case:
    """Return three clusters of unequal size in the plane, fitted by rectifiers of a kind for each class."""
    counts = [round(CLASS_ROWS * share) for share in SHARES]
    labels = torch.repeat_interleave(torch.arange(3, device="cpu"), torch.tensor(counts, device="cpu"))
    centres = torch.tensor(CENTRES, dtype=torch.float64, device="cpu")
    inputs = centres[labels] + SPREAD * key.fold("classes").normal((len(labels), 2), torch.float64, "cpu")
    problem = WideProblem(inputs, labels, Softmax(), activation=Rectified())
    outer = 3.0 * torch.eye(3, dtype=torch.float64, device="cpu") - 1.0
    small = torch.full((3, 1), 0.3, dtype=torch.float64, device="cpu")
    theta = torch.cat([outer, small.expand(3, 3), centres / 3.0, small.expand(3, 2)], -1)
    return Case("ReLU, 3 classes", problem, 3, _starts(problem, theta, 3))


def signs(key: Key) -> WideProblem:
    """Return the problem of classifying whether |x| is above its middle."""
    inputs, targets = _bend(key)
    return WideProblem(inputs, torch.where(targets > targets.median(), 1.0, -1.0), Logistic())


def fixed_neurons(key: Key, outputs: int) -> Neurons:
    """Draw four kinds of neurons for two inputs."""
    sizes = (outputs, outputs, 2, 2)
    rows = [key.fold(index).normal((FIXED, size), torch.float64, "cpu") for index, size in enumerate(sizes)]
    return Neurons(rows[0], 0.4 * (0.3 * rows[1]).exp(), rows[2], 0.4 * (0.3 * rows[3]).exp())


def line(points: int, activation: Activation) -> WideProblem:
    """Return inputs along the whole line, for predictions."""
    x = torch.linspace(-REACH, REACH, points, dtype=torch.float64, device="cpu")
    return WideProblem(torch.stack([x, torch.ones_like(x)], -1), torch.zeros_like(x), activation=activation)


def _bend(key: Key) -> tuple[Tensor, Tensor]:
    x = REACH * (2.0 * key.fold("x").uniform((ROWS,), torch.float64, "cpu") - 1.0)
    noise = NOISE * key.fold("noise").normal((ROWS,), torch.float64, "cpu")
    return torch.stack([x, torch.ones_like(x)], -1), x.abs() + noise


def _sides() -> Tensor:
    """Return a neuron that rises to the right and one that rises to the left, (2, 6)."""
    rows = [[1.4, 0.4, 1.4, 0.0, 0.3, 0.3], [1.4, 0.4, -1.4, 0.0, 0.3, 0.3]]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _starts(problem: WideProblem, theta: Tensor, outputs: int) -> Tensor:
    prior = problem.prior.neurons(problem.inputs.shape[-1], outputs).theta
    return torch.stack([prior.expand_as(theta), theta])


WIDTHS = (12, 36, 120, 360, 1200, 3600, 12_000, 36_000, 120_000)  # whole numbers of 2, 3 and 4 kinds of neurons
FROM = 1000  # the width from which slopes are fitted
TAUS = (0.01, 0.03, 0.1)
_SAME = 1e-10  # relative difference of bounds that counts as rounding


@dataclass(frozen=True, eq=False)
class Optima:
    """The best neurons (..., J, .) for each width and temperature, and the terms of the bound there, (...).

    `kl` is the average of a neuron: the network's is N times it. `gap` = `functional` - `elbo`, computed without
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
        """The network's KL divided by the law, (W,), which tends to 1."""
        return self.network_kl / self.law.kl(self.widths)

    @property
    def slope(self) -> float:
        """The fitted exponent of the network's KL."""
        return fitted_slope(self.widths, self.network_kl)


@dataclass(frozen=True, eq=False)
class Balanced:
    """Optima at eta = tau p/N for temperatures and widths (T, W), and in the limit (T,)."""

    case: Case
    widths: Tensor
    taus: Tensor
    optima: Optima
    limit: Optima

    @property
    def distance(self) -> Tensor:
        """Distance of the neurons' parameters from their limit, (T, W)."""
        difference = self.optima.neurons.theta - self.limit.neurons.theta.unsqueeze(1)
        return difference.square().sum((-1, -2)).sqrt()

    @property
    def slopes(self) -> list[float]:
        """The fitted exponent of the distance for each tau; O(1/N) by theory."""
        return [fitted_slope(self.widths, row) for row in self.distance]

    @property
    def outputs(self) -> tuple[Tensor, Tensor]:
        """E f at the rows, (T, W, P, C), and in the limit, (T, P, C)."""
        problem = self.case.problem
        return problem.law(self.optima.neurons, self.widths).mean, problem.law(self.limit.neurons, torch.inf).mean

    @property
    def moved(self) -> Tensor:
        """The largest difference of E f from its limit over all rows, (T, W)."""
        result, limit = self.outputs
        return (result - limit.unsqueeze(1)).abs().flatten(-2).amax(-1)


def widths() -> Tensor:
    """Return the widths, (W,)."""
    return torch.tensor(WIDTHS, dtype=torch.float64, device="cpu")


def untempered(case: Case) -> Untempered:
    """Find the optima at eta = 1."""
    at = widths()
    result = _best(case, case.starts, at, case.problem.tau(1.0, at))
    return Untempered(case, at, collapse_law(case.problem, case.outputs), result)


def balanced(case: Case) -> Balanced:
    """Find the optima at each tau, first in the limit, then at all widths starting from there."""
    at, taus = widths(), torch.tensor(TAUS, dtype=torch.float64, device="cpu")
    limit = _best(case, case.starts, torch.full_like(taus, torch.inf), taus)
    near = limit.neurons.theta.unsqueeze(1).unsqueeze(0)  # (1, T, 1, J, .)
    return Balanced(case, at, taus, _best(case, near, at, taus.unsqueeze(-1)), limit)


def fitted_slope(at: Tensor, values: Tensor) -> float:
    """Fit log values to log widths by least squares, from the width `FROM` on; return the slope."""
    x, y = at[at >= FROM].log(), values[at >= FROM].log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def _best(case: Case, starts: Tensor, at: Tensor, taus: Tensor) -> Optima:
    """Return the best of the searches from all starts (S, ..., J, .) for each width and temperature.

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


@dataclass(frozen=True, eq=False)
class Sureness:
    """Mean confidence, accuracy and mean NLL of the averaged probabilities at the rows, (...)."""

    confidence: Tensor
    accuracy: Tensor
    nll: Tensor


@dataclass(frozen=True, eq=False)
class Confidence:
    """Confidence at eta = 1 (W,), at the balanced temperatures (T, W), and in their limit (T,)."""

    untempered: Sureness
    balanced: Sureness
    limit: Sureness


def averaged(law: OutputLaw) -> Tensor:
    """Return E softmax(f) at the rows, (..., P, C), to second order in f - E f.

    **Math**: p_c + 1/2 tr(p_c'' Cov f) at p = softmax(E f); with S = Cov f the trace is p_c times (S_cc - 2 (S p)_c +
    2 p^T S p - sum over d of p_d S_dd).

    **Limit**: the error is O(1/N^2).
    """
    probabilities, covariance = torch.softmax(law.mean, -1), law.covariance
    own = covariance.diagonal(dim1=-2, dim2=-1)  # (..., P, C)
    turned = (covariance @ probabilities.unsqueeze(-1)).squeeze(-1)
    common = (probabilities * (2.0 * turned - own)).sum(-1, keepdim=True)
    return probabilities * (1.0 + 0.5 * (own - 2.0 * turned + common))


def confidence(untempered: Untempered, other: Balanced) -> Confidence:
    """Confidence at the optima of one case, at eta = 1 and at the balanced temperatures."""
    problem = untempered.case.problem
    laws = (
        problem.law(untempered.optima.neurons, untempered.widths),
        problem.law(other.optima.neurons, other.widths),
        problem.law(other.limit.neurons, torch.inf),
    )
    return Confidence(*(_sureness(averaged(law), problem.targets) for law in laws))


def _sureness(probabilities: Tensor, labels: Tensor) -> Sureness:
    largest, which = probabilities.max(-1)
    own = torch.take_along_dim(probabilities, labels.expand(which.shape).unsqueeze(-1), -1).squeeze(-1)
    return Sureness(largest.mean(-1), (which == labels).to(torch.float64).mean(-1), -own.log().mean(-1))


ETA = 0.1  # temperatures of the bounds at fixed neurons; the gap does not depend on them


@dataclass(frozen=True, eq=False)
class Gap:
    """The gap F~ - ELBO over widths (W,), by its formula and as a difference, and its bound."""

    case: str  # "" for neurons that are the same at all widths instead of optimal at each
    name: str
    widths: Tensor
    gap: Tensor
    difference: Tensor
    bound: Tensor

    @property
    def slope(self) -> float:
        """The fitted exponent of the gap; -1 by theory."""
        return fitted_slope(self.widths, self.gap)

    @property
    def of_bound(self) -> float:
        """The largest ratio of gap and bound, at most 1."""
        return float((self.gap / self.bound).max())


def gaps(case: Case, classes: Case, untempered: list[Untempered], balanced: list[Balanced], key: Key) -> list[Gap]:
    """Return the gaps at random neurons for three losses, and at all optima."""
    results = [
        _fixed("square loss", case.problem, 1, key.fold("square")),
        _fixed("logistic loss", signs(key), 1, key.fold("logistic")),
        _fixed("softmax loss, second order", classes.problem, classes.outputs, key.fold("softmax")),
    ]
    results += [_at(member.case.name, "eta = 1", member.widths, member.optima) for member in untempered]
    for tempered in balanced:
        for index, tau in enumerate(tempered.taus.tolist()):
            results.append(_at(tempered.case.name, f"tau = {tau:g}", tempered.widths, tempered.optima, index))
    return results


def _fixed(name: str, problem: WideProblem, outputs: int, key: Key) -> Gap:
    at, neurons = widths(), fixed_neurons(key, outputs)
    difference = problem.functional(neurons, at, ETA) - problem.elbo(neurons, at, ETA)
    return Gap("", name, at, problem.gap(neurons, at), difference, problem.gap_bound(neurons, at))


def _at(case: str, name: str, at: Tensor, optima: Optima, index: int | None = None) -> Gap:
    values = (optima.gap, optima.functional - optima.elbo, optima.gap_bound)
    return Gap(case, name, at, *(value if index is None else value[index] for value in values))
