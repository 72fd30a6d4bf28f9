"""Class probabilities of Gaussian logits in closed form: the probit approximation and the Laplace bridge."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.likelihoods.bernoulli import labels_only
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.exact import Exact
from posterity.predictive.information import label_information
from posterity.predictive.integrator import Integrator, MonteCarlo, at_positions, each_label, output_variance
from posterity.predictive.quadrature import probit_phi


def probit_kappa(mean: Tensor, variance: Tensor) -> Tensor:
    """sigmoid(mean / sqrt(1 + pi variance / 8)), close to E sigmoid(f) for f ~ N(mean, variance); entry by entry."""
    return torch.sigmoid(shrunk(mean, variance))


def shrunk(mean: Tensor, variance: Tensor) -> Tensor:
    """mean / sqrt(1 + pi variance / 8): the logit whose sigmoid approximates the averaged sigmoid."""
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
    variances 9, 1, 0.1). `epistemic` is the mutual information of the Gaussian logits themselves, see
    `label_information`, with their covariances where these are given; `aleatoric` is the rest of the entropy.

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
        logits = shrunk(mean.double(), output_variance(mean, covariance).double())
        if likelihood.link == "softmax":
            return _informed(logits.softmax(1), likelihood, mean, covariance)  # (N, C, *positions)
        if likelihood.link != "sigmoid":
            raise TypeError(_needs_classes("Probit()", likelihood))
        logits = labels_only(logits, leading=1)
        probs = torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], dim=1)
        return _informed(probs, likelihood, mean, covariance)


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
        if likelihood.link == "softmax":
            raise TypeError("ProbitPhi() needs a Bernoulli likelihood. Got Categorical. Use Probit().")
        if likelihood.link != "sigmoid":
            raise TypeError(_needs_classes("ProbitPhi()", likelihood))
        variance = labels_only(output_variance(mean, covariance).double(), leading=1)
        logits = labels_only(mean.double(), leading=1)
        probs = torch.stack([probit_phi(-logits, variance), probit_phi(logits, variance)], dim=1)
        return _informed(probs, likelihood, mean, covariance)


def _informed(probs: Tensor, likelihood: Likelihood, mean: Tensor, covariance: Tensor) -> ClassPredictive:
    """The predictive of these probabilities, with the mutual information of labels and Gaussian logits."""
    return ClassPredictive(probs).with_information(lambda: label_information(likelihood, mean, covariance))


def _needs_classes(name: str, likelihood: Likelihood) -> str:
    """The error message for a likelihood whose outputs are no logits."""
    remedy = "Exact()" if likelihood.link in ("identity", "probit") else "MonteCarlo()"
    return f"{name} needs outputs that are logits. Got {type(likelihood).__name__}. Use {remedy}."


def laplace_bridge(mean: Tensor, variance: Tensor) -> Tensor:
    """Dirichlet parameters (N, K) that approximate the softmax of logits of mean and variance (N, K).

    >>> laplace_bridge(torch.zeros(1, 4), torch.ones(1, 4))  # (1 - 2/4 + 4/16) / 1
    tensor([[0.7500, 0.7500, 0.7500, 0.7500]])
    """
    return _log_alpha(mean, variance).exp()


def _log_alpha(mean: Tensor, variance: Tensor) -> Tensor:
    """Logs of the Dirichlet parameters, which stay finite where logits are far apart."""
    classes = mean.shape[-1]
    spread = mean + (-mean).logsumexp(-1, keepdim=True) - 2.0 * math.log(classes)
    constant = math.log(1.0 - 2.0 / classes) if classes > 2 else -math.inf
    smallest = torch.finfo(variance.dtype).tiny  # logits without variance share all probability
    return torch.logaddexp(spread, torch.full_like(spread, constant)) - variance.clamp_min(smallest).log()


def projected(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of logits (N, K) given that they sum to zero: mu - S 1 (1^T mu) / (1^T S 1), S - S 1 1^T S / (1^T S 1).

    Where the sum has no variance the mean is centred instead, which leaves the softmax as it is.

    >>> projected(torch.tensor([[1.0, 3.0]]), torch.eye(2).unsqueeze(0))[0]
    tensor([[-1.,  1.]])
    """
    column = covariance.sum(-1)  # S 1, (N, K)
    total = column.sum(-1, keepdim=True)  # 1^T S 1, (N, 1)
    certain = total <= torch.finfo(total.dtype).eps * covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    share = torch.where(certain, 1.0 / mean.shape[-1], column / torch.where(certain, 1.0, total))
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
    covariances between logits are ignored. Use it for the Dirichlet itself, `Probit` or `MonteCarlo` for probabilities.

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
        if likelihood.link == "sigmoid":
            raise TypeError("LaplaceBridge() needs a Categorical likelihood. Got Bernoulli. Use Probit() or Exact().")
        if likelihood.link != "softmax":
            raise TypeError(_needs_classes("LaplaceBridge()", likelihood))
        variance = output_variance(mean, covariance).double()
        if not self.project:
            log_alpha = _log_alpha(mean.double().movedim(1, -1), variance.movedim(1, -1))
            return _informed(log_alpha.softmax(-1).movedim(-1, 1), likelihood, mean, covariance)
        matrix = covariance if covariance.dim() == 3 else torch.diag_embed(covariance)
        centre, spread = projected(*each_label(mean.double(), matrix.double()))
        variance = spread.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)  # below 0 only by rounding
        probs = at_positions(_log_alpha(centre, variance).softmax(-1), mean)
        return _informed(probs, likelihood, mean, covariance)


def default_integrator(likelihood: Likelihood, mean: Tensor) -> Integrator:
    """The default integrator for outputs of this mean (N, *event).

    `Exact()` for Gaussian, Bernoulli, Probit and two classes, `Probit()` for more classes (for two, ignoring the
    correlation of the logits is its largest error), `MonteCarlo(1000)` for any other likelihood.

    >>> from posterity.likelihoods import Categorical
    >>> default_integrator(Categorical(), torch.zeros(5, 2)), default_integrator(Categorical(), torch.zeros(5, 10))
    (Exact(), Probit())
    """
    if likelihood.link is None:
        return MonteCarlo(1000)
    return Probit() if likelihood.link == "softmax" and mean.shape[1:] != (2,) else Exact()
