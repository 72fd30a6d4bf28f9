"""Numbers that judge a predictive distribution by held-out targets: `metric(pred, y) -> float`."""

from posterity.metrics.accuracy import accuracy
from posterity.metrics.agreement import agreement, total_variation
from posterity.metrics.bootstrap import Bootstrap, bootstrap
from posterity.metrics.brier import brier_score
from posterity.metrics.calibration import (
    Reliability,
    adaptive_calibration_error,
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
    reliability,
)
from posterity.metrics.confidence import confidence, gibbs_confidence
from posterity.metrics.coverage import coverage, interval_width
from posterity.metrics.crps import crps
from posterity.metrics.error import mean_absolute_error, root_mean_squared_error
from posterity.metrics.negative_log_likelihood import gibbs_negative_log_likelihood, negative_log_likelihood
from posterity.metrics.out_of_distribution import out_of_distribution_auroc

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
