"""What a public name must say about itself."""

import dataclasses
import importlib
import inspect
import pkgutil
import runpy
from pathlib import Path

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
DOCS = Path(__file__).parents[2] / "docs"
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


def _documented(kind: type, name: str) -> bool:
    """Whether a class or one of its bases says what the method does."""
    if any(name in vars(base).get("__annotations__", {}) for base in kind.__mro__):  # a field
        return True
    members = (vars(base).get(name) for base in kind.__mro__)
    return any(inspect.getdoc(getattr(member, "func", None) or member) for member in members if member is not None)


@pytest.mark.parametrize("package", ["posterity", "posterity_studies"])
def test_public_methods_are_documented_where_they_are_introduced(package: str) -> None:
    silent = set()
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for kind in (value for value in vars(module).values() if inspect.isclass(value)):
            if kind.__module__ != info.name or kind.__name__.startswith("_"):
                continue
            for name, member in vars(kind).items():
                named = inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))
                if named and not name.startswith("_") and not _documented(kind, name):
                    silent.add(f"{info.name}.{kind.__name__}.{name}")
    assert not silent


def test_the_reference_lists_every_public_name() -> None:
    reference = runpy.run_path(str(DOCS / "make_reference.py"))["reference"]()
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == reference, "run make reference"
