"""Penalties with Bayesian and usual layer factors; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity_studies.penalties.figures import draw
from posterity_studies.penalties.problem import Cell
from posterity_studies.penalties.protocol import DATA_SETS, NETWORKS, PENALTIES, SETUPS, Settings
from posterity_studies.penalties.study import Row, Study, penalties

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
