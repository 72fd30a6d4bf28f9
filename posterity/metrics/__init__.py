"""Scores of a predictive distribution on held-out targets: `metric(pred, y) -> float`.

A row is a row of the inputs; scores of labels, pixels or outputs are averaged over all of them, log densities summed
in their row. Missing targets (NaN, label -100) are left out of sums and counts, and rows without any target, too.

A metric sees the predictive and the targets, never a posterior; diagnostics of posteriors are in `diagnostics`.
Permutation importance takes the function that predicts.
"""

from posterity.metrics.bootstrap import Bootstrap, bootstrap
from posterity.metrics.calibration import (
    Reliability,
    adaptive_calibration_error,
    classwise_calibration_error,
    confidence,
    coverage,
    expected_calibration_error,
    gibbs_confidence,
    interval_width,
    maximum_calibration_error,
    reliability,
)
from posterity.metrics.decisions import (
    RiskCoverage,
    confusion_matrix,
    cost_threshold,
    decisions,
    mean_cost,
    risk_coverage,
)
from posterity.metrics.importance import PermutationImportance, permutation_importance
from posterity.metrics.ranking import (
    auroc,
    average_precision,
    balanced_accuracy,
    out_of_distribution_auroc,
    out_of_distribution_average_precision,
    out_of_distribution_fpr,
)
from posterity.metrics.scores import (
    accuracy,
    agreement,
    brier_score,
    crps,
    gibbs_negative_log_likelihood,
    mean_absolute_error,
    negative_log_likelihood,
    r_squared,
    root_mean_squared_error,
    total_variation,
)

__all__ = [
    "Bootstrap",
    "PermutationImportance",
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "adaptive_calibration_error",
    "agreement",
    "auroc",
    "average_precision",
    "balanced_accuracy",
    "bootstrap",
    "brier_score",
    "classwise_calibration_error",
    "confidence",
    "confusion_matrix",
    "cost_threshold",
    "coverage",
    "crps",
    "decisions",
    "expected_calibration_error",
    "gibbs_confidence",
    "gibbs_negative_log_likelihood",
    "interval_width",
    "maximum_calibration_error",
    "mean_absolute_error",
    "mean_cost",
    "negative_log_likelihood",
    "out_of_distribution_auroc",
    "out_of_distribution_average_precision",
    "out_of_distribution_fpr",
    "permutation_importance",
    "r_squared",
    "reliability",
    "risk_coverage",
    "root_mean_squared_error",
    "total_variation",
]
