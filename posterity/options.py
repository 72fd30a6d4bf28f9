"""Options as fields of a dataclass: each field carries its default, help, unit, choices and check, and is said once.

The command line, JSON and the tables of the documentation are made of these fields.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, get_type_hints

from posterity.errors import unknown

_KEY = "option"
LEFT_OUT = "left out"
"""How the scale of a prior or likelihood came about that the user left out, until a method chooses it."""


@dataclass(frozen=True)
class Option:
    """What a field of options says beside its default.

    - `help`: a short sentence; with `usual` it ends in "Default: ...".
    - `unit`: what stands for the value in help texts, such as N or NAMES.
    - `choices`: the words that are allowed; empty for any.
    - `parse`: from the text of the command line to the value; None where its type is enough.
    - `check`: called with the name of the option and its value, raises ValueError; not for None.
    - `usual`: what None or an empty value stands for, in words.
    - `panel`: the heading under which help texts list it.
    - `flags`: names on the command line other than the field's own, such as "--json".
    - `identity`: whether the numbers of a run depend on it.
    """

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    check: Callable[[str, Any], None] | None = None
    usual: str = ""
    panel: str = ""
    flags: tuple[str, ...] = ()
    identity: bool = True

    @property
    def sentence(self) -> str:
        """The help with the choices, and with what an option that is left out stands for."""
        listed = f" {', '.join(self.choices)}." if self.choices else ""
        return f"{self.help}{listed}" + (f" Default: {self.usual}." if self.usual else "")


def option(default: Any = MISSING, *, help: str, **about: Any) -> Any:
    """A dataclass field that is an option; see `Option` for what may be said about it.

    >>> from posterity.errors import positive
    >>> @dataclass(frozen=True)
    ... class Settings:
    ...     steps: int = option(2000, help="Steps of the optimiser.", unit="N", check=positive)
    >>> Settings().steps, describe(Settings)["steps"].unit
    (2000, 'N')
    """
    return dataclasses.field(default=default, metadata={_KEY: Option(help, **about)})


def describe(kind: type | object) -> dict[str, Option]:
    """The options of a dataclass by field name, in order."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(kind) if _KEY in field.metadata}  # type: ignore[arg-type]


def flag(name: str) -> str:
    """The field's name on the command line.

    >>> flag("prior_scale")
    '--prior-scale'
    """
    return "--" + name.replace("_", "-")


def check(settings: Any, name: Callable[[str], str] = flag) -> None:
    """ValueError at a value that is not among its choices, or that its check refuses; call it in `__post_init__`.

    `name` turns a field's name into the name that the message shows.
    """
    for field, about in describe(settings).items():
        value = getattr(settings, field)
        if value is None:
            continue
        several = isinstance(value, tuple)
        for item in value if several else (value,):
            if about.choices and item not in about.choices:
                kind = (field.replace("ies", "ys").removesuffix("s") if several else field).replace("_", " ")
                raise ValueError(unknown(kind, str(item), about.choices))
            if about.check is not None:
                about.check(name(field), item)


def refused(message: str, hint: str) -> ValueError:
    """The error of a value that cannot be used, with what to do about it as a note."""
    error = ValueError(message)
    error.add_note(hint)
    return error


def as_json(settings: Any) -> dict[str, Any]:
    """The values of all fields, with lists for tuples."""
    return {name: _plain(getattr(settings, name)) for name in (field.name for field in dataclasses.fields(settings))}


def identity(settings: Any) -> dict[str, Any]:
    """The values on which the numbers of a run depend."""
    about = describe(settings)
    return {name: value for name, value in as_json(settings).items() if name not in about or about[name].identity}


def words(settings: Any) -> Iterator[str]:
    """The command line that gives these settings again: each option that differs from its default."""
    for field in dataclasses.fields(settings):
        value, about = getattr(settings, field.name), field.metadata.get(_KEY)
        if about is None or value == field.default or value is None:
            continue
        name = about.flags[0] if about.flags else flag(field.name)
        if isinstance(value, bool):
            yield name if value else "--no-" + name.removeprefix("--")
        else:
            yield from (name, ",".join(map(_word, value)) if isinstance(value, tuple) else _word(value))


def from_mapping(kind: type, values: Mapping[str, Any]) -> Any:
    """The dataclass from values by name, as `as_json` gives them; unknown names are a ValueError."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise ValueError(unknown("option", name, fields))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def table(kind: type, name: Callable[[str], str] = flag) -> str:
    """The options as a table in Markdown: name, default, what it is; `name` turns a field's name into the one shown."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    rows = [
        f"| `{name(field)}` | {_default(defaults[field])} | {about.sentence} |"
        for field, about in describe(kind).items()
    ]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def types(kind: type) -> dict[str, Any]:
    """The types of the fields, evaluated."""
    return get_type_hints(kind)


def comma_separated(text: str) -> tuple[str, ...]:
    """The words of a list with commas, each once.

    >>> comma_separated("map, laplace,map")
    ('map', 'laplace')
    """
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _default(value: Any) -> str:
    empty: Iterable[Any] = (MISSING, None, ())
    return "" if any(value is item or value == item for item in empty) else f"`{_word(value)}`"
