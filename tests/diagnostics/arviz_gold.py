"""Writes arviz_gold.json: what ArviZ says of the arrays of chaincases.py. Needs ArviZ 0.23.

PYTHONPATH=tests python tests/diagnostics/arviz_gold.py
"""

import json
import logging
import warnings
from pathlib import Path

from chaincases import cases

FILE = Path(__file__).with_suffix(".json")


def diagnostics(arviz):
    """The functions of ArviZ 0.23 of an array (C, D), by our name of them."""
    return {
        "rhat": lambda draws: arviz.rhat(draws, method="rank"),
        "bulk_ess": lambda draws: arviz.ess(draws, method="bulk"),
        "tail_ess": lambda draws: arviz.ess(draws, method="tail"),
        "mean_ess": lambda draws: arviz.ess(draws, method="mean"),
        "sd_ess": lambda draws: arviz.ess(draws, method="sd"),
        "quantile_ess": lambda draws: arviz.ess(draws, method="quantile", prob=0.3),
        "mcse_mean": lambda draws: arviz.mcse(draws, method="mean"),
        "mcse_sd": lambda draws: arviz.mcse(draws, method="sd"),
        "mcse_median": lambda draws: arviz.mcse(draws, method="median"),
        "mcse_quantile": lambda draws: arviz.mcse(draws, method="quantile", prob=0.9),
        "e_bfmi": lambda draws: arviz.bfmi(draws).tolist(),
    }


def newer(stats):
    """Those of ArviZ 1 (`arviz_stats.base.array_stats`), which takes another size for the error of an sd."""
    axes = {"chain_axis": 0, "draw_axis": 1}
    return {
        "rhat": lambda draws: stats.rhat(draws, method="rank", **axes),
        "bulk_ess": lambda draws: stats.ess(draws, method="bulk", **axes),
        "tail_ess": lambda draws: stats.ess(draws, method="tail", prob=(0.05, 0.95), **axes),
        "mean_ess": lambda draws: stats.ess(draws, method="mean", **axes),
        "sd_ess": lambda draws: stats.ess(draws, method="sd", **axes),
        "quantile_ess": lambda draws: stats.ess(draws, method="quantile", prob=0.3, **axes),
        "mcse_mean": lambda draws: stats.mcse(draws, method="mean", **axes),
        "mcse_median": lambda draws: stats.mcse(draws, method="median", **axes),
        "mcse_quantile": lambda draws: stats.mcse(draws, method="quantile", prob=0.9, **axes),
        "e_bfmi": lambda draws: stats.bfmi(draws, **axes).tolist(),
    }


def computed(functions):
    """Every diagnostic of every array: {array: {diagnostic: number or list}}."""
    logging.getLogger("arviz").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # divisions by zero and the like are what is looked at
        return {
            name: {
                key: value if isinstance(value := function(draws), list) else float(value)
                for key, function in functions.items()
            }
            for name, draws in cases()
        }


if __name__ == "__main__":
    import arviz

    lines = [f" {json.dumps(name)}: {json.dumps(values)}" for name, values in computed(diagnostics(arviz)).items()]
    FILE.write_text("{\n" + f' "arviz": "{arviz.__version__}",\n' + ",\n".join(lines) + "\n}\n")
