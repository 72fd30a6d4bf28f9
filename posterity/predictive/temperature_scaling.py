"""Temperature scaling of a network's logits after training."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import BadData, positive
from posterity.likelihoods.likelihood import IGNORED
from posterity.predictive.classes import ClassPredictive

_LARGEST = 1e3  # temperature, and the inverse of the smallest
_STEPS = 200


@dataclass(frozen=True)
class TemperatureScaling:
    """Class probabilities softmax(f / temperature): the baseline of calibration, not a posterior.

    **Math**: `fit` minimises -(1/N) sum_n log softmax(b f_n)[y_n] over b = 1 / temperature on held-out logits f (N, C)
    and labels y. The loss is convex in b, with derivative (1/N) sum_n (E_p[f] - f_{y_n}) and second derivative
    (1/N) sum_n Var_p[f] under p = softmax(b f_n): Newton steps inside a bracket that bisection halves.

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
    def fit(cls, logits: Tensor, y: Tensor) -> "TemperatureScaling":
        """Minimise the loss at held-out logits (N, C), or (N, 1) and (N,) for one binary logit."""
        logits = _two_or_more(logits)
        labels = ClassPredictive(logits.softmax(-1)).check(y)
        logits, labels = logits[labels != IGNORED], labels[labels != IGNORED].unsqueeze(-1)
        if not len(logits):
            raise BadData("TemperatureScaling.fit needs at least one row. Got none. Hold out some rows.")
        target = logits.gather(-1, labels).mean()

        def slopes(inverse: float) -> tuple[float, float]:
            probs = (inverse * logits).softmax(-1)
            mean = (probs * logits).sum(-1, keepdim=True)
            return float(mean.mean() - target), float((probs * (logits - mean).square()).sum(-1).mean())

        lower, upper = 1.0 / _LARGEST, _LARGEST
        if slopes(lower)[0] >= 0.0:
            return cls(1.0 / lower)
        if slopes(upper)[0] <= 0.0:
            return cls(1.0 / upper)
        inverse = 1.0
        for _ in range(_STEPS):
            slope, curvature = slopes(inverse)
            lower, upper = (inverse, upper) if slope < 0.0 else (lower, inverse)
            newton = inverse - slope / curvature if curvature > 0.0 else lower
            step = newton if lower < newton < upper else 0.5 * (lower + upper)
            if abs(step - inverse) <= 1e-14 * inverse:
                break
            inverse = step
        return cls(1.0 / inverse)

    def apply(self, logits: Tensor) -> ClassPredictive:
        """Return the predictive softmax(logits / temperature), from logits shaped as in `fit`."""
        probs = (_two_or_more(logits) / self.temperature).softmax(-1)
        return ClassPredictive(probs, probs.unsqueeze(0))  # one function: no epistemic part


def _two_or_more(logits: Tensor) -> Tensor:
    """Return logits (N, C) in float64; one binary logit f, (N,) or (N, 1), becomes (0, f)."""
    logits = logits.unsqueeze(-1) if logits.dim() == 1 else logits
    if logits.dim() != 2 or not logits.shape[1]:
        raise BadData(
            f"TemperatureScaling: logits must be (N, C), or (N,) for one binary logit. Got {tuple(logits.shape)}. "
            "Give one row of logits for each label."
        )
    if not bool(torch.isfinite(logits).all()):
        raise BadData(
            "TemperatureScaling: logits must be finite. Got NaN or infinity. Give logits, not log probabilities of 0."
        )
    logits = logits.double()
    return torch.nn.functional.pad(logits, (1, 0)) if logits.shape[1] == 1 else logits
