"""Seven methods on two moons, over several seeds; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity.studies.moons.figures import draw
from posterity.studies.moons.study import Study, moons

__all__ = ["Study", "draw", "moons"]
