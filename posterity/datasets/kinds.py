"""The kind of a column, the refusals of those that cannot be used, and the labels of a target."""

from collections.abc import Iterable, Sequence
from typing import Literal

from posterity.datasets import dates
from posterity.datasets.columns import Column
from posterity.datasets.fields import BOOLEANS, number, trouble
from posterity.errors import BadData, shown

Kind = Literal["number", "boolean", "category", "date", "constant", "empty"]

MOST_CATEGORIES = 50
"""Largest number of distinct values in a column of categories."""

MOST_WORDS = 1000
"""Distinct values of a column that are looked at one by one to say why it cannot be used."""


def infer_kind(column: Column, decimal: str, as_category: bool = False) -> Kind:
    """Return the kind of a column; raises BadData, with a remedy, for text and for numbers with `trouble`.

    - `empty`: no values. `constant`: the same value in every row.
    - `number`: plain numbers only (a single distinct one beside missing values is a `category`: present or not).
    - `boolean`: both words of one pair of `BOOLEANS` and no other, in any case.
    - `date`: days, with or without a time, whose year is written in full; never of a target.
    - `category`: text with at most `MOST_CATEGORIES` distinct values, some repeated; or by `as_category`.
    """
    if column.missing.all():
        return "empty"
    varies = column.varies
    if not varies and not column.missing.any():
        return "constant"
    if as_category:
        _check_categories(column)
        return "category"
    if str(column.values.type) != "bool" and column.is_number(decimal):
        return "number" if varies else "category"
    if any({word.casefold() for word in column.words} == set(pair) for pair in BOOLEANS):
        return "boolean"
    if not column.is_target and (column.is_date or dates.is_readable(column.words, column.order)):
        return "date" if varies else "category"
    _refuse_disguises(column, decimal)
    _check_categories(column)
    return "category"


def boolean_words(column: Column) -> tuple[str, str]:
    """Return the two words of a boolean column as they are first written there, the word of 0 first."""
    written: dict[str, str] = {}
    for word in column.words:
        written.setdefault(word.casefold(), word)
    zero, one = next(pair for pair in BOOLEANS if written.keys() <= set(pair))
    return written.get(zero, zero), written.get(one, one)


def _refuse_disguises(column: Column, decimal: str) -> None:
    """Raise BadData at the first number with `trouble` or date, or at a text where other rows have numbers."""
    marks = (decimal, column.thousands, column.sign)
    words = column.words[:MOST_WORDS]
    numeric = {word for word in words if number(word, *marks) is not None}
    others = [word for word in words if word not in numeric]
    for word in others:
        row = column.first([word]) or 0
        if reason := trouble(word, *marks):
            raise BadData(f"{column.at(row)}: {shown(word)} {reason}. {_remedy(reason, column)}")
        if dates.looks_like(word):
            remedy = "Turn it into numbers" if column.is_target else dates.remedy(column.words)
            raise BadData(
                f"{column.at(row)}: {shown(word)} is a date or time, which cannot be used. {remedy}, or "
                f"{_way_out(column)}."
            )
    a_number, a_text = column.first(numeric), column.first(others)
    if a_number is not None and a_text is not None:
        text, known = (shown(column.words[column.codes[row]]) for row in (a_text, a_number))
        raise BadData(
            f"{column.at(a_text)}: {text} is text, where {column.place} {column.lines[a_number]} has the number "
            f"{known}. Correct it, take the column as categories ({column.option('category')}), or {_way_out(column)}."
        )


def _check_categories(column: Column) -> None:
    distinct, present = len(column.words), int((~column.missing).sum())
    if distinct > MOST_CATEGORIES or distinct == present:
        repeated = "" if distinct > MOST_CATEGORIES else ", none repeated"
        raise BadData(
            f"{column.path}: column {shown(column.name)} is text: {distinct} different values in {present} "
            f"fields{repeated}. A column of categories has at most {MOST_CATEGORIES}, and some repeated. "
            f"You may {_way_out(column)}."
        )


def _remedy(reason: str, column: Column) -> str:
    if "nothing says which" in reason:
        return "Say --thousands ',' if the comma separates thousands, or --decimal ',' if decimals follow it."
    if "thousands" in reason:
        return f"Say the mark (--thousands), correct it, or {_way_out(column)}."
    if "lose digits" in reason:
        return f"Take the column as categories ({column.option('category')}), or {_way_out(column)}."
    return f"Correct it, or {_way_out(column)}."


def _way_out(column: Column) -> str:
    return "name another target" if column.is_target else f"leave the column out ({column.option('drop')})"


def class_names(column: Column, kind: Kind, decimal: str) -> tuple[str, ...]:
    """Return the labels of a target as written: numbers by size, booleans false first, text alphabetically.

    Every spelling is a class of its own: `1`, `1.0` and `01` are three, and so are `yes`, `Yes` and `YES`.
    """
    if kind == "category":
        return tuple(sorted(column.words))
    marks = (decimal, column.thousands, column.sign)
    return tuple(sorted(column.words, key=lambda label: (_meaning(label, kind, [marks]), label)))


def classes_by_meaning(classes: Sequence[str], kind: Kind, *marks: tuple[str, ...]) -> dict[str | float, list[str]]:
    """Return the labels that mean the same by what they mean: their number, or the word without regard to case.

    `marks` are arguments of `number`. Without them, which labels of an earlier file do not tell, a label is read with
    either decimal mark.
    """
    alike: dict[str | float, list[str]] = {}
    for label in classes:
        alike.setdefault(_meaning(label, kind, marks or ((".",), (",",))), []).append(label)
    return alike


def _meaning(label: str, kind: Kind, marks: Iterable[tuple[str, ...]]) -> str | float:
    if kind != "number":
        return label.casefold()
    values = (number(label, *own) for own in marks)
    return next((value for value in values if value is not None), label)
