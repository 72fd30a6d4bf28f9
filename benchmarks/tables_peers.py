"""The automatic default and libraries for tables, on the same splits of 14 tables: NLL, RMSE, coverage, seconds.

    python -m benchmarks.tables_peers
    python -m benchmarks.tables_peers --tables diabetes,bostonHousing --splits 2 --contenders auto,ridge

Seven UCI regression sets under their standard splits 0 to 4 (protein: 0 and 1), and diabetes, wine and five UCI
classification sets under five seeded splits (a fifth held out). Inputs are standardised by the training rows for all
contenders, each at its defaults. A regressor without a density gets a normal one around its prediction, with the scale
of its residuals in five folds of the training rows. Class probabilities p of the peers become (n p + frequency) /
(n + 1), n the training rows: forests predict zeros. A Gaussian process has a fitted scale, ARD length scales and noise
(scikit-learn's default kernel has none of them), and is left out above 2,000 rows.

Each cell is stored as it comes in --cells, one JSON file with the log density of every test row, and is not run again.
The summary is made of all cells there. Cells of the peers are kept in one file beside the results, and only --afresh
runs them again.
"""

import gzip
import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.harness import context, parser, write
from posterity.datasets import UCI_CLASSIFICATION, UCI_REGRESSION, uci_classification, uci_regression
from posterity.estimators import fit_automatic

REGRESSION = (*UCI_REGRESSION, "diabetes")
CLASSIFICATION = ("wine", *UCI_CLASSIFICATION)
SPLITS = {"protein-tertiary-structure": 2}
SPLITS_OF_OTHERS = 5
MOST_ROWS_OF_A_PROCESS = 2000
Z90 = 1.6448536269514722
KEPT = "tables_peers_cells.json.gz"
GRID = "naval-propulsion-plant"
LINEAR, NEURAL = "ridge", ("auto", "networks")


class Table(NamedTuple):
    """A split: inputs in training units of 1, targets in their own, labels from 0."""

    inputs: Any
    targets: Any
    test_inputs: Any
    test_targets: Any
    classes: int  # 0 for regression


def table(name: str, split: int) -> Table:
    """A split of a table."""
    classes, rows = 0, list[Any]()
    if name in UCI_REGRESSION:
        data = uci_regression(name, split)
        rows = [part.numpy() for part in (data.train.inputs, data.train.targets, data.test.inputs, data.test.targets)]
    elif name in UCI_CLASSIFICATION:
        data, classes = uci_classification(name, 0.2, split), 2
        rows = [part.numpy() for part in (data.train.inputs, data.train.targets, data.test.inputs, data.test.targets)]
    else:
        from sklearn import datasets, model_selection

        inputs, targets = getattr(datasets, f"load_{name}")(return_X_y=True)
        classes = 3 if name == "wine" else 0
        parts = model_selection.train_test_split(
            inputs, targets, test_size=0.2, random_state=split, stratify=targets if classes else None
        )
        rows = [parts[0], parts[2], parts[1], parts[3]]
    mean, scale = rows[0].mean(0), rows[0].std(0)
    scale[scale < 1e-12] = 1.0
    kind = np.int64 if classes else np.float64
    targets, test_targets = rows[1].reshape(-1).astype(kind), rows[3].reshape(-1).astype(kind)
    return Table((rows[0] - mean) / scale, targets, (rows[2] - mean) / scale, test_targets, classes)


class Forecast(NamedTuple):
    """Log densities of the test targets, means, and whether 90 % intervals contain them (None for classes)."""

    log_density: Any
    mean: Any
    inside: Any
    words: str = ""


def normal(table: Table, mean: Any, scale: Any) -> Forecast:
    """The forecast of normal densities."""
    z = (table.test_targets - mean) / scale
    log_density = -0.5 * z**2 - np.log(scale) - 0.5 * math.log(2.0 * math.pi)
    return Forecast(log_density, mean, np.abs(z) <= Z90)


def of_classes(table: Table, probs: Any) -> Forecast:
    """The forecast of class probabilities, none of them 0."""
    frequency = np.bincount(table.targets, minlength=table.classes) / len(table.targets)
    probs = (len(table.targets) * probs + frequency) / (len(table.targets) + 1)
    return Forecast(np.log(probs[np.arange(len(probs)), table.test_targets]), probs.argmax(1), None)


def with_residual_scale(table: Table, make: Callable[[], Any]) -> Forecast:
    """A regressor's predictions with a normal density, its scale from five folds."""
    from sklearn.model_selection import KFold, cross_val_predict

    held_out = cross_val_predict(make(), table.inputs, table.targets, cv=KFold(5, shuffle=True, random_state=0))
    scale = float(np.sqrt(np.mean((table.targets - held_out) ** 2)))
    return normal(table, make().fit(table.inputs, table.targets).predict(table.test_inputs), scale)


def auto(table: Table, seed: int) -> Forecast:
    """The automatic default of posterity."""
    inputs, rows = (torch.from_numpy(part).float() for part in (table.inputs, table.test_inputs))
    if table.classes:
        labels = torch.from_numpy(table.targets)
        model = fit_automatic(inputs, labels, "classification", classes=table.classes, seed=seed)
        pred = model.predict(rows)
        log_density = pred.log_prob(torch.from_numpy(table.test_targets)).numpy()
        return Forecast(log_density, pred.probs.argmax(1).numpy(), None, model.sentence)
    mean, scale = float(table.targets.mean()), float(table.targets.std())
    targets, test = (torch.from_numpy((part - mean) / scale) for part in (table.targets, table.test_targets))
    model = fit_automatic(inputs, targets, "regression", mean=(mean,), scale=(scale,), seed=seed)
    pred = model.predict(rows)
    lower, upper = (end[:, 0].numpy() for end in pred.interval(0.9))
    log_density = pred.log_prob(test).numpy() - math.log(scale)
    inside = (lower <= test.numpy()) & (test.numpy() <= upper)
    return Forecast(log_density, mean + scale * pred.mean[:, 0].numpy(), inside, model.sentence)


def ridge(table: Table, seed: int) -> Forecast:
    """The linear model."""
    from sklearn.linear_model import BayesianRidge, LogisticRegression

    if table.classes:
        fit = LogisticRegression(max_iter=1000).fit(table.inputs, table.targets)
        return of_classes(table, fit.predict_proba(table.test_inputs))
    return normal(table, *BayesianRidge().fit(table.inputs, table.targets).predict(table.test_inputs, return_std=True))


def ngboost(table: Table, seed: int) -> Forecast:
    """Natural gradient boosting."""
    from ngboost import NGBClassifier, NGBRegressor
    from ngboost.distns import k_categorical

    if table.classes:
        made = NGBClassifier(Dist=k_categorical(table.classes), verbose=False, random_state=seed)
        return of_classes(table, made.fit(table.inputs, table.targets).predict_proba(table.test_inputs))
    fit = NGBRegressor(verbose=False, random_state=seed).fit(table.inputs, table.targets)
    law = fit.pred_dist(table.test_inputs)
    return normal(table, law.params["loc"], law.params["scale"])


def boosting(table: Table, seed: int) -> Forecast:
    """Histogram gradient boosting."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if table.classes:
        made = HistGradientBoostingClassifier(random_state=seed).fit(table.inputs, table.targets)
        return of_classes(table, made.predict_proba(table.test_inputs))
    return with_residual_scale(table, lambda: HistGradientBoostingRegressor(random_state=seed))


def forest(table: Table, seed: int) -> Forecast:
    """Random forests."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    if table.classes:
        made = RandomForestClassifier(random_state=seed).fit(table.inputs, table.targets)
        return of_classes(table, made.predict_proba(table.test_inputs))
    return with_residual_scale(table, lambda: RandomForestRegressor(random_state=seed))


def process(table: Table, seed: int) -> Forecast | None:
    """A Gaussian process, where the rows are few enough."""
    from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    if len(table.targets) > MOST_ROWS_OF_A_PROCESS:
        return None
    if table.classes:
        kernel = ConstantKernel() * RBF(math.sqrt(table.inputs.shape[1]))
        made = GaussianProcessClassifier(kernel, random_state=seed).fit(table.inputs, table.targets)
        return of_classes(table, made.predict_proba(table.test_inputs))
    scales: Any = np.full(table.inputs.shape[1], math.sqrt(table.inputs.shape[1]))
    kernel = ConstantKernel() * RBF(scales) + WhiteKernel(0.1)
    made = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed).fit(table.inputs, table.targets)
    return normal(table, *made.predict(table.test_inputs, return_std=True))


def networks(table: Table, seed: int) -> Forecast:
    """An ensemble of five of scikit-learn's networks, for standardised targets."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import VotingClassifier, VotingRegressor
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.preprocessing import StandardScaler

    if table.classes:
        members = [(str(k), MLPClassifier(random_state=5 * seed + k)) for k in range(5)]
        made = VotingClassifier(members, voting="soft").fit(table.inputs, table.targets)
        return of_classes(table, made.predict_proba(table.test_inputs))

    def make() -> Any:
        members = [(str(k), MLPRegressor(random_state=5 * seed + k)) for k in range(5)]
        return TransformedTargetRegressor(VotingRegressor(members), transformer=StandardScaler())

    return with_residual_scale(table, make)


CONTENDERS: dict[str, Callable[[Table, int], Forecast | None]] = {
    "auto": auto, "ngboost": ngboost, "boosting": boosting, "forest": forest, "process": process, "ridge": ridge,
    "networks": networks,
}  # fmt: skip


def run_cell(name: str, split: int, contender: str, path: Path) -> None:
    """Run one contender on one split, and store the outcome."""
    rows = table(name, split)
    begin, used = time.perf_counter(), time.process_time()
    cell: dict[str, Any] = {"table": name, "split": split, "contender": contender, "rows": len(rows.targets)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            forecast = CONTENDERS[contender](rows, split)
        except Exception as error:  # a peer that fails is a cell that says why
            if contender == "auto":
                raise
            forecast, cell["failed"] = None, " ".join(f"{type(error).__name__}: {error}".split())[:200]
    cell |= {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - used}
    if forecast is not None:
        errors = np.asarray(forecast.mean) - rows.test_targets
        other = float(np.mean(errors != 0)) if rows.classes else float(np.sqrt(np.mean(errors**2)))
        cell |= {
            "nll": -float(np.mean(forecast.log_density)),
            "error": other,
            "coverage": None if forecast.inside is None else float(np.mean(forecast.inside)),
            "log_density": [round(float(value), 5) for value in forecast.log_density],
            "words": forecast.words,
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(cell))
    draft.replace(path)
    print(name, split, contender, f"{cell.get('nll', math.nan):.4f} {cell.get('error', math.nan):.4f}",
          f"{cell['seconds']:.0f} s", file=sys.stderr, flush=True)  # fmt: skip


Cells = dict[tuple[str, str], dict[int, dict[str, Any]]]  # by table and contender, then split


def paired(cells: Cells, name: str, first: str, second: str) -> tuple[float, float] | None:
    """The mean difference of NLL over the splits that both have, and its standard error over all their test rows."""
    ours, theirs = cells.get((name, first), {}), cells.get((name, second), {})
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    gaps = [np.subtract(theirs[s]["log_density"], ours[s]["log_density"]) for s in shared]
    both = np.concatenate(gaps)
    return float(both.mean()), float(both.std(ddof=1) / math.sqrt(len(both)))


def summary(cells: Cells) -> tuple[list[str], dict[str, Any]]:
    """The lines of the page, and the numbers behind them."""
    names = [name for name in (*REGRESSION, *CLASSIFICATION) if (name, "auto") in cells]
    contenders = [c for c in CONTENDERS if any((name, c) in cells for name in names)]
    lines, facts, ranks, wins = [], {}, {c: list[float]() for c in contenders}, 0
    for name in names:
        nll = {c: _mean(cells[name, c], "nll") for c in contenders if (name, c) in cells}
        error = {c: _mean(cells[name, c], "error") for c in nll}
        for rank, c in enumerate(sorted(nll, key=nll.__getitem__), 1):
            ranks[c].append(rank)
        peers = [c for c in nll if c != "auto"]
        best = min(peers, key=nll.__getitem__) if peers else "auto"
        gap = paired(cells, name, "auto", best) or (0.0, 0.0)
        wins += gap[0] <= gap[1]
        linear = paired(cells, name, "auto", LINEAR)
        every = list(cells[name, "auto"].values())
        covered = _mean(cells[name, "auto"], "coverage") if every[0]["coverage"] is not None else None
        seconds = max(cell["cpu_seconds"] for cell in every)
        facts[name] = {
            "nll": nll, "error": error, "best_peer": best, "gap": gap, "linear_gap": linear, "coverage": covered,
            "splits": len(every), "cpu_seconds": {c: _mean(cells[name, c], "cpu_seconds") for c in nll},
        }  # fmt: skip
        shown = ", ".join(f"{c} {value:.4g} / {error[c]:.4g}" for c, value in nll.items())
        verdict = f"auto - {best} = {gap[0]:+.4f} +- {gap[1]:.4f}"
        lines.append(
            f"{name} ({len(every)} splits): {shown}; {verdict}"
            + ("" if linear is None else f"; auto - {LINEAR} = {linear[0]:+.4f} +- {linear[1]:.4f}")
            + ("" if covered is None else f"; 90 % intervals cover {100 * covered:.1f} %")
            + f"; at most {seconds:.0f} CPU s a fit"
        )
    means = {c: statistics.fmean(values) for c, values in ranks.items() if values}
    lines.append(f"Best NLL, or within a paired standard error of the best peer: {wins} of {len(names)} tables.")
    lines.append(
        "Mean rank by NLL: " + ", ".join(f"{c} {rank:.2f}" for c, rank in sorted(means.items(), key=lambda i: i[1]))
    )

    def pooled(left_out: str = "") -> float:
        own = [cell for (name, c), each in cells.items() if c == "auto" and name != left_out for cell in each.values()]
        each = [(cell["coverage"], len(cell["log_density"])) for cell in own if cell["coverage"] is not None]
        return sum(share * count for share, count in each) / max(1, sum(count for _, count in each))

    if pooled():
        lines.append(
            f"Pooled coverage of auto's 90 % intervals: {100 * pooled():.1f} %, "
            f"without {GRID} {100 * pooled(GRID):.1f} %."
        )
    return lines, {"tables": facts, "mean_rank": means, "wins": wins}


def _mean(each: dict[int, dict[str, Any]], name: str) -> float:
    return statistics.fmean(cell[name] for cell in each.values())


def stored(folder: Path) -> tuple[Cells, list[str]]:
    """All cells with a forecast, and a line for each that failed."""
    cells: Cells = {}
    failed = []
    for path in sorted(folder.glob("*.json")):
        cell = json.loads(path.read_text())
        if "nll" in cell:
            cells.setdefault((cell["table"], cell["contender"]), {})[cell["split"]] = cell
        elif "failed" in cell:
            failed.append(f"{cell['contender']} failed on {cell['table']}, split {cell['split']}: {cell['failed']}")
    return cells, failed


def keep(folder: Path, file: Path) -> None:
    """Pack the cells of the peers into one file."""
    paths = (path for path in sorted(folder.glob("*.json")) if not path.stem.endswith("-auto"))
    packed = json.dumps({path.name: json.loads(path.read_text()) for path in paths})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(packed.encode(), mtime=0))


def unpack(file: Path, folder: Path) -> None:
    """Put the cells of the file into the folder, where they are not yet there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, cell in json.loads(gzip.decompress(file.read_bytes())).items() if file.exists() else ():
        if not (folder / name).exists():
            (folder / name).write_text(json.dumps(cell))


def main() -> None:
    """Run the cells that are not there yet, and write the summary of all."""
    words = parser(__doc__ or "")
    words.add_argument("--tables", default=",".join((*REGRESSION, *CLASSIFICATION)), help="names with commas")
    words.add_argument("--contenders", default=",".join(CONTENDERS), help="names with commas")
    words.add_argument("--splits", type=int, default=SPLITS_OF_OTHERS, help="splits of each table (protein: 2 at most)")
    words.add_argument("--cells", type=Path, default=Path("tables_peers_cells"), help="folder of the cells")
    words.add_argument("--afresh", action="store_true", help="run peers again that were run before")
    given = words.parse_args()
    torch.set_num_threads(given.threads)
    logging.getLogger("posterity").setLevel(logging.ERROR)
    if not given.afresh:
        unpack(given.results / KEPT, given.cells)
    for name in given.tables.split(","):
        for split in range(min(given.splits, SPLITS.get(name, given.splits))):
            for contender in given.contenders.split(","):
                path = given.cells / f"{name}-{split}-{contender}.json"
                if not path.exists():
                    run_cell(name, split, contender, path)
    cells, failed = stored(given.cells)
    keep(given.cells, given.results / KEPT)
    lines, facts = summary(cells)
    notes = [
        *lines,
        *failed,
        "Cells: NLL in nats per row / RMSE or error rate, means over splits, units of the target.",
        f"The targets of {GRID} lie on a grid, and auto finds the grid point. Its densities are no "
        "narrower than the grid, so that all intervals hold their target.",
    ]
    write("tables_peers", [], context(given), facts, notes, given.results)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
