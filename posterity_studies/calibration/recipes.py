"""The methods of the study by name, with settings for its models."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from posterity.inference import Method
from posterity.methods import HMC, MALA, MAP, NUTS, SGLD, Langevin, Laplace, MeanField, Metropolis
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine

# Between kept draws, so that these are nearly independent: networks have long ways between modes.
THIN = {"linear": 1, "logistic": 1, "network": 4}
# Of Langevin dynamics without a rule of acceptance: large enough that its bias is seen, and not yet divergent.
LARGE = {"linear": 0.01, "logistic": 0.3, "network": 0.02}


def _nuts(model: str) -> tuple[Method, ...]:
    return (NUTS(warmup=300, thin=4, max_depth=6),)


def _hmc(model: str) -> tuple[Method, ...]:
    return (HMC(warmup=300, thin=4 * THIN[model], steps=8),)


def _mala(model: str) -> tuple[Method, ...]:
    return (MALA(warmup=500, thin=25 * THIN[model]),)


def _metropolis(model: str) -> tuple[Method, ...]:
    return (Metropolis(warmup=500, thin=60 * THIN[model]),)


def _langevin(model: str) -> tuple[Method, ...]:
    return (Langevin(warmup=500, thin=25 * THIN[model], step_size=LARGE[model]),)


def _sgld(model: str) -> tuple[Method, ...]:
    return (SGLD(warmup=500, thin=25 * THIN[model], step_size=LARGE[model], batch_size=5),)


def _mean_field(model: str) -> tuple[Method, ...]:
    return (MeanField(2000, None, Adam(0.02), Cosine()),)


def _laplace(model: str) -> tuple[Method, ...]:
    return MAP(2000, None, Adam(0.02), Cosine()), Laplace(tuning=None)


RECIPES: Mapping[str, Callable[[str], tuple[Method, ...]]] = MappingProxyType(
    {
        "nuts": _nuts,
        "hmc": _hmc,
        "mala": _mala,
        "metropolis": _metropolis,
        "langevin": _langevin,
        "sgld": _sgld,
        "mean-field": _mean_field,
        "laplace": _laplace,
    }
)
