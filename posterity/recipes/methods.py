"""The table of methods by name: label, stages, factory and options of each.

torch is imported when a method is made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from posterity.recipes.settings import AUTO, CHAINS, DRAWS, ESTIMATORS, MAX_DEPTH, RANK, STEPS, STRUCTURES, Settings

if TYPE_CHECKING:
    from posterity.curvature import Structure
    from posterity.inference import Method
    from posterity.methods.parts.gradients import Estimator
    from posterity.model import Joint

Factory: TypeAlias = "Callable[[Settings, Joint], Method]"


def structure(word: str) -> "Structure":
    """Return the curvature structure of this name."""
    made: Structure = getattr(import_module("posterity.curvature"), STRUCTURES[word])()
    return made


def estimator(word: str) -> "Estimator":
    """Return the gradient estimator of this name."""
    name, settings = ESTIMATORS[word]
    made: Estimator = _class(name)(**settings)
    return made


def _method(name: str, **settings: Any) -> "Method":
    made: Method = _class(name)(**settings)
    return made


def _class(name: str) -> Any:
    """Return the class of this name in `posterity.methods`; imports torch."""
    return getattr(import_module("posterity.methods"), name)


@dataclass(frozen=True)
class Recipe:
    """A method with its name `word` at the command line.

    - `label`: its name in tables and sentences.
    - `make`: a function (settings, joint) that makes the method.
    - `after`: the stages before it, by name; each stage starts from the posterior of the previous one.
    - `options`: settings that only the methods which list them read.
    """

    word: str
    label: str
    make: Factory
    after: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of all stages, its own last."""
        return (*self.after, self.word)

    @property
    def samples_all_rows(self) -> bool:
        """Whether it is a Markov chain whose transitions use all rows."""
        return "draws" in self.options


BATCH_SIZE, STEP_SIZE = 128, 0.01


def _size(settings: Settings) -> float:
    """Return the given step size, or the default."""
    return settings.step_size or STEP_SIZE


def _steps(settings: Settings) -> dict[str, Any]:
    """Return the given settings of optimisation; a given step size is one of Adam, and falls to 0 along a cosine."""
    from posterity.optim import Adam, Cosine

    given: dict[str, Any] = {} if settings.batch_size == AUTO else {"batch_size": settings.batch_size}
    if settings.steps is not None:
        given["steps"] = settings.steps
    if settings.step_size is not None:
        given |= {"optimizer": Adam(step_size=settings.step_size), "schedule": Cosine()}
    return given


def _counts(settings: Settings) -> dict[str, int]:
    """Return draws, warm-up and chains of a sampler over all rows."""
    return {"draws": settings.draws or DRAWS, "warmup": settings.warmup or DRAWS, "chains": settings.chains or CHAINS}


def _fit(name: str) -> Factory:
    """Return the factory of a method that Adam fits, by the name of its class."""
    return lambda settings, joint: _method(name, **_steps(settings))


def _ensemble(settings: Settings, joint: "Joint") -> "Method":
    return _method("Ensemble", method=_fit("MAP")(settings, joint))


def _sampler(name: str, **own: Any) -> Factory:
    """Return the factory of a sampler over all rows, by the name of its class; `own` are further settings."""
    return lambda settings, joint: _method(name, **_counts(settings), **own)


def _laplace(settings: Settings, joint: "Joint") -> "Method":
    kept = None if settings.structure is None else structure(settings.structure)
    return _method("Laplace", structure=kept, **({} if settings.tune else {"tuning": None}))


def _online_laplace(settings: Settings, joint: "Joint") -> "Method":
    return _method("OnlineLaplace", fit=_fit("MAP")(settings, joint), laplace=_untuned(settings))


def _variational_em(settings: Settings, joint: "Joint") -> "Method":
    """Return variational EM whose mode is fitted further in each round, followed by a step of MacKay's update."""
    from posterity.evidence import MacKayUpdate, PerLayer
    from posterity.evidence.marginal import LeftOut, left_out

    update = MacKayUpdate(LeftOut.of(joint, PerLayer()), noise=left_out(joint)[1])
    fit = _fit("MAP")(settings, joint)
    return _method("VariationalEM", expectation=_untuned(settings), maximisation=(update,), tolerance=None, fit=fit)


def _untuned(settings: Settings) -> "Method":
    """Return the Laplace approximation for methods that make many, and tune hyper-parameters themselves."""
    return _method("Laplace", structure=structure(settings.structure or "kronecker"), tuning=None)


def _mean_field(settings: Settings, joint: "Joint") -> "Method":
    own = {} if settings.estimator is None else {"estimator": estimator(settings.estimator)}
    return _method("MeanField", **_steps(settings), **own)


def _low_rank(settings: Settings, joint: "Joint") -> "Method":
    return _method("LowRankGaussian", rank=min(RANK, joint.num_weights), **_steps(settings))


def _full_rank(settings: Settings, joint: "Joint") -> "Method":
    """A weight depends on a whole row of the factor, so that its entries move by less where weights are many."""
    size = None if settings.step_size is None else min(0.3, 2 / joint.num_weights) * settings.step_size
    return _method("FullRank", **_steps(replace(settings, step_size=size)))


def _natural_gradient(settings: Settings, joint: "Joint") -> "Method":
    """Steps of ten times the size with a tenth for radius: as with Adam, a mean moves by the step size at most."""
    own = {} if settings.step_size is None else {"step_size": 10 * settings.step_size, "radius": 0.1}
    return _method("NaturalGradient", **_steps(settings), **own)


def _given(settings: Settings, *names: str) -> dict[str, Any]:
    """Return the named settings that the user gave; the method chooses the others."""
    usual = Settings()
    return {name: getattr(settings, name) for name in names if getattr(settings, name) != getattr(usual, name)}


def _swag(settings: Settings, joint: "Joint") -> "Method":
    """Steps by `StationarySGD`; a step size that is given is one of SGD."""
    from posterity.optim import SGD

    given = _given(settings, "steps", "batch_size", "step_size")
    if not given:
        return _method("SWAG")
    steps = settings.steps or STEPS
    every = max(1, steps // 100)
    rows = BATCH_SIZE if settings.batch_size == AUTO else settings.batch_size
    fit = _method("MAP", steps=steps, batch_size=rows, optimizer=SGD(given.get("step_size", 0.1 * STEP_SIZE)))
    return _method("SWAG", fit=fit, every=every, rank=min(20, steps // every))


def _minibatch_sampler(name: str, factor: float) -> Factory:
    """A sampler on mini-batches; a step size that is given is one of Adam, and theirs is smaller by a factor.

    Of steps that are given half are warm-up, the others give about 100 draws a chain.
    """

    def make(settings: Settings, joint: "Joint") -> "Method":
        given = _given(settings, "batch_size")
        if settings.steps is not None:
            later = max(1, settings.steps // 2)
            thin = max(1, later // 100)
            draws = later // thin
            given |= {"draws": draws, "warmup": max(1, settings.steps - draws * thin), "thin": thin}
        if settings.step_size is not None:
            given["step_size"] = _step_size(name, factor * settings.step_size, joint)
            given["preconditioner"] = _class("RMSprop")()  # curvatures differ too much for one step size
        return _method(name, **given)

    return make


def _pbp(settings: Settings, joint: "Joint") -> "Method":
    """A step sees one row, so that steps which are given are rounded up to passes over the rows."""
    given = {} if settings.steps is None else {"passes": -(-settings.steps // joint.num_data)}
    return _method("ProbabilisticBackpropagation", **given)


def _dropout(settings: Settings, joint: "Joint") -> "Method":
    given = _given(settings, "steps", "batch_size")
    if settings.step_size is not None:
        from posterity.optim import Adam

        given["optimizer"] = Adam(step_size=settings.step_size)
    return _method("MCDropout", **given)


def _langevin(settings: Settings, joint: "Joint") -> "Method":
    """A step size that is given is a tenth of SGLD's: no steps adapt it, and none are refused."""
    given = {} if settings.step_size is None else {"step_size": _step_size("SGLD", 0.1 * settings.step_size, joint)}
    return _method("Langevin", **_counts(settings), **given)


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
            Recipe("ep", "ExpectationPropagation", lambda settings, joint: _method("ExpectationPropagation")),
            Recipe("pbp", "PBP", _pbp),
            Recipe("dropout", "MC dropout", _dropout, (), ("dropout",)),
            Recipe("ensemble", "Ensemble", _ensemble),
            Recipe("swag", "SWAG", _swag, ("map",)),
            Recipe("sgld", "SGLD", _minibatch_sampler("SGLD", 0.1), ("map",)),
            Recipe("sghmc", "SGHMC", _minibatch_sampler("SGHMC", 0.03), ("map",)),
            Recipe("nuts", "NUTS", _sampler("NUTS", max_depth=MAX_DEPTH), (), _CHAIN),
            Recipe("hmc", "HMC", _sampler("HMC"), (), _CHAIN),
            Recipe("chees", "ChEES", _sampler("ChEES"), (), _CHAIN),
            Recipe("mams", "MAMS", _sampler("MAMS"), (), _CHAIN),
            Recipe("mclmc", "MCLMC", _sampler("MCLMC"), (), _CHAIN),
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
    """Return the names of the methods that read this setting; () if all do."""
    return tuple(recipe.word for recipe in RECIPES.values() if name in recipe.options)
