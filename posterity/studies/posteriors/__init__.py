"""NUTS on the posteriors of posteriordb and on German credit, against reference draws; figures need matplotlib."""

from posterity.studies.posteriors.densities import density
from posterity.studies.posteriors.figures import draw
from posterity.studies.posteriors.joints import joint
from posterity.studies.posteriors.study import Comparison, Reference, Study, compared, posteriors, reference

__all__ = ["Comparison", "Reference", "Study", "compared", "density", "draw", "joint", "posteriors", "reference"]
