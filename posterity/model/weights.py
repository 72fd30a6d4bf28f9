"""Weights of the rows of a batch and of their entries; entries whose target is missing have the weight 0."""

import math
from math import prod

import torch
from torch import Tensor

from posterity.likelihoods.likelihood import IGNORED, Likelihood, event_sum
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
    """The batch without rows whose targets are all missing or of weight 0; the batch itself where no row has any.

    Other targets of weight 0 become missing.
    """
    observed = None if batch.complete else likelihood.observed(batch.targets)
    if batch.weights is not None:
        counted = batch.weights > 0
        if counted.dim() == 1:
            counted = counted.reshape(-1, *[1] * (batch.targets.dim() - 1)).expand_as(batch.targets)
        observed = counted if observed is None else observed & counted
    if observed is None or bool(observed.all()):
        return batch
    some = observed.reshape(batch.size, -1).any(1)
    if batch.weights is not None and batch.weights.dim() > 1:
        missing = math.nan if batch.targets.is_floating_point() else IGNORED
        batch = batch._replace(targets=batch.targets.masked_fill(~observed, missing), complete=False)
    return batch.map(lambda tensor: tensor[some]) if bool(some.any()) and not bool(some.all()) else batch
