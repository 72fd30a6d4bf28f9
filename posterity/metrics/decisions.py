"""What predictions are worth when something is decided by them: confusion, costs, thresholds, and abstention."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.metrics.scores import (
    Uncertainty,
    classification,
    labelled,
    mean_over_rows,
    per_row,
    ranked,
    row_of,
    scored,
)
from posterity.predictive.predictive import Predictive


def confusion_matrix(pred: Predictive, y: Tensor, costs: Any = None) -> Tensor:
    """Count labels by true class (rows) and decided class (columns), (C, C) int64.

    The decision is the most probable class, or with `costs` the one of least expected cost, see `decisions`.

    >>> from posterity.predictive import ClassPredictive
    >>> pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]))
    >>> confusion_matrix(pred, torch.tensor([0, 0, 1])).tolist()
    [[1, 1], [0, 1]]
    """
    probs, labels = (value.cpu() for value in labelled("confusion_matrix", pred, y)[:2])
    classes = probs.shape[1]
    decided = _decided(probs, costs)
    if int(decided.max()) >= classes:
        raise ValueError(f"confusion_matrix: costs must have {classes} columns, one for each class. Got more.")
    return torch.bincount(labels * classes + decided, minlength=classes**2).reshape(classes, classes)


def decisions(pred: Predictive, costs: Any) -> Tensor:
    """Return the decision of least expected cost for each row, (N,), where costs (C, A) are by true class and decision.

    **Math**: argmin_a sum_c p_c costs[c, a]; the first of equal ones. There may be more decisions than classes: a last
    column of equal costs is to abstain (Chow, 1970). Right if the probabilities are calibrated.

    >>> from posterity.predictive import ClassPredictive
    >>> pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.6, 0.4]]))
    >>> decisions(pred, [[0.0, 1.0], [5.0, 0.0]]).tolist()  # to miss class 1 costs five times as much
    [0, 1]
    """
    classification("decisions", pred, "the quantiles of a regression predictive")
    return _decided(pred.probs.double().movedim(1, -1), costs)


@mean_over_rows
def mean_cost(pred: Predictive, y: Tensor, costs: Any = None) -> Tensor:
    """Mean over labels of the cost of the decisions of least expected cost; costs (C, A) as for `decisions`.

    Without costs each mistake costs 1: the error rate.

    >>> from posterity.predictive import ClassPredictive
    >>> mean_cost(ClassPredictive(torch.tensor([[0.9, 0.1], [0.6, 0.4]])), torch.tensor([1, 1]), [[0, 1], [5, 0]])
    2.5
    """
    probs, labels, seen = labelled("mean_cost", pred, y)
    decided = _decided(probs, costs)
    if costs is None:
        return per_row(decided != labels, pred, seen)
    return per_row(_costs(costs, probs.shape[1]).to(probs.device)[labels, decided], pred, seen)


def cost_threshold(costs: Any) -> float:
    """Return the probability of the second of two classes above which it is decided for, from costs (2, 2).

    **Math**: (c_01 - c_00) / (c_01 - c_00 + c_10 - c_11) with c_ya the cost of decision a for class y.

    >>> cost_threshold([[0.0, 1.0], [4.0, 0.0]])
    0.2
    """
    table = _costs(costs, 2)
    false_alarm, miss = float(table[0, 1] - table[0, 0]), float(table[1, 0] - table[1, 1])
    if table.shape[1] != 2 or not (false_alarm > 0 and miss > 0):
        raise ValueError(f"cost_threshold needs costs (2, 2) by which mistakes cost more. Got {table.tolist()}.")
    return false_alarm / (false_alarm + miss)


def _decided(probs: Tensor, costs: Any) -> Tensor:
    """The decision of least expected cost at probabilities (..., C); the most probable class without costs."""
    return probs.argmax(-1) if costs is None else (probs @ _costs(costs, probs.shape[-1]).to(probs.device)).argmin(-1)


def _costs(costs: Any, classes: int) -> Tensor:
    """Costs (C, A) in float64; a ValueError where they do not fit the classes."""
    table = torch.as_tensor(costs, dtype=torch.float64, device="cpu")
    if table.dim() != 2 or table.shape[0] != classes or table.shape[1] < 2 or not bool(table.isfinite().all()):
        raise ValueError(
            f"costs must be finite numbers by true class and decision: {classes} rows, and a column for each decision. "
            f"Got {shown(costs)}."
        )
    return table


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The gain by abstaining: `risk` (N,) among the most certain rows, by their share `coverage` (N,).

    Of labels at positions N counts labels. The risk is the error rate of classes, or the root mean squared error.
    """

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """The mean risk over all coverages (AURC); lower is better."""
        return float(self.risk.mean())

    def at(self, coverage: float) -> float:
        """The risk where this share of the rows is answered, rounded up to a whole row."""
        if not 0.0 < coverage <= 1.0:
            raise ValueError(f"RiskCoverage.at: coverage must be above 0 and at most 1. Got {shown(coverage)}.")
        return float(self.risk[max(0, math.ceil(coverage * len(self.risk) - 1e-9) - 1)])


def risk_coverage(pred: Predictive, y: Tensor, uncertainty: Uncertainty | None = None) -> RiskCoverage:
    """The risk-coverage curve: rows are answered from the surest on; of labels at positions, each by itself.

    The sureness is the largest class probability, or the standard deviation (mean over outputs) of a number: the
    smaller, the surer. `uncertainty` ranks them otherwise, by a number for each row or label, such as
    `lambda pred: pred.epistemic`. Rows that are equally sure share their mean loss, so that their order does not
    matter.

    **References**: El-Yaniv and Wiener (2010), On the foundations of noise-free selective classification; Geifman and
    El-Yaniv (2017), Selective classification for deep neural networks.

    >>> from posterity.predictive import ClassPredictive
    >>> pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.6, 0.4]]))
    >>> curve = risk_coverage(pred, torch.tensor([0, 1]))
    >>> curve.at(0.5), curve.at(1.0)
    (0.0, 0.5)
    """
    given = None if uncertainty is None else ranked("risk_coverage", pred, uncertainty)
    if pred.classifies:
        probs, labels, seen = labelled("risk_coverage", pred, y)
        sure, answer = probs.max(1)
        losses, unsure = (answer != labels).double().cpu(), -sure.cpu()
        if given is not None:  # of a row, for each of its labels, or of each label
            seen = seen.cpu()
            unsure = given[row_of(seen)] if len(given) == len(pred) else given[seen.reshape(-1)]
    else:
        targets, seen = scored("risk_coverage", pred, y)
        observed = seen.reshape(len(pred), -1)
        errors = (targets - pred.mean).double().square().reshape(len(pred), -1)
        kept = observed.any(1).cpu()  # rows with a target
        losses = (torch.where(observed, errors, 0.0).sum(1) / observed.sum(1)).cpu()[kept]
        unsure = (pred.std.double().reshape(len(pred), -1).mean(1).cpu() if given is None else given)[kept]
    ordered, order = unsure.sort(stable=True)
    group = torch.searchsorted(ordered, ordered)  # the first row that is equally sure
    counts = torch.bincount(group)
    shared = torch.bincount(group, losses[order]) / counts
    answered = torch.arange(1, len(order) + 1, dtype=torch.float64, device="cpu")
    risk = shared[group].cumsum(0) / answered
    return RiskCoverage(answered / len(order), risk if pred.classifies else risk.sqrt())
