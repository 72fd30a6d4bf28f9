"""Validation: the score of a posterior on held-out rows."""

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.model.data import Batch, TensorData, as_data
from posterity.model.problem import Problem
from posterity.posteriors.posterior import Posterior

ROWS = 1024  # rows predicted at a time, which bounds the memory


class Validator:
    """The mean negative log-likelihood (nats per row) of a posterior's predictions on the validation rows.

    Takes the problem and (inputs, targets[, weights]) or whatever else `as_data` takes; with weights the mean is
    weighted. The rows are checked against the model at once.
    """

    def __init__(self, joint: Problem, validation: object) -> None:
        self._joint = joint = joint.as_joint("validation", "Leave validation out.")
        self._data = as_data(validation).to(joint.device)
        if isinstance(self._data, TensorData) and self._data.rows.per_member:
            raise BadData("validation rows are the same for all members. Pass them without a member axis.")
        self._example = joint.example_output(joint.check(self._data.first()))
        self._feed = self._data.passes(ROWS)
        weights = self._data.rows.weights if isinstance(self._data, TensorData) else None
        if weights is not None and not bool((weights > 0).any()):
            raise BadData("validation: the weights of the rows are all 0. Give at least one row a weight.")

    def fingerprint(self) -> str:
        """Return a hash of the rows."""
        return self._data.fingerprint()

    def sample(self) -> Batch:
        """Return some of the rows, or all, as they are scored."""
        return self._joint.prepared(self._data.sample(ROWS), self._example)

    def __call__(self, posterior: Posterior) -> float | Tensor:
        """Return the score, or one for each member (M,)."""
        if posterior.num_members is not None:
            scores = [self._score(posterior.member(index)) for index in range(posterior.num_members)]
            return torch.tensor(scores, dtype=torch.float64)
        return self._score(posterior)

    def _score(self, posterior: Posterior) -> float:
        total = weight = 0.0
        for rows in self._feed.from_step(0):
            assert isinstance(rows, Batch)
            batch = self._joint.prepared(rows, self._example)
            log_prob = posterior.predict(batch.inputs).log_prob(batch.targets).double()
            total -= float(log_prob.sum() if batch.weights is None else (log_prob * batch.weights).sum())
            weight += batch.size if batch.weights is None else float(batch.weights.sum())
        return total / weight
