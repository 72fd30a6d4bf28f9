"""Figures of posteriors and the HTML page of a comparison. Drawing needs matplotlib: pip install 'posterity[report]'.

Figures of a study are in its folder in `posterity_studies`.
"""

from posterity.report.chains import energy_plot, rank_plot, trace_plot
from posterity.report.figures import (
    class_probability_maps,
    comparison,
    confidence_maps,
    predicted_observed,
    regression_bands,
    reliability_diagram,
)

__all__ = [
    "class_probability_maps",
    "comparison",
    "confidence_maps",
    "energy_plot",
    "predicted_observed",
    "rank_plot",
    "regression_bands",
    "reliability_diagram",
    "trace_plot",
]
