"""The settings of a fit, and the names of structures and estimators."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from posterity.errors import positive, positive_whole
from posterity.options import check, option, refused

STEPS = 2000
AUTO = "auto"  # the method chooses the batch size
DRAWS, CHAINS = 250, 4
RATE = 0.1  # of dropout
MAX_DEPTH = 8  # of NUTS: weights that are not identified lead to long trajectories
NOISE_WORDS = ("learn", "inputs")
RANK = 10  # of the covariance of low-rank

STRUCTURES: Mapping[str, str] = MappingProxyType(
    {
        "full": "Full",
        "corrected-kronecker": "CorrectedKronecker",
        "kronecker": "Kronecker",
        "block-diagonal": "BlockDiagonal",
        "diagonal": "Diagonal",
        "low-rank": "LowRank",
    }
)
"""Classes of `posterity.curvature` by word; those that keep most come first."""

ESTIMATORS: Mapping[str, tuple[str, Mapping[str, bool]]] = MappingProxyType(
    {
        "antithetic": ("WeightSampling", {"antithetic": True}),
        "weights": ("WeightSampling", {}),
        "local": ("LocalReparameterisation", {}),
        "flipout": ("Flipout", {}),
    }
)
"""Classes of `posterity.methods` with their settings, by word; the default is first."""


def _sizes(text: str) -> tuple[int, ...]:
    if text.strip().lower() in ("", "none"):
        return ()
    words = text.replace("-", ",").replace("x", ",").split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise refused(
            f"--hidden must be positive whole numbers with commas between them. Got '{text}'.",
            "--hidden 50,50 is two layers of 50 units, --hidden none a linear model.",
        )
    return tuple(int(word) for word in words)


def _rows(text: str) -> int | str | None:
    if text.strip().lower() in ("all", AUTO):
        return None if text.strip().lower() == "all" else AUTO
    if not text.strip().isdecimal() or int(text) < 1:
        raise refused(
            f"--batch-size must be a positive whole number of rows, all or auto. Got '{text}'.",
            "--batch-size all takes every row in each step.",
        )
    return int(text)


def _noise(text: str) -> float | str:
    word = text.strip().lower()
    if word in NOISE_WORDS:
        return word
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise refused(
            f"--noise must be a positive number, learn or inputs. Got '{text}'.",
            "--noise learn leaves the noise to the method, --noise inputs makes it an output of the network.",
        )
    return value


def _seed(name: str, value: int) -> None:
    if not 0 <= value < 2**63:
        raise refused(f"{name} must be a whole number from 0 to 2^63 - 1. Got {value}.", "any small number will do.")


def _rate(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise refused(f"{name} must be above 0 and below 1. Got {value:g}.", f"a usual rate is {RATE}.")


_NETWORK: dict[str, Any] = {"panel": "Network"}
_METHOD: dict[str, Any] = {"panel": "Method"}
_CHAINS: dict[str, Any] = {"panel": "Chains", "unit": "N", "check": positive_whole}


@dataclass(frozen=True)
class Settings:
    """The settings that determine a fit, besides its data and its method.

    None: chosen by the data or the method. Only one of `temperature` and `eta` may differ from 1.
    """

    hidden: tuple[int, ...] | None = option(
        None,
        help="Hidden layers, as 50,50, or none.",
        unit="SIZES",
        parse=_sizes,
        check=positive_whole,
        usual="50,50; 50 for sine and waves, none for line; for files none, or 50 where they predict better",
        **_NETWORK,
    )
    activation: str = option(
        "tanh", help="Between the layers:", unit="NAME", choices=("relu", "tanh", "sigmoid", "gelu", "silu"), **_NETWORK
    )
    steps: int | None = option(
        None,
        help="Steps of the optimiser.",
        unit="N",
        check=positive_whole,
        usual=f"found by the method: until it converges, or {STEPS}; for many rows more, to 20000 at most",
        **_METHOD,
    )
    batch_size: int | str | None = option(
        AUTO, help="Rows in a step, all, or auto: as suits the method.", unit="N", parse=_rows, **_METHOD
    )
    step_size: float | None = option(
        None,
        help="Largest step size of Adam; it falls to 0 along a cosine.",
        unit="X",
        check=positive,
        usual="found by the method",
        **_METHOD,
    )
    prior_scale: float | None = option(
        None,
        help="Standard deviation of the prior of every weight.",
        unit="S",
        check=positive,
        usual="one for each layer, chosen by the method",
        **_METHOD,
    )
    noise: float | str | None = option(
        None,
        help="Standard deviation of the noise in regression, in units of the target (or its logarithm); learn; or "
        "inputs: a second output of the network gives it for each row.",
        unit="S",
        parse=_noise,
        usual="learn, by the method; 0.5, the true one, for line",
        **_METHOD,
    )
    class_weight: str | None = option(
        None,
        help="balanced weighs rows so that all classes count alike in the fit; probabilities are then for classes of "
        "equal frequency. 'evaluate --costs' decides by costs without it. Words:",
        unit="NAME",
        choices=("balanced",),
        usual="all rows weigh the same",
        **_METHOD,
    )
    temperature: float = option(
        1.0, help="Cold posterior, (likelihood x prior)^(1/T).", unit="T", check=positive, **_METHOD
    )
    eta: float = option(1.0, help="Tempered posterior, likelihood^(1/E) x prior.", unit="E", check=positive, **_METHOD)
    seed: int = option(
        0,
        help="Fixes the starting weights, the order of rows, and a file's test rows.",
        unit="N",
        check=_seed,
        **_METHOD,
    )
    structure: str | None = option(
        None,
        help="What laplace, online-laplace and variational-em keep of the curvature:",
        unit="NAME",
        choices=tuple(STRUCTURES),
        usual="for laplace full up to 3000 weights; else kronecker",
        **_METHOD,
    )
    tune: bool = option(
        True,
        help="Whether laplace looks at leave-one-out predictions, for scales that were left out and for a warning.",
        **_METHOD,
    )
    estimator: str | None = option(
        None,
        help="How mean-field draws for its gradient: in mirrored pairs, one draw a step, noise in the layers for each "
        "row, or signs flipped by row. In this order:",
        unit="NAME",
        choices=tuple(ESTIMATORS),
        usual=next(iter(ESTIMATORS)),
        **_METHOD,
    )
    kl_weight: float | None = option(
        None,
        help="--eta for mean-field alone.",
        unit="E",
        check=positive,
        usual="1, the posterior itself; for classes training rows / (2 weights) if that is less, as 1 leaves most "
        "weights at the prior where they outnumber the rows",
        **_METHOD,
    )
    dropout: float | None = option(
        None, help="Rate behind each hidden layer, for dropout.", unit="P", check=_rate, usual=str(RATE), **_METHOD
    )
    draws: int | None = option(
        None, help="Draws of each chain that samplers over all rows keep.", usual=str(DRAWS), **_CHAINS
    )
    warmup: int | None = option(
        None, help="Transitions of these samplers before the draws.", usual=str(DRAWS), **_CHAINS
    )
    chains: int | None = option(None, help="Chains of these samplers.", usual=str(CHAINS), **_CHAINS)

    def __post_init__(self) -> None:
        tempered = [name for name in ("temperature", "eta") if getattr(self, name) != 1.0]
        if len(tempered) == 2:
            raise refused(
                "--temperature and --eta cannot be given together.",
                "--temperature T is (likelihood x prior)^(1/T), --eta E is likelihood^(1/E) x prior.",
            )
        if self.kl_weight is not None and tempered:
            raise refused(
                f"--kl-weight and --{tempered[0]} cannot be given together.",
                "--kl-weight E is --eta E for mean-field, the other methods staying as they are.",
            )
        check(self)
