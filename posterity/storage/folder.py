"""Run folders: a manifest and parts, replaced atomically."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from posterity.errors import BadFolder
from posterity.processes import Group, writes
from posterity.processes import active as processes_of_this
from posterity.storage import disk
from posterity.storage.part import CONFIG, FILES, JSON, TENSORS, Part, json_bytes, pack, received, sent, unpack
from posterity.storage.schema import AGAIN, reading
from posterity.storage.values import check_complete

T = TypeVar("T")

FORMAT = 2  # since 0.2.0, which names types by their present folders; format 1 (0.1.0) is read too
LIBRARY = "posterity"
OWNERS = {"task": "a fitted run", "estimator": "an estimator"}
"""Parts that show that a folder holds more than a posterior, with the name of its contents."""

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
        """Return the seal of a file with this content."""
        digest, size = hashlib.sha256(), 0
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
        return cls(size, digest.hexdigest())


@dataclass(frozen=True)
class Entry:
    """The folder of one part, and the seals of its files; `older` if it is of an older format."""

    folder: str
    seals: Mapping[str, Seal]
    older: bool = False

    @classmethod
    def of(cls, part: str, files: Mapping[str, Iterable[bytes]]) -> "Entry":
        """Return the entry of a part with these files; the folder name has a hash of their names and bytes."""
        if not _NAME.fullmatch(part):
            raise ValueError(
                f"A part's name must be letters, digits, '.', '_' or '-', with a letter or digit first. Got {part!r}."
            )
        seals = {name: Seal.of(files[name]) for name in sorted(files)}
        content = "".join(f"{seal.sha256} {name}\n" for name, seal in seals.items())
        return cls(f"{part}-{hashlib.sha256(content.encode()).hexdigest()[:12]}", seals)


def render(entries: Mapping[str, Entry]) -> bytes:
    """Return the bytes of manifest.json for these parts."""
    parts: dict[str, JSON] = {
        part: {
            "folder": entry.folder,
            "files": {name: {"sha256": seal.sha256, "bytes": seal.size} for name, seal in entry.seals.items()},
            **({"older": True} if entry.older else {}),  # a part that a commit kept from an older format
        }
        for part, entry in entries.items()
    }
    return json_bytes({"format": FORMAT, "library": LIBRARY, "parts": parts})


def parse(where: str, data: bytes) -> dict[str, Entry]:
    """Return the parts that manifest.json names, or raise BadFolder; `where` names the run folder in messages."""
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
    if type(version) is not int or version < 1 or not isinstance(manifest.get("parts"), dict):
        raise BadFolder(f"Run folder {where}: manifest.json is not in the format it should be. {AGAIN}")
    return {part: _entry(where, part, entry, version < FORMAT) for part, entry in manifest["parts"].items()}


def _entry(where: str, part: str, entry: object, older: bool) -> Entry:
    match entry:
        case {"folder": str(folder), "files": dict(files), **others} if others in ({}, {"older": True}):
            # Exact names, so that an edited manifest cannot point outside the run folder.
            named = _NAME.fullmatch(part) and _FOLDER.fullmatch(folder) and folder[:-13] == part
            seals: dict[str, Seal] = {}
            for name, seal in files.items():
                match seal:
                    case {"sha256": str(digest), "bytes": int(size)} if _SHA256.fullmatch(digest):
                        seals[name] = Seal(size, digest)
            if named and seals.keys() == files.keys() == FILES:
                return Entry(folder, seals, older or bool(others))
    raise BadFolder(
        f"Run folder {where}: manifest.json was altered: part {part!r} must name its own folder and files "
        f"inside the run folder, with size and sha256. {AGAIN}"
    )


_LOCK_SECONDS = 300.0  # longer than it takes to write the largest checkpoint
_MAPPED = 1 << 28  # bytes of tensors beyond which they stay in their file, memory-mapped
_READS = 20  # lost races in a row after which a reader gives up


class RunFolder:
    """Named parts of a run under one folder, as JSON and safetensors with a sha256 for each file.

    `manifest.json` names the subfolder of each part, `<part>-<12 hex of its content>`. A commit writes new
    subfolders beside the old ones and then replaces the manifest atomically, so a process killed at any
    instant leaves the old content or the new. Equal content gives equal bytes: no times, no host names.

    Of several `processes` (None: those that read together, if any) the first writes, and reads for all of them.

    >>> import tempfile, torch
    >>> folder = RunFolder(tempfile.mkdtemp() + "/run")
    >>> folder.commit({"posterior": Part({"kind": "point"}, {"theta": torch.arange(3.0)})})
    >>> folder.commit({"checkpoint": Part({"step": 10})})
    >>> folder.parts()
    ('checkpoint', 'posterior')
    >>> folder.commit({}, drop=["check*"])
    >>> folder.read("posterior").tensors["theta"]
    tensor([0., 1., 2.])
    """

    def __init__(self, path: str | os.PathLike[str], processes: Group | None = None) -> None:
        self.path, self._given = Path(path), processes

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def exists(self) -> bool:
        """Return whether the folder has a manifest."""
        return self._by_first(lambda: os.path.isfile(self._manifest), json_bytes, lambda data: bool(json.loads(data)))

    def parts(self) -> tuple[str, ...]:
        """Return the sorted names of the parts."""
        return self._by_first(
            lambda: tuple(sorted(self._entries())),
            lambda names: json_bytes(list(names)),
            lambda data: tuple(json.loads(data)),
        )

    def read(self, part: str) -> Part:
        """Check the sha256 of each file and return the part of this name, with tensors on the CPU."""
        return self._by_first(lambda: self._read(part), sent, received)

    def _by_first(self, work: Callable[[], T], encode: Callable[[T], bytes], decode: Callable[[bytes], T]) -> T:
        """Return the result of `work`, which the first of several processes does for all."""
        processes, active = self._given, processes_of_this()
        if processes is None and active is not None and active.reads_together:
            processes = active
        return work() if processes is None else processes.by_first(work, encode, decode)

    def _read(self, part: str) -> Part:
        failure: BadFolder | None = None
        for _ in range(_READS):
            stamp = self._stamp()
            try:
                entries = self._entries()
                if part not in entries:
                    known = ", ".join(sorted(entries)) or "none"
                    raise BadFolder(f"Run folder {self._shown} has no part {part!r}. Parts there: {known}.")
                return self._unpacked(part, entries[part])
            except BadFolder as error:
                if self._stamp() == stamp:
                    raise
                failure = error  # a writer has changed the folder meanwhile: read again
        raise BadFolder(f"Run folder {self._shown} changes too fast to be read. Try again later.") from failure

    def refuse(self, *owners: str) -> None:
        """Raise BadFolder if the folder belongs to one of these `OWNERS` (none: to any), whose parts must stay."""
        stored = self.parts() if self.exists() else ()
        for owner in owners or OWNERS:
            if owner in stored:
                raise BadFolder(
                    f"Run folder {self._shown} holds {OWNERS[owner]}, which would be mixed with what is saved. "
                    "Save into another folder, or delete this one first."
                )

    def commit(self, parts: Mapping[str, Part], drop: Iterable[str] = ()) -> None:
        """Drop the parts that match a name or shell pattern in `drop`, then add or replace `parts`; keep the rest.

        All of it happens at once or not at all: when it fails (no space, no permission: BadFolder), the old
        content is intact. A second writer waits until the first has finished. Of several processes the first writes.
        """
        if not writes():
            return
        packed = {name: pack(name, part) for name, part in parts.items()}
        added = {name: Entry.of(name, files) for name, files in packed.items()}
        patterns = (drop,) if isinstance(drop, str) else tuple(drop)
        if os.path.isfile(self.path):
            raise self._is_a_file()
        try:
            created = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for path in created:
                disk.sync(path.parent)
            with disk.locked(self.path / ".lock", _LOCK_SECONDS):
                old = self._entries() if os.path.lexists(self._manifest) else {}
                kept = {n: entry for n, entry in old.items() if not any(fnmatchcase(n, p) for p in patterns)}
                self._replace(old, {**kept, **added}, {added[name].folder: files for name, files in packed.items()})
        except OSError as error:
            needed = sum(seal.size for entry in added.values() for seal in entry.seals.values())
            raise BadFolder(
                f"Cannot write run folder {self._shown}: {disk.reason(error, self.path, needed)}. "
                "Nothing there is half written. "
                "Free space or check permissions, or save to another folder."
            ) from error

    def _replace(
        self, old: Mapping[str, Entry], new: Mapping[str, Entry], folders: Mapping[str, dict[str, Iterable[bytes]]]
    ) -> None:
        try:
            for folder, files in folders.items():
                self._write_part(self.path / folder, files)
            disk.sync(self.path)
            draft = disk.temporary(self.path)
            disk.write(draft, [render(new)])
            os.replace(draft, self._manifest)
        except OSError:
            with suppress(OSError, BadFolder):  # give the space back, but touch nothing that either manifest names
                present = self._entries() if os.path.lexists(self._manifest) else {}
                self._sweep({entry.folder for entry in (*old.values(), *present.values())})
            raise
        disk.sync(self.path)
        self._sweep({entry.folder for entry in new.values()})

    def _write_part(self, final: Path, files: Mapping[str, Iterable[bytes]]) -> None:
        if _holds(final, files):
            return
        draft = disk.temporary(self.path)
        os.mkdir(draft)
        for name, pieces in files.items():
            disk.write(draft / name, pieces)
        disk.sync(draft)
        if os.path.lexists(final):  # damaged, or half deleted by a writer that was killed
            os.rename(final, disk.temporary(self.path))
        os.rename(draft, final)

    def _sweep(self, keep: set[str]) -> None:
        """Delete what no manifest names: old versions, and leftovers of killed writers.

        What cannot be deleted stays until the next commit. Folders that hold other files are left alone.
        """
        with suppress(OSError):
            for path in list(self.path.iterdir()):
                stale = _FOLDER.fullmatch(path.name) and path.name not in keep and path.is_dir()
                if disk.is_temporary(path.name) or (stale and FILES.issuperset(os.listdir(path))):
                    disk.remove(path)

    def _unpacked(self, part: str, entry: Entry) -> Part:
        """Check the files of a part and return its content."""
        where, config = f"Run folder {self._shown}: part {part!r}", self._file(entry, CONFIG)
        if entry.seals[TENSORS].size <= _MAPPED:
            content = unpack(where, config, self._file(entry, TENSORS))
        else:
            self._compare(entry, TENSORS, Seal.of(self._pieces(entry, TENSORS)))
            content = unpack(where, config, self.path / entry.folder / TENSORS)
        if entry.older:
            return replace(content, older=True)
        with reading(where):
            check_complete(dict(content.config))
        return content

    def _file(self, entry: Entry, name: str) -> bytes:
        """Return the bytes of a file; raises BadFolder where they do not match its seal."""
        data = b"".join(self._pieces(entry, name))
        self._compare(entry, name, Seal.of([data]))
        return data

    def _pieces(self, entry: Entry, name: str) -> Iterator[bytes]:
        try:
            yield from disk.read(self.path / entry.folder / name)
        except FileNotFoundError:
            missing = f"file '{entry.folder}/{name}' is missing"
            raise BadFolder(f"Run folder {self._shown}: {missing}. {AGAIN}") from None
        except OSError as error:
            raise self._unreadable(error) from error

    def _compare(self, entry: Entry, name: str, seal: Seal) -> None:
        wanted, shown = entry.seals[name], f"Run folder {self._shown}: file '{entry.folder}/{name}'"
        if seal.size < wanted.size:
            raise BadFolder(f"{shown} is truncated ({seal.size} of {wanted.size} bytes). {AGAIN}")
        if seal != wanted:
            raise BadFolder(f"{shown} was altered after it was saved (its sha256 differs). {AGAIN}")

    def _entries(self) -> dict[str, Entry]:
        try:
            return parse(self._shown, self._manifest.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise self._unreadable(error) from error
        if os.path.isfile(self.path):
            raise self._is_a_file()
        if not os.path.isdir(self.path):
            raise BadFolder(f"There is no run folder {self._shown}. Check the path, or save a run there first.")
        raise BadFolder(
            f"Run folder {self._shown} has no manifest.json: it is not a run folder, or its first save was "
            "interrupted. Check the path, or save the run again."
        )

    def _stamp(self) -> tuple[int, int] | None:
        """Identify the manifest file: a rewritten one has another stamp, even with equal content."""
        try:
            status = os.stat(self._manifest)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    @property
    def _manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def _shown(self) -> str:
        return repr(str(self.path))

    def _is_a_file(self) -> BadFolder:
        return BadFolder(f"{self._shown} is a file, not a run folder. Give the folder that holds manifest.json.")

    def _unreadable(self, error: OSError) -> BadFolder:
        return BadFolder(
            f"Cannot read run folder {self._shown}: {disk.reason(error, self.path, 0)}. Check its permissions."
        )


def _holds(folder: Path, files: Mapping[str, Iterable[bytes]]) -> bool:
    try:
        for name, pieces in files.items():
            with open(folder / name, "rb") as file:
                if any(file.read(len(piece)) != piece for piece in pieces) or file.read(1):
                    return False
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False  # other failures may be temporary, and are no reason to replace a folder that may be intact
    return True
