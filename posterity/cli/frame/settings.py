"""What the numbers of a run depend on, as plain values."""

import math
from dataclasses import asdict, dataclass
from types import MappingProxyType

from posterity.cli.frame.options import ESTIMATORS, STRUCTURES
from posterity.cli.frame.output import UsageError
from posterity.cli.frame.sources import Source
from posterity.errors import positive, unknown
from posterity.storage.part import JSON

METHODS = MappingProxyType(
    {
        "map": ("map",),
        "laplace": ("map", "laplace"),
        "mean-field": ("map", "mean-field"),
        "conjugate": ("conjugate",),
        "dropout": ("dropout",),
        "ensemble": ("ensemble",),
        "natural-gradient": ("map", "natural-gradient"),
        "swag": ("map", "swag"),
        "sgld": ("map", "sgld"),
        "sghmc": ("map", "sghmc"),
        "nuts": ("nuts",),
        "hmc": ("hmc",),
    }
)
"""The stages of each method: every stage starts from the posterior of the one before it."""

HIDDEN = MappingProxyType({"line": "none", "sine": "50"})
"""Hidden layers of the data sets for which two layers of 50 are more than they ask for."""

FEWEST_STEPS = 2000
MOST_STEPS = 20_000

LABELS = MappingProxyType(
    {
        "map": "MAP",
        "laplace": "Laplace",
        "mean-field": "MeanField",
        "conjugate": "Conjugate",
        "dropout": "MC dropout",
        "ensemble": "Ensemble",
        "natural-gradient": "NaturalGradient",
        "swag": "SWAG",
        "sgld": "SGLD",
        "sghmc": "SGHMC",
        "nuts": "NUTS",
        "hmc": "HMC",
    }
)


@dataclass(frozen=True)
class Settings:
    """All options of a run, with defaults filled in; `noise` is None for classification and "learn" or a number else.

    Either of `temperature` and `eta` may differ from 1, not both. `kl_weight` is eta for mean-field alone; None is what
    suits the numbers of rows and weights.
    """

    data: str
    hidden: tuple[int, ...]
    activation: str
    steps: int
    batch_size: int | None
    step_size: float
    prior_scale: float
    noise: float | str | None
    temperature: float
    eta: float
    seed: int
    structure: str | None = None
    tune: bool = True
    estimator: str | None = None
    kl_weight: float | None = None
    dropout: float = 0.0
    draws: int | None = None
    warmup: int | None = None
    chains: int | None = None

    def config(self) -> dict[str, JSON]:
        """The settings as JSON."""
        return {**asdict(self), "hidden": list(self.hidden)}


def settings(
    source: Source,
    *,
    hidden: str | None,
    activation: str,
    steps: int | None,
    batch_size: str,
    step_size: float,
    prior_scale: float,
    noise: str | None,
    temperature: float | None,
    eta: float | None,
    seed: int,
    structure: str | None,
    tune: bool,
    estimator: str | None,
    kl_weight: float | None,
    dropout: float | None,
    draws: int | None,
    warmup: int | None,
    chains: int | None,
) -> Settings:
    """The settings from the words of the command line; `UsageError` or ValueError where one cannot be used."""
    data, is_file = source.data, source.path is not None
    classifies = data.task == "classification"
    if temperature is not None and eta is not None:
        raise UsageError(
            "--temperature and --eta cannot be given together.",
            "--temperature T is (likelihood x prior)^(1/T), --eta E is likelihood^(1/E) x prior.",
        )
    if kl_weight is not None and (temperature is not None or eta is not None):
        other = "--eta" if temperature is None else "--temperature"
        raise UsageError(
            f"--kl-weight and {other} cannot be given together.",
            "--kl-weight E is --eta E for mean-field, the other methods staying as they are.",
        )
    if noise is not None and classifies:
        raise UsageError(f"--noise is for regression, and {data.name} has classes.", "leave --noise out.")
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed must be a whole number from 0 to 2^63 - 1. Got {seed}.", "any small number will do.")
    if structure is not None and structure not in STRUCTURES:
        raise UsageError(unknown("structure", structure, STRUCTURES), f"the structures are {', '.join(STRUCTURES)}.")
    if estimator is not None and estimator not in ESTIMATORS:
        raise UsageError(unknown("estimator", estimator, ESTIMATORS), f"the estimators are {', '.join(ESTIMATORS)}.")
    for option, value in (
        ("--steps", 1 if steps is None else steps),
        ("--step-size", step_size),
        ("--prior-scale", prior_scale),
        ("--temperature", 1.0 if temperature is None else temperature),
        ("--eta", 1.0 if eta is None else eta),
        ("--kl-weight", 1.0 if kl_weight is None else kl_weight),
        ("--draws", 1 if draws is None else draws),
        ("--warmup", 1 if warmup is None else warmup),
        ("--chains", 1 if chains is None else chains),
    ):
        positive(option, value)
    if dropout is not None and not 0 < dropout < 1:
        raise UsageError(f"--dropout must be above 0 and below 1. Got {dropout:g}.", "a usual rate is 0.1.")
    linear = data.name == "line" and not is_file
    usual = "50" if is_file else HIDDEN.get(data.name, "50,50")
    return Settings(
        data=data.name,
        hidden=_sizes(usual if hidden is None else hidden),
        activation=activation,
        steps=_steps(len(data.train) if is_file else 0) if steps is None else steps,
        batch_size=_rows(batch_size),
        step_size=step_size,
        prior_scale=prior_scale,
        noise=None if classifies else _noise(("0.5" if linear else "learn") if noise is None else noise),
        temperature=1.0 if temperature is None else temperature,
        eta=1.0 if eta is None else eta,
        seed=seed,
        structure=structure,
        tune=tune,
        estimator=estimator,
        kl_weight=kl_weight,
        dropout=0.0 if dropout is None else dropout,
        draws=draws,
        warmup=warmup,
        chains=chains,
    )


def _steps(rows: int) -> int:
    """100 passes of 128 rows, within bounds: fewer leave large tables half learnt, more learn small ones by heart."""
    return min(max(FEWEST_STEPS, 100 * rows // 128), MOST_STEPS)


def method_name(text: str) -> str:
    """The method of this name; `UsageError` where there is none."""
    if text not in METHODS:
        raise UsageError(unknown("method", text, METHODS), f"the methods are {', '.join(METHODS)}.")
    return text


def method_names(text: str) -> tuple[str, ...]:
    """The methods in a comma-separated list, each once; `UsageError` at an unknown one."""
    names = tuple(dict.fromkeys(method_name(word.strip()) for word in text.split(",") if word.strip()))
    if not names:
        raise UsageError("No method was named.", f"the methods are {', '.join(METHODS)}.")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    if text.strip().lower() in ("", "none"):
        return ()
    words = text.replace("-", ",").replace("x", ",").split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(
            f"--hidden must be positive whole numbers with commas between them. Got '{text}'.",
            "--hidden 50,50 is two layers of 50 units, --hidden none a linear model.",
        )
    return tuple(int(word) for word in words)


def _rows(text: str) -> int | None:
    if text.strip().lower() == "all":
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(
            f"--batch-size must be a positive whole number of rows, or all. Got '{text}'.",
            "--batch-size all takes every row in each step.",
        )
    return int(text)


def _noise(text: str) -> float | str:
    if text.strip().lower() == "learn":
        return "learn"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(
            f"--noise must be a positive number, or learn. Got '{text}'.",
            "--noise learn fits the noise along with the weights.",
        )
    return value
