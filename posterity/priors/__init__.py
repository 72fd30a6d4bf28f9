"""Densities over network weights, and rules for their scales by layer.

Penalties are in `penalties`; fitting a prior scale to data is in `evidence`.
"""

from posterity.priors.correlated import Correlated
from posterity.priors.fan import EdgeOfChaos, FanIn, Glorot, He, ScaleRule
from posterity.priors.group_lasso import GroupLasso
from posterity.priors.heavy_tailed import Cauchy, Horseshoe, Logistic, ScaleMixture, StudentT
from posterity.priors.hierarchical import HalfCauchy, Hierarchical, LogNormal, ScalePrior
from posterity.priors.independent import Independent
from posterity.priors.laplace import Laplace
from posterity.priors.layerwise import Layerwise, around
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior
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
    "Independent",
    "Laplace",
    "Layerwise",
    "LogNormal",
    "Logistic",
    "Normal",
    "Prior",
    "ScaleMixture",
    "ScalePrior",
    "ScaleRule",
    "StudentT",
    "Tabulated",
    "around",
]
