"""The mutual information of labels and Gaussian logits, by quadrature or quasi-random points."""

import math

import torch
from torch import Tensor

from posterity.likelihoods.bernoulli import labels_only
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key
from posterity.predictive.integrator import each_label, output_variance, square_root
from posterity.predictive.quadrature import probit_gaussian, sigmoid_gaussian
from posterity.special.quadrature import normal_expectation

_NODES = 401
_WIDE = 10.0  # standard deviation above which the bump of the entropy is integrated instead of the Gaussian
_POINTS = 1024  # quasi-random logits of each label of three and more classes: a power of two, as Sobol's rule wants
_MOST_SOBOL = 4096  # classes; torch's Sobol numbers end at 21,201 dimensions
_FEW_POINTS = 128  # random logits of a label of more classes, whose many terms average
_ENTRIES = 1 << 22  # numbers at a time: bounds the memory


def label_information(likelihood: Likelihood, mean: Tensor, covariance: Tensor) -> Tensor:
    """Mutual information (N, *positions) in nats of each label and its logits f ~ N(mean, covariance).

    **Math**: I = H(E p(y | f)) - E H(p(y | f)), for mean (N, *event) and covariance (N, D, D) of the logits, or
    variances (N, D) of independent ones.

    **Limit**: one logit, and the difference of two, by quadrature to about 1e-12. More classes by 1024 quasi-random
    points (Sobol's, the same for all labels): to about 1 % of the information; more than 4,096 by 128 random ones.
    Each position is taken by itself.

    **Cost**: 401, 1024 or 128 softmaxes for each label.

    >>> from posterity.likelihoods import Bernoulli
    >>> round(float(label_information(Bernoulli(), torch.zeros(1, 1), torch.full((1, 1), 1e-4))) / 1e-4, 4)
    0.125
    """
    mean, covariance = mean.double(), covariance.double()
    variance = output_variance(mean, covariance)  # raises where shapes do not fit
    if likelihood.link == "sigmoid":
        return _binary(labels_only(mean, leading=1), labels_only(variance, leading=1))
    if likelihood.link == "probit":
        return _of_quantiles(labels_only(mean, leading=1), labels_only(variance, leading=1))
    if covariance.dim() == 2:
        logits = mean.movedim(1, -1).reshape(-1, mean.shape[1])
        matrix = variance.movedim(1, -1).reshape(logits.shape)
        matrix = torch.diag_embed(matrix) if logits.shape[-1] == 2 else matrix
    else:
        logits, matrix = each_label(mean, covariance)
    if logits.shape[-1] == 2:
        spread = matrix[:, 0, 0] + matrix[:, 1, 1] - matrix[:, 0, 1] - matrix[:, 1, 0]
        values = _binary(logits[:, 1] - logits[:, 0], spread.clamp_min(0.0))
    else:
        values = _many(logits, matrix)
    return values.reshape(len(mean), *mean.shape[2:])


def _of_quantiles(mean: Tensor, variance: Tensor) -> Tensor:
    """Mutual information of a label with its normal quantile, entry by entry."""

    def entropy(quantile: Tensor) -> Tensor:
        signs = torch.stack([quantile, -quantile])
        terms: Tensor = torch.special.ndtr(signs) * torch.special.log_ndtr(signs)
        return -terms.sum(0)

    expected = normal_expectation(entropy, mean, variance.sqrt(), _NODES, width=1.0)
    probs = torch.stack([probit_gaussian(sign * mean, variance) for sign in (-1.0, 1.0)])
    information: Tensor = torch.special.entr(probs).sum(0) - expected
    return information.clamp_min(0.0)


def _binary(mean: Tensor, variance: Tensor) -> Tensor:
    """Mutual information of a label with one logit, entry by entry, by the trapezoid rule."""
    flat = torch.stack([mean, variance]).reshape(2, -1)
    step = max(1, _ENTRIES // _NODES)
    pieces = [_binary_rows(*flat[:, low : low + step]) for low in range(0, max(1, flat.shape[1]), step)]
    return torch.cat(pieces).reshape(mean.shape)


def _binary_rows(mean: Tensor, variance: Tensor) -> Tensor:
    scale = variance.sqrt().unsqueeze(-1)
    node = torch.linspace(-9.0, 9.0, _NODES, dtype=torch.float64, device=mean.device)
    weight = torch.exp(-0.5 * node**2)
    narrow = _binary_entropy(mean.unsqueeze(-1) + scale * node) @ (weight / weight.sum())
    point = torch.linspace(-40.0, 40.0, _NODES, dtype=torch.float64, device=mean.device)  # entropy is 0 beyond
    wide_scale = scale.clamp_min(_WIDE)  # the narrow rows are not used
    density = torch.exp(-0.5 * ((point - mean.unsqueeze(-1)) / wide_scale) ** 2) / wide_scale
    wide = density @ _binary_entropy(point) * (80.0 / (_NODES - 1) / math.sqrt(2.0 * math.pi))
    expected = torch.where(scale.squeeze(-1) > _WIDE, wide, narrow)
    probs = torch.stack([sigmoid_gaussian(sign * mean, variance) for sign in (-1.0, 1.0)])
    information: Tensor = torch.special.entr(probs).sum(0) - expected
    return information.clamp_min(0.0)


def _binary_entropy(logit: Tensor) -> Tensor:
    """Entropy of a label with this logit, without cancellation at large ones."""
    size = logit.abs()
    return torch.log1p(torch.exp(-size)) + size * torch.sigmoid(-size)


def _many(mean: Tensor, covariance: Tensor) -> Tensor:
    """Mutual information (R,) of labels with C logits, (R, C) and (R, C, C), or variances (R, C)."""
    classes = mean.shape[1]
    if classes <= _MOST_SOBOL:
        # Without scrambling the first point is 0.
        engine = torch.quasirandom.SobolEngine(classes, scramble=True, seed=0)  # type: ignore[no-untyped-call]
        uniform = engine.draw(_POINTS, dtype=torch.float64).clamp(2.0**-32, 1.0 - 2.0**-32)
        noise = torch.special.ndtri(uniform).to(mean.device)  # (S, C)
    else:
        noise = Key(0).normal((_FEW_POINTS, classes), torch.float64, mean.device)
    step, pieces = max(1, _ENTRIES // (len(noise) * classes)), []
    for low in range(0, len(mean), step):
        centre, spread = mean[low : low + step], covariance[low : low + step]
        if spread.dim() == 2:
            away = spread.sqrt() * noise.unsqueeze(1)
        else:
            away = torch.einsum("nij,sj->sni", square_root(spread), noise)
        probs = (centre + away).softmax(-1)  # (S, n, C)
        within = torch.special.entr(probs).sum(-1).mean(0)
        pieces.append((torch.special.entr(probs.mean(0)).sum(-1) - within).clamp_min(0.0))
    return torch.cat(pieces) if pieces else mean.new_zeros(0)
