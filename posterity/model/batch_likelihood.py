"""The log-likelihood of a batch, from outputs of one theta or of members."""

import torch
from torch import Tensor

from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Batch


def batch_log_likelihood(likelihood: Likelihood, raw: Tensor, outputs: Tensor, batch: Batch) -> Tensor:
    """sum_n w_n log p(y_n | f_n) over the rows of the batch, (...), given the raw learnt parameters (..., H)."""
    if batch.weights is None and not batch.per_member:
        return (likelihood.with_free(raw) if raw.shape[-1] else likelihood).total_log_prob(outputs, batch.targets)
    rows = _rows(likelihood, raw, outputs, batch)
    return rows.sum(-1) if batch.weights is None else (rows * batch.weights).sum(-1)


def _rows(likelihood: Likelihood, raw: Tensor, outputs: Tensor, batch: Batch) -> Tensor:
    """Log-likelihood of each row of the batch, (..., n)."""
    targets = batch.targets
    if not batch.per_member:
        return (likelihood.with_free(raw) if raw.shape[-1] else likelihood).log_prob(outputs, targets)
    shared = likelihood.member(0) is likelihood
    if shared and not raw.shape[-1]:  # the rows of all members are alike
        return likelihood.log_prob(outputs.flatten(0, 1), targets.flatten(0, 1)).view(targets.shape[:2])
    if shared:  # but for what it learns
        each_own = torch.func.vmap(lambda own, f, y: likelihood.with_free(own).log_prob(f, y))
        rows: Tensor = each_own(raw, outputs, targets)
        return rows
    each = [
        likelihood.member(index).with_free(raw[index]).log_prob(outputs[index], targets[index])
        for index in range(targets.shape[0])
    ]
    return torch.stack(each)
