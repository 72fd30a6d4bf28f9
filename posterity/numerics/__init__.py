"""Numbers without statistics: keys, flat layouts, workspaces, compiled and recorded pieces.

No densities, no matrices of curvature, no optimisers.
"""

from posterity.numerics.layout import Block, Layout
from posterity.numerics.random import Key

__all__ = [
    "Block",
    "Key",
    "Layout",
]
