"""What has to be true around the recording of a CUDA graph."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_read() -> Iterator[None]:
    """An error where work waits for the device to read a number: a recording could not, and would end in pieces."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it does not see every case
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """The work inside `with` goes into the graph; an error leaves torch as it was."""
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    except BaseException:
        # A recording that failed leaves torch's own generator waiting for the end of it: make one that succeeds.
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros((), device="cuda")
        raise
