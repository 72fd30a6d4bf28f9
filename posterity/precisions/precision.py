"""The interface of precision matrices, and spectra and checks shared by the structures."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import NotPositiveDefinite, shown
from posterity.jacobians.jacobian import Jacobian
from posterity.numerics.finite import all_finite
from posterity.numerics.random import Key


class Precision(ABC):
    """A precision matrix Lambda = C + diag(prior) (..., R, R), possibly one for each member, in float64.

    C is the curvature of the data in some structure, `prior` (..., R) the diagonal of the prior, and Sigma = Lambda^-1.
    Implementations differ in structure only; each is tested against the dense matrix.
    """

    is_diagonal: ClassVar[bool] = False
    """Whether the weights are independent of each other."""

    @property
    @abstractmethod
    def size(self) -> int:
        """R."""

    @property
    @abstractmethod
    def logdet(self) -> Tensor:
        """log det Lambda, (...)."""

    @abstractmethod
    def rescaled(self, scale: Tensor | float, prior: Tensor) -> "Precision":
        """scale C + diag(prior) with another prior (R,); its `logdet` is differentiable in both."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Diagonal of Lambda, (..., R)."""

    @abstractmethod
    def matvec(self, vector: Tensor) -> Tensor:
        """Lambda v for v (..., R)."""

    @abstractmethod
    def solve(self, vector: Tensor) -> Tensor:
        """Sigma v for v (..., R)."""

    @abstractmethod
    def colour(self, noise: Tensor) -> Tensor:
        """Draws of N(0, Sigma), (..., S, R), from standard normal noise (..., S, R)."""

    def draws(self, count: int, key: Key, like: Tensor, space: Tensor | None = None) -> Tensor:
        """Draws (count, R) of N(0, Sigma) for one member, with the device and dtype of `like`.

        `space`, float32 (count, R), may be overwritten and returned.
        """
        return self.colour(key.normal((count, self.size), torch.float64, like.device)).to(like.dtype)

    @abstractmethod
    def variance(self) -> Tensor:
        """Diagonal of Sigma, (..., R)."""

    @abstractmethod
    def quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """J Sigma J^T for each row, (..., N, D, D), with J (N, D, R)."""

    def marginal(self, jacobian: Tensor | Jacobian) -> Tensor:
        """Diagonals of `quadratic`, (..., N, D)."""
        return self.quadratic(jacobian).diagonal(dim1=-2, dim2=-1)

    def row_draws(self, jacobian: Jacobian, noise: Tensor) -> Tensor | None:
        """Draws of N(0, `quadratic`) for one member, (S, N, D), from standard normal noise, without that matrix.

        None where it is needed.
        """
        return None

    @abstractmethod
    def joint_quadratic(self, jacobian: Tensor | Jacobian) -> Tensor:
        """J Sigma J^T between all rows, (..., N D, N D), with J (N, D, R)."""

    def covariance(self) -> Tensor:
        """Sigma as a dense matrix (..., R, R)."""
        half = self.colour(torch.eye(self.size, dtype=torch.float64, device=self.base.device))
        whole = half.mT @ half
        return 0.5 * (whole + whole.mT)

    @abstractmethod
    def member(self, index: int) -> "Precision":
        """The matrix of one member."""

    @property
    def base(self) -> Tensor:
        """A positive diagonal (..., R) within Lambda: its prior, or half its diagonal where the prior is not positive.

        A precision that others are added to by `plus` takes the sum of their bases as its prior.
        """
        return 0.5 * self.diagonal()

    def plus(self, other: "Precision", scale: Tensor | float = 1.0) -> "Precision":
        """Lambda + scale (Lambda_other - diag(`base` of other)): adds the other's curvature and keeps this prior.

        Both must have one structure. Exact for `Dense`, `Diagonal`, `LowRank` (whose rank grows), sums of `Dense` and
        `LowRank`, and for `BlockDiagonal` with such parts. `Kronecker` factors become (n1 A1 + n2 A2) / (n1 + n2) on
        either side with scale n1 + n2, where the n are the scales: the factors of both datasets together, exact where
        one of the factors is the same in both. Differentiable in the scales.

        >>> from posterity.precisions import Diagonal
        >>> first, second = Diagonal(torch.ones(2), prior=torch.ones(2)), Diagonal(torch.ones(2), prior=torch.ones(2))
        >>> first.plus(second).diagonal()
        tensor([3., 3.], dtype=torch.float64)
        """
        if self.size != other.size:
            raise ValueError(f"plus: precisions must be over as many weights. Got {self.size} and {other.size}.")
        return other._added_to(self, scale)

    def _added_to(self, first: "Precision", scale: Tensor | float) -> "Precision":
        total = first._sum(self, scale)
        if total is None:
            raise TypeError(
                f"plus: curvatures are added within one structure. Got {first._kind} and {self._kind}. "
                "Use the structure that the earlier data were kept in."
            )
        return total

    def _sum(self, other: "Precision", scale: Tensor | float) -> "Precision | None":
        """The sum that `plus` returns; None where the other has another structure."""
        return None

    def _excess(self) -> Tensor | None:
        """Lambda - diag(base), dense; None for structures whose sums do not need it."""
        return None

    @property
    def _kind(self) -> str:
        return type(self).__name__


class Spectrum:
    """Eigenvalues of C (..., R, R), or of F^T F for F (..., K, R), computed on first use; eigenvectors only if needed.

    Eigenvalues within rounding of zero count as zero.
    """

    def __init__(self, curvature: Tensor, factored: bool = False) -> None:
        self._curvature, self._factored = curvature.detach(), factored

    @cached_property
    def _gram(self) -> Tensor:
        return self._curvature @ self._curvature.mT if self._factored else self._curvature

    @cached_property
    def values(self) -> Tensor:
        """Eigenvalues (..., K), K at most R, in rising order."""
        values: Tensor = torch.linalg.eigvalsh(self._gram)[..., -self._curvature.shape[-1] :]
        if values.shape[-1] == 0:
            return values
        rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values.abs().amax(-1, keepdim=True)
        return torch.where(values.abs() <= rounding, 0.0, values)

    @cached_property
    def shares(self) -> Tensor:
        """Squares of the entries of the eigenvectors (..., R, K); zero for eigenvalues of zero."""
        vectors: Tensor = torch.linalg.eigh(self._gram)[1][..., -self._curvature.shape[-1] :]
        if not self._factored:
            return vectors.square()
        squares = (self._curvature.mT @ vectors).square()
        positive = (self.values > 0).unsqueeze(-2)
        # Divided by their own sums, not by the eigenvalues, of which the small ones are less accurate.
        return torch.where(positive, squares / torch.where(positive, squares.sum(-2, keepdim=True), 1.0), 0.0)

    def logdet(self, scale: Tensor, prior: Tensor) -> Tensor:
        """log det(scale C + diag(prior)), (...), for a prior (..., R) with equal entries.

        First derivatives in scale (...) and in every entry of the prior are exact: with eigenvectors v_k it is the sum
        of log(scale e_k + sum_i v_ki^2 prior_i).
        """
        size, rank = self._curvature.shape[-1], self.values.shape[-1]
        inside, outside = prior[..., :1], prior[..., 0]
        if prior.requires_grad and prior.stride(-1) != 0:  # the entries have derivatives of their own
            inside = (prior.unsqueeze(-2) @ self.shares).squeeze(-2)  # (..., K)
            if self._factored:
                positive = self.values > 0
                outside = (prior.sum(-1) - inside.sum(-1)) / (size - positive.sum(-1)).clamp(min=1)
                inside = torch.where(positive, inside, outside.unsqueeze(-1))
        entries = scale.unsqueeze(-1) * self.values + inside
        check_positive(entries)
        inner = entries.log().sum(-1)
        return inner + (size - rank) * outside.log() if size != rank else inner


def check_finite(name: str, values: Tensor) -> None:
    """Refuse entries of `name` that are NaN or infinite."""
    if not bool(all_finite(values)):
        raise NotPositiveDefinite(f"{name} has entries that are not finite. Look for NaN or infinite weights or data.")


def check_positive(values: Tensor) -> None:
    """Refuse eigenvalues of a precision matrix that are not positive and finite."""
    values = values.detach()
    check_finite("The precision matrix", values)
    lowest = float(values.min()) if values.numel() else 1.0
    if lowest < 0:
        raise not_definite(lowest)
    if lowest == 0:
        raise singular()


def not_definite(lowest: float) -> NotPositiveDefinite:
    """The error for a precision matrix with a negative eigenvalue."""
    return NotPositiveDefinite(
        f"The precision matrix is not positive definite: its smallest eigenvalue is {lowest:.3g}. The weights are not "
        "at a mode: train longer, use the Gauss-Newton curvature, or a prior that is curved there, such as a Normal of "
        "smaller scale."
    )


def singular() -> NotPositiveDefinite:
    """The error for a precision matrix with an eigenvalue of zero."""
    return NotPositiveDefinite(
        "The precision matrix is singular: data and prior leave some direction of the weights free. Use a prior that "
        "is curved at the mode, such as Normal; Laplace and group lasso priors are flat there."
    )


def is_one_number(prior: Tensor) -> bool:
    """Whether all entries of a prior (..., R) are equal along the last axis."""
    return prior.stride(-1) == 0 or bool((prior == prior[..., :1]).all())


def double(values: Tensor) -> Tensor:
    """Values in float64; an expanded number stays expanded, which keeps `is_one_number` and derivatives cheap."""
    if values.stride(-1) == 0 and values.shape[-1] > 0:
        return values[..., :1].to(torch.float64).expand_as(values)
    return values.to(torch.float64)


def number(scale: Tensor | float, like: Tensor) -> Tensor:
    """The scale (...) as a tensor in float64."""
    return torch.as_tensor(scale, dtype=torch.float64, device=like.device)


def positive_base(prior: Tensor | None, diagonal: Tensor) -> Tensor:
    """A prior (..., R) where it is positive, and half of the diagonal elsewhere."""
    return 0.5 * diagonal if prior is None else torch.where(prior > 0, prior, 0.5 * diagonal)


def pick(values: Tensor, lead: tuple[int, ...], kept: int, index: int) -> Tensor:
    """The values of one member, where all axes but the last `kept` broadcast to `lead`."""
    return values.expand(*lead, *values.shape[values.dim() - kept :])[index]


def check_size(name: str, prior: Tensor, size: int) -> None:
    """Refuse a prior without one entry for each of `size` weights."""
    if prior.shape[-1:] != (size,):
        raise ValueError(f"{name} must have one entry for each of the {size} weights. Got {shown(prior)}.")
