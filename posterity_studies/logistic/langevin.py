"""The bias of unadjusted Langevin steps, beside MALA: on a Gaussian against its closed form, and on the posterior."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from posterity.kernels import Target, adjusted, place_at, unadjusted
from posterity.model import Batch
from posterity.numerics import Key
from posterity_studies.logistic.comparison import ENOUGH, about_mean, whitened
from posterity_studies.logistic.exact import Exact
from posterity_studies.logistic.fits import PRIOR_SCALE, Regression

STEP_SIZES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
MORE = 2  # times as many chains as elsewhere, for each step size
LEFT_OUT, COUNTED = 2, 5  # transitions, times the draws of a chain elsewhere


@dataclass(frozen=True)
class StepSize:
    """Variances at one step size s, in units of the exact one, by Langevin steps and by MALA, with standard errors.

    On a Gaussian of precision h (else None) `theory` is 1 / (1 - s h / 2); on the posterior it is the first order in s.
    """

    step_size: float
    precision: float | None
    theory: float
    langevin: float
    langevin_error: float
    mala: float
    mala_error: float


@dataclass(frozen=True)
class Bias:
    """Langevin's bias on the Laplace Gaussian, along its principal axes, and on the posterior, mean over directions."""

    gaussian: tuple[StepSize, ...]
    posterior: tuple[StepSize, ...]

    def document(self) -> dict[str, Any]:
        """Return all numbers as JSON."""
        return {
            "variances_are": "in units of the exact variance",
            "gaussian": [asdict(point) for point in self.gaussian],
            "posterior": [asdict(point) for point in self.posterior],
        }

    def claims(self) -> dict[str, bool]:
        """Claims of the figure, and whether they hold."""
        every = (*self.gaussian, *self.posterior)
        errors = [point.langevin - 1 for point in self.posterior]
        first = self.posterior[0]
        return {
            "On a Gaussian of precision h Langevin steps of size s have the variance 1 / (h (1 - s h / 2)), within "
            f"{ENOUGH:g} standard errors.": all(
                abs(point.langevin - point.theory) < ENOUGH * point.langevin_error for point in self.gaussian
            ),
            f"MALA has the exact variance at every step size, within {ENOUGH:g} standard errors.": all(
                abs(point.mala - 1) < ENOUGH * point.mala_error for point in every
            ),
            "On the posterior Langevin's error of the variance grows with the step size.": errors == sorted(errors),
            f"At s = {first.step_size:g} it is within a quarter of the first order in s, and {ENOUGH:g} standard "
            "errors.": abs(first.langevin - first.theory) < 0.25 * (first.theory - 1) + ENOUGH * first.langevin_error,
        }


def langevin_bias(regression: Regression, exact: Exact, chains: int, draws: int, seed: int) -> Bias:
    """Run Langevin steps and MALA at all step sizes together, on the Laplace Gaussian and on the posterior."""
    key = Key(seed).fold("bias")
    precisions: Tensor = torch.linalg.eigvalsh(torch.linalg.inv(regression.covariance))
    batch = Batch(regression.inputs, regression.targets.unsqueeze(-1))

    def gaussian(position: Tensor) -> tuple[Tensor, Tensor]:
        grad = -precisions * position  # along the principal axes
        return 0.5 * (position * grad).sum(-1), grad

    def posterior(position: Tensor) -> tuple[Tensor, Tensor]:
        value, grad, _ = regression.joint.value_and_grad(position, batch, train=False)
        return value, grad

    def as_shares(position: Tensor) -> Tensor:
        return position * precisions.sqrt()

    def as_whitened(position: Tensor) -> Tensor:
        return whitened(exact, position - exact.mean)

    mode = regression.mode.theta
    on_gaussian = _variances(gaussian, torch.zeros_like(mode), as_shares, chains, draws, key.fold("Gaussian"))
    on_posterior = _variances(posterior, mode, as_whitened, chains, draws, key.fold("posterior"))
    slope = _first_order(regression, exact, posterior)
    return Bias(
        gaussian=tuple(
            _at(on_gaussian[:, index, :, axis], size, 1 / (1 - 0.5 * size * float(precision)), float(precision))
            for axis, precision in enumerate(precisions)
            for index, size in enumerate(STEP_SIZES)
        ),
        posterior=tuple(
            _at(on_posterior[:, index].mean(-1), size, 1 + slope * size, None) for index, size in enumerate(STEP_SIZES)
        ),
    )


def _variances(
    target: Target, start: Tensor, view: Callable[[Tensor], Tensor], chains: int, draws: int, key: Key
) -> Tensor:
    """Return variances of `view` of the positions along each axis, about the mean of all chains, (2, K, C, P).

    The first axis is Langevin steps, then MALA; K is the number of step sizes, C that of chains for each of them.
    """
    sizes = torch.tensor(STEP_SIZES, dtype=start.dtype)
    count, left_out, counted = MORE * chains, LEFT_OUT * draws, COUNTED * draws
    every = sizes.repeat_interleave(count).unsqueeze(-1)  # (K C, 1)
    results = []
    for kernel in (unadjusted, adjusted):
        place = place_at(target, start.repeat(len(every), 1))
        first, second = torch.zeros_like(place.position), start.new_zeros(len(every), len(start), len(start))
        for step in range(left_out + counted):
            here = key.fold(kernel.__name__).fold(step)
            noise = here.fold("noise").normal(tuple(place.position.shape), start.dtype)
            if kernel is unadjusted:
                place, _ = unadjusted(target, place, noise, every)
            else:
                uniform = 1 - here.fold("coin").uniform((len(every),), start.dtype)  # not 0
                place, _ = adjusted(target, place, noise, uniform.log(), every)
            if step >= left_out:
                shown = view(place.position)
                first, second = first + shown, second + shown[:, :, None] * shown[:, None, :]
        parts = zip(torch.split(first / counted, count), torch.split(second / counted, count), strict=True)
        results.append(torch.stack([about_mean(*part).diagonal(dim1=-2, dim2=-1) for part in parts]))
    return torch.stack(results)


def _first_order(regression: Regression, exact: Exact, posterior: Target) -> float:
    """d / ds at s = 0 of the variance under Langevin steps of size s, in units of the exact one, mean over directions.

    With V = -log p(w, y) the chain's law is p(w | y) (1 + s (f - E f)) + O(s^2), f = |grad V|^2 / 4 - (Laplacian V) / 2
    (the invariance of the law under one step, expanded to s^2, and partial integration). So the slope is Cov(|z|^2, f)
    over the number of weights, by quadrature.
    """
    _, grad = posterior(exact.points)
    probability = torch.sigmoid(exact.points @ regression.inputs.T)  # (G, N)
    size = exact.points.shape[1]
    laplacian = (probability * (1 - probability)) @ regression.inputs.square().sum(1) + size / PRIOR_SCALE**2
    f = 0.25 * grad.square().sum(-1) - 0.5 * laplacian
    squares = whitened(exact, exact.points - exact.mean).square().sum(-1)
    return float(exact.mass @ (squares * (f - exact.mass @ f))) / size


def _at(variances: Tensor, size: float, theory: float, precision: float | None) -> StepSize:
    """Summarise variances (2, C) of Langevin steps and of MALA at one step size."""
    means, errors = variances.mean(1).tolist(), (variances.std(1) / math.sqrt(variances.shape[1])).tolist()
    return StepSize(size, precision, theory, means[0], errors[0], means[1], errors[1])
