"""Class labels from logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from posterity.errors import BadData, shown
from posterity.likelihoods.fisher import OutputFisher
from posterity.likelihoods.likelihood import IGNORED, Entrywise, first_row
from posterity.numerics.random import Key

_ops: Any = torch.ops.aten
_SUM = 2  # torch's number of the reduction
MOST = 61  # axes of positions: a tensor of torch has up to 64, here with draws, rows and classes


@dataclass(frozen=True)
class Categorical(Entrywise):
    """One of C classes with probabilities softmax(f), for each row or for each position of a row.

    **Math**: p(y = c | f) = exp(f_c) / sum_k exp(f_k), with logits f (..., N, C) and class indices y (N,) in
    0 .. C - 1. The Hessian of -log p in f is diag(p) - p p^T, whatever y is, so it equals the Fisher information.
    With `positions` = 1 (tokens), 2 (pixels), ... further axes, logits are (..., N, C, *positions) and labels
    (N, *positions), as in `torch.nn.functional.cross_entropy`; log p is summed over the positions. Labels of -100 are
    missing, and left out.

    **Limit**: exact; adding a constant to all logits of a label changes nothing, so the Hessian has rank C - 1.

    **Cost**: one log-softmax. Hessian and Fisher are dense: (..., N, D, D) with D = C, or C times the number of
    positions (order as the outputs: class, then position), of which only C^2 for each position are not zero.

    **References**: Bishop (2006), Pattern Recognition and Machine Learning, eq. 4.104 to 4.110.

    **Example**:

    >>> likelihood = Categorical()
    >>> likelihood.log_prob(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    >>> Categorical(positions=2).log_prob(torch.zeros(1, 4, 5, 5), torch.zeros(1, 5, 5, dtype=torch.long))
    tensor([-34.6574])
    """

    positions: int = 0

    link = "softmax"

    def __post_init__(self) -> None:
        if isinstance(self.positions, bool) or not isinstance(self.positions, int) or not 0 <= self.positions <= MOST:
            raise ValueError(
                "Categorical.positions must be the number of axes after the classes, 0 for one label in each row, and "
                f"at most {MOST}. Got {shown(self.positions)}."
            )

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return targets as int64 class indices or -100, (N, *positions), for outputs (N, C, *positions)."""
        fits = outputs.dim() == 2 + self.positions
        if not fits or targets.shape != (*outputs.shape[:1], *outputs.shape[2:]):
            axes = "".join(f", P{number}" for number in range(1, 1 + self.positions))
            raise BadData(
                f"Categorical: outputs must be (N, C{axes}) and targets (N{axes or ','}). Got outputs "
                f"{tuple(outputs.shape)} and targets {tuple(targets.shape)}. {self._remedy(outputs, targets)}"
            )
        classes = outputs.shape[1]
        if classes < 2:
            raise BadData(
                f"Categorical: outputs must have at least 2 columns, one for each class. Got {classes}. "
                "For one logit use Bernoulli."
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise BadData(f"Categorical: targets must be integers. Got {targets.dtype}. Convert with y.long().")
        labels = targets.long()
        bad = ((labels < 0) | (labels >= classes)) & (labels != IGNORED)
        if bad.any():
            raise BadData(
                f"Categorical: targets must lie in 0..{classes - 1} for {classes} classes. Got {int(labels[bad][0])} "
                f"in row {first_row(bad)}. Number the classes from 0, give {IGNORED} where a label is missing, or give "
                "the network more outputs."
            )
        return labels

    def _remedy(self, outputs: Tensor, targets: Tensor) -> str:
        axes = targets.dim() - 1
        if targets.shape == outputs.shape:
            return f"For one-hot rows give y.argmax({'-1' if outputs.dim() == 2 else '1'})."
        if targets.shape == (*outputs.shape[:1], 1) and not self.positions:
            return "Give y.squeeze(-1)."
        if axes != self.positions and targets.shape == (*outputs.shape[:1], *outputs.shape[2:]):
            return f"For labels at positions use Categorical(positions={axes})."
        if axes > 0 and targets.shape == outputs.shape[:-1]:
            adapter = "Network(module, outputs=lambda out: out.logits.movedim(-1, 1)), or out.movedim for a tensor"
            return f"Put the classes on axis 1 by {adapter}, and use Categorical(positions={axes})."
        if self.positions:
            return "Give one class index for each position."
        return "Give logits (N, C) and one class index for each row."

    @property
    def _axis(self) -> int:
        return -1 - self.positions

    def _by_label(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (N positions, C) and their labels where the classes are last in memory, else both as they are.

        That is what language models return. Kernels over another axis would copy it, and are slow for many classes.
        """
        if not self.positions or outputs.is_contiguous():
            return outputs, targets
        last = outputs.movedim(self._axis, -1)
        if not last.is_contiguous():
            return outputs, targets
        return last.reshape(-1, last.shape[-1]), targets.reshape(-1)

    def _probabilities(self, outputs: Tensor) -> Tensor:
        """softmax(f), in memory as f."""
        if not self.positions or outputs.is_contiguous():
            return outputs.softmax(self._axis)
        return outputs.movedim(self._axis, -1).softmax(-1).movedim(-1, self._axis)

    def observed(self, targets: Tensor) -> Tensor:
        return targets.long() != IGNORED  # among uint8 torch would take 156 for it

    def over_outputs(self, entries: Tensor) -> Tensor:
        return entries.unsqueeze(self._axis)

    def entry_log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.dim() == targets.dim() + 1:
            rows, labels = self._by_label(outputs, targets)
            each = functional.cross_entropy(rows, labels, reduction="none", ignore_index=IGNORED)
            return -each.view(targets.shape)
        axis, observed = self._axis, self.observed(targets)
        lead = outputs.shape[: outputs.dim() - 1 - targets.dim()]
        labels = torch.where(observed, targets, 0).expand(*lead, *targets.shape).unsqueeze(axis)
        return torch.where(observed, outputs.log_softmax(axis).gather(axis, labels).squeeze(axis), 0.0)

    def _entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.entry_log_prob(outputs, targets)

    def total_log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.dim() == targets.dim() + 1:  # fewer operations, which matters for small networks
            return -functional.cross_entropy(*self._by_label(outputs, targets), reduction="sum", ignore_index=IGNORED)
        return super().total_log_prob(outputs, targets)

    def total_and_slope(self, outputs: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor] | None:
        if outputs.dim() != 2:
            return None
        # The operations that autograd would call.
        log_probs = _ops._log_softmax(outputs, 1, False)
        loss, weight = _ops.nll_loss_forward(log_probs, targets, None, _SUM, IGNORED)
        above = torch.full((), -factor, dtype=outputs.dtype, device=outputs.device)
        grad = _ops.nll_loss_backward(above, log_probs, targets, None, _SUM, IGNORED, weight)
        return -loss, _ops._log_softmax_backward_data(grad, log_probs, 1, outputs.dtype)

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        probabilities = self._probabilities(outputs).movedim(self._axis, -1)  # (..., N, *positions, C)
        flat = probabilities.reshape(-1, probabilities.shape[-1])
        labels = torch.multinomial(flat, 1, replacement=True, generator=key.generator(outputs.device))
        return labels.reshape(probabilities.shape[:-1])

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(self._axis)

    def class_log_probs(self, outputs: Tensor) -> Tensor:
        if outputs.dim() != 3 + self.positions:
            raise ValueError(
                f"{self} needs outputs (S, N, C) with {self.positions} axes of positions after them. "
                f"Got {tuple(outputs.shape)}. Say by Categorical(positions=...) how many axes follow the classes."
            )
        return outputs.double().log_softmax(2)

    def variance(self, outputs: Tensor) -> Tensor:
        """Return p (1 - p), the variance of each class indicator, shaped as outputs."""
        probabilities = outputs.softmax(self._axis)
        return probabilities * (1.0 - probabilities)

    def _hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.output_fisher(outputs)

    def output_fisher(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        """Return diag(p) - p p^T for each label, (..., N, D, D); the event is (C, *positions)."""
        if event_dims not in (None, 1 + self.positions) or outputs.dim() < 2 + self.positions:
            raise ValueError(
                f"Categorical(positions={self.positions}).output_fisher needs outputs (..., N, C, *positions) with "
                f"{1 + self.positions} event axes. Got outputs {tuple(outputs.shape)} and event_dims {event_dims}. "
                "Pass the outputs as the network gave them."
            )
        p = outputs.softmax(self._axis)
        p = (p.flatten(-self.positions) if self.positions else p.unsqueeze(-1)).mT  # (..., N, P, C) with P positions
        blocks = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)  # (..., N, P, C, C)
        if not self.positions:
            return blocks.squeeze(-3)
        spread = torch.diag_embed(blocks.movedim(-3, -1))  # (..., N, C, C, P, P), zero between positions
        size = p.shape[-1] * p.shape[-2]
        return spread.transpose(-3, -2).reshape(*p.shape[:-2], size, size)

    def fisher_by_position(self, outputs: Tensor) -> OutputFisher:
        return OutputFisher(self._probabilities(outputs))

    def output_root(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        """Return C - 1 columns for each label, the Cholesky factor of diag(p) - p p^T, zero at other positions.

        With the tail sums r_k = p_k + ... + p_C, entry k of column k is sqrt(p_k r_{k+1} / r_k), and entry j > k is
        -p_j sqrt(p_k / (r_k r_{k+1})).
        """
        if event_dims not in (None, 1 + self.positions):
            return super().output_root(outputs, event_dims)
        p = outputs.softmax(self._axis)
        p = p.flatten(-self.positions).mT if self.positions else p  # (..., N, C) or (..., N, P, C) with P positions
        rest = p.flip(-1).cumsum(-1).flip(-1)  # r_1 .. r_C
        tiny = torch.finfo(p.dtype).tiny
        here, after = rest[..., :-1].clamp_min(tiny), rest[..., 1:].clamp_min(tiny)
        lead = p[..., :-1]
        below = -p.unsqueeze(-1) * (lead / here / after).sqrt().unsqueeze(-2)  # (..., C, C - 1)
        columns = below.tril(-1)
        columns.diagonal(dim1=-2, dim2=-1).copy_((lead * (after / here)).sqrt())
        columns = columns.movedim(-1, 0)  # (C - 1, ..., N, C) or (C - 1, ..., N, P, C)
        if not self.positions:
            return columns
        spread = torch.diag_embed(columns.mT).movedim(-1, 1)  # (C - 1, P, ..., N, C, P)
        return spread.flatten(0, 1).reshape(-1, *outputs.shape)
