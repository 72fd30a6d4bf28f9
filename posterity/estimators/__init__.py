"""Estimators for tables: scikit-learn's conventions around the library, and the automatic choice behind them."""

from posterity.estimators.automatic import Stacked, fit_automatic
from posterity.estimators.candidates import Warp
from posterity.estimators.densities import Calibration, Density, Pool, Scale, Shape
from posterity.estimators.gaussian_process import GaussianProcess

__all__ = ["Calibration", "Density", "GaussianProcess", "Pool", "Scale", "Shape", "Stacked", "Warp", "fit_automatic"]
