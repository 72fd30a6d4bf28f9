"""Whether a posterior can be trusted: convergence of chains, collapse to the prior, temperatures of samplers.

Scores of predictions against targets are in `metrics`.
"""

from posterity.diagnostics.chains import (
    bulk_ess,
    e_bfmi,
    mcse_mean,
    mcse_median,
    mcse_quantile,
    mcse_sd,
    mean_ess,
    quantile_ess,
    rhat,
    sd_ess,
    tail_ess,
)
from posterity.diagnostics.collapse import Collapse, collapse
from posterity.diagnostics.convergence import Convergence, Quantity, convergence
from posterity.diagnostics.temperature import Temperature, configurational_temperature, kinetic_temperature

__all__ = [
    "Collapse",
    "Convergence",
    "Quantity",
    "Temperature",
    "bulk_ess",
    "collapse",
    "configurational_temperature",
    "convergence",
    "e_bfmi",
    "kinetic_temperature",
    "mcse_mean",
    "mcse_median",
    "mcse_quantile",
    "mcse_sd",
    "mean_ess",
    "quantile_ess",
    "rhat",
    "sd_ess",
    "tail_ess",
]
