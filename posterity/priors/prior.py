"""What every prior over weights can do."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from posterity.numerics.layout import Layout
from posterity.numerics.random import Key

_HALF_LOG_TWO_PI_E = 0.5 * math.log(2.0 * math.pi * math.e)
ENTROPY_FORMULA = "log(sigma sqrt(2 pi e))"


class Prior(ABC):
    """A density over the flat weight vector theta (..., P), in nats.

    A prior is an immutable value. `bound(layout)` resolves names and shapes once, when a `Joint` is made;
    every other method is called on the bound prior. A leading member axis of theta is kept: `log_prob` of
    (M, P) is (M,).
    """

    degree: ClassVar[int | None] = None
    """k where A(w) = log p(mode) - log p(mode + w) is homogeneous, A(w / s) = A(w) / s^k; None elsewhere.

    With n weights and every scale multiplied by s, p is const tau^(n / k) exp(-tau A(w)) for tau = s^-k, so that the
    best scale for given weights has a closed form.
    """

    def bound(self, layout: Layout) -> "Prior":
        """The prior for exactly these named tensors (itself where names and shapes do not matter)."""
        return self

    @property
    def num_members(self) -> int | None:
        """M when a hyper-parameter differs by member, else None."""
        return None

    def member(self, index: int) -> "Prior":
        """The prior of one member (itself when all members share it)."""
        return self

    @abstractmethod
    def log_prob(self, theta: Tensor) -> Tensor:
        """log p(theta), normalised, (..., P) -> (...)."""

    @abstractmethod
    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        """Draws of `shape` (..., P) with the dtype and device of `like`."""

    @abstractmethod
    def variance(self, like: Tensor) -> Tensor:
        """Variance of each weight, shaped as theta `like` (..., P); inf or nan where there is none."""

    @abstractmethod
    def cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        """-E log p(w) for independent w ~ N(mean, scale^2), summed over weights: (..., P) -> (...)."""

    @property
    def has_cross_entropy(self) -> bool:
        """Whether `cross_entropy` can be had; where not, average -log_prob over draws."""
        return True

    @property
    def factorises(self) -> bool:
        """Whether weights are independent under it: `cross_entropy` then holds for any w of these marginals."""
        return False

    def cross_entropy_and_grad(self, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The cross-entropy (...) and its gradients in mean and scale, as new tensors (..., P)."""
        leaves = [value.detach().requires_grad_() for value in (mean, scale)]
        with torch.enable_grad():
            value = self.cross_entropy(*leaves)
            grad_mean, grad_scale = torch.autograd.grad(value.sum(), leaves)
        return value.detach(), grad_mean, grad_scale

    def add_cross_entropy_grad(
        self, mean: Tensor, scale: Tensor, grad_mean: Tensor, grad_scale: Tensor, factor: float | Tensor
    ) -> Tensor:
        """The cross-entropy (...); `factor` (a number or (M, 1)) times its gradients is added to those given."""
        value, *grads = self.cross_entropy_and_grad(mean, scale)
        for total, grad in zip((grad_mean, grad_scale), grads, strict=True):
            total.add_(grad.mul_(factor))
        return value

    def kl(self, mean: Tensor, scale: Tensor) -> Tensor:
        """KL(N(mean, scale^2) || this prior), cross-entropy minus entropy summed over weights: (..., P) -> (...)."""
        return self.cross_entropy(mean, scale) - (scale.log() + _HALF_LOG_TWO_PI_E).sum(-1)

    def value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """log p(theta) and its gradient, as new tensors."""
        leaf = theta.detach().requires_grad_()
        with torch.enable_grad():
            value = self.log_prob(leaf)
            (grad,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), grad

    @property
    def nonsmooth(self) -> bool:
        """Whether -log p has kinks, at which a mode may lie exactly: what `proximal` steps by."""
        return False

    def smooth_value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """log p(theta), whole, and the gradient of its part without kinks, as new tensors."""
        return self.value_and_grad(theta)

    def proximal(self, theta: Tensor, step: float | Tensor) -> Tensor:
        """argmin over w of sum of (w - theta)^2 / (2 step) - log p_k(w), where p_k is the part of p with kinks.

        `step` is a number, (M, 1), or (..., P) with one for each weight; theta is (..., P). Where p has no kinks
        that is theta itself: its gradient goes with the data's.
        """
        return theta

    @abstractmethod
    def precision(self, theta: Tensor) -> Tensor:
        """Diagonal of the Hessian of -log p at theta, (..., P) -> (..., P)."""

    def by_tensor(self, layout: Layout) -> tuple["Prior", ...]:
        """The prior of each tensor alone, not bound."""
        return tuple(self for _ in layout)

    def rescaled(self, factor: Any) -> "Prior":
        """The same density with every scale multiplied by a number or by (M,), not bound."""
        raise TypeError(
            f"{type(self).__name__} has no scale that a factor multiplies. Use Normal, Laplace or GroupLasso."
        )

    def rescaled_each(self, factors: Tensor) -> "Prior":
        """The prior of one tensor with a factor for each of its n weights (n,), which may differ for `Normal` only."""
        return self if bool((factors == 1.0).all()) else self.rescaled(float(factors[0]))

    def centred(self) -> tuple["Prior", float | Tensor]:
        """The prior with its mode moved to zero, and the mode: a number, (P,) or (M, P)."""
        return self, 0.0

    @property
    def log_scale(self) -> Tensor:
        """Logs of the scales, () or shaped like them, in float64."""
        raise TypeError(f"{type(self).__name__} has no scale of its own.")

    def penalty(self, away: Tensor, spread: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log p(0) and A(w) of a prior with a `degree` and mode zero, (..., n) -> (...) each, in float64.

        With `spread` it is E A for independent w ~ N(away, spread^2). A is taken at w / r, where r makes the two terms
        comparable, and multiplied by r^k: the difference keeps its digits for weights far below the prior's scale.
        """
        assert self.degree is not None
        with torch.no_grad():
            squares = away.square() if spread is None else away.square() + spread.square()
            squares = squares.sum(-1, keepdim=True) / self.variance(away).sum(-1, keepdim=True)
            ratio = torch.where(squares > 0.0, squares.sqrt(), torch.ones_like(squares))  # (..., 1)
            highest = self.log_prob(torch.zeros_like(away))
        there = away / ratio
        value = self.log_prob(there) if spread is None else -self.cross_entropy(there, spread / ratio)
        return highest.double(), (highest - value).double() * ratio.squeeze(-1).double() ** self.degree

    @property
    def description(self) -> str:
        """The usual name of the prior, with its numbers."""
        return "without a name, by a table"

    @property
    def formula(self) -> str | None:
        """p(w) of one weight as text; None where it has no closed form."""
        return None

    @property
    def kl_formula(self) -> str:
        """KL(N(mu, sigma^2) || this prior) of one weight as text."""
        return f"-E log p(w) - {ENTROPY_FORMULA}, the expectation by quadrature"


def times(number: float) -> str:
    """A factor in a formula, before what it multiplies; nothing for 1.

    >>> times(0.5) + "mu^2", times(1.0) + "mu^2"
    ('0.5 mu^2', 'mu^2')
    """
    return "" if f"{number:.6g}" == "1" else f"{number:.6g} "


def over(number: float) -> str:
    """A divisor in a formula, after what it divides; nothing for 1."""
    return "" if f"{number:.6g}" == "1" else f" / {number:.6g}"
