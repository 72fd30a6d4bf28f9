"""The pages of docs/ have the numbers of results/."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "penalties.md").read_text(encoding="utf-8")
FOLDERS = {
    "CIFAR-10, `ConvNet`": "cifar-10",
    "MNIST, `ConvNet(width=8)`": "mnist",
    "CIFAR-10, `VGG(19)`": "cifar-10-vgg19",
    "CIFAR-10, `ConvNet`, step size 0.01": "cifar-10-short-steps",
    "CIFAR-10, `ConvNet(batch_norm=False)`": "cifar-10-no-batch-norm",
}


def shown(accuracy, published=None):
    """An accuracy in per cent, with its spread over seeds and the authors' own."""
    spread = accuracy["standard_deviation"]
    text = f"{100 * accuracy['mean']:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")
    return text if published is None else f"{text} ({published:.2f})"


def shown_ratio(line, published=None):
    """lambda_Th / lambda*, a bound where lambda* is at the end of the grid."""
    ratio = line["theory_over_best"]
    bound = (">= " if ratio > 1.0 else "<= ") if line["lambda_best_at_the_end_of_the_grid"] else ""
    text = bound + (f"{ratio:.0f}" if ratio >= 1000 else f"{ratio:.3g}")
    return text if published is None else f"{text} ({10**published:.3g})"


def cells(penalty, lines):
    """What the page says of a penalty, from the lines of the study's table by setup."""
    usual, bayesian = lines.get("usual"), lines["bayesian"]
    own = bayesian["published"] or {}
    return (
        f"`{penalty}`",
        *([] if usual is None else [shown(usual["accuracy_at_best"], (usual["published"] or {}).get("best"))]),
        shown(bayesian["accuracy_at_best"], own.get("best")),
        shown(bayesian["accuracy_at_theory"], own.get("at_theory")),
        shown_ratio(bayesian, own.get("log_ratio")),
    )


def flowing(page):
    """The text without its line ends."""
    return " ".join(page.split())


def results(folder):
    """All that a study of penalties wrote."""
    return json.loads((ROOT / "results" / "penalties" / folder / "results.json").read_text(encoding="utf-8"))


def table(folder):
    """The lines of a study's table, by penalty and setup."""
    by_penalty: dict[str, dict[str, dict]] = {}
    for line in results(folder)["table"]:
        by_penalty.setdefault(line["penalty"], {})[line["setup"]] = line
    return by_penalty


@pytest.mark.parametrize(("title", "folder"), FOLDERS.items(), ids=FOLDERS.values())
def test_the_page_on_penalties_has_the_numbers_of_the_study(title, folder):
    body = re.search(rf"^\| {re.escape(title)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert body is not None
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in body.group(1).splitlines()]
    assert rows == [cells(penalty, lines) for penalty, lines in table(folder).items()]


def test_the_page_says_what_a_shorter_step_does_to_a_deep_network():
    long, short = (table(folder)["l2"]["bayesian"] for folder in ("cifar-10-vgg19", "cifar-10-vgg19-short-steps"))
    before, after, best = (
        shown(part) for part in (long["accuracy_at_theory"], short["accuracy_at_theory"], short["accuracy_at_best"])
    )
    words = flowing(PAGE)
    assert f"from {before} to {after} % at lambda_Th" in words
    assert f"0.1 lambda_Th, the least that was tried, has {best} %" in words
    assert short["lambda_best_at_the_end_of_the_grid"]
    assert short["theory_over_best"] == pytest.approx(10)


def test_the_page_says_what_pruning_took_and_what_it_cost():
    (best,), (pruned,) = (results("mnist-pruning")[part] for part in ("table", "pruning_at_equal_accuracy"))
    words = flowing(PAGE)
    gone, lighter = 100 * pruned["filters_vanished"], 100 - 100 * pruned["scores"]["weights_left"]["mean"]
    assert pruned["ratio"] == 1.0
    assert f"loses {gone:.0f} % of its filters, and {lighter:.0f} % of its weights, at lambda_Th" in words
    accuracies = shown(pruned["scores"]["accuracy"]), shown(best["accuracy_at_best"])
    assert "test accuracy {} %, where the best lambda has {} %".format(*accuracies) in words
    off, exact = (f"{pruned[name]:.0e}" for name in ("largest_pruned_difference", "largest_exact_difference"))
    assert f"off by {off.replace('e-06', 'e-6')} at most in float32, by {exact} in float64" in words


def test_the_page_of_studies_has_the_numbers_of_those_of_penalties():
    words = flowing((ROOT / "docs" / "studies.md").read_text(encoding="utf-8"))
    lines = table("cifar-10")
    best = [100 * line["accuracy_at_best"]["mean"] for setups in lines.values() for line in setups.values()]
    assert f"reach {min(best):.1f} to {max(best):.1f} %" in words
    ratios = [setups["bayesian"]["theory_over_best"] for setups in lines.values()]
    assert f"the best lambda is {min(ratios):.0f} to {max(ratios):.0f} times smaller than lambda_Th" in words
    squared, *others = losses("cifar-10")
    assert f"{squared:.1f} points lower with squared L2 and {min(others):.0f} to {max(others):.0f} with" in words
    squared, *others = losses("cifar-10-short-steps")
    assert squared == 0
    assert f"is the best lambda with squared L2 and {min(others):.1f} to {max(others):.1f} points below" in words
    after, before = (
        100 * table(folder)["l2"]["bayesian"]["accuracy_at_theory"]["mean"]
        for folder in ("cifar-10-vgg19-short-steps", "cifar-10-vgg19")
    )
    assert f"has {after:.1f} % at lambda_Th instead of {before:.1f} %" in words
    (pruned,) = results("mnist-pruning")["pruning_at_equal_accuracy"]
    (loss,) = losses("mnist-pruning")
    assert f"takes away {100 * pruned['filters_vanished']:.0f} % of the filters for {loss:.2f} points" in words


def losses(folder):
    """By how many points accuracy at lambda_Th is below the best, for each penalty."""
    lines = [setups["bayesian"] for setups in table(folder).values()]
    return [100 * (line["accuracy_at_best"]["mean"] - line["accuracy_at_theory"]["mean"]) for line in lines]


def test_the_page_on_which_method_is_made_of_the_results():
    made = runpy.run_path(str(ROOT / "docs" / "make_which.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "make reference writes it"
    assert len(made["TEXT"].splitlines()) < 60  # two screens


SHIFT = {
    "MNIST, LeNet": ("mnist", "lenet"),
    "MNIST, LeNet, augmented": ("mnist-augmented", "lenet"),
    "MNIST, one hidden layer of 400": ("mnist", "mlp"),
}


@pytest.mark.parametrize(("title", "folder", "network"), [(title, *place) for title, place in SHIFT.items()])
def test_the_section_on_shift_has_the_numbers_of_the_study(title, folder, network):
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    body = re.search(rf"^\| {re.escape(title)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert body is not None
    known = json.loads((ROOT / "results" / "shift" / folder / "results.json").read_text(encoding="utf-8"))["rows"]
    scores = ("nll", "ece", "calibrated_nll", "calibrated_ece")
    expected = [
        (
            row["label"],
            f"{100.0 * (1.0 - row['accuracy']):.2f}",
            *(f"{row[score]:.4f}" for score in scores),
            f"{row['changed_nll']:.3f}",
            f"{row['auroc_kmnist']:.3f}",
        )
        for row in known
        if row["network"] == network
    ]
    assert [
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in body.group(1).splitlines()
    ] == expected
