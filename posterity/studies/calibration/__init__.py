"""Simulation-based calibration; drawing needs matplotlib: pip install 'posterity[report]'."""

from posterity.studies.calibration.calibrate import Calibration, calibrate
from posterity.studies.calibration.figures import draw
from posterity.studies.calibration.problem import Problem
from posterity.studies.calibration.study import Study, calibration, check

__all__ = ["Calibration", "Problem", "Study", "calibrate", "calibration", "check", "draw"]
