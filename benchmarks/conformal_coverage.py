"""Do 90 % conformal intervals of the estimators cover 90 % of test rows?

    python -m benchmarks.conformal_coverage
    python -m benchmarks.conformal_coverage --tables diabetes,energy --method map

The regression tables of `benchmarks.tables_peers` under the same splits, `BayesianRegressor` with a linear model (the
guarantee holds whatever the model, and this one is quick), and `conformal="split"` and `"cv+"`. Coverage is of all test
rows of the splits; it may fall short of the level by two binomial standard errors on a table, and by 0.5 % over all
tables. The intervals of the posterior itself stand beside it.
"""

import logging
import math
import sys
from typing import Any

import numpy as np
import torch

from benchmarks.harness import context, parser, write
from benchmarks.tables_peers import REGRESSION, SPLITS, SPLITS_OF_OTHERS, table
from posterity.estimators import BayesianRegressor

LEVEL, SHORT, ERRORS = 0.9, 0.005, 2.0
WORDS = ("split", "cv+")


def covered(name: str, split: int, method: str) -> dict[str, Any]:
    """Whether intervals of each kind contain the targets of the test rows, and the widths of the conformal ones."""
    rows, found = table(name, split), dict[str, Any]()
    models = {
        word: BayesianRegressor(method, network=torch.nn.Linear, conformal=word, random_state=split) for word in WORDS
    }
    for word, model in models.items():
        lower, upper = model.fit(rows.inputs, rows.targets).predict_interval(rows.test_inputs, LEVEL)
        found[word] = (lower <= rows.test_targets) & (rows.test_targets <= upper)
        found[f"width {word}"] = upper - lower
    ends = models["cv+"].predict_distribution(rows.test_inputs).interval(LEVEL)
    lower, upper = (end[:, 0].cpu().numpy() for end in ends)
    return {**found, "posterior": (lower <= rows.test_targets) & (rows.test_targets <= upper)}


def main() -> None:
    """Measure every table."""
    command = parser(__doc__ or "")
    command.add_argument("--tables", default=",".join(REGRESSION), help="tables, with commas between them")
    command.add_argument("--method", default="laplace", help="a word of BayesianRegressor.method")
    options = command.parse_args()
    logging.getLogger("posterity").setLevel(logging.ERROR)  # notes of every fold
    facts: dict[str, Any] = {}
    pooled: dict[str, list[Any]] = {word: [] for word in WORDS}
    lines = []
    for name in options.tables.split(","):
        splits = [covered(name, split, options.method) for split in range(SPLITS.get(name, SPLITS_OF_OTHERS))]
        rows = {key: np.concatenate([result[key] for result in splits]) for key in splits[0]}
        count = len(rows["split"])
        least = LEVEL - ERRORS * math.sqrt(LEVEL * (1.0 - LEVEL) / count)
        facts[name] = {"rows": count, "least": least, **{key: float(values.mean()) for key, values in rows.items()}}
        told = []
        for word in WORDS:
            pooled[word].append(rows[word])
            share = facts[name][word]
            width = facts[name][f"width {word}"]
            told.append(f"{word} {100 * share:.1f} %{'' if share >= least else ' (too few)'}, width {width:.4g}")
        own = f"the posterior itself {100 * facts[name]['posterior']:.1f} %"
        lines.append(f"{name}, {count} test rows: {'; '.join(told)}; {own}; least {100 * least:.1f} %")
        print(lines[-1], file=sys.stderr, flush=True)
    for word, parts in pooled.items():
        share = float(np.concatenate(parts).mean())
        facts[f"all, {word}"] = share
        verdict = "" if share >= LEVEL - SHORT else " (too few)"
        lines.append(f"all tables, {word}: {100 * share:.2f} %{verdict}; least {100 * (LEVEL - SHORT):.1f} %")
    write("conformal_coverage", [], context(options), facts, lines, options.results)


if __name__ == "__main__":
    main()
