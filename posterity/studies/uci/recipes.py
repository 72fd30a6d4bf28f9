"""The methods of the study by name: a new one is one row here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from posterity.inference import Method
from posterity.methods import MAP, Laplace
from posterity.numerics.adam import Adam
from posterity.numerics.schedules import Cosine
from posterity.studies.uci.protocol import Settings


@dataclass(frozen=True)
class Recipe:
    """How a method is run: its label, and its stages, each of which starts from the posterior of the one before."""

    label: str
    stages: Callable[[Settings], tuple[Method, ...]]


def _map(settings: Settings) -> MAP:
    # Adam comes to rest only if its steps do.
    return MAP(settings.steps, settings.batch_size, Adam(settings.step_size), Cosine())


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "map": Recipe("MAP", lambda settings: (_map(settings),)),
        "laplace": Recipe("Laplace", lambda settings: (_map(settings), Laplace())),
    }
)
"""Full Gauss-Newton and the linearised predictive are what `Laplace()` does by default."""
