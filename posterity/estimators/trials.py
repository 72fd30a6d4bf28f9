"""Trials of the candidates of `fit_automatic`: fits to the folds on an executor, and final fits."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import PosterityError
from posterity.estimators.candidates import EVIDENCE, Candidate, Fitted, Plan, TableRows
from posterity.estimators.gaussian_process import Moments, random_rows
from posterity.inference import Executor
from posterity.inference.callbacks import Bar
from posterity.inference.folds import Fold
from posterity.numerics.random import Key


class Trials(NamedTuple):
    """The scored rows and their folds, and the held-out predictions of each candidate for these rows.

    `effort`: rows and evaluations for fitting a scale. `outputs`: `Moments` of (n, T), or draws of logits (S, n, C).
    `finals`: functions that make the final fits. `words`: messages on candidates that failed or were left out.
    """

    scored: Tensor
    fold: Tensor
    effort: tuple[int, int]
    outputs: dict[str, Any]
    finals: dict[str, Any]
    seconds: dict[str, float]
    words: list[str]


def run_trials(
    rows: TableRows,
    candidates: Sequence[Candidate],
    parts: Sequence[Fold],
    plan: Plan,
    key: Key,
    end: float,
    executor: Executor,
    shown: Bar,
) -> Trials:
    """Fit all candidates to all folds, and predict the scored rows of each.

    All but the first candidate are left out after the time `end`. The bar `shown` advances by the seconds of each.
    """
    device, tests = rows.inputs.device, list[Tensor]()
    used = torch.zeros(len(rows.inputs), dtype=torch.bool, device="cpu")
    if not plan.settled_by_fold:
        used[random_rows(len(used), plan.evidence_rows, key.fold(EVIDENCE))] = True
    for number, part in enumerate(parts):
        free = part.test[~used[part.test]]
        free = free if len(free) else part.test  # all rows of a small group may be used
        chosen = random_rows(len(free), max(1, plan.scored // len(parts)), key.fold("scored").fold(number))
        tests.append(free[chosen.sort().values].to(device))
    moved = [Fold(part.train.to(device), part.test) for part in parts]
    folds = torch.cat([torch.full_like(test, number) for number, test in enumerate(tests)])
    trials = Trials(torch.cat(tests), folds, (plan.evidence_rows, plan.evaluations), {}, {}, {}, [])
    work = {
        candidate.name: partial(_trial, candidate, rows, moved, tests, plan, key, end if number else math.inf)
        for number, candidate in enumerate(candidates)
    }
    answers, spent = {}, {candidate.name: candidate.seconds for candidate in candidates}
    for name, answer in executor.each(work):
        answers[name] = answer
        shown.advance(spent[name])
    for candidate in candidates:  # in their order, whichever was ready first
        match answers[candidate.name]:
            case Trial(outputs, final, seconds):
                trials.outputs[candidate.name] = outputs
                trials.finals[candidate.name], trials.seconds[candidate.name] = final, seconds
            case PosterityError() as lost:
                trials.words.append(failure_message(candidate.name, lost))
            case why:
                trials.words.append(str(why))
    if not trials.outputs:
        raise PosterityError(f"fit_automatic: no candidate could be fitted: {'; '.join(trials.words)}.")
    return trials


class Trial(NamedTuple):
    """A candidate's predictions for the scored rows, the function of its final fit, and the seconds of its fits."""

    outputs: Any
    final: Callable[[], Fitted]
    seconds: float


def _trial(
    candidate: Candidate,
    rows: TableRows,
    folds: Sequence[Fold],
    tests: Sequence[Tensor],
    plan: Plan,
    key: Key,
    end: float,
) -> Trial | str:
    """Fit a candidate to all folds, and predict the scored rows of each; return a message if that fails."""
    if time.time() > end:
        return f"the clock left no time for the {candidate.name}"
    begin = time.perf_counter()
    try:
        fits, final = candidate.fits(rows, folds, plan, key)
        return Trial(_predicted(rows, fits, tests), final, time.perf_counter() - begin)
    except (PosterityError, RuntimeError, ValueError) as error:
        return failure_message(candidate.name, error)


def finals(trials: Trials, names: Sequence[str], executor: Executor) -> dict[str, Fitted]:
    """Fit these candidates to all rows."""
    fits: dict[str, Fitted] = {}
    for name, fit in executor.each({name: trials.finals[name] for name in names}):
        if isinstance(fit, PosterityError):
            raise PosterityError(f"fit_automatic: {failure_message(name, fit)}.")
        fits[name] = fit
    return {name: fits[name] for name in names}


def _predicted(rows: TableRows, fits: Sequence[Fitted], tests: Sequence[Tensor]) -> Any:
    """Return the predictions of the fits for the scored rows of their folds, concatenated."""
    if rows.classes:
        predictions: Any = torch.cat([fit.logits(rows.inputs[test]) for fit, test in zip(fits, tests, strict=True)], 1)
    else:
        each = [fit.moments(rows.inputs[test]) for fit, test in zip(fits, tests, strict=True)]
        predictions = Moments(*(torch.cat(column) for column in zip(*each, strict=True)))
    if not all(bool(torch.isfinite(tensor).all()) for tensor in ([predictions] if rows.classes else predictions)):
        raise PosterityError("it predicts numbers that are not finite")
    return predictions


def failure_message(name: str, error: Exception) -> str:
    """Return the message for a candidate that could not be fitted."""
    return f"the {name} failed ({' '.join(str(error).split())})"
