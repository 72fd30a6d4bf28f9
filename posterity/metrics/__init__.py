"""Numbers that judge a predictive distribution by held-out targets: `metric(pred, y) -> float`."""

from posterity.metrics.accuracy import accuracy
from posterity.metrics.calibration import Reliability, expected_calibration_error, reliability
from posterity.metrics.error import mean_absolute_error, root_mean_squared_error
from posterity.metrics.negative_log_likelihood import negative_log_likelihood

__all__ = [
    "Reliability",
    "accuracy",
    "expected_calibration_error",
    "mean_absolute_error",
    "negative_log_likelihood",
    "reliability",
    "root_mean_squared_error",
]
