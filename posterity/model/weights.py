"""Weights of the rows of a batch and of their entries; entries whose target is missing have the weight 0."""

from math import prod

import torch
from torch import Tensor

from posterity.likelihoods.likelihood import Likelihood, event_sum
from posterity.model.batch import Batch


def weighted_log_prob(likelihood: Likelihood, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """w_n log p(y_n | f_n) of each row, (..., n), with weights (n,) of rows or (n, *entries) of their entries."""
    if weights is None:
        return likelihood.log_prob(outputs, targets)
    if weights.dim() == 1:
        return likelihood.log_prob(outputs, targets) * weights
    return event_sum(likelihood.entry_log_prob(outputs, targets) * weights, weights.dim() - 1)


def entry_weights(likelihood: Likelihood, batch: Batch, dtype: torch.dtype) -> Tensor | None:
    """Weights (n,) of rows, or (n, *entries) where they differ within rows, 0 for missing targets; None: all are 1.

    >>> from posterity.likelihoods import Gaussian
    >>> targets = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    >>> entry_weights(Gaussian(), Batch(torch.zeros(2, 1), targets, torch.tensor([5.0, 7.0])), torch.float32)
    tensor([[5., 0.],
            [7., 7.]])
    """
    given = None if batch.weights is None else batch.weights.to(dtype)
    observed = None if batch.complete else likelihood.observed(batch.targets)
    if observed is None or (not batch.checked and bool(observed.all())):
        return given
    rows = observed.shape[: batch.rows_axis + 1]
    if observed.numel() == prod(rows):
        observed = observed.reshape(rows)
    if given is None:
        return observed.to(dtype)
    return given.reshape(*given.shape, *[1] * (observed.dim() - given.dim())) * observed


def row_weights(likelihood: Likelihood, batch: Batch, dtype: torch.dtype) -> Tensor | None:
    """Weights (n,) of rows, the mean of the weights of their entries; None: all are 1."""
    weights, axes = entry_weights(likelihood, batch, dtype), batch.rows_axis + 1
    return weights if weights is None or weights.dim() == axes else weights.flatten(axes).mean(-1)


def output_weights(likelihood: Likelihood, weights: Tensor, outputs: Tensor) -> Tensor:
    """Weights (n,) or (n, *entries), so that they broadcast to the outputs (n, *event)."""
    if weights.dim() == 1:
        return weights.reshape(-1, *[1] * (outputs.dim() - 1))
    return likelihood.over_outputs(weights)


def with_targets(likelihood: Likelihood, batch: Batch) -> Batch:
    """The batch without rows whose targets are all missing; the batch itself where no row has any."""
    observed = None if batch.complete else likelihood.observed(batch.targets)
    if observed is None:
        return batch
    some = observed.reshape(batch.size, -1).any(1)
    return batch.map(lambda tensor: tensor[some]) if bool(some.any()) and not bool(some.all()) else batch
