"""NUTS on the posteriors of posteriordb and on German credit, against reference draws; figures need matplotlib."""

from posterity_studies.posteriors.densities import density
from posterity_studies.posteriors.figures import draw
from posterity_studies.posteriors.joints import joint
from posterity_studies.posteriors.study import Comparison, Reference, Study, compared, posteriors, reference

__all__ = [
    "Comparison",
    "Reference",
    "Study",
    "compared",
    "density",
    "draw",
    "joint",
    "posteriors",
    "reference",
]
