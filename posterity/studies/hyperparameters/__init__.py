"""Prior and noise by variational EM, against the best of a grid; drawing needs matplotlib: 'posterity[report]'."""

from posterity.studies.hyperparameters.figures import draw
from posterity.studies.hyperparameters.recipes import BATCH_SIZE, DATA_SETS, STEPS
from posterity.studies.hyperparameters.study import Study, check, hyperparameters
from posterity.studies.uci import Settings

__all__ = ["BATCH_SIZE", "DATA_SETS", "STEPS", "Settings", "Study", "check", "draw", "hyperparameters"]
