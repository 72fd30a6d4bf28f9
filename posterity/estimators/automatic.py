"""The default for tables: candidates scored by cross-validation, stacked, and refitted to all rows."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
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
    TableRows,
    load_fit,
    make_plan,
    warp_of,
)
from posterity.estimators.densities import Calibration, Density, Pool, Scale, Shape, rounding
from posterity.estimators.encoding import as_array
from posterity.estimators.gaussian_process import Moments
from posterity.estimators.trials import Trials, failure_message, finals, run_trials
from posterity.evidence.stacking import stacked
from posterity.inference import Executor, Sequential
from posterity.inference.callbacks import bar
from posterity.inference.folds import folds as folds_of
from posterity.numerics.random import Key
from posterity.predictive import NormalsPredictive, Predictive, mixed
from posterity.processes import using
from posterity.storage import Part, RunFolder, decode, encode
from posterity.storage.schema import check_fields, hints, reading

FEWEST = 20  # least rows for a comparison; fewer get the linear model
GUARD = 0.25  # standard errors by which the squared error of the mean may exceed the smallest
PSEUDO_ROWS = 1.0  # of each candidate, in the stacking for classes
REST = 5.0  # seconds of all but the trials, roughly: only for the progress bar
RUNAWAY = 4.0  # times the budget, after which no further candidate is tried


class Score(NamedTuple):
    """Held-out log density of a candidate (nats per row), its standard error, and the seconds of its fits."""

    name: str
    log_density: float
    standard_error: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Stacked:
    """A mixture of fitted candidates, with weights of largest held-out log density.

    **Math**: p(y | x) = sum_k w_k p_k(y | x). For regression p_k(y | x) = h_k((y - m_k(x)) / s_k(x)) / s_k(x): m_k is
    the mean of a candidate, or the average of all with the weights of least held-out squared error; s_k is its own
    scale, a constant, or its own times the exponential of a Gaussian process fitted to the log squared held-out
    residuals; and h_k is a mixture of normals with mean 0, fitted to held-out (y - m_k) / s_k. No normal is
    narrower than the rounding of the targets: whole numbers are known to 1 / sqrt(12). For classes p_k is the
    average over draws f of softmax(a_k (m_k + r_k (f - m_k)) + b_k), m_k their mean, with a_k, r_k and b_k by held-out
    rows; and each candidate is given one more row that it alone explains (`stacked`), so that none has weight 0.

    - `weights`: w_k by name; `scores`: the held-out log density of each, its standard error and seconds.
    - `sentence`: what was chosen and why.

    **Limit**: as good as its candidates. Scores are of fits to the other folds, and so slightly low. Weights, scales
    and shapes are chosen by the rows that score them: few numbers, but more than none. Where rows repeat and targets
    are integers, densities at repeated rows become narrow, and their log has no meaning as a probability.

    **Cost**: predictions of all candidates of positive weight. Gaussian processes keep the training rows, also on disk.

    **References**: Yao, Vehtari, Simpson and Gelman (2018), Using stacking to average Bayesian predictive
    distributions; Kersting et al. (2007), Most likely heteroscedastic Gaussian process regression, for the scale.

    **Example**:

    >>> x = torch.linspace(-2, 2, 40).unsqueeze(1)
    >>> model = fit_automatic(x, (x[:, 0].abs() > 1).long(), "classification", seconds=2.0)
    >>> model.predict(x[:3]).probs.shape, round(sum(model.weights.values()), 6)
    (torch.Size([3, 2]), 1.0)
    """

    columns: int
    outputs: int
    classes: int
    fits: dict[str, Fitted]
    pool: Pool | None
    densities: tuple[Density, ...]
    calibrations: dict[str, Calibration]
    weights: dict[str, float]
    scores: tuple[Score, ...]
    sentence: str

    def __repr__(self) -> str:
        return f"Stacked({self.sentence})"

    def predict(self, inputs: Tensor) -> Predictive:
        """Return the predictive at inputs (N, D), of targets in the units of the fit or of labels."""
        if inputs.dim() != 2 or inputs.shape[1] != self.columns:
            raise BadData(f"Stacked.predict: inputs must be (N, {self.columns}). Got {tuple(inputs.shape)}.")
        inputs = inputs.detach().float().to(next(iter(self.fits.values())).device)
        shares = torch.tensor([*self.weights.values()], dtype=torch.float64)
        if self.classes:
            return mixed([self.calibrations[k].predictive(self.fits[k].logits(inputs)) for k in self.weights], shares)
        moments = {name: fit.moments(inputs) for name, fit in self.fits.items()}
        if self.pool is not None:
            moments[Pool.name] = self.pool.moments(moments)
        sources = [moments[density.source] for density in self.densities]
        parts = [d.normals(source, inputs) for d, source in zip(self.densities, sources, strict=True)]
        means, scales = (torch.cat(tensors) for tensors in list(zip(*(part for part, _ in parts), strict=True))[:2])
        weights = torch.cat([w * part.weights for w, (part, _) in zip(shares.to(means), parts, strict=True)])
        pool = Pool({str(k): w for k, w in enumerate(self.weights.values())})
        epistemic = pool.moments({str(k): own for k, (_, own) in enumerate(parts)}).epistemic
        return NormalsPredictive(means, scales, weights, epistemic)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model into the run folder `path`, atomically and without the seconds; see `Stacked.load`."""
        folder = RunFolder(path)
        folder.refuse()
        folder.commit(self.parts(), drop=["fit-*"])

    def parts(self) -> dict[str, Part]:
        """Return the model, without the seconds, as parts of a run folder."""
        tensors: dict[str, Tensor] = {}
        names = {name: f"fit-{index}" for index, name in enumerate(self.fits)}
        scores = [score[:3] for score in self.scores]  # equal fits give equal bytes: no seconds
        own = {name: getattr(self, name) for name in _STORED} | {"scores": scores, "fits": names}
        config = {name: encode(value, tensors, name) for name, value in own.items()}
        return {"stacked": Part(config, tensors), **{names[name]: fit.part() for name, fit in self.fits.items()}}

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str | None = None) -> "Stacked":
        """Read what `save` wrote; raises BadFolder for anything else."""
        folder, where = RunFolder(path), repr(os.fspath(path))
        part, target = folder.read("stacked"), torch.device("cpu" if device is None else device)
        with reading(f"Run folder {where}: part 'stacked'"):
            tensors = {name: tensor.to(target) for name, tensor in part.tensors.items()}
            own: dict[str, Any] = {name: decode(part.config[name], tensors) for name in (*_STORED, "scores", "fits")}
            kinds = {**hints(Stacked), "scores": list[tuple[str, float, float]], "fits": dict[str, str]}
            check_fields("Stacked", own, {name: kinds[name] for name in own})
            stored, names = own.pop("scores"), own.pop("fits")
            scores = tuple(Score(name, density, error, math.nan) for name, density, error in stored)
            sizes = own["columns"], own["outputs"]
            fits = {name: load_fit(folder.read(k), *sizes, where, k, target) for name, k in names.items()}
            return cls(fits=fits, scores=scores, **own)


_STORED = ("columns", "outputs", "classes", "pool", "densities", "calibrations", "weights", "sentence")


@using(None)  # the clock may stop it, which differs by process
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
    executor: Executor | None = None,
    progress: bool | None = None,
) -> Stacked:
    """Fit the candidates that a budget buys, and stack them by their held-out log density.

    - `inputs` (N, D): standardised or encoded columns. `targets`: (N, T), standardised, whose originals are `mean` +
      `scale` times them (they tell whether a target is positive, and may have a log); or labels (N,) below `classes`.
    - `weights` (N,): of the rows. Rows of weight 0 are left out.
    - `groups` or `times` (N,): folds by group or in time order, as in `folds`.
    - `seconds`: the budget, on two CPU cores. It buys a fixed plan (`make_plan`) of candidates, folds and steps that
      depends on rows, columns and budget alone, so that the same seed gives the same result. The clock only stops a
      runaway: after four times the budget no further candidate is tried, and the sentence says so.
    - `executor`: where the candidates are fitted, each of them a piece of work; None: in turn. No number depends on it.
    - `progress`: whether to show a bar on standard error; None: if that is a terminal.

    The candidates are a linear model, smooth and rough Gaussian processes, one of a warped target where it is skewed,
    one of few selected columns where there are more than 64, and an ensemble of networks, whose members are the fits to
    the folds. Up to 1,200 rows of two classes, or 700 of
    five, have Gaussian processes of log odds, too. Fewer than 20 rows get the linear model.

    >>> x = torch.linspace(-2, 2, 30).unsqueeze(1)
    >>> model = fit_automatic(x, 0.5 * x + 0.1 * (9.0 * x).sin(), "regression", seconds=2.0)
    >>> model.predict(x[:2]).mean.shape
    torch.Size([2, 1])
    """
    positive("fit_automatic: seconds", seconds)
    rows, kept = _rows(inputs, targets, task, classes, weights, device)
    key, begin, count = Key(seed), time.time(), len(rows.inputs)
    by = {"groups": as_array(groups, "groups"), "times": as_array(times, "times")}
    chosen = {name: np.asarray(given)[kept.numpy()] for name, given in by.items() if given is not None}
    plan = make_plan(count, rows.inputs.shape[1], rows.outputs, seconds, dependent=bool(chosen))
    if count < FEWEST:
        return _alone(rows, plan, key)
    labels = rows.targets.cpu() if rows.classes else None
    for name, values in chosen.items():  # fewer groups or times than folds
        most = len(np.unique(values.astype(str) if values.dtype == object else values)) - (name == "times")
        plan = replace(plan, folds=max(2, min(plan.folds, most)))
    executor = executor or Sequential()
    parts = folds_of(count, plan.folds, labels=labels, seed=seed, **chosen)
    candidates = _candidates(rows, plan, mean, scale)
    total_seconds = sum(candidate.seconds for candidate in candidates) + REST
    with bar("auto", total_seconds, wanted=progress, in_seconds=True) as shown:
        trials = run_trials(rows, candidates, parts, plan, key, begin + RUNAWAY * seconds, executor, shown)
        if rows.classes:
            return _classes(rows, trials, executor)
        return _regression(rows, trials, sum(math.log(s) for s in scale), executor)


def _rows(
    inputs: Tensor, targets: Tensor, task: str, classes: int, weights: Tensor | None, device: torch.device | str | None
) -> tuple[TableRows, Tensor]:
    """Return the checked rows of positive weight, and the mask of these rows."""
    if task not in ("regression", "classification"):
        raise ValueError(f"fit_automatic: task must be 'regression' or 'classification'. Got {task!r}.")
    if inputs.dim() != 2 or len(targets) != len(inputs) or (weights is not None and weights.shape != targets.shape[:1]):
        raise BadData(
            "fit_automatic: inputs must be (N, D), with a target and a weight for each row. "
            f"Got inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}."
        )
    weights = torch.ones(len(inputs), device=inputs.device) if weights is None else weights.to(inputs.device)
    kept = weights > 0
    if not bool(kept.any()):
        raise BadData("fit_automatic needs at least one row of weight above 0. Got none.")
    if task == "classification":
        classes = max(2, classes, int(targets.max()) + 1)
        targets = targets.reshape(-1).long()
    else:
        classes, targets = 0, targets.reshape(len(targets), -1).double()  # small positive ones have a log
    target = inputs.device if device is None else torch.device(device)
    inputs, targets, weights = (tensor[kept].to(target) for tensor in (inputs.float(), targets, weights.float()))
    return TableRows(inputs, targets, weights / weights.mean(), classes), kept.cpu()


def _candidates(rows: TableRows, plan: Plan, mean: Sequence[float], scale: Sequence[float]) -> list[Candidate]:
    odds = Processes.have_odds(rows)
    chosen: list[Candidate] = [Linear(), Processes(False, odds=odds)]
    if Processes.have_many_columns(rows):
        chosen.append(Processes(False, odds=odds, selected=True))
    if plan.processes > 1:
        chosen.append(Processes(True, odds=odds))
        chosen += [Processes(False)] if odds else []
        warp = None if rows.classes else warp_of(rows.targets, mean or (0.0,), scale or (1.0,))
        chosen += [] if warp is None else [Processes(False, warp)]
    return [*chosen, *([Networks()] if plan.steps else [])]


def _alone(rows: TableRows, plan: Plan, key: Key) -> Stacked:
    """Fit the linear model alone: too few rows to compare candidates."""
    candidate = Linear()
    fits = {candidate.name: candidate.fits(rows, (), plan, key)[1]()}
    plain = Shape.normal(rows.inputs.device)
    density = () if rows.classes else (Density(candidate.name, candidate.name, Scale(), rounding(rows.targets), plain),)
    calibrations = {candidate.name: Calibration.none(rows.classes, rows.inputs.device)} if rows.classes else {}
    sentence = f"{len(rows.inputs)} rows are too few to compare candidates (from {FEWEST} up): a {candidate.name}."
    return Stacked(
        rows.inputs.shape[1], rows.outputs, rows.classes, fits, None, density, calibrations, {candidate.name: 1.0}, (),
        sentence,
    )  # fmt: skip


def _regression(rows: TableRows, trials: Trials, log_scale: float, executor: Executor) -> Stacked:
    """Stack regressions; `log_scale` is the sum of the logs of the targets' units, which scores are converted to."""
    inputs, targets = rows.inputs[trials.scored], rows.targets[trials.scored]
    weights, width = rows.weights[trials.scored].double(), targets.shape[1]
    moments: dict[str, Moments] = dict(trials.outputs)
    pool = Pool.of(moments, targets, weights)
    pooled = pool.moments(moments)
    rounded = rounding(targets)
    densities = [Density(name, name, Scale(), rounded) for name in moments]
    densities += [
        Density(f"{Pool.name} with {label}", Pool.name, scale, rounded)
        for label, scale in Scale.around(pooled, inputs, targets, weights, len(pool.weights) > 1)
    ]
    moments[Pool.name] = pooled
    scored = list[tuple[Density, Tensor]]()
    for density in densities:
        try:
            scored.append(density.scored(moments[density.source], inputs, targets, weights, trials.fold, trials.effort))
        except (PosterityError, RuntimeError, ValueError) as error:  # of the process of a fitted scale
            trials.words.append(failure_message(density.name, error))
    densities = [density for density, _ in scored]
    entries = torch.stack([log_density for _, log_density in scored], -1)  # (n, T, K)
    result = stacked(
        entries.flatten(0, 1),
        row_weights=weights.repeat_interleave(width),
        means=torch.stack([moments[density.source].mean for density in densities], -1).flatten(0, 1),
        targets=targets.flatten(),
        standard_errors=GUARD,
    )
    shares = {d.name: w for d, w in zip(densities, result.weights.tolist(), strict=True) if w > 0}
    kept = tuple(density for density in densities if density.name in shares)
    sources = {density.source for density in kept}
    needed = [name for name in trials.outputs if name in sources or (Pool.name in sources and name in pool.weights)]
    seconds = {**trials.seconds, Pool.name: 0.0}
    scores = tuple(
        _score(density.name, entries[..., index].sum(-1) - log_scale, weights, seconds[density.source])
        for index, density in enumerate(densities)
    )
    averaged = pool.weights if Pool.name in sources else {}
    return Stacked(
        inputs.shape[1], width, 0, finals(trials, needed, executor),
        pool if averaged else None, kept, {}, shares, scores,
        _sentence(shares, scores, result.log_density * width - log_scale, trials, averaged),
    )  # fmt: skip


def _classes(rows: TableRows, trials: Trials, executor: Executor) -> Stacked:
    labels, weights = rows.targets[trials.scored], rows.weights[trials.scored].double()
    calibrations = {name: Calibration.of(logits, labels, weights) for name, logits in trials.outputs.items()}
    predictives = [calibrations[name].predictive(logits) for name, logits in trials.outputs.items()]
    entries = torch.stack([predictive.log_prob(labels) for predictive in predictives], 1)
    result = stacked(entries, row_weights=weights, pseudo_rows=PSEUDO_ROWS, least=0.0)
    shares = {name: w for name, w in zip(trials.outputs, result.weights.tolist(), strict=True) if w > 0}
    scores = tuple(
        _score(name, entries[:, index], weights, trials.seconds[name]) for index, name in enumerate(trials.outputs)
    )
    return Stacked(
        rows.inputs.shape[1], rows.outputs, rows.classes, finals(trials, list(shares), executor), None, (),
        {name: calibrations[name] for name in shares}, shares, scores,
        _sentence(shares, scores, result.log_density, trials, {}),
    )  # fmt: skip


def _score(name: str, values: Tensor, weights: Tensor, seconds: float) -> Score:
    shares = weights / weights.sum()
    mean = shares @ values
    return Score(name, float(mean), float((shares.square() @ (values - mean).square()).sqrt()), seconds)


def _listed(weights: Mapping[str, float]) -> str:
    """Format names with their weights, the largest first."""
    return ", ".join(f"{weight:.2f} {name}" for name, weight in sorted(weights.items(), key=lambda item: -item[1]))


def _sentence(
    shares: Mapping[str, float], scores: Sequence[Score], density: float, trials: Trials, pool: Mapping[str, float]
) -> str:
    """Return the sentence on what was chosen and why."""
    best = max(scores, key=lambda score: score.log_density)
    linear = next((score for score in scores if score.name == Linear.name), None)
    sentences = [f"Stacked by the log density of {len(trials.scored)} held-out rows: {_listed(shares)}"]
    if pool:
        sentences[0] += f" (the means are {_listed(pool)})"
    against = f"the best alone, {best.name}, has {best.log_density:.3f} +- {best.standard_error:.3f}"
    if linear is not None and linear is not best:
        against += f", the {linear.name} {linear.log_density:.3f}"
    sentences.append(f"the mixture has {density:.3f} nats per row (more is better), {against}")
    return "; ".join([*sentences, *trials.words]) + "."
