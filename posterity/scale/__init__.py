"""Runs over many processes and machines: one fit whose batches they share.

Here, and nowhere else in the library, torch.distributed is imported. The formulas of methods do not belong here: they
ask the active `Group` (`posterity/processes.py`) for sums over rows.
"""

from posterity.processes import Group, LostProcess
from posterity.scale.group import join, processes
from posterity.scale.rows import gathered

__all__ = ["Group", "LostProcess", "gathered", "join", "processes"]
