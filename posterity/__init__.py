"""Approximate Bayesian inference for neural networks in PyTorch.

`Joint` states a problem, a method from `methods` and `infer` give its posterior, and `predict` gives a predictive
distribution. The other packages hold what these are made of.

>>> import posterity as po
>>> joint = po.Joint(po.networks.MLP([1, 10, 1]), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=100)
>>> joint.num_data
100
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posterity import (
        acquisition,
        curvature,
        datasets,
        diagnostics,
        errors,
        estimators,
        evidence,
        inference,
        integrations,
        kernels,
        likelihoods,
        methods,
        metrics,
        mixtures,
        model,
        networks,
        optim,
        penalties,
        posteriors,
        precisions,
        predictive,
        priors,
        pruning,
        report,
        scale,
        theory,
    )
    from posterity.inference import Checkpoint, EarlyStopping, plan
    from posterity.inference.infer import infer
    from posterity.model import Density, Joint, Network, Tempering, as_data
    from posterity.numerics import Key
    from posterity.posteriors import continued
    from posterity.posteriors.load import load
    from posterity.posteriors.pretrained import from_pretrained
    from posterity.recipes.laplace import laplace

__version__ = "0.2.0"

# Everything is loaded at first use, so that the command line answers --help without importing torch.
_MODULES = {
    "Checkpoint": "inference",
    "Density": "model",
    "EarlyStopping": "inference",
    "Joint": "model",
    "Network": "model",
    "Key": "numerics",
    "Tempering": "model",
    "as_data": "model",
    "continued": "posteriors",
    "from_pretrained": "posteriors.pretrained",
    "infer": "inference",
    "laplace": "recipes.laplace",
    "load": "posteriors.load",
    "plan": "inference",
}

__all__ = [
    "Checkpoint",
    "Density",
    "EarlyStopping",
    "Joint",
    "Key",
    "Network",
    "Tempering",
    "acquisition",
    "as_data",
    "continued",
    "curvature",
    "datasets",
    "diagnostics",
    "errors",
    "estimators",
    "evidence",
    "from_pretrained",
    "infer",
    "inference",
    "integrations",
    "kernels",
    "laplace",
    "likelihoods",
    "load",
    "methods",
    "metrics",
    "mixtures",
    "model",
    "networks",
    "optim",
    "penalties",
    "plan",
    "posteriors",
    "precisions",
    "predictive",
    "priors",
    "pruning",
    "report",
    "scale",
    "theory",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"posterity.{_MODULES[name]}"), name)
    if name in __all__:
        return import_module(f"posterity.{name}")
    near = get_close_matches(name, __all__, n=1)
    raise AttributeError(
        f"module 'posterity' has no attribute '{name}'." + (f" Did you mean '{near[0]}'?" if near else "")
    )


def __dir__() -> list[str]:
    return sorted(__all__)
