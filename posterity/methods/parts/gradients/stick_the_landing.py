"""Pathwise gradients of the whole ELBO, whose noise vanishes where q is the posterior."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive_whole
from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Gradients, Memory, Out
from posterity.model import Batch, Buffers, Joint, Problem
from posterity.numerics.random import Key


@dataclass(frozen=True)
class StickTheLanding(Estimator):
    """Weight sampling in which cross-entropy and entropy are differentiated at the draws too, without the score of q.

    **Math**: with w = mean + scale * eps and h(w) = lp log p(D | w) + pp log p(w) - log q(w), where q inside h is held
    fixed, d/dmean = E dh/dw and d/dscale = E[dh/dw * eps]; the part that is left out, the score of q, is zero on
    average. Where q is proportional to the tempered joint density every draw gives zero.

    **Limit**: unbiased. Less noise than `WeightSampling` near the optimum of a rich family, often more far from it,
    since the closed forms of cross-entropy and entropy are not used.

    **Cost**: `draws` forward and backward passes, and one gradient of the prior for each.

    **References**: Roeder, Wu and Duvenaud (2017), Sticking the landing.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda w: -0.5 * w.square().sum(), {"w": (1,)})
    >>> q = Factorised(torch.zeros(1), torch.ones(1), None)  # the density itself
    >>> term = StickTheLanding().data_term(density, q, None, {}, {}, po.Key(0))
    >>> term.grad_mean - term.divergence_grads[0]
    tensor([0.])
    """

    draws: int = 1

    def __post_init__(self) -> None:
        positive_whole("StickTheLanding.draws", self.draws)

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        """The average over the draws, with the gradients of the divergence."""
        sums = [torch.zeros_like(part) for part in (q.mean[..., 0], q.mean, q.scale, q.mean, q.scale)]
        for draw in range(self.draws):
            noise = q.noise(key.fold(draw))
            theta = q.moved(noise)
            value, grad, buffers = joint.data_value_and_grad(theta, batch, buffers)
            pull = _pull(joint, q, theta, noise)
            found = value, grad, q.random(grad) * noise, pull, q.random(pull) * noise
            for total, part in zip(sums, found, strict=True):
                total.add_(part)
        value, grad_mean, grad_scale, pull_mean, pull_scale = (total.div_(self.draws) for total in sums)
        return DataTerm(value, grad_mean, grad_scale, buffers, {}, Gradients(pull_mean, pull_scale))


def _pull(joint: Problem, q: Factorised, theta: Tensor, noise: Tensor) -> Tensor:
    """Gradient in w of log q(w) - pp log p(w) at a draw, (..., T), with q held fixed."""
    pull = torch.zeros_like(theta)
    if isinstance(joint, Joint):
        power = joint.powers[1]
        weights, raw = joint.split(theta)
        pull[..., : joint.num_weights] = joint.bound_prior.value_and_grad(weights)[1]
        if raw.shape[-1]:
            pull[..., joint.num_weights :] = joint.free_value_and_grad(raw)[1]
        pull.mul_(-power.unsqueeze(-1) if isinstance(power, Tensor) else -power)
    score = noise / q.scale  # minus the gradient of log q
    if q.places is None:
        pull[..., : score.shape[-1]].sub_(score)
        return pull
    return pull.index_add_(-1, q.places, -score)
