"""What the figures of all studies share: the canvas of reports."""

from posterity.report.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    array,
    gentle,
    panels,
    plain,
    save,
)

__all__ = [
    "BLACK",
    "BLUE",
    "GREEN",
    "GREY",
    "ORANGE",
    "PINK",
    "RED",
    "SKY",
    "array",
    "gentle",
    "panels",
    "plain",
    "save",
]
