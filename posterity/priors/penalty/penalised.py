"""Which tensors of a network are penalised, and how many inputs go into each output."""

import logging
from math import prod
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import Parameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from posterity.errors import shown
from posterity.numerics.layout import Layout
from posterity.numerics.modules import check_real, check_shapes, uncompiled
from posterity.priors.fan import fans

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
