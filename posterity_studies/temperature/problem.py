"""The problem of each width, and the scores of a fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posterity import metrics
from posterity.diagnostics import collapse
from posterity.likelihoods import Categorical
from posterity.model import Joint, Tempering
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Posterior
from posterity.posteriors.samples import Samples
from posterity.priors import Normal
from posterity_studies.groups import first_weights
from posterity_studies.temperature.data import DTYPES, Rows
from posterity_studies.temperature.settings import Settings


@dataclass(frozen=True, eq=False)
class Problem:
    """A width: its joint without a temperature, N, and the rows."""

    width: int | None
    joint: Joint
    units: int
    rows: Rows

    @property
    def num_data(self) -> int:
        """p."""
        return len(self.rows.train)

    def tau(self, eta: float) -> float:
        """The tau of eta = tau p/N."""
        return eta * self.units / self.num_data

    def tempered(self, etas: Sequence[float]) -> Joint:
        """The joint with one eta, or with a member for each."""
        joint = self.joint
        eta = etas[0] if len(etas) == 1 else torch.tensor(etas, dtype=torch.float64, device=joint.device)
        return Joint(joint.network, joint.likelihood, joint.prior, joint.num_data, Tempering.tempered(eta))

    def start(self, seeds: Sequence[int], key: Key) -> Tensor:
        """First weights, (P,) for one seed or a row for each."""
        return first_weights(self.joint.fresh, seeds, key)


def problem(width: int | None, rows: Rows, settings: Settings) -> Problem:
    """The problem of a width."""
    architecture = settings.architecture
    with torch.random.fork_rng(devices=[]):  # weights that nobody sees: every fit has fresh ones
        torch.default_generator.manual_seed(0)
        module = architecture.make(rows.shape, rows.classes, width)
    module = module.to(settings.device, DTYPES[settings.dtype])
    prior = Normal(math.sqrt(settings.prior_variance))
    joint = Joint(module, Categorical(), prior, len(rows.train))
    return Problem(width, joint, architecture.count(joint.network), rows)


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
