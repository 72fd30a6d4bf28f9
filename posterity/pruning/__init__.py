"""Removal of dead units: `unit_uses` finds the layers that use a unit, `passages` the operations between them.

The penalties that kill units are in `penalties`.
"""

from posterity.pruning.pruning import Pruned, dead_units, pruned, unused_inputs

__all__ = ["Pruned", "dead_units", "pruned", "unused_inputs"]
