"""Run folders on disk: values and states as JSON and safetensors, replaced all at once, never pickled.

The table from old names of types to new ones is in `values`. `inference` decides what a run depends on.
"""

from posterity.storage.described import described, is_described, recalled
from posterity.storage.folder import RunFolder
from posterity.storage.part import Part
from posterity.storage.values import (
    clone,
    decode,
    encode,
    flatten,
    forms,
    leaves,
    mapped,
    present_names,
    references,
    restore,
)

__all__ = [
    "Part",
    "RunFolder",
    "clone",
    "decode",
    "described",
    "encode",
    "flatten",
    "forms",
    "is_described",
    "leaves",
    "mapped",
    "present_names",
    "recalled",
    "references",
    "restore",
]
