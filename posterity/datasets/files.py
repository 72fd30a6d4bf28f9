"""Bytes of data files, and whether they are the published ones."""

import hashlib
from pathlib import Path

from posterity.errors import BadData, shown

HOST = "cpu"
"""Where what is read from files goes, whatever torch's default device is; who fits moves it."""


def content(path: Path) -> bytes:
    """All bytes of a file; BadData that names it when it is missing, a folder, or may not be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # a name that no file can have, as one with a NUL in it
        raise BadData(f"{shown(str(path))}: cannot be read: {error}.") from error


def check_sum(data: bytes, wanted: str, path: Path, name: str, what: str = "") -> None:
    """BadData unless the SHA-256 of `data`, which `path` holds, is `wanted`; `what` says of which bytes it is."""
    found = hashlib.sha256(data).hexdigest()
    if found != wanted:
        raise BadData(
            f"{path}: not the published file of '{name}'. "
            f"Its SHA-256{what and ' ' + what} must be {wanted}. Got {found}. Fetch the file again."
        )
