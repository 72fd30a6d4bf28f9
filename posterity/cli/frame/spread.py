"""Commands whose options are the fields of dataclasses."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from posterity.options import Option, describe, flag, types


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function as a command that has an option for each field of its dataclass parameters.

    The function is called with the dataclasses, built from the values of their options. A field without help is not an
    option and keeps its default; other parameters are passed to typer unchanged.
    """
    hints = get_type_hints(function, include_extras=True)
    plain: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            groups[parameter.name] = hint
            plain += _parameters(hint)
        else:
            plain.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    plain = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in plain]

    def run(**values: Any) -> None:
        from posterity.cli.frame.output import option_values

        with option_values(function.__name__.replace("_", "-")):
            made = {name: _made(kind, values) for name, kind in groups.items()}
        function(**values, **made)

    paragraphs = (" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))
    run.__name__, run.__doc__ = function.__name__, "\n\n".join(paragraphs)  # help breaks lines as the terminal does
    run.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in plain}
    return run


def _made(kind: type, values: dict[str, Any]) -> Any:
    """Build the dataclass from the values of its options, which are removed from `values`."""
    given = {}
    for name, about in describe(kind).items():
        value = values.pop(name)
        if value is None:  # left out, and its default is None or an empty tuple
            continue
        if about.parse is not None and isinstance(value, str):
            value = about.parse(value)
        given[name] = tuple(value) if isinstance(value, list) else value
    return kind(**given)


@cache
def _parameters(kind: type) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of all options of a dataclass, as typer reads them."""
    hints, defaults = types(kind), {field.name: field.default for field in dataclasses.fields(kind)}
    return tuple(_parameter(name, about, hints[name], defaults[name]) for name, about in describe(kind).items())


def _parameter(name: str, about: Option, hint: Any, default: Any) -> inspect.Parameter:
    required = default is dataclasses.MISSING
    switch = hint in (bool, bool | None)
    flags = about.flags or (f"{flag(name)}/--no-{flag(name)[2:]}" if switch else flag(name),)
    given = typer.Option(
        *flags,
        metavar=None if switch else about.unit or None,
        help=about.sentence,
        rich_help_panel=about.panel or None,
        show_default=not required and default not in (None, (), "") and not about.usual,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else _told(default, about),
        annotation=Annotated[_type(hint, about), given],
    )


def _type(hint: Any, about: Option) -> Any:
    """Return the type for typer: str for an option with its own parser, a list for a tuple."""
    optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
    if about.parse is not None:
        return str | None if optional or get_origin(hint) is tuple else str
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]] | None  # type: ignore[misc]
    return hint


def _told(default: Any, about: Option) -> Any:
    """Return the default in the form of the command line."""
    if about.parse is not None and isinstance(default, tuple):
        return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in default) or None
    if default == ():
        return None
    return str(default) if isinstance(default, Path) else default
