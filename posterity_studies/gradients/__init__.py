"""Variances of gradient estimators; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity_studies.gradients.figures import draw
from posterity_studies.gradients.study import Study, gradients

__all__ = [
    "Study",
    "draw",
    "gradients",
]
