"""Draws of all weights at once, one for the whole batch."""

from dataclasses import dataclass

import torch

from posterity.errors import positive_whole
from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Gradients, Memory, Out
from posterity.model import Batch, Buffers, Problem
from posterity.numerics.random import Key
from posterity.numerics.workspace import workspace


@dataclass(frozen=True)
class WeightSampling(Estimator):
    """Pathwise gradients at draws of all weights, each draw shared by the rows of the batch.

    **Math**: w = mean + scale * eps; with g = d/dw lp log p(D | w), d/dmean = E g and d/dscale = E[g * eps], averaged
    over `draws`. With `antithetic` the passes come in pairs eps, -eps; where `draws` is odd, the second of a pair is
    the first pass of the next step, so that half of the noise need not be drawn.

    **Limit**: unbiased for every network. Rows share their noise, so the variance does not fall with the batch size.

    **Cost**: `draws` forward and backward passes.

    **References**: Blundell et al. (2015), Weight uncertainty in neural networks, section 3.2; Kingma and Welling
    (2014), section 2.4.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda w: -w.square().sum(), {"w": (1,)})
    >>> q = Factorised(torch.ones(1), torch.full((1,), 0.5), None)
    >>> term = WeightSampling(draws=2, antithetic=True).data_term(density, q, None, {}, {}, po.Key(0))
    >>> term.grad_mean  # of a parabola the pair gives the gradient exactly
    tensor([-2.])
    """

    draws: int = 1
    antithetic: bool = False

    def __post_init__(self) -> None:
        positive_whole("WeightSampling.draws", self.draws)

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        used = memory.get("used")  # noise whose mirror image comes next
        terms = None
        for draw in range(self.draws):
            mirror = used is not None
            if used is not None:
                noise, used = used, None
            elif self.antithetic:
                noise = used = q.noise(key.fold(draw) if draw else key)  # it may outlive the step
            else:
                space = workspace(joint, "noise", q.scale[0] if q.scale.dim() > 1 else q.scale, torch.float32)
                noise = q.noise(key.fold(draw) if draw else key, space)
            theta = q.moved(noise, workspace(joint, "theta", q.mean), -1.0 if mirror else 1.0)
            first = terms is None
            places = out if first and out is not None else _places(joint, q, first)
            value, _, buffers = joint.data_value_and_grad(theta, batch, buffers, places.mean)
            torch.mul(q.random(places.mean), noise, out=places.scale)
            if mirror:
                places.scale.neg_()
            if terms is None:
                terms = value, *places
            else:
                terms = terms[0] + value, terms[1].add_(places.mean), terms[2].add_(places.scale)
        assert terms is not None
        if self.draws > 1:
            terms = terms[0] / self.draws, terms[1].div_(self.draws), terms[2].div_(self.draws)
        return DataTerm(*terms, buffers, {} if used is None else {"used": used})


def _places(joint: Problem, q: Factorised, first: bool) -> Gradients:
    """Memory for the gradients at the first draw, or at a later one."""
    names = ("grad", "grad_scale") if first else ("another grad", "another grad_scale")
    return Gradients(workspace(joint, names[0], q.mean), workspace(joint, names[1], q.scale))
