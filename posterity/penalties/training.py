"""Penalties in training: factors by layer, priors of networks, and parameter groups for optimisers."""

import glob
import logging
from collections.abc import Mapping
from math import isfinite, prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import Parameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from posterity.errors import fraction, positive, positive_whole, shown, unknown
from posterity.numerics.layout import Layout
from posterity.numerics.modules import check_real, check_shapes, uncompiled
from posterity.penalties.composed import Sum, kind_of
from posterity.penalties.norms import L1, GroupLasso, SquaredL2
from posterity.penalties.penalty import Penalty
from posterity.priors.fan import FanIn, ScaleRule, fans
from posterity.priors.group_lasso import GroupLasso as GroupLassoPrior
from posterity.priors.independent import Independent, check_members
from posterity.priors.laplace import Laplace
from posterity.priors.layerwise import Layerwise
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior

logger = logging.getLogger("posterity")

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
_BIASES = ("bias", "bias_k", "bias_v")  # the last two of attention are (1, 1, features)


class Weight(NamedTuple):
    """A tensor of weights (out, in, *kernel) with its fans."""

    parameter: Parameter
    fan_in: int
    fan_out: int


def trained(net: nn.Module) -> dict[str, Parameter]:
    """Trained parameters by name, shared ones once."""
    if not isinstance(net, nn.Module):
        raise TypeError(f"The network must be a torch.nn.Module. Got {shown(net)}.")
    module = uncompiled(net)
    check_shapes(type(module).__name__, module)
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    check_real(type(module).__name__, parameters.items())
    return parameters


def penalised(net: nn.Module) -> dict[str, Weight]:
    """Penalised tensors by name: trained tensors with two axes or more whose layer sums over inputs.

    Biases, norms, embeddings and empty tensors are left out. A ValueError if no tensor remains, and for weights that a
    parametrisation or a hook computes.
    """
    parameters = trained(net)
    layout = Layout.of({name: parameter.shape for name, parameter in parameters.items()})
    owners: dict[int, list[nn.Module]] = {}  # the layers of each parameter, by its id
    for layer in net.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(layer)
    weights, passed = {}, []
    for part in layout:
        parameter = parameters[part.name]
        layers = [layer for layer in owners[id(parameter)] if not isinstance(layer, (*_NORMS, *_LOOKUPS))]
        if any(isinstance(layer, ParametrizationList) for layer in layers):
            raise ValueError(
                f"'{part.name}' makes a weight through a parametrisation, so that no penalty on it alone is one on the "
                "weight. Take the parametrisation away (torch.nn.utils.parametrize.remove_parametrizations)."
            )
        hooks = [hook for layer in layers for hook in layer._forward_pre_hooks.values()]
        if len(part.shape) > 1 and any(isinstance(hook, (WeightNorm, SpectralNorm)) for hook in hooks):
            raise ValueError(
                f"'{part.name}' makes a weight in a hook before each call (weight_norm or spectral_norm of "
                "torch.nn.utils), so that no penalty on it alone is one on the weight. Take the hook away "
                "(torch.nn.utils.remove_weight_norm or remove_spectral_norm)."
            )
        both = fans(part, layout) if layers and len(part.shape) > 1 and part.size else None
        if both is None or part.name.split(".")[-1] in _BIASES:
            passed += [part.name] if len(part.shape) > 1 else []
            continue
        if isinstance(layers[0], _ConvTransposeNd):  # stores (in, out / groups, *kernel)
            kernel = prod(parameter.shape[2:])
            both = parameter.shape[0] // layers[0].groups * kernel, layers[0].out_channels * kernel
        weights[part.name] = Weight(parameter, *both)
    if not weights:
        raise ValueError(
            f"{type(net).__name__}: no trained tensor has a fan-in: none is a weight (out, in, ...) of a layer that "
            f"sums over its inputs. Got {shown(layout.names)}. Penalise a network of linear layers or convolutions, or "
            "give its tensors priors by name (Layerwise)."
        )
    if passed:
        logger.info(
            "not penalised, since no inputs are summed over (embeddings, norms, empty ones): %s", ", ".join(passed)
        )
    return weights


FAN_IN = FanIn()  # the rule where none is given


class Factors(NamedTuple):
    """A penalty, and lambda_l for each penalised tensor."""

    penalty: Penalty
    factors: dict[str, float]


def lambda_theory(num_data: int) -> float:
    """lambda_Th = 1 / num_data: the factor of sum_l lambda_l r(w_l) beside a mean of -log p over `num_data` rows.

    With it penalised training is the mode of a posterior: num_data times the loss is -log p(data, weights).

    >>> lambda_theory(50)
    0.02
    """
    positive_whole("lambda_theory: num_data", num_data, "of rows")
    return 1.0 / num_data


def layer_factors(net: nn.Module, penalty: Penalty, rule: ScaleRule = FAN_IN) -> dict[str, float]:
    """lambda_l by name, with which each weight has the variance of `rule` (`FanIn()`) under the penalty's prior.

    **Math**: for variance v: 1 / (2 v) for `SquaredL2`, sqrt(2 / v) for `L1`, sqrt((n + 1) / v) for groups of n. With
    `FanIn()` v = 1 / P for P incoming weights (in * kernel of a convolution); `Glorot()`, `He()` and
    `EdgeOfChaos(activation)` are other rules.

    **Limit**: the variance of one weight alone is matched. Penalised are trained tensors (out, in, ...) whose layer
    sums over inputs, shared ones once; biases, norms and embeddings are not. A transposed convolution stores
    (in, out / groups, *kernel): its fan-in counts the incoming weights of an output channel, whatever the stride,
    and the rows of a group lasso are its input channels. Tensors of modules of one's own are taken for (out, in, ...),
    too, tokens and scales among them: give factors by name where they are not.

    **Cost**: one number a tensor.

    **References**: Wolinski, Charpiat and Ollivier (2020), An equivalence between Bayesian priors and penalties in
    variational inference.

    **Example**:

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 10))
    >>> layer_factors(net, SquaredL2())
    {'0.weight': 13.5, '2.weight': 16.0}
    """
    _check_penalty("layer_factors", penalty)
    if not isinstance(rule, ScaleRule):
        raise TypeError(f"layer_factors: rule must be a scale rule, such as FanIn() or He(). Got {shown(rule)}.")
    return {
        name: penalty.factor(rule.variance(weight.fan_in, weight.fan_out), tuple(weight.parameter.shape))
        for name, weight in penalised(net).items()
    }


def usual_factors(net: nn.Module, penalty: Penalty) -> dict[str, float]:
    """lambda_l by name as chosen without a prior: sqrt(n) for groups of n weights, else 1.

    Groups as in Alvarez and Salzmann (2016), Learning the number of neurons in deep networks. A sum has the factors
    that all its terms share; a ValueError where they differ, as for a group lasso and L1.

    >>> usual_factors(nn.Linear(9, 2), GroupLasso()), usual_factors(nn.Linear(9, 2), L1())
    ({'weight': 3.0}, {'weight': 1.0})
    """
    _check_penalty("usual_factors", penalty)
    weights = penalised(net)
    terms = tuple(penalty.parts) if isinstance(penalty, Sum) else (penalty,)
    factors, *others = [
        {
            # A group lasso of rate 1 gives weights the variance n + 1.
            name: sqrt(round(term.factor(1.0, tuple(weight.parameter.shape)) ** 2) - 1)
            if isinstance(term, GroupLasso)
            else 1.0
            for name, weight in weights.items()
        }
        for term in terms
    ]
    if any(other != factors for other in others):
        raise ValueError(
            f"usual_factors: all terms must have one factor by layer. Got {penalty}: groups of n have sqrt(n), "
            "other terms 1. Add penalty_term(net, term, usual_factors(net, term)) for each term."
        )
    return factors


def factors_of(prior: Prior, net: nn.Module) -> Factors:
    """The penalty and lambda_l by name to which this prior belongs: the inverse of `prior_of`.

    Takes a prior of zero mean that gives all penalised tensors `Normal`, `Laplace` or `GroupLasso`, as `Layerwise` does
    by name or by rule. Priors of biases and norms are ignored. Of a prior with members take `prior.member(i)`.

    >>> factors_of(Layerwise({"*weight": Laplace(0.25), "*": Normal()}), nn.Linear(9, 2))
    Factors(penalty=L1(), factors={'weight': 4.0})
    """
    if not isinstance(prior, Prior):
        raise TypeError(f"factors_of: prior must be a prior, such as Layerwise(...). Got {shown(prior)}.")
    weights = penalised(net)
    layout = Layout.of({name: parameter.shape for name, parameter in trained(net).items()})
    by_name = {
        part.name: _factor_of(own, part.name)
        for own, part in zip(prior.by_tensor(layout), layout, strict=True)
        if part.name in weights
    }
    penalties = {penalty for penalty, _ in by_name.values()}
    if len(penalties) > 1:
        raise ValueError(
            f"factors_of: all penalised tensors must have one kind of prior. Got {', '.join(map(repr, penalties))}. "
            "Write your loss with one penalty for each, or give one kind."
        )
    return Factors(penalties.pop(), {name: factor for name, (_, factor) in by_name.items()})


def _factor_of(prior: Prior, name: str) -> tuple[Penalty, float]:
    if isinstance(prior, GroupLassoPrior):
        return GroupLasso(prior.over), _number(prior.rate, name)
    if not isinstance(prior, (Normal, Laplace)):
        raise ValueError(
            f"factors_of: the prior of '{name}' must be Normal, Laplace or GroupLasso, whose -log p is a multiple of a "
            f"penalty. Got {shown(prior)}. Make a penalty of it by penalties.from_prior."
        )
    if not bool((torch.as_tensor(prior.mean, device="cpu") == 0.0).all()):
        raise ValueError(f"factors_of: the prior of '{name}' must have mean 0. Got {shown(prior.mean)}.")
    scale = _number(prior.scale, name)
    return (SquaredL2(), 0.5 / scale**2) if isinstance(prior, Normal) else (L1(), 1.0 / scale)


def _number(value: float | Tensor, name: str) -> float:
    """Return a hyper-parameter that all weights of a tensor share as a float."""
    values = torch.as_tensor(value, dtype=torch.float64, device="cpu").reshape(-1)
    if not bool((values == values[0]).all()):
        raise ValueError(
            f"factors_of: all weights of '{name}' must have one scale. Got {shown(value)}. Of a prior with members "
            "take prior.member(i)."
        )
    return float(values[0])


def resolved(owner: str, net: nn.Module, penalty: Penalty, rule: ScaleRule | Mapping[str, float]) -> dict[str, float]:
    """lambda_l by name from a rule, or given by name and checked."""
    _check_penalty(owner, penalty)
    if not isinstance(rule, Mapping):
        return layer_factors(net, penalty, rule)
    names = tuple(trained(net))
    for name, factor in rule.items():
        if name not in names:
            raise ValueError(f"{owner}: {unknown('trained tensor', name, names)}")
        positive(f"{owner}: factor of '{name}'", factor)
    return dict(rule)


def _check_penalty(owner: str, penalty: object) -> None:
    if isinstance(penalty, Independent) and not isfinite(penalty.standard_variance):
        raise ValueError(
            f"{owner}: {shown(penalty)} has no finite variance, so that no factor matches that of a layer's rule. Use "
            "StudentT with degrees above 2, or scales of your own (Layerwise)."
        )
    if isinstance(penalty, Prior):
        raise TypeError(
            f"{owner}: penalty must be a penalty, such as SquaredL2() or L1(). Got the prior {shown(penalty)}. "
            "penalties.from_prior makes a penalty of it; its factors are 1."
        )
    if not isinstance(penalty, Penalty):
        hint = f" Call it: {penalty.__name__}()." if isinstance(penalty, type) else ""
        raise TypeError(f"{owner}: penalty must be a penalty, such as SquaredL2() or L1(). Got {shown(penalty)}.{hint}")


WIDE = Normal(10.0)  # for tensors that are not penalised: proper, and hardly felt


def prior_of(
    net: nn.Module,
    penalty: Penalty,
    rule: ScaleRule | Mapping[str, float] = FAN_IN,
    strength: float | Tensor = 1.0,
    others: Prior = WIDE,
) -> Layerwise:
    """The prior, for a `Joint`, under which training with this penalty finds the mode.

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

    `factors` come from `layer_factors` or `usual_factors`, or are given by name. Half-precision weights are summed
    in float32; their gradients keep the weights' dtype.

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
