"""How strongly each weight is penalised, by layer."""

import logging
from collections.abc import Mapping
from math import isfinite, prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import Parameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from posterity.errors import positive, positive_whole, shown, unknown
from posterity.numerics.layout import Layout
from posterity.numerics.modules import check_real, check_shapes, uncompiled
from posterity.penalties.composed import Sum
from posterity.penalties.norms import L1, GroupLasso, SquaredL2
from posterity.penalties.penalty import Penalty
from posterity.priors.fan import FanIn, ScaleRule, fans
from posterity.priors.group_lasso import GroupLasso as GroupLassoPrior
from posterity.priors.independent import Independent
from posterity.priors.laplace import Laplace
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
    """The parameters that are trained by name, shared ones once."""
    if not isinstance(net, nn.Module):
        raise TypeError(f"The network must be a torch.nn.Module. Got {shown(net)}.")
    module = uncompiled(net)
    check_shapes(type(module).__name__, module)
    found = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    check_real(type(module).__name__, found.items())
    return found


def penalised(net: nn.Module) -> dict[str, Weight]:
    """The tensors that a penalty is on, by name: trained ones of two axes or more whose layer sums over inputs.

    Biases, norms and embeddings, whose rows are looked up, are not, nor are tensors without entries. A ValueError
    where none is left, and for weights under a parametrisation, which are not tensors of their own.
    """
    parameters = trained(net)
    layout = Layout.of({name: parameter.shape for name, parameter in parameters.items()})
    owners = _owners(net)
    found, passed = {}, []
    for part in layout:
        parameter = parameters[part.name]
        layers = [layer for layer in owners[id(parameter)] if not isinstance(layer, (*_NORMS, *_LOOKUPS))]
        if any(isinstance(layer, ParametrizationList) for layer in layers):
            raise ValueError(
                f"'{part.name}' makes a weight through a parametrisation, so that no penalty on it alone is one on the "
                "weight. Take the parametrisation away (torch.nn.utils.parametrize.remove_parametrizations)."
            )
        if len(part.shape) > 1 and any(_rescales(layer) for layer in layers):
            raise ValueError(
                f"'{part.name}' makes a weight in a hook before each call (weight_norm or spectral_norm of "
                "torch.nn.utils), so that no penalty on it alone is one on the weight. Take the hook away "
                "(torch.nn.utils.remove_weight_norm or remove_spectral_norm)."
            )
        both = fans(part, layout) if layers and len(part.shape) > 1 and part.size else None
        if both is None or part.name.split(".")[-1] in _BIASES:
            passed += [part.name] if len(part.shape) > 1 else []
            continue
        found[part.name] = Weight(parameter, *_transposed(layers, part.shape, *both))
    if not found:
        raise ValueError(
            f"{type(net).__name__}: no trained tensor has a fan-in: none is a weight (out, in, ...) of a layer that "
            f"sums over its inputs. Got {shown(layout.names)}. Penalise a network of linear layers or convolutions, or "
            "give its tensors priors by name (Layerwise)."
        )
    if passed:
        logger.info(
            "not penalised, since no inputs are summed over (embeddings, norms, empty ones): %s", ", ".join(passed)
        )
    return found


def _rescales(layer: nn.Module) -> bool:
    """Whether a layer's weight is made of other tensors whenever it is called."""
    return any(isinstance(hook, (WeightNorm, SpectralNorm)) for hook in layer._forward_pre_hooks.values())


def _owners(net: nn.Module) -> dict[int, list[nn.Module]]:
    """The layers that have each parameter, by its id."""
    owners: dict[int, list[nn.Module]] = {}
    for layer in net.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(layer)
    return owners


def _transposed(layers: list[nn.Module], shape: tuple[int, ...], fan_in: int, fan_out: int) -> tuple[int, int]:
    """The fans, exchanged for transposed convolutions, which store (in, out / groups, *kernel)."""
    layer = layers[0]
    if not isinstance(layer, _ConvTransposeNd):
        return fan_in, fan_out
    kernel = prod(shape[2:])
    return shape[0] // layer.groups * kernel, layer.out_channels * kernel


FAN_IN = FanIn()  # the rule where none is given


class Factors(NamedTuple):
    """A penalty, and lambda_l for each tensor that it is on."""

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
    (in, out / groups, *kernel): its incoming weights are counted as those of an output channel, whatever the stride,
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
    """lambda_l by name as they are chosen without a prior: sqrt(n) for groups of n weights, else 1.

    Groups as in Alvarez and Salzmann (2016), Learning the number of neurons in deep networks. A sum has the factors
    that all its terms have; where they differ, as those of a group lasso and L1 do, a ValueError.

    >>> usual_factors(nn.Linear(9, 2), GroupLasso()), usual_factors(nn.Linear(9, 2), L1())
    ({'weight': 3.0}, {'weight': 1.0})
    """
    _check_penalty("usual_factors", penalty)
    weights = penalised(net)
    terms = tuple(penalty.parts) if isinstance(penalty, Sum) else (penalty,)
    found, *others = [
        {name: _usual_factor(term, tuple(weight.parameter.shape)) for name, weight in weights.items()} for term in terms
    ]
    if any(other != found for other in others):
        raise ValueError(
            f"usual_factors: all terms must have one factor by layer. Got {penalty}: groups of n have sqrt(n), "
            "other terms 1. Add penalty_term(net, term, usual_factors(net, term)) for each term."
        )
    return found


def _usual_factor(penalty: Penalty, shape: tuple[int, ...]) -> float:
    if not isinstance(penalty, GroupLasso):
        return 1.0
    return sqrt(round(penalty.factor(1.0, shape) ** 2) - 1)  # a prior of rate 1 has variance n + 1


def factors_of(prior: Prior, net: nn.Module) -> Factors:
    """The penalty, and lambda_l by name, whose prior this one is: the way back from `prior_of`.

    Takes a prior of zero mean that gives all penalised tensors `Normal`, `Laplace` or `GroupLasso`, as `Layerwise` does
    by name or by rule. What biases and norms have does not matter. Of a prior with members take `prior.member(i)`.

    >>> from posterity.priors import Layerwise
    >>> factors_of(Layerwise({"*weight": Laplace(0.25), "*": Normal()}), nn.Linear(9, 2))
    Factors(penalty=L1(), factors={'weight': 4.0})
    """
    if not isinstance(prior, Prior):
        raise TypeError(f"factors_of: prior must be a prior, such as Layerwise(...). Got {shown(prior)}.")
    weights = penalised(net)
    layout = Layout.of({name: parameter.shape for name, parameter in trained(net).items()})
    found = {
        part.name: _factor_of(own, part.name)
        for own, part in zip(prior.by_tensor(layout), layout, strict=True)
        if part.name in weights
    }
    penalties = {penalty for penalty, _ in found.values()}
    if len(penalties) > 1:
        raise ValueError(
            f"factors_of: all penalised tensors must have one kind of prior. Got {', '.join(map(repr, penalties))}. "
            "Write your loss with one penalty for each, or give one kind."
        )
    return Factors(penalties.pop(), {name: factor for name, (_, factor) in found.items()})


def _factor_of(prior: Prior, name: str) -> tuple[Penalty, float]:
    if isinstance(prior, GroupLassoPrior):
        return GroupLasso(prior.over), _number(prior.rate, name)
    if not isinstance(prior, (Normal, Laplace)):
        raise ValueError(
            f"factors_of: the prior of '{name}' must be Normal, Laplace or GroupLasso, whose -log p is a multiple of a "
            f"penalty. Got {shown(prior)}. Make a penalty of it by priors.penalty.from_prior."
        )
    if not bool((torch.as_tensor(prior.mean, device="cpu") == 0.0).all()):
        raise ValueError(f"factors_of: the prior of '{name}' must have mean 0. Got {shown(prior.mean)}.")
    scale = _number(prior.scale, name)
    return (SquaredL2(), 0.5 / scale**2) if isinstance(prior, Normal) else (L1(), 1.0 / scale)


def _number(value: float | Tensor, name: str) -> float:
    """The one number that a hyper-parameter is for all weights of a tensor."""
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
            "priors.penalty.from_prior makes a penalty of it; its factors are 1."
        )
    if not isinstance(penalty, Penalty):
        hint = f" Call it: {penalty.__name__}()." if isinstance(penalty, type) else ""
        raise TypeError(f"{owner}: penalty must be a penalty, such as SquaredL2() or L1(). Got {shown(penalty)}.{hint}")
