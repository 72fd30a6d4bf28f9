"""The verdict of a comparison: which method to take by the NLL of the test rows, and a sentence on why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.cli.frame.options import LEVEL
from posterity.metrics import Bootstrap, bootstrap
from posterity.metrics.scores import mean_over_rows
from posterity.predictive import Predictive
from posterity.report.numbers import with_ends


@dataclass(frozen=True)
class Candidate:
    """A method or baseline that worked: its word, label, NLL of each test row (N,), and whether it is a baseline."""

    word: str
    label: str
    nll: Tensor
    is_baseline: bool = False

    @property
    def mean(self) -> float:
        """The mean NLL over test rows, as in the table."""
        return float(self.nll.double().mean())


@dataclass(frozen=True)
class Verdict:
    """The method to take, the method `against` which it was compared, and their difference in NLL with its interval.

    The difference is the NLL of the worse minus the NLL of the better. `against` is None for a single candidate.
    """

    take: str
    against: str | None
    difference: float | None
    lower: float | None
    upper: float | None
    rows: int
    sentence: str
    level: float = LEVEL


def judge(candidates: Sequence[Candidate], predictive: Predictive, targets: Tensor) -> Verdict:
    """Take the simplest candidate that is not surely worse than another.

    `candidates`, at least one, are ordered from simple to complex. A candidate is surely worse if the paired bootstrap
    interval of the difference in NLL lies above 0. `predictive` and `targets` are of the test rows.
    """

    def paired(worse: Candidate, better: Candidate) -> Bootstrap:
        return _paired(worse, better, predictive, targets)

    def surely_worse(each: Candidate) -> bool:
        return any(paired(each, other).lower > 0 for other in candidates if other.mean < each.mean)

    best = min(candidates, key=lambda candidate: candidate.mean)
    taken = next(each for each in candidates if each is best or not surely_worse(each))
    simpler = candidates[: candidates.index(taken)]
    methods = [each for each in candidates if not each.is_baseline]
    others = [each for each in candidates if each is not taken]
    if taken is not best:
        other, interval = best, paired(taken, best)
        text = (
            f"None is surely better than {taken.label}: take it (NLL {_number(taken.mean)}). {best.label} has "
            f"{_number(best.mean)}, less by {_span(interval, len(targets))}."
        )
    elif taken.is_baseline and methods:
        other = min(methods, key=lambda each: each.mean)
        interval = paired(other, taken)
        text = (
            f"No method is better than {taken.label}: take it (NLL {_number(taken.mean)}). {other.label} has "
            f"{_number(other.mean)}, more by {_span(interval, len(targets))}."
        )
    elif others:
        other = min(simpler or others, key=lambda each: each.mean)
        interval = paired(other, taken)
        text = (
            f"Take {taken.label}: NLL {_number(taken.mean)}, better than {other.label} by "
            f"{_span(interval, len(targets))}."
        )
    else:
        text = f"Take {taken.label}: NLL {_number(taken.mean)}, with nothing to compare it with."
        return Verdict(taken.word, None, None, None, None, len(targets), text)
    point = next(
        (each for each in candidates if each.word == "map" and each.word not in (taken.word, other.word)), None
    )
    if point is not None and (loss := paired(point, taken)).lower > 0:
        text += f" {point.label}, a point estimate, is worse by {_span(loss, len(targets))}."
    trivial = candidates[0]
    if trivial.word in _TRIVIAL:
        if taken is trivial:
            text += " There may be nothing to learn from these inputs, or too few rows to see it."
        worse = [each.label for each in candidates[1:] if each.mean > trivial.mean]
        text += f" Worse than {_TRIVIAL[trivial.word]}: {', '.join(worse)}." if worse else ""
    return Verdict(taken.word, other.word, interval.value, interval.lower, interval.upper, len(targets), text)


def _paired(
    worse: Candidate, better: Candidate, predictive: Predictive, targets: Tensor, rows: Tensor | None = None
) -> Bootstrap:
    """Return the mean difference in NLL over `rows` (None: all test rows) with its interval.

    The difference is 0 in rows whose NLL is infinite for both.
    """
    difference = (worse.nll.double().cpu() - better.nll.double().cpu()).nan_to_num(0.0, math.inf, -math.inf)
    if rows is not None:
        index = rows.to(targets.device)
        difference, predictive, targets = difference[rows], predictive.rows(index), targets[index]
    return bootstrap(mean_over_rows(lambda pred, y: difference), predictive, targets, LEVEL)


def within(taken: str, candidates: Sequence[Candidate], inside: Tensor, predictive: Predictive, targets: Tensor) -> str:
    """Compare the taken candidate with MAP on the test rows that `inside` (N,) marks; "" if few rows are outside.

    Test rows of some data sets lie beyond the training rows, where a point estimate cannot do well. The interval is
    for these training rows: others may give another sign.
    """
    by_word, count = {each.word: each for each in candidates}, int(inside.sum())
    if taken == "map" or "map" not in by_word or count < 20 or count > 0.9 * len(inside):
        return ""
    own, point = by_word[taken], by_word["map"]
    result = _paired(point, own, predictive, targets, torch.where(inside)[0])
    where = f" Fitted to these training rows and tested on the {count} rows among them, {own.label}"
    if result.lower > 0:
        return f"{where} is better than {point.label} by {_span(result, count)}."
    if result.upper < 0:
        return f"{where} is worse than {point.label} by {_span(result, count)}."
    return f"{where} is not surely better than {point.label}: by {_span(result, count)}."


_TRIVIAL: Mapping[str, str] = {"mean": "predicting the mean", "frequencies": "predicting the class frequencies"}


def _span(interval: Bootstrap, rows: int) -> str:
    """Format a difference with its interval, in the digits that the interval supports."""
    value, ends = with_ends(abs(interval.value), [interval.lower, interval.upper])
    return f"{value} ({100 * LEVEL:g} % interval {ends}, {rows:,} test rows)"


def _number(value: float) -> str:
    """Format with three decimals, or with one significant digit below 0.001."""
    return f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1g}"
