"""Evidence, chain diagnostics and predictions far away of runs, as lines."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.fitting import Model
from posterity.cli.frame.options import method_label
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
    """Diagnostics of chains, of the network's outputs at training rows and of the noise; None for other posteriors."""
    if not isinstance(posterior, Samples):
        return None
    inputs = task.data.train.inputs[:ROWS].to(posterior.joint.device)
    result = convergence(posterior, inputs)
    return {
        "chains": result.num_chains,
        "draws": result.num_draws,
        "rhat": _known(result.rhat),
        "bulk_ess": _known(result.bulk_ess),
        "tail_ess": _known(result.tail_ess),
        "divergences": None if result.divergences is None else result.num_divergences,
        "warnings": list(result.warnings),
    }


def chains_line(method: str, result: dict[str, Any]) -> str:
    """The same in a line, with the gravest of the warnings."""
    chains = f"{result['chains']} chain{'s' if result['chains'] != 1 else ''} of {result['draws']} draws"
    numbers = [f"R-hat {result['rhat']:.3f}"] if result["rhat"] is not None else []
    numbers += [f"bulk ESS {result['bulk_ess']:,.0f}"] if result["bulk_ess"] is not None else []
    numbers += [f"{result['divergences']} divergences"] if result["divergences"] is not None else []
    verdict = f" Not to be relied on yet: {result['warnings'][0]}" if result["warnings"] else " They agree."
    return f"{method_label(method)}: {', '.join([chains, *numbers])} (outputs at training rows, noise).{verdict}"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None  # chains that never move have an infinite R-hat


def evidence(posterior: Model, task: Task) -> dict[str, float] | None:
    """Log evidence in nats, and the prior scale and noise for which it is, tuned or not; None where there is none.

    Noise and evidence are in the units of the file's target. Where its logarithm is modelled, the noise is in units of
    the logarithm. The prior scale is for the network's weights.
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
    elif scales is not None:  # one for each layer: the geometric mean over tensors
        result["prior_scale"] = float(scales.log().mean().exp())
    if isinstance(likelihood, Gaussian):
        result["noise"] = float(torch.as_tensor(likelihood.scale)) * scale
    return result


def evidence_line(method: str, task: Task, result: dict[str, float]) -> str:
    """The same in a line."""
    names = {"prior_scale": "prior scale", "noise": "noise of the logarithm" if task.source.log_target else "noise"}
    known = [f"{text} {short(result[key])}" for key, text in names.items() if key in result]
    known.append(f"log evidence {result['log_evidence']:,.2f} nats.")
    return f"{method_label(method)}: {', '.join(known)}"


def negative_limits(predictive: Predictive, source: Source) -> int:
    """The number of test rows, of the first 500, whose 95 % interval begins below 0 though every target is above 0.

    0 for data that are no file, and where the logarithm is modelled.
    """
    if source.preprocessing is None or predictive.classifies or source.log_target:
        return 0
    targets = torch.cat([source.data.train.targets, source.data.test.targets])
    if not bool((targets.double() * source.scale + source.shift > 0).all()):
        return 0
    lower = predictive.rows(slice(0, FOREIGN)).quantile(0.025)
    return int((lower.double() * source.scale + source.shift < 0).sum())


def negative_limits_line(source: Source, counts: Mapping[str, int]) -> str:
    """The same in a line, for methods by label; nothing where no interval begins below 0."""
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
    """How a posterior, with this predictive at the test rows, predicts away from all training rows.

    Classes: the mean confidence far out. Regression: the median predictive standard deviation far out, in that at the
    test rows. Both: the AUROC by which entropy or standard deviation tells foreign inputs from test rows. None without
    any numeric input, or where predictions so far out are not finite.
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
    """Test inputs moved away from the mean of the training rows, to FAR times the distance of the farthest of these."""
    seen, rows = data.train.inputs.double(), data.test.inputs[:FOREIGN].double()
    centre, spread = seen.mean(0), seen.std(0, correction=0)
    spread = torch.where(numeric & (spread > 0), spread, 1.0)
    standard = torch.where(numeric, (rows - centre) / spread, 0.0)
    reach = torch.where(numeric, (seen - centre) / spread, 0.0).norm(dim=1).max()
    standard = torch.where(standard.norm(dim=1, keepdim=True) > 0, standard, numeric.double())
    out = centre + spread * FAR * reach * standard / standard.norm(dim=1, keepdim=True)
    return torch.where(numeric, out, rows).to(data.train.inputs)


def _foreign(data: DataSet, numeric: Tensor) -> Tensor:
    """Test inputs whose numbers are drawn anew, outside the range of the training rows and within WIDE times of it.

    Draws from a box around that range are moved out, along a line from its middle: at least one number is outside.
    """
    rows = data.test.inputs[:FOREIGN]
    low, high = data.train.inputs.amin(0), data.train.inputs.amax(0)
    drawn = 2 * Key(0).fold("foreign").uniform(tuple(rows.shape), dtype=rows.dtype).to(rows.device) - 1
    out = torch.where(numeric & (high > low), drawn.abs(), 0.0).amax(1, keepdim=True).clamp_min(1e-6)  # in (0, 1]
    return torch.where(numeric, 0.5 * (low + high) + 0.5 * (high - low) * drawn * (1 / out + WIDE - 1), rows)


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.2g}"


def far_lines(data: DataSet, results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The same in lines, for methods by label."""
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
    """Draw what the posteriors predict over the inputs, one panel a method."""
    panels = {method_label(name): posterior for name, posterior in posteriors.items()}
    far = {label: value for label, value in _by_label(document, "far").items() if value}
    comparison(panels, task.data, path, _by_label(document, "test_nll"), {k: _far_words(v) for k, v in far.items()})


def _far_words(far: Mapping[str, float]) -> str:
    """What a panel says of inputs far away."""
    words = (
        f"far away {_factor(far['width'])} times as wide"
        if "width" in far
        else f"confidence far away {far['confidence']:.2f}"
    )
    return f"{words}, foreign AUROC {far['auroc']:.2f}"


PAIRS = 10_000_000  # of test and training rows whose distances are looked at


def among_training_rows(data: DataSet) -> Tensor:
    """Which test rows are as near to a training row as training rows are to each other, (N,).

    Distances are in standard deviations, the bound is the largest from a training row to its nearest neighbour: a gap
    between the rows is outside. All are inside where there are too many pairs to look at.
    """
    seen, rows = data.train.inputs.double().cpu(), data.test.inputs.double().cpu()
    if len(seen) < 2 or len(seen) * max(len(seen), len(rows)) > PAIRS:
        return torch.ones(len(rows), dtype=torch.bool, device="cpu")
    spread = seen.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    bound = torch.cdist(seen / spread, seen / spread).fill_diagonal_(math.inf).amin(1).max()
    return torch.cdist(rows / spread, seen / spread).amin(1) <= bound


CLEARLY = 0.1  # the difference between two AUROCs that is worth a word


def elsewhere(taken: str, results: Mapping[str, Mapping[str, float]]) -> str:
    """A sentence on the method that tells inputs from elsewhere clearly better than `taken`, or on `taken` against MAP.

    Takes what `far_away` gave, by label. Held-out rows do not see this: they come from where training rows did.
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
    """One of the numbers of the methods that worked."""
    return {method_label(row["method"]): row[key] for row in document["methods"] if row["failed"] is None}
