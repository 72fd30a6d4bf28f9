"""Runs past one process: one fit whose batches processes share, and many fits on a Ray cluster.

Here, and nowhere else in the library, torch.distributed and ray are imported. The formulas of methods do not belong
here: they ask the active `Group` (`posterity/processes.py`) for sums over rows. What runs on a cluster is in
`inference`: its executors hand work over as parcels, and get results back.
"""

from posterity.processes import Group, LostProcess
from posterity.scale.group import join, processes
from posterity.scale.rows import gathered

__all__ = ["Group", "LostProcess", "gathered", "join", "processes"]
