"""Durable writes, folder locks and temporary names, from which atomic changes are built."""

import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from posterity.errors import BadFolder, PosterityError
from posterity.processes import writes

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not a POSIX platform: writers there must not overlap
    fcntl = None

_PIECE = 1 << 24  # bytes read at a time
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}")
_DRAFT = re.compile(r"\.draft-[0-9a-f]{16}")
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}  # file systems that keep names in order by themselves
_logger = logging.getLogger(__name__)


def temporary(folder: Path) -> Path:
    """Return a fresh path in `folder` that `is_temporary` recognises."""
    return folder / f".tmp-{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Return whether `temporary` made this name."""
    return _TEMPORARY.fullmatch(name) is not None


def write(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a new file piece by piece, and wait until its bytes are on the disk."""
    with open(path, "xb") as file:
        _fill(file, pieces)


def _fill(file: BinaryIO, pieces: Iterable[bytes]) -> None:
    file.writelines(pieces)
    file.flush()
    os.fsync(file.fileno())


def read(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces."""
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def sync(folder: Path) -> None:
    """Wait until the file names in `folder` are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # the platform cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its content; failures are ignored."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)


def reason(error: OSError, path: Path, needed: int) -> str:
    """Return why `path` could not be written; on a full disk also how many bytes that needs, and how many are free."""
    text = f"{error.strerror or error}" + (f" ({str(error.filename)!r})" if error.filename else "")
    if error.errno not in _FULL:
        return text
    with suppress(OSError):
        free = shutil.disk_usage(next(parent for parent in (path, *path.absolute().parents) if parent.exists())).free
        return f"{text}: it needs {needed:,} bytes and {free:,} are free"
    return f"{text}: it needs {needed:,} bytes"


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: a reader sees the old file or the new one. Makes the folder where needed.

    Drafts that killed processes left in the folder are removed. Of several processes that share a run the first writes.
    """
    if not writes():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.parent / f".draft-{secrets.token_hex(8)}"
        try:
            with open(draft, "xb") as file:
                _lock(file)
                _fill(file, [data])
                if fcntl is not None:  # elsewhere a file that is open cannot be renamed
                    os.replace(draft, path)
            if fcntl is None:
                os.replace(draft, path)
        finally:
            remove(draft)
        _remove_stale_drafts(path.parent)
    except OSError as error:
        why = reason(error, path, len(data)) if error.errno in _FULL else error.strerror or error
        raise PosterityError(f"Cannot write '{path}': {why}. Give another path.") from error


def _remove_stale_drafts(folder: Path) -> None:
    """Delete the drafts in a folder whose writers have died."""
    for path in folder.glob(".draft-*"):
        with suppress(OSError), open(path, "rb") as file:
            if _DRAFT.fullmatch(path.name) and _lock(file):
                remove(path)


def _lock(file: BinaryIO) -> bool:
    """Lock an open file until it is closed; returns whether that succeeded."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`. Waits for another holder; raises BadFolder after `seconds`.

    The operating system frees the lock of a process that dies, so a stale lock file blocks nobody.
    """
    if fcntl is None:
        yield
        return
    try:
        handle, deadline = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), time.monotonic() + seconds
    except OSError as error:
        raise BadFolder(
            f"Cannot write run folder {str(path.parent)!r}: {error.strerror or error}. Check permissions, "
            "or save to another folder."
        ) from error
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BadFolder(
                        f"Run folder {str(path.parent)!r} is being written by another process. "
                        "Wait until it has finished, or save to another folder."
                    ) from None
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                _logger.warning("No file locks at %s (%s): only one process may write there.", path, error.strerror)
                break
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone would not free it while a forked child lives
    finally:
        os.close(handle)
