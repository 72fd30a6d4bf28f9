"""The Laplace bridge: a Dirichlet that stands for the softmax of Gaussian logits."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.integrator import Integrator, at_positions, each_label, output_variance
from posterity.predictive.probit import needs_classes


def laplace_bridge(mean: Tensor, variance: Tensor) -> Tensor:
    """Dirichlet parameters (N, K) that stand for the softmax of logits of mean and variance (N, K).

    >>> laplace_bridge(torch.zeros(1, 4), torch.ones(1, 4))  # (1 - 2/4 + 4/16) / 1
    tensor([[0.7500, 0.7500, 0.7500, 0.7500]])
    """
    return _log_alpha(mean, variance).exp()


def _log_alpha(mean: Tensor, variance: Tensor) -> Tensor:
    """log of the Dirichlet parameters, which do not overflow where logits are far apart."""
    classes = mean.shape[-1]
    spread = mean + (-mean).logsumexp(-1, keepdim=True) - 2.0 * math.log(classes)
    constant = math.log(1.0 - 2.0 / classes) if classes > 2 else -math.inf
    smallest = torch.finfo(variance.dtype).tiny  # logits that are known for sure take all, in equal parts if several
    return torch.logaddexp(spread, torch.full_like(spread, constant)) - variance.clamp_min(smallest).log()


def projected(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of logits (N, K) given that they sum to zero: mu - S 1 (1^T mu) / (1^T S 1), S - S 1 1^T S / (1^T S 1).

    Where the sum is known for sure the mean is centred instead: the softmax does not see the difference.

    >>> projected(torch.tensor([[1.0, 3.0]]), torch.eye(2).unsqueeze(0))[0]
    tensor([[-1.,  1.]])
    """
    column = covariance.sum(-1)  # S 1, (N, K)
    total = column.sum(-1, keepdim=True)  # 1^T S 1, (N, 1)
    known = total <= torch.finfo(total.dtype).eps * covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    share = torch.where(known, 1.0 / mean.shape[-1], column / torch.where(known, 1.0, total))
    return mean - share * mean.sum(-1, keepdim=True), covariance - share.unsqueeze(-1) * column.unsqueeze(-2)


@dataclass(frozen=True)
class LaplaceBridge(Integrator):
    """Class probabilities as the mean of a Dirichlet matched to the Gaussian of the logits.

    **Math**: with mu = `mean` and S = `covariance` of K logits,
    alpha_k = (1 - 2/K + e^{mu_k} sum_l e^{-mu_l} / K^2) / S_kk, and the probabilities are alpha / sum alpha. It inverts
    the Laplace approximation of a Dirichlet in softmax coordinates, which has mu_k = log alpha_k - mean log alpha and
    S_kk = (1 - 2/K) / alpha_k + sum_l (1 / alpha_l) / K^2. With `project` the Gaussian is first conditioned on
    sum_k f_k = 0, where the Dirichlet lives: mu' and S' of `projected`.

    **Limit**: rough, and not exact anywhere: it does NOT tend to softmax(mu) as S goes to 0 (for equal variances it
    gives (1 - 2/K) + e^{mu_k} sum e^{-mu_l} / K^2, normalised, whatever their size), and a class with a small variance
    takes nearly all probability (0.9 instead of 0.29 for equal means with variances 9, 1, 0.1). Without `project`
    the covariances between logits are ignored. Use it where a Dirichlet itself is wanted, `Probit` or `MonteCarlo` for
    probabilities.

    **Cost**: O(N K), with `project` O(N K^2).

    **References**: MacKay (1998), Choice of basis for Laplace approximation; Hobbhahn et al. (2022), Fast predictive
    uncertainty for classification with Bayesian deep networks.

    **Example**:

    >>> mean, covariance = torch.tensor([[1.0, 0.0, -1.0]]), torch.eye(3).unsqueeze(0)
    >>> from posterity.likelihoods import Categorical
    >>> LaplaceBridge()(Categorical(), mean, covariance, Key(0)).probs  # the exact integral is 0.60, 0.28, 0.12
    tensor([[0.5490, 0.2758, 0.1752]], dtype=torch.float64)
    """

    project: bool = False

    def marginal(self, likelihood: Likelihood, mean: Tensor) -> bool:
        return not self.project

    def __call__(self, likelihood: Likelihood, mean: Tensor, covariance: Tensor, key: Key) -> ClassPredictive:
        """The averaged class probabilities at logits of mean (N, C, *positions) and covariance (N, D, D)."""
        if likelihood.link == "sigmoid":
            raise TypeError("LaplaceBridge() needs a Categorical likelihood. Got Bernoulli. Use Probit() or Exact().")
        if likelihood.link != "softmax":
            raise TypeError(needs_classes("LaplaceBridge()", likelihood))
        variance = output_variance(mean, covariance).double()
        if not self.project:
            log_alpha = _log_alpha(mean.double().movedim(1, -1), variance.movedim(1, -1))
            return ClassPredictive(log_alpha.softmax(-1).movedim(-1, 1))
        whole = covariance if covariance.dim() == 3 else torch.diag_embed(covariance)
        centre, spread = projected(*each_label(mean.double(), whole.double()))
        variance = spread.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)  # below 0 only by rounding
        return ClassPredictive(at_positions(_log_alpha(centre, variance).softmax(-1), mean))
