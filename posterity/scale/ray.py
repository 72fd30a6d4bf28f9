"""Work on a Ray cluster: the connection, sending of work, and answers as they arrive."""

import io
import logging
import os
import pickle
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from posterity.errors import PosterityError, shown
from posterity.scale.parcels import Lost, Setting, done, error_line, opened, unsent

LOCAL = "local"  # Ray's word for a new cluster on this machine
PATIENCE = 5.0  # seconds in which an address answers
FIRST_DELAY, LONGEST_DELAY = 1.0, 10.0  # seconds before work is begun again, which grow by 3
MOST = 256  # pieces of work on their way at once, so that they need not all be in memory
SHARED = 1 << 16  # bytes from which a tensor goes to the object store, once for all that use it
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is told to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a FutureWarning: work without a GPU still sees those there
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # its reports of dead workers, which go to standard output
}

_logger = logging.getLogger("posterity")


@dataclass(frozen=True)
class Demand:
    """Requirements of each piece of work: CPUs, GPUs, the number of retries, and the most that run at once."""

    cpus: float
    gpus: float
    retries: int
    workers: int | None
    setting: Setting


def connect(address: str | None, cpus: float) -> None:
    """Connect this process to a cluster, unless it is connected to one.

    None is the address in RAY_ADDRESS, or else a new cluster on this machine with so many CPUs, which ends with this
    process. Raises PosterityError where ray is missing or nobody answers.
    """
    ray = _ray()
    if ray.is_initialized():
        return
    wanted = address or os.environ.get("RAY_ADDRESS") or LOCAL
    about: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    if wanted == LOCAL:
        about |= {"num_cpus": cpus, "include_dashboard": False}
    try:
        if ":" in wanted:
            parts = urlsplit(wanted if "://" in wanted else f"//{wanted}")
            socket.create_connection((parts.hostname or "", parts.port or 10001), PATIENCE).close()
        with sigterm_kept():
            ray.init(wanted, **about)
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise PosterityError(
            f"No Ray cluster answers at {shown(wanted)} ({reason}). Start one with `ray start --head`, check the "
            "address, or leave it out for a cluster on this machine."
        ) from error


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM: Ray's own would end the process before anything is stored."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def check_room(demand: Demand) -> None:
    """Raise PosterityError unless some node of the cluster has what a piece of work needs."""
    nodes = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= demand.cpus and node.get("GPU", 0) >= demand.gpus for node in nodes):
        has = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise PosterityError(
            f"Ray: a task needs a node with {demand.cpus:g} CPUs and {demand.gpus:g} GPUs. The nodes have {has}. "
            "Ask for less, or start such a node first."
        )


def each(work: Mapping[str, Callable[[], Any]], demand: Demand) -> Iterator[tuple[str, Any]]:
    """Do named work on the cluster; yields each result, or a Lost, as soon as it is there, and raises errors of it.

    Work whose worker or node dies is begun again. What is on its way when this ends early is cancelled.
    """
    ray = _ray()
    about = pickle.dumps((demand.setting, _versions()))

    def begin(paths: list[str], about: bytes, parcel: bytes, refs: list[Any]) -> bytes:
        """Find files where the sender finds them, as spawned processes do; shipped by value, as it runs before that."""
        import sys

        sys.path += [path for path in paths if path not in sys.path]
        from posterity.scale.ray import work_on

        return work_on(about, parcel, refs)

    # Retries are ours: Ray's own come at once, all of them before it knows that the node is dead.
    remote = ray.remote(begin).options(num_cpus=demand.cpus, num_gpus=demand.gpus, max_retries=0)
    store, left, most = _Store(), iter(work.items()), min(demand.workers or MOST, MOST)
    pending: dict[Any, _Piece] = {}
    again: list[tuple[float, _Piece]] = []  # with the time from which it is begun again
    try:
        while True:
            begun = [piece for due, piece in again if due <= time.monotonic()]
            again = [(due, piece) for due, piece in again if piece not in begun]
            more = list(islice(left, most - len(pending) - len(begun) - len(again)))
            for name, item in more:
                try:
                    begun.append(_Piece(name, *store.pack(item)))
                except Exception as error:
                    yield name, unsent(error)
            for piece in begun:
                pending[remote.remote(sys.path, about, piece.parcel, store.refs(piece.keys))] = piece
            if not pending:
                if not again and not more:
                    return
                time.sleep(0.1)
                continue
            for ref in ray.wait(list(pending), num_returns=1, timeout=0.1 if again else PATIENCE)[0]:
                piece = pending.pop(ref)
                result = _result(ref, piece)
                if isinstance(result, _Died) and piece.attempt < demand.retries:
                    _logger.warning("%s: %s It is begun again.", piece.name, result)
                    due = time.monotonic() + min(FIRST_DELAY * 3**piece.attempt, LONGEST_DELAY)
                    again.append((due, replace(piece, attempt=piece.attempt + 1)))
                else:
                    store.release(piece.keys)
                    yield piece.name, result
    finally:
        for ref in pending:
            with suppress(Exception):  # the cluster may be gone
                ray.cancel(ref, force=True)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A piece of work as sent, and the number of its failed attempts."""

    name: str
    parcel: bytes
    keys: "list[_Key]"
    attempt: int = 0


class _Died(Lost):
    """Work whose worker or node has died."""


def _ray() -> Any:
    """Return the module ray, without its reports and warnings."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise PosterityError("Ray needs ray. Install it with: pip install 'posterity[ray]'.") from error
    logger = logging.getLogger("ray")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)
    return ray


def _result(ref: Any, piece: _Piece) -> Any:
    """Return the result of finished work, or what became of it."""
    ray = _ray()
    try:
        answer = ray.get(ref)
    except ray.exceptions.RayTaskError as error:  # of the frame around the work: the work's own errors come as answers
        raise PosterityError(
            f"Ray: a node cannot begin the work ({error_line(error.cause)}). Each needs Python "
            f"{platform.python_version()}, posterity and torch {' and '.join(_versions())}, as here."
        ) from error
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        times = f", {piece.attempt + 1} times" if piece.attempt else ""
        return _Died(f"its worker or node died{times} ({reason}). Is there enough memory?")
    return opened(answer)


def _versions() -> tuple[str, str]:
    return sys.modules["posterity"].__version__, torch.__version__  # an import would go up


def work_on(about: bytes, parcel: bytes, refs: list[Any]) -> bytes:
    """Do a parcel of work in a worker, which is set up as `about` says, and return the answer."""
    import ray
    from ray import cloudpickle

    setting, versions = pickle.loads(about)
    if versions != _versions():
        raise RuntimeError(f"it has posterity and torch {' and '.join(_versions())}")
    setting.take()
    return done(parcel, partial(_loads, [pickle.loads(item) for item in ray.get(refs)]), cloudpickle.dumps)


def _loads(tensors: list[Tensor], parcel: bytes) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, index: int) -> Tensor:
            return tensors[index]

    return Unpickler(io.BytesIO(parcel)).load()


_Key = tuple[Any, ...]


@dataclass
class _Store:
    """Large tensors in Ray's object store: one copy for all pieces of work on their way that use it."""

    kept: dict[_Key, tuple[Tensor, Any]] = field(default_factory=dict)
    users: dict[_Key, int] = field(default_factory=dict)

    def pack(self, item: Any) -> tuple[bytes, list[_Key]]:
        """Return the pickled item, and the keys of the tensors that it leaves out, in the order of their numbers.

        Classes of a script are pickled by value, since no file of a worker has them.
        """
        from ray import cloudpickle

        base: Any = cloudpickle.CloudPickler
        found: dict[_Key, int] = {}

        def number(value: Any) -> int | None:
            key = _key(value)
            if key is None:
                return None
            if key not in self.kept:
                self.kept[key] = value, _ray().put(pickle.dumps(value))
            return found.setdefault(key, len(found))

        class Pickler(base):  # type: ignore[misc]
            def persistent_id(self, value: Any) -> int | None:
                return number(value)

        file = io.BytesIO()
        try:
            Pickler(file).dump(item)
        except Exception:
            for key in found.keys() - self.users.keys():  # stored for this item alone
                del self.kept[key]
            raise
        for key in found:
            self.users[key] = self.users.get(key, 0) + 1
        return file.getvalue(), list(found)

    def refs(self, keys: list[_Key]) -> list[Any]:
        """Return Ray's references to these tensors."""
        return [self.kept[key][1] for key in keys]

    def release(self, keys: list[_Key]) -> None:
        """Forget tensors that no unfinished piece of work uses."""
        for key in keys:
            self.users[key] -= 1
            if not self.users[key]:
                del self.users[key], self.kept[key]


def _key(value: Any) -> _Key | None:
    """Return a key of the contents of a large plain tensor; None for anything else."""
    if type(value) is not Tensor or value.requires_grad or value.layout is not torch.strided:
        return None
    if value.is_inference() or not value.is_contiguous() or value.nbytes < SHARED:
        return None
    if value.untyped_storage().nbytes() != value.nbytes:  # a view would take its whole storage along
        return None
    return value.data_ptr(), value._version, value.shape, value.dtype, value.device
