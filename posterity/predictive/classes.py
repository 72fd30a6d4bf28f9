"""Predictives of classification: averaged class probabilities."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import final

import torch
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.likelihoods.likelihood import IGNORED
from posterity.numerics.random import Key
from posterity.predictive.predictive import UNSHARED, Predictive, chosen_rows, rows

_LEAST_LOG = -1e300  # in place of the logarithm of 0, whose product with 0 is 0 in an entropy


def rest_of_entropy(probs: Tensor, information: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Entropy of `probs` (N, C, *positions) that is left beside the mutual information, computed when it is asked for.

    Probabilities of an approximate rule may have less entropy than information: then nothing is left.
    """
    return cache(lambda: (torch.special.entr(probs).sum(1) - information()).clamp_min(0.0))


@final
class ClassPredictive(Predictive):
    """Class probabilities averaged over the posterior, with the draws behind them where there are any.

    **Math**: `probs` (N, C) is E p(y | f) over the posterior: an average of PROBABILITIES, never of logits.
    log_prob(y) = log probs[y]. With `draws` (S, N, C) of probabilities p_s whose mean is `probs`:
    entropy H(probs) = aleatoric (1/S) sum_s H(p_s) + epistemic (their difference, the mutual information of
    label and weights), all in nats. Integrators over Gaussian logits give the mutual information without draws
    (`label_information`), and `aleatoric` is the rest of the entropy of `probs`. A binary problem has C = 2, columns
    p(y = 0) and p(y = 1). Labels at positions (pixels, tokens, many binary labels) have probs (N, C, *positions) and
    draws (S, N, C, *positions); each position is predicted by itself: log_prob sums over positions the logs of the
    averages, and entropies are (N, *positions). `joint_log_prob` averages the product over rows and positions instead.

    **Limit**: a probability of exactly 0 gives log_prob -inf; nothing is clamped. Averaged probabilities
    alone do not split the entropy: `aleatoric` then raises. The mutual information of S draws is biased low, by O(1/S).

    **Cost**: O(N C); memory O(S N C) with `draws`.

    **References**: Depeweg et al. (2018), Decomposition of uncertainty in Bayesian deep learning.

    **Example**:

    >>> draws = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # two weights that disagree completely
    >>> pred = ClassPredictive(draws.mean(0), draws)
    >>> pred.probs.tolist()
    [[0.5, 0.5]]
    >>> float(pred.aleatoric[0]), round(float(pred.epistemic[0]), 4)
    (0.0, 0.6931)
    """

    classifies = True

    def __init__(
        self,
        probs: Tensor,
        draws: Tensor | None = None,
        *,
        shared: bool = True,
        aleatoric: Callable[[], Tensor] | None = None,
    ) -> None:
        """Take averaged probabilities (N, C, *positions) and, where known, each draw's, (S, N, C, *positions).

        `shared`: draw s has the same weights in all rows, as `joint_log_prob` needs. `aleatoric` returns the mean
        entropy (N, *positions) where it is known without draws; it is called when it is asked for.
        """
        if probs.dim() < 2 or probs.shape[1] < 2:
            raise ValueError(
                f"ClassPredictive.probs must be (N, C) with C >= 2 classes. Got {tuple(probs.shape)}. "
                "Give a binary problem two columns, p(y=0) and p(y=1)."
            )
        tolerance = torch.finfo(probs.dtype).eps ** 0.5
        if not bool(((probs >= 0) & ((probs.sum(1, keepdim=True) - 1).abs() < tolerance)).all()):
            raise ValueError(
                f"ClassPredictive.probs must have rows of probabilities that sum to 1. Got {shown(probs)}. "
                "Give probabilities, not logits."
            )
        if draws is not None:
            if draws.dim() < 3 or draws.shape[1:] != probs.shape or not draws.shape[0]:
                raise ValueError(
                    f"ClassPredictive.draws must be (S, N, C) for probs {tuple(probs.shape)}. Got {tuple(draws.shape)}."
                )
            tolerance = torch.finfo(draws.dtype).eps ** 0.5
            if not torch.allclose(draws.mean(0).to(probs), probs, rtol=0.0, atol=tolerance):
                raise ValueError(
                    "ClassPredictive.probs must be the mean of draws over their first axis. Got another average. "
                    "Average probabilities, not logits."
                )
        self._probs = probs
        self._log_draws = None if draws is None else draws.log()
        self._shared = shared
        self._shares: Tensor | None = None  # log weights of the draws, (S,); None where they are equal
        self._aleatoric = aleatoric

    @classmethod
    def of_log_probs(cls, log_draws: Tensor, dtype: torch.dtype, *, shared: bool = True) -> "ClassPredictive":
        """Average log probabilities (S, N, C, *positions) in float64; keep the draws in `dtype`."""
        pred = cls(log_draws.exp().mean(0), shared=shared)
        pred._log_draws = log_draws.to(dtype)  # logs: float32 would round small probabilities to 0
        return pred

    @classmethod
    def of_blocks(
        cls, blocks: Iterable[Tensor], count: int, kept: int, dtype: torch.dtype, *, shared: bool = True
    ) -> "ClassPredictive":
        """Average log probabilities that come in blocks of draws (s, N, C, *positions), `count` draws in all.

        Probabilities and entropies are averaged over all draws; `kept` of them, evenly spaced, are kept in `dtype`.
        """
        wanted = (2 * torch.arange(kept, device="cpu") + 1) * count // (2 * kept)  # (kept,), increasing
        total: Tensor | None = None
        within: Tensor | None = None
        chosen, first = [], 0
        for block in blocks:
            probs = block.exp()
            more, entropies = probs.sum(0), -(probs * block.clamp_min(_LEAST_LOG)).sum(2).sum(0)
            total, within = (more, entropies) if total is None or within is None else (total + more, within + entropies)
            here = wanted[(wanted >= first) & (wanted < first + len(block))] - first
            chosen.append(block[here.to(block.device)].to(dtype))
            first += len(block)
        assert total is not None
        assert within is not None
        mean_entropy = within / count
        pred = cls(total / count, shared=shared, aleatoric=lambda: mean_entropy)
        pred._log_draws = torch.cat(chosen)
        return pred

    def with_information(self, information: Callable[[], Tensor]) -> "ClassPredictive":
        """Return this predictive with the mutual information (N, *positions) that the function returns when asked."""
        pred = ClassPredictive(self._probs, shared=self._shared, aleatoric=rest_of_entropy(self._probs, information))
        pred._log_draws, pred._shares = self._log_draws, self._shares
        return pred

    @classmethod
    def mixed(cls, parts: Sequence["ClassPredictive"], weights: Tensor) -> "ClassPredictive":
        """Average predictives of the same rows with weights (K,); keep their draws where all have draws."""
        weights = weights.to(parts[0]._probs.device, torch.float64)
        probs = torch.einsum("k,k...->...", weights, torch.stack([part._probs.double() for part in parts]))
        pred = cls(probs, shared=all(part._shared for part in parts))
        if all(part.splits for part in parts):
            pred._aleatoric = cache(
                lambda: sum(w * part.aleatoric for w, part in zip(weights.tolist(), parts, strict=True))
            )
        known = [part._log_draws for part in parts if part._log_draws is not None]
        if len(known) == len(parts):
            shares = torch.cat([w.log() + part._log_shares() for w, part in zip(weights, parts, strict=True)])
            pred._log_draws = torch.cat(known)
            pred._shares = None if torch.allclose(shares, shares[:1], rtol=0.0, atol=1e-12) else shares
        return pred

    @property
    def probs(self) -> Tensor:
        return self._probs

    @property
    def draws(self) -> Tensor | None:
        """Class probabilities of each posterior draw, (S, N, C, *positions), where known and of equal weight."""
        return None if self._log_draws is None or self._shares is not None else self._log_draws.exp()

    @property
    def mean(self) -> Tensor:
        return self._probs

    @property
    def variance(self) -> Tensor:
        """Variance p (1 - p) of each entry of the one-hot label, shaped as `probs`."""
        return self._probs * (1.0 - self._probs)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the averaged probabilities, (N, *positions) in nats."""
        entropy: Tensor = torch.special.entr(self._probs).sum(1)
        return entropy

    @property
    def aleatoric(self) -> Tensor:
        """Mean entropy of the label given the weights, (N, *positions) in nats."""
        if self._aleatoric is not None:
            return self._aleatoric().to(self._probs)
        draws = self._known("aleatoric and epistemic need", "use entropy for their sum").exp()
        entropies: Tensor = torch.special.entr(draws).sum(2)  # (S, N, *positions)
        return self._average(entropies).to(self._probs)

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights, (N, *positions) in nats."""
        return (self.entropy - self.aleatoric).clamp_min(0.0)  # Jensen: below 0 only by rounding

    def check(self, y: Tensor) -> Tensor:
        """Return labels (N, *positions) in 0 .. C - 1, or -100 where missing; raise BadData for others.

        Binary targets may be floats, NaN where missing, and (N, 1).
        """
        count, classes = self._probs.shape[:2]
        shape = (count, *self._probs.shape[2:])
        y = rows(y, count).to(self._probs.device)
        if classes == 2 and shape == (count,) and y.shape == (count, 1):
            y = y.squeeze(1)
        if y.shape != shape:
            raise BadData(
                f"y must be labels of shape {shape}. Got {tuple(y.shape)}. Turn one-hot rows to labels by argmax(1)."
            )
        if y.is_complex() or (y.is_floating_point() and classes != 2):
            raise BadData(f"y must hold integer labels. Got {y.dtype}. Convert it by y.long().")
        missing = y.isnan() if y.is_floating_point() else y.long() == IGNORED
        good = ((y == 0) | (y == 1) if classes == 2 else (y >= 0) & (y < classes)) | missing
        if not bool(good.all()):
            raise BadData(
                f"y must hold labels from 0 to {classes - 1}. Got {y[~good][0].item()}. Number the classes from 0, and "
                f"give {IGNORED} where a label is missing."
            )
        return torch.where(missing, IGNORED, y).long()

    def log_prob(self, y: Tensor) -> Tensor:
        """Log probability of each row's label, (N,); a sum over positions where there are any."""
        labels = self.check(y).unsqueeze(1)
        chosen = self._probs.gather(1, labels.clamp_min(0)).masked_fill(labels == IGNORED, 1.0)
        return chosen.log().flatten(1).sum(-1)

    def expected_log_prob(self, y: Tensor) -> Tensor:
        return self._average(self._each(y, "expected_log_prob needs", "use log_prob"))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        each = self._each(y, "joint_log_prob needs", "predict by draws of the weights").sum(-1)  # (S,)
        if not self._shared:
            raise ValueError(UNSHARED)
        return (each + self._log_shares()).logsumexp(0)

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        flat = self._probs.movedim(1, -1)  # (N, *positions, C)
        cumulative = flat.reshape(-1, flat.shape[-1]).double().cumsum(-1)
        cumulative = cumulative / cumulative[:, -1:]  # ends at 1, or rounding could give the label C
        uniform = (key or Key(0)).uniform((len(cumulative), draws), dtype=torch.float64, device=cumulative.device)
        labels = torch.searchsorted(cumulative, uniform, right=True).T  # right: a class of probability 0 is skipped
        return labels.reshape(draws, *flat.shape[:-1])

    def rows(self, index: Tensor | slice) -> "ClassPredictive":
        index = chosen_rows(index, self._probs.device)
        aleatoric = self._aleatoric
        own = None if aleatoric is None else cache(lambda: aleatoric()[index])
        pred = ClassPredictive(self._probs[index], shared=self._shared, aleatoric=own)
        pred._log_draws = None if self._log_draws is None else self._log_draws[:, index]
        pred._shares = self._shares
        return pred

    @property
    def splits(self) -> bool:
        """Whether the entropy can be split into aleatoric and epistemic."""
        return self._aleatoric is not None or self._log_draws is not None

    def _log_shares(self) -> Tensor:
        """Log weights of the draws, (S,) in float64."""
        if self._shares is not None:
            return self._shares
        count = 1 if self._log_draws is None else len(self._log_draws)
        return torch.full((count,), -math.log(count), dtype=torch.float64, device=self._probs.device)

    def _average(self, values: Tensor) -> Tensor:
        """Average values (S, ...) over the draws."""
        if self._shares is None:
            return values.mean(0)
        return torch.einsum("s,s...->...", self._shares.exp().to(values.dtype), values)

    def _each(self, y: Tensor, needs: str, remedy: str) -> Tensor:
        """Log probability of each row under each draw, (S, N) in float64."""
        log_draws = self._known(needs, remedy)
        labels = self.check(y).unsqueeze(1)  # (N, 1, *positions)
        every = labels.clamp_min(0).expand(len(log_draws), *labels.shape)
        chosen = log_draws.gather(2, every).masked_fill(labels == IGNORED, 0.0)  # (S, N, 1, *positions)
        return chosen.double().flatten(2).sum(-1)

    def _known(self, needs: str, remedy: str) -> Tensor:
        if self._log_draws is None:
            raise ValueError(
                f"{needs} the class probabilities of each posterior draw. "
                f"Got averaged probabilities only. Predict with MonteCarlo(), or {remedy}."
            )
        return self._log_draws

    def _joined(self, parts: Sequence["ClassPredictive"]) -> "ClassPredictive":
        known = [part._log_draws for part in parts if part._log_draws is not None]
        sizes = {len(draws) for draws in known}
        if known and (len(known) != len(parts) or len(sizes) > 1):
            raise ValueError(
                "Predictive.concatenate: all parts must have the same number of draws, or none. "
                f"Got {len(known)} of {len(parts)} parts with draws, {sorted(sizes)} of them."
            )
        pred = ClassPredictive(torch.cat([part._probs for part in parts]), shared=all(part._shared for part in parts))
        if all(part.splits for part in parts) and any(part._aleatoric is not None for part in parts):
            pred._aleatoric = cache(lambda: torch.cat([part.aleatoric for part in parts]))
        pred._log_draws = torch.cat(known, dim=1) if known else None
        pred._shares = self._shares
        return pred
