"""Smaller networks without dead units.

The penalties that kill units are in `penalties`.
"""

from posterity.pruning.pruning import Pruned, dead_units, pruned, unused_inputs

__all__ = [
    "Pruned",
    "dead_units",
    "pruned",
    "unused_inputs",
]
