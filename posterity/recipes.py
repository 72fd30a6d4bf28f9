"""Methods by their words, one row each, and the settings that they are made of.

The command line takes its options and words from here. Nothing here imports torch before a method is made.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from posterity.errors import positive, positive_whole
from posterity.options import check, option, refused

if TYPE_CHECKING:
    from posterity.curvature import Structure
    from posterity.inference import Method
    from posterity.methods.parts.gradients import Estimator
    from posterity.model import Joint

STEPS = 2000
DRAWS, CHAINS = 250, 4
RATE = 0.1  # of dropout
MAX_DEPTH = 8  # of the trees of NUTS: weights that are not identified make for long trajectories
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


def structure(word: str) -> "Structure":
    """The structure of the curvature that this word names."""
    made: Structure = getattr(import_module("posterity.curvature"), STRUCTURES[word])()
    return made


def estimator(word: str) -> "Estimator":
    """The estimator of gradients that this word names."""
    name, settings = ESTIMATORS[word]
    made: Estimator = _class(name)(**settings)
    return made


def _method(name: str, **settings: Any) -> "Method":
    made: Method = _class(name)(**settings)
    return made


def _class(name: str) -> Any:
    """The class of this name in `posterity.methods`, which brings torch."""
    return getattr(import_module("posterity.methods"), name)


def _sizes(text: str) -> tuple[int, ...]:
    if text.strip().lower() in ("", "none"):
        return ()
    words = text.replace("-", ",").replace("x", ",").split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise refused(
            f"--hidden must be positive whole numbers with commas between them. Got '{text}'.",
            "--hidden 50,50 is two layers of 50 units, --hidden none a linear model.",
        )
    return tuple(int(word) for word in words)


def _rows(text: str) -> int | None:
    if text.strip().lower() == "all":
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise refused(
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
        raise refused(
            f"--noise must be a positive number, or learn. Got '{text}'.",
            "--noise learn fits the noise along with the weights.",
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
    """What the numbers of a fit depend on beside its data and its method.

    None stands for what suits the data or the method. Either of `temperature` and `eta` may differ from 1, not both.
    """

    hidden: tuple[int, ...] | None = option(
        None,
        help="Hidden layers, as 50,50, or none.",
        unit="SIZES",
        parse=_sizes,
        check=positive_whole,
        usual="50,50; 50 for sine and files, none for line",
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
        usual=f"{STEPS}; for large files more, to 20000 at most",
        **_METHOD,
    )
    batch_size: int | None = option(128, help="Rows in a step, or all.", unit="N", parse=_rows, **_METHOD)
    step_size: float = option(
        0.01, help="First step size of Adam; it falls to 0 along a cosine.", unit="X", check=positive, **_METHOD
    )
    prior_scale: float = option(
        1.0,
        help="Standard deviation of the prior of every weight; where laplace starts to look for a better one.",
        unit="S",
        check=positive,
        **_METHOD,
    )
    noise: float | str | None = option(
        None,
        help="Standard deviation of the noise in regression, in units of the target, or learn.",
        unit="S",
        parse=_noise,
        usual="learn; 0.5, the true one, for line",
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
        help="Whether laplace moves the prior scale, and a noise to be learnt, to the largest evidence.",
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


Factory: TypeAlias = "Callable[[Settings, Joint], Method]"


@dataclass(frozen=True)
class Recipe:
    """A method by its word.

    - `label`: its name as people write it.
    - `make`: makes the method of these settings for this problem.
    - `after`: the words of the stages that run before it; each starts from the posterior of the one before.
    - `options`: settings that only methods which list them take.
    """

    word: str
    label: str
    make: Factory
    after: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[str, ...]:
        """The words of all stages, its own last."""
        return (*self.after, self.word)

    @property
    def samples_all_rows(self) -> bool:
        """Whether it is a Markov chain whose every transition sees all rows."""
        return "draws" in self.options


def _steps(settings: Settings) -> dict[str, Any]:
    """Steps by Adam, which comes to rest only if its step size does."""
    from posterity.optim import Adam, Cosine

    return {
        "steps": settings.steps or STEPS,
        "batch_size": settings.batch_size,
        "optimizer": Adam(step_size=settings.step_size),
        "schedule": Cosine(),
    }


def _counts(settings: Settings) -> dict[str, int]:
    """Draws, warm-up and chains of a sampler over all rows."""
    return {"draws": settings.draws or DRAWS, "warmup": settings.warmup or DRAWS, "chains": settings.chains or CHAINS}


def _fit(name: str) -> Factory:
    """A method that Adam fits, by the name of its class."""
    return lambda settings, joint: _method(name, **_steps(settings))


def _ensemble(settings: Settings, joint: "Joint") -> "Method":
    return _method("Ensemble", method=_fit("MAP")(settings, joint))


def _sampler(name: str, **own: Any) -> Factory:
    """A sampler over all rows, by the name of its class; `own` are settings beside its counts."""
    return lambda settings, joint: _method(name, **_counts(settings), **own)


def _laplace(settings: Settings, joint: "Joint") -> "Method":
    from posterity.evidence import Evidence

    kept = None if settings.structure is None else structure(settings.structure)
    tuning = Evidence(noise=_learns_noise(settings)) if settings.tune else None
    return _method("Laplace", structure=kept, tuning=tuning)


def _online_laplace(settings: Settings, joint: "Joint") -> "Method":
    from posterity.evidence import Evidence, PerLayer

    tuning = Evidence(PerLayer(), noise=_learns_noise(settings))
    return _method("OnlineLaplace", fit=_fit("MAP")(settings, joint), laplace=_untuned(settings), tuning=tuning)


def _variational_em(settings: Settings, joint: "Joint") -> "Method":
    """A mode that moves on between the rounds, and one of MacKay's steps in each."""
    from posterity.evidence import MacKayUpdate, PerLayer

    update = MacKayUpdate(PerLayer(), noise=_learns_noise(settings))
    fit = _fit("MAP")(settings, joint)
    return _method("VariationalEM", expectation=_untuned(settings), maximisation=(update,), tolerance=None, fit=fit)


def _untuned(settings: Settings) -> "Method":
    """The Laplace approximation of methods that make many, and tune hyper-parameters themselves."""
    return _method("Laplace", structure=structure(settings.structure or "kronecker"), tuning=None)


def _learns_noise(settings: Settings) -> bool:
    """A noise that was given is known; only one that is to be learnt is tuned."""
    return settings.noise == "learn"


def _mean_field(settings: Settings, joint: "Joint") -> "Method":
    word = settings.estimator or next(iter(ESTIMATORS))
    return _method("MeanField", **_steps(settings), estimator=estimator(word))


def _low_rank(settings: Settings, joint: "Joint") -> "Method":
    return _method("LowRankGaussian", rank=min(RANK, joint.num_weights), **_steps(settings))


def _full_rank(settings: Settings, joint: "Joint") -> "Method":
    """A weight depends on a whole row of the factor, so that its entries move by less where weights are many."""
    size = min(0.3, 2 / joint.num_weights) * settings.step_size
    return _method("FullRank", **_steps(replace(settings, step_size=size)))


def _natural_gradient(settings: Settings, joint: "Joint") -> "Method":
    """Steps of ten times the size with a tenth for radius: as with Adam, a mean moves by the step size at most."""
    return _method("NaturalGradient", **_steps(settings), step_size=10 * settings.step_size, radius=0.1)


def _swag(settings: Settings, joint: "Joint") -> "Method":
    from posterity.optim import SGD

    steps = settings.steps or STEPS
    every = max(1, steps // 100)
    fit = _method("MAP", steps=steps, batch_size=settings.batch_size, optimizer=SGD(settings.step_size))
    return _method("SWAG", fit=fit, every=every, rank=min(20, steps // every))


def _minibatch_sampler(name: str, factor: float) -> Factory:
    """A sampler on mini-batches, whose steps are smaller than Adam's by a factor.

    Half of the steps are warm-up, the others give about 100 draws a chain.
    """

    def make(settings: Settings, joint: "Joint") -> "Method":
        steps = settings.steps or STEPS
        later = max(1, steps // 2)
        thin = max(1, later // 100)
        draws = later // thin
        return _method(
            name,
            draws=draws,
            warmup=max(1, steps - draws * thin),
            step_size=_step_size(name, factor * settings.step_size, joint),
            batch_size=settings.batch_size,
            thin=thin,
            preconditioner=_class("RMSprop")(),  # curvatures differ too much for one step size where noise is learnt
        )

    return make


def _langevin(settings: Settings, joint: "Joint") -> "Method":
    """Nothing adapts its steps, so that they are small, and begin at a mode."""
    size = _step_size("SGLD", 0.1 * settings.step_size, joint)
    return _method("Langevin", **_counts(settings), step_size=size)


def _step_size(name: str, rate: float, joint: "Joint") -> float:
    """The step size of a sampler that amounts to this learning rate."""
    return float(_class(name).step_size_for(rate, joint))


_CHAIN = ("draws", "warmup", "chains")
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.word: recipe
        for recipe in (
            Recipe("map", "MAP", _fit("MAP")),
            Recipe("laplace", "Laplace", _laplace, ("map",), ("structure",)),
            Recipe("online-laplace", "OnlineLaplace", _online_laplace, (), ("structure",)),
            Recipe("variational-em", "VariationalEM", _variational_em, (), ("structure",)),
            Recipe("mean-field", "MeanField", _mean_field, ("map",), ("estimator", "kl_weight")),
            Recipe("low-rank", "LowRankGaussian", _low_rank, ("map",)),
            Recipe("full-rank", "FullRank", _full_rank, ("map",)),
            Recipe("natural-gradient", "NaturalGradient", _natural_gradient, ("map",)),
            Recipe("conjugate", "Conjugate", lambda settings, joint: _method("Conjugate")),
            Recipe("dropout", "MC dropout", _fit("MCDropout"), (), ("dropout",)),
            Recipe("ensemble", "Ensemble", _ensemble),
            Recipe("swag", "SWAG", _swag, ("map",)),
            Recipe("sgld", "SGLD", _minibatch_sampler("SGLD", 0.1), ("map",)),
            Recipe("sghmc", "SGHMC", _minibatch_sampler("SGHMC", 0.03), ("map",)),
            Recipe("nuts", "NUTS", _sampler("NUTS", max_depth=MAX_DEPTH), (), _CHAIN),
            Recipe("hmc", "HMC", _sampler("HMC"), (), _CHAIN),
            Recipe("mala", "MALA", _sampler("MALA"), (), _CHAIN),
            Recipe("metropolis", "Metropolis", _sampler("Metropolis"), (), _CHAIN),
            Recipe("langevin", "Langevin", _langevin, ("map",), _CHAIN),
        )
    }
)
"""Every method that infers the weights of a network from a `Joint`, by word.

`ExpectationMaximization`, with `CoordinateAscent` as its E-step, has no word: it is about latent variables of a
`Density`, as in mixtures, which a network does not have.
"""


def owners(name: str) -> tuple[str, ...]:
    """The words of the methods that take this setting; empty where all do."""
    return tuple(recipe.word for recipe in RECIPES.values() if name in recipe.options)
