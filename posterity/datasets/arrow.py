"""Arrow, which is imported at first use: `import posterity` does without it."""

from typing import Any


def compute() -> Any:
    """Return the module of functions over columns, which pyarrow makes at import, unseen by type checkers."""
    import pyarrow.compute

    return pyarrow.compute


def pool() -> Any:
    """Return the allocator that needs least time and memory for long arrays, where Arrow has it."""
    import pyarrow as pa

    try:
        return pa.jemalloc_memory_pool()
    except NotImplementedError:
        return pa.default_memory_pool()


def release() -> None:
    """Return the memory that Arrow's usual allocator holds for this thread, unused, to the system."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
