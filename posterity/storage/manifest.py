"""The manifest of a run folder: which part lies where, and the seal of each file."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from posterity.errors import BadFolder
from posterity.storage.part import FILES, JSON, json_bytes

FORMAT = 1
LIBRARY = "posterity"
AGAIN = "Restore the folder from a copy, or save the run again to a new folder."

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FOLDER = re.compile(_NAME.pattern + r"-[0-9a-f]{12}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Seal:
    """Size and sha256 of one file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> "Seal":
        """The seal of a file that these pieces make up."""
        digest, size = hashlib.sha256(), 0
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
        return cls(size, digest.hexdigest())


@dataclass(frozen=True)
class Entry:
    """Where the files of one part lie, and their seals."""

    folder: str
    seals: Mapping[str, Seal]

    @classmethod
    def of(cls, part: str, files: Mapping[str, Iterable[bytes]]) -> "Entry":
        """The entry of a part with these files; its folder is named after their names and bytes."""
        if not _NAME.fullmatch(part):
            raise ValueError(
                f"A part's name must be letters, digits, '.', '_' or '-', with a letter or digit first. Got {part!r}."
            )
        seals = {name: Seal.of(files[name]) for name in sorted(files)}
        content = "".join(f"{seal.sha256} {name}\n" for name, seal in seals.items())
        return cls(f"{part}-{hashlib.sha256(content.encode()).hexdigest()[:12]}", seals)


def is_part_folder(name: str) -> bool:
    """Whether `Entry.of` could have given a folder this name."""
    return _FOLDER.fullmatch(name) is not None


def render(entries: Mapping[str, Entry]) -> bytes:
    """The bytes of manifest.json for these parts."""
    parts: dict[str, JSON] = {
        part: {
            "folder": entry.folder,
            "files": {name: {"sha256": seal.sha256, "bytes": seal.size} for name, seal in entry.seals.items()},
        }
        for part, entry in entries.items()
    }
    return json_bytes({"format": FORMAT, "library": LIBRARY, "parts": parts})


def parse(where: str, data: bytes) -> dict[str, Entry]:
    """The parts that manifest.json names, or a BadFolder; `where` is the run folder, for messages."""
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFolder(f"Run folder {where}: manifest.json is truncated or not JSON. {AGAIN}") from error
    if not isinstance(manifest, dict) or manifest.get("library") != LIBRARY:
        raise BadFolder(f"Run folder {where}: manifest.json was not written by posterity. Give a folder that was.")
    version = manifest.get("format")
    if type(version) is int and version > FORMAT:
        raise BadFolder(
            f"Run folder {where} has format {version}, and this posterity reads up to {FORMAT}. Upgrade posterity."
        )
    if type(version) is not int or version != FORMAT or not isinstance(manifest.get("parts"), dict):
        raise BadFolder(f"Run folder {where}: manifest.json is not in the format it should be. {AGAIN}")
    return {part: _entry(where, part, entry) for part, entry in manifest["parts"].items()}


def _entry(where: str, part: str, entry: object) -> Entry:
    match entry:
        case {"folder": str(folder), "files": dict(files)}:
            # Exact names, so that an edited manifest cannot point outside the run folder.
            named = _NAME.fullmatch(part) and is_part_folder(folder) and folder[:-13] == part
            seals = {name: _seal(seal) for name, seal in files.items()}
            if named and seals.keys() == FILES and None not in seals.values():
                return Entry(folder, {name: seal for name, seal in seals.items() if seal})
    raise BadFolder(
        f"Run folder {where}: manifest.json was altered: part {part!r} must name its own folder and files "
        f"inside the run folder, with size and sha256. {AGAIN}"
    )


def _seal(seal: object) -> Seal | None:
    match seal:
        case {"sha256": str(digest), "bytes": int(size)} if _SHA256.fullmatch(digest):
            return Seal(size, digest)
    return None
