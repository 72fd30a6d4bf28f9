"""Folders of data files, and reading with a check of the SHA-256."""

import hashlib
import os
from pathlib import Path

from posterity.errors import BadData, shown

HOST = "cpu"
"""Device of tensors read from files, whatever torch's default device is; `infer` moves them."""


def content(path: Path) -> bytes:
    """Return all bytes of a file; raises BadData that names it when it is missing, a folder, or not readable."""
    try:
        return path.read_bytes()
    except IsADirectoryError as error:
        raise BadData(
            f"{path}: cannot be read: Is a directory. Name one file in it. In a program "
            "posterity.datasets.read_shards reads folders of Parquet, Arrow and .npy files."
        ) from error
    except OSError as error:
        of_data_set = any(path.is_relative_to(folder) for folder in data_places())
        hint = " 'posterity data' lists what data sets lack, and fetches it." if of_data_set else ""
        raise BadData(f"{path}: cannot be read: {error.strerror or error}.{hint}") from error
    except ValueError as error:  # a name that no file can have, such as one with a NUL
        raise BadData(f"{shown(str(path))}: cannot be read: {error}.") from error


def check_sum(data: bytes, wanted: str, path: Path, name: str, what: str = "") -> None:
    """Raise BadData unless `data`, the content of `path`, has the SHA-256 `wanted`; `what` describes the bytes."""
    digest = hashlib.sha256(data).hexdigest()
    if digest != wanted:
        raise BadData(
            f"{path}: not the published file of '{name}'. "
            f"Its SHA-256{what and ' ' + what} must be {wanted}. Got {digest}. Fetch the file again."
        )


def cache_folder() -> Path:
    """Return the folder of this library in the user's cache; it need not exist."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the XDG standard says to ignore relative paths
        return Path(given) / "posterity"
    try:
        from platformdirs import user_cache_path
    except ImportError:
        return Path.home() / ".cache" / "posterity"
    return user_cache_path("posterity", appauthor=False)


def data_places() -> tuple[Path, ...]:
    """Return the folders that are searched for data sets, in order: POSTERITY_DATA, if set, and the user's cache."""
    given = os.environ.get("POSTERITY_DATA", "")
    return (Path(given).expanduser(), cache_folder()) if given else (cache_folder(),)


def data_folder(name: str, entry: str = "") -> Path:
    """Return the folder of the data set `name` in POSTERITY_DATA or the user's cache; raises BadData if in neither.

    `entry` is the name by which 'posterity data' fetches the files, by default the folder's name.
    """
    for folder in data_places():
        if (folder / name).is_dir():
            return folder / name
    unset = "" if os.environ.get("POSTERITY_DATA", "") else " (POSTERITY_DATA is not set)"
    raise BadData(
        f"Data set '{name}' was not found. "
        f"Looked for a folder '{name}' in {' and '.join(map(str, data_places()))}{unset}. "
        f"Put its files there, or set POSTERITY_DATA to the folder that holds '{name}'. {fetched_by(entry or name)}."
    )


def fetched_by(entry: str) -> str:
    """Return the sentence, without its full stop, that says how a data set is fetched."""
    return f"Fetch it with 'posterity data {entry} --download'"


def root_folder(name: str, root: str | Path | None, below: str = "", entry: str = "") -> Path:
    """Return `root` if it is given, else the folder `below` in the folder of the data set `name`; see `data_folder`.

    Raises BadData where the folder of the data set is there and the one below is not, or is empty.
    """
    if root is not None:
        return Path(root)
    folder = data_folder(name, entry) / below
    if not folder.is_dir() or not any(folder.iterdir()):
        raise BadData(f"{folder}: cannot be read: there are no files. {fetched_by(entry or name)}, or put them there.")
    return folder
