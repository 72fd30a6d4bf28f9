"""`posterity compare` on the twelve UCI tables as CSV files: seconds and scores.

    python -m benchmarks.tables

Each table is written as a CSV file with a header, and compared by the command itself, in a process of its own.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import context, parser, write
from posterity.datasets import UCI_CLASSIFICATION, UCI_REGRESSION, DataSet, uci_classification, uci_regression


def write_csv(data: DataSet, path: Path) -> None:
    """All rows of a data set, inputs x1 .. and then the target, as people keep them."""
    inputs = torch.cat([data.train.inputs, data.test.inputs]).tolist()
    targets = torch.cat([data.train.targets, data.test.targets]).flatten().tolist()
    names = targets if data.classes is None else [data.classes[int(target)] for target in targets]
    lines = [",".join([*(f"x{number}" for number in range(1, len(inputs[0]) + 1)), "target"])]
    lines += [",".join([*(repr(value) for value in row), str(name)]) for row, name in zip(inputs, names, strict=True)]
    path.write_text("\n".join(lines) + "\n")


def compare(path: Path, task: str, seed: int) -> tuple[dict[str, Any], float]:
    """The document of `posterity compare`, and the seconds of its process."""
    words = ["compare", str(path), "--target", "target", "--task", task, "--seed", str(seed), "--json", "--quiet"]
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "posterity", *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout), time.perf_counter() - begin


def main() -> None:
    """Compare MAP and Laplace on every table, one after the other."""
    options = parser(__doc__ or "").parse_args()
    rows, facts = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (*UCI_CLASSIFICATION, *UCI_REGRESSION):
            classifies = name in UCI_CLASSIFICATION
            data = uci_classification(name) if classifies else uci_regression(name)
            path = Path(folder) / f"{name}.csv"
            write_csv(data, path)
            document, seconds = compare(path, data.task, options.seed)
            scores = {method["method"]: method for method in document["methods"]}
            facts[name] = {"seconds": seconds, "scores": scores, "notes": document.get("notes", [])}
            other = "ece" if classifies else "rmse"
            cells = [f"{scores[m]['test_nll']:.4g} / {scores[m][other]:.4g}" for m in ("map", "laplace")]
            size = f"{document['train_rows']} + {document['test_rows']} rows"
            rows.append(f"{name} ({size}): {seconds:.1f} s; NLL / {other.upper()}: MAP {cells[0]}, Laplace {cells[1]}")
            print(rows[-1], file=sys.stderr, flush=True)
    notes = [*rows, "One split (a fifth held out), one seed, defaults; NLL and RMSE in the units of the target."]
    write("tables", [], context(options), facts, notes, options.results)


if __name__ == "__main__":
    main()
