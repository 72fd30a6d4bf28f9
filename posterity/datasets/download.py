"""Downloads of published data sets: files are checked before they get their names."""

import contextlib
import gzip
import os
import shutil
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from posterity.datasets import images, uci
from posterity.datasets.catalogue import Published, is_sound
from posterity.datasets.files import cache_folder, check_sum, content
from posterity.errors import BadData, PosterityError, shown
from posterity.storage import disk

TIMEOUT = 30.0
"""Seconds without an answer after which a download fails."""

_LIMIT = 1 << 29  # most bytes of a file, well above all published ones, so that no server can fill the disk
_CHUNK = 1 << 16
_STEP = 1 << 25  # bytes between two lines of progress in one file


class Unreachable(PosterityError):
    """A file could not be fetched from its address."""


class _Absent(Unreachable):
    """The server answers, but does not have the file."""


@dataclass(frozen=True)
class Downloaded:
    """The folder of a data set, and the names of the files that were fetched and that were intact already.

    `without_sum` are the files whose SHA-256 is not known: they were only checked against the table.
    """

    folder: Path
    fetched: tuple[str, ...]
    kept: tuple[str, ...]
    without_sum: tuple[str, ...]


@dataclass(frozen=True)
class _Unit:
    """Files that can only be checked together, and their check in a folder, which raises BadData."""

    files: tuple[str, ...]
    check: Callable[[Path], object]

    def is_intact(self, folder: Path) -> bool:
        try:
            self.check(folder)
        except BadData:
            return False
        return True

    def check_fetched(self, scratch: Path, source: str) -> None:
        try:
            self.check(scratch)
        except BadData as error:  # users know the source, not the scratch folder
            raise BadData(str(error).replace(str(scratch), source.rstrip("/"))) from error


def download(
    entry: Published,
    *,
    into: str | Path | None = None,
    source: str = "",
    progress: Callable[[str], None] = lambda line: None,
) -> Downloaded:
    """Fetch the files of a data set into the folder `into` of data sets, by default the user's cache.

    `source` is a folder or an address (http, https, file) that holds the files or their archive; by default the
    published one. Intact files are not fetched again. Raises BadData for files that are not the published ones,
    `Unreachable` for files that cannot be fetched; in neither case a file that failed its check gets its name.
    """
    base = _base(source or entry.base, entry.name)
    root = cache_folder() if into is None else Path(into).expanduser()
    folder = (root / entry.folder / entry.files[0][0]).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [PurePosixPath(file).name for file, _ in entry.files]
        if entry.plain:
            fetched = _fetch_archived(entry, folder, base, progress)
        else:
            fetched = [
                file
                for unit in _units(entry, folder)
                if not unit.is_intact(folder)
                for file in _fetch(unit, folder, base, progress)
            ]
    except OSError as error:
        raise PosterityError(
            f"{folder}: cannot be written: {error.strerror or error}. Make room there, or choose another folder."
        ) from error
    finally:
        # Readers take the first folder of this name that they find, so no empty one may stay.
        with contextlib.suppress(OSError):  # not empty
            empty = folder
            while empty != root:
                empty.rmdir()
                empty = empty.parent
    kept = tuple(name for name in names if not {name, name.removesuffix(".xz")} & set(fetched))
    without = tuple(PurePosixPath(file).name for file, wanted in entry.files if wanted is None)
    return Downloaded(folder, tuple(fetched), kept, without)


def _units(entry: Published, folder: Path) -> Iterator[_Unit]:
    for file, wanted in entry.files:
        if wanted is not None:
            yield _file(entry, PurePosixPath(file).name, wanted)
    if entry.folder == "uci":
        known = uci._REGRESSION[entry.name]
        columns = len(content(folder / "data.txt").split(b"\n", 1)[0].split())  # the file is intact by now
        files = ("index_features.txt", "index_target.txt")
        yield _Unit(files, partial(uci._columns, known=known, count=columns))
        for split in range(known.splits):
            files = (f"index_train_{split}.txt", f"index_test_{split}.txt")
            yield _Unit(files, partial(uci._split, known=known, split=split))


def _file(entry: Published, name: str, wanted: str) -> _Unit:
    """Return the unit of a single file, which is checked by its SHA-256."""

    def check(folder: Path) -> None:
        data = images._unpacked(folder / name) if entry.unpacked else content(folder / name)
        check_sum(data, wanted, folder / name, entry.name, "of the uncompressed data" if entry.unpacked else "")

    return _Unit((name,), check)


def _fetch(unit: _Unit, folder: Path, base: str, progress: Callable[[str], None]) -> tuple[str, ...]:
    with _scratch(folder) as scratch:
        for name in unit.files:
            _save(_join(base, name), scratch / name, progress)
        unit.check_fetched(scratch, base)
        for name in unit.files:
            os.replace(scratch / name, folder / name)
    disk.sync(folder)
    return unit.files


def _fetch_archived(entry: Published, folder: Path, base: str, progress: Callable[[str], None]) -> list[str]:
    """Fetch the missing files from the published archive; from a source without it, fetch them one by one."""
    read = {packed: entry.stored_file(folder, packed) for packed, _ in entry.files}
    lacking = [
        packed
        for packed, (file, wanted) in read.items()
        if wanted is None or not is_sound(folder / file, wanted, entry.unpacked)
    ]
    if not lacking:
        return []
    archive = base if base.endswith(".tar.gz") else _join(base, PurePosixPath(entry.base).name)
    with _scratch(folder) as scratch:
        try:
            _save(archive, scratch / "archive", progress)
        except _Absent:
            if archive == base:
                raise
            return [_fetch_either(entry, packed, folder, base, progress) for packed in lacking]
        names = [packed.removesuffix(".xz") for packed in lacking]
        _unpack(scratch / "archive", archive, scratch, names)
        for name in names:
            _file(entry, name, dict(entry.plain)[name]).check_fetched(scratch, archive)
        for packed, name in zip(lacking, names, strict=True):
            os.replace(scratch / name, folder / name)
            (folder / packed).unlink(missing_ok=True)  # damaged, and would be read before the plain file
    disk.sync(folder)
    return names


def _fetch_either(entry: Published, packed: str, folder: Path, base: str, progress: Callable[[str], None]) -> str:
    """Fetch the packed file, or the plain one where only that exists; returns the name of the fetched file."""
    plain = packed.removesuffix(".xz")
    try:
        _fetch(_file(entry, packed, dict(entry.files)[packed] or ""), folder, base, progress)
    except _Absent:
        _fetch(_file(entry, plain, dict(entry.plain)[plain]), folder, base, progress)
        (folder / packed).unlink(missing_ok=True)  # as above
        return plain
    return packed


def _unpack(path: Path, source: str, into: Path, names: list[str]) -> None:
    """Extract the members with these names from a tar archive into a folder, whatever their paths in the archive."""
    lacking = set(names)
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                safe = tarfile.data_filter(member, str(into))  # refuses paths and links that lead out of the folder
                name = PurePosixPath(safe.name).name
                stream = archive.extractfile(safe) if name in lacking and safe.isfile() else None
                if stream is None:
                    continue
                if safe.size > _LIMIT:
                    raise BadData(f"{source}: {name} must have at most {_LIMIT} bytes. Got {safe.size}.")
                with stream:
                    disk.write(into / name, iter(partial(stream.read, _CHUNK), b""))
                lacking.remove(name)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadData(f"{source}: not a sound tar.gz archive: {error}. Fetch it again, or from elsewhere.") from error
    if lacking:
        raise BadData(f"{source}: it must hold {', '.join(names)}. It lacks {', '.join(sorted(lacking))}.")


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Make a folder for unchecked files on the same disk, and remove it at the end."""
    scratch = disk.temporary(folder)
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _save(address: str, path: Path, progress: Callable[[str], None]) -> None:
    with contextlib.closing(_chunks(address, progress)) as chunks:
        disk.write(path, chunks)


def _chunks(address: str, progress: Callable[[str], None]) -> Generator[bytes, None, None]:
    """Yield the bytes at an address; raises BadData unless their number is as announced."""
    got, reported = 0, 0
    try:
        with _opened(address) as (read, size):
            progress(f"{address}{'' if size is None else f' ({size:,} bytes)'}")
            while chunk := read(_CHUNK):
                got += len(chunk)
                if got > _LIMIT:
                    raise BadData(f"{address}: it must have at most {_LIMIT} bytes. Got more.")
                if got - reported >= _STEP:
                    reported = got
                    progress(f"{address}: {got:,} bytes so far")
                yield chunk
    except urllib.error.HTTPError as error:
        error.close()
        kind = _Absent if error.code in (404, 410) else Unreachable
        raise kind(_failure(address, f"the server answered {error.code} {error.reason}")) from error
    except FileNotFoundError as error:
        raise _Absent(_failure(address, "there is no such file")) from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            raise Unreachable(_failure(address, f"no answer within {TIMEOUT:g} seconds")) from error
        text = (reason.strerror if isinstance(reason, OSError) else None) or str(reason) or type(reason).__name__
        raise Unreachable(_failure(address, text)) from error
    if size is not None and got != size:
        raise BadData(f"{address}: it must have {size} bytes. Got {got}: the transfer ended too early. Try again.")


def _failure(address: str, reason: str) -> str:
    remedy = "Check the connection and try again, or give" if _is_web(address) else "Give"
    return f"{address}: cannot be fetched: {reason}. {remedy} another folder or address that holds the file (--from)."


@contextlib.contextmanager
def _opened(address: str) -> Iterator[tuple[Callable[[int], bytes], int | None]]:
    if _is_web(address):
        request = urllib.request.Request(address, headers={"User-Agent": "posterity"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            yield response.read, response.length
    else:
        with open(address, "rb") as file:
            yield file.read, os.fstat(file.fileno()).st_size


def _is_web(address: str) -> bool:
    return address.lower().startswith(("http://", "https://"))


def _join(base: str, name: str) -> str:
    return f"{base.rstrip('/')}/{name}" if _is_web(base) else str(Path(base) / name)


def _base(source: str, name: str) -> str:
    """Return the source of the files: a web address unchanged, or a path."""
    if not source:
        raise ValueError(
            f"download: no address is known that has the files of '{name}' as they are read. "
            "Give a folder or an address that holds them (--from)."
        )
    if _is_web(source):
        return source
    if source.lower().startswith("file://"):
        parts = urllib.parse.urlsplit(source)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"download: a file address must name no host, as file:///folder. Got {shown(source)}.")
        source = urllib.request.url2pathname(parts.path)
    elif "://" in source:
        raise ValueError(f"download: the address must begin with http://, https:// or file://. Got {shown(source)}.")
    path = Path(source).expanduser()
    if not path.exists():
        raise ValueError(f"download: the folder to take files from must exist. Got {shown(source)}.")
    return str(path)
