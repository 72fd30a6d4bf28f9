"""Densities over network weights."""

from posterity.priors import penalty
from posterity.priors.cauchy import Cauchy
from posterity.priors.correlated import Correlated
from posterity.priors.edge_of_chaos import EdgeOfChaos
from posterity.priors.fan import FanIn, Glorot, He, ScaleRule
from posterity.priors.group_lasso import GroupLasso
from posterity.priors.hierarchical import Hierarchical
from posterity.priors.horseshoe import Horseshoe
from posterity.priors.laplace import Laplace
from posterity.priors.layerwise import Layerwise
from posterity.priors.logistic import Logistic
from posterity.priors.normal import Normal
from posterity.priors.pretrained import around
from posterity.priors.prior import Prior
from posterity.priors.scale_mixture import ScaleMixture
from posterity.priors.scale_prior import HalfCauchy, LogNormal, ScalePrior
from posterity.priors.signal_propagation import Signals, signal_propagation
from posterity.priors.student_t import StudentT
from posterity.priors.tabulated import Tabulated

__all__ = [
    "Cauchy",
    "Correlated",
    "EdgeOfChaos",
    "FanIn",
    "Glorot",
    "GroupLasso",
    "HalfCauchy",
    "He",
    "Hierarchical",
    "Horseshoe",
    "Laplace",
    "Layerwise",
    "LogNormal",
    "Logistic",
    "Normal",
    "Prior",
    "ScaleMixture",
    "ScalePrior",
    "ScaleRule",
    "Signals",
    "StudentT",
    "Tabulated",
    "around",
    "penalty",
    "signal_propagation",
]
