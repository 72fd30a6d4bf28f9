"""How sure the averaged prediction of classes is, against the width."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.theory import OutputLaw
from posterity_studies.collapse.optima import Balanced, Untempered


@dataclass(frozen=True, eq=False)
class Sureness:
    """Of the averaged probabilities at the rows, (...): mean of the largest, share of right classes, mean NLL."""

    confidence: Tensor
    accuracy: Tensor
    nll: Tensor


@dataclass(frozen=True, eq=False)
class Confidence:
    """At eta = 1 (W,), at the balanced temperatures (T, W), and in their limit (T,)."""

    untempered: Sureness
    balanced: Sureness
    limit: Sureness


def averaged(law: OutputLaw) -> Tensor:
    """E softmax(f) at the rows, (..., P, C), to second order in f - E f.

    **Math**: p_c + 1/2 tr(p_c'' Cov f) at p = softmax(E f); with S = Cov f the trace is p_c times (S_cc - 2 (S p)_c +
    2 p^T S p - sum over d of p_d S_dd).

    **Limit**: the error is O(1/N^2).
    """
    probabilities, covariance = torch.softmax(law.mean, -1), law.covariance
    own = covariance.diagonal(dim1=-2, dim2=-1)  # (..., P, C)
    turned = (covariance @ probabilities.unsqueeze(-1)).squeeze(-1)
    common = (probabilities * (2.0 * turned - own)).sum(-1, keepdim=True)
    return probabilities * (1.0 + 0.5 * (own - 2.0 * turned + common))


def confidence(one: Untempered, other: Balanced) -> Confidence:
    """Of the optima of the same case at eta = 1 and at the balanced temperatures."""
    problem = one.case.problem
    laws = (
        problem.law(one.optima.neurons, one.widths),
        problem.law(other.optima.neurons, other.widths),
        problem.law(other.limit.neurons, torch.inf),
    )
    return Confidence(*(_sureness(averaged(law), problem.targets) for law in laws))


def _sureness(probabilities: Tensor, labels: Tensor) -> Sureness:
    largest, which = probabilities.max(-1)
    own = torch.take_along_dim(probabilities, labels.expand(which.shape).unsqueeze(-1), -1).squeeze(-1)
    return Sureness(largest.mean(-1), (which == labels).to(torch.float64).mean(-1), -own.log().mean(-1))
