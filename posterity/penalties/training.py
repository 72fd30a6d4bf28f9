"""Training with a penalty: for torch's optimisers, as a term of a loss, and as the prior whose mode it finds."""

import glob
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posterity.errors import fraction, positive, shown
from posterity.penalties.composed import kind_of
from posterity.penalties.factors import FAN_IN, lambda_theory, resolved, trained
from posterity.penalties.norms import SquaredL2
from posterity.penalties.penalty import Penalty
from posterity.priors.fan import ScaleRule
from posterity.priors.independent import check_members
from posterity.priors.layerwise import Layerwise
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior

WIDE = Normal(10.0)  # for tensors that are not penalised: proper, and hardly felt


def prior_of(
    net: nn.Module,
    penalty: Penalty,
    rule: ScaleRule | Mapping[str, float] = FAN_IN,
    strength: float | Tensor = 1.0,
    others: Prior = WIDE,
) -> Layerwise:
    """The prior, for a `Joint`, whose mode is found by training with this penalty.

    **Math**: p(w_l) = exp(-strength lambda_l r(w_l)) / Z for each penalised tensor, with lambda_l of
    `layer_factors(net, penalty, rule)` or given by name, as by `usual_factors`. The loss mean of -log p + lambda sum
    over l of lambda_l r(w_l) then has lambda = strength / num_data, so `strength` is lambda / lambda_Th. It is a
    number, or (M,) with one for each member: a grid of lambdas that trains together. Tensors that are not penalised
    have the prior `others`, N(0, 10^2) unless told otherwise.

    **Limit**: exact. That prior is proper, so biases decay a little; `param_groups` has the same decay.

    **Cost**: none; one prior a tensor.

    **References**: Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in
    variational inference.

    **Example**:

    >>> prior_of(nn.Linear(8, 2), SquaredL2(), strength=torch.tensor([0.25, 1.0])).rules["weight"].scale
    tensor([0.7071, 0.3536], dtype=torch.float64)
    """
    check_members("prior_of: strength", strength)
    factors = resolved("prior_of", net, penalty, rule)
    if not isinstance(others, Prior):
        raise TypeError(f"prior_of: others must be a prior, such as Normal(10.0). Got {shown(others)}.")
    exact = strength.double() if isinstance(strength, Tensor) else strength
    rules: dict[str, Prior | ScaleRule] = {
        glob.escape(name): penalty.prior(exact * factor) for name, factor in factors.items()
    }
    return Layerwise({**rules, "*": others})


def param_groups(
    net: nn.Module,
    penalty: Penalty,
    num_data: int,
    rule: ScaleRule | Mapping[str, float] = FAN_IN,
    strength: float = 1.0,
    others: Normal = WIDE,
) -> list[dict[str, Any]]:
    """Groups of parameters for an optimiser of torch that trains with this penalty on a mean of -log p.

    **Math**: with lambda = strength / num_data, `SquaredL2` becomes weight_decay = 2 lambda lambda_l, P_l / num_data
    under `FanIn()`. For other penalties weight_decay is 0 and the group's "factor" is lambda lambda_l: add
    lambda `penalty_term(net, penalty, factors)` to the loss, or take it for a proximal step. Tensors that are not
    penalised have the weight decay 1 / (num_data scale^2) of the prior `others`. Each group has "params", their
    "names", "weight_decay" and "factor" (0 where weight_decay says it all).

    **Limit**: with `SGD` and `Adam`, whose decay is coupled (added to the gradient), the loss is exactly
    -log p(data, weights) / num_data under `prior_of` with the same arguments, up to a constant. `AdamW` decouples
    it: a step shrinks weights by lr weight_decay, as one of plain SGD does with the same number, but gradients are
    divided by their root mean square and the decay is not. So its fixed point is not that mode: see
    `decoupled_weight_decay`.

    **Cost**: none.

    **References**: Loshchilov and Hutter (2019), Decoupled weight decay regularization.

    **Example**:

    >>> groups = param_groups(nn.Linear(8, 2), SquaredL2(), num_data=100)
    >>> [(group["names"], group["weight_decay"]) for group in groups]
    [(['weight'], 0.08), (['bias'], 0.0001)]
    >>> optimizer = torch.optim.SGD(groups, lr=0.1)
    """
    positive("param_groups: strength", strength)
    if getattr(strength, "ndim", 0):
        raise ValueError(f"param_groups: strength must be one number, as the optimiser is one. Got {shown(strength)}.")
    factors = resolved("param_groups", net, penalty, rule)
    single = isinstance(others, Normal) and not isinstance(others.scale, Tensor) and not isinstance(others.mean, Tensor)
    if not single or others.mean != 0.0:
        raise ValueError(
            "param_groups: others must be a Normal of one scale and mean 0, which weight decay can be. "
            f"Got {shown(others)}."
        )
    weight, (kind, own) = float(strength) * lambda_theory(num_data), kind_of(penalty)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in trained(net).items():
        decay, factor = 0.0, 0.0
        if name not in factors:
            decay = lambda_theory(num_data) / float(others.scale) ** 2
        elif isinstance(kind, SquaredL2):
            decay = 2.0 * weight * own * factors[name]
        else:
            factor = weight * factors[name]
        group = groups.setdefault((decay, factor), {"params": [], "names": [], "weight_decay": decay, "factor": factor})
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def penalty_term(net: nn.Module, penalty: Penalty, factors: Mapping[str, float]) -> Tensor:
    """sum over l of lambda_l r(w_l), (), with a graph: lambda times it goes beside a mean of -log p.

    `factors` are those of `layer_factors` or `usual_factors`, or one's own by name. Half-precision weights are summed
    in float32; their gradients have their own type.

    >>> from posterity.penalties.norms import L1
    >>> net = nn.Linear(2, 1)
    >>> _ = net.weight.data.copy_(torch.tensor([[3.0, -4.0]]))
    >>> penalty_term(net, L1(), {"weight": 2.0})
    tensor(14., grad_fn=<SumBackward0>)
    """
    checked = resolved("penalty_term", net, penalty, factors)
    if not checked:
        raise ValueError("penalty_term: factors must name at least one tensor. Got none.")
    parameters = trained(net)
    return torch.stack([factor * penalty(parameters[name]) for name, factor in checked.items()]).sum()


def decoupled_weight_decay(coupled: float, *, momentum: float = 0.0, root_mean_square: float = 1.0) -> float:
    """The decoupled weight decay (w shrinks by lr times it, as in AdamW) that has the fixed point of a coupled one.

    A weight rests where gradient and decay move it back equally. Coupled decay d goes the way of the gradient g, so
    that g = -d w whatever the optimiser. Decoupled decay D stands beside a step of lr g / ((1 - momentum)
    root_mean_square): D = d / ((1 - momentum) root_mean_square). For torch's `SGD` of momentum m the root mean square
    is 1; for `AdamW` momentum is 0, since its average is normalised, and the root mean square is that of the weight's
    mini-batch gradients, sqrt(v) + eps. It differs by weight, hence no one number gives AdamW a normal prior's mode.

    >>> decoupled_weight_decay(0.01, momentum=0.75)
    0.04
    """
    positive("decoupled_weight_decay: coupled", coupled)
    return coupled / _pull(momentum, root_mean_square)


def coupled_weight_decay(decoupled: float, *, momentum: float = 0.0, root_mean_square: float = 1.0) -> float:
    """The coupled weight decay with the fixed point of a decoupled one: the inverse of `decoupled_weight_decay`.

    >>> coupled_weight_decay(0.01, root_mean_square=0.5)
    0.005
    """
    positive("coupled_weight_decay: decoupled", decoupled)
    return decoupled * _pull(momentum, root_mean_square)


def _pull(momentum: float, root_mean_square: float) -> float:
    fraction("weight decay: momentum", momentum)
    positive("weight decay: root_mean_square", root_mean_square)
    return (1.0 - momentum) * root_mean_square
