"""The rows of a comparison: runs of methods and baselines, each with its predictions or its failure."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from posterity.cli.frame import tasks
from posterity.cli.frame.baselines import Baseline, baselines
from posterity.cli.frame.columns import nll_rows, scores_and_intervals
from posterity.cli.frame.executors import IN_TURN, executor_named
from posterity.cli.frame.fitting import Fitter, Model, timed_automatic
from posterity.cli.frame.options import AUTO, METHODS, method_label
from posterity.cli.frame.output import error_line, hint_line, log
from posterity.cli.frame.scores import among_training_rows, chains_of, elsewhere, evidence, far_away, negative_limits
from posterity.cli.frame.sources import Source
from posterity.cli.frame.tasks import Stage, Task, kl_weight, warm_up
from posterity.cli.frame.verdict import Candidate, judge, within
from posterity.errors import Diverged, PosterityError
from posterity.inference import Executor, Trace
from posterity.inference.callbacks import bar
from posterity.posteriors import Posterior
from posterity.predictive import Predictive
from posterity.processes import LostProcess
from posterity.recipes.methods import RECIPES
from posterity.scale.parcels import Lost
from posterity.storage import RunFolder

Result = TypeVar("Result")
INTERRUPTED = 130
LETTERS = 48  # longest reason of a failure in a row of the table


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a method or a baseline: its predictive at the test rows and its numbers, or its failure.

    `traces` has the trace of each stage. Of a failure, `failed` is the message, `reason` a short form of it, `code` the
    exit code, and `said` the line on standard error with its hints.
    """

    word: str
    label: str
    numbers: dict[str, Any]
    predictive: Predictive | None = None
    posterior: Model | None = None
    traces: Mapping[str, Trace] = field(default_factory=dict)
    failed: str | None = None
    reason: str | None = None
    code: int = 0
    said: tuple[str, ...] = ()

    @property
    def worked(self) -> bool:
        """Whether the method has predictions."""
        return self.failed is None


def run_methods(names: Sequence[str], task: Task, auto: Fitter, *, quiet: bool, debug: bool) -> list[Outcome]:
    """Run methods in turn, or on an executor; stages that several methods begin with run once.

    A failed stage fails only the methods that need it. An interruption stops the running method and skips the rest. The
    seconds of a method exclude stages that it shares with another (see `shares`).
    """
    warm_up()
    done: dict[tuple[str, ...], Stage | Outcome] = {}
    outcomes: list[Outcome] = []
    interrupted = False
    if auto.executor not in (None, IN_TURN) and set(names) != {AUTO}:
        try:
            _run_on_executor(names, task, done, executor_named(auto.executor), quiet=quiet, debug=debug)
        except KeyboardInterrupt:
            interrupted = True
            log("interrupted: what is finished follows", quiet=quiet)
    for name in names:
        if interrupted and (name == AUTO or RECIPES[name].stages not in done):
            outcomes.append(_failed(name, method_label(name), "not run: interrupted before", "not run", INTERRUPTED))
            continue
        try:
            if name == AUTO:
                call = partial(_run_automatic, auto, task, quiet=quiet)
                outcomes.append(_attempt_and_print(AUTO, AUTO, call, debug=debug))
            else:
                outcomes.append(_run_method(name, names, task, done, quiet=quiet, debug=debug))
        except KeyboardInterrupt:
            if not any(outcome.worked for outcome in outcomes):
                raise  # there is nothing to keep
            interrupted = True
            outcomes.append(_failed(name, method_label(name), "interrupted", "interrupted", INTERRUPTED))
            log("interrupted: what is finished follows", quiet=quiet)
    if interrupted and not any(outcome.worked for outcome in outcomes):
        raise KeyboardInterrupt
    return outcomes


def run_baselines(source: Source, *, debug: bool) -> list[Outcome]:
    """Fit every baseline that suits the data."""
    rows, classes = source.data.train, len(source.data.classes or ())

    def outcome(each: Baseline) -> Outcome:
        begin = time.perf_counter()
        predictive = each.fit(rows, classes)(source.data.test.inputs)
        seconds = round(time.perf_counter() - begin, 3)
        numbers = {**_scored(predictive, source), "seconds": seconds}
        return Outcome(each.word, each.label, numbers, predictive)

    return [
        _attempt_and_print(each.word, each.label, lambda each=each: outcome(each), debug=debug)  # type: ignore[misc]
        for each in baselines(source.data)
    ]


def stored_outcome(word: str, source: Source, model: Model, path: Path, seconds: float | None = None) -> Outcome:
    """Score a loaded model at the test rows of a source, if there are any."""
    numbers: dict[str, Any] = {"seconds": seconds}
    predictive = None
    if len(source.data.test):
        predictive = model.predict(source.data.test.inputs)
        numbers |= _scored(predictive, source)
        if len(source.data.train):
            numbers["far"] = far_away(model, predictive, source)
    return Outcome(word, method_label(word), numbers, predictive, model, stored_traces(path))


def stored_traces(path: Path) -> dict[str, Trace]:
    """Load the trace of each stage of a run."""
    folder = RunFolder(path)
    stages: dict[str, dict[str, Tensor]] = {}
    for name, tensor in (folder.read("trace").tensors if "trace" in folder.parts() else {}).items():
        kind, stage, rest = name.split(".", 2)  # "value.map.loss"
        stages.setdefault(stage, {})[f"{kind}.{rest}"] = tensor
    return {stage: Trace.from_tensors(tensors) for stage, tensors in stages.items()}


def verdict(source: Source, worked: Mapping[str, Outcome]) -> dict[str, Any] | None:
    """Return the verdict over the outcomes that worked, as JSON; None if none worked.

    Baselines are simpler than methods, and methods come in the order of `METHODS`, MAP first and auto last.
    """
    order = [*(word for word in worked if word not in METHODS), *(word for word in METHODS if word in worked)]
    if not order:
        return None
    candidates = []
    for word in order:
        predictive = worked[word].predictive
        assert predictive is not None
        candidates.append(Candidate(word, worked[word].label, nll_rows(predictive, source), word not in METHODS))
    last = worked[order[-1]].predictive
    assert last is not None
    targets = source.data.test.targets
    result = judge(candidates, last, targets)
    inside = within(result.take, candidates, among_training_rows(source.data), last, targets)
    far = {outcome.label: outcome.numbers["far"] for outcome in worked.values() if outcome.numbers.get("far")}
    return {**asdict(result), "sentence": result.sentence + inside + elsewhere(worked[result.take].label, far)}


def shares(name: str, names: Collection[str]) -> str | None:
    """Return the compared method from whose result `name` starts, if any."""
    before = RECIPES[name].after if name != AUTO else ()
    begins = [before[:count] for count in range(len(before), 0, -1)]
    named = [other for other in names if other != AUTO]
    return next((other for begin in begins for other in named if RECIPES[other].stages == begin), None)


def _run_automatic(auto: Fitter, task: Task, *, quiet: bool) -> Outcome:
    model, seconds = timed_automatic(auto, task.source, quiet=quiet)
    return _outcome(AUTO, task, model, seconds, {}, chosen=model.sentence)


def _run_method(
    name: str,
    names: Sequence[str],
    task: Task,
    done: dict[tuple[str, ...], Stage | Outcome],
    *,
    quiet: bool,
    debug: bool,
) -> Outcome:
    """Run the stages of a method that are not in `done`, store them there, and score the method."""
    recipe, seconds, before = RECIPES[name], 0.0, shares(name, names)
    stages: list[Stage] = []
    for count in range(1, len(recipe.stages) + 1):
        path = recipe.stages[:count]
        if path not in done:
            start, stage = stages[-1] if stages else None, path[-1]
            done[path] = _attempt_stage(stage, task, start, quiet=quiet, debug=debug)
        result = done[path]
        if isinstance(result, Outcome):
            if path == recipe.stages:
                return result
            why = f"it starts from {result.label}, which failed: {result.failed}"
            return _failed(name, recipe.label, why, f"{result.label} failed", result.code)
        if before is None or count > len(RECIPES[before].stages):
            seconds += result.seconds
        stages.append(result)
    traces = {stage: each.trace for stage, each in zip(recipe.stages, stages, strict=True)}
    return _attempt_and_print(
        name, recipe.label, partial(_outcome, name, task, stages[-1].posterior, seconds, traces), debug=debug
    )


def _outcome(
    name: str, task: Task, model: Model, seconds: float, traces: Mapping[str, Trace], chosen: str | None = None
) -> Outcome:
    """Score a fitted method; `chosen` is the sentence of `auto`."""
    predictive = model.predict(task.data.test.inputs)
    numbers: dict[str, Any] = {
        **_scored(predictive, task.source),
        "chosen": chosen,
        "far": far_away(model, predictive, task.source),
        "evidence": evidence(model, task),
        "kl_weight": kl_weight(name, task),
        "chains": chains_of(model, task),
        "negative_limits": negative_limits(predictive, task.source),
        "seconds": round(seconds, 3),
    }
    return Outcome(name, method_label(name), numbers, predictive, model, traces)


def _run_on_executor(
    names: Sequence[str],
    task: Task,
    done: dict[tuple[str, ...], Stage | Outcome],
    executor: Executor,
    *,
    quiet: bool,
    debug: bool,
) -> None:
    """Run the stages of all methods on the executor into `done`: all first stages, then all second ones, and so on."""
    every = [RECIPES[name].stages for name in names if name != AUTO]
    paths = list(dict.fromkeys(stages[:count] for stages in every for count in range(1, len(stages) + 1)))
    with bar("fits", len(paths), wanted=False if quiet else None) as whole:
        for count in sorted(set(map(len, paths))):
            work, named = {}, {", ".join(path): path for path in paths if len(path) == count}
            for name, path in named.items():
                before = done.get(path[:-1])
                if count == 1 or isinstance(before, Stage):
                    start = before.posterior if isinstance(before, Stage) else None
                    work[name] = partial(_run_in_worker, path[-1], task, start, debug)
            for name, result in executor.each(work):
                stage = named[name][-1]
                label = RECIPES[stage].label
                outcome = _failure(stage, label, result) if isinstance(result, Lost) else result
                if isinstance(outcome, Stage):
                    outcome.say(label, quiet=quiet)
                else:
                    _print_failure(outcome)
                done[named[name]] = outcome
                whole.advance()


def _run_in_worker(stage: str, task: Task, start: Posterior | None, debug: bool) -> Stage | Outcome:
    """Run a stage in a worker process without output; the parent process prints its result."""
    warm_up()
    return _attempt(stage, RECIPES[stage].label, lambda: tasks.run_stage(stage, task, start, quiet=True), debug=debug)


def _attempt_stage(stage: str, task: Task, start: Stage | None, *, quiet: bool, debug: bool) -> Stage | Outcome:
    posterior = None if start is None else start.posterior
    return _attempt_and_print(
        stage, RECIPES[stage].label, lambda: tasks.run_stage(stage, task, posterior, quiet=quiet), debug=debug
    )


def _attempt_and_print(word: str, label: str, call: Callable[[], Result], *, debug: bool) -> Result | Outcome:
    """Return the result of the call, or print and return its failure; with `debug` raise it."""
    result = _attempt(word, label, call, debug=debug)
    if isinstance(result, Outcome):
        _print_failure(result)
    return result


def _attempt(word: str, label: str, call: Callable[[], Result], *, debug: bool) -> Result | Outcome:
    """Return the result of the call, or its failure; with `debug` raise it."""
    try:
        return call()
    except LostProcess:  # nothing can go on
        raise
    except Exception as error:  # a network may raise anything
        if debug:
            raise
        return _failure(word, label, error)


def _failure(word: str, label: str, error: Exception) -> Outcome:
    message, code = " ".join(str(error).split()), getattr(error, "exit_code", None)
    if code is None:
        message = f"unexpected error: {type(error).__name__}: {message}".rstrip(": ")
    line = f"{label}: {message}{'; run with --debug for the traceback' if code is None else ''}"
    outcome = _failed(word, label, message, _reason(error), 1 if code is None else code)
    return replace(outcome, said=(line, *getattr(error, "__notes__", ())))


def _print_failure(outcome: Outcome) -> None:
    """Print a failure on standard error."""
    for number, line in enumerate(outcome.said):
        (hint_line if number else error_line)(line)


def _failed(word: str, label: str, failed: str, reason: str, code: int) -> Outcome:
    return Outcome(word, label, {}, failed=failed, reason=reason, code=code)


def _reason(error: Exception) -> str:
    """Return a short form of the error."""
    if isinstance(error, Diverged):
        return f"diverged at step {error.step}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "out of memory"
    first = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
    text = first if isinstance(error, PosterityError) else f"{type(error).__name__}: {first}".rstrip(": ")
    return text if len(text) <= LETTERS else text[: LETTERS - 3].rstrip() + "..."


class _NotFinite(PosterityError):
    """A score is not finite."""

    exit_code = 5


def _scored(predictive: Predictive, source: Source) -> dict[str, Any]:
    """Return the scores with their intervals; raise an error if one is infinite, since no table can rank it."""
    values, ends = scores_and_intervals(predictive, source)
    for key, value in values.items():
        if value is not None and not math.isfinite(value):
            raise _NotFinite(f"its {key.replace('_', ' ')} is {value}. Its predictions cannot be ranked.")
    if values["test_nll"] is None:
        raise _NotFinite("its test NLL is nan. Its predictions cannot be ranked.")
    return {**values, "intervals": ends}
