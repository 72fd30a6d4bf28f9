"""The integrator by closed forms and quadrature."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.likelihoods.bernoulli import labels_only
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.gaussian import GaussianPredictive
from posterity.predictive.information import label_information
from posterity.predictive.integrator import Integrator, at_positions, each_label, output_variance
from posterity.predictive.predictive import Predictive
from posterity.predictive.quadrature import probit_gaussian, sigmoid_gaussian, softmax_gaussian


@dataclass(frozen=True)
class Exact(Integrator):
    """The integral itself, where it has a closed form or few dimensions.

    **Math**: Gaussian likelihood: y ~ N(mean, covariance + noise). Bernoulli: p(y = 1) = integral of
    sigmoid(f) N(f; mean, covariance) df by `sigmoid_gaussian`. Probit: Phi(mean / sqrt(1 + covariance)). Categorical
    of two or three classes: E softmax(f) by `softmax_gaussian`, an integral over the one or two differences of logits.

    **Limit**: exact to rounding for Gaussian and Probit, to about 1e-12 for Bernoulli and two classes, 1e-9 for three.
    More classes are refused: the integral has too many dimensions.

    **Cost**: O(N D) for Gaussian (and O(N D^3) in its log_prob), O(401 N) for Bernoulli and two classes, some
    7,000 softmaxes for each label of three, growing with the variance.

    **References**: Bishop (2006), eq. 3.58 and 4.151.

    **Example**:

    >>> from posterity.likelihoods import Gaussian
    >>> pred = Exact()(Gaussian(scale=0.5), torch.zeros(1, 1), torch.full((1, 1, 1), 2.0), Key(0))
    >>> pred.variance.item()
    2.25
    """

    def marginal(self, likelihood: Likelihood, mean: Tensor) -> bool:
        return likelihood.link in ("sigmoid", "probit") or (likelihood.link == "identity" and mean[:1].numel() <= 1)

    def __call__(self, likelihood: Likelihood, mean: Tensor, covariance: Tensor, key: Key) -> Predictive:
        variance = output_variance(mean, covariance)
        if likelihood.link == "identity":
            joint = covariance if covariance.dim() == 3 and covariance.shape[-1] > 1 else None
            return GaussianPredictive(mean, variance.to(mean), likelihood.variance(mean), joint)
        if likelihood.link in ("sigmoid", "probit"):
            centre, spread = labels_only(mean.double(), leading=1), labels_only(variance.double(), leading=1)
            integral = sigmoid_gaussian if likelihood.link == "sigmoid" else probit_gaussian
            probs = torch.stack([integral(sign * centre, spread) for sign in (-1, 1)], dim=1)
        elif likelihood.link == "softmax" and mean.shape[1] in (2, 3):
            if covariance.dim() == 2:
                covariance = torch.diag_embed(covariance)  # independent logits
            probs = at_positions(softmax_gaussian(*each_label(mean, covariance)), mean)
        elif likelihood.link == "softmax":
            raise TypeError(
                f"Exact() needs 2 or 3 classes. Got {mean.shape[1]}. Use Probit(), LaplaceBridge() or MonteCarlo()."
            )
        else:
            raise TypeError(
                "Exact() needs a Gaussian, Bernoulli, Probit or Categorical likelihood. "
                f"Got {type(likelihood).__name__}. Use MonteCarlo()."
            )
        return ClassPredictive(probs).with_information(lambda: label_information(likelihood, mean, covariance))


def joint_gaussian(likelihood: Likelihood, mean: Tensor, covariance: Tensor) -> GaussianPredictive:
    """Return the predictive at outputs of mean (N, *event) and covariance (N D, N D) within and across rows.

    >>> from posterity.likelihoods import Gaussian
    >>> pred = joint_gaussian(Gaussian(scale=1.0), torch.zeros(2, 1), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    >>> round(float(pred.joint_log_prob(torch.zeros(2, 1))), 4), round(float(pred.log_prob(torch.zeros(2, 1)).sum()), 4)
    (-2.8776, -2.9365)
    """
    count = len(mean)
    blocks = covariance.reshape(count, -1, count, mean[0].numel()).diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (N, D, D)
    variance = output_variance(mean, blocks).to(mean)
    own = blocks if blocks.shape[-1] > 1 else None
    return GaussianPredictive(mean, variance, likelihood.variance(mean), own, covariance)
