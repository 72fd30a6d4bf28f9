"""Regression by a Gaussian process, the limit of a wide Bayesian network, for tables."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from posterity.numerics.random import Key

JITTER = 1e-6  # added to the noise variance, in squared units of the standardised target
WIDTH = 0.7  # standard deviation of log length scales around their mean, in their prior
LEVEL = 1.5  # and of this mean around log sqrt(columns)
NOISE = (-2.0, 3.0)  # mean and standard deviation of the prior of the log noise scale
FURTHEST = 5.0  # that the log of a hyper-parameter moves from its start
WIDEST, PRINCIPAL_ROWS = 64, 2000  # most columns, else principal components of so many rows
FEWEST_SELECTED, MOST_SELECTED = 4, 32  # columns that are selected of many
CELLS = 1 << 22  # entries of a block of kernel values


class Moments(NamedTuple):
    """Mean and variance of targets (N, T), and the epistemic part of the variance, which more rows would remove."""

    mean: Tensor
    variance: Tensor
    epistemic: Tensor


def random_rows(count: int, most: int, key: Key) -> Tensor:
    """Draw at most `most` of the row numbers below `count` by the key, on the CPU."""
    return key.permutation(count, "cpu")[:most]


def minimise(loss: Callable[[Tensor], Tensor], start: Tensor, evaluations: int) -> Tensor:
    """Minimise a smooth function of a vector by torch's L-BFGS, from `start`."""
    values = start.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [values], max_iter=evaluations, max_eval=evaluations, history_size=20, line_search_fn="strong_wolfe",
        tolerance_grad=1e-3, tolerance_change=1e-6,
    )  # fmt: skip

    def evaluated() -> Tensor:
        search.zero_grad()
        value = loss(values)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        search.step(evaluated)  # type: ignore[no-untyped-call]
    return values.detach()


def principal_directions(inputs: Tensor) -> Tensor | None:
    """Return the first 64 principal components (D, 64), scaled to mean square 1; None for at most 64 columns."""
    if inputs.shape[1] <= WIDEST:
        return None
    rows = inputs[:: 1 + len(inputs) // PRINCIPAL_ROWS].double()
    _, values, directions = torch.linalg.svd(rows, full_matrices=False)
    values, directions = values[:WIDEST], directions[:WIDEST]
    basis: Tensor = directions.T / (values.square().sum() / (len(rows) * len(values))).sqrt().clamp_min(1e-12)
    return basis


def selected_columns(inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return a basis (D, k) of the columns that explain targets (N, T) best, chosen greedily.

    Each is the one whose values or squares explain most of what the columns before have left of the targets, in 2,000
    rows at most. The choice ends with a column that raises the log likelihood by less than log(2 D), the gain of the
    best of 2 D columns of noise; there are at least 4 and at most 32.
    """
    step = 1 + len(inputs) // PRINCIPAL_ROWS
    roots, count = weights[::step].double().sqrt().unsqueeze(1), float(weights[::step].sum())
    rows, left = inputs[::step].double(), targets[::step].double()
    both, columns = torch.cat([rows, rows.square()], 1), inputs.shape[1]
    roots = roots / roots.norm()
    both, left = (roots * (part - roots.square().T @ part) for part in (both, left))  # of weighted mean 0
    norms = both.norm(dim=0)
    chosen = list[int]()
    while len(chosen) < min(MOST_SELECTED, columns):
        sizes = both.norm(dim=0)
        gains = ((both.T @ left) / sizes.clamp_min(1e-300).unsqueeze(1)).square().sum(1)
        gains[sizes <= 1e-6 * norms] = 0.0  # already explained by the chosen columns
        best = int(gains.argmax())
        share = float(gains[best] / left.square().sum().clamp_min(1e-300))
        gain = -0.5 * count * targets.shape[1] * math.log(max(1.0 - share, 1e-300))
        if not gain > (math.log(2 * columns) if len(chosen) >= FEWEST_SELECTED else 0.0):
            break
        if best % columns not in chosen:
            chosen.append(best % columns)
        direction = both[:, best] / sizes[best].clamp_min(1e-300)
        both, left = (part - direction.unsqueeze(1) * (direction @ part) for part in (both, left))
        norms[best] = torch.inf
    return torch.eye(columns, dtype=torch.float64, device=inputs.device)[:, sorted(chosen) or [0]]


def _usual_log_scale(columns: int) -> float:
    """Return the prior mean of log length scales: the log of a typical distance of rows, up to a constant."""
    return 0.5 * math.log(max(1, columns))


def projected(inputs: Tensor, basis: Tensor | None) -> Tensor:
    """Return inputs in a basis (None: unchanged), in float64."""
    return inputs.double() if basis is None else inputs.double() @ basis


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """A Gaussian process with a stationary and a linear kernel, one length scale for each column.

    **Math**: k(x, x') = 1 + l^2 x . x' + s^2 c(r), r^2 = sum_d (x_d - x'_d)^2 / h_d^2, with c(r) = exp(-r) if `rough`
    (paths without derivatives, as of trees and neighbours), else (1 + r^2 / (2 a))^-a. Targets (N, T) share the kernel
    and have noise of variance v / weight. `settled` moves `values` = log (h, s, l, v^1/2, a) to the maximum of the log
    evidence of at most `most` rows under weak normal priors, by L-BFGS. Beyond `exact` rows a prediction conditions on
    the `neighbours` rows that are nearest in units of h.

    **Limit**: exact for up to `exact` rows. With neighbours alone the variance is slightly too large, and global trends
    are seen only as far as the neighbours show them.

    **Cost**: O(most^3) an evaluation; O(N^3) a fit up to `exact` rows, then O(N D + neighbours^3) a predicted row.

    **References**: Rasmussen and Williams (2006), chapters 2, 4 and 5; Neal (1996), chapter 2, for the wide network;
    Datta et al. (2016), Hierarchical nearest-neighbor Gaussian process models.

    **Example**:

    >>> x = torch.linspace(-2, 2, 30).unsqueeze(1)
    >>> process = GaussianProcess.of(False, x, (2.0 * x).sin(), torch.ones(30)).settled(30, 20, Key(0))
    >>> round(float(process.predict(torch.tensor([[0.5]])).mean), 2)
    0.84
    """

    rough: bool
    inputs: Tensor  # (N, D), float64
    targets: Tensor  # (N, T)
    weights: Tensor  # (N,)
    values: Tensor  # (D + 4,)
    exact: int = 2500
    neighbours: int = 96

    @classmethod
    def of(cls, rough: bool, inputs: Tensor, targets: Tensor, weights: Tensor) -> Self:
        """Return the process on these rows with its initial hyper-parameters."""
        columns = inputs.shape[1]
        start = [_usual_log_scale(columns)] * columns + [0.0, -1.5, math.log(0.3), 0.0]
        values = torch.tensor(start, dtype=torch.float64, device=inputs.device)
        return cls(rough, inputs.double(), targets.double(), weights.double(), values)

    def on(self, rows: Tensor) -> Self:
        """Return the process conditioned on some of its rows."""
        return replace(self, inputs=self.inputs[rows], targets=self.targets[rows], weights=self.weights[rows])

    def settled(self, most: int, evaluations: int, key: Key) -> Self:
        """Choose the hyper-parameters by the evidence of at most `most` rows."""
        rows = random_rows(len(self.inputs), most, key).to(self.inputs.device)
        sample = self.on(rows)

        def loss(moved: Tensor) -> Tensor:
            now = replace(sample, values=self._bounded(moved))
            return -(now.log_evidence() + now.log_prior())

        final = self._bounded(minimise(loss, torch.zeros_like(self.values), evaluations))
        return replace(self, values=final) if bool(torch.isfinite(final).all()) else self

    def log_evidence(self) -> Tensor:
        """Log density of the targets, up to a constant."""
        factor, solved = self._solved(self.inputs, self.targets, self.weights)
        return -0.5 * (self.targets * solved).sum() - factor.diagonal().log().sum() * self.targets.shape[1]

    def log_prior(self) -> Tensor:
        """Log density of the hyper-parameters, up to a constant."""
        columns = self.inputs.shape[1]
        scales = self.values[:columns]
        away, level = scales - scales.mean(), scales.mean() - _usual_log_scale(columns)
        noise = (self.values[columns + 2] - NOISE[0]) / NOISE[1]
        prior: Tensor = -0.5 * ((away / WIDTH).square().sum() + (level / LEVEL).square() + noise.square())
        return prior

    def _bounded(self, moved: Tensor) -> Tensor:
        """Return the hyper-parameters after a move of at most `FURTHEST`, so that no matrix is singular."""
        return self.values + FURTHEST * torch.tanh(moved / FURTHEST)

    def predict(self, inputs: Tensor) -> Moments:
        """Return moments of the targets at the inputs."""
        inputs = inputs.double()
        chunk = max(1, CELLS // max(len(self.inputs), self.neighbours**2))
        if len(self.inputs) > self.exact:
            predict = self._nearby
        else:
            solved = self._solved(self.inputs, self.targets, self.weights)
            predict = partial(self._exactly, *solved)
        parts = [predict(inputs[low : low + chunk]) for low in range(0, len(inputs), chunk)]
        return Moments(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _exactly(self, factor: Tensor, solved: Tensor, inputs: Tensor) -> Moments:
        cross = self.kernel(inputs, self.inputs)
        half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
        return self._moments(cross @ solved, self.prior_variance(inputs) - half.square().sum(0))

    def _nearby(self, inputs: Tensor) -> Moments:
        scales = self.values[: inputs.shape[1]].exp()
        distances = torch.cdist(inputs / scales, self.inputs / scales)
        nearest = distances.topk(self.neighbours, largest=False).indices  # (n, m)
        rows = self.inputs[nearest]
        factor, solved = self._solved(rows, self.targets[nearest], self.weights[nearest])
        cross = self.kernel(inputs.unsqueeze(1), rows)  # (n, 1, m)
        half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
        return self._moments((cross @ solved).squeeze(1), self.prior_variance(inputs) - half.square().sum((1, 2)))

    def _moments(self, mean: Tensor, variance: Tensor) -> Moments:
        epistemic = variance.clamp_min(0.0).unsqueeze(1).expand(mean.shape)
        return Moments(mean, epistemic + self._noise, epistemic)

    @property
    def _noise(self) -> Tensor:
        return (2.0 * self.values[self.inputs.shape[1] + 2]).exp() + JITTER

    def _solved(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Cholesky factor of the targets' covariance, and the inverse covariance times the targets."""
        factor: Tensor = torch.linalg.cholesky(self.kernel(inputs, inputs) + torch.diag_embed(self._noise / weights))
        return factor, torch.cholesky_solve(targets, factor)

    def prior_variance(self, inputs: Tensor) -> Tensor:
        """Return the prior variances (n,) of the function at rows."""
        columns = inputs.shape[1]
        spread, slope = (2.0 * self.values[columns : columns + 2]).exp()
        variance: Tensor = 1.0 + spread + slope * inputs.square().sum(1)
        return variance

    def kernel(self, first: Tensor, second: Tensor) -> Tensor:
        """Return prior covariances (..., n, m) of the function at two sets of rows."""
        columns = first.shape[-1]
        scales, (spread, slope) = self.values[:columns].exp(), (2.0 * self.values[columns : columns + 2]).exp()
        a, b = first / scales, second / scales
        squares = a.square().sum(-1).unsqueeze(-1) + b.square().sum(-1).unsqueeze(-2) - 2.0 * a @ b.mT
        squares = squares.clamp_min(1e-12)
        if self.rough:
            shape = (-squares.sqrt()).exp()
        else:
            power = self.values[columns + 3].exp()
            shape = (-power * torch.log1p(squares / (2.0 * power))).exp()
        kernel: Tensor = 1.0 + slope * (first @ second.mT) + spread * shape
        return kernel
