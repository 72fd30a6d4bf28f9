"""The interface of predictive distributions, their checks, and quantiles by bisection."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.likelihoods.likelihood import IGNORED
from posterity.numerics.random import Key


class Predictive(ABC):
    """The distribution of targets at N inputs, rows independent, under the untempered likelihood.

    For regression `mean` and `variance` are (N, *event), `aleatoric` and `epistemic` are variances and sum to
    `variance`. For classification `mean` is `probs` (N, C), `variance` is the variance of the one-hot label,
    `aleatoric` and `epistemic` are (N,) in nats and sum to `entropy`. Labels at positions (pixels, tokens) have
    `probs` (N, C, *positions) and entropies (N, *positions).
    """

    classifies: ClassVar[bool]
    """Whether targets are class labels."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """E[y], (N, *event); class probabilities (N, C) for classification."""

    @property
    def variance(self) -> Tensor:
        """Var[y], entry by entry, shaped as `mean`."""
        return self.aleatoric + self.epistemic

    @property
    def std(self) -> Tensor:
        """Standard deviation of y, entry by entry, shaped as `mean`."""
        return self.variance.sqrt()

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """Uncertainty given the weights: E Var[y | w], or E entropy of y given w."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """Uncertainty due to the weights: Var E[y | w], or mutual information of y and w."""

    @property
    def probs(self) -> Tensor:
        """Class probabilities (N, C)."""
        raise TypeError(
            f"probs belongs to a classification predictive. Got {type(self).__name__}. Use mean, std or interval."
        )

    @property
    def entropy(self) -> Tensor:
        """Entropy of the averaged class probabilities, (N,) in nats."""
        raise TypeError(
            f"entropy belongs to a classification predictive. Got {type(self).__name__}. "
            "Use variance, aleatoric and epistemic."
        )

    @abstractmethod
    def check(self, y: Tensor) -> Tensor:
        """Return the targets shaped as `mean`, or as labels (N,); raise BadData where they do not fit the rows.

        Missing targets are NaN, missing labels -100 (NaN among floats). Densities leave them out: the log density of a
        row is of its observed entries, and 0 if there are none.
        """

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Log predictive density or probability of each row's target, (N,) in nats, all constants kept."""

    @abstractmethod
    def expected_log_prob(self, y: Tensor) -> Tensor:
        """E log p(y_n | w) over the weights, (N,): the score of one draw. Never above `log_prob`, by Jensen."""

    @abstractmethod
    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Joint log density log E prod_n p(y_n | w), (): not the sum of `log_prob`, since rows share the weights."""

    @abstractmethod
    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        """Independent targets (draws, N, *event); labels (draws, N) for classification.

        Without a key it is `Key(0)`: the same draws each time.
        """

    def quantile(self, p: float) -> Tensor:
        """The value y with P(Y <= y) = p, entry by entry, shaped as `mean`."""
        raise TypeError(
            f"quantile and interval belong to a regression predictive. Got {type(self).__name__}. Use probs or entropy."
        )

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval that contains y with probability `level`."""
        between_zero_and_one("interval: level", level)
        return self.quantile((1.0 - level) / 2.0), self.quantile((1.0 + level) / 2.0)

    @property
    def normals(self) -> tuple[Tensor, Tensor] | None:
        """Means and scales (S, N, *event), where each entry of y is an equal mixture of S normals; else None."""
        return None

    @abstractmethod
    def rows(self, index: Tensor | slice) -> Self:
        """Select rows by a vector of indices (repeats allowed), a mask or a slice."""

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mean {shown(self.mean)})"

    @staticmethod
    def concatenate(parts: Sequence["Predictive"]) -> "Predictive":
        """Join predictives of successive chunks of rows."""
        if not parts:
            raise ValueError("Predictive.concatenate needs at least one predictive. Got an empty list.")
        kinds = sorted({type(part).__name__ for part in parts})
        if len(kinds) > 1:
            raise TypeError(
                f"Predictive.concatenate needs predictives of one class. Got {', '.join(kinds)}. "
                "Predict every chunk with the same posterior and integrator."
            )
        if len(parts) == 1:
            return parts[0]
        shapes = sorted({tuple(part.rows(slice(1)).mean.shape[1:]) for part in parts})
        if len(shapes) > 1:
            raise BadData(
                f"Predictive.concatenate needs rows of one shape. Got rows {', '.join(map(str, shapes))}. Predict "
                "batch by batch, or pad all rows to one length (with labels -100)."
            )
        return parts[0]._joined(parts)

    @abstractmethod
    def _joined(self, parts: Sequence[Any]) -> "Predictive":
        """Join several predictives of this class, self the first of them."""


UNSHARED = (
    "joint_log_prob needs draws of the weights that all rows share. Got draws of the outputs of each row by "
    "itself. Predict without an integrator: from_outputs(likelihood, q.outputs(inputs, draws, key)), "
    "for dropout with one_mask_a_draw=True."
)
"""The message for a joint density of rows that were not drawn together."""


def aligned(y: Tensor, like: Tensor) -> Tensor:
    """Return regression targets with the shape, dtype and device of `like` (N, *event).

    (N,) and (N, 1) are taken for each other; nothing is broadcast. NaN are missing targets.
    """
    y = rows(y, like.shape[0]).to(like.device)
    if y.is_complex():
        raise BadData(f"y must hold real numbers. Got {y.dtype}. Give the real part, or two columns.")
    if y.shape != like.shape and not y.numel() == like.numel() == like.shape[0]:
        raise BadData(
            f"y must have the shape {tuple(like.shape)} of the predictive mean. Got {tuple(y.shape)}. "
            "Give one column for each output of the network."
        )
    if bool(torch.isinf(y).any()):
        bad = int(torch.isinf(y).sum())
        raise BadData(f"y must be finite, or NaN where missing. Got {bad} infinite values. Drop or fill those rows.")
    return y.reshape(like.shape).to(like.dtype)


def refuse_missing(user: str, targets: Tensor) -> None:
    """Raise BadData where checked targets are missing."""
    missing = targets.isnan() if targets.is_floating_point() else targets == IGNORED
    if bool(missing.any()):
        raise BadData(f"{user} needs every target. Got {int(missing.sum())} that are missing. Leave their rows out.")


def rows(y: Tensor, count: int) -> Tensor:
    """Return the targets as a tensor; raise BadData unless they have `count` rows."""
    y = torch.as_tensor(y)
    if y.dim() == 0 or y.shape[0] != count:
        raise BadData(
            f"y must have one row for each of the {count} predictions. Got shape {tuple(y.shape)}. "
            "Score the same rows that were predicted."
        )
    return y


def chosen_rows(index: Tensor | slice, device: torch.device) -> Tensor | slice:
    """Check an index of rows, and move it to the device."""
    if isinstance(index, slice):
        return index
    index = torch.as_tensor(index)
    if index.dim() != 1:
        raise ValueError(
            f"rows: index must be a slice or a vector of indices or booleans. Got shape {tuple(index.shape)}. "
            "For one row give rows(slice(n, n + 1))."
        )
    return index.to(device)


def between_zero_and_one(name: str, value: float) -> None:
    """Raise a ValueError unless 0 < value < 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < 1.0:
        raise ValueError(f"{name} must be a number between 0 and 1, both excluded. Got {shown(value)}.")


_UNGUARDED = 4  # steps of Halley's method that are tried without brackets: draws of a posterior mostly need 2
_BISECTIONS = 64  # each halves the bracket: enough for every bit of a float64
_DOUBLINGS = 1999  # the range of a float64


def bisected_quantile(cdf: Callable[[Tensor], Tensor], mean: Tensor, std: Tensor, p: float) -> Tensor:
    """The smallest y with cdf(y) >= p, entry by entry in float64; the bracket starts from mean and `std`.

    >>> bisected_quantile(torch.special.ndtr, torch.tensor([0.1]), torch.tensor([2.0]), 0.975)
    tensor([1.9600], dtype=torch.float64)
    """
    # The bracket is a whole number plus and minus a power of two, and so is halved at whole numbers first: the
    # quantile of a count, where the distribution function jumps, is exactly whole.
    centre = mean.double().floor()
    width = torch.exp2(std.double().nan_to_num(1.0, posinf=1.0).clamp_min(1e-300).log2().ceil())
    lower, upper = centre - width, centre + width
    for _ in range(_DOUBLINGS):
        narrow = ((cdf(lower) >= p) | ~(cdf(upper) >= p)) & torch.isfinite(centre)
        if not bool(narrow.any()):
            break
        width = torch.where(narrow, 2.0 * width, width)
        lower, upper = centre - width, centre + width
    for _ in range(_BISECTIONS):
        middle = 0.5 * (lower + upper)
        below = ~(cdf(middle) >= p)
        lower, upper = torch.where(below, middle, lower), torch.where(below, upper, middle)
    return upper


def quantiles_of_normals(
    means: Tensor, scales: Tensor, mean: Tensor, std: Tensor, levels: Sequence[float], weights: Tensor | None = None
) -> Tensor:
    """Quantiles (Q, N, *event) of mixtures of S normals, means and scales (S, N, *event), in float64.

    Halley's method begins at the quantile of the normal with the mixture's `mean` and `std`, and ends after a step of
    1e-5 of the least scale, whose cube is the error that is left. Where a few steps do not get there, Newton's method
    begins at the average of the components' quantiles, ends after a step of 1e-8, and halves a bracket, the least and
    the largest quantile of the components, whenever a step leaves it or is not half the one before: Press et al.
    (2007), section 9.4. Where a scale is 0, or a number is not finite, it bisects. `weights` (S,) are equal by default.

    >>> means, scales = torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1)
    >>> quantiles_of_normals(means, scales, torch.zeros(1), torch.tensor([2.0]).sqrt(), [0.5])
    tensor([[0.]], dtype=torch.float64)
    """
    means, scales = means.double().unsqueeze(1), scales.double().expand(means.shape).unsqueeze(1)  # (S, 1, N, *event)
    form = (-1, *(1,) * (means.dim() - 1))
    shares = None if weights is None else weights.to(means).view(form)
    p = torch.tensor(levels, dtype=torch.float64).to(means.device).view(form[:-1])
    twice, z = p * (2.0 * (len(means) if weights is None else 1.0)), torch.special.ndtri(p)
    inverse, least = math.sqrt(0.5) / scales, scales.amin(0)
    logs = inverse.log() + math.log(2.0 / math.sqrt(math.pi))

    def total(values: Tensor) -> Tensor:
        return values.sum(0) if shares is None else (values * shares).sum(0)

    def functions(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A multiple of the distribution function less p, of the density, and of half its slope."""
        away = (means - value) * inverse
        each = torch.addcmul(logs, away, away, value=-1.0).exp()
        return total(torch.special.erfc(away)) - twice, total(each), total(each * away * inverse)

    value, near = torch.addcmul(mean.double(), z, std.double()), 1e-5 * least
    for attempt in range(_UNGUARDED):
        excess, density, bend = functions(value)
        step = excess / torch.addcdiv(density, excess * bend, density, value=-1.0)
        value = value - step
        if attempt and bool((step.abs() <= near).all()):  # the first step is hardly ever so short
            return value
    ends = means + z * scales  # (S, Q, N, *event)
    if not bool(torch.isfinite(ends).all() & (scales > 0).all()):

        def cdf(y: Tensor) -> Tensor:
            below: Tensor = torch.special.ndtr((y - means) / scales)
            return (below.mean(0) if shares is None else total(below))[0]

        return torch.stack([bisected_quantile(cdf, mean, std, level) for level in levels])
    middle = ends.mean(0) if shares is None else total(ends)
    lower, upper, value, near = ends.amin(0), ends.amax(0), middle, 1e-8 * least
    last, found = upper - lower, torch.zeros_like(lower, dtype=torch.bool)
    for _ in range(2 * _BISECTIONS):
        excess, density, _ = functions(value)
        step, below = excess / density, excess < 0
        lower, upper = torch.where(below, value, lower), torch.where(below, upper, value)
        fresh, size = value - step, step.abs()
        sound = (fresh >= lower) & (fresh <= upper) & (size <= 0.5 * last)
        # What is found stays: its next step, of rounding alone, would not be half the one before.
        value = torch.where(found, value, torch.where(sound, fresh, 0.5 * (lower + upper)))
        last = torch.where(sound, size, 0.5 * (upper - lower))
        found |= (sound & (size <= near)) | (upper - lower <= 1e-15 * value.abs())
        if bool(found.all()):
            break
    return value
