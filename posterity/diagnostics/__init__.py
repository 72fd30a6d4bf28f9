"""What a posterior has and has not learnt."""

from posterity.diagnostics.collapse import Collapse, collapse

__all__ = ["Collapse", "collapse"]
