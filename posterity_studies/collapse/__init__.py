"""Ever wider networks at eta = 1 and at the balanced temperature; drawing needs pip install 'posterity[report]'."""

from posterity_studies.collapse.figures import draw
from posterity_studies.collapse.study import Study, collapse

__all__ = [
    "Study",
    "collapse",
    "draw",
]
