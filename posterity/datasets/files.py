"""Where data files are looked for, and how they are opened."""

import hashlib
import os
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


def cache_folder() -> Path:
    """The user's cache of this library; it need not exist."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the XDG standard says to ignore relative paths
        return Path(given) / "posterity"
    try:
        from platformdirs import user_cache_path
    except ImportError:
        return Path.home() / ".cache" / "posterity"
    return user_cache_path("posterity", appauthor=False)


def data_places() -> tuple[Path, ...]:
    """Where folders of data sets are looked for, in order: POSTERITY_DATA, if it is set, and the user's cache."""
    given = os.environ.get("POSTERITY_DATA", "")
    return (Path(given).expanduser(), cache_folder()) if given else (cache_folder(),)


def data_folder(name: str) -> Path:
    """The folder of the data set `name`: in POSTERITY_DATA, else in the user's cache; BadData when in neither."""
    given, places = os.environ.get("POSTERITY_DATA", ""), data_places()
    for place in places:
        if (place / name).is_dir():
            return place / name
    looked = " and ".join(str(place) for place in places)
    raise BadData(
        f"Data set '{name}' was not found. Looked for a folder '{name}' in {looked}"
        f"{'' if given else ' (POSTERITY_DATA is not set)'}. "
        f"Put its files there, or set POSTERITY_DATA to the folder that holds '{name}'."
    )
