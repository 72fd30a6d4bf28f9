"""What every estimator of the expected log-likelihood's gradient can do."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.inference.method import Target
from posterity.model.data import Batch
from posterity.model.network import Buffers
from posterity.numerics.random import Key

Memory = dict[str, Tensor]


class Factorised(NamedTuple):
    """A factorised Gaussian over the random weights of a problem, the other entries of theta being points.

    `mean` (..., T) is all of theta, with the likelihood's learnt parameters at its end; `scale` (..., R) is that of
    the random weights, at `places` (R,) of theta, or at its first R entries for None.
    """

    mean: Tensor
    scale: Tensor
    places: Tensor | None

    def moved(self, noise: Tensor, out: Tensor | None = None, sign: float = 1.0) -> Tensor:
        """theta (..., T) at mean + sign * scale * noise, for noise (R,) or (..., R); it may be written to `out`."""
        size = self.scale.shape[-1]
        if self.places is None and size == self.mean.shape[-1]:
            return torch.addcmul(self.mean, self.scale, noise, value=sign, out=out)
        return shifted(self.mean, self.scale * noise * sign, self.places)

    def random(self, theta: Tensor) -> Tensor:
        """The entries (..., R) of a tensor (..., T) that belong to random weights."""
        return theta[..., : self.scale.shape[-1]] if self.places is None else theta.index_select(-1, self.places)

    def noise(self, key: Key, out: Tensor | None = None) -> Tensor:
        """Standard normal numbers (R,), the same for all members: each is what it would be alone.

        They are drawn in float32 for every number type, so that a model draws alike in all of them;
        into `out`, float32 (R,), if given.
        """
        if out is not None:
            return out.normal_(generator=key.generator(out.device)).to(self.scale.dtype)
        return key.normal((self.scale.shape[-1],), torch.float32, self.scale.device).to(self.scale.dtype)


def shifted(theta: Tensor, shift: Tensor, places: Tensor | None) -> Tensor:
    """theta (..., T) with a shift (..., R) of the entries at `places` (R,), or of the first R for None."""
    if places is not None:
        return theta.index_add(-1, places, shift)
    moved = theta.clone(memory_format=torch.contiguous_format)
    moved[..., : shift.shape[-1]].add_(shift)
    return moved


class Gradients(NamedTuple):
    """Gradients in the mean (..., T) and scale (..., R) of a q, or places for them."""

    mean: Tensor
    scale: Tensor


class DataTerm(NamedTuple):
    """An estimate of lp E log p(D | w) and of its gradients, and what the next estimate needs."""

    value: Tensor  # (...)
    grad_mean: Tensor  # (..., T); good until the next call, as is the next
    grad_scale: Tensor  # (..., R)
    buffers: Buffers
    memory: Memory
    # Gradients of pp E[-log p(w)] - H(q) at the same draws, in place of those in closed form.
    divergence_grads: Gradients | None = None

    def written(self, out: Gradients) -> "DataTerm":
        """The same with its gradients in the tensors `out`."""
        if self.grad_mean is not out.mean:
            out.mean.copy_(self.grad_mean)
        if self.grad_scale is not out.scale:
            out.scale.copy_(self.grad_scale)
        return self._replace(grad_mean=out.mean, grad_scale=out.scale)


class Estimator(ABC):
    """Estimates E log p(D | w) over q with its gradients in mean and scale. A value: what it keeps is in `memory`."""

    @abstractmethod
    def data_term(
        self,
        joint: Target,
        q: Factorised,
        batch: Batch,
        buffers: Buffers,
        memory: Memory,
        key: Key,
        out: Gradients | None = None,
    ) -> DataTerm:
        """The tempered expected log-likelihood from one batch, with batch norm in training mode.

        The gradients may be made in `out`; `written` puts them there where they were not.
        """
