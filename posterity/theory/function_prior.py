"""Priors over functions: what a prior of weights says of outputs, and scales that match a Gaussian process."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole, shown, unknown
from posterity.numerics.random import Key
from posterity.optim import LBFGS
from posterity.special.activations import activation_function

_JITTER = 1e-10  # relative: added to the diagonal of covariances before they are factorised
_EVALUATIONS = 500


def _erf_products(first: Tensor, second: Tensor, both: Tensor) -> Tensor:
    return (2.0 / math.pi) * torch.asin(2.0 * both / ((1.0 + 2.0 * first) * (1.0 + 2.0 * second)).sqrt())


def _relu_products(first: Tensor, second: Tensor, both: Tensor) -> Tensor:
    square = first * second - both.square()  # of |u| |u'| sin(angle)
    apart = square > 1e-14 * first * second
    sine = torch.where(apart, square, 1.0).sqrt() * apart  # the square root has no slope at 0
    return (sine + (math.pi - torch.atan2(sine, both)) * both) / (2.0 * math.pi)


_PRODUCTS = {"erf": _erf_products, "relu": _relu_products}


@dataclass(frozen=True)
class FunctionPrior:
    """The prior over functions of a network of one hidden layer with independent normal weights.

    **Math**: f(x) = N^-1/2 sum over j of a_j sigma(<b_j, x> + c_j), with a ~ N(0, outer_scale^2), b ~ N(0,
    inner_scale^2) and c ~ N(0, bias_scale^2). E f = 0, and Cov(f(x), f(x')) = outer_scale^2 E sigma(u) sigma(u') at
    every width N, where u, u' are normal with covariance inner_scale^2 <x, x'> + bias_scale^2: the arcsine kernel of
    erf, the arc-cosine kernel of ReLU. As N grows f becomes a Gaussian process.

    **Limit**: covariances are exact; draws of a narrow network are not Gaussian.

    **Cost**: a covariance of N rows takes N^2 numbers and N^2 D products.

    **References**: Neal (1996), Bayesian learning for neural networks, chapter 2; Williams (1997), Computing with
    infinite networks, eq. 10; Cho and Saul (2009), Kernel methods for deep learning, eq. 6.

    **Example**:

    >>> prior = FunctionPrior(outer_scale=2.0, activation="relu", bias_scale=1e-9)
    >>> prior.covariance(torch.tensor([[1.0], [-1.0]]))  # outer^2 x^2 / 2 on a side, and nothing across
    tensor([[2., 0.],
            [0., 2.]], dtype=torch.float64)
    """

    outer_scale: float = 1.0
    inner_scale: float = 1.0
    bias_scale: float = 1.0
    activation: str = "erf"

    def __post_init__(self) -> None:
        for name in ("outer_scale", "inner_scale", "bias_scale"):
            positive(f"FunctionPrior.{name}", getattr(self, name))
        if self.activation not in _PRODUCTS:
            raise ValueError(unknown("activation", str(self.activation), _PRODUCTS))

    def covariance(self, inputs: Tensor) -> Tensor:
        """Covariance of f at rows (N, D), (N, N) in float64."""
        scales = torch.tensor([self.outer_scale, self.inner_scale, self.bias_scale], dtype=torch.float64)
        return _covariance(_rows("FunctionPrior.covariance", inputs), scales, self.activation)

    def draw(self, inputs: Tensor, width: int, draws: int, key: Key) -> Tensor:
        """Functions of networks of this width at rows (N, D), (draws, N) in float64."""
        positive_whole("FunctionPrior.draw: width", width)
        positive_whole("FunctionPrior.draw: draws", draws)
        rows, sigma = _rows("FunctionPrior.draw", inputs), activation_function(self.activation)
        inner = self.inner_scale * key.fold("inner").normal((draws, width, rows.shape[1]), torch.float64, rows.device)
        bias = self.bias_scale * key.fold("bias").normal((draws, width, 1), torch.float64, rows.device)
        outer = self.outer_scale * key.fold("outer").normal((draws, 1, width), torch.float64, rows.device)
        return (outer @ sigma(inner @ rows.mT + bias)).squeeze(1) / math.sqrt(width)


def wasserstein_distance(first: Tensor, second: Tensor) -> Tensor:
    """The 2-Wasserstein distance of two centred Gaussians with these covariances (N, N), divided by N^1/2, ().

    **Math**: W^2 = tr A + tr B - 2 tr (A^1/2 B A^1/2)^1/2; with A = L L^T and B = M M^T the last trace is the nuclear
    norm of M^T L. The division makes it the root mean square of the distance at a row.

    **Limit**: a small multiple of the identity is added to both, so covariances may be singular, and distances below
    about 1e-5 scales are lost.

    **Cost**: N^3.

    **References**: Gelbrich (1990), On a formula for the L2 Wasserstein metric between measures on Euclidean spaces.

    >>> float(wasserstein_distance(torch.eye(3), 4.0 * torch.eye(3)))
    1.0000...
    """
    left, right = (_factor(covariance.to(torch.float64)) for covariance in (first, second))
    across = torch.linalg.svdvals(right.mT @ left).sum()
    square = left.square().sum() + right.square().sum() - 2.0 * across
    distance: Tensor = (square / len(left)).clamp_min(0.0).sqrt()
    return distance


def matched_prior(inputs: Tensor, covariance: Tensor, start: FunctionPrior | None = None) -> FunctionPrior:
    """The scales of a `FunctionPrior` nearest to a Gaussian process with this covariance (N, N) at rows (N, D).

    **Math**: the least 2-Wasserstein distance of the two Gaussians at the rows, over the logs of the three scales, by
    L-BFGS from `start`.

    **Limit**: a local minimum; three scales do not give every process, and nothing is asked away from the rows.

    **Cost**: a Cholesky factor and singular values of N x N matrices in each of some tens of evaluations.

    **References**: Tran, Rossi, Milios and Filippone (2022), All you need is a good functional prior for Bayesian deep
    learning, which matches narrow networks by draws.

    **Example**:

    >>> rows = torch.linspace(-2, 2, 9).unsqueeze(1)
    >>> wanted = FunctionPrior(0.5, 3.0, 2.0).covariance(rows)
    >>> prior = matched_prior(rows, wanted)
    >>> round(prior.outer_scale, 2), round(prior.inner_scale, 2), round(prior.bias_scale, 2)
    (0.5, 3.0, 2.0)
    """
    start = start or FunctionPrior()
    rows = _rows("matched_prior", inputs)
    target = covariance.to(torch.float64)
    if target.shape != (len(rows), len(rows)):
        raise ValueError(
            f"matched_prior: covariance must be ({len(rows)}, {len(rows)}), one entry for each pair of rows. "
            f"Got {shown(covariance)}."
        )
    scales = [start.outer_scale, start.inner_scale, start.bias_scale]
    logs = torch.tensor(scales, dtype=torch.float64, device=rows.device).log()
    search, size = LBFGS(), target.diagonal().mean()
    state = search.init(logs)
    for _ in range(_EVALUATIONS):
        with torch.enable_grad():
            trial = state.trial.detach().requires_grad_()
            distance = wasserstein_distance(_covariance(rows, trial.exp(), start.activation), target)
            value = -distance.square() / size
            (gradient,) = torch.autograd.grad(value, trial)
        state = search.climb(logs, value.detach(), gradient, state)
        if bool(state.converged):
            break
    outer, inner, bias = logs.exp().tolist()
    return FunctionPrior(outer, inner, bias, start.activation)


def _rows(user: str, inputs: Tensor) -> Tensor:
    if inputs.dim() != 2 or not len(inputs):
        raise ValueError(f"{user}: inputs must be (N, D), with N of at least 1. Got {shown(inputs)}.")
    return inputs.to(torch.float64)


def _covariance(rows: Tensor, scales: Tensor, activation: str) -> Tensor:
    outer, inner, bias = scales.to(rows.device).square()
    both = inner * rows @ rows.mT + bias
    own = both.diagonal()
    result: Tensor = outer * _PRODUCTS[activation](own.unsqueeze(1), own.unsqueeze(0), both)
    return result


def _factor(covariance: Tensor) -> Tensor:
    jitter = _JITTER * covariance.diagonal().mean()
    factor: Tensor = torch.linalg.cholesky(covariance + jitter * torch.eye(len(covariance)).to(covariance))
    return factor
