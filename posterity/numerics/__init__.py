"""Numbers without statistics: random keys, flat layouts, workspaces, compiled and recorded pieces.

Densities, curvature matrices and optimisers do not belong here.
"""

from posterity.numerics.layout import Block, Layout
from posterity.numerics.random import Key

__all__ = ["Block", "Key", "Layout"]
