"""How the posterior of an ever wider network goes to its prior at eta = 1."""

from typing import NamedTuple

import torch
from torch import Tensor

from posterity.evidence.wide.neurons import Neurons, parts
from posterity.evidence.wide.problem import WideProblem

_NOTHING = 1e-12  # slopes below it are rounding


class CollapseLaw(NamedTuple):
    """KL(q* || P0) of the whole network is constant N^exponent for large N."""

    exponent: int  # -1, or -3 where the prior's mean output is already optimal to first order
    constant: float

    def kl(self, width: Tensor) -> Tensor:
        """The law at these widths."""
        return self.constant * width.to(torch.float64) ** self.exponent


def collapse_law(problem: WideProblem, outputs: int = 1) -> CollapseLaw:
    """The limit of N KL(q* || P0), or of N^3 KL(q* || P0), for the optimum q* of the untempered bound.

    **Math**: near the prior KL is a quadratic form: (mean - mean0)^2 / (2 s0^2) for each mean and v^2 for each v =
    log(scale / s0). Let g be the gradient of sum G~ at the prior. The minimum of N KL + <g, .> gives N KL* -> sum
    over means of s0^2 g^2 / 2 + sum over scales of g^2 / 4. For the square loss and a centred prior this is 2 s0^2
    (sum_i y_i c_i)^2 with c_i = E sigma(<b, x_i>). Odd activations have c = 0 and g = 0: then the scales shrink by
    the gradient h of N times the excess of G^N, by an order of 1/N more, and N^3 KL* -> the same form in h.

    **Limit**: the leading order in 1/N.
    """
    prior = problem.prior.neurons(problem.inputs.shape[-1], outputs, problem.inputs)
    first = _dual_norm(problem, prior, limit=True)
    if first > _NOTHING * problem.num_data:
        return CollapseLaw(-1, first)
    return CollapseLaw(-3, _dual_norm(problem, prior, limit=False))


def _dual_norm(problem: WideProblem, prior: Neurons, limit: bool) -> float:
    """The form in the gradient of sum G~, or of N times its excess to second order."""
    with torch.enable_grad():
        leaf = prior.theta.detach().requires_grad_()
        neurons = Neurons.from_theta(leaf, prior.num_outputs)
        terms = problem.limit_terms(neurons) if limit else problem.loss.second_order(problem.law(neurons, 1.0))
        (gradient,) = torch.autograd.grad(terms.sum(), leaf)
    outer_mean, outer_scale, inner_mean, inner_scale = parts(gradient, prior.num_outputs)
    total = 0.0
    for mean, scale, own in (
        (outer_mean, outer_scale, prior.outer_scale),
        (inner_mean, inner_scale, prior.inner_scale),
    ):
        # d/dv = s0 d/ds at the prior
        total += float((0.5 * (own * mean).square() + 0.25 * (own * scale).square()).sum())
    return total
