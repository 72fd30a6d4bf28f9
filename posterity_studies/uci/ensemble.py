"""A deep ensemble on a split: networks that also tell the noise at each row, never below a least one.

As Lakshminarayanan et al. (2017): networks with the negative log-likelihood for loss, scored by the Gaussian that has
the moments of their mixture. They smooth by adversarial examples, and have a least variance of 1e-6; here weights have
a prior, and the least noise is chosen on held-out training rows, for networks with a noise for each row learn small
tables by heart.
"""

import math

import torch
from torch import Tensor, nn

from posterity.inference import Method, infer
from posterity.likelihoods import Heteroscedastic
from posterity.metrics import negative_log_likelihood
from posterity.model import Joint
from posterity.posteriors import Posterior
from posterity.predictive import GaussianPredictive, Predictive
from posterity.priors import Normal
from posterity_studies.uci.protocol import Choice, Split, held_out, mlp
from posterity_studies.uci.settings import Settings

LEAST = (0.01, 0.05, 0.1, 0.2, 0.3)
"""Standard deviations of the standardised target."""


class LeastNoise(nn.Module):
    """Outputs (..., 2), a mean and the log of a noise r: the latter becomes log sqrt(exp(2 r) + least^2)."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.log_variance = 2.0 * math.log(least)

    def forward(self, outputs: Tensor) -> Tensor:
        """The outputs with the least noise in them."""
        mean, log_scale = outputs.chunk(2, dim=-1)
        least = torch.full_like(log_scale, self.log_variance)
        return torch.cat([mean, 0.5 * torch.logaddexp(2.0 * log_scale, least)], dim=-1)


def ensemble_problem(split: Split, settings: Settings, choice: Choice | None = None) -> Joint:
    """The network of the protocol with a second output for the noise, and the least noise of the choice."""
    least = LEAST[0] if choice is None else choice["least_noise"]
    network = nn.Sequential(mlp(split, settings, outputs=2), LeastNoise(least))
    return Joint(network, Heteroscedastic(), Normal(settings.prior_scale), len(split.train))


def chosen_ensemble(split: Split, settings: Settings, method: Method) -> Choice:
    """The least noise with which an ensemble predicts best a fifth of the training rows, after a fit to the others."""
    part, key = held_out(split, settings), settings.key(split.data_set, split.index).fold("choice")
    scores = {}
    for least in LEAST:
        joint = ensemble_problem(part, settings, {"least_noise": least})
        posterior, _ = infer(method, joint, part.train, seed=key.seed, progress=False)
        scores[least] = negative_log_likelihood(moments(posterior, part.test.inputs), part.test.targets)
    return {"least_noise": min(scores, key=scores.__getitem__)}


def moments(posterior: Posterior, inputs: Tensor) -> Predictive:
    """The Gaussian with mean and variance of the mixture, as in section 2.4 of the paper."""
    found = posterior.predict(inputs)
    return GaussianPredictive(found.mean, found.epistemic, found.aleatoric)
