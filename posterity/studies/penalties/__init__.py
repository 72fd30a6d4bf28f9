"""Penalties with Bayesian and usual layer factors; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity.studies.penalties.figures import draw
from posterity.studies.penalties.problem import Cell
from posterity.studies.penalties.protocol import DATA_SETS, NETWORKS, PENALTIES, SETUPS, Settings
from posterity.studies.penalties.study import Row, Study, penalties

__all__ = [
    "DATA_SETS",
    "NETWORKS",
    "PENALTIES",
    "SETUPS",
    "Cell",
    "Row",
    "Settings",
    "Study",
    "draw",
    "penalties",
]
