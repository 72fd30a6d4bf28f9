"""Bayesian logistic regression told from end to end; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity_studies.logistic.figures import draw
from posterity_studies.logistic.study import Study, logistic

__all__ = [
    "Study",
    "draw",
    "logistic",
]
