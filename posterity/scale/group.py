"""The processes of torch.distributed as the processes of a run."""

import hashlib
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from posterity.errors import BadData, BadFolder, PosterityError, positive, positive_whole
from posterity.processes import Group, LostProcess, ended_together, using
from posterity.scale.sums import Node, bounds, branch_sum, branches

logger = logging.getLogger("posterity")

BLOCKS = 8  # blocks of the rows of a batch, for up to eight processes
SLICED = 1 << 16  # bytes from which each process adds up a slice of a sum, and all exchange the slices
AGREE = 3.0  # seconds in which processes that all have an error learn of each other
_AGAIN = (
    "Start all of them again: a run with a checkpoint resumes from its last stored step, with any number of processes."
)
_LOST = (
    "Another process of this run has ended or does not answer ({reason}), so this one, {rank} of {size}, ends as well."
)
_STOPPED = "Process {rank} of this run stopped, and with it the others: {error}."
_JOINS = itertools.count()  # of this process
_ERRORS = {"ok": None, **{kind.__name__: kind for kind in (PosterityError, BadData, BadFolder)}}


class TorchGroup(Group):
    """The processes of a group of torch.distributed (None: the default one)."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, blocks: int = BLOCKS, *, reads_together: bool = False
    ) -> None:
        positive_whole("scale.processes: blocks", blocks)
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "scale.processes needs a process group. Call torch.distributed.init_process_group() first, or use "
                "scale.join() under torchrun."
            )
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("scale.processes: this process is not in the group. Call infer in its processes only.")
        self.blocks = 1 << (max(blocks, self.size) - 1).bit_length()
        self.reads_together = reads_together
        on_cuda = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        given: Any = group or dist.group.WORLD
        self._group: Any = given
        self._branches = [branches(rank, self.size, self.blocks) for rank in range(self.size)]
        self._most = max(map(len, self._branches))
        self._calls = self._errors = 0  # between the processes, and that all of them had
        self._told: BaseException | None = None
        self._broken = ""  # why they can no longer go on together
        self._store = _get_default_store()
        self._store = PrefixStore(self.from_first(lambda: os.urandom(8)).hex(), self._store)
        if dist.get_backend(group) == "gloo":  # connections of their own, which can be closed
            timeout = given._get_backend(self._device).options._timeout
            self._group = dist.ProcessGroupGloo(PrefixStore("gloo", self._store), self.rank, self.size, timeout)
        self.refuse_differing("number of blocks", str(self.blocks))

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Turn the error of a call to another process into one that says what to do."""
        if self._broken:
            raise LostProcess(self._broken)
        self._calls += 1
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise LostProcess(f"{self._reason(error)} {_AGAIN}") from error

    def _reason(self, error: Exception) -> str:
        """Return why a call to the other processes failed: the error of one of them, or that of the call."""
        with suppress(RuntimeError, ValueError):  # the store may be gone
            for rank in range(self.size):
                if self._store.check([self._place(rank)]):
                    _, lost, text = self._said(rank)
                    return text if lost else _STOPPED.format(rank=rank, error=text.removesuffix("."))
        first = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).splitlines()  # without the line of gloo's source
        reason = first[0].partition(". ")[0][:120] if first else type(error).__name__
        return _LOST.format(reason=reason, rank=self.rank, size=self.size)

    def _place(self, rank: int) -> str:
        """The name in the store under which a process tells its error."""
        return f"{self._errors} {rank}"

    def _said(self, rank: int) -> tuple[int, bool, str]:
        """Return the calls of a process before its error, whether it lost another process, and its message."""
        calls, lost, text = json.loads(self._store.get(self._place(rank)))
        return calls, lost, text

    def failed(self, error: BaseException) -> None:
        if error is self._told:
            return
        self._told, lost = error, isinstance(error, LostProcess)
        text = str(error).removesuffix(f" {_AGAIN}") if lost else f"{type(error).__name__}: {error}".rstrip(": ")
        others = range(1 if lost else self.size)
        each: list[tuple[int, bool, str]] = []
        deadline = time.monotonic() + AGREE
        with suppress(RuntimeError, ValueError):  # the store may be gone
            self._store.set(self._place(self.rank), json.dumps((self._calls, lost, text)))
            while not (told := self._store.check([self._place(rank) for rank in others])):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            each = [self._said(rank) for rank in others] if told else []
        # The first process says its errors; this one, which may have another kind of error, need not repeat the words.
        words = [said.partition(": ")[2] for said in (text, each[0][2] if each else "")]
        error.said_by_first = self.rank > 0 and bool(each) and (lost or words[0] == words[1])  # type: ignore[attr-defined]
        if not lost and len({calls for calls, _, _ in each}) == 1:
            self._errors += 1
        else:
            reason = text if lost else _STOPPED.format(rank=self.rank, error=text.removesuffix("."))
            self._broken = self._broken or f"{reason} {_AGAIN}"
            self.close()

    def close(self) -> None:
        """Close the connections to the other processes, so that those which wait for this one end."""
        self._broken = self._broken or "The processes no longer share runs: their context was left. Enter it again."
        self._group = None  # the last reference: gloo closes its sockets

    def total(self, part: Callable[[int, int], Sequence[Tensor]], rows: int) -> list[Tensor]:
        def computed(low: int, high: int) -> list[Tensor]:
            return [tensor.detach() for tensor in part(low, high)]

        own = [bounds(rows, self.blocks, block) for block in range(*bounds(self.blocks, self.size, self.rank))]
        start = next((span for span in own if span[0] < span[1]), (0, 1))
        first = computed(*start)  # which has the shapes of all blocks

        def leaf(node: Node) -> list[Tensor] | None:
            if node[1] - node[0] > 1:
                return None
            span = bounds(rows, self.blocks, node[0])
            if span == start:
                return first
            return computed(*span) if span[0] < span[1] else [torch.zeros_like(tensor) for tensor in first]

        return self._exchanged([branch_sum(node, leaf) for node in self._branches[self.rank]])

    def _exchanged(self, own: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sums over all branches, from the tensors of each branch of this process."""
        totals: dict[int, Tensor] = {}
        shapes = own[0]
        for dtype in dict.fromkeys(tensor.dtype for tensor in shapes):
            places = [index for index, tensor in enumerate(shapes) if tensor.dtype == dtype]
            flat = [torch.cat([branch[index].reshape(-1) for index in places]) for branch in own]
            summed = flat[0] if self.size == 1 else self._summed(flat)
            sizes = [shapes[index].numel() for index in places]
            for index, piece in zip(places, torch.split(summed, sizes), strict=True):
                totals[index] = piece.view(shapes[index].shape)
        return [totals[index] for index in range(len(shapes))]

    def _summed(self, own: list[Tensor]) -> Tensor:
        """Return the sum of the flat branches (L,) of all processes, with the same bits in each."""
        length, device = own[0].numel(), own[0].device
        sliced = length * own[0].itemsize >= SLICED
        width = -(-length // self.size) if sliced else length
        sent = own[0].new_zeros(self._most, self.size * width if sliced else length, device=self._device)
        for row, branch in zip(sent, own, strict=False):
            row[:length] = branch
        if not sliced:
            return self._added(self.gathered(sent)).to(device)
        # Slices: (branches, processes, width) -> a slice of each branch for each process.
        sent = sent.view(self._most, self.size, width).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)  # (processes, branches, width)
        with self._talking():
            self._group.alltoall_base(received, sent, [], []).wait()
        mine = self._added(list(received))
        return torch.cat(self.gathered(mine))[:length].to(device)

    def _added(self, sent: list[Tensor]) -> Tensor:
        """Return the sum of the branches of all processes; `sent[r]` (branches, L) begins with those of process r."""
        known: dict[Node, list[Tensor]] = {}
        for nodes, rows in zip(self._branches, sent, strict=True):
            known.update((node, [row]) for node, row in zip(nodes, rows, strict=False))
        return branch_sum((0, self.blocks), known.get)[0]

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, of one shape, in their order, on the device of the group."""
        own = own.to(self._device)
        received = [torch.empty_like(own) for _ in range(self.size)]
        with self._talking():
            self._group.allgather([received], [own]).wait()
        return received

    def from_first(self, work: Callable[[], bytes]) -> bytes:
        outcome, data, failure = "ok", b"", None
        if self.rank == 0:
            try:
                with using(None):
                    data = work()
            except Exception as error:
                kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS]
                failure, outcome, data = error, kinds[0] if kinds else "PosterityError", str(error).encode()
        names = list(_ERRORS)
        with self._talking():
            header = torch.tensor([len(data), names.index(outcome)], device=self._device)
            self._broadcast(header)
            content = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            )
            content = (
                content.to(self._device) if self.rank == 0 else header.new_empty(int(header[0]), dtype=torch.uint8)
            )
            if content.numel():
                self._broadcast(content)
        if failure is not None:
            raise failure
        received = content.cpu().numpy().tobytes()
        if (kind := _ERRORS[names[int(header[1])]]) is not None:
            raise kind(received.decode())
        return received

    def _broadcast(self, tensor: Tensor) -> None:
        source = dist.BroadcastOptions()
        source.rootRank = 0
        self._group.broadcast([tensor], source).wait()

    def any(self, *flags: bool) -> tuple[bool, ...]:
        if self.size == 1:
            return flags
        each = torch.stack(self.gathered(torch.tensor(flags, dtype=torch.uint8, device=self._device)))
        return tuple(each.any(0).tolist())

    def refuse_differing(self, what: str, value: str, remedy: str = "") -> None:
        digests = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in (what, value)]
        own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).to(self._device)
        each = [tuple(sent.view(2, -1).tolist()) for sent in self.gathered(own)]
        others = [rank for rank, sent in enumerate(each) if sent[0] != each[0][0]]
        if others:
            raise PosterityError(
                f"The processes that share a run must make the same calls. Process {others[0]} makes another one than "
                "process 0, or has ended its part: let none call infer or gathered alone."
            )
        others = [rank for rank, sent in enumerate(each) if sent[1] != each[0][1]]
        if others:
            remedy = remedy or "start all of them with the same arguments, seed and versions, on machines of one kind"
            raise PosterityError(
                f"The processes that share a run must agree. Got another {what} in process {others[0]} than in process "
                f"0: {remedy}."
            )


@contextmanager
def processes(
    group: dist.ProcessGroup | None = None, *, blocks: int = BLOCKS, reads_together: bool = False
) -> Iterator[Group]:
    """Share the runs inside the context among the processes of a group of torch.distributed (None: the default one).

    Each process makes the same calls with the same arguments, and gets the same results. Process 0 alone logs, shows
    progress and writes folders. `blocks` is a power of two, raised to the number of processes where that is larger:
    the parts in which the rows of a batch are added up. Results have the same bits for any number of processes up to
    it; fewer blocks are larger, and faster. With `reads_together` all processes also make every call that reads a run
    folder, which process 0 reads for all; without, this holds for checkpoints alone, and `load` reads in each process.

    >>> import os, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with processes() as own:
    ...     own.rank, own.size, own.blocks
    (0, 1, 8)
    >>> dist.destroy_process_group()
    """
    own = TorchGroup(group, blocks, reads_together=reads_together)
    level = logger.level
    if own.rank:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with using(own), ended_together():
            yield own
            with suppress(LostProcess):  # the work is done, whoever else has ended
                own.refuse_differing("end of the shared runs", "")  # nobody leaves while another still works
    finally:
        logger.setLevel(level)
        own.close()


@contextmanager
def join(
    *, backend: str | None = None, blocks: int = BLOCKS, timeout: float = 600.0, reads_together: bool = False
) -> Iterator[Group]:
    """Join the processes that torchrun has started, share the runs inside the context with them, and leave.

    `backend` None is nccl where each process of a machine has a GPU of its own, which becomes the current one, else
    gloo. After `timeout` seconds in which another process does not answer, a run ends. See `processes`.
    """
    positive("scale.join: timeout", timeout)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"scale.join needs the variables that torchrun sets. {missing[0]} is not set. Start the program by "
            "torchrun --nproc-per-node 2 program.py."
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if backend is None:
        fits = torch.cuda.is_available() and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
        backend = "nccl" if fits and dist.is_nccl_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(local)
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    store = PrefixStore(f"posterity {next(_JOINS)}", store)  # without the addresses of an earlier join
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        with processes(blocks=blocks, reads_together=reads_together) as own:
            yield own
    finally:
        dist.destroy_process_group()
