"""The default for tables: candidates scored by cross-validation, stacked, and refitted to all rows."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from posterity.errors import BadData, PosterityError, positive
from posterity.estimators.candidates import (
    Candidate,
    Fitted,
    Linear,
    Networks,
    Plan,
    Processes,
    Rows,
    planned,
    warp_of,
)
from posterity.estimators.densities import Calibration, Density, Pool, Scale, Shape
from posterity.estimators.gaussian_process import Moments
from posterity.evidence.stacking import stacked
from posterity.inference.folds import Fold, folds as folds_of
from posterity.numerics.random import Key
from posterity.predictive import Predictive, mixed
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.normals import NormalsPredictive

logger = logging.getLogger("posterity")

FEWEST = 20  # rows for which candidates are compared; fewer get the linear model
GUARD = 0.25  # standard errors by which the squared error of the mean may lie above the least
RUNAWAY = 4.0  # times the budget, after which no further candidate is tried


class Score(NamedTuple):
    """Held-out log density of a candidate (nats per row), its standard error, and the seconds of its fits."""

    name: str
    log_density: float
    standard_error: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Stacked:
    """A mixture of fitted candidates, with weights by their held-out log density."""

    classes: int
    fits: dict[str, Fitted]
    pool: Pool | None
    densities: list[Density]
    calibrations: dict[str, Calibration]
    weights: dict[str, float]
    scores: list[Score]
    sentence: str

    def predict(self, inputs: Tensor) -> Predictive:
        """The predictive of targets in their given units, or of labels."""
        if self.classes:
            parts = [self.calibrations[name].predictive(self.fits[name].logits(inputs)) for name in self.weights]
            return mixed(parts, torch.tensor(list(self.weights.values()), dtype=torch.float64))
        moments = {name: fit.moments(inputs) for name, fit in self.fits.items()}
        if self.pool is not None:
            moments[Pool.name] = self.pool.moments(moments)
        chosen = [density for density in self.densities if density.name in self.weights]
        return mixed_normals(chosen, moments, inputs, [self.weights[density.name] for density in chosen])


def mixed_normals(
    densities: Sequence[Density], moments: dict[str, Moments], inputs: Tensor, weights: Sequence[float]
) -> NormalsPredictive:
    """The mixture of densities of the same rows."""
    parts = [density.normals(moments[density.source], inputs) for density in densities]
    means, scales = torch.cat([part.means for part in parts]), torch.cat([part.scales for part in parts])
    shares = torch.cat([weight * part.weights for weight, part in zip(weights, parts, strict=True)])
    centres = [moments[density.source].mean for density in densities]
    mean = sum(weight * centre for weight, centre in zip(weights, centres, strict=True))
    epistemic = sum(
        weight * (moments[density.source].epistemic + (centre - mean).square())
        for weight, density, centre in zip(weights, densities, centres, strict=True)
    )
    assert isinstance(epistemic, Tensor)
    return NormalsPredictive(means, scales, shares, epistemic)


def fit_automatic(
    inputs: Tensor,
    targets: Tensor,
    task: Literal["regression", "classification"],
    *,
    classes: int = 0,
    mean: Sequence[float] = (),
    scale: Sequence[float] = (),
    weights: Tensor | None = None,
    groups: Any = None,
    times: Any = None,
    seconds: float = 60.0,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Stacked:
    """Fit the candidates that a budget buys, and stack them by their held-out log density."""
    positive("fit_automatic: seconds", seconds)
    rows, kept = _rows(inputs, targets, task, classes, weights, device)
    key, begin = Key(seed), time.perf_counter()
    plan = planned(len(rows.inputs), rows.inputs.shape[1], rows.outputs, seconds)
    candidates = _candidates(rows, plan, mean, scale)
    if len(rows.inputs) < FEWEST:
        return _alone(rows, plan, key)
    labels = rows.targets.cpu() if rows.classes and groups is None else None
    chosen = [None if given is None else _taken(given, kept) for given in (groups, times)]
    parts = folds_of(len(rows.inputs), plan.folds, labels=labels, groups=chosen[0], times=chosen[1], seed=seed)
    trials = _trials(rows, candidates, parts, plan, key, begin + RUNAWAY * seconds)
    return (_classes if rows.classes else _regression)(rows, trials)


class Trials(NamedTuple):
    """The scored rows, the fold of each, and what each candidate predicts for them by fits that have not seen them."""

    index: Tensor
    fold: Tensor
    outputs: dict[str, Any]
    finals: dict[str, Any]
    seconds: dict[str, float]
    words: list[str]


def _rows(
    inputs: Tensor, targets: Tensor, task: str, classes: int, weights: Tensor | None, device: Any
) -> tuple[Rows, Tensor]:
    count = len(inputs)
    weights = torch.ones(count, device=inputs.device) if weights is None else weights.to(inputs.device)
    kept = weights > 0
    if not bool(kept.any()):
        raise BadData("fit_automatic needs at least one row of weight above 0. Got none.")
    where = inputs.device if device is None else torch.device(device)
    if task == "classification":
        classes = classes or int(targets.max()) + 1
    shaped = targets.reshape(count).long() if classes else targets.reshape(count, -1).float()
    moved = [tensor[kept].to(where) for tensor in (inputs.float(), shaped, weights.float())]
    return Rows(moved[0], moved[1], moved[2] / moved[2].mean(), classes), kept.cpu()


def _taken(given: Any, kept: Tensor) -> Any:
    import numpy as np

    return np.asarray(given)[kept.numpy()]


def _candidates(rows: Rows, plan: Plan, mean: Sequence[float], scale: Sequence[float]) -> list[Candidate]:
    chosen: list[Candidate] = [Linear(), Processes(False)]
    if plan.processes > 1:
        chosen.append(Processes(True))
        warp = None if rows.classes else warp_of(rows.targets, mean or (0.0,), scale or (1.0,))
        chosen += [] if warp is None else [Processes(False, warp)]
    return [*chosen, *([Networks()] if plan.steps else [])]


def _alone(rows: Rows, plan: Plan, key: Key) -> Stacked:
    """The linear model, for too few rows to compare."""
    raise NotImplementedError


def _trials(
    rows: Rows, candidates: Sequence[Candidate], parts: Sequence[Fold], plan: Plan, key: Key, end: float
) -> Trials:
    device, tests = rows.inputs.device, []
    for number, part in enumerate(parts):
        order = key.fold("scored").fold(number).permutation(len(part.test), "cpu")
        tests.append(part.test[order[: max(1, plan.scored // len(parts))].sort().values].to(device))
    moved = [Fold(part.train.to(device), part.test) for part in parts]
    trials = Trials(
        torch.cat(tests), torch.cat([torch.full_like(test, k) for k, test in enumerate(tests)]), {}, {}, {}, []
    )
    for candidate in candidates:
        begin = time.perf_counter()
        if begin > end:
            trials.words.append(f"the clock left no time for {candidate.name}")
            continue
        try:
            fits, final = candidate.fits(rows, moved, plan, key.fold(candidate.name))
            predicted = [
                fit.logits(rows.inputs[test]) if rows.classes else fit.moments(rows.inputs[test])
                for fit, test in zip(fits, tests, strict=True)
            ]
            whole = (
                torch.cat(predicted, 1)
                if rows.classes
                else Moments(*(torch.cat(column) for column in zip(*predicted, strict=True)))
            )
            if not all(bool(torch.isfinite(tensor).all()) for tensor in ([whole] if rows.classes else whole)):
                raise PosterityError("it predicts numbers that are not finite")
        except (PosterityError, RuntimeError, ValueError) as error:
            trials.words.append(f"{candidate.name} failed ({error})")
            continue
        trials.outputs[candidate.name], trials.finals[candidate.name] = whole, final
        trials.seconds[candidate.name] = time.perf_counter() - begin
    return trials


def _regression(rows: Rows, trials: Trials) -> Stacked:
    inputs, targets = rows.inputs[trials.index].double(), rows.targets[trials.index].double()
    weights = rows.weights[trials.index].double()
    moments: dict[str, Moments] = dict(trials.outputs)
    densities = [Density(name, name, Scale.own(), None) for name in moments]
    pool = Pool.of(moments, targets, weights)
    moments[Pool.name] = pool.moments(moments)
    for label, scale in Scale.all_of(moments[Pool.name], inputs, targets, weights, trials.fold):
        densities.append(Density(f"pooled means with {label}", Pool.name, scale, None))
    scored = [density.scored(moments[density.source], inputs, targets, weights, trials.fold) for density in densities]
    entries = torch.stack([log_density for _, log_density in scored], -1)  # (n, T, K)
    means = torch.stack([moments[density.source].mean for density in densities], 1)  # (n, K, T)
    width = targets.shape[1]
    result = stacked(
        entries.flatten(0, 1),
        row_weights=weights.repeat_interleave(width),
        means=means.mT.flatten(0, 1) if width > 1 else means[:, :, 0],
        targets=targets.flatten(),
        standard_errors=GUARD,
    )
    densities = [density for density, _ in scored]
    shares = {d.name: float(w) for d, w in zip(densities, result.weights, strict=True) if w > 0}
    used = {d.source for d in densities if d.name in shares}
    needed = (used | set(pool.weights)) - {Pool.name} if Pool.name in used else used
    fits = {name: trials.finals[name]() for name in needed}
    scores = [
        _score(density.name, entries[..., k].sum(-1), weights, trials.seconds.get(density.source, 0.0))
        for k, density in enumerate(densities)
    ]
    kept = [density for density in densities if density.name in shares]
    return Stacked(
        0, fits, pool if Pool.name in used else None, kept, {}, shares, scores,
        _sentence(shares, scores, result.log_density * width, trials.words),
    )  # fmt: skip


def _classes(rows: Rows, trials: Trials) -> Stacked:
    labels, weights = rows.targets[trials.index], rows.weights[trials.index].double()
    calibrations = {name: Calibration.of(logits, labels, weights) for name, logits in trials.outputs.items()}
    entries = torch.stack(
        [
            calibrations[name].log_probs(logits).gather(1, labels.unsqueeze(1)).squeeze(1)
            for name, logits in trials.outputs.items()
        ],
        1,
    )
    result = stacked(entries, row_weights=weights)
    shares = {name: float(w) for name, w in zip(trials.outputs, result.weights, strict=True) if w > 0}
    scores = [
        _score(name, entries[:, k], weights, trials.seconds[name]) for k, name in enumerate(trials.outputs)
    ]
    return Stacked(
        rows.classes, {name: trials.finals[name]() for name in shares}, None, [], calibrations, shares, scores,
        _sentence(shares, scores, result.log_density, trials.words),
    )  # fmt: skip


def _score(name: str, values: Tensor, weights: Tensor, seconds: float) -> Score:
    shares = weights / weights.sum()
    mean = shares @ values
    error = (shares.square() @ (values - mean).square()).sqrt()
    return Score(name, float(mean), float(error), seconds)


def _sentence(shares: dict[str, float], scores: Sequence[Score], log_density: float, words: Sequence[str]) -> str:
    parts = ", ".join(f"{name} {share:.2f}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))
    return f"{parts}: {log_density:.3f}" + "; ".join(["", *words])
