"""The standard UCI regression splits; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity_studies.uci.figures import draw
from posterity_studies.uci.protocol import Settings
from posterity_studies.uci.study import Study, check, uci
from posterity_studies.uci.summary import METRICS

__all__ = [
    "METRICS",
    "Settings",
    "Study",
    "check",
    "draw",
    "uci",
]
