"""Figures and reports of posteriors. Drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity.report.figures import class_probability_maps, comparison, confidence_maps, regression_bands

__all__ = ["class_probability_maps", "comparison", "confidence_maps", "regression_bands"]
