"""Figures and reports of posteriors. Drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity.report.diagnostics import predicted_observed, reliability_diagram
from posterity.report.figures import class_probability_maps, comparison, confidence_maps, regression_bands

__all__ = [
    "class_probability_maps",
    "comparison",
    "confidence_maps",
    "predicted_observed",
    "regression_bands",
    "reliability_diagram",
]
