"""From sums over the data to a Gaussian posterior: prior, tempering, tuned hyper-parameters, and where the mode is."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.curvature.structure import Structure, Sums
from posterity.curvature.survey import Place
from posterity.evidence import Marginal, Tuning, laplace_evidence
from posterity.evidence.tuning import with_tuned
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.model import Buffers, Joint, Problem
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.mixture import joint_of_members
from posterity.precisions import BlockDiagonal, PerMember, Precision
from posterity.priors import Correlated

logger = logging.getLogger("posterity")

FAR = 1.0  # conditional standard deviations from the mode, root mean square over the weights, from which it is said


class Fit(NamedTuple):
    """What passes over the data have found at theta (P,): see `LaplaceState`."""

    theta: Tensor
    sums: Sums
    data: Tensor  # (3,)
    slope: Tensor  # gradient of the log-likelihood: of all weights (R,), or of those of the output layer
    places: Sequence[Place]
    buffers: Buffers


def prior_precision(joint: Problem, theta: Tensor) -> Tensor:
    """Untempered prior precision (R,) of the random weights at theta (P,): of a `Correlated` prior the diagonal part.

    Zeros for a `Density`.
    """
    if not isinstance(joint, Joint):
        return torch.zeros_like(theta, dtype=torch.float64)
    if isinstance(joint.bound_prior, Correlated):
        return joint.bound_prior.matrix.base  # the rest is added in `gaussian_at_mode`
    prior = joint.bound_prior.precision(theta[: joint.num_weights].to(torch.float64))
    return prior if joint.random_indices is None else prior[joint.random_indices]


def gaussian_at_mode(
    joint: Problem, fit: Fit, structure: Structure, tuning: Tuning | None, scales_with_noise: bool = True
) -> Gaussian:
    """The Gaussian at theta with the hyper-parameters of the joint, or with those that `tuning` finds.

    The noise is tuned where the curvature goes as its inverse square, which that of squared gradients does not.
    """
    theta, likelihood_power = fit.theta, float(joint.tempering.likelihood_power)
    prior_power, prior = float(joint.tempering.prior_power), prior_precision(joint, fit.theta)
    precision = structure.precision(fit.sums, fit.places, likelihood_power, prior_power * prior)
    known = precision  # of the data alone, apart from a diagonal
    if isinstance(joint, Joint) and isinstance(joint.bound_prior, Correlated):
        precision = precision.plus(joint.bound_prior.matrix, prior_power)
    log_joint = likelihood_power * fit.data[0] + prior_power * joint.log_prior(theta.to(torch.float64))
    weights = theta[: joint.num_weights].detach().clone()
    evidence = laplace_evidence(log_joint, precision)
    if not isinstance(joint, Joint):
        return Gaussian(joint, weights, precision, fit.buffers, evidence)
    terms = fit.data if scales_with_noise else fit.data[:1]
    gaussian = Gaussian(joint.fitted(theta), weights, precision, fit.buffers, evidence, terms)
    _say_distance(joint, fit, precision)
    if tuning is None:
        return gaussian
    if isinstance(joint.bound_prior, Correlated):
        logger.info("The prior is not tuned: a Correlated one is what earlier data left.")
    if not scales_with_noise and isinstance(joint.likelihood, GaussianNoise):
        logger.info("The noise is not tuned: squared gradients do not go as its inverse square.")
    untempered = known.rescaled(1.0 / likelihood_power, prior)
    residuals = terms[1:] if scales_with_noise else None
    marginal = Marginal.of(joint, theta, untempered, terms[0], residuals, tuning.groups)
    if not marginal.names and marginal.noise is None:
        logger.info("Nothing is tuned: neither a normal prior nor Gaussian noise of one scale is there.")
        return gaussian
    return with_tuned(gaussian, marginal, tuning.tune(marginal))


def _say_distance(joint: Joint, fit: Fit, precision: Precision) -> None:
    """Warn where the weights are far from a mode, by the gradient in units of the curvature."""
    if not fit.slope.numel():
        return
    slope, curvature = _slope(joint, fit, precision)
    distance = float((slope.square() / curvature).mean().sqrt())
    if distance > FAR:
        logger.warning(
            "The weights are not at a mode: on average they lie %.3g standard deviations from it (gradient norm "
            "%.3g%s). The Gaussian is centred where they are. Train longer, or start from the posterior of MAP.",
            distance,
            float(slope.norm()),
            "" if slope.numel() == precision.size else ", of the output layer",
        )


def _slope(joint: Joint, fit: Fit, precision: Precision) -> tuple[Tensor, Tensor]:
    """Gradient of the log posterior in the weights whose slope is known, and the diagonal of their precision."""
    weights = fit.theta[: joint.num_weights].detach().to(torch.float64)
    _, of_prior = joint.bound_prior.value_and_grad(weights)
    of_prior = of_prior if joint.random_indices is None else of_prior[joint.random_indices]
    powers = float(joint.tempering.likelihood_power), float(joint.tempering.prior_power)
    if fit.slope.numel() == of_prior.numel():
        return powers[0] * fit.slope + powers[1] * of_prior, precision.diagonal()
    (head,) = [place.block for place in fit.places if place.head]
    slope = powers[0] * fit.slope + powers[1] * head.gather(of_prior)
    if isinstance(precision, BlockDiagonal):
        return slope, precision.parts[precision.blocks.index(head)].diagonal()
    return slope, head.gather(precision.diagonal())


def side_by_side(joint: Problem, each: Sequence[Gaussian], buffers: Buffers) -> Gaussian:
    """The Gaussians of all members as one, with hyper-parameters that differ by member where they were tuned."""
    theta = torch.stack([gaussian.mean for gaussian in each])
    evidence = [gaussian.log_evidence for gaussian in each]
    precision = PerMember(tuple(gaussian.precision for gaussian in each))
    if isinstance(joint, Joint):
        joint = joint_of_members(joint, [one.joint for one in each if isinstance(one.joint, Joint)])
    terms = [gaussian.data_terms for gaussian in each if gaussian.data_terms is not None]
    return Gaussian(
        joint,
        theta,
        precision,
        buffers,
        torch.stack([value for value in evidence if value is not None]),
        torch.stack(terms) if terms else None,
    )
