"""The processes that share the work of one run: what the library asks of them, and which ones are active here.

`posterity.scale` makes them. Nothing else imports torch.distributed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class LostProcess(Exception):
    """Another process of the run has ended, or does not answer; the command line ends with exit code 1."""

    exit_code = 1


class Group(ABC):
    """Processes that run the same calls on the same rows, and share the work on each batch.

    All have the same state after each step, so that each decides alike. Process 0 alone prints and writes. Rows go in
    `blocks`, a power of two, whose bounds depend on the number of rows alone: sums over rows have the same bits for any
    number of processes up to `blocks`.
    """

    rank: int
    size: int
    blocks: int
    reads_together: bool = False
    """Whether all processes make every call that reads a folder, which process 0 then reads for all."""

    @abstractmethod
    def total(self, part: "Callable[[int, int], Sequence[Tensor]]", rows: int) -> "list[Tensor]":
        """Return the sum of the tensors `part(low, high)` over blocks of `rows` rows, in a fixed order.

        Each process computes its own blocks, in their order. The tensors of all blocks have the same shapes and dtypes.
        """

    @abstractmethod
    def from_first(self, work: Callable[[], bytes]) -> bytes:
        """Return what `work` returns in process 0, which alone calls it, for itself; its error is raised in each."""

    @abstractmethod
    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set in some process."""

    @abstractmethod
    def failed(self, error: BaseException) -> None:
        """Tell the other processes of an error that ends their common work here.

        Where all have one, they can go on together; else every call between them raises `LostProcess`.
        """

    @abstractmethod
    def refuse_differing(self, what: str, value: str, remedy: str = "") -> None:
        """Raise a PosterityError in each process, with a `remedy`, unless `value` is the same string in all."""

    def by_first(self, work: Callable[[], T], encode: Callable[[T], bytes], decode: Callable[[bytes], T]) -> T:
        """Return the result of `work`, which process 0 alone calls; the others decode its bytes."""
        own: list[T] = []

        def encoded() -> bytes:
            own.append(work())
            return encode(own[0])

        data = self.from_first(encoded)
        return own[0] if own else decode(data)


_ACTIVE: ContextVar[Group | None] = ContextVar("processes", default=None)


def active() -> Group | None:
    """Return the processes that share the runs of this thread; None where it runs alone."""
    return _ACTIVE.get()


@contextmanager
def using(processes: Group | None) -> Iterator[Group | None]:
    """Share the runs inside the context with these processes; None: run alone."""
    token = _ACTIVE.set(processes)
    try:
        yield processes
    finally:
        _ACTIVE.reset(token)


@contextmanager
def ended_together() -> Iterator[None]:
    """End the work inside the context in all active processes where it ends by an error in one of them."""
    processes = _ACTIVE.get()
    try:
        yield
    except BaseException as error:
        if processes is not None:
            processes.failed(error)
        raise


def writes() -> bool:
    """Return whether this process prints and writes: it runs alone, or is the first of those that share the run."""
    processes = _ACTIVE.get()
    return processes is None or processes.rank == 0


def done_by_first(work: Callable[[], object]) -> None:
    """Call `work` in this process if it runs alone, else in the first process alone, for which the others wait."""

    def silent() -> bytes:
        work()
        return b""

    processes = _ACTIVE.get()
    if processes is None:
        work()
    else:
        processes.from_first(silent)
