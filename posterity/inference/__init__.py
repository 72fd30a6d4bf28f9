"""The one training loop, its trace, callbacks and checkpoints."""

from posterity.inference.callbacks import Callback, EarlyStopping, ProgressBar, Validation
from posterity.inference.checkpoint import Checkpoint
from posterity.inference.infer import infer
from posterity.inference.method import Info, Method, Target
from posterity.inference.plan import Plan, plan
from posterity.inference.run import Run
from posterity.inference.trace import Trace

__all__ = [
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "Info",
    "Method",
    "Plan",
    "ProgressBar",
    "Run",
    "Target",
    "Trace",
    "Validation",
    "infer",
    "plan",
]
