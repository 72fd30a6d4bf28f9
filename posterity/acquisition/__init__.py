"""Acquisition: which rows to label next, by the information of their targets on the function or on predictions.

Scores of predictions on rows with targets are in `metrics`, functions to maximise in `posteriors` (`q.functions`).
"""

from posterity.acquisition.acquisition import Chosen, bald, batch_bald, epig, variance_reduction
from posterity.acquisition.labels import batch_bald_of_probs, epig_of_probs

__all__ = ["Chosen", "bald", "batch_bald", "batch_bald_of_probs", "epig", "epig_of_probs", "variance_reduction"]
