"""The methods that are compared on the small problems: stages, each of which starts from the posterior before."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from posterity.curvature import Kronecker
from posterity.inference import Method
from posterity.methods import (
    HMC,
    MAMS,
    MAP,
    MCLMC,
    NUTS,
    SGHMC,
    SGLD,
    SWAG,
    ChEES,
    Ensemble,
    FullRank,
    Langevin,
    Laplace,
    LowRankGaussian,
    MCDropout,
    MeanField,
    NaturalGradient,
)
from posterity.methods.parts.subset import LastLayer
from posterity.model import Joint
from posterity.posteriors import Linearized, Posterior
from posterity.predictive import Predictive
from posterity_studies.fidelity.problems import Problem

MEMBERS, CHAINS, DRAWS = 10, 32, 1000


def _predicted(posterior: Posterior, inputs: Tensor) -> Predictive:
    return posterior.predict(inputs, draws=DRAWS)


def _drawn(posterior: Posterior, inputs: Tensor) -> Predictive:
    """Of draws of the weights through the network itself, not of the linearised one."""
    assert isinstance(posterior, Linearized)
    return posterior.gaussian.predict(inputs, draws=DRAWS)


@dataclass(frozen=True)
class Recipe:
    """A method: label, stages, what it predicts, the problem that it fits, and whether its weights have a density."""

    label: str
    stages: tuple[Method, ...]
    family: str
    dense: bool = False
    predict: Callable[[Posterior, Tensor], Predictive] = _predicted
    joint: Callable[[Problem], Joint] = lambda problem: problem.joint


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "map": Recipe("MAP", (MAP(),), "points"),
        "ensemble": Recipe(f"ensemble of {MEMBERS}", (Ensemble(MAP(), MEMBERS),), "points"),
        "dropout": Recipe("MC dropout", (MCDropout(),), "points", joint=Problem.dropping),
        "laplace-last-layer": Recipe("Laplace, last layer", (MAP(), Laplace(subset=LastLayer())), "Laplace", True),
        "laplace-kronecker": Recipe("Laplace, Kronecker", (MAP(), Laplace(structure=Kronecker())), "Laplace", True),
        "laplace-drawn": Recipe("Laplace, not linearised", (MAP(), Laplace()), "Laplace", True, _drawn),
        "laplace": Recipe("Laplace", (MAP(), Laplace()), "Laplace", True),
        "laplace-ensemble": Recipe(
            f"Laplace at {MEMBERS} modes", (Ensemble(MAP(), MEMBERS), Ensemble(Laplace(), MEMBERS)), "Laplace", True
        ),
        "mean-field": Recipe("MeanField", (MeanField(),), "variational", True),
        "full-rank": Recipe("FullRank", (FullRank(),), "variational", True),
        "low-rank": Recipe("LowRankGaussian", (LowRankGaussian(),), "variational", True),
        "natural-gradient": Recipe("NaturalGradient", (NaturalGradient(),), "variational", True),
        "swag": Recipe("SWAG", (MAP(), SWAG()), "SWAG", True),
        "multi-swag": Recipe("multi-SWAG of 5", (Ensemble(MAP(), 5), Ensemble(SWAG(), 5)), "SWAG", True),
        "sgld": Recipe("SGLD", (SGLD(),), "samplers"),
        "sghmc": Recipe("SGHMC", (SGHMC(),), "samplers"),
        "langevin": Recipe("Langevin", (MAP(), Langevin(draws=1000, warmup=1000, thin=2)), "samplers"),
        "hmc": Recipe("HMC", (HMC(draws=300, warmup=300, chains=4),), "samplers"),
        "mams": Recipe("MAMS", (MAMS(chains=CHAINS, warmup=100, draws=50),), "samplers"),
        "chees": Recipe("ChEES", (ChEES(chains=CHAINS, warmup=100, draws=50),), "samplers"),
        "mclmc": Recipe("MCLMC", (MCLMC(chains=CHAINS, warmup=100, draws=100),), "samplers"),
        "ensemble-mclmc": Recipe(
            "MCLMC from an ensemble", (Ensemble(MAP(), CHAINS), MCLMC(chains=CHAINS, warmup=40, draws=40)), "samplers"
        ),
    }
)
"""The methods by word; samplers among them have more chains and fewer transitions than NUTS."""


def ladder(length: int) -> Recipe:
    """NUTS with this many transitions of warm-up and as many draws of each of four chains."""
    return Recipe(f"NUTS, {length} + {length}", (NUTS(draws=length, warmup=length),), "NUTS")
