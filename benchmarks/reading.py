"""How long does a table take from its file to tensors, and how much memory, against pandas?

CPU seconds of one thread: a million rows of six numbers, 300 rows of 5,000 columns, and fields of 120 kB, refused.
"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from benchmarks.memory import MEBIBYTE, peak_bytes
from posterity.datasets import Preprocessing, read_table
from posterity.errors import BadData

SHAPES = {"1,000,000 rows of 6 numbers": (1_000_000, 6), "300 rows of 5,000 numbers": (300, 5000)}
LENGTH = 120_000
FIELDS = {"digits and a letter": "1" * LENGTH + "x", "digits": "1" * LENGTH, "letters": "a" * LENGTH}


def by_pandas(path: Path) -> float:
    """Read a file by pandas, and return the mean of its first column."""
    import pandas as pd

    return float(pd.read_csv(path).iloc[:, 0].mean())


def by_posterity(path: Path) -> float:
    """Read a file, infer kinds, encode all rows as tensors, and return the mean of the first column."""
    table = read_table(path, "y")
    preprocessing = Preprocessing.fit(table)
    preprocessing.transform(table)
    return preprocessing.inputs[0].mean


READERS: dict[str, Callable[[Path], float]] = {"pandas.read_csv": by_pandas, "posterity, to tensors": by_posterity}


def peak(name: str, path: Path, small: Path) -> int:
    """Bytes that a reader needs at most, in a process that has read a small file before."""
    READERS[name](small)
    return peak_bytes(lambda: READERS[name](path))


def write_table(path: Path, rows: int, columns: int, seed: int) -> Path:
    """Write normal draws with all their digits."""
    import pandas as pd

    values = np.random.default_rng(seed).standard_normal((rows, columns))
    names = [*(f"x{place}" for place in range(1, columns)), "y"]
    pd.DataFrame(values, columns=names).to_csv(path, index=False)
    return path


def compared(title: str, path: Path, small: Path, rounds: int) -> Comparison:
    contenders = [
        Contender(name, lambda reader=reader: lambda: reader(path), checksum=float) for name, reader in READERS.items()
    ]
    comparison = compare(
        title, contenders, limit="pandas.read_csv", unit="file", rounds=rounds, tolerance=1e-9, clock=time.process_time
    )
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        peaks = {name: pool.submit(peak, name, path, small).result() / MEBIBYTE for name in READERS}
    comparison.columns["peak MiB"] = peaks  # type: ignore[index]
    return comparison


def seconds_to_refuse(folder: Path) -> dict[str, float]:
    """Seconds until a long field in a column of numbers is refused."""
    taken = {}
    for name, field in FIELDS.items():
        path = folder / "long.csv"
        path.write_text(f"a,y\n1,0.5\n{field},1.5\n3,2.5\n")
        begun = time.perf_counter()
        try:
            read_table(path, "y")
        except BadData:
            taken[name] = time.perf_counter() - begun
    return taken


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = write_table(folder / "small.csv", 100, 6, options.seed)
        comparisons = []
        for place, (title, shape) in enumerate(SHAPES.items()):
            path = write_table(folder / f"{place}.csv", *shape, options.seed)
            comparisons.append(compared(title, path, small, options.rounds))
        refused = seconds_to_refuse(folder)
    notes = [f"A field of {LENGTH:,} {name} is refused within {taken:.4f} s." for name, taken in refused.items()]
    notes += ["Times are CPU seconds of the process, which runs one thread. Checksum: the mean of the first column."]
    about = context(options, ["numpy", "pandas", "pyarrow"])
    write("reading", comparisons, about, {"refused": refused}, notes, options.results)


if __name__ == "__main__":
    main()
