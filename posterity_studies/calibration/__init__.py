"""Simulation-based calibration; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity_studies.calibration.calibrate import Calibration, calibrate
from posterity_studies.calibration.figures import draw
from posterity_studies.calibration.problem import Problem
from posterity_studies.calibration.study import Study, calibration, check

__all__ = [
    "Calibration",
    "Problem",
    "Study",
    "calibrate",
    "calibration",
    "check",
    "draw",
]
