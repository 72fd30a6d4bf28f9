"""Inference methods, one file an algorithm.

Shared machinery is in `parts`; the loop that runs the methods is in `inference`.
"""

from posterity.methods.chees import ChEES
from posterity.methods.conjugate import Conjugate
from posterity.methods.coordinate_ascent import CoordinateAscent
from posterity.methods.dropout import MCDropout
from posterity.methods.ensemble import Ensemble
from posterity.methods.expectation_maximization import ExpectationMaximization
from posterity.methods.expectation_propagation import ExpectationPropagation
from posterity.methods.full_rank import FullRank
from posterity.methods.hmc import HMC
from posterity.methods.langevin import Langevin
from posterity.methods.laplace import Laplace
from posterity.methods.low_rank_gaussian import LowRankGaussian
from posterity.methods.mala import MALA
from posterity.methods.mams import MAMS
from posterity.methods.maximum_a_posteriori import MAP
from posterity.methods.mclmc import MCLMC
from posterity.methods.mean_field import MeanField
from posterity.methods.metropolis import Metropolis
from posterity.methods.natural_gradient import NaturalGradient
from posterity.methods.nuts import NUTS
from posterity.methods.online_laplace import OnlineLaplace
from posterity.methods.parts.fisher import Fisher
from posterity.methods.parts.gradients import (
    Flipout,
    LocalReparameterisation,
    PairedSampling,
    ScoreFunction,
    SecondOrder,
    StickTheLanding,
    WeightSampling,
)
from posterity.methods.parts.mode_search import AtMode
from posterity.methods.parts.preconditioners import Plain, Preconditioner, RMSprop
from posterity.methods.parts.subset import AllWeights, KnownCurvature, LargestVariance, LastLayer, Matching, Subset
from posterity.methods.probabilistic_backpropagation import ProbabilisticBackpropagation
from posterity.methods.sghmc import SGHMC
from posterity.methods.sgld import SGLD
from posterity.methods.swag import SWAG
from posterity.methods.variational_em import VariationalEM

__all__ = [
    "HMC",
    "MALA",
    "MAMS",
    "MAP",
    "MCLMC",
    "NUTS",
    "SGHMC",
    "SGLD",
    "SWAG",
    "AllWeights",
    "AtMode",
    "ChEES",
    "Conjugate",
    "CoordinateAscent",
    "Ensemble",
    "ExpectationMaximization",
    "ExpectationPropagation",
    "Fisher",
    "Flipout",
    "FullRank",
    "KnownCurvature",
    "Langevin",
    "Laplace",
    "LargestVariance",
    "LastLayer",
    "LocalReparameterisation",
    "LowRankGaussian",
    "MCDropout",
    "Matching",
    "MeanField",
    "Metropolis",
    "NaturalGradient",
    "OnlineLaplace",
    "PairedSampling",
    "Plain",
    "Preconditioner",
    "ProbabilisticBackpropagation",
    "RMSprop",
    "ScoreFunction",
    "SecondOrder",
    "StickTheLanding",
    "Subset",
    "VariationalEM",
    "WeightSampling",
]
