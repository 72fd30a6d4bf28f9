"""The protocol of ELBO gradient estimators, initial scales, and the divergence of q from the prior."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from posterity.inference.method import Info
from posterity.model import Batch, Buffers, Joint, Problem
from posterity.numerics.random import Key
from posterity.priors.fan import ScaleRule, fans
from posterity.priors.normal import Normal


def initial_log_scales(joint: Problem, rule: ScaleRule, like: Tensor) -> Tensor:
    """Log standard deviations of the random weights (R,) by the rule; a tensor without fans has fans of one.

    Raises a ValueError where the dtype of the weights cannot hold a variance.
    """
    layout, limits = joint.layout, torch.finfo(like.dtype)
    each = []
    for part in layout:
        variance = rule.variance(*(fans(part, layout) or (1, 1)))
        if not limits.tiny <= variance <= limits.max:
            raise ValueError(
                f"initial_scales must give variances that {like.dtype} can hold. Got {variance:.3g} for '{part.name}' "
                f"from {rule!r}. Take another gain; a weight without a distribution is left out by Joint(random=...)."
            )
        each.append(like.new_full((part.size,), 0.5 * math.log(variance)))
    scales = torch.cat(each)
    return scales[: joint.num_weights] if joint.random_indices is None else scales[joint.random_indices]


Memory = dict[str, Tensor]


class Factorised(NamedTuple):
    """A factorised Gaussian over the random weights of a problem, the other entries of theta being points.

    `mean` (..., T) is all of theta, with the likelihood's learnt parameters at its end. `scale` (..., R) holds the
    standard deviations of the random weights, which are the entries `places` (R,) of theta, or its first R for None.
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
        """Standard normal numbers (R,), the same for all members, so that each is what it would be alone.

        They are drawn in float32 for every dtype, so that a model draws alike in all; to `out`, float32 (R,), if given.
        """
        if out is not None:
            return out.normal_(generator=key.generator(out.device)).to(self.scale.dtype)
        return key.normal((self.scale.shape[-1],), torch.float32, self.scale.device).to(self.scale.dtype)


def shifted(theta: Tensor, shift: Tensor, places: Tensor | None) -> Tensor:
    """theta (..., T) with a shift (..., R) added to its entries `places` (R,), or to the first R for None.

    A shift (S, R) of a single theta (T,) gives (S, T).
    """
    theta = theta.expand(*shift.shape[:-1], -1) if theta.dim() < shift.dim() else theta
    if places is not None:
        return theta.index_add(-1, places, shift)
    moved = theta.clone(memory_format=torch.contiguous_format)
    moved[..., : shift.shape[-1]].add_(shift)
    return moved


class Gradients(NamedTuple):
    """Gradients in the mean (..., T) and scale (..., R) of a q, or tensors to write them to."""

    mean: Tensor
    scale: Tensor


Out: TypeAlias = Gradients | None  # tensors to which gradients may be written


class DataTerm(NamedTuple):
    """An estimate of lp E log p(D | w) with its gradients, and the memory that the next estimate needs."""

    value: Tensor  # (...)
    grad_mean: Tensor  # (..., T); valid until the next call, as is grad_scale
    grad_scale: Tensor  # (..., R)
    buffers: Buffers
    memory: Memory
    # Gradients of pp E[-log p(w)] - H(q) at the same draws, in place of those in closed form.
    divergence_grads: Gradients | None = None

    def written(self, out: Gradients) -> "DataTerm":
        """Copy the gradients to the tensors `out`, and return the term with these."""
        if self.grad_mean is not out.mean:
            out.mean.copy_(self.grad_mean)
        if self.grad_scale is not out.scale:
            out.scale.copy_(self.grad_scale)
        return self._replace(grad_mean=out.mean, grad_scale=out.scale)


class Estimator(ABC):
    """Estimator of E log p(D | w) over q and of its gradients in mean and scale; `memory` holds its state."""

    of_batches: ClassVar[bool] = True
    """Whether it needs values and gradients of whole batches alone: no curvature, no noise for each row."""

    @abstractmethod
    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        """Estimate the tempered expected log-likelihood from one batch, with batch norm in training mode.

        The gradients may be written to `out`; `DataTerm.written` copies them where they were not.
        """


_HALF_LOG_TWO_PI_E = 0.5 * math.log(2.0 * math.pi * math.e)
# Scale of a point: quadratures have no gradient at zero, and this one moves the gradient by some 1e-10 over the third
# power of the prior's scale.
_POINT = 1e-5
_LEAST = 1e-10  # least scale under a prior that is not normal: one may underflow to zero in the model's dtype


class Divergence(NamedTuple):
    """KL(q || prior), and the tempered form pp E[-log p] - H(q)."""

    kl: Tensor  # (...)
    tempered: Tensor  # (...)

    def info(self, joint: Problem, value: Tensor) -> Info:
        """Trace entries of an ELBO whose tempered data term is `value` (...), in nats per datum."""
        data_fit, kl = value / (joint.powers[0] * joint.num_data), self.kl / joint.num_data
        loss = (self.tempered - value) / joint.num_data
        return {"loss": loss, "data_fit": data_fit, "kl": kl, "elbo": data_fit - kl}


def divergence(
    joint: Problem, q: Factorised, log_scale: Tensor, key: Key, grads: Gradients, factor: float | Tensor
) -> Divergence:
    """Divergence of q from the prior, with `log_scale` (..., R); by one draw where the prior has no cross-entropy.

    Adds `factor` times the gradients of pp E[-log p] to `grads`, and none of the entropy. Points contribute minus their
    log prior. For a Density, which is data and prior in one, only the entropy is left.
    """
    entropy = log_scale.sum(-1) + log_scale.shape[-1] * _HALF_LOG_TWO_PI_E
    if not isinstance(joint, Joint):
        return Divergence(-entropy, -entropy)
    power = joint.powers[1]
    value = _cross_entropy(joint, q, key, grads, factor * (power.unsqueeze(-1) if isinstance(power, Tensor) else power))
    kl = value - entropy
    tempered = kl if not isinstance(power, Tensor) and power == 1.0 else power * value - entropy
    return Divergence(kl, tempered)


def _cross_entropy(joint: Joint, q: Factorised, key: Key, grads: Gradients, factor: float | Tensor) -> Tensor:
    """Return -E log p over q, untempered, and add `factor` times its gradients to `grads`."""
    learnt = joint.likelihood.num_free > 0
    weights, grad_weights = (joint.split(t)[0] if learnt else t for t in (q.mean, grads.mean))
    prior = joint.bound_prior
    given = q.scale if isinstance(prior, Normal) else q.scale.clamp_min(_LEAST)
    if not prior.has_cross_entropy:
        noise = q.noise(key)
        value, grad = prior.value_and_grad(joint.split(q.moved(noise))[0])
        value, grad = -value, grad.mul_(-factor)
        grad_weights.add_(grad)
        grads.scale.addcmul_(q.random(grad), noise)
    elif q.places is None:
        value = prior.add_cross_entropy_grad(weights, given, grad_weights, grads.scale, factor)
    else:
        scale = torch.full_like(weights, _POINT).index_copy_(-1, q.places, given)
        grad_scale = torch.zeros_like(scale)
        value = prior.add_cross_entropy_grad(weights, scale, grad_weights, grad_scale, factor)
        grads.scale.add_(q.random(grad_scale))
    if learnt:
        extra, raw_grad = joint.likelihood.free_value_and_grad(joint.split(q.mean)[1])
        value = value - extra
        joint.split(grads.mean)[1].sub_(raw_grad * factor)
    return value
