"""All methods against the exact posterior: errors of moments and evidence, and costs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from posterity.diagnostics import bulk_ess
from posterity.posteriors import Samples
from posterity_studies.logistic.exact import Exact
from posterity_studies.logistic.fits import SAMPLERS, Fit

T = TypeVar("T")
ENOUGH = 4.0  # standard errors beyond which a difference is significant


@dataclass(frozen=True)
class Row:
    """Errors and cost of a method; None for quantities that it does not have.

    With z = L^-1 (w - m), where m and L L^T are the exact mean and covariance, `mean_error` is the length of the mean
    of z, and `covariance_error` the Frobenius norm of Cov(z) - I. The standard errors are what draws of the exact
    posterior would have, root mean square. `log_evidence` is an ELBO where `bound`. `ess` is the smaller bulk effective
    sample size of the two weights, for each transition and for a thousand gradients after the warm-up; `move` is the
    mean distance |z' - z| of a transition, rejections included.
    """

    method: str
    mean_error: float
    mean_standard_error: float | None
    covariance_error: float
    covariance_standard_error: float | None
    log_evidence: float | None
    evidence_error: float | None
    bound: bool
    gradients: int | None
    seconds: float
    ess: float | None = None
    ess_per_transition: float | None = None
    ess_per_1000_gradients: float | None = None
    move: float | None = None
    acceptance: float | None = None
    step_size: float | None = None

    @property
    def unbiased(self) -> bool:
        """Whether neither error of the moments is significant."""
        return self.mean_error < ENOUGH * _known(self.mean_standard_error) and self.covariance_error < ENOUGH * _known(
            self.covariance_standard_error
        )


def compare(exact: Exact, fits: Mapping[str, Fit], elbos: Mapping[str, float]) -> list[Row]:
    """Compare each fit with the exact posterior; `elbos` has the bounds of the fits that maximise one."""
    return [_row(exact, name, fit, elbos.get(name)) for name, fit in fits.items()]


def _row(exact: Exact, name: str, fit: Fit, elbo: float | None) -> Row:
    posterior = fit.posterior
    if isinstance(posterior, Samples):
        return _row_of_draws(exact, name, fit, posterior)
    covariance = whitened(exact, whitened(exact, posterior.gaussian.precision.covariance()).T)
    log_evidence = elbo if elbo is not None else float(_known(posterior.log_evidence))
    return Row(
        method=name,
        mean_error=float(whitened(exact, posterior.point() - exact.mean).norm()),
        mean_standard_error=None,
        covariance_error=_from_identity(covariance),
        covariance_standard_error=None,
        log_evidence=log_evidence,
        evidence_error=log_evidence - exact.log_evidence,
        bound=elbo is not None,
        gradients=fit.gradients,
        seconds=fit.seconds,
    )


def _row_of_draws(exact: Exact, name: str, fit: Fit, posterior: Samples) -> Row:
    z = whitened(exact, posterior.theta - exact.mean)  # (C, D, 2)
    moments = pooled(z.mean(1), z.mT @ z / z.shape[1])
    ess = float(bulk_ess(posterior.theta).min())
    assert fit.gradients is not None
    return Row(
        method=name,
        mean_error=float(moments.mean.norm()),
        mean_standard_error=float(moments.mean_error.norm()),
        covariance_error=_from_identity(moments.covariance),
        covariance_standard_error=float(moments.covariance_error.norm()),
        log_evidence=None,
        evidence_error=None,
        bound=False,
        gradients=fit.gradients,
        seconds=fit.seconds,
        ess=ess,
        ess_per_transition=ess / z[..., 0].numel(),
        ess_per_1000_gradients=1000 * ess / (fit.gradients - fit.warmup),
        move=float(z.diff(dim=1).norm(dim=-1).mean()),
        acceptance=float(posterior.statistics["accept"].mean()),
        step_size=float(posterior.statistics["step_size"][0, -1]),
    )


def whitened(exact: Exact, vectors: Tensor) -> Tensor:
    """L^-1 v for vectors (..., 2), where L L^T is the exact covariance."""
    inverse: Tensor = torch.linalg.inv(torch.linalg.cholesky(exact.covariance))
    return vectors @ inverse.T


def _from_identity(covariance: Tensor) -> float:
    return float((covariance - torch.eye(len(covariance), dtype=covariance.dtype)).norm())


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean (P,) and covariance (P, P) over all chains, with their standard errors."""

    mean: Tensor
    covariance: Tensor
    mean_error: Tensor
    covariance_error: Tensor


def pooled(first: Tensor, second: Tensor) -> Moments:
    """Pool the means (C, P) and second moments (C, P, P) of independent chains, with errors from their differences."""
    spread = about_mean(first, second)
    mean_error, covariance_error = (values.std(0) / math.sqrt(len(values)) for values in (first, spread))
    return Moments(first.mean(0), spread.mean(0), mean_error, covariance_error)


def about_mean(first: Tensor, second: Tensor) -> Tensor:
    """Second moments (C, P, P) of each chain about the mean of all chains."""
    mean = first.mean(0)
    across = first[:, :, None] * mean
    return second - across - across.mT + mean[:, None] * mean


def claims(rows: list[Row]) -> dict[str, bool]:
    """Claims of the comparison, and whether they hold."""
    by_name = {row.method: row for row in rows}
    laplace, propagation = by_name["Laplace"], by_name["Expectation propagation"]
    bounds = [row for row in rows if row.bound]
    short, walk, long = (by_name[name] for name in ("Metropolis, short steps", "Metropolis", "HMC"))
    adjusted = [by_name[name] for name in SAMPLERS if name != "Langevin"]
    return {
        f"{'; '.join(row.method for row in adjusted)}: mean and covariance are exact within {ENOUGH:g} standard "
        "errors.": all(row.unbiased for row in adjusted),
        f"Langevin is biased: mean or covariance is off by more than {ENOUGH:g} standard errors.": not by_name[
            "Langevin"
        ].unbiased,
        "A transition of HMC goes more than twice as far as one of Metropolis.": _known(long.move)
        > 2 * _known(walk.move),
        "A transition of HMC is worth more than three of Metropolis in effective sample size.": _known(
            long.ess_per_transition
        )
        > 3 * _known(walk.ess_per_transition),
        "Tuned Metropolis has more effective draws for each evaluation than short steps have.": _known(
            walk.ess_per_1000_gradients
        )
        > _known(short.ess_per_1000_gradients),
        "Expectation propagation is nearer than Laplace in mean, covariance and evidence.": all(
            ours < theirs for ours, theirs in zip(_sizes(propagation), _sizes(laplace), strict=True)
        ),
        "Expectation propagation is nearer than both variational Gaussians in mean and covariance.": all(
            propagation.mean_error < row.mean_error and propagation.covariance_error < row.covariance_error
            for row in bounds
        ),
        "Every ELBO is below the log evidence.": all(_known(row.evidence_error) < 0 for row in bounds),
    }


def _sizes(row: Row) -> tuple[float, float, float]:
    return row.mean_error, row.covariance_error, abs(_known(row.evidence_error))


def _known(value: T | None) -> T:
    assert value is not None
    return value
