"""Scaling of a classifier's logits, or of a posterior's class probabilities, on held-out rows."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from posterity.errors import BadData, positive, shown
from posterity.likelihoods.likelihood import IGNORED
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.predictive import Predictive

_LARGEST = 1e3  # temperature, and the inverse of the smallest
_STEPS = 200
LEAST = 1e-300  # probability in place of 0, whose logarithm is not finite
_MOST_CLASSES = 2000  # whose vectors are scaled by Newton steps, with matrices of four times their square


class Scaling(ABC):
    """A map from logits to calibrated class probabilities, fitted on held-out rows.

    It takes logits (N, C), or (N, 1) and (N,) for one binary logit, or a predictive of classes, whose log probabilities
    are its logits. What `apply` returns of a predictive keeps the mutual information of label and weights as its
    `epistemic` part (at most the entropy): scaling says nothing about the weights. It has no draws.
    """

    @classmethod
    @abstractmethod
    def fit(cls, logits: Tensor | Predictive, y: Tensor) -> Self:
        """Minimise the loss at held-out rows with the labels y."""

    @abstractmethod
    def scaled(self, logits: Tensor) -> Tensor:
        """Logits of the calibrated probabilities (R, C), from logits (R, C) in float64."""

    def apply(self, logits: Tensor | Predictive) -> ClassPredictive:
        """Return the calibrated predictive, from logits or a predictive as in `fit`."""
        if not isinstance(logits, Predictive):
            probs = self.scaled(_two_or_more(type(self).__name__, logits)).softmax(-1)
            return ClassPredictive(probs, probs.unsqueeze(0))  # one function: no epistemic part
        flat = _logits(type(self).__name__, logits)
        shape = (len(logits), *logits.probs.shape[2:], logits.probs.shape[1])
        pred = ClassPredictive(self.scaled(flat).softmax(-1).reshape(shape).movedim(-1, 1))
        assert isinstance(logits, ClassPredictive)
        return pred.with_information(lambda: logits.epistemic.double()) if logits.splits else pred


def _held_out(name: str, logits: Tensor | Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (R, C) and labels (R,) of all rows and positions that have a label."""
    if isinstance(logits, Predictive):
        values = _logits(name, logits)
        labels = logits.check(y).reshape(-1)
    else:
        values = _two_or_more(name, logits)
        labels = ClassPredictive(values.softmax(-1)).check(y)
    values, labels = values[labels != IGNORED], labels[labels != IGNORED]
    if not len(values):
        raise BadData(f"{name}.fit needs at least one row. Got none. Hold out some rows.")
    return values, labels


def _logits(name: str, pred: Predictive) -> Tensor:
    """Log probabilities (R, C) of all labels in float64."""
    if not pred.classifies:
        raise TypeError(f"{name} needs a predictive of classes. Got {type(pred).__name__}. Use ConformalIntervals.")
    return pred.probs.double().movedim(1, -1).reshape(-1, pred.probs.shape[1]).clamp_min(LEAST).log()


@final
@dataclass(frozen=True)
class TemperatureScaling(Scaling):
    """Class probabilities softmax(f / temperature): the baseline of calibration, not a posterior.

    **Math**: `fit` minimises -(1/N) sum_n log softmax(b f_n)[y_n] over b = 1 / temperature on held-out logits f (N, C)
    and labels y. The loss is convex in b, with derivative (1/N) sum_n (E_p[f] - f_{y_n}) and second derivative
    (1/N) sum_n Var_p[f] under p = softmax(b f_n): Newton steps inside a bracket that bisection halves. Of a predictive
    f = log p, so that calibrated probabilities are p^b, normalised.

    **Limit**: predicted labels do not change, and far from the data it is as confident as the network. Fitted on
    training rows it does not calibrate. The temperature stays within 0.001 .. 1000: it is the lower end where all
    held-out labels are predicted right, the upper end where the logits carry no information.

    **Cost**: a few passes over the held-out logits.

    **References**: Guo et al. (2017), On calibration of modern neural networks, section 4.2.

    **Example**:

    >>> logits = torch.tensor([[4.0, 0.0]] * 3 + [[-4.0, 0.0]])  # right three times in four, at 98% each
    >>> scaling = TemperatureScaling.fit(logits, torch.tensor([0, 0, 1, 1]))
    >>> scaling.apply(logits).probs[0]
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        positive("TemperatureScaling.temperature", self.temperature)

    @classmethod
    def fit(cls, logits: Tensor | Predictive, y: Tensor) -> "TemperatureScaling":
        return cls(1.0 / _inverse_temperature(*_held_out("TemperatureScaling", logits, y)))

    def scaled(self, logits: Tensor) -> Tensor:
        return logits / self.temperature


def _inverse_temperature(logits: Tensor, labels: Tensor) -> float:
    """The b of least loss of softmax(b f), for logits (R, C) and labels (R,)."""
    target = logits.gather(-1, labels.unsqueeze(-1)).mean()

    def slopes(inverse: float) -> tuple[float, float]:
        probs = (inverse * logits).softmax(-1)
        mean = (probs * logits).sum(-1, keepdim=True)
        return float(mean.mean() - target), float((probs * (logits - mean).square()).sum(-1).mean())

    lower, upper = 1.0 / _LARGEST, _LARGEST
    if slopes(lower)[0] >= 0.0:
        return lower
    if slopes(upper)[0] <= 0.0:
        return upper
    inverse = 1.0
    for _ in range(_STEPS):
        slope, curvature = slopes(inverse)
        lower, upper = (inverse, upper) if slope < 0.0 else (lower, inverse)
        newton = inverse - slope / curvature if curvature > 0.0 else lower
        step = newton if lower < newton < upper else 0.5 * (lower + upper)
        if abs(step - inverse) <= 1e-14 * inverse:
            break
        inverse = step
    return inverse


@final
@dataclass(frozen=True, eq=False)
class VectorScaling(Scaling):
    """Class probabilities softmax(scale * f + bias), with a scale and a bias (C,) for each class.

    **Math**: `fit` minimises -sum_n log softmax(scale * f_n + bias)[y_n] + ridge / 2 (|scale - b|^2 + |bias|^2), with b
    the inverse temperature of `TemperatureScaling` on the same rows. The loss is convex: Newton steps with a line
    search. Of a predictive f = log p.

    **Limit**: it can move predicted labels, and mend classes that are predicted too often. It has 2 C numbers: hold out
    some dozens of rows for each class, or use `TemperatureScaling`. The ridge (0.01, not in the paper) decides only
    what the rows leave open, such as the bias of a class without labels. For up to 2,000 classes.

    **Cost**: N C^2 + C^3 for each of some ten steps.

    **References**: Guo et al. (2017), On calibration of modern neural networks, section 4.2.

    **Example**:

    >>> logits = torch.zeros(4, 2)  # the network sees no difference, and three labels in four are of the first class
    >>> scaling = VectorScaling.fit(logits, torch.tensor([0, 0, 0, 1]))
    >>> [round(p, 2) for p in scaling.apply(logits).probs[0].tolist()]
    [0.75, 0.25]
    """

    scale: Tensor
    bias: Tensor

    def __post_init__(self) -> None:
        for name in ("scale", "bias"):
            value = getattr(self, name)
            good = isinstance(value, Tensor) and value.dim() == 1 and bool(value.isfinite().all())
            if not good or value.shape != self.scale.shape:
                raise ValueError(
                    f"VectorScaling.{name} must be finite, one number for each class, (C,). Got {shown(value)}."
                )
            object.__setattr__(self, name, value.to(torch.float64))

    @classmethod
    def fit(cls, logits: Tensor | Predictive, y: Tensor, *, ridge: float = 0.01) -> "VectorScaling":
        positive("VectorScaling.fit: ridge", ridge)
        values, labels = _held_out("VectorScaling", logits, y)
        classes = values.shape[1]
        if classes > _MOST_CLASSES:
            raise ValueError(
                f"VectorScaling is for up to {_MOST_CLASSES:,} classes. Got {classes:,}. Use TemperatureScaling."
            )
        start = torch.cat(
            [values.new_full((classes,), _inverse_temperature(values, labels)), values.new_zeros(classes)]
        )
        wanted = torch.nn.functional.one_hot(labels, classes).to(values)

        def loss(both: Tensor) -> Tensor:
            scaled = values * both[:classes] + both[classes:]
            return ((scaled.logsumexp(1) - (scaled * wanted).sum(1)).sum()) + 0.5 * ridge * (
                both - start
            ).square().sum()

        both, value = start, loss(start)
        for _ in range(_STEPS):
            probs = (values * both[:classes] + both[classes:]).softmax(1)
            weighted, away = probs * values, probs - wanted
            grad = torch.cat([(away * values).sum(0), away.sum(0)]) + ridge * (both - start)
            sides = torch.cat([weighted, probs], 1)  # (R, 2 C)
            own = torch.stack([(weighted * values).sum(0), weighted.sum(0), probs.sum(0)])
            corner = torch.diag(own[1])
            hessian = torch.cat(
                [torch.cat([torch.diag(own[0]), corner], 1), torch.cat([corner, torch.diag(own[2])], 1)]
            )
            hessian = hessian - sides.T @ sides + ridge * torch.eye(2 * classes, dtype=both.dtype, device=both.device)
            step: Tensor = torch.cholesky_solve(grad.unsqueeze(1), torch.linalg.cholesky(hessian)).squeeze(1)
            decrement, length = float(grad @ step), 1.0
            if decrement <= 1e-16 * (1.0 + float(value)):
                break
            while (trial := loss(both - length * step)) > value - 0.25 * length * decrement and length > 1e-10:
                length *= 0.5
            both, value = both - length * step, trial
        return cls(both[:classes].clone(), both[classes:].clone())

    def scaled(self, logits: Tensor) -> Tensor:
        if logits.shape[-1] != len(self.scale):
            raise BadData(f"VectorScaling was fitted for {len(self.scale)} classes. Got {logits.shape[-1]}.")
        return logits * self.scale.to(logits.device) + self.bias.to(logits.device)


def _two_or_more(name: str, logits: Tensor) -> Tensor:
    """Return logits (N, C) in float64; one binary logit f, (N,) or (N, 1), becomes (0, f)."""
    logits = logits.unsqueeze(-1) if logits.dim() == 1 else logits
    if logits.dim() != 2 or not logits.shape[1]:
        raise BadData(
            f"{name}: logits must be (N, C), or (N,) for one binary logit. Got {tuple(logits.shape)}. "
            "Give one row of logits for each label."
        )
    if not bool(torch.isfinite(logits).all()):
        raise BadData(f"{name}: logits must be finite. Got NaN or infinity. Give logits, not log probabilities of 0.")
    logits = logits.double()
    return torch.nn.functional.pad(logits, (1, 0)) if logits.shape[1] == 1 else logits
