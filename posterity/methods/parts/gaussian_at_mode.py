"""From sums over the data to a Gaussian posterior: prior, tempering, tuned hyper-parameters, distance to the mode."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.curvature.curvature import Rows
from posterity.curvature.structure import Structure, Sums, add_shared
from posterity.curvature.survey import Place
from posterity.evidence import Marginal, Tuning, laplace_evidence, residual_sums
from posterity.evidence.tuning import with_tuned
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.methods.parts.mode_distance import FAR, root_mean_square
from posterity.model import Buffers, Joint, Problem
from posterity.model.scales import random_log_prior
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.mixture import joint_of_members
from posterity.precisions import BlockDiagonal, PerMember, Precision
from posterity.priors import Correlated

logger = logging.getLogger("posterity")


class Fit(NamedTuple):
    """Sums of the passes over the data at theta (P,): see `LaplaceState`."""

    theta: Tensor
    sums: Sums
    data: Tensor  # (3,)
    slope: Tensor  # gradient of the log-likelihood in all weights (R,), or in the output layer
    places: Sequence[Place]
    buffers: Buffers


def prior_precision(joint: Problem, theta: Tensor) -> Tensor:
    """Untempered prior precision (R,) of the random weights at theta (P,): zeros for a `Density`.

    For a `Correlated` prior it is the diagonal part; `gaussian_at_mode` adds the rest.
    """
    if not isinstance(joint, Joint):
        return torch.zeros_like(theta, dtype=torch.float64)
    if isinstance(joint.bound_prior, Correlated):
        return joint.bound_prior.matrix.base
    prior = joint.bound_prior.precision(theta[: joint.num_weights].to(torch.float64))
    return prior if joint.random_indices is None else prior[joint.random_indices]


def gaussian_at_mode(
    joint: Problem, fit: Fit, structure: Structure, tuning: Tuning | None, scales_with_noise: bool = True
) -> Gaussian:
    """The Gaussian at theta with the hyper-parameters of the joint, or with those that `tuning` finds.

    The noise is tuned where the curvature scales as its inverse square, unlike squared gradients.
    """
    theta, likelihood_power = fit.theta, float(joint.tempering.likelihood_power)
    prior_power, prior = float(joint.tempering.prior_power), prior_precision(joint, fit.theta)
    precision = structure.precision(fit.sums, fit.places, likelihood_power, prior_power * prior)
    known = precision  # from the data alone, apart from a diagonal
    if isinstance(joint, Joint) and isinstance(joint.bound_prior, Correlated):
        precision = precision.plus(joint.bound_prior.matrix, prior_power)
    log_joint = likelihood_power * fit.data[0] + prior_power * random_log_prior(joint, theta.to(torch.float64))
    weights = theta[: joint.num_weights].detach().clone()
    evidence = laplace_evidence(log_joint, precision)
    if not isinstance(joint, Joint):
        return Gaussian(joint, weights, precision, fit.buffers, evidence)
    terms = fit.data if scales_with_noise else fit.data[:1]
    gaussian = Gaussian(joint.fitted(theta), weights, precision, fit.buffers, evidence, terms)
    if fit.slope.numel():
        _warn_of_distance(joint, fit, precision)
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


def _warn_of_distance(joint: Joint, fit: Fit, precision: Precision) -> None:
    """Warn where the weights are far from a mode, by the gradient of the log posterior in units of the curvature."""
    weights, likelihood_power = fit.theta[: joint.num_weights].detach(), float(joint.tempering.likelihood_power)
    prior_grad = joint.bound_prior.value_and_grad(weights.to(torch.float64))[1]
    prior_grad = prior_grad if joint.random_indices is None else prior_grad[joint.random_indices]
    if fit.slope.numel() == prior_grad.numel():
        curvature = precision.diagonal()
    else:
        (head,) = [layer.block for layer in fit.places if layer.head]
        prior_grad = head.gather(prior_grad)
        if isinstance(precision, BlockDiagonal):
            curvature = precision.parts[precision.blocks.index(head)].diagonal()
        else:
            curvature = head.gather(precision.diagonal())
    slope = likelihood_power * fit.slope + float(joint.tempering.prior_power) * prior_grad
    distance = root_mean_square(slope, curvature)
    if distance > FAR:
        layer = "" if slope.numel() == precision.size else ", of the output layer"
        logger.warning(
            f"The weights are not at a mode: on average they lie {distance:.3g} standard deviations from it (gradient "
            f"norm {float(slope.norm()):.3g}{layer}). The Gaussian is centred where they are. Train longer, or start "
            "from the posterior of MAP."
        )


def side_by_side(joint: Problem, each: Sequence[Gaussian], buffers: Buffers) -> Gaussian:
    """The Gaussians of all members as one, with hyper-parameters that differ by member where they were tuned."""
    theta, precision = torch.stack([g.mean for g in each]), PerMember(tuple(g.precision for g in each))
    if isinstance(joint, Joint):
        joint = joint_of_members(joint, [g.joint for g in each if isinstance(g.joint, Joint)])
    evidence = torch.stack([g.log_evidence for g in each if g.log_evidence is not None])
    terms = [g.data_terms for g in each if g.data_terms is not None]
    return Gaussian(joint, theta, precision, buffers, evidence, torch.stack(terms) if terms else None)


def with_rows(structure: Structure, sums: Sums, rows: Rows, number: int, *, first: bool) -> tuple[Sums, list[Tensor]]:
    """The sums with the rows added, in the `first` pass also data terms and slope of the rows."""

    rows.sloped = first

    def further(rows: Rows) -> list[Tensor]:
        return [_data_terms(rows), rows.slope()] if first else []

    processes = None if rows.joint.network is None else rows.joint.network.sharing
    if processes is not None:
        return add_shared(structure, sums, rows, number, processes, further)
    return structure.add(sums, rows, number), further(rows)


def _data_terms(rows: Rows) -> Tensor:
    """Log-likelihood, squared residuals and their number, (3,)."""
    terms = rows.log_likelihood().reshape(1)
    if rows.batch is None:
        return torch.cat([terms, terms.new_zeros(2)])
    return torch.cat([terms, residual_sums(rows.likelihood, rows.outputs(), rows.batch)])
