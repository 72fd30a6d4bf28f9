"""What a public name must say about itself."""

import dataclasses
import importlib
import inspect

import pytest

import posterity as po
from posterity.curvature import Curvature
from posterity.inference import Method
from posterity.likelihoods import Likelihood
from posterity.penalties import Penalty
from posterity.penalties.families import Family
from posterity.posteriors import Posterior
from posterity.priors import Prior

KINDS = {
    "methods": Method,
    "priors": Prior,
    "likelihoods": Likelihood,
    "curvature": Curvature,
    "posteriors": Posterior,
    "penalties": (Penalty, Family),
}
SECTIONS = ("**Math**", "**Limit**", "**Cost**", "**References**", "**Example**", ">>>")


def classes():
    for package, base in KINDS.items():
        for name, value in vars(importlib.import_module(f"posterity.{package}")).items():
            if inspect.isclass(value) and issubclass(value, base) and not inspect.isabstract(value):
                yield pytest.param(value, id=f"{package}.{name}")
    for value in (po.Joint, po.Density, po.Tempering):
        yield pytest.param(value, id=value.__name__)


@pytest.mark.parametrize("value", list(classes()))
def test_docstring_has_every_section(value):
    missing = [section for section in SECTIONS if section not in (value.__doc__ or "")]
    assert not missing


@pytest.mark.parametrize("value", list(classes()))
def test_is_a_frozen_value(value):
    assert dataclasses.is_dataclass(value)
    assert value.__dataclass_params__.frozen
    bases = [base for base in value.__mro__[1:] if base is not object and inspect.isclass(base)]
    assert all(inspect.isabstract(base) or base.__name__ == "ABC" for base in bases), (
        "abstract or final, one level deep"
    )
