"""Gaussian predictives, and moment matching of draws by one."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.numerics.random import Key
from posterity.predictive.draws import DrawsPredictive
from posterity.predictive.predictive import Predictive, aligned, between_zero_and_one, chosen_rows


@final
class GaussianPredictive(Predictive):
    """y ~ N(mean, function variance + noise variance), from Gaussian outputs under Gaussian noise.

    **Math**: f_n ~ N(mean_n, V_n) over the weights and y_n = f_n + noise of variance `noise_variance`, so
    y_n ~ N(mean_n, V_n + diag(noise_variance_n)). `function_variance` (N, *event) is the diagonal of V_n.
    Without `covariance` the outputs of a row are taken as independent; with `covariance` (N, D, D), D the
    flattened event, `log_prob` and `sample` use the joint density of the row. epistemic = function_variance,
    aleatoric = noise_variance. `joint_covariance` (N D, N D), where known, is the covariance of the outputs of all
    rows, for `joint_log_prob`. expected_log_prob(y) = log N(y; mean, noise) - sum V / (2 noise) in closed form.

    **Limit**: exact for a linear-Gaussian model; for a network f is Gaussian only as the posterior approximates it.

    **Cost**: O(N D), and O(N D^3) in float64 with `covariance`; O(N^3 D^3) for `joint_log_prob`.

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
    covariance: Tensor | None
    joint_covariance: Tensor | None

    def __init__(
        self,
        mean: Tensor,
        function_variance: Tensor,
        noise_variance: Tensor,
        covariance: Tensor | None = None,
        joint_covariance: Tensor | None = None,
    ) -> None:
        """Take output moments (N, *event), noise that broadcasts to them, and covariances of the outputs if known.

        `covariance` (N, D, D) is within each row, `joint_covariance` (N D, N D) within and across rows, without noise.
        """
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
        size = math.prod(mean.shape[1:])
        shapes = {"covariance": (len(mean), size, size), "joint_covariance": (len(mean) * size, len(mean) * size)}
        for (name, shape), matrix in zip(shapes.items(), (covariance, joint_covariance), strict=True):
            if matrix is None:
                continue
            if matrix.shape != shape:
                what = "one matrix for each row" if name == "covariance" else "one matrix for all rows"
                raise ValueError(f"GaussianPredictive.{name} must be {what}, {shape}. Got {tuple(matrix.shape)}.")
            diagonal = matrix.diagonal(dim1=-2, dim2=-1).reshape(mean.shape).to(function_variance)
            if not torch.allclose(diagonal, function_variance, rtol=1e-3, atol=1e-6):
                raise ValueError(
                    f"GaussianPredictive.function_variance must be the diagonal of {name}. "
                    f"Got {shown(function_variance)} against {shown(diagonal)}. Leave the noise out of both."
                )
        self._mean, self._function_variance = mean, function_variance
        self._noise_variance = noise_variance.to(mean).expand(mean.shape)
        self.covariance, self.joint_covariance = covariance, joint_covariance

    @property
    def mean(self) -> Tensor:
        return self._mean

    @property
    def variance(self) -> Tensor:
        return self._function_variance + self._noise_variance

    @property
    def normals(self) -> tuple[Tensor, Tensor]:
        return self._mean.unsqueeze(0), self.std.unsqueeze(0)

    @property
    def aleatoric(self) -> Tensor:
        return self._noise_variance

    @property
    def epistemic(self) -> Tensor:
        return self._function_variance

    def check(self, y: Tensor) -> Tensor:
        return aligned(y, self._mean)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of each row, (N,): joint over outputs with `covariance`, else a sum over outputs."""
        targets = self._flat(self.check(y))  # (N, D)
        residual, missing = targets - self._flat(self._mean), targets.isnan()
        if self.covariance is None:
            variance = self._flat(self.variance)
            entries = -0.5 * (residual**2 / variance + torch.log(2.0 * math.pi * variance))
            return entries.masked_fill(missing, 0.0).sum(-1)
        return _log_normal(residual, missing, self.covariance, self._flat(self._noise_variance)).to(residual.dtype)

    def expected_log_prob(self, y: Tensor) -> Tensor:
        noise = self._noise_variance
        targets = self.check(y)
        square = (targets - self._mean).square() + self._function_variance
        entries: Tensor = -0.5 * (square / noise + torch.log(2.0 * math.pi * noise))
        return self._flat(entries.masked_fill(targets.isnan(), 0.0)).sum(-1)

    def joint_log_prob(self, y: Tensor) -> Tensor:
        targets = self.check(y)
        residual, missing = (targets - self._mean).reshape(-1), targets.isnan().reshape(-1)  # (N D,)
        if self.joint_covariance is None:
            raise ValueError(
                "joint_log_prob needs the covariance of the outputs across rows. Got moments of each row by itself. "
                "Give GaussianPredictive joint_covariance, or predict by draws: "
                "from_outputs(likelihood, q.outputs(inputs, draws, key))."
            )
        return _log_normal(residual, missing, self.joint_covariance, self._noise_variance.reshape(-1))

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        noise = (key or Key(0)).normal((draws, *self._mean.shape), dtype=self._mean.dtype, device=self._mean.device)
        if self.covariance is None:
            return self._mean + self.std * noise
        flat = noise.reshape(draws, *self.covariance.shape[:2])
        factor = _factor(self.covariance, self._flat(self._noise_variance))
        coloured = torch.einsum("nij,snj->sni", factor.to(flat.dtype), flat)
        return self._mean + coloured.reshape(noise.shape)

    def quantile(self, p: float) -> Tensor:
        between_zero_and_one("quantile: p", p)
        standard = float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))
        return self._mean + standard * self.std

    def _flat(self, values: Tensor) -> Tensor:
        return values.reshape(len(self), math.prod(self._mean.shape[1:]))  # (N, D)

    def rows(self, index: Tensor | slice) -> "GaussianPredictive":
        index = chosen_rows(index, self._mean.device)
        joint = self.joint_covariance
        if joint is not None:
            chosen = self._flat(torch.arange(len(joint), device=joint.device))[index].reshape(-1)
            joint = joint[chosen][:, chosen]
        return GaussianPredictive(
            self._mean[index],
            self._function_variance[index],
            self._noise_variance[index],
            None if self.covariance is None else self.covariance[index],
            joint,
        )

    def _joined(self, parts: Sequence["GaussianPredictive"]) -> "GaussianPredictive":
        known = [part.covariance for part in parts if part.covariance is not None]
        if known and len(known) != len(parts):
            raise ValueError(
                "Predictive.concatenate: all parts must have an output covariance, or none. "
                f"Got it for {len(known)} of {len(parts)}."
            )
        moments = zip(*((part._mean, part._function_variance, part._noise_variance) for part in parts), strict=True)
        mean, variance, noise = (torch.cat(columns) for columns in moments)
        return GaussianPredictive(mean, variance, noise, torch.cat(known) if known else None)


def _factor(covariance: Tensor, noise: Tensor) -> Tensor:
    """Cholesky factor of covariance + diag(noise), in float64: float32 fails on thin matrices."""
    factor: Tensor = torch.linalg.cholesky(covariance.double() + torch.diag_embed(noise.double()))
    return factor


def _log_normal(residual: Tensor, missing: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
    """log N(residual; 0, covariance + diag(noise)) of vectors (..., D), in float64; missing entries integrated out."""
    if bool(missing.any()):  # independent of the others, with variance 1 and residual 0
        covariance = covariance.masked_fill(missing.unsqueeze(-1) | missing.unsqueeze(-2), 0.0)
        noise, residual = noise.masked_fill(missing, 1.0), residual.masked_fill(missing, 0.0)
    factor = _factor(covariance, noise)
    whitened: Tensor = torch.linalg.solve_triangular(factor, residual.double().unsqueeze(-1), upper=False).squeeze(-1)
    log_determinant = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    constant = (~missing).sum(-1).double() * math.log(2.0 * math.pi)
    return -0.5 * ((whitened**2).sum(-1) + log_determinant + constant)


def moment_matched(predictive: DrawsPredictive, *, unbiased: bool = True) -> GaussianPredictive:
    """N(mean, covariance of the draws + noise) of each row, from S draws of the outputs under Gaussian noise.

    With `unbiased` the scatter of the draws is divided by S - 1, so that its expectation is the posterior's own
    covariance; without, by S, which is the covariance of the mixture of these draws and low by (S - 1) / S.

    >>> from posterity.likelihoods import Gaussian
    >>> pred = DrawsPredictive(Gaussian(scale=1.0), torch.tensor([[[-2.0]], [[2.0]]]))
    >>> moment_matched(pred).variance.item(), moment_matched(pred, unbiased=False).variance.item()
    (9.0, 5.0)
    """
    given: object = predictive
    if not isinstance(given, DrawsPredictive):
        raise TypeError(
            f"moment_matched needs draws of the outputs, of regression. Got {shown(given)}. Other predictives have "
            "their mean and variance."
        )
    likelihood, outputs = predictive.likelihood, predictive.outputs
    if likelihood.link != "identity":
        raise TypeError(f"moment_matched needs a Gaussian likelihood. Got {type(likelihood).__name__}.")
    draws = len(outputs) - 1 if unbiased else len(outputs)
    if draws < 1:
        raise ValueError("moment_matched needs at least 2 draws to be unbiased. Got 1. Predict with more draws.")
    mean = outputs.mean(0)
    centred = (outputs - mean).flatten(2)  # (S, N, D)
    covariance = torch.einsum("snd,sne->nde", centred, centred) / draws
    variance = covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
    return GaussianPredictive(mean, variance, predictive.aleatoric, covariance)
