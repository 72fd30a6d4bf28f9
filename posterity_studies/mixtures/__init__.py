"""EM, from two clusters to the prior of a network; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity_studies.mixtures.figures import draw
from posterity_studies.mixtures.study import Study, mixtures

__all__ = [
    "Study",
    "draw",
    "mixtures",
]
