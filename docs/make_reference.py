"""Writes docs/reference.md, the list of all public names: python docs/make_reference.py (or make reference)."""

import ast
import importlib
import inspect
import itertools
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType

import posterity
from posterity.options import table
from posterity.recipes.settings import Settings

PAGE = Path(__file__).parent / "reference.md"
HEAD = """# Reference

Every public name with the first line of its docstring; `help(po.methods.MAP)` prints the rest, with the maths, limits,
cost, references and an example. `make reference` writes this page, and a test compares the two.
"""


def reference() -> str:
    """Return the text of the page."""
    sections = [HEAD, section(posterity, "posterity, usually imported as po")]
    sections += [section(package, package.__name__.replace("posterity", "po", 1)) for package in public_packages()]
    sections.append(f"## Options of `fit`, `compare` and `plan`\n\n{table(Settings)}\n")
    sections.append("# For contributors\n\nThese packages serve the ones above. They may change without notice.\n")
    sections += [section(package, package.__name__) for package in inner_packages()]
    return "\n".join(sections)


@cache
def public_packages() -> list[ModuleType]:
    """Return the packages that are attributes of `posterity`."""
    return [package for package in _packages() if package.__name__.removeprefix("posterity.") in posterity.__all__]


@cache
def inner_packages() -> list[ModuleType]:
    """Return the other packages that export names."""
    return [package for package in _packages() if package not in public_packages() and exported(package)]


@cache
def _packages() -> list[ModuleType]:
    return [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(posterity.__path__, "posterity.")
        if info.ispkg or info.name == "posterity.errors"
    ]


@cache
def exported(package: ModuleType) -> list[str]:
    """Return the names that a package exports; a module without `__all__` exports its classes."""
    classes = [name for name, value in vars(package).items() if getattr(value, "__module__", "") == package.__name__]
    names = getattr(package, "__all__", [name for name in classes if inspect.isclass(getattr(package, name))])
    return [name for name in names if not inspect.ismodule(getattr(package, name))]


def section(package: ModuleType, title: str) -> str:
    """Return a heading, the package's docstring and a line a name."""
    lines = [f"- `{name}`: {escaped(first_line(package, name))}" for name in sorted(exported(package), key=str.lower)]
    prose = inspect.cleandoc(package.__doc__ or "").partition(">>>")[0].rstrip()
    return "\n".join([f"## {title}", "", escaped(prose), "", *lines, ""])


def first_line(package: ModuleType, name: str) -> str:
    """Return the first line of the docstring of a class, a function, or a constant (the string below it)."""
    value = getattr(package, name)
    documented = inspect.isclass(value) or inspect.isroutine(inspect.unwrap(value))
    text = value.__doc__ if documented else constant_docstring(package, name)
    if not text:
        raise ValueError(f"{package.__name__}.{name} needs a docstring. A constant has it as a string below it.")
    return inspect.cleandoc(text).splitlines()[0]


def constant_docstring(package: ModuleType, name: str) -> str | None:
    """Return the string below the assignment of `name` in the module that the package imports it from."""
    body = ast.parse(inspect.getsource(importlib.import_module(home(package, name)))).body
    for statement, below in itertools.pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            return str(below.value.value)
    return None


@cache
def home(package: ModuleType, name: str) -> str:
    """Return the module that the package imports `name` from."""
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(package))) if isinstance(node, ast.ImportFrom)]
    return str(next(node.module for node in imports if name in [alias.name for alias in node.names]))


def escaped(text: str) -> str:
    """Return text whose signs Markdown shows as they are; code in backticks stays."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        for sign in "\\*<":
            parts[index] = parts[index].replace(sign, "\\" + sign)
    return "`".join(parts)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
