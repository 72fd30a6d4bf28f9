"""Seven methods on two moons, over several seeds; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity_studies.moons.figures import draw
from posterity_studies.moons.study import Study, moons

__all__ = [
    "Study",
    "draw",
    "moons",
]
