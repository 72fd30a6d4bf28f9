"""What a posterior expects of some rows: log-likelihoods at draws, and squared residuals."""

import torch
from torch import Tensor

from posterity.evidence.draws import in_blocks
from posterity.evidence.maximisation import Expected
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.data import Batch
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.linearized import Linearized
from posterity.posteriors.pointwise import TOGETHER
from posterity.posteriors.posterior import Posterior


def expected_sums(posterior: Posterior, batch: Batch, draws: int, key: Key) -> Expected:
    """The share of these rows in `Expected`, untempered, in float64; sums over all batches under one key are the whole.

    In closed form for a linearised posterior with Gaussian noise; else at as many draws of the weights, the same for
    all batches under this key.
    """
    joint, targets = posterior.joint, batch.targets
    assert isinstance(joint, Joint)
    weights = torch.ones(batch.size, dtype=torch.float64, device=targets.device)
    weights = weights if batch.weights is None else batch.weights.double()
    with torch.no_grad():
        if isinstance(posterior, Linearized) and isinstance(joint.likelihood, GaussianNoise):
            return _in_closed_form(posterior, batch, weights)
        likelihood = posterior.likelihood(draws, key)
        if not isinstance(posterior, Gaussian):
            return _at(posterior.outputs(batch.inputs, draws, key), likelihood, targets, weights)
        found, step = [], max(1, TOGETHER // batch.size)
        for thetas in in_blocks(posterior.sample, draws, joint.num_weights, key):
            for some in torch.split(thetas, step):
                outputs = joint.outputs(some, batch.inputs, posterior.buffers or None)
                found.append(_at(outputs, likelihood, targets, weights))
        squares = torch.stack([each.squares * (len(each.log_likelihood) / draws) for each in found]).sum(0)
        return Expected(torch.cat([each.log_likelihood for each in found]), squares, weights.sum())


def added(first: Expected, second: Expected) -> Expected:
    """The sums over the rows of both."""
    return Expected(*(one + two for one, two in zip(first, second, strict=True)))


def _at(outputs: Tensor, likelihood: Likelihood, targets: Tensor, weights: Tensor) -> Expected:
    """From outputs (s, n, *event)."""
    outputs = outputs.double()
    log_likelihood = (likelihood.log_prob(outputs, targets) * weights).sum(-1)  # (s,)
    squares = outputs.new_zeros(0)
    if targets.is_floating_point() and targets.shape == outputs.shape[1:]:
        each = (targets - outputs).square().reshape(*outputs.shape[:2], -1)  # (s, n, E)
        squares = torch.einsum("sne,n->e", each, weights) / len(outputs)
    return Expected(log_likelihood, squares, weights.sum())


def _in_closed_form(posterior: Linearized, batch: Batch, weights: Tensor) -> Expected:
    assert isinstance(posterior.joint, Joint)
    likelihood = posterior.joint.likelihood
    mean, variance = posterior.output_moments(batch.inputs, marginal=True)
    mean, variance = mean.double(), variance.double().reshape(batch.size, -1)
    noise = likelihood.variance(mean).reshape(variance.shape)
    each = likelihood.log_prob(mean, batch.targets) - 0.5 * (variance / noise).sum(1)  # (n,)
    away = (batch.targets - mean).square().reshape(variance.shape) + variance  # (n, E)
    return Expected((weights @ each).reshape(1), weights @ away, weights.sum())
