"""The interface of likelihoods, and checks of targets."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.likelihoods.fisher import OutputFisher
from posterity.numerics.random import Key

IGNORED = -100
"""The label of an entry that is missing, as in `torch.nn.functional.cross_entropy`."""

_FOLLOWING = {
    "log_prob": ("total_log_prob", "total_and_slope"),
    "entry_log_prob": ("total_log_prob", "total_and_slope"),
    "output_fisher": ("output_root", "fisher_by_position"),
}

REMEDY = "Reshape the targets, or give the network one output for each target."


def shaped(name: str, targets: Tensor, shape: torch.Size, remedy: str = REMEDY) -> Tensor:
    """Return targets of the shape (N, *event), where (N,) also stands for (N, 1); else raise BadData."""
    if targets.dim() == 1 and shape == (*targets.shape, 1):
        targets = targets.unsqueeze(-1)
    if targets.shape != shape or not targets.dim():
        whose = "of the outputs, " if remedy == REMEDY else ""
        raise BadData(
            f"{name}: targets must have the shape {whose}{tuple(shape)}. Got {tuple(targets.shape)}. {remedy}"
        )
    return targets


def real(name: str, targets: Tensor, shape: torch.Size, dtype: torch.dtype, remedy: str = REMEDY) -> Tensor:
    """Return targets of the given shape and dtype, finite or missing (NaN); else raise BadData."""
    if not targets.is_floating_point() or targets.dtype != dtype:
        raise BadData(
            f"{name}: targets must have the outputs' dtype {dtype}. Got {targets.dtype}. Convert with y.to({dtype})."
        )
    targets = shaped(name, targets, shape, remedy)
    infinite = torch.isinf(targets)
    if infinite.any():
        row = first_row(infinite)
        raise BadData(
            f"{name}: targets must be finite. Got {shown(targets[row])} in row {row}. Drop or repair that row, or "
            "give NaN where a target is missing."
        )
    return targets


def first_row(bad: Tensor) -> int:
    """Return the first row of (N, *event) in which any entry is true."""
    return int(bad.reshape(len(bad), -1).any(-1).nonzero()[0])


class Likelihood(ABC):
    """The density of targets given network outputs, in nats.

    Outputs have shape (..., N, *event) with any leading axes (draws, members); targets have shape (N, ...), one row
    for each row of outputs and never a leading axis, so they determine which axes of the outputs are the event.
    A likelihood is an immutable value. Parameters it learns (an observation noise) are exposed as one raw,
    unconstrained vector of `num_free` numbers that a `Joint` appends to theta.
    """

    link: ClassVar[Literal["identity", "sigmoid", "probit", "softmax"] | None] = None
    """The inverse link, by which integrals over Gaussian outputs are chosen: outputs are means of normal targets
    ("identity"), logits of binary labels ("sigmoid"), their normal quantiles ("probit"), logits of classes ("softmax"),
    or something else (None)."""

    normal_targets: ClassVar[bool] = False
    """Whether targets are normal given the outputs, so that `mean` and `variance` determine them."""

    chosen: str = ""
    """How the scale was chosen: "" where it was given, "left out" where the method is to choose it."""

    def __init_subclass__(cls) -> None:
        """Let what is computed of a density or a Fisher information follow those that a subclass overrides."""
        super().__init_subclass__()
        own = vars(cls).keys()
        for name in {name for changed, names in _FOLLOWING.items() if changed in own for name in names} - own:
            setattr(cls, name, getattr(Likelihood, name))

    def as_chosen(self, way: str) -> "Likelihood":
        """Return the likelihood whose present scale counts as chosen in this way, unless it was given."""
        return self

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return targets shaped for `log_prob`, or raise a ValueError."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return log p(y_n | f_n) for each row, (..., N), summed over the event; targets are those `check` returned."""

    def total_log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of `log_prob` over the rows, (...), for targets of which none is missing."""
        return self.log_prob(outputs, targets).sum(-1)

    def total_and_slope(self, outputs: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor] | None:
        """Return `total_log_prob` and `factor` times its gradient in outputs (N, C), both without a graph.

        They have the bits of autograd. None, the default, where autograd itself finds them.
        """
        return None

    def observed(self, targets: Tensor) -> Tensor | None:
        """Return which entries of the targets are not missing, shaped as they are; None where none can be missing."""
        return None

    def entry_log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return log p of each entry of the targets, (..., N, *entries), whose sum is `log_prob`; 0 where missing."""
        raise TypeError(
            f"{type(self).__name__} has no log density for each entry of a target. Give one weight for each row, (N,)."
        )

    def over_outputs(self, entries: Tensor) -> Tensor:
        """Return numbers (N, *entries), one for each entry of the targets, so that they broadcast to (N, *event)."""
        return entries

    def used_outputs(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return which of the D outputs of each row an observed target depends on, (N, D); None where all are used."""
        return None

    @abstractmethod
    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        """Draw targets once for each output row."""

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """Return E[y | f]; class probabilities for a classification likelihood."""

    @abstractmethod
    def variance(self, outputs: Tensor) -> Tensor:
        """Return Var[y | f], entry by entry, shaped as `mean`."""

    @abstractmethod
    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the Hessian of -log p(y | f) in f, (..., N, D, D) with D the flattened event."""

    @abstractmethod
    def output_fisher(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        """Return the Fisher information of f, (..., N, D, D) with D the flattened event; positive semi-definite.

        `event_dims` is the number of last axes of the outputs that are the event; None is the usual one of the
        likelihood (one axis, or (C, *positions) for classes at positions).
        """

    def output_root(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        """Return columns s_k, (K, ..., N, *event), with sum_k s_k s_k^T the Fisher information of each row."""
        fisher = self.output_fisher(outputs, event_dims).to(torch.float64)
        diagonal = fisher.diagonal(dim1=-2, dim2=-1)
        if torch.equal(fisher, torch.diag_embed(diagonal)):
            root = torch.diag_embed(diagonal.sqrt())
        else:
            values, vectors = torch.linalg.eigh(fisher)
            root = vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
        return root.movedim(-1, 0).reshape(-1, *outputs.shape).to(outputs.dtype)

    def fisher_by_position(self, outputs: Tensor) -> OutputFisher | None:
        """Return the Fisher information of outputs (N, C, *positions), position by position; None if not known so."""
        return None

    def class_log_probs(self, outputs: Tensor) -> Tensor | None:
        """Return log probabilities (S, N, C, *event) of classes at S draws of their logits; None without classes."""
        return None

    def expected_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Return E log p(y_n | f_n) (N,) in closed form, for outputs of mean (N, *event) and variances (N, D)."""
        raise TypeError(f"{type(self).__name__} has no expected log density in closed form. Average it over draws.")

    def expected_entry_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Return `expected_log_prob` of each entry of the targets, (N, *entries); 0 where missing."""
        raise TypeError(f"{type(self).__name__} has no expected log density in closed form. Average it over draws.")

    def tilted_moments(self, mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return log Z, mean and variance of one output f under p(y | f) N(f; mean, variance) / Z, each (N,).

        Takes vectors (N,) and the targets of N rows, whose event is one number; None where there is no closed form.
        """
        return None

    def peaks(self, targets: Tensor) -> Tensor | None:
        """Return the outputs at which log p(y | f) is highest, where it is not concave in f; None where it is."""
        return None

    def cdf(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return P(Y <= y | f), entry by entry, shaped as `mean` of the outputs; targets broadcast against it."""
        raise TypeError(
            f"{type(self).__name__} has no distribution function in closed form, so no quantiles. "
            "Use sample(draws, key).quantile(p, dim=0)."
        )

    @property
    def num_free(self) -> int:
        """Number of learnt parameters of the likelihood."""
        return 0

    def free(self, like: Tensor) -> Tensor:
        """Return raw values (num_free,) of the learnt parameters, with the dtype and device of `like`."""
        return like.new_zeros(0)

    def free_from(self, other: "Likelihood", like: Tensor) -> Tensor:
        """Return raw values (..., num_free) with the parameters of `other`, where it is of the same class."""
        return self.free(like)

    @property
    def num_members(self) -> int | None:
        """The number M of members where a parameter differs by member, else None."""
        return None

    def member(self, index: int) -> "Likelihood":
        """Return the likelihood of one member (itself when all members share it)."""
        return self

    def free_names(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the learnt raw parameters, in the order of `free`."""
        return {}

    def with_free(self, raw: Tensor) -> "Likelihood":
        """Return the likelihood with its learnt parameters at `raw` (..., num_free), differentiable in raw."""
        return self

    def fixed(self, raw: Tensor) -> "Likelihood":
        """Return the likelihood with its learnt parameters fixed at `raw`."""
        return self

    def free_log_prior(self, raw: Tensor) -> Tensor:
        """Return the log density of the prior of the raw parameters, (..., num_free) -> (...)."""
        return raw.new_zeros(raw.shape[:-1])

    def free_value_and_grad(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Return `free_log_prior` (...) and its gradient in the raw parameters (..., num_free)."""
        leaf = raw.detach().requires_grad_()
        with torch.enable_grad():
            value = self.free_log_prior(leaf)
            grad = torch.autograd.grad(value.sum(), leaf)[0] if value.requires_grad else torch.zeros_like(raw)
        return value.detach(), grad


class Entrywise(Likelihood):
    """A likelihood whose targets are independent entries given the outputs, any of which may be missing.

    Missing targets are NaN. They have no density: sums leave them out, with gradients and curvature of exactly 0,
    whatever the outputs are there. A row that is wholly missing contributes nothing.
    """

    @abstractmethod
    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return log p of each entry, (..., N, *entries); no target is missing."""

    @abstractmethod
    def _hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return `output_hessian`; no target is missing."""

    def observed(self, targets: Tensor) -> Tensor:
        return targets == targets  # NaN is not

    def entry_log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        observed = self.observed(targets)
        # Outputs are replaced as well: where a density overflows, its gradient times 0 would be NaN.
        return torch.where(observed, self._entries(*self._filled(outputs, targets, observed)), 0.0)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return event_sum(self.entry_log_prob(outputs, targets), targets.dim() - 1)

    def total_log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return event_sum(self._entries(outputs, targets), targets.dim() - 1).sum(-1)

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        observed = self.observed(targets)
        hessian, used = self._hessian(*self._filled(outputs, targets, observed)), self.used_outputs(outputs, targets)
        return torch.where(used.unsqueeze(-1) & used.unsqueeze(-2), hessian, 0.0)

    def used_outputs(self, outputs: Tensor, targets: Tensor) -> Tensor:
        used = self.over_outputs(self.observed(targets))
        return used.expand(outputs.shape[outputs.dim() - used.dim() :]).reshape(len(used), -1)

    def _filled(self, outputs: Tensor, targets: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets with 0 where the target is missing."""
        return torch.where(self.over_outputs(observed), outputs, 0.0), torch.where(observed, targets, 0)


def event_sum(entries: Tensor, event_dims: int) -> Tensor:
    """Sum entries (..., N, *event) over their last `event_dims` axes, (..., N)."""
    return entries.sum(dim=tuple(range(-event_dims, 0))) if event_dims else entries


def event_shape(name: str, outputs: Tensor, event_dims: int) -> tuple[torch.Size, int]:
    """Return the shape (..., N) of the rows of outputs and the size D of their event; refuse outputs without rows."""
    if outputs.dim() <= event_dims:
        raise ValueError(
            f"{name}.output_fisher needs outputs (..., N, *event) with {event_dims} event axes. Got outputs of shape "
            f"{tuple(outputs.shape)}. Say how many of the last axes are the event by event_dims."
        )
    first = outputs.dim() - event_dims
    return outputs.shape[:first], math.prod(outputs.shape[first:])


def diagonal_information(name: str, information: Tensor, event_dims: int) -> Tensor:
    """Return matrices (..., N, D, D) with the entries (..., N, *event) on their diagonals."""
    rows, size = event_shape(name, information, event_dims)
    return torch.diag_embed(information.reshape(*rows, size))
