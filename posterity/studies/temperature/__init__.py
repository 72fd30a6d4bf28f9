"""The tempered ELBO against temperature and width; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity.studies.temperature.data import DATA_SETS
from posterity.studies.temperature.figures import draw
from posterity.studies.temperature.networks import ARCHITECTURES, Architecture
from posterity.studies.temperature.protocol import METHODS, Settings
from posterity.studies.temperature.study import METRICS, Row, Study, temperature

__all__ = [
    "ARCHITECTURES",
    "DATA_SETS",
    "METHODS",
    "METRICS",
    "Architecture",
    "Row",
    "Settings",
    "Study",
    "draw",
    "temperature",
]
