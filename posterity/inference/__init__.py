"""Inference: `infer` with its loop over steps, the protocol `Method`, traces, callbacks, checkpoints, plans, executors.

Folds for cross-validation are here too. Algorithms are in `methods`. Nothing else in the library loops over steps.
"""

from posterity.inference.callbacks import Callback, EarlyStopping, ProgressBar, Validation
from posterity.inference.checkpoint import Checkpoint
from posterity.inference.choose_tempering import ChosenTempering, choose_tempering
from posterity.inference.executor import Batched, Executor, Processes, Ray, Sequential
from posterity.inference.folds import Fold, folds
from posterity.inference.infer import infer
from posterity.inference.memory import Plan, plan
from posterity.inference.method import Footprint, Info, Method, Traits
from posterity.inference.run import Run, Trace
from posterity.inference.task import Outcome, Task

__all__ = [
    "Batched",
    "Callback",
    "Checkpoint",
    "ChosenTempering",
    "EarlyStopping",
    "Executor",
    "Fold",
    "Footprint",
    "Info",
    "Method",
    "Outcome",
    "Plan",
    "Processes",
    "ProgressBar",
    "Ray",
    "Run",
    "Sequential",
    "Task",
    "Trace",
    "Traits",
    "Validation",
    "choose_tempering",
    "folds",
    "infer",
    "plan",
]
