"""MAP and mean-field inference on images; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity_studies.images.figures import draw
from posterity_studies.images.protocol import DATA_SETS, NETWORKS, Settings
from posterity_studies.images.study import METRICS, Row, Study, check, images

__all__ = [
    "DATA_SETS",
    "METRICS",
    "NETWORKS",
    "Row",
    "Settings",
    "Study",
    "check",
    "draw",
    "images",
]
