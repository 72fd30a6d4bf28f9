"""Evidence, chain diagnostics and predictions far from the data: numbers for JSON, and lines of text."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.fitting import Model
from posterity.cli.frame.options import method_label
from posterity.cli.frame.output import finite
from posterity.cli.frame.outside import numeric_features
from posterity.cli.frame.sources import Source
from posterity.cli.frame.tasks import Task
from posterity.datasets import DataSet
from posterity.diagnostics import convergence
from posterity.likelihoods import Gaussian
from posterity.metrics import out_of_distribution_auroc
from posterity.model.scales import chosen_scales
from posterity.numerics.random import Key
from posterity.posteriors import Linearized, Samples
from posterity.predictive.predictive import Predictive
from posterity.priors import Normal
from posterity.report import comparison
from posterity.report.numbers import short
from posterity.storage.part import JSON

ROWS = 100  # training rows at which the outputs of chains are compared


def chains_of(posterior: Model, task: Task) -> dict[str, JSON] | None:
    """Return diagnostics of chains, for outputs at training rows and the noise; None for other posteriors."""
    if not isinstance(posterior, Samples):
        return None
    inputs = task.data.train.inputs[:ROWS].to(posterior.joint.device)
    result = convergence(posterior, inputs)
    return {
        "chains": result.num_chains,
        "draws": result.num_draws,
        "rhat": finite(result.rhat),  # infinite for chains that never move
        "bulk_ess": finite(result.bulk_ess),
        "tail_ess": finite(result.tail_ess),
        "divergences": None if result.divergences is None else result.num_divergences,
        "warnings": list(result.warnings),
    }


def chains_line(method: str, result: dict[str, Any]) -> str:
    """Describe the result of `chains_of` in a line, with its gravest warning."""
    chains = f"{result['chains']} chain{'s' if result['chains'] != 1 else ''} of {result['draws']} draws"
    numbers = [f"R-hat {result['rhat']:.3f}"] if result["rhat"] is not None else []
    numbers += [f"bulk ESS {result['bulk_ess']:,.0f}"] if result["bulk_ess"] is not None else []
    numbers += [f"{result['divergences']} divergences"] if result["divergences"] is not None else []
    verdict = f" Not to be relied on yet: {result['warnings'][0]}" if result["warnings"] else " They agree."
    return f"{method_label(method)}: {', '.join([chains, *numbers])} (outputs at training rows, noise).{verdict}"


def evidence(posterior: Model, task: Task) -> dict[str, float] | None:
    """Return the log evidence in nats, with its prior scale and noise; None for posteriors without evidence.

    Noise and evidence are in units of the file's target; with --log-target the noise is in units of its logarithm. The
    prior scale is for the network's weights.
    """
    if not isinstance(posterior, Linearized) or posterior.log_evidence is None:
        return None
    joint, scale = task.joint, task.source.scale
    power, count = float(joint.tempering.likelihood_power), len(task.data.train)
    logs = (
        float((task.source.shift + scale * task.data.train.targets.double()).sum()) if task.source.log_target else 0.0
    )
    result = {"log_evidence": float(posterior.log_evidence) - power * (count * math.log(scale) + logs)}
    fitted = posterior.joint.as_joint("evidence")
    prior, likelihood = fitted.prior, fitted.likelihood
    scales = chosen_scales(fitted).get("prior_scale")
    if isinstance(prior, Normal) and not isinstance(prior.scale, Tensor):
        result["prior_scale"] = float(prior.scale)
    elif scales is not None:  # a scale for each layer: take the geometric mean over tensors
        result["prior_scale"] = float(scales.log().mean().exp())
    if isinstance(likelihood, Gaussian):
        result["noise"] = float(torch.as_tensor(likelihood.scale)) * scale
    return result


def evidence_line(method: str, task: Task, result: dict[str, float]) -> str:
    """Describe the result of `evidence` in a line."""
    names = {"prior_scale": "prior scale", "noise": "noise of the logarithm" if task.source.log_target else "noise"}
    known = [f"{text} {short(result[key])}" for key, text in names.items() if key in result]
    known.append(f"log evidence {result['log_evidence']:,.2f} nats.")
    return f"{method_label(method)}: {', '.join(known)}"


def negative_limits(predictive: Predictive, source: Source) -> int:
    """Count rows, of the first 500 test rows, whose 95 % interval begins below 0 although every target is above 0.

    The count is 0 for built-in data sets, and with --log-target.
    """
    if source.preprocessing is None or predictive.classifies or source.log_target:
        return 0
    targets = torch.cat([source.data.train.targets, source.data.test.targets])
    if not bool((targets.double() * source.scale + source.shift > 0).all()):
        return 0
    lower = predictive.rows(slice(0, FOREIGN)).quantile(0.025)
    return int((lower.double() * source.scale + source.shift < 0).sum())


def negative_limits_line(source: Source, counts: Mapping[str, int]) -> str:
    """Describe the `counts` of `negative_limits` by label in a line; "" if all are 0."""
    some = ", ".join(f"{label} {count}" for label, count in counts.items() if count)
    rows = min(FOREIGN, len(source.data.test))
    return (
        f"All targets are above 0, but 95 % intervals begin below 0, in {rows} test rows: {some}. "
        "--log-target models the logarithm."
        if some
        else ""
    )


FAR = 5.0  # times as far from the mean of the training rows as the farthest of them
WIDE = 3.0  # times as wide as the training rows: the box whose rim foreign inputs come from
FOREIGN = 500  # inputs of either kind


def far_away(posterior: Model, predictive: Predictive, source: Source) -> dict[str, float] | None:
    """Measure how a posterior predicts far from the training rows; `predictive` is its predictive at the test rows.

    - "confidence" (classes): mean confidence far away.
    - "width" (regression): median standard deviation far away, divided by the median at the test rows.
    - "auroc": AUROC of entropy or standard deviation for foreign inputs against test rows.

    None without numeric inputs, or if a number is not finite.
    """
    numeric = numeric_features(source.preprocessing, source.data.train.inputs.shape[1])
    if not numeric.any():
        return None
    far = posterior.predict(_pushed_out(source.data, numeric))
    if predictive.classifies:
        result = {"confidence": float(far.probs.max(-1).values.double().mean())}
    else:
        result = {"width": float(far.std.double().median() / predictive.std.double().median())}
    foreign = posterior.predict(_foreign(source.data, numeric))
    result["auroc"] = out_of_distribution_auroc(predictive, foreign)
    return result if all(map(math.isfinite, result.values())) else None


def _pushed_out(data: DataSet, numeric: Tensor) -> Tensor:
    """Return test inputs moved to FAR times the largest distance of a training row from the training mean."""
    seen, rows = data.train.inputs.double(), data.test.inputs[:FOREIGN].double()
    centre, spread = seen.mean(0), seen.std(0, correction=0)
    spread = torch.where(numeric & (spread > 0), spread, 1.0)
    standard = torch.where(numeric, (rows - centre) / spread, 0.0)
    reach = torch.where(numeric, (seen - centre) / spread, 0.0).norm(dim=1).max()
    standard = torch.where(standard.norm(dim=1, keepdim=True) > 0, standard, numeric.double())
    out = centre + spread * FAR * reach * standard / standard.norm(dim=1, keepdim=True)
    return torch.where(numeric, out, rows).to(data.train.inputs)


def _foreign(data: DataSet, numeric: Tensor) -> Tensor:
    """Return test inputs with their numbers drawn outside the training range, within WIDE times that range.

    Draws from the training range are moved outwards from its middle until at least one number is outside.
    """
    rows = data.test.inputs[:FOREIGN]
    low, high = data.train.inputs.amin(0), data.train.inputs.amax(0)
    drawn = 2 * Key(0).fold("foreign").uniform(tuple(rows.shape), dtype=rows.dtype).to(rows.device) - 1
    out = torch.where(numeric & (high > low), drawn.abs(), 0.0).amax(1, keepdim=True).clamp_min(1e-6)  # in (0, 1]
    return torch.where(numeric, 0.5 * (low + high) + 0.5 * (high - low) * drawn * (1 / out + WIDE - 1), rows)


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.2g}"


def far_lines(data: DataSet, results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Describe the `results` of `far_away` by label in lines."""
    if not results:
        return []

    def listed(key: str) -> str:
        return ", ".join(f"{label} {_factor(result[key])}" for label, result in results.items())

    where = f"Far from the data ({FAR:g} times as far out as any training row)"
    if data.classes is None:
        first = f"{where}, intervals are wider than at the test rows by a factor of: {listed('width')}."
        by = "standard deviation"
    else:
        chance = 1 / len(data.classes)
        first, by = f"{where}, the mean confidence is: {listed('confidence')}; {chance:.2f} claims nothing.", "entropy"
    return [
        first,
        f"Foreign inputs (outside the training rows, to {WIDE:g} times their range), told from test rows by their "
        f"{by}, AUROC: {listed('auroc')}; 0.50 is chance.",
    ]


def draw_comparison(path: Path, document: Mapping[str, Any], task: Task, posteriors: Mapping[str, Model]) -> None:
    """Draw the predictions of the posteriors over the inputs, in a panel for each method."""
    panels = {method_label(name): posterior for name, posterior in posteriors.items()}
    far = {label: value for label, value in _by_label(document, "far").items() if value}
    comparison(panels, task.data, path, _by_label(document, "test_nll"), {k: _far_words(v) for k, v in far.items()})


def _far_words(far: Mapping[str, float]) -> str:
    """Return the caption of a panel on predictions far away."""
    words = (
        f"far away {_factor(far['width'])} times as wide"
        if "width" in far
        else f"confidence far away {far['confidence']:.2f}"
    )
    return f"{words}, foreign AUROC {far['auroc']:.2f}"


PAIRS = 10_000_000  # most pairs of rows whose distances are computed


def among_training_rows(data: DataSet) -> Tensor:
    """Return a mask (N,) of the test rows that are as near to a training row as training rows are to each other.

    Distances are in standard deviations. The bound is the largest distance of a training row to its nearest neighbour,
    so gaps between training rows count as outside. With more than PAIRS pairs of rows all are marked.
    """
    seen, rows = data.train.inputs.double().cpu(), data.test.inputs.double().cpu()
    if len(seen) < 2 or len(seen) * max(len(seen), len(rows)) > PAIRS:
        return torch.ones(len(rows), dtype=torch.bool, device="cpu")
    spread = seen.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    bound = torch.cdist(seen / spread, seen / spread).fill_diagonal_(math.inf).amin(1).max()
    return torch.cdist(rows / spread, seen / spread).amin(1) <= bound


CLEARLY = 0.1  # smallest difference in AUROC that is reported


def elsewhere(taken: str, results: Mapping[str, Mapping[str, float]]) -> str:
    """Return a sentence if a method detects foreign inputs clearly better than `taken`, or `taken` better than MAP.

    `results` has the results of `far_away` by label. Scores at test rows do not show this, as these come from where the
    training rows do.
    """
    if taken not in results:
        return ""
    auroc = {label: result["auroc"] for label, result in results.items()}
    best, point = max(auroc, key=lambda label: auroc[label]), auroc.get(method_label("map"), math.inf)
    here, there = auroc[taken], auroc[best]
    if there >= max(here + CLEARLY, 0.5):
        return f" Where inputs may come from elsewhere, {best} tells them better: AUROC {there:.2f} against {here:.2f}."
    if here >= max(point + CLEARLY, 0.5):
        return f" It also tells inputs from elsewhere better than MAP: AUROC {here:.2f} against {point:.2f}."
    return ""


def _by_label(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return one number of each method that worked, by label."""
    return {method_label(row["method"]): row[key] for row in document["methods"] if row["failed"] is None}
