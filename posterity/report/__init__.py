"""Figures of predictions and chains, as `po.report.trace_plot(q).savefig("chains.png")`, and HTML pages of results.

`canvas` has what figures share, `files` writes them whole or not at all. Figures of studies are in `posterity_studies`.
Drawing needs matplotlib: pip install 'posterity[report]'.
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
