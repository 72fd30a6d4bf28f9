"""Approximate Bayesian inference for neural networks in PyTorch.

>>> import posterity as po
>>> sorted(name for name in dir(po) if name in ("Joint", "Density", "infer", "load"))
['Density', 'Joint', 'infer', 'load']
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posterity.inference import Checkpoint, EarlyStopping, infer, plan
    from posterity.model import Density, Joint, Tempering, as_data
    from posterity.numerics import Key
    from posterity.posteriors import continued
    from posterity.posteriors.load import load

__version__ = "0.1.0"

# What lives where. Loaded at first use, so that the command line answers --help without importing torch.
_NAMES = {
    "Checkpoint": "inference",
    "Density": "model",
    "EarlyStopping": "inference",
    "Joint": "model",
    "Key": "numerics",
    "Tempering": "model",
    "as_data": "model",
    "continued": "posteriors",
    "infer": "inference",
    "load": "posteriors.load",
    "plan": "inference",
}
_PACKAGES = (
    "curvature",
    "datasets",
    "diagnostics",
    "evidence",
    "inference",
    "jacobians",
    "kernels",
    "likelihoods",
    "methods",
    "metrics",
    "mixtures",
    "model",
    "networks",
    "numerics",
    "optim",
    "penalties",
    "posteriors",
    "precisions",
    "predictive",
    "priors",
    "pruning",
    "report",
    "special",
    "storage",
    "theory",
)

__all__ = [
    "Checkpoint",
    "Density",
    "EarlyStopping",
    "Joint",
    "Key",
    "Tempering",
    "as_data",
    "continued",
    "curvature",
    "datasets",
    "diagnostics",
    "evidence",
    "infer",
    "inference",
    "jacobians",
    "kernels",
    "likelihoods",
    "load",
    "methods",
    "metrics",
    "mixtures",
    "model",
    "networks",
    "numerics",
    "optim",
    "penalties",
    "plan",
    "posteriors",
    "precisions",
    "predictive",
    "priors",
    "pruning",
    "report",
    "special",
    "storage",
    "theory",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"posterity.{name}")
    if name in _NAMES:
        return getattr(import_module(f"posterity.{_NAMES[name]}"), name)
    near = get_close_matches(name, __all__, n=1)
    raise AttributeError(
        f"module 'posterity' has no attribute '{name}'." + (f" Did you mean '{near[0]}'?" if near else "")
    )


def __dir__() -> list[str]:
    return sorted(__all__)
