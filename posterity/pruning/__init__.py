"""Smaller networks without dead units: `unit_uses` finds who sees a unit, `passages` what lies between, `pruning` cuts.

The penalties that kill units are in `penalties`.
"""

from posterity.pruning.pruning import Pruned, dead_units, pruned, unused_inputs

__all__ = ["Pruned", "dead_units", "pruned", "unused_inputs"]
