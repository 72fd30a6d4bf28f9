"""Whether every method is right at its defaults: distance to its own optimum, what it said, held-out NLL.

    python -m benchmarks.defaults
    python -m benchmarks.defaults --cases linear,mlp-1-12-1 --methods MAP,MeanField
    python -m benchmarks.defaults --quick

Cases: 20 random conjugate regressions, logistic and Poisson regressions with quadrature truth, two networks with given
scales, two moons, and tables whose scales of prior and noise are left out. A row that is beyond a limit without a
warning is "far and silent", and there should be none. A run replaces its own rows of the results and keeps the others.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.defaults_cases import LINEAR, chosen
from benchmarks.defaults_measures import LIMITS, REFERENCE_STEPS, Row, measured
from benchmarks.defaults_methods import METHODS, fit
from benchmarks.harness import context, parser, report
from posterity.errors import PosterityError

QUICK: tuple[str, ...] = (
    "linear-00",
    "linear-01",
    "linear-02",
    "linear-03",
    "logistic-2",
    "poisson-2",
    "mlp-1-12-1",
    "two-moons",
)
QUICK += ("diabetes", "breast-cancer")
GROUPS = {
    "linear": "(a) conjugate regressions",
    "glm": "(b) logistic and Poisson regressions",
    "mlp": "(c) networks with given scales",
    "moons": "(d) two moons",
    "tables": "(e) tables",
}
WIDTH = 160  # of a table that goes to a file
HEAD: tuple[str, ...] = ("method", "runs", "distance", "nats", "moments", "R-hat", "NLL - plug-in", "NLL - baseline")
HEAD += ("warned", "failed", "far", "far and silent", "seconds")


def main() -> None:
    """Run the chosen methods on the chosen cases, show the table, and write the results."""
    words = parser(__doc__ or "")
    words.add_argument("--cases", default="", help="beginnings of names of cases, with commas (default all)")
    words.add_argument("--methods", default="", help="names of methods, with commas (default all)")
    words.add_argument("--quick", action="store_true", help="ten cases, and HMC as the only sampler of whole data")
    words.add_argument("--samplers-on", type=int, default=4, help="linear regressions for samplers (default 4)")
    words.add_argument("--reference-steps", type=int, default=REFERENCE_STEPS, help="of a long run on the ELBO")
    options = words.parse_args()
    torch.set_num_threads(options.threads)
    names = [name for name in options.methods.split(",") if name] or list(METHODS)
    for name in names:
        if name not in METHODS:
            words.error(f"--methods: there is no {name!r}. Choose from {', '.join(METHODS)}.")
    cases = [name for name in options.cases.split(",") if name] or (list(QUICK) if options.quick else [])
    if options.quick:
        names = [name for name in names if name == "HMC" or not METHODS[name].sampler]
    about, rows, notes = context(options, ["posterity", "scikit-learn"]), list[Row](), list[str]()
    for case_name, make in chosen(cases, options.seed):
        try:
            case = make()
        except (ImportError, OSError, PosterityError) as error:
            notes.append(f"{case_name} is left out: {' '.join(str(error).split())[:200]}")
            continue
        start = fit(METHODS["MAP"], case, None, options.seed).posterior
        for name in names:
            entry = METHODS[name]
            late = case.group == "linear" and int(case_name[-2:]) >= min(options.samplers_on, LINEAR)
            if not entry.applies(case_name, case.group) or (entry.sampler and late):
                continue
            rows.append(measured(name, case, start, options.seed, options.reference_steps))
            print(_line(rows[-1]), file=sys.stderr, flush=True)
        documents = merged(options.results / "defaults.json", rows, about)
        write(documents, about, notes, options.results)  # after each case: an interrupted run keeps what it has
    _show([row.document() for row in rows])


def merged(path: Path, rows: Iterable[Row], about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the file at `path` with these in place of earlier ones, in the order of cases and methods."""
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    table = {(row["case"], row["method"]): row for row in known if row["method"] in METHODS}
    for row in rows:
        made = {"date": about["date"], "command": about["command"], "versions": about["versions"]}
        table[row.case, row.method] = {**row.document(), **made}
    cases, methods = [name for name, _ in chosen([])], list(METHODS)
    present = [key for key in table if key[0] in cases]
    return [table[key] for key in sorted(present, key=lambda key: (cases.index(key[0]), methods.index(key[1])))]


def summary(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """For each group of cases its title and a line for each method: the worst measures, and counts."""
    tables = []
    for group, title in GROUPS.items():
        lines = []
        for method in METHODS:
            own = [row for row in rows if row["group"] == group and row["method"] == method]
            if own:
                lines.append(_cells(method, own))
        tables.append((title, lines))
    return [(title, lines) for title, lines in tables if lines]


def _cells(method: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    def worst(name: str, style: str = ".3g") -> str:
        values = [row[name] for row in rows if row[name] is not None]
        return format(max(values), style) if values else ""

    far = [row for row in rows if row["far"]]
    kinds = sorted({name for row in far for name in row["far"]})
    silent = sum(row["far_and_silent"] for row in rows)
    return [
        method,
        str(len(rows)),
        worst("distance"),
        worst("gap") or worst("below_mode"),
        worst("moment_error"),
        worst("rhat"),
        worst("against_plug_in", "+.3f"),
        worst("against_baseline", "+.3f"),
        str(sum(bool(row["said"]) for row in rows) or ""),
        str(sum(bool(row["error"]) for row in rows) or ""),
        f"{len(far)} ({', '.join(kinds)})" if far else "",
        str(silent or ""),
        f"{sum(row['seconds'] for row in rows) / len(rows):.1f}",
    ]


def _line(row: Row) -> str:
    measures = {"distance": row.distance, "gap": row.gap, "R-hat": row.rhat, "NLL - plug-in": row.against_plug_in}
    shown = ", ".join(f"{name} {value:.3g}" for name, value in measures.items() if value is not None)
    state = row.error or ("far and silent" if row.silent else "far, said" if row.far else "good")
    return f"{row.case}: {row.method}: {shown or 'no measure'}; {state}, {row.seconds:.1f} s"


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for title, lines in summary(rows):
        shown = [column for column in range(len(HEAD)) if any(line[column] for line in lines)]
        table = Table(*(HEAD[column] for column in shown), title=title)
        for line in lines:
            style = "red" if line[HEAD.index("far and silent")] else None
            table.add_row(*(line[column] for column in shown), style=style)
        console.print(table)


def write(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any], notes: Sequence[str], folder: Path) -> None:
    """Write `defaults.json` with every number and `defaults.md` with the tables."""
    document = {"topic": "defaults", **about, "limits": LIMITS, "notes": list(notes), "rows": list(rows)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "defaults.json").write_text(json.dumps(document, indent=1) + "\n")
    silent = [f"{row['case']}: {row['method']}" for row in rows if row["far_and_silent"]]
    lines = ["# defaults", "", "Every method at its defaults; the worst of its runs in each column.", ""]
    for title, table in summary(rows):
        lines += [f"## {title}", "", "| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
        lines += ["| " + " | ".join(line) + " |" for line in table] + [""]
    lines += [
        f"{len(silent)} of {len(rows)} runs are far and silent{': ' if silent else ''}{', '.join(silent)}.",
        "",
        "- distance: of a point to the mode (of its own basin for networks), in posterior standard deviations.",
        "- nats: of ELBO below the optimum of the family (a long run, for networks), of log evidence below its maximum "
        "for methods that tune; of the log joint density below the mode for points.",
        "- moments: largest error of a mean or standard deviation of draws, in posterior standard deviations.",
        f"- far: beyond a limit: {', '.join(f'{name} {limit:g}' for name, limit in LIMITS.items())}.",
        "- warned, failed: runs that logged a warning about the result, and that ended in an error.",
        "- Runs may be of several commands: `defaults.json` has each with its own, its date and its versions.",
        "",
        report([], about, notes),
    ]
    (folder / "defaults.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
