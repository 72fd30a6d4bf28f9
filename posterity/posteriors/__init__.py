"""Posteriors: distributions over weights that draw network outputs, predict, and save themselves.

Distributions of targets are in `predictive`.
"""

from posterity.posteriors.calibrated import Calibrated, with_targets
from posterity.posteriors.dropout import Dropout, MaskMixture, enumerated
from posterity.posteriors.functions import Functions
from posterity.posteriors.gaussian import Gaussian, continued
from posterity.posteriors.linearized import Linearized
from posterity.posteriors.mixture import Mixture
from posterity.posteriors.point import Point
from posterity.posteriors.posterior import Posterior
from posterity.posteriors.propagated import Propagated
from posterity.posteriors.samples import Samples
from posterity.predictive.probit import default_integrator

__all__ = [
    "Calibrated",
    "Dropout",
    "Functions",
    "Gaussian",
    "Linearized",
    "MaskMixture",
    "Mixture",
    "Point",
    "Posterior",
    "Propagated",
    "Samples",
    "continued",
    "default_integrator",
    "enumerated",
    "with_targets",
]
