"""Dropout as inference, told from end to end; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity_studies.dropout.figures import draw
from posterity_studies.dropout.study import Study, dropout

__all__ = [
    "Study",
    "draw",
    "dropout",
]
