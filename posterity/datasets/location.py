"""Where data sets lie on this computer."""

import os
from pathlib import Path

from posterity.errors import BadData


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
