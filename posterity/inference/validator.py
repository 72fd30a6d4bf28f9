"""Validation: the score of a posterior on held-out rows."""

from collections.abc import Iterator
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.model.data import Batch, TensorData, as_data
from posterity.model.problem import Problem, labels_of
from posterity.posteriors.posterior import Posterior
from posterity.processes import active

ROWS = 1024  # rows predicted at a time, which bounds the memory
NO_TARGET = "validation: no row has a weight and a target. Give at least one row both."


class Validator:
    """The mean negative log-likelihood (nats per row) of a posterior's predictions on the validation rows.

    Takes the problem and (inputs, targets[, weights]) or whatever else `as_data` takes; with weights the mean is
    weighted. Missing targets are left out, and rows without any target do not count. The rows are checked against the
    model at once. Active processes share the batches.
    """

    def __init__(self, joint: Problem, validation: object) -> None:
        self._joint = joint = joint.as_joint("validation", "Leave validation out.")
        self._data = as_data(validation, labels=labels_of(joint)).to(joint.device)
        if isinstance(self._data, TensorData) and self._data.rows.per_member:
            raise BadData("validation rows are the same for all members. Pass them without a member axis.")
        self._prepare = joint.preparing()
        self._prepare(self._data.first())
        self._feed = self._data.passes(ROWS)
        if isinstance(self._data, TensorData) and not bool((self._weights(self._prepare(self._data.rows)) > 0).any()):
            raise BadData(NO_TARGET)

    def fingerprint(self) -> str:
        """Return a hash of the rows."""
        return self._data.fingerprint()

    def sample(self) -> Batch:
        """Return some of the rows, or all, as they are scored."""
        return self._prepare(self._data.sample(ROWS))

    def __call__(self, posterior: Posterior) -> float | Tensor:
        """Return the score, or one for each member (M,)."""
        if posterior.num_members is not None:
            scores = [self._score(posterior.member(index)) for index in range(posterior.num_members)]
            return torch.tensor(scores, dtype=torch.float64)
        return self._score(posterior)

    def _score(self, posterior: Posterior) -> float:
        processes, batches = active(), len(self._feed)
        sums = partial(self._sums, posterior, {})
        (both,) = sums(0, batches) if processes is None else processes.total(sums, batches)
        total, weight = both.tolist()
        if not weight:
            raise BadData(NO_TARGET)
        return float(total / weight)

    def _sums(
        self, posterior: Posterior, begun: dict[int, Iterator[Batch | None]], low: int, high: int
    ) -> list[Tensor]:
        """The sums of negative log-likelihoods and of weights over the batches low .. high - 1, (2,).

        `begun` has a pass by its next batch, so that a stream is read once for all blocks of this process.
        """
        total = weight = 0.0
        begun[high] = stream = begun.pop(low, None) or self._feed.from_step(low)
        for rows in islice(stream, high - low):
            assert isinstance(rows, Batch)
            batch = self._prepare(rows)
            log_prob = posterior.predict(batch.inputs).log_prob(batch.targets).double()
            weights = self._weights(batch)
            total -= float((log_prob * weights).sum())
            weight += float(weights.sum())
        return [torch.tensor([total, weight], dtype=torch.float64, device="cpu")]

    def _weights(self, batch: Batch) -> Tensor:
        """Weights (n,) of the rows, 0 for those without a target."""
        rows, observed = batch.targets.shape[:1], self._joint.likelihood.observed(batch.targets)
        weights = torch.ones(rows, dtype=torch.float64, device=batch.targets.device)
        if batch.weights is not None and batch.weights.shape != rows:
            raise BadData(
                "validation scores whole rows, so weights must be one for each row. Got weights "
                f"{tuple(batch.weights.shape)}. Give weights {tuple(rows)}, and no target where one must not count."
            )
        weights = weights if batch.weights is None else batch.weights.double()
        return weights if observed is None else weights * observed.reshape(batch.size, -1).any(1)
