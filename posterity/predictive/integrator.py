"""Integrators from Gaussian network outputs to a predictive: Monte Carlo, probit and the Laplace bridge."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite, shown
from posterity.likelihoods.bernoulli import labels_only
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.draws import from_outputs
from posterity.predictive.predictive import Predictive


class Integrator(ABC):
    """A rule for the integral p(y) = E p(y | f) over outputs f ~ N(mean, covariance); an immutable value."""

    @abstractmethod
    def __call__(self, likelihood: Likelihood, mean: Tensor, covariance: Tensor, key: Key) -> Predictive:
        """Return the predictive at outputs of mean (N, *event) and covariance (N, D, D), D the flattened event.

        Variances (N, D) suffice where `marginal` returns True. `key` seeds the draws of a randomised rule.
        """

    def marginal(self, likelihood: Likelihood, mean: Tensor) -> bool:
        """Whether only variances (N, D) are used, at outputs shaped as `mean`."""
        return False


def output_variance(mean: Tensor, covariance: Tensor) -> Tensor:
    """Check a covariance (N, D, D) or variances (N, D); return each output's variance, shaped as mean (N, *event)."""
    count, size = mean.shape[0], math.prod(mean.shape[1:])
    if covariance.shape not in ((count, size, size), (count, size)):
        raise ValueError(
            f"covariance must be one matrix for each row of the outputs, {(count, size, size)}. "
            f"Got {tuple(covariance.shape)}. Give variances of independent outputs as {(count, size)}."
        )
    variance = covariance if covariance.dim() == 2 else covariance.diagonal(dim1=-2, dim2=-1)  # (N, D)
    slack = rounding(variance.dtype) * variance.abs().amax(-1, keepdim=True)
    if not bool(torch.isfinite(covariance).all() & (variance >= -slack).all()):
        raise NotPositiveDefinite(
            "covariance must be finite, with no variance below 0. "
            f"Got {float(variance.detach().min()):.3g} as the smallest variance. Compute the posterior in float64."
        )
    return variance.clamp_min(0.0).reshape(mean.shape)


def rounding(dtype: torch.dtype) -> float:
    """Relative size up to which a negative variance or eigenvalue counts as a rounded zero."""
    return float(torch.finfo(dtype).eps ** 0.5)


def each_label(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (R, C) and covariance (R, C, C) of the logits per label, R = N times the number of positions."""
    count, classes = mean.shape[:2]
    if mean.dim() == 2:
        return mean, covariance
    positions = math.prod(mean.shape[2:])
    blocks = covariance.reshape(count, classes, positions, classes, positions)  # (N, C, P, C, P)
    own = blocks.diagonal(dim1=2, dim2=4).movedim(-1, 1)  # (N, P, C, C)
    return mean.movedim(1, -1).reshape(-1, classes), own.reshape(-1, classes, classes)


def at_positions(probs: Tensor, mean: Tensor) -> Tensor:
    """Reshape probabilities (R, C) of each label to the shape of the logits, (N, C, *positions)."""
    return probs if mean.dim() == 2 else probs.reshape(len(mean), *mean.shape[2:], -1).movedim(-1, 1)


@dataclass(frozen=True)
class MonteCarlo(Integrator):
    """Average of the likelihood over drawn outputs, for any likelihood.

    **Math**: f_s ~ N(mean, covariance) for s = 1 .. `draws`, p(y) = (1/draws) sum_s p(y | f_s). Outputs of one row are
    drawn jointly, rows independently.

    **Limit**: unbiased; the standard error of a probability p is at most 1 / (2 sqrt(draws)). The draws are kept, so
    entropy splits into aleatoric and epistemic. Rows are drawn independently, so there is no `joint_log_prob`.

    **Cost**: O(N D^3 + draws N D^2) in float64; memory O(draws N D).

    **References**: Bishop (2006), chapter 11; Daxberger et al. (2021), Laplace redux.

    **Example**:

    >>> from posterity.likelihoods.bernoulli import Bernoulli
    >>> pred = MonteCarlo(draws=4000)(Bernoulli(), torch.tensor([[2.0]]), torch.tensor([[[4.0]]]), Key(0))
    >>> abs(float(pred.probs[0, 1]) - 0.7752) < 0.02
    True
    """

    draws: int = 1000

    def __post_init__(self) -> None:
        if isinstance(self.draws, bool) or not isinstance(self.draws, int) or self.draws < 1:
            raise ValueError(f"MonteCarlo.draws must be a positive integer. Got {shown(self.draws)}.")

    def __call__(self, likelihood: Likelihood, mean: Tensor, covariance: Tensor, key: Key) -> Predictive:
        output_variance(mean, covariance)  # raises where shape or diagonal is wrong
        noise = key.normal((self.draws, *covariance.shape[:2]), dtype=torch.float64, device=mean.device)  # (S, N, D)
        if covariance.dim() == 2:  # independent outputs
            deviation = covariance.double().clamp_min(0.0).sqrt() * noise
        else:
            deviation = torch.einsum("nij,snj->sni", square_root(covariance.double()), noise)
        outputs = mean.double() + deviation.reshape(self.draws, *mean.shape)
        return from_outputs(likelihood, outputs.to(mean.dtype), shared=False)


def square_root(covariance: Tensor) -> Tensor:
    """Return A with A A^T = covariance for each positive semi-definite (N, D, D), singular ones included.

    The Cholesky factor where it exists; else eigenvectors times roots of eigenvalues: slower, without jitter.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(covariance)
    singular = info > 0
    if not bool(singular.any()):
        return factor
    values, vectors = torch.linalg.eigh(covariance[singular])
    # Rounding in networks of float32 leaves eigenvalues below 0.
    if not bool((values >= -rounding(torch.float32) * values.abs().amax(-1, keepdim=True)).all()):
        raise NotPositiveDefinite(
            f"covariance must be positive semi-definite. Got an eigenvalue of {float(values.min()):.3g}. "
            "Compute the posterior in float64."
        )
    factor[singular] = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
    return factor


def probit_kappa(mean: Tensor, variance: Tensor) -> Tensor:
    """sigmoid(mean / sqrt(1 + pi variance / 8)), close to E sigmoid(f) for f ~ N(mean, variance); entry by entry."""
    return torch.sigmoid(shrunk(mean, variance))


def probit_phi(mean: Tensor, variance: Tensor) -> Tensor:
    """Phi(mean / sqrt(8 / pi + variance)), close to E sigmoid(f) for f ~ N(mean, variance); entry by entry."""
    value: Tensor = torch.special.ndtr(mean / torch.sqrt(8.0 / math.pi + variance))
    return value


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
    variances 9, 1, 0.1). There are no draws, so entropy does not split into aleatoric and epistemic.

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
            return ClassPredictive(logits.softmax(1))  # (N, C, *positions)
        if likelihood.link != "sigmoid":
            raise TypeError(_needs_classes("Probit()", likelihood))
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
        if likelihood.link == "softmax":
            raise TypeError("ProbitPhi() needs a Bernoulli likelihood. Got Categorical. Use Probit().")
        if likelihood.link != "sigmoid":
            raise TypeError(_needs_classes("ProbitPhi()", likelihood))
        variance = labels_only(output_variance(mean, covariance).double(), leading=1)
        logits = labels_only(mean.double(), leading=1)
        return ClassPredictive(torch.stack([probit_phi(-logits, variance), probit_phi(logits, variance)], dim=1))


def _needs_classes(name: str, likelihood: Likelihood) -> str:
    """The error message for a likelihood without classes."""
    remedy = "Exact()" if likelihood.link == "identity" else "MonteCarlo()"
    return f"{name} needs a classification likelihood. Got {type(likelihood).__name__}. Use {remedy}."


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
            return ClassPredictive(log_alpha.softmax(-1).movedim(-1, 1))
        matrix = covariance if covariance.dim() == 3 else torch.diag_embed(covariance)
        centre, spread = projected(*each_label(mean.double(), matrix.double()))
        variance = spread.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)  # below 0 only by rounding
        return ClassPredictive(at_positions(_log_alpha(centre, variance).softmax(-1), mean))
