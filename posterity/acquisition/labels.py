"""Information of labels, from the class probabilities of draws of the function."""

from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import BadData, positive_whole, shown
from posterity.numerics.random import Key

ENTRIES = 1 << 24  # numbers of a table at a time: bounds the memory
CONFIGURATIONS = 10_000  # of the labels of the rows chosen so far, that are summed over or drawn


class Chosen(NamedTuple):
    """Rows to label, in the order in which they were chosen.

    `rows` (B,) are their indices in the pool, and `information` (B,) is the mutual information, in nats, of the
    targets of the first 1, 2, ... B of them with the function.
    """

    rows: Tensor
    information: Tensor


class Configurations(NamedTuple):
    """Labels of the rows chosen so far: all there are, or some that were drawn.

    `logs` (M, S) has the log probability of each under each draw, `weights` (M,) its share in an average over the
    predictive, and `source` (M,) the draw that it was drawn from (None: all are there).
    """

    logs: Tensor
    weights: Tensor
    source: Tensor | None

    def responsibilities(self) -> Tensor:
        """The posterior of the draws given each configuration, (M, S)."""
        return self.logs.softmax(1)


def batch_bald_of_probs(
    probs: Tensor, size: int, *, key: Key | None = None, configurations: int = CONFIGURATIONS
) -> Chosen:
    """Choose `size` rows by `batch_bald`, from the class probabilities (S, N, C) of S draws of the function.

    >>> sure, unsure = torch.tensor([[0.9, 0.1]] * 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> chosen = batch_bald_of_probs(torch.stack([unsure, sure, unsure], 1), 2)  # rows 0 and 2 tell the same
    >>> chosen.rows.tolist(), [round(value, 4) for value in chosen.information.tolist()]
    ([0, 1], [0.6931, 0.6931])
    """
    probs = checked_probs("batch_bald", probs)
    positive_whole("batch_bald: size", size)
    positive_whole("batch_bald: configurations", configurations)
    if size > probs.shape[1]:
        raise ValueError(f"batch_bald: size must be at most the {probs.shape[1]} rows of the pool. Got {size}.")
    key = key or Key(0)
    within = torch.special.entr(probs).sum(2).mean(0)  # (N,), given the function
    known = Configurations(probs.new_zeros(1, len(probs)), probs.new_ones(1), None)
    taken = torch.zeros(probs.shape[1], dtype=torch.bool, device=probs.device)
    rows, gains = list[int](), list[Tensor]()
    for _ in range(size):
        gain = (_conditional_entropy(probs, known) - within).clamp_min(0.0).masked_fill(taken, -torch.inf)
        best = int(gain.argmax())
        rows.append(best)
        gains.append(gain[best])
        taken[best] = True
        if len(rows) < size:
            known = _extended(known, probs, rows, configurations, key)
    return Chosen(torch.tensor(rows, device=probs.device), torch.stack(gains).cumsum(0))


def _conditional_entropy(probs: Tensor, known: Configurations) -> Tensor:
    """Entropy (N,) of each row's label given the labels of the chosen rows, averaged over their configurations."""
    shares, (draws, count, classes) = known.responsibilities(), probs.shape
    step = max(1, ENTRIES // (len(shares) * classes))
    parts = []
    for low in range(0, count, step):
        some = probs[:, low : low + step]
        table = (shares @ some.reshape(draws, -1)).reshape(len(shares), -1, classes)  # p(y_n | labels), (M, n, C)
        parts.append(known.weights @ torch.special.entr(table).sum(2))
    return torch.cat(parts)


def _extended(known: Configurations, probs: Tensor, rows: list[int], most: int, key: Key) -> Configurations:
    """Add the label of the last of `rows`: to all configurations while these are at most `most`, else by draws."""
    draws, _, classes = probs.shape
    logs = probs[:, rows[-1]].log()  # (S, C)
    if known.source is None and len(known.logs) * classes <= most:
        every = (known.logs.unsqueeze(1) + logs.T).reshape(-1, draws)
        weights = every.logsumexp(1).exp() / draws
        possible = weights > 0
        return Configurations(every[possible], weights[possible], None)
    source, later = known.source, rows[-1:]
    if source is None:  # as many from each draw: the predictive is the mean over draws
        source, later = torch.arange(draws * -(-most // draws), device=probs.device) % draws, rows
        weights = probs.new_full((len(source),), 1.0 / len(source))
        known = Configurations(probs.new_zeros(len(source), draws), weights, source)
    total = known.logs
    for row in later:
        cumulative = probs[:, row].cumsum(1)
        cumulative = cumulative / cumulative[:, -1:]  # ends at 1, or rounding could give the label C
        uniform = key.fold(row).uniform((len(source), 1), torch.float64, probs.device)
        label = torch.searchsorted(cumulative[source].contiguous(), uniform, right=True).squeeze(1)  # skips 0
        total = total + probs[:, row].log().T[label]
    return known._replace(logs=total)


def epig_of_probs(probs: Tensor, targets: Tensor) -> Tensor:
    """`epig` of each row (N,), from class probabilities (S, N, C) and, of the same S draws, (S, T, C) at the targets.

    >>> draws = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
    >>> epig_of_probs(draws, draws[:, :1])  # the first row tells the label of the target, log 2
    tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    probs, targets = checked_probs("epig", probs), checked_probs("epig", targets)
    if len(probs) != len(targets):
        raise BadData(
            f"epig needs the same draws of the function at pool and targets. Got {len(probs)}, {len(targets)}."
        )
    draws, count, classes = probs.shape
    total, others = len(targets[0]), targets.shape[2]
    own, theirs = (torch.special.entr(each.mean(0)).sum(1) for each in (probs, targets))  # (N,), (T,)
    step = max(1, ENTRIES // (classes * others))  # pairs of rows at a time
    wide = min(total, step)
    information = probs.new_zeros(count)
    for first in range(0, total, wide):
        right = targets[:, first : first + wide].reshape(draws, -1)
        for low in range(0, count, max(1, step // wide)):
            left = probs[:, low : low + max(1, step // wide)]
            joint = (left.reshape(draws, -1).T @ right / draws).reshape(left.shape[1], classes, -1, others)
            both = torch.special.entr(joint).sum((1, 3))  # (n, t)
            pairs = own[low : low + left.shape[1], None] + theirs[first : first + wide] - both
            information[low : low + left.shape[1]] += pairs.clamp_min(0.0).sum(1)
    return information / total


def checked_probs(name: str, probs: Tensor) -> Tensor:
    """Class probabilities (S, N, C) in float64; BadData where they are something else."""
    probs = torch.as_tensor(probs)
    if probs.dim() != 3 or not probs.numel() or not probs.is_floating_point():
        raise BadData(f"{name} needs class probabilities (S, N, C), one label a row. Got {shown(probs)}.")
    probs = probs.double()
    if not bool(((probs >= 0).all(2) & ((probs.sum(2) - 1).abs() < 1e-3)).all()):
        raise BadData(
            f"{name} needs probabilities that sum to 1 over the classes. Got {shown(probs)}. Apply softmax(2)."
        )
    return probs
