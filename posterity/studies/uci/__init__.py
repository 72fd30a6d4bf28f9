"""The standard UCI regression splits; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity.studies.uci.figures import draw
from posterity.studies.uci.protocol import Settings
from posterity.studies.uci.study import Study, check, uci
from posterity.studies.uci.summary import METRICS

__all__ = ["METRICS", "Settings", "Study", "check", "draw", "uci"]
