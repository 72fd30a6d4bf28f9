"""EM, from two clusters to the prior of a network; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity.studies.mixtures.figures import draw
from posterity.studies.mixtures.study import Study, mixtures

__all__ = ["Study", "draw", "mixtures"]
