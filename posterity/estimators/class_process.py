"""Classification by Gaussian processes of log odds, with Laplace's approximation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posterity.estimators.gaussian_process import CELLS, JITTER, GaussianProcess, Moments

NEWTON_STEPS, CLOSE = 50, 1e-9  # most Newton steps, and the gain of the log posterior (nats) below which they end
LEAST_CURVATURE = 1e-12
SPREAD = (1.0, 1.5)  # mean and standard deviation of the prior of log s, and of log l sqrt(D)


@dataclass(frozen=True, eq=False)
class ClassProcess(GaussianProcess):
    """Gaussian processes f_k of the log odds of classes, each against all others, with a shared kernel.

    **Math**: targets (N, K) are 0 or 1, p(t_k = 1 | f_k) = 1 / (1 + exp(-f_k)), and a row counts as often as its weight
    says. Newton's method finds the one maximum of log p(t | f) - f^T K^-1 f / 2; a normal with this mean and the
    curvature there stands for the posterior. `log_evidence` is the integral of this approximation, and its gradient
    includes how the maximum moves with the kernel. `predict` gives mean and variance of the log odds.

    **Limit**: Laplace's approximation draws log odds towards 0 where classes are well apart; a calibration by held-out
    rows can stretch them. Classes are fitted one by one, so that their probabilities need not sum to 1.

    **Cost**: O(K N^3) a Newton step; some 5 to 10 steps.

    **References**: Rasmussen and Williams (2006), sections 3.4 and 5.5.1; Nickisch and Rasmussen (2008), Approximations
    for binary Gaussian process classification.

    **Example**:

    >>> from posterity.numerics.random import Key
    >>> x = torch.linspace(-2, 2, 30, dtype=torch.float64).unsqueeze(1)
    >>> process = ClassProcess.of(False, x, (x.abs() > 1).double(), torch.ones(30)).settled(30, 20, Key(0))
    >>> (process.predict(torch.tensor([[0.0], [1.8]])).mean > 0).flatten()
    tensor([False,  True])
    """

    def log_evidence(self) -> Tensor:
        """Laplace's approximation of the log probability of all targets; differentiable."""
        kernel = self.kernel(self.inputs, self.inputs)
        with torch.no_grad():
            fixed = kernel.detach()
            value, gradient = _evidence(fixed + JITTER * _eye(fixed), self.targets.T, self.weights)
        surrogate = (gradient * kernel).sum()
        return value + (surrogate - surrogate.detach())

    def log_prior(self) -> Tensor:
        columns = self.inputs.shape[1]
        size = torch.tensor([0.0, 0.5 * math.log(max(1, columns))]).to(self.values)  # separable classes do not bound f
        spreads = (self.values[columns : columns + 2] + size - SPREAD[0]) / SPREAD[1]
        prior: Tensor = super().log_prior() - 0.5 * spreads.square().sum()
        return prior

    def predict(self, inputs: Tensor) -> Moments:
        """Return mean and variance (N, K) of the log odds; all of the variance is epistemic."""
        kernel = self.kernel(self.inputs, self.inputs)
        mode = _Mode.of(kernel + JITTER * _eye(kernel), self.targets.T, self.weights)
        chunk = max(1, CELLS // self.targets.numel())
        parts = [self._given(mode, inputs[low : low + chunk].double()) for low in range(0, len(inputs), chunk)]
        return Moments(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _given(self, mode: "_Mode", inputs: Tensor) -> Moments:
        cross = self.kernel(inputs, self.inputs)  # (n, N)
        half = torch.linalg.solve_triangular(mode.factor, mode.root.unsqueeze(-1) * cross.T, upper=False)
        variance = (self.prior_variance(inputs) - half.square().sum(1)).clamp_min(0.0).T
        return Moments(cross @ mode.solved.T, variance, variance)


@dataclass(frozen=True, eq=False)
class _Mode:
    """The mode f (K, N) of a log posterior, `solved` = K^-1 f, and quantities of its curvature W.

    `root` is W^1/2 and `factor` the Cholesky factor of I + W^1/2 K W^1/2.
    """

    values: Tensor
    solved: Tensor
    root: Tensor
    factor: Tensor

    @classmethod
    def of(cls, kernel: Tensor, targets: Tensor, weights: Tensor) -> "_Mode":
        """Find the mode by Newton's method from 0, with steps halved until the log posterior rises."""
        solved = torch.zeros_like(targets)
        mode, height = cls._at(kernel, weights, solved), -torch.inf
        for _ in range(NEWTON_STEPS):
            probs = mode.values.sigmoid()
            slope = mode.root.square() * mode.values + weights * (targets - probs)
            inner = mode.root * (slope @ kernel)
            step = slope - mode.root * torch.cholesky_solve(inner.unsqueeze(-1), mode.factor).squeeze(-1) - mode.solved
            part = 1.0
            while True:
                solved = mode.solved + part * step
                values = solved @ kernel
                now = float(_log_likelihood(values, targets, weights) - 0.5 * (solved * values).sum())
                if now >= height or part < 1e-6:
                    break
                part *= 0.5
            mode = cls._at(kernel, weights, solved)
            if now - height < CLOSE * max(1, targets.shape[1]):
                break
            height = now
        return mode

    @classmethod
    def _at(cls, kernel: Tensor, weights: Tensor, solved: Tensor) -> "_Mode":
        values = solved @ kernel
        probs = values.sigmoid()
        root = (weights * probs * (1.0 - probs)).clamp_min(LEAST_CURVATURE).sqrt()
        inner = root.unsqueeze(-1) * kernel * root.unsqueeze(-2) + _eye(kernel)
        return cls(values, solved, root, torch.linalg.cholesky(inner))


def _evidence(kernel: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return Laplace's approximation of the log evidence, and its gradient in the kernel matrix (N, N).

    The explicit part is a a^T / 2 - R / 2 with a = K^-1 f and R = (K + W^-1)^-1. The determinant moves with the
    maximum, too: its gradient with respect to f is s = -diag(Sigma) dW / 2, with Sigma = K - K R K, and
    df = (I + K W)^-1 dK (gradient of the log likelihood).
    """
    mode = _Mode.of(kernel, targets, weights)
    log_det = mode.factor.diagonal(dim1=-2, dim2=-1).log().sum()
    value = _log_likelihood(mode.values, targets, weights) - 0.5 * (mode.solved * mode.values).sum() - log_det
    inverse = mode.root.unsqueeze(-1) * torch.cholesky_inverse(mode.factor) * mode.root.unsqueeze(-2)  # (K, N, N)
    within = kernel.diagonal() - ((kernel @ inverse) * kernel).sum(-1)
    probs = mode.values.sigmoid()
    pull = -0.5 * within * weights * probs * (1.0 - probs) * (1.0 - 2.0 * probs)
    moved = pull - (inverse @ (pull @ kernel).unsqueeze(-1)).squeeze(-1)  # (I + W K)^-1 pull
    rise = weights * (targets - probs)
    explicit = 0.5 * (mode.solved.T @ mode.solved - inverse.sum(0))
    return value, explicit + moved.T @ rise


def _log_likelihood(values: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (weights * logsigmoid((2.0 * targets - 1.0) * values)).sum()


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
