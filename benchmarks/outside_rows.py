"""The rule by which `posterity predict` calls a row outside the training data: false alarms and detection.

    python -m benchmarks.outside_rows

The twelve UCI tables, five splits each. Test rows are like training rows, so those that are flagged are false alarms:
by the rule, and by the plain range of each column. Moved rows are test rows of which one column, drawn for each, is
moved up or down by five of its standard deviations: some stay inside what the training rows have.
"""

from typing import Any

import torch

from benchmarks.harness import context, parser, write
from posterity.cli.frame.outside import outside, reach
from posterity.cli.frame.sources import Source
from posterity.datasets import (
    UCI_CLASSIFICATION,
    UCI_REGRESSION,
    DataSet,
    LabelledData,
    uci_classification,
    uci_regression,
)
from posterity.numerics.random import Key
from posterity.storage import Part

SPLITS, MOVED = 5, 5.0


def measured(data: DataSet, seed: int) -> dict[str, float]:
    """Shares of test rows that are flagged, as they are and moved, and the margin in standard deviations."""
    known = reach(Source(data))

    def flagged(inputs: torch.Tensor, margin: torch.Tensor) -> float:
        rows = Source(DataSet(data.name, data.task, data.train, LabelledData(inputs, data.test.targets), data.classes))
        named = outside(Part({}, {**known, "margin": margin}), rows)
        assert named is not None
        return sum(map(bool, named)) / len(named)

    inputs, key = data.test.inputs.double(), Key(seed).fold("moved")
    varies = torch.nonzero(data.train.inputs.std(0) > 0)[:, 0]
    drawn = key.fold("column").uniform((len(inputs),), torch.float64, "cpu")
    column = varies[(drawn * len(varies)).long()]
    sign = 2.0 * (key.fold("sign").uniform((len(inputs),), torch.float64, "cpu") < 0.5).double() - 1.0
    moved = inputs.scatter_add(1, column[:, None], (sign * MOVED * known["spread"][column])[:, None])
    return {
        "false_alarms": flagged(inputs, known["margin"]),
        "beyond_range": flagged(inputs, torch.zeros(())),
        "moved": flagged(moved, known["margin"]),
        "margin": float(known["margin"]),
    }


def main() -> None:
    """Measure every table."""
    options = parser(__doc__ or "").parse_args()
    facts: dict[str, Any] = {}
    lines = []
    for name in (*UCI_REGRESSION, *UCI_CLASSIFICATION):
        classifies = name in UCI_CLASSIFICATION
        splits = [
            uci_classification(name, seed=split) if classifies else uci_regression(name, split)
            for split in range(SPLITS)
        ]
        results = [measured(data, options.seed + split) for split, data in enumerate(splits)]
        facts[name] = {key: sum(result[key] for result in results) / SPLITS for key in results[0]}
        shares = {key: f"{100 * value:.2f} %" for key, value in facts[name].items()}
        lines.append(
            f"{name} ({len(splits[0].train)} rows of {splits[0].train.inputs.shape[1]} inputs): false alarms "
            f"{shares['false_alarms']}, by the plain range {shares['beyond_range']}; of moved rows {shares['moved']} "
            f"are found; margin {facts[name]['margin']:.2f}"
        )
    write("outside_rows", [], context(options), facts, lines, options.results)


if __name__ == "__main__":
    main()
