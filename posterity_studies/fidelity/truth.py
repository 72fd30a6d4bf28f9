"""The exact predictive of a small problem by long runs of NUTS, and distances of other predictives to it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.diagnostics import bulk_ess, rhat
from posterity.numerics.random import Key
from posterity.posteriors.samples import Samples
from posterity.predictive import ClassPredictive, Predictive

POINTS = 400  # of the grid of each test row
REACH = 8.0  # standard deviations of the exact predictive from its mean to the ends of the grid
RHAT, ESS = 1.01, 400.0  # of every test prediction, where chains count as converged (Vehtari et al., 2021)


def predictions(samples: Samples, inputs: Tensor, classes: bool) -> Tensor:
    """What every draw predicts for each row, (C, D, N) in float64: an output, or a probability of class 1."""
    with torch.no_grad():
        outputs = samples.outputs(inputs, samples.num_chains * samples.num_draws, Key(0)).squeeze(-1).double()
    values = outputs.sigmoid() if classes else outputs
    return values.reshape(samples.num_chains, samples.num_draws, -1)


@dataclass(frozen=True)
class Mixing:
    """The worst R-hat and the least bulk effective sample size of the predictions for the test rows."""

    rhat: float
    ess: float

    @classmethod
    def of(cls, values: Tensor) -> "Mixing":
        """Of predictions (C, D, N)."""
        return cls(float(rhat(values).max()), float(bulk_ess(values).min()))

    @property
    def good(self) -> bool:
        """Whether the chains count as converged."""
        return self.rhat <= RHAT and self.ess >= ESS


@dataclass(frozen=True, eq=False)
class Exact:
    """The exact predictive on a grid: `grid` (N, G) and `density` (N, G), or for classes `density` (N, 2) alone."""

    density: Tensor
    grid: Tensor | None = None

    def distances(self, predictive: Predictive) -> dict[str, float]:
        """Total variation, and for densities Wasserstein's distance in units of the target; means over the rows."""
        if self.grid is None:
            assert isinstance(predictive, ClassPredictive)
            return self.between(predictive.probs.double().cpu())
        columns = [predictive.log_prob(points.unsqueeze(-1).float()).double() for points in self.grid.T]
        return self.between(torch.stack(columns, -1).exp().cpu())

    def between(self, density: Tensor) -> dict[str, float]:
        """The same for a predictive in the form of `density`.

        The exact predictive has no mass outside of the grid; the other's mass there is a part of the total variation.
        """
        if self.grid is None:
            return {"total_variation": float(0.5 * (density - self.density).abs().sum(-1).mean())}
        step = self.grid[:, 1] - self.grid[:, 0]  # (N,)
        inside = density.sum(-1) * step
        apart = (density - self.density).abs().sum(-1) * step
        variation = 0.5 * (apart + (1.0 - inside).clamp_min(0.0))
        cumulative = (density - self.density).cumsum(-1) * step.unsqueeze(-1)
        wasserstein = cumulative.abs().sum(-1) * step
        return {"total_variation": float(variation.mean()), "wasserstein": float(wasserstein.mean())}


def exact(values: Tensor, noise: float | None, grid: Tensor | None = None) -> Exact:
    """The predictive of all draws' predictions (..., N), on this grid, or on one that holds all of its mass."""
    values = values.reshape(-1, values.shape[-1])  # (S, N)
    if noise is None:
        share = values.mean(0)
        return Exact(torch.stack([1.0 - share, share], -1))
    if grid is None:
        spread = REACH * (values.var(0, correction=0) + noise**2).sqrt()
        unit = torch.linspace(-1.0, 1.0, POINTS, dtype=values.dtype)
        grid = values.mean(0).unsqueeze(-1) + spread.unsqueeze(-1) * unit  # (N, G)
    rows = [
        torch.exp(-0.5 * ((points - row.unsqueeze(-1)) / noise).square()).mean(0)
        for points, row in zip(grid, values.T, strict=True)
    ]
    return Exact(torch.stack(rows) / (noise * math.sqrt(2.0 * math.pi)), grid)
