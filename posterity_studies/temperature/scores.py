"""The scores of a fit."""

from typing import Any

from posterity import metrics
from posterity.diagnostics import collapse
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Posterior
from posterity.posteriors.samples import Samples
from posterity_studies.temperature.protocol import Problem
from posterity_studies.temperature.settings import Settings

ROWS = 2048  # of a chunk of predictions


def scores(posterior: Posterior, seed: int, problem: Problem, settings: Settings) -> dict[str, float]:
    """How the averaged prediction does on test, held-out and foreign rows, and how far weights are from the prior.

    Accuracy, NLL, Gibbs NLL, ECE (15 bins), class-wise ECE and mean confidence on the test rows, NLL and accuracy on
    those held out, AUROC of the entropy of foreign against test rows; mean standard deviation of a weight, and for a
    Gaussian KL(q || prior) in nats, in all and for each unit. Each `seed` of the study predicts with draws of its own:
    near the prior the labels of a few draws are chance, which a mean over seeds makes less.
    """
    key = Key(settings.seed).fold("predictions").fold(seed)
    rows = problem.rows
    wanted: dict[str, Any] = {"draws": settings.draws_of(problem.units), "batch_size": ROWS, "seed": key.seed}
    test = posterior.predict(rows.test.inputs, **wanted)
    foreign = posterior.predict(rows.foreign, **wanted)
    found = {
        "accuracy": metrics.accuracy(test, rows.test.targets),
        "nll": metrics.negative_log_likelihood(test, rows.test.targets),
        "gibbs_nll": metrics.gibbs_negative_log_likelihood(test, rows.test.targets),
        "ece": metrics.expected_calibration_error(test, rows.test.targets),
        "classwise_ece": metrics.classwise_calibration_error(test, rows.test.targets),
        "confidence": metrics.confidence(test, rows.test.targets),
        "ood_auroc": metrics.out_of_distribution_auroc(test, foreign),
    }
    if rows.held_out is not None:
        held_out = posterior.predict(rows.held_out.inputs, **wanted)
        found["held_out_nll"] = metrics.negative_log_likelihood(held_out, rows.held_out.targets)
        found["held_out_accuracy"] = metrics.accuracy(held_out, rows.held_out.targets)
    if isinstance(posterior, Gaussian):
        found["kl"] = float(collapse(posterior).kl_per_weight.sum())
        found["kl_per_unit"] = found["kl"] / problem.units
        found["mean_sigma"] = float(posterior.variance.sqrt().mean())
    elif isinstance(posterior, Samples):
        found["mean_sigma"] = float(posterior.theta.double().std(1, correction=0).mean())
    return found
