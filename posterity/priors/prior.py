"""The interface of priors over weights."""

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
    """Degree k of A(w) = log p(mode) - log p(mode + w) where it is homogeneous, A(w / s) = A(w) / s^k; else None.

    With n weights and every scale multiplied by s, p is const tau^(n / k) exp(-tau A(w)) for tau = s^-k, so that the
    best scale for given weights has a closed form.
    """

    chosen: str = ""
    """How the scale was chosen: "" where it was given, `LEFT_OUT` where the method is to choose it."""

    def as_chosen(self, way: str) -> "Prior":
        """Return the prior whose present scales count as chosen in this way, except for those that were given."""
        return self

    def bound(self, layout: Layout) -> "Prior":
        """Return the prior for these named tensors (itself where names and shapes do not matter)."""
        return self

    @property
    def num_members(self) -> int | None:
        """The number M of members where a hyper-parameter differs by member, else None."""
        return None

    def member(self, index: int) -> "Prior":
        """Return the prior of one member (itself when all members share it)."""
        return self

    @abstractmethod
    def log_prob(self, theta: Tensor) -> Tensor:
        """Return log p(theta), normalised, (..., P) -> (...)."""

    @abstractmethod
    def sample(self, shape: tuple[int, ...], key: Key, like: Tensor) -> Tensor:
        """Draw weights of `shape` (..., P) with the dtype and device of `like`."""

    @abstractmethod
    def variance(self, like: Tensor) -> Tensor:
        """Return the variance of each weight, shaped as theta `like` (..., P); inf or nan where there is none."""

    @abstractmethod
    def cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return -E log p(w) for independent w ~ N(mean, scale^2), summed over weights: (..., P) -> (...)."""

    @property
    def has_cross_entropy(self) -> bool:
        """Whether `cross_entropy` is available; where not, average -log_prob over draws."""
        return True

    @property
    def factorises(self) -> bool:
        """Whether weights are independent: `cross_entropy` then holds for any joint density with these marginals."""
        return False

    def cross_entropy_and_grad(self, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cross-entropy (...) and its gradients in mean and scale, as new tensors (..., P)."""
        leaves = [value.detach().requires_grad_() for value in (mean, scale)]
        with torch.enable_grad():
            value = self.cross_entropy(*leaves)
            grad_mean, grad_scale = torch.autograd.grad(value.sum(), leaves)
        return value.detach(), grad_mean, grad_scale

    def add_cross_entropy_grad(
        self, mean: Tensor, scale: Tensor, grad_mean: Tensor, grad_scale: Tensor, factor: float | Tensor
    ) -> Tensor:
        """Return the cross-entropy (...); add `factor` (a number or (M, 1)) times its gradients to those given."""
        value, *grads = self.cross_entropy_and_grad(mean, scale)
        for total, grad in zip((grad_mean, grad_scale), grads, strict=True):
            total.add_(grad.mul_(factor))
        return value

    def kl(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return KL(N(mean, scale^2) || this prior), cross-entropy minus entropy: (..., P) -> (...)."""
        return self.cross_entropy(mean, scale) - (scale.log() + _HALF_LOG_TWO_PI_E).sum(-1)

    def value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(theta) and its gradient, as new tensors."""
        leaf = theta.detach().requires_grad_()
        with torch.enable_grad():
            value = self.log_prob(leaf)
            (grad,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), grad

    @property
    def nonsmooth(self) -> bool:
        """Whether -log p has kinks, at which a mode may lie exactly; `proximal` steps by them."""
        return False

    def smooth_value_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(theta) and the gradient of its smooth part, as new tensors."""
        return self.value_and_grad(theta)

    def proximal(self, theta: Tensor, step: float | Tensor) -> Tensor:
        """Return argmin over w of sum of (w - theta)^2 / (2 step) - log p_k(w), where p_k is the part with kinks.

        `step` is a number, (M, 1), or (..., P) with one for each weight; theta is (..., P). Without kinks the
        minimiser is theta itself, and the gradient of log p is added to that of the likelihood.
        """
        return theta

    @abstractmethod
    def precision(self, theta: Tensor) -> Tensor:
        """Return the diagonal of the Hessian of -log p at theta, (..., P) -> (..., P)."""

    def by_tensor(self, layout: Layout) -> tuple["Prior", ...]:
        """Return the unbound prior of each tensor."""
        return tuple(self for _ in layout)

    def rescaled(self, factor: Any) -> "Prior":
        """Return the unbound prior with every scale multiplied by a number or by (M,)."""
        raise TypeError(
            f"{type(self).__name__} has no scale that a factor multiplies. Use Normal, Laplace or GroupLasso."
        )

    def rescaled_each(self, factors: Tensor) -> "Prior":
        """Return the prior of one tensor with scales multiplied by factors (n,), which may differ for `Normal` only."""
        return self if bool((factors == 1.0).all()) else self.rescaled(float(factors[0]))

    def centred(self) -> tuple["Prior", float | Tensor]:
        """Return the prior with its mode moved to zero, and the mode: a number, (P,) or (M, P)."""
        return self, 0.0

    @property
    def log_scale(self) -> Tensor:
        """Logs of the scales, () or shaped like them, in float64."""
        raise TypeError(f"{type(self).__name__} has no scale of its own.")

    def penalty(self, away: Tensor, spread: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return log p(0) and A(w) of a prior with a `degree` and mode zero, (..., n) -> (...) each, in float64.

        With `spread` the second is E A for independent w ~ N(away, spread^2). A is evaluated at w / r and multiplied
        by r^k, with r such that both terms are comparable: no digits are lost for weights far below the prior's scale.
        """
        assert self.degree is not None
        with torch.no_grad():
            squares = away.square() if spread is None else away.square() + spread.square()
            squares = squares.sum(-1, keepdim=True) / self.variance(away).sum(-1, keepdim=True)
            ratio = torch.where(squares > 0.0, squares.sqrt(), torch.ones_like(squares))  # (..., 1)
            highest = self.log_prob(torch.zeros_like(away))
        near = away / ratio
        value = self.log_prob(near) if spread is None else -self.cross_entropy(near, spread / ratio)
        return highest.double(), (highest - value).double() * ratio.squeeze(-1).double() ** self.degree

    @property
    def description(self) -> str:
        """The usual name of the prior, with its hyper-parameters."""
        return "without a name, by a table"

    @property
    def formula(self) -> str | None:
        """The density p(w) of one weight as text; None where it has no closed form."""
        return None

    @property
    def kl_formula(self) -> str:
        """The divergence KL(N(mu, sigma^2) || this prior) of one weight as text."""
        return f"-E log p(w) - {ENTROPY_FORMULA}, the expectation by quadrature"


def times(number: float) -> str:
    """Write a factor before the term that it multiplies; the empty string for 1.

    >>> times(0.5) + "mu^2", times(1.0) + "mu^2"
    ('0.5 mu^2', 'mu^2')
    """
    return "" if f"{number:.6g}" == "1" else f"{number:.6g} "


def over(number: float) -> str:
    """Write a divisor after the term that it divides; the empty string for 1."""
    return "" if f"{number:.6g}" == "1" else f" / {number:.6g}"
