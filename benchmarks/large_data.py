"""Fits to more rows than memory is meant to hold: time for each row beside the same fit in memory, and peak memory.

Rows are generated shard by shard and written as float32 to Parquet files in a temporary folder, which is removed at
the end: eight inputs from three Gaussians, and a target that is linear in them, with noise. Every fit is made by a
process of its own, whose largest resident set counts whole, Python and torch included. The fit in memory has as many
rows as `--held` says, and comes before and after the fit to the files; its tensors are there before its clock starts.
The exact linear model is compared with the normal equations, which were summed in float64 while the rows were made.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

import posterity as po
from benchmarks.harness import context, parser, write
from benchmarks.memory import MEBIBYTE, field
from posterity.datasets import Shards, read_shards
from posterity.mixtures import GaussianMixture
from posterity.numerics.random import Key

INPUTS, SCALE, GROUP, GROUPS = 8, 0.5, 1 << 19, 16  # columns, noise; rows of a row group, row groups of a file
NAMES = [f"x{place}" for place in range(INPUTS)]
WEIGHTS = torch.linspace(-1.0, 1.0, INPUTS)
CENTRES = 2.0 * torch.eye(3, INPUTS) + torch.arange(3.0)[:, None]
LARGE, SMALL = 1 << 16, 1 << 12  # rows of a batch of the passes, and of a step by gradients
LIMIT, SHARE = 2048 * MEBIBYTE, 0.7  # wanted: at most this peak, at least this share of the rate in memory


def shard(seed: int, number: int, count: int) -> tuple[Tensor, Tensor]:
    """Inputs (n, 8) and targets (n,) of a row group, float32, the same whatever was made before."""
    key = Key(seed).fold("large data").fold(number)
    which = (3 * key.fold("which").uniform((count,), device="cpu")).long()
    inputs = CENTRES[which] + key.fold("inputs").normal((count, INPUTS), device="cpu")
    return inputs, inputs @ WEIGHTS + 0.25 + SCALE * key.fold("noise").normal((count,), device="cpu")


def generate(folder: Path, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Write the rows; returns sum x x^T and sum x y, x with a 1 at its end, in float64."""
    square = torch.zeros(INPUTS + 1, INPUTS + 1, dtype=torch.float64)
    cross = torch.zeros(INPUTS + 1, dtype=torch.float64)
    starts = range(0, rows, GROUP)
    for first in range(0, len(starts), GROUPS):
        path, writer = folder / f"{first:06d}.parquet", None
        for number in range(first, min(first + GROUPS, len(starts))):
            inputs, targets = shard(seed, number, min(GROUP, rows - starts[number]))
            columns = {name: inputs[:, place].numpy() for place, name in enumerate(NAMES)}
            table = pa.table({**columns, "y": targets.numpy()})
            writer = writer or parquet.ParquetWriter(path, table.schema, use_dictionary=False, compression="none")
            writer.write_table(table, row_group_size=GROUP)
            long = torch.cat([inputs, torch.ones(len(inputs), 1)], 1).double()
            square += long.T @ long
            cross += long.T @ targets.double()
        assert writer is not None
        writer.close()
    return square, cross


def joint(rows: int) -> po.Joint:
    """A linear model of the inputs."""
    network = torch.nn.Linear(INPUTS, 1)
    torch.nn.init.zeros_(network.weight)
    torch.nn.init.zeros_(network.bias)
    return po.Joint(network, po.likelihoods.Gaussian(scale=SCALE), po.priors.Normal(1.0), num_data=rows)


def _fit(method: Any, data: Any, rows: int) -> list[float]:
    posterior, _ = po.infer(method, joint(rows), data, progress=False)
    return [float(value) for value in posterior.start().point()]


def mixture(inputs: Any, data: Any, rows: int) -> list[float]:
    """Five rounds of EM with three full covariances, and the passes before them."""
    fitted = GaussianMixture(3, tol=0.0, max_iter=5, random_state=0).fit(inputs)
    return sorted(float(value) for value in np.asarray(fitted.means_).ravel())


FITS: dict[str, Callable[[Any, Any, int], list[float]]] = {
    "GaussianMixture, 5 rounds": mixture,
    "linear Laplace": lambda inputs, data, rows: _fit(po.methods.Laplace(tuning=None, batch_size=LARGE), data, rows),
    "Conjugate (exact)": lambda inputs, data, rows: _fit(po.methods.Conjugate(batch_size=LARGE), data, rows),
    "MeanField, 1 epoch": lambda inputs, data, rows: _fit(
        po.methods.MeanField(steps=max(1, rows // SMALL), batch_size=SMALL), data, rows
    ),
}


def held(stored: Shards, rows: int) -> tuple[Tensor, Tensor]:
    """The first rows in memory."""
    inputs, targets, count = torch.empty(rows, INPUTS), torch.empty(rows), 0
    for block in stored.blocks():
        part = min(rows - count, len(block.inputs))
        assert block.targets is not None
        inputs[count : count + part], targets[count : count + part] = block.inputs[:part], block.targets[:part]
        count += part
        if count == rows:
            break
    return inputs, targets


def measured(folder: Path, name: str, rows: int | None) -> dict[str, Any]:
    """Seconds of the fit `name` to the files, or to as many `rows` in memory, for each row; and the peak in bytes."""
    stored = read_shards(folder, "y")
    if rows is None:
        given: tuple[Any, Any] = read_shards(folder, inputs=NAMES), stored
    else:
        tensors = held(stored, rows)
        given = tensors[0], tensors
    few = shard(0, 0, 2 * SMALL)
    FITS[name](few[0], few, len(few[0]))  # loads what the first fit of a process loads
    count, begin, worked = len(stored) if rows is None else rows, time.perf_counter(), time.process_time()
    values = FITS[name](*given, count)
    seconds, work = time.perf_counter() - begin, time.process_time() - worked
    return {"rows": count, "seconds": seconds, "CPU seconds": work, "peak": field("VmHWM"), "values": values}


def apart(folder: Path, name: str, rows: int | None, *, threads: int) -> dict[str, Any]:
    """`measured` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.large_data", "--child", str(folder), name, str(rows or 0)]
    done = subprocess.run([*command, "--threads", str(threads)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def exact(square: Tensor, cross: Tensor) -> Tensor:
    """The mean of the exact posterior (9,), bias last, under the prior N(0, 1)."""
    precision = square / SCALE**2 + torch.eye(INPUTS + 1, dtype=torch.float64)
    mean: Tensor = torch.linalg.solve(precision, cross / SCALE**2)
    return mean


def run(
    folder: Path, rows: int, memory_rows: int, seed: int, measure: Callable[[Path, str, int | None], dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The measurements, one for each fit, and facts about the data."""
    begin = time.perf_counter()
    square, cross = generate(folder, rows, seed)
    size = sum(file.stat().st_size for file in folder.iterdir())
    facts: dict[str, Any] = {"rows": rows, "bytes on disk": size, "seconds to write": time.perf_counter() - begin}
    results = []
    for name in FITS:
        before, own, after = (measure(folder, name, count) for count in (memory_rows, None, memory_rows))
        in_memory = (before["seconds"] + after["seconds"]) / 2 / memory_rows
        results.append(
            {
                "fit": name,
                "seconds": own["seconds"],
                "ns a row": 1e9 * own["seconds"] / rows,
                "ns a row in memory": 1e9 * in_memory,
                "CPU ns a row": 1e9 * own["CPU seconds"] / rows,
                "CPU ns a row in memory": 5e8 * (before["CPU seconds"] + after["CPU seconds"]) / memory_rows,
                "runs in memory": [1e9 * each["seconds"] / memory_rows for each in (before, after)],
                "share of the rate in memory": in_memory / (own["seconds"] / rows),
                "peak MiB": own["peak"] / MEBIBYTE,
                "values": own["values"],
            }
        )
        if name.startswith("Conjugate"):
            error = (torch.tensor(own["values"], dtype=torch.float64) - exact(square, cross)).abs().max()
            facts["largest difference of the exact mean from the normal equations"] = float(error)
    return results, facts


def main() -> int:
    """Run the benchmark; 1 where a fit takes too much memory or time."""
    options = parser(__doc__ or "")
    options.add_argument("--rows", type=int, default=100_000_000, help="rows in files (default 1e8)")
    options.add_argument("--held", type=int, default=10_000_000, help="rows of the fits in memory (default 1e7)")
    options.add_argument("--folder", type=Path, help="where the temporary folder is made")
    options.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    if given.child:
        folder, name, count = given.child
        print(json.dumps(measured(Path(folder), name, int(count) or None)))
        return 0
    wanted = 4 * (INPUTS + 1) * given.rows
    if shutil.disk_usage(given.folder or tempfile.gettempdir()).free < 2 * wanted:
        raise SystemExit(f"{2 * wanted / 1e9:.1f} GB must be free on the disk. Say another --folder, or fewer --rows.")
    with tempfile.TemporaryDirectory(prefix="posterity-large-", dir=given.folder) as folder:
        results, facts = run(
            Path(folder), given.rows, min(given.held, given.rows), given.seed, partial(apart, threads=given.threads)
        )
    keys = ["ns a row", "ns a row in memory", "CPU ns a row", "CPU ns a row in memory"]
    table = [["fit", "seconds", *keys, "share of the rate in memory", "peak MiB"]]
    for row in results:
        ends = [f"{row['share of the rate in memory']:.2f}", f"{row['peak MiB']:.0f}"]
        table.append([row["fit"], f"{row['seconds']:.1f}", *(f"{row[key]:.0f}" for key in keys), *ends])
    notes = [
        f"{given.rows:,} rows of {INPUTS} inputs and a target, {facts['bytes on disk'] / 1e9:.2f} GB of Parquet, not "
        f"compressed, written in {facts['seconds to write']:.0f} s; the files may be in the system's cache.",
        f"In memory: the mean of two fits to the first {min(given.held, given.rows):,} rows, before and after. "
        "Times are of whole fits, for each row.",
        "Peak: the largest resident set of the process, with Python and torch.",
        "Conjugate: the mean differs from the normal equations, summed in float64, by at most "
        f"{facts['largest difference of the exact mean from the normal equations']:.1e} (float32 weights).",
    ]
    facts["fits"] = results
    write("large_data", [], context(given, ["pyarrow"]), facts, notes, given.results, table)
    bad = [row["fit"] for row in results if row["peak MiB"] * MEBIBYTE > LIMIT]
    bad += [row["fit"] for row in results if row["share of the rate in memory"] < SHARE]
    if bad:
        print(f"above 2 GiB or below {SHARE:.0%} of the rate in memory: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
