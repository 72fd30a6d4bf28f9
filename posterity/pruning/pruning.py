"""Removal of units without effect: a smaller module that computes the same function."""

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor, nn

from posterity.errors import shown
from posterity.model.batch import Inputs
from posterity.model.module import copied
from posterity.networks.layers import Chain
from posterity.numerics.modules import check_real, check_shapes, uncompiled
from posterity.pruning.passages import Constants, Layer, check_same_code, note_ranks, traced
from posterity.pruning.unit_uses import Units, Use, hidden_units, input_layers


@dataclass(frozen=True)
class Pruned:
    """A smaller `module`, its units (before, after) by layer, and its number of weights (before, after).

    `stay` has the reasons why hidden layers were left alone; `assumes_batches` says that the removal is right for
    inputs (N, features) or (N, channels, *positions) only, since no inputs were given.
    """

    module: nn.Module
    units: dict[str, tuple[int, int]]
    weights: tuple[int, int]
    stay: dict[str, str] = field(default_factory=dict)
    assumes_batches: bool = False

    def __str__(self) -> str:
        lines = [f"{name}: {after} of {before} units" for name, (before, after) in self.units.items()]
        lines += [f"{name}: all units stay, since {reason}" for name, reason in self.stay.items()]
        if self.assumes_batches:
            lines.append("for inputs in batches, (N, features) or (N, channels, *positions): pass inputs= to make sure")
        return "\n".join([*lines, f"weights: {self.weights[1]:,} of {self.weights[0]:,}"])


def pruned(module: nn.Module, inputs: Inputs | None = None) -> Pruned:
    """Copy a module without the hidden units that have no effect in evaluation mode.

    A unit (of a linear layer, or a channel of a convolution) goes where all its outgoing weights are exactly zero, or
    where all its incoming weights are, or its batch-norm scale: it is constant then, and what it adds to the next layer
    goes into that one's bias. Behind the zero padding of a convolution a constant that is not zero differs at the edge:
    of several such channels one is kept, with the others' weights. Removal repeats until nothing is left to remove, and
    leaves each layer at least one unit. Outputs agree to rounding.

    Layers are found by tracing: units stay where anything but layers, activations, batch norm, pooling, flattening,
    means over all positions and dropout sees them (the sum of a residual block), as do those of layers that share
    weights or have groups, and those that one branch changes in place while another sees them; `stay` has the reasons.
    Functions of torch are as good as modules, x.view(x.size(0), -1) as flattening; x.view(-1, 400) has a number of
    units in it, and they stay. A `Chain` from which units went comes back as `nn.Sequential`, with the same names, and
    what torch.compile has wrapped without it. Code that computes with the sizes of its layers is refused.

    Which axis batch norm and flattening work along depends on the inputs. Without `inputs` these are taken for a batch
    (N, features) or (N, channels, *positions), which the result says where it matters (`assumes_batches`); a smaller
    module that is then given (N, L, features) before batch norm, or one image without N, stops with torch's error
    about sizes. Pass `inputs` such as the module is meant for: units that lie along another axis then stay.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with torch.no_grad():
    ...     _ = net[0].weight[1].zero_()  # constant
    ...     _ = net[2].weight[:, 2].zero_()  # not used
    >>> smaller = pruned(net)
    >>> print(smaller)
    0: 1 of 3 units
    weights: 5 of 13
    >>> x = torch.randn(5, 2)
    >>> torch.allclose(smaller.module(x), net(x), atol=1e-5)
    True
    """
    smaller = copied(_prepared("pruned", module)).eval()
    check_real("pruned", [*smaller.named_parameters(), *smaller.named_buffers()])
    graph = traced(smaller)
    if inputs is not None:
        note_ranks(smaller, graph, inputs)
    layers, stay = hidden_units(smaller, graph)
    before = {units.name: units.layer.weight.shape[0] for units in layers}
    size = _num_weights(smaller)
    with torch.no_grad():
        while any([_prune(units) for units in layers]):
            pass
    after = {units.name: units.layer.weight.shape[0] for units in layers}
    if before != after:
        check_same_code(graph, traced(smaller), type(smaller).__name__)
        smaller = _without_config(smaller)
    units = {name: (before[name], after[name]) for name in before}
    cut = [use for layer in layers if before[layer.name] > after[layer.name] for use in layer.uses]
    return Pruned(smaller, units, (size, _num_weights(smaller)), stay, any(use.assumes for use in cut))


def dead_units(module: nn.Module, inputs: Inputs | None = None) -> dict[str, int]:
    """The number of units of each hidden layer that `pruned` would remove with the same arguments.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> _ = net[0].weight.data[:2].zero_()
    >>> dead_units(net)
    {'0': 2}
    """
    return {name: before - after for name, (before, after) in pruned(module, inputs).units.items()}


def unused_inputs(module: nn.Module) -> Tensor:
    """A mask of the inputs that no weight uses, (features,), or (channels,) for convolutions: `pruned` keeps them.

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    >>> _ = net[0].weight.data[:, 1].zero_()
    >>> unused_inputs(net)
    tensor([False,  True, False])
    """
    layers = input_layers(copied(_prepared("unused_inputs", module)).eval())
    if not layers:
        raise ValueError(
            f"unused_inputs: the inputs of {type(module).__name__} must go into linear layers or convolutions of one "
            "size, entry by entry. Something else sees them, or there are several."
        )
    seen = []
    for layer in layers:
        parts = (layer.weight.detach() != 0).chunk(getattr(layer, "groups", 1))  # (out, in, *kernel) each
        seen.append(torch.cat([part.transpose(0, 1).flatten(1).any(1) for part in parts]))
    return ~torch.stack(seen).any(0)


def _prepared(owner: str, module: nn.Module) -> nn.Module:
    """Check the module and unwrap it from torch.compile."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{owner}: must be given a module, such as q.module() of a Point. Got {shown(module)}.")
    plain = uncompiled(module)
    check_shapes(owner, plain)
    return plain


def _prune(units: Units) -> bool:
    """Remove units without effect from the outputs of a layer; return whether any was removed."""
    count = units.layer.weight.shape[0]
    if count == 1:
        return False
    idle = (units.layer.weight.reshape(count, -1) == 0).all(1)
    bias = units.layer.bias
    start = Constants(units.layer.weight.new_zeros(count) if bias is None else bias.detach(), idle)
    arriving = [reduce(lambda constants, passage: passage(constants), use.passages, start) for use in units.uses]
    unseen = torch.stack([(_columns(use) == 0).all(2).all(0) for use in units.uses]).all(0)
    folded = torch.stack(
        [
            constants.known & (constants.values == 0) if _padded(use.layer) else constants.known
            for use, constants in zip(units.uses, arriving, strict=True)
        ]
    ).all(0)
    removed = unseen | folded
    if len(units.uses) == 1:
        removed |= _merged(units.uses[0], arriving[0], removed)
    if bool(removed.all()):
        removed[0] = False  # tensors without entries are refused by some layers
    if not bool(removed.any()):
        return False
    for use, constants in zip(units.uses, arriving, strict=True):
        _fold(use, torch.where(removed & folded & ~unseen, constants.values, 0.0))
    _keep(units, (~removed).nonzero().squeeze(1))
    return True


def _columns(use: Use) -> Tensor:
    """The weights of each unit, (out, units, span * kernel)."""
    weight = use.layer.weight.detach()
    return weight.reshape(weight.shape[0], weight.shape[1] // use.span, -1)


def _padded(layer: Layer) -> bool:
    """Whether a convolution pads its inputs by zeros."""
    if isinstance(layer, nn.Linear) or layer.padding_mode != "zeros":
        return False
    return layer.padding != "valid" and any(layer.padding)


def _fold(use: Use, values: Tensor) -> None:
    """Add the contribution of constants (units,) to the layer's bias."""
    if not bool((values != 0).any()):
        return
    extra = (_columns(use).sum(2, dtype=torch.float64) @ values.double()).to(values.dtype)
    if use.layer.bias is None:
        use.layer.bias = nn.Parameter(extra, requires_grad=use.layer.weight.requires_grad)
    else:
        use.layer.bias.add_(extra)


def _merged(use: Use, constants: Constants, removed: Tensor) -> Tensor:
    """Merge constants that no bias can replace into the largest of them; return a mask of the others, (units,)."""
    others = constants.known & ~removed
    if int(others.sum()) < 2:
        return torch.zeros_like(removed)
    kept = int(torch.where(others, constants.values.abs(), 0.0).argmax())
    others[kept] = False
    shares = torch.where(others, constants.values, 0.0) / constants.values[kept]
    weight = use.layer.weight
    weight[:, kept] += torch.einsum("oi...,i->o...", weight, shares)
    return others


def _keep(units: Units, kept: Tensor) -> None:
    """Restrict the layer, the batch norms behind it and the layers that use it to these units."""
    layer = units.layer
    layer.weight = _cut(layer.weight, 0, kept)
    if layer.bias is not None:
        layer.bias = _cut(layer.bias, 0, kept)
    if isinstance(layer, nn.Linear):
        layer.out_features = len(kept)
    else:
        layer.out_channels = len(kept)
    for norm in dict.fromkeys(norm for use in units.uses for norm in use.norms):
        norm.num_features = len(kept)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean, norm.running_var = norm.running_mean[kept], norm.running_var[kept]
        if norm.affine:
            norm.weight, norm.bias = _cut(norm.weight, 0, kept), _cut(norm.bias, 0, kept)
    for use in units.uses:
        columns = (kept.unsqueeze(1) * use.span + torch.arange(use.span, device=kept.device)).flatten()
        use.layer.weight = _cut(use.layer.weight, 1, columns)
        if isinstance(use.layer, nn.Linear):
            use.layer.in_features = len(columns)
        else:
            use.layer.in_channels = len(columns)


def _cut(parameter: Tensor, axis: int, kept: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().index_select(axis, kept), requires_grad=parameter.requires_grad)


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _without_config(module: nn.Module) -> nn.Module:
    """Replace every `Chain` by a plain `nn.Sequential`, since its constructor's arguments no longer hold."""
    for name, child in module.named_children():
        setattr(module, name, _without_config(child))
    hooked = module._forward_hooks or module._forward_pre_hooks
    if not isinstance(module, Chain) or type(module).forward is not nn.Sequential.forward or hooked:
        return module
    plain = nn.Sequential(OrderedDict(module.named_children()))
    return plain.train(module.training)
