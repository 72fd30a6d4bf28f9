"""The defaults of the command line on tables, against the mean and a linear model: five splits each.

    python -m benchmarks.table_defaults                   # the default network, by Laplace
    python -m benchmarks.table_defaults --method auto     # the default method

Four tables: diabetes, breast cancer and wine of scikit-learn, and 640 rows of 2,000 standard normal inputs, ten of
which are linear in the target, with noise 0.5. `auto` is what `posterity fit FILE` takes, in a minute; `laplace` what
`posterity fit FILE --method laplace` takes. Differences are of the NLL of test rows, with their paired standard error.

The linear baseline of classes is a mode. On breast cancer our mode alone predicts as it does; where Laplace is worse,
it is by averaging over the weights, whose width the left-out training rows of that split favour. A rule that takes the
mode there would be chosen on test rows.
"""

import csv
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import context, parser, write
from posterity.cli.frame.baselines import baselines
from posterity.cli.frame.fitting import Asked
from posterity.cli.frame.options import AUTO, SECONDS, ReadingOptions, TableOptions
from posterity.cli.frame.sources import find_data
from posterity.cli.frame.tasks import describe, run_stage, task_of
from posterity.predictive import Predictive
from posterity.recipes.methods import RECIPES
from posterity.recipes.settings import Settings

SPLITS = 5


def tables(folder: Path) -> dict[str, Path]:
    """The four tables as CSV files."""
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

    paths = {}
    for name, load in (("diabetes", load_diabetes), ("breast cancer", load_breast_cancer), ("wine", load_wine)):
        data = load()
        labels = data.target if name == "diabetes" else [f"class {label}" for label in data.target]
        paths[name] = _written(folder / f"{name.replace(' ', '-')}.csv", data.data, labels)
    draws = np.random.RandomState(0)
    inputs = draws.randn(640, 2000)
    targets = inputs[:, :10] @ draws.randn(10) + 0.5 * draws.randn(640)
    return {**paths, "640 x 2,000": _written(folder / "wide.csv", inputs, targets)}


def _written(path: Path, inputs: Any, targets: Any) -> Path:
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([*(f"x{number}" for number in range(inputs.shape[1])), "target"])
        lines.writerows([*map(float, row), target] for row, target in zip(inputs, targets, strict=True))
    return path


def measured(path: Path, word: str, split: int) -> dict[str, Any]:
    """NLL of a method, the mean and the linear model on one split; differences with paired standard errors."""
    settings = Settings(seed=split)
    data = (source := find_data(str(path), TableOptions(target="target"), ReadingOptions(), split)).data
    model: Any = None
    begin = time.perf_counter()
    if word == AUTO:
        model = Asked(AUTO, settings, SECONDS, "cpu").automatic(source)
        chosen = ", ".join(f"{weight:.2f} {name}" for name, weight in model.weights.items())
    else:
        task = task_of(source, (word,), settings, "cpu")
        for stage in RECIPES[word].stages:
            model = run_stage(stage, task, model, quiet=True).posterior
        chosen = describe(task)
    seconds = time.perf_counter() - begin
    inputs, targets = data.test.pair
    ours = _log_prob(model.predict(inputs), targets)
    classes = len(data.classes or ())
    simple, linear = (_log_prob(b.fit(data.train, classes)(inputs), targets) for b in baselines(data))
    row: dict[str, Any] = {"network": chosen, "nll": -float(ours.mean()), "seconds": seconds}
    for name, theirs in (("mean", simple), ("linear", linear)):
        worse = theirs - ours
        row[name] = [-float(theirs.mean()), float(worse.mean()), float(worse.std()) / len(worse) ** 0.5]
    return row


def _log_prob(predicted: Predictive, targets: Tensor) -> Tensor:
    return predicted.log_prob(targets.double() if targets.is_floating_point() else targets).double()


def main() -> None:
    """Measure every table on every split."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--method", choices=("laplace", AUTO), default="laplace", help="the default to measure")
    options = arguments.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in tables(Path(folder)).items():
            found[name] = [measured(path, options.method, options.seed + split) for split in range(SPLITS)]
            for split, row in enumerate(found[name]):
                (mean, over_mean, _), (linear, worse, error) = row["mean"], row["linear"]
                good = over_mean <= 0.0 and worse <= error
                lines.append(
                    f"{name}, split {split} ({row['network']}): {'good' if good else 'WORSE'}; NLL {row['nll']:.4f}, "
                    f"mean {mean:.4f}, linear {linear:.4f} (difference {worse:+.4f}, standard error {error:.4f}); "
                    f"{row['seconds']:.1f} s"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    topic = "table_defaults_auto" if options.method == AUTO else "table_defaults"
    write(topic, [], context(options), {"tables": found}, lines, options.results)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
