"""The methods of the study by name: a new one is one row here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from posterity.inference import Method
from posterity.methods import MAP, Ensemble, Laplace, MCDropout
from posterity.model import Joint
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Posterior
from posterity.predictive import Predictive
from posterity_studies.uci.dropout import NOISES, RATES, chosen_dropout, dropout_problem, mask_average
from posterity_studies.uci.ensemble import LEAST, chosen_ensemble, ensemble_problem, moments
from posterity_studies.uci.protocol import Choice, Split, problem
from posterity_studies.uci.settings import Settings

MEMBERS = 5


def _predicted(posterior: Posterior, inputs: Tensor) -> Predictive:
    return posterior.predict(inputs)


@dataclass(frozen=True)
class Recipe:
    """How a method is run: its label, and its stages, each of which starts from the posterior of the one before.

    Further the problem it fits, what it predicts, and for one that chooses settings on held-out training rows, how,
    with what it chooses from in words; then the problem takes the choice as well.
    """

    label: str
    stages: Callable[[Settings], tuple[Method, ...]]
    problem: Callable[..., Joint] = problem
    predict: Callable[[Posterior, Tensor], Predictive] = _predicted
    choose: Callable[[Split, Settings, Method], Choice] | None = None
    candidates: str | None = None


def _map(settings: Settings) -> MAP:
    # Adam comes to rest only if its steps do.
    return MAP(settings.steps, settings.batch_size, Adam(settings.step_size), Cosine())


def _dropout(settings: Settings) -> tuple[Method, ...]:
    """A fifth of the steps, as there are more fits; batches of the size that the published runs had."""
    return (MCDropout(max(1, settings.steps // 5), 128, Adam(settings.step_size), Cosine()),)


def _ensemble(settings: Settings) -> tuple[Method, ...]:
    """Fewer steps than MAP: with a noise for each row a network has more to learn by heart."""
    return (Ensemble(MAP(max(1, settings.steps // 20), 128, Adam(0.01), Cosine()), MEMBERS),)


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "map": Recipe("MAP", lambda settings: (_map(settings),)),
        "laplace": Recipe("Laplace", lambda settings: (_map(settings), Laplace())),
        "dropout": Recipe(
            "MC dropout", _dropout, dropout_problem, mask_average, chosen_dropout, f"rates {RATES}, noises {NOISES}"
        ),
        "ensemble": Recipe(
            f"Ensemble of {MEMBERS}", _ensemble, ensemble_problem, moments, chosen_ensemble, f"least noises {LEAST}"
        ),
    }
)
"""Full Gauss-Newton and the linearised predictive are what `Laplace()` does by default.

The steps of the others were chosen on held-out training rows, so that a split takes seconds;
`python -m benchmarks.uci_settings --methods dropout,ensemble` shows what others give there.
"""
