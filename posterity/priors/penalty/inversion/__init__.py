"""The inversion of r_nu(mu) = -Ent(beta_nu) - E log alpha(mu + X_nu): from a penalty to log alpha."""

from posterity.priors.penalty.inversion.expansion import Expansion
from posterity.priors.penalty.inversion.invert import invert, invert_expansions
from posterity.priors.penalty.inversion.kernel import DensityKernel, GaussianKernel, Kernel, MomentKernel

__all__ = ["DensityKernel", "Expansion", "GaussianKernel", "Kernel", "MomentKernel", "invert", "invert_expansions"]
