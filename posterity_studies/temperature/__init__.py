"""The tempered ELBO against temperature and width; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity_studies.temperature.data import DATA_SETS
from posterity_studies.temperature.figures import draw
from posterity_studies.temperature.networks import ARCHITECTURES, Architecture
from posterity_studies.temperature.protocol import METHODS, Settings
from posterity_studies.temperature.study import METRICS, Row, Study, temperature

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
