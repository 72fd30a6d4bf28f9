"""Mixtures of predictives."""

import math
from collections.abc import Sequence
from typing import cast, final

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.numerics.random import Key
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.draws import DrawsPredictive
from posterity.predictive.predictive import Predictive, between_zero_and_one, bisected_quantile, quantiles_of_normals


@final
class MixturePredictive(Predictive):
    """The mixture of regression predictives with weights: p(y) = sum_k w_k p_k(y).

    **Math**: log_prob(y) = logsumexp_k (log w_k + log p_k(y)); mean = sum_k w_k mean_k. By the law of total variance,
    exact for the mixture: aleatoric = sum_k w_k aleatoric_k, epistemic = sum_k w_k (epistemic_k + (mean_k - mean)^2).
    The p-quantile solves sum_k w_k F_k(y) = p. All rows share the component: joint_log_prob(y) =
    logsumexp_k (log w_k + joint_log_prob_k(y)). `weights` (K,) are equal by default.

    **Limit**: exact for these components, whatever they are.

    **Cost**: the sum over components, and some 70 distribution functions of each for a quantile (10 of equal
    normals).

    **References**: Lakshminarayanan et al. (2017), Simple and scalable predictive uncertainty estimation, section 2.4.

    **Example**:

    >>> from posterity.predictive.gaussian import GaussianPredictive
    >>> parts = [GaussianPredictive(torch.tensor([[m]]), torch.ones(1, 1), torch.tensor(1.0)) for m in (-2.0, 2.0)]
    >>> pred = MixturePredictive(parts)
    >>> pred.mean.item(), pred.aleatoric.item(), pred.epistemic.item()
    (0.0, 1.0, 5.0)
    """

    classifies = False
    parts: tuple[Predictive, ...]
    weights: Tensor

    def __init__(self, parts: Sequence[Predictive], weights: Tensor | None = None) -> None:
        """Take predictives of the same rows, and their weights (K,), which sum to 1."""
        weights = checked_weights("MixturePredictive.weights", weights, len(parts))
        flat: list[tuple[Predictive, float]] = []
        for part, weight in zip(parts, weights.tolist(), strict=True):
            if isinstance(part, MixturePredictive):
                inner = zip(part.parts, part.weights.tolist(), strict=True)
                flat += [(component, weight * share) for component, share in inner]
            else:
                flat.append((part, weight))
        shapes = {tuple(part.mean.shape) for part, _ in flat}
        if len(shapes) > 1 or any(part.classifies for part, _ in flat):
            raise ValueError(
                f"MixturePredictive.parts must be regression predictives of the same rows. Got {sorted(shapes)}. "
                "Use mixed(parts) for classes."
            )
        self.parts = tuple(part for part, _ in flat)
        shares = [weight for _, weight in flat]
        self.weights = torch.tensor(shares, dtype=torch.float64, device=self.parts[0].mean.device)

    @property
    def mean(self) -> Tensor:
        return self._average([part.mean for part in self.parts])

    @property
    def aleatoric(self) -> Tensor:
        return self._average([part.aleatoric for part in self.parts])

    @property
    def epistemic(self) -> Tensor:
        mean = self.mean
        return self._average([part.epistemic + (part.mean - mean).square() for part in self.parts])

    @property
    def normals(self) -> tuple[Tensor, Tensor] | None:
        """Means and scales (S, N, *event) of all components, where they are normals of equal weight."""
        known = [normals for part in self.parts if (normals := part.normals) is not None]
        equal = bool(torch.isclose(self.weights, self.weights[0], rtol=1e-12, atol=0.0).all())
        if len(known) < len(self.parts) or len({len(means) for means, _ in known}) > 1 or not equal:
            return None
        return torch.cat([means for means, _ in known]), torch.cat([scales for _, scales in known])

    def check(self, y: Tensor) -> Tensor:
        return self.parts[0].check(y)

    def log_prob(self, y: Tensor) -> Tensor:
        return self._log_mean([part.log_prob(y) for part in self.parts])

    def expected_log_prob(self, y: Tensor) -> Tensor:
        return self._average([part.expected_log_prob(y) for part in self.parts])

    def joint_log_prob(self, y: Tensor) -> Tensor:
        return self._log_mean([part.joint_log_prob(y).double() for part in self.parts])

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        """Draw a component for each row, then a target from it, (draws, N, *event)."""
        key = key or Key(0)
        generator = key.fold("component").generator(self.weights.device)
        count = draws * len(self)
        chosen = torch.multinomial(self.weights, count, replacement=True, generator=generator).view(draws, len(self))
        samples = [part.sample(draws, key.fold(k)) for k, part in enumerate(self.parts)]
        drawn = torch.stack(samples)  # (K, draws, N, ...)
        index = chosen.reshape(1, draws, len(self), *(1,) * (drawn.dim() - 3)).expand(1, *drawn.shape[1:])
        return drawn.gather(0, index).squeeze(0)

    def quantile(self, p: float) -> Tensor:
        between_zero_and_one("quantile: p", p)
        if (known := self.normals) is not None:
            return quantiles_of_normals(*known, self.mean, self.std, [p])[0].to(self.parts[0].mean.dtype)
        values = bisected_quantile(
            lambda y: self._average([_cdf(part, y) for part in self.parts]), self.mean, self.std, p
        )
        return values.to(self.parts[0].mean.dtype)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        if (known := self.normals) is None:
            return super().interval(level)
        between_zero_and_one("interval: level", level)
        lower, upper = quantiles_of_normals(*known, self.mean, self.std, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
        return lower.to(known[0].dtype), upper.to(known[0].dtype)

    def rows(self, index: Tensor | slice) -> "MixturePredictive":
        return MixturePredictive([part.rows(index) for part in self.parts], self.weights)

    def _average(self, values: Sequence[Tensor]) -> Tensor:
        return torch.einsum("k,k...->...", self.weights.to(values[0].dtype), torch.stack(list(values)))

    def _log_mean(self, values: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(values))
        shares = self.weights.log().to(stacked.dtype).reshape(-1, *(1,) * (stacked.dim() - 1))
        return (stacked + shares).logsumexp(0)

    def _joined(self, parts: Sequence["MixturePredictive"]) -> "MixturePredictive":
        if any(not torch.equal(part.weights, self.weights) for part in parts):
            raise ValueError("Predictive.concatenate: all parts must have the same components and weights.")
        columns = zip(*(part.parts for part in parts), strict=True)
        return MixturePredictive([Predictive.concatenate(column) for column in columns], self.weights)


def mixed(parts: Sequence[Predictive], weights: Tensor | None = None) -> Predictive:
    """The mixture of predictives of the same rows, with weights (K,) that sum to 1 (None: equal).

    Class probabilities are averaged, with the draws behind them where all components have draws; other predictives
    become a `MixturePredictive`.

    >>> sure, unsure = ClassPredictive(torch.tensor([[0.9, 0.1]])), ClassPredictive(torch.tensor([[0.5, 0.5]]))
    >>> mixed([sure, unsure]).probs
    tensor([[0.7000, 0.3000]], dtype=torch.float64)
    """
    shares = checked_weights("mixed: weights", weights, len(parts))
    if len(parts) == 1:
        return parts[0]
    if not all(isinstance(part, ClassPredictive) for part in parts):
        return MixturePredictive(parts, weights)
    return ClassPredictive.mixed(cast(Sequence[ClassPredictive], parts), shares)


def checked_weights(name: str, weights: Tensor | None, count: int) -> Tensor:
    """Return weights (K,) in float64 on the CPU, equal for None; raise a ValueError unless they are a distribution."""
    if count < 1:
        raise ValueError(f"{name}: a mixture needs at least one component. Got none.")
    if weights is None:
        return torch.full((count,), 1.0 / count, dtype=torch.float64, device="cpu")
    given = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    positive = given.shape == (count,) and bool((given > 0).all())
    if not positive or not math.isclose(float(given.sum()), 1.0, abs_tol=1e-6):
        raise ValueError(
            f"{name} must be {count} positive numbers that sum to 1, one for each component. Got {shown(given)}. "
            "Divide them by their sum, and leave components of weight 0 out."
        )
    return given / given.sum()


def _cdf(part: Predictive, y: Tensor) -> Tensor:
    """Distribution function of each entry, in float64."""
    if part.normals is not None:
        means, scales = part.normals
        value: Tensor = torch.special.ndtr((y - means.double()) / scales.double())
        return value.mean(0)
    if isinstance(part, DrawsPredictive):
        return part.likelihood.cdf(part.outputs.double(), y).mean(0)
    raise TypeError(f"quantile and interval need components with a distribution function. Got {part!r}.")
