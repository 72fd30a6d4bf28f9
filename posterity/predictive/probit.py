"""Probit approximations of E sigmoid(f) and E softmax(f) under Gaussian f."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.likelihoods.bernoulli import labels_only
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.integrator import Integrator, output_variance


def probit_kappa(mean: Tensor, variance: Tensor) -> Tensor:
    """sigmoid(mean / sqrt(1 + pi variance / 8)), close to E sigmoid(f) for f ~ N(mean, variance); entry by entry."""
    return torch.sigmoid(shrunk(mean, variance))


def probit_phi(mean: Tensor, variance: Tensor) -> Tensor:
    """Phi(mean / sqrt(8 / pi + variance)), close to E sigmoid(f) for f ~ N(mean, variance); entry by entry."""
    value: Tensor = torch.special.ndtr(mean / torch.sqrt(8.0 / math.pi + variance))
    return value


def shrunk(mean: Tensor, variance: Tensor) -> Tensor:
    """mean / sqrt(1 + pi variance / 8): the logit whose plain sigmoid stands for the average one."""
    return mean / torch.sqrt(1.0 + (math.pi / 8.0) * variance)


@dataclass(frozen=True)
class Probit(Integrator):
    """Class probabilities by shrinking each logit's mean by its variance.

    **Math**: Bernoulli: sigmoid(mu / sqrt(1 + pi s2 / 8)) with mu = `mean` and s2 the variance of the logit.
    Categorical ("mean-field probit"): softmax_k(mu_k / sqrt(1 + pi S_kk / 8)) with S = `covariance`, of which only
    the diagonal is used. For two classes this is NOT the binary formula, which would shrink the logit difference
    mu_1 - mu_0 by its own variance S_11 + S_00 - 2 S_01.

    **Limit**: exact at variance 0. Bernoulli: error below 0.0096 on means -3 .. 6 and variances 0 .. 400. Categorical:
    covariances between logits are ignored, and unequal variances cost more (0.075 for three equal means with
    variances 9, 1, 0.1). It gives averaged probabilities only, so no split into aleatoric and epistemic.

    **Cost**: O(N D).

    **References**: MacKay (1992), The evidence framework applied to classification networks;
    Bishop (2006), eq. 4.153; Lu et al. (2020), Mean-field approximation to Gaussian-softmax integral.

    **Example**:

    >>> from posterity.likelihoods import Bernoulli
    >>> pred = Probit()(Bernoulli(), torch.tensor([[2.0]]), torch.tensor([[[4.0]]]), Key(0))
    >>> round(float(pred.probs[0, 1]), 4)  # sigmoid(2) itself is 0.8808
    0.7768
    """

    def marginal(self, likelihood: Likelihood, mean: Tensor) -> bool:
        return True

    def __call__(self, likelihood: Likelihood, mean: Tensor, covariance: Tensor, key: Key) -> ClassPredictive:
        """The averaged class probabilities at outputs of mean (N, *event) and covariance (N, D, D)."""
        logits = shrunk(mean.double(), output_variance(mean, covariance).double())
        if likelihood.link == "softmax":
            return ClassPredictive(logits.softmax(1))  # (N, C, *positions)
        if likelihood.link != "sigmoid":
            raise TypeError(needs_classes("Probit()", likelihood))
        logits = labels_only(logits, leading=1)
        return ClassPredictive(torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], dim=1))


@dataclass(frozen=True)
class ProbitPhi(Integrator):
    """Binary class probabilities by the normal distribution function.

    **Math**: Phi(mu / sqrt(8 / pi + s2)) with mu = `mean` and s2 the variance of the logit: sigmoid(f) is replaced
    by Phi(f sqrt(pi / 8)), after which the integral over the Gaussian is exact.

    **Limit**: at most 0.0177 off, also at variance 0 where `Probit` is exact; but exact where |mu| and s2 both go to
    infinity along a ray, where `Probit` is not (Phi(mu / s) against sigmoid(mu / (s sqrt(pi / 8)))). Bernoulli only.

    **Cost**: O(N).

    **References**: Bishop (2006), eq. 4.152; MacKay (1992), The evidence framework applied to classification
    networks.

    **Example**:

    >>> from posterity.likelihoods import Bernoulli
    >>> pred = ProbitPhi()(Bernoulli(), torch.tensor([[2.0]]), torch.tensor([[[4.0]]]), Key(0))
    >>> round(float(pred.probs[0, 1]), 4)
    0.7828
    """

    def marginal(self, likelihood: Likelihood, mean: Tensor) -> bool:
        return True

    def __call__(self, likelihood: Likelihood, mean: Tensor, covariance: Tensor, key: Key) -> ClassPredictive:
        """The averaged class probabilities at logits of mean (N, *event) and covariance (N, D, D)."""
        if likelihood.link == "softmax":
            raise TypeError("ProbitPhi() needs a Bernoulli likelihood. Got Categorical. Use Probit().")
        if likelihood.link != "sigmoid":
            raise TypeError(needs_classes("ProbitPhi()", likelihood))
        variance = labels_only(output_variance(mean, covariance).double(), leading=1)
        logits = labels_only(mean.double(), leading=1)
        return ClassPredictive(torch.stack([probit_phi(-logits, variance), probit_phi(logits, variance)], dim=1))


def needs_classes(name: str, likelihood: Likelihood) -> str:
    """The message for a probit approximation under a likelihood without classes."""
    remedy = "Exact()" if likelihood.link == "identity" else "MonteCarlo()"
    return f"{name} needs a classification likelihood. Got {type(likelihood).__name__}. Use {remedy}."
