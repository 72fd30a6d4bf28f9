"""Writes docs/which-method.md from the results of studies and benchmarks: python docs/make_which.py.

The sentences are written here; every number in them is read from `results` and `benchmarks/results`.
"""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "which-method.md"
PROBLEMS = {
    "moons": "two moons",
    "sine": "sin(x) + x",
    "breast-cancer": "breast cancer",
    "energy": "energy",
    "boston": "boston",
}
SHOWN = ("map", "ensemble", "laplace", "mean-field", "full-rank", "swag", "sghmc", "mclmc", "chees", "mams")
"""The methods of the table; results/fidelity has all."""
TEXT = """\
# Which method when

| you have | take | because |
|---|---|---|
| a table | `posterity fit`, `BayesianRegressor`, `BayesianClassifier`: `auto` | \
Best held-out NLL, or within one paired standard error of the best of six peers, on {wins} of {tables} tables \
([results](../benchmarks/results/tables_peers.md)); below the published NLL of MC dropout and of deep ensembles on \
{uci_wins} of {uci_sets} UCI sets ([results](studies.md#uci)). |
| a table, and intervals that must hold | `--conformal cv+` | \
{conformal} of the test rows of {conformal_tables} tables lie in their 90 % intervals \
([results](../benchmarks/results/conformal_coverage.md)). |
| a linear model | `Conjugate` | It is exact. |
| a logistic, probit or Poisson regression | `ExpectationPropagation`, or `NUTS` for draws | \
Its mean is closer to the posterior's than that of Laplace in {ep_wins} of {ep_count} random problems \
([results](../benchmarks/results/expectation_propagation.md)). |
| a network of some hundred weights | `MAMS` or `ChEES`; `NUTS` to check them | \
Within {near} of the exact predictive in a tenth of NUTS's time on {near_count} of {problem_count} problems (below). |
| a network that is trained already | `po.laplace(net, loader, ...)` | \
Held-out NLL and ECE rise by at most 0.005 on {harmless} of {networks} networks, and NLL falls by {overfit:.3f} \
(standard error {overfit_error:.3f}) on the over-trained one ([results](../benchmarks/results/posthoc.md)). |
| a network to train once | `MAP`, then `Laplace` | \
One more pass over the rows. Leave the prior out, or give validation rows: one that is given is kept, and one hidden \
layer on MNIST then had the NLL {given_laplace}, and {given_map} without Laplace ([results](studies.md#shift)). \
`MeanField`, `NaturalGradient` and `optim.IVON` train a Gaussian in one run; on small networks it is no closer to the \
posterior than the two (below). |
| time to train a network five times | `Ensemble` | \
LeNet on MNIST: NLL {ensemble_nll} and ECE {ensemble_ece}, one member {map_nll} and {map_ece}; with moved training \
images NLL {moved_nll} ([results](studies.md#shift)). |
| no validation rows, unknown prior and noise | leave them out: `Normal()`, `Gaussian()` | \
Every method chooses them, and says how ([scales.md](scales.md)). |

## Distance to the exact posterior

Five small problems with one hidden layer of ten units, given prior and noise. The truth is long runs of NUTS. Total
variation of the predictive, mean over test inputs:

{distances}

One run of the truth lies {floors} from the others; on boston its R-hat is {boston_rhat:.3f}, so that nothing below
{boston_floor:.3f} can be told there. `posterity study fidelity --out results/fidelity` made these numbers and the
figure, which has {methods} methods.

![Total variation to the exact predictive against seconds](../results/fidelity/distances.png)

What it shows: samplers that move all chains at once reach the posterior in seconds. Gaussians do not, whatever fits
them: where a table has as few rows as weights (energy, boston), `Laplace` is no closer than the point it is built on.

## Beside other libraries

The same network, rows and steps; other libraries at the settings that they document, ours at their defaults where these
choose. Test NLL, the best row of a library where it has several, and - where it was not run.
[The results](../benchmarks/results/peers_quality.md) have all rows, seconds, sources and caveats;
`python -m benchmarks.peers_quality` makes them.

{peers}

One seed, part of the rows of MNIST, one split of each table: small differences mean nothing. Ensembles of
torch-uncertainty learn a noise for each row of a table, which ours do not.

## What is not known yet

The same comparison for ResNet-20 on CIFAR-10, with the HMC chains of Izmailov et al. (2021) for the truth, has not been
run to its end: `posterity study fidelity --problem cifar-10 --device cuda` ([studies.md](studies.md)). So this page
says nothing of networks larger than LeNet, beyond what Laplace does to those it was tried on.
"""


def results(path: str) -> Any:
    """Return the results of a study or benchmark, from its JSON file."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def page() -> str:
    """Return the text of the page."""
    return TEXT.format(**tables(), **uci(), **images(), **regressions(), **trained(), **fidelity(), **peers())


def tables() -> dict[str, Any]:
    """Return what was measured on tables."""
    peers, cover = (
        results(f"benchmarks/results/{name}.json")["facts"] for name in ("tables_peers", "conformal_coverage")
    )
    return {
        "wins": peers["wins"],
        "tables": len(peers["tables"]),
        "conformal": f"{100 * cover['all, cv+']:.1f} %",
        "conformal_tables": sum(not name.startswith("all") for name in cover),
    }


def uci() -> dict[str, Any]:
    """Return on how many UCI sets auto has a lower NLL than both published baselines."""
    document = results("results/uci/auto/results.json")
    own = {row["data_set"]: row["scores"]["test_nll"]["mean"] for row in document["methods"]}
    lowest = {name: math.inf for name in own}
    for row in document["published"]:
        if row["metric"] == "test_nll" and row["method"].startswith(("MC dropout, 1 hidden layer, grid", "Deep ens")):
            lowest[row["data_set"]] = min(lowest[row["data_set"]], row["mean"])
    return {"uci_wins": sum(own[name] < lowest[name] for name in own), "uci_sets": len(own)}


def images() -> dict[str, Any]:
    """Return the scores of networks on MNIST, of one fit, of an ensemble, and of Laplace under a given prior."""
    plain, moved = (
        {(row["network"], row["method"]): row for row in results(f"results/shift/{name}/results.json")["rows"]}
        for name in ("mnist", "mnist-augmented")
    )
    return {
        **{f"{n}_{key}": f"{plain['lenet', n][key]:.4f}" for n in ("map", "ensemble") for key in ("nll", "ece")},
        **{f"given_{name}": f"{plain['mlp', name]['nll']:.3f}" for name in ("map", "laplace")},
        "moved_nll": f"{moved['lenet', 'ensemble']['nll']:.4f}",
    }


WORKS = {
    "Laplace": ("laplace-torch", "po.laplace"),
    "IVON": ("ivon-opt", "optim.IVON"),
    "mean field": ("bayesian-torch", "MeanField"),
    "ensemble": ("torch-uncertainty", "Ensemble"),
    "dropout": ("torch-uncertainty", "MCDropout"),
}
"""What is compared: the other library, and our name."""


def peers() -> dict[str, Any]:
    """Return the table of test NLL beside other libraries."""
    facts = results("benchmarks/results/peers_quality.json")["facts"]
    names = [{"mnist": "MNIST"}.get(name, name) for name in facts]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for work, (library, own) in WORKS.items():
        theirs = [
            min((row["nll"] for row in rows.values() if (row["library"], row["work"]) == (library, work)), default=None)
            for rows in facts.values()
        ]
        ours = [rows[own]["nll"] if own in rows else None for rows in facts.values()]
        for label, nlls in ((library, theirs), (f"`{own}`", ours)):
            cells = " | ".join("-" if nll is None else f"{nll:.3f}" for nll in nlls)
            lines.append(f"| {work}: {label} | {cells} |")
    return {"peers": "\n".join(lines)}


def regressions() -> dict[str, Any]:
    """Return in how many regressions the mean of EP is closer than that of Laplace."""
    errors = results("benchmarks/results/expectation_propagation.json")["errors"]
    pairs = [
        (own[0], other[0]) for part in errors.values() for own, other in zip(part["EP"], part["Laplace"], strict=True)
    ]
    return {"ep_wins": sum(own < other for own, other in pairs), "ep_count": len(pairs)}


def trained() -> dict[str, Any]:
    """Return what Laplace did to networks trained elsewhere."""
    networks = results("benchmarks/results/posthoc.json")["facts"]["networks"]
    (overfit,) = (network["difference"] for network in networks if network["network"].startswith("over-trained"))
    harmless = [n for n in networks if n["difference"][0] <= 0.005 and n["ece"][1] - n["ece"][0] <= 0.005]
    return {"networks": len(networks), "harmless": len(harmless), "overfit": -overfit[0], "overfit_error": overfit[1]}


def fidelity() -> dict[str, Any]:
    """Return the distances to exact posteriors."""
    problems = {problem["problem"]: problem for problem in results("results/fidelity/results.json")["problems"]}
    rows = {name: {row["method"]: row for row in problems[name]["methods"]} for name in PROBLEMS}
    lines = [f"| method | {' | '.join(PROBLEMS.values())} | seconds, mean |", f"|---|{'---|' * (len(PROBLEMS) + 1)}"]
    for method in SHOWN:
        each = [rows[name][method] for name in PROBLEMS]
        values = " | ".join(f"{row['total_variation']:.3f}" for row in each)
        lines.append(f"| {each[0]['label']} | {values} | {fmean(row['seconds'] for row in each):.2g} |")
    seconds = [problems[name]["nuts_seconds"] for name in PROBLEMS]
    longest = [
        min(row["total_variation"] for word, row in rows[name].items() if word.startswith("nuts")) for name in PROBLEMS
    ]
    lines.append(f"| NUTS | {' | '.join(f'{value:.3f}' for value in longest)} | {fmean(seconds):.3g} |")
    floors = [problems[name]["truth"]["floor"]["total_variation"] for name in PROBLEMS]
    return {
        "distances": "\n".join(lines),
        "near": 0.02,
        "near_count": sum(bool(problems[name]["near_in_a_tenth"]) for name in PROBLEMS),
        "problem_count": len(PROBLEMS),
        "floors": f"{min(floors):.3f} to {max(floors):.3f}",
        "boston_rhat": problems["boston"]["truth"]["rhat"],
        "boston_floor": problems["boston"]["truth"]["floor"]["total_variation"],
        "methods": sum(not word.startswith("nuts") for word in rows["moons"]) + 1,
    }


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
