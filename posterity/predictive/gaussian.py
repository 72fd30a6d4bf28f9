"""Gaussian predictive of a regression: closed form from output moments."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive, aligned, between_zero_and_one


@final
class GaussianPredictive(Predictive):
    """y ~ N(mean, function variance + noise variance), from Gaussian outputs under Gaussian noise.

    **Math**: f_n ~ N(mean_n, V_n) over the weights and y_n = f_n + noise of variance `noise_variance`, so
    y_n ~ N(mean_n, V_n + diag(noise_variance_n)). `function_variance` (N, *event) is the diagonal of V_n.
    Without `covariance` the outputs of a row are taken as independent; with `covariance` (N, D, D), D the
    flattened event, `log_prob` and `sample` use the joint density of the row. epistemic = function_variance,
    aleatoric = noise_variance.

    **Limit**: exact for a linear-Gaussian model; for a network the Gaussian of f is the posterior's claim.

    **Cost**: O(N D), and O(N D^3) in float64 with `covariance`.

    **References**: Bishop (2006), eq. 3.58 and 5.172.

    **Example**:

    >>> pred = GaussianPredictive(torch.zeros(2, 1), torch.full((2, 1), 3.0), torch.tensor(1.0))
    >>> pred.std.flatten().tolist()
    [2.0, 2.0]
    >>> lower, upper = pred.interval(0.95)
    >>> round(float(upper[0, 0]), 2)
    3.92
    """

    classifies = False

    def __init__(
        self, mean: Tensor, function_variance: Tensor, noise_variance: Tensor, covariance: Tensor | None = None
    ) -> None:
        """Take output moments (N, *event), noise that broadcasts to them, and the covariance (N, D, D) if known."""
        if mean.dim() == 0:
            raise ValueError("GaussianPredictive.mean must have one row for each input, (N, *event). Got a scalar.")
        for name, value in (("function_variance", function_variance), ("noise_variance", noise_variance)):
            if not bool((value >= 0).all()):
                raise ValueError(f"GaussianPredictive.{name} must hold no number below 0. Got {shown(value)}.")
        if function_variance.shape != mean.shape:
            raise ValueError(
                f"GaussianPredictive.function_variance must have the shape {tuple(mean.shape)} of mean. "
                f"Got {tuple(function_variance.shape)}."
            )
        if covariance is not None:
            size = math.prod(mean.shape[1:])
            if covariance.shape != (len(mean), size, size):
                raise ValueError(
                    f"GaussianPredictive.covariance must be one matrix for each row, {(len(mean), size, size)}. "
                    f"Got {tuple(covariance.shape)}."
                )
            diagonal = covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape).to(function_variance)
            if not torch.allclose(diagonal, function_variance, rtol=1e-3, atol=1e-6):
                raise ValueError(
                    "GaussianPredictive.function_variance must be the diagonal of covariance. "
                    f"Got {shown(function_variance)} against {shown(diagonal)}. Leave the noise out of both."
                )
        self._mean = mean
        self._function_variance = function_variance
        self._noise_variance = noise_variance.to(mean).expand(mean.shape)
        self._covariance = covariance

    @property
    def mean(self) -> Tensor:
        """E[y], (N, *event)."""
        return self._mean

    @property
    def variance(self) -> Tensor:
        """Function variance plus noise variance, (N, *event)."""
        return self._function_variance + self._noise_variance

    @property
    def covariance(self) -> Tensor | None:
        """Covariance of the outputs f of each row, (N, D, D), where it is known; noise not included."""
        return self._covariance

    @property
    def aleatoric(self) -> Tensor:
        """Noise variance, (N, *event)."""
        return self._noise_variance

    @property
    def epistemic(self) -> Tensor:
        """Variance of the network's output, (N, *event)."""
        return self._function_variance

    def check(self, y: Tensor) -> Tensor:
        """Targets shaped as `mean`, or BadData."""
        return aligned(y, self._mean)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of each row, (N,): joint over outputs with `covariance`, else a sum over outputs."""
        residual = (self.check(y) - self._mean).reshape(len(self), -1)  # (N, D)
        if self._covariance is None:
            variance = self.variance.reshape(len(self), -1)
            return -0.5 * (residual**2 / variance + torch.log(2.0 * math.pi * variance)).sum(-1)
        factor = self._factor(self._covariance)  # (N, D, D)
        columns = residual.double().unsqueeze(-1)
        whitened: Tensor = torch.linalg.solve_triangular(factor, columns, upper=False).squeeze(-1)
        log_determinant = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = residual.shape[1] * math.log(2.0 * math.pi)
        return (-0.5 * ((whitened**2).sum(-1) + log_determinant + constant)).to(residual.dtype)

    def sample(self, draws: int, key: Key) -> Tensor:
        """Independent targets (draws, N, *event)."""
        noise = key.normal((draws, *self._mean.shape), dtype=self._mean.dtype, device=self._mean.device)
        if self._covariance is None:
            return self._mean + self.std * noise
        flat = noise.reshape(draws, len(self), -1)
        coloured = torch.einsum("nij,snj->sni", self._factor(self._covariance).to(flat.dtype), flat)
        return self._mean + coloured.reshape(noise.shape)

    def quantile(self, p: float) -> Tensor:
        """The p-quantile of each entry's marginal, (N, *event)."""
        between_zero_and_one("quantile: p", p)
        standard = float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))
        return self._mean + standard * self.std

    def _factor(self, covariance: Tensor) -> Tensor:
        """Cholesky factors (N, D, D) of the targets' covariance, in float64: float32 fails on thin matrices."""
        noise = torch.diag_embed(self._noise_variance.reshape(len(self), -1).double())
        factor: Tensor = torch.linalg.cholesky(covariance.double() + noise)
        return factor

    def _joined(self, parts: Sequence["GaussianPredictive"]) -> "GaussianPredictive":
        known = [part._covariance for part in parts if part._covariance is not None]
        if known and len(known) != len(parts):
            raise ValueError(
                "Predictive.concatenate: all parts must have an output covariance, or none. "
                f"Got it for {len(known)} of {len(parts)}."
            )
        return GaussianPredictive(
            torch.cat([part._mean for part in parts]),
            torch.cat([part._function_variance for part in parts]),
            torch.cat([part._noise_variance for part in parts]),
            torch.cat(known) if known else None,
        )
