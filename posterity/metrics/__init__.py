"""Scores of a predictive distribution on held-out targets: `metric(pred, y) -> float`.

A metric sees the predictive and the targets, never a posterior; diagnostics of posteriors are in `diagnostics`.
"""

from posterity.metrics.agreement import agreement, total_variation
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
from posterity.metrics.out_of_distribution import out_of_distribution_auroc
from posterity.metrics.scores import (
    accuracy,
    brier_score,
    crps,
    gibbs_negative_log_likelihood,
    mean_absolute_error,
    negative_log_likelihood,
    root_mean_squared_error,
)

__all__ = [
    "Bootstrap",
    "Reliability",
    "accuracy",
    "adaptive_calibration_error",
    "agreement",
    "bootstrap",
    "brier_score",
    "classwise_calibration_error",
    "confidence",
    "coverage",
    "crps",
    "expected_calibration_error",
    "gibbs_confidence",
    "gibbs_negative_log_likelihood",
    "interval_width",
    "maximum_calibration_error",
    "mean_absolute_error",
    "negative_log_likelihood",
    "out_of_distribution_auroc",
    "reliability",
    "root_mean_squared_error",
    "total_variation",
]
