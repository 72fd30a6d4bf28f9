"""Prior and noise by variational EM, against the best of a grid; drawing needs matplotlib: 'posterity[report]'."""

from posterity_studies.hyperparameters.figures import draw
from posterity_studies.hyperparameters.recipes import DATA_SETS, STEPS, default_settings
from posterity_studies.hyperparameters.study import Study, check, hyperparameters
from posterity_studies.uci import Settings

__all__ = [
    "DATA_SETS",
    "STEPS",
    "Settings",
    "Study",
    "check",
    "default_settings",
    "draw",
    "hyperparameters",
]
