"""Permutation importance: how much worse predictions get when an input says nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import BadData, positive_whole, shown
from posterity.metrics.scores import negative_log_likelihood
from posterity.numerics.random import Key
from posterity.predictive.predictive import Predictive


@dataclass(frozen=True, eq=False)
class PermutationImportance:
    """The rise of the NLL, in nats per row, when an input is permuted: `rise` (F,) with its standard `error` (F,).

    `nll` is the NLL of the unpermuted rows.
    """

    rise: Tensor
    error: Tensor
    nll: float


def permutation_importance(
    predict: Callable[[Tensor], Predictive],
    inputs: Tensor,
    y: Tensor,
    *,
    features: Sequence[Sequence[int]] | None = None,
    repeats: int = 5,
    key: Key | None = None,
) -> PermutationImportance:
    """Importance of each input: the rise of the held-out NLL when its values are permuted among the rows.

    Takes a function from inputs (N, D) to a predictive, such as `posterior.predict`, rows that were not fitted, and
    `features`: columns that are permuted together, such as the indicators of one category (each column by itself if
    None).

    **Math**: rise_f = mean_n d_n, d_n = mean over `repeats` permutations of NLL_n(column f permuted) - NLL_n, and its
    standard error std(d) / sqrt(N), which covers the choice of the rows. The permutations depend on the key alone
    (`Key(0)` if None).

    **Limit**: of two inputs that say the same, each seems unimportant; permuted rows may lie where no data do.

    **Cost**: 1 + F repeats predictions of all rows.

    **References**: Breiman (2001), Random forests; Fisher, Rudin and Dominici (2019), All models are wrong, but many
    are useful.

    >>> from posterity.predictive import GaussianPredictive
    >>> x = torch.arange(8.0).reshape(4, 2)
    >>> result = permutation_importance(
    ...     lambda x: GaussianPredictive(x[:, :1], torch.zeros(len(x), 1), torch.ones(1)), x, x[:, 0]
    ... )
    >>> bool(result.rise[0] > 1.0), float(result.rise[1])
    (True, 0.0)
    """
    positive_whole("permutation_importance: repeats", repeats)
    if inputs.dim() != 2 or len(inputs) < 2:
        raise BadData(f"permutation_importance needs inputs (N, D) of two rows or more. Got {tuple(inputs.shape)}.")
    columns = [[index] for index in range(inputs.shape[1])] if features is None else [list(group) for group in features]
    known = set(range(inputs.shape[1]))
    if not columns or any(not group or not set(group) <= known for group in columns):
        raise ValueError(f"features must be lists of columns from 0 to {inputs.shape[1] - 1}. Got {shown(features)}.")
    key = (key or Key(0)).fold("permutations")
    before = _rows(predict, inputs, y)
    rises = []
    for feature, group in enumerate(columns):
        rise = torch.zeros_like(before)
        for repeat in range(repeats):
            order = key.fold(feature).fold(repeat).permutation(len(inputs), "cpu").to(inputs.device)
            permuted = inputs.clone()
            permuted[:, group] = inputs[order][:, group]
            rise += _rows(predict, permuted, y) - before
        rises.append(rise / repeats)
    each = torch.stack(rises)  # (F, N)
    return PermutationImportance(each.mean(1), each.std(1) / each.shape[1] ** 0.5, float(before.mean()))


def _rows(predict: Callable[[Tensor], Predictive], inputs: Tensor, y: Tensor) -> Tensor:
    return negative_log_likelihood.rows(predict(inputs), y).double().cpu()
