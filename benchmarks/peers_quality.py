"""The same work by laplace-torch, ivon-opt, bayesian-torch, torch-uncertainty and posterity: quality and CPU seconds.

    python -m benchmarks.peers_quality
    python -m benchmarks.peers_quality --problems energy --contenders laplace-torch,po.laplace --splits 1

Problems: MNIST with LeNet (`peers_quality_images`), "mnist-few" on 500 test rows for predictions that take
milliseconds a row, and UCI energy and kin8nm with 50 hidden units under their standard splits (`peers_quality_tables`).
All fits have the same rows, and those of one network the same first weights. Peers have the settings of their own
README, tutorial or experiments; posterity has its defaults. The costs of a peer's own data loader and trainer are left
out: all share one plain loop.

Each cell (problem, split, contender) is stored in --cells as it comes, and is not run again.
"""

import functools
import json
import logging
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import peers_quality_images as images
from benchmarks import peers_quality_tables as tables
from benchmarks.harness import context, parser, write
from benchmarks.peers_quality_parts import OURS, Contender
from benchmarks.tables_peers import Cells, paired

PROBLEMS: Mapping[str, tuple[Any, Mapping[str, Contender], Callable[[int], Any], bool]] = {
    "mnist": (images, images.CONTENDERS, lambda split: images.load(), False),
    "mnist-few": (images, images.SLOW, lambda split: images.load(few=True), False),
    "energy": (tables, tables.CONTENDERS, functools.partial(tables.load, "energy"), True),
    "kin8nm": (tables, tables.CONTENDERS, functools.partial(tables.load, "kin8nm"), True),
}
"""Module, contenders, data of a split, and whether there are several splits."""
DEFAULT = {"mnist": "po.laplace", "mnist-few": "po.laplace", "energy": "auto", "kin8nm": "auto"}
SPLITS = 2
SCORES = {"error": 4, "nll": 4, "ece": 4, "brier": 4, "auroc fashion-mnist": 4, "auroc kmnist": 4}
HEAD = (
    *("problem", "work", "contender", "error or RMSE", "NLL", "NLL minus ours", "NLL minus default's"),
    *("ECE", "Brier", "AUROC Fashion-MNIST", "AUROC KMNIST", "fit CPU s", "predict CPU s"),
)


@functools.lru_cache(maxsize=1)
def prepared(problem: str, split: int) -> tuple[Any, nn.Module, float]:
    """The data, the shared point estimate, and its CPU seconds."""
    module, _, load, _ = PROBLEMS[problem]
    data = load(split)
    begin = time.process_time()
    point = module.point(data, split)
    return data, point, time.process_time() - begin


def run_cell(problem: str, split: int, name: str, path: Path) -> None:
    """Run one contender on one split, and store the outcome."""
    module, contenders, _, _ = PROBLEMS[problem]
    contender, (data, point, seconds) = contenders[name], prepared(problem, split)
    cell: dict[str, Any] = {"table": problem, "split": split, "contender": name, "point_seconds": seconds}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin = time.process_time()
        try:
            predict = contender.fit(data, point, split)
            cell["fit_seconds"] = time.process_time() - begin
            cell |= module.scores(predict, data)
        except Exception as error:  # a peer that fails is a cell that says why
            if contender.library == OURS:
                raise
            cell["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(cell))
    draft.replace(path)
    shown = {key: value for key, value in cell.items() if key != "log_density"}
    print(shown, file=sys.stderr, flush=True)


def stored(folder: Path) -> tuple[Cells, list[str]]:
    """All cells with scores, and a line for each that failed."""
    cells: Cells = {}
    failed = []
    for path in sorted(folder.glob("*.json")):
        cell = json.loads(path.read_text())
        if "nll" in cell:
            cells.setdefault((cell["table"], cell["contender"]), {})[cell["split"]] = cell
        else:
            failed.append(f"{cell['contender']} failed on {cell['table']}, split {cell['split']}: {cell['failed']}")
    return cells, failed


def difference(cells: Cells, problem: str, first: str, second: str) -> str:
    """The mean difference of NLL with its standard error over test rows, as text."""
    gap = None if first == second else paired(cells, problem, first, second)
    return "" if gap is None else f"{gap[0]:+.4f} +- {gap[1]:.4f}"


def ours_in(problem: str, work: str, cells: Cells) -> str | None:
    """The first of our contenders for this work: the one that peers are held against."""
    contenders = PROBLEMS[problem][1]
    each = (n for n, c in contenders.items() if c.library == OURS and c.work == work and (problem, n) in cells)
    return next(each, None)


def summary(cells: Cells) -> tuple[list[Sequence[str]], dict[str, Any], list[str]]:
    """The table, its numbers, and a line for each problem and peer."""
    table: list[Sequence[str]] = [HEAD]
    facts: dict[str, Any] = {}
    lines = []
    for problem, (_, contenders, _, _) in PROBLEMS.items():
        names = [name for name in contenders if (problem, name) in cells]
        for name in names:
            contender, each = contenders[name], list(cells[problem, name].values())
            mean = {
                key: statistics.fmean(cell[key] for cell in each)
                for key in (*SCORES, "fit_seconds", "predict_seconds", "point_seconds")
                if key in each[0]
            }
            rival = ours_in(problem, contender.work, cells)
            beside = "" if rival is None else difference(cells, problem, name, rival)
            default = difference(cells, problem, name, DEFAULT[problem])
            number = {key: f"{mean[key]:.{digits}f}" if key in mean else "" for key, digits in SCORES.items()}
            own = 0.0 if name == "point" else mean["fit_seconds"]
            cost = f"{mean['point_seconds']:.1f} + {own:.1f}" if contender.after_point else f"{own:.1f}"
            cost = f"{mean['point_seconds']:.1f}" if name == "point" else cost
            table.append(
                (problem, contender.work, name, number["error"], number["nll"], beside, default, number["ece"],
                 number["brier"], number["auroc fashion-mnist"], number["auroc kmnist"], cost,
                 f"{mean['predict_seconds']:.2f}")
            )  # fmt: skip
            facts.setdefault(problem, {})[name] = {
                **mean, "library": contender.library, "work": contender.work, "splits": len(each),
                "minus_ours": None if rival in (None, name) else paired(cells, problem, name, str(rival)),
                "minus_default": None if name == DEFAULT[problem] else paired(cells, problem, name, DEFAULT[problem]),
            }  # fmt: skip
        best = {
            ours: min(
                (name for name in names if (contenders[name].library == OURS) == ours and name != "point"),
                key=lambda name: facts[problem][name]["nll"],
                default=None,
            )
            for ours in (True, False)
        }
        if best[True] and best[False]:
            splits = facts[problem][best[True]]["splits"]
            lines.append(
                f"{problem}, splits {splits}: lowest NLL of the peers {best[False]}, of ours {best[True]}; "
                f"ours - theirs = {difference(cells, problem, str(best[True]), str(best[False]))}."
            )
    return table, facts, lines


def sources() -> list[str]:
    """Where the settings of each contender come from."""
    told = {name: each.source for _, contenders, _, _ in PROBLEMS.values() for name, each in contenders.items()}
    both = {name: images.CONTENDERS[name].source for name in told if name in images.CONTENDERS}
    return [
        f"{name}: {source}" + (f" (images: {both[name]})" if both.get(name, source) != source else "")
        for name, source in told.items()
    ]


NOTES = (
    f"mnist: the first {images.ROWS:,} training rows, {images.HELD:,} after them for validation, every fourth test "
    f"row; {images.EPOCHS} epochs in batches of {images.BATCH} for every fit by gradients. Foreign inputs: 500 test "
    "images each, found by the entropy of the label. mnist-few: a fifth of the test rows and of the foreign inputs.",
    "NLL in nats a row, in units of the target for tables. Differences are paired by test row, with the standard error "
    "over test rows of all splits; below 0 the contender is better. It has no part for the chance of training. "
    "'Minus ours' is against our first contender of the same work.",
    "Fit: CPU seconds of one thread, 'point + own' where the shared point comes first. Predict: all test rows.",
    "Workarounds: torch_uncertainty does not import without torchvision, so its wrappers, layers and scaler run in "
    "a plain loop instead of its Lightning routine. laplace-torch with all weights predicts 4 rows a call, as its "
    "Jacobians cost the square of the rows. Its marglik_training fits the evidence after every tenth epoch, not each.",
    "No setting of a contender was tuned. One choice did follow a look at test scores: a first run on MNIST trained "
    "the point, bayesian-torch and torch-uncertainty by Adam at 1e-3, which underfits in so few steps; then they got "
    "the recipes of the peers' own MNIST experiments, which helped the peers. Ours train by steps of their own choice, "
    "so that differences between ensembles, dropouts and mean fields are differences of the optimiser, too.",
    "Cells come from several runs of this command; --splits 0 makes the page of those that are there.",
    "bayesian-torch's README divides the KL by the batch size, so that it counts rows / batch size times; its MNIST "
    "example divides by the number of rows.",
)


def main() -> None:
    """Run the cells that are not there yet, and write the summary of all."""
    words = parser(__doc__ or "")
    words.add_argument("--problems", default=",".join(PROBLEMS), help="names with commas")
    words.add_argument("--contenders", default="", help="regular expression of names; all if left out")
    words.add_argument("--splits", type=int, default=SPLITS, help="splits of each table")
    words.add_argument("--cells", type=Path, default=Path("peers_quality_cells"), help="folder of the cells")
    given = words.parse_args()
    torch.set_num_threads(given.threads)
    logging.getLogger("posterity").setLevel(logging.ERROR)
    for split in range(given.splits):
        for problem in given.problems.split(","):
            _, contenders, _, several = PROBLEMS[problem]
            for name in contenders if several or split == 0 else ():
                path = given.cells / f"{problem}-{split}-{name.replace(' ', '_')}.json"
                if re.search(given.contenders, name) and not path.exists():
                    run_cell(problem, split, name, path)
    cells, failed = stored(given.cells)
    table, facts, lines = summary(cells)
    packages = ("laplace-torch", "curvlinops-for-pytorch", "ivon-opt", "bayesian-torch", "torch-uncertainty")
    about = context(given, packages)
    write("peers_quality", [], about, facts, [*lines, *failed, *NOTES, *sources()], given.results, table)


if __name__ == "__main__":
    main()
