"""Removal of units that do nothing: a smaller module that computes the same function."""

from collections import OrderedDict
from dataclasses import dataclass, field

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
    """A smaller `module`, with what is left: by layer, units (before, after), and all weights (before, after).

    `stay` says of hidden layers that were left alone, why; `assumes_batches` that the module is smaller in a way that
    is right for inputs (N, features) or (N, channels, *positions) only, as no inputs were given that would tell.
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
    """The module without the hidden units that do nothing, in evaluation mode; the one given is left as it is.

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
    """How many units of each hidden layer `pruned` would remove, given the same.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> _ = net[0].weight.data[:2].zero_()
    >>> dead_units(net)
    {'0': 2}
    """
    return {name: before - after for name, (before, after) in pruned(module, inputs).units.items()}


def unused_inputs(module: nn.Module) -> Tensor:
    """Which inputs no weight sees, bool (features,), or (channels,) for convolutions: `pruned` keeps them.

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
    return ~torch.stack([_seen(layer) for layer in layers]).any(0)


def _prepared(owner: str, module: nn.Module) -> nn.Module:
    """The module itself, under torch.compile too, if its weights have shapes."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{owner}: must be given a module, such as q.module() of a Point. Got {shown(module)}.")
    plain = uncompiled(module)
    check_shapes(owner, plain)
    return plain


def _seen(layer: Layer) -> Tensor:
    """Which inputs of a layer have a weight, (inputs,)."""
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    parts = (layer.weight.detach() != 0).chunk(groups)  # (out, in, *kernel) each
    return torch.cat([part.transpose(0, 1).flatten(1).any(1) for part in parts])


def _prune(units: Units) -> bool:
    """Remove what can be from the outputs of one layer; whether anything was."""
    count = units.layer.weight.shape[0]
    if count == 1:
        return False
    idle = (units.layer.weight.reshape(count, -1) == 0).all(1)
    bias = units.layer.bias
    start = Constants(units.layer.weight.new_zeros(count) if bias is None else bias.detach(), idle)
    arriving = [_arriving(use, start) for use in units.uses]
    unseen = torch.stack([(_columns(use) == 0).all(2).all(0) for use in units.uses]).all(0)
    folded = torch.stack([_foldable(use, found) for use, found in zip(units.uses, arriving, strict=True)]).all(0)
    removed = unseen | folded
    if len(units.uses) == 1:
        removed |= _merged(units.uses[0], arriving[0], removed)
    if bool(removed.all()):
        removed[0] = False  # tensors without entries are refused by some layers
    if not bool(removed.any()):
        return False
    for use, found in zip(units.uses, arriving, strict=True):
        _fold(use, torch.where(removed & folded & ~unseen, found.values, 0.0))
    _keep(units, (~removed).nonzero().squeeze(1))
    return True


def _columns(use: Use) -> Tensor:
    """The weights that see each unit, (out, units, span * kernel)."""
    weight = use.layer.weight.detach()
    return weight.reshape(weight.shape[0], weight.shape[1] // use.span, -1)


def _arriving(use: Use, constants: Constants) -> Constants:
    for passage in use.passages:
        constants = passage(constants)
    return constants


def _padded(layer: Layer) -> bool:
    """Whether a convolution sees zeros beyond the edge."""
    if isinstance(layer, nn.Linear) or layer.padding_mode != "zeros":
        return False
    return layer.padding != "valid" and any(layer.padding)


def _foldable(use: Use, found: Constants) -> Tensor:
    """Which units the layer's bias can stand for, (units,)."""
    return found.known & (found.values == 0) if _padded(use.layer) else found.known


def _fold(use: Use, values: Tensor) -> None:
    """Add what these constants (units,) give to the layer's bias."""
    if not bool((values != 0).any()):
        return
    extra = (_columns(use).sum(2, dtype=torch.float64) @ values.double()).to(values.dtype)
    if use.layer.bias is None:
        use.layer.bias = nn.Parameter(extra, requires_grad=use.layer.weight.requires_grad)
    else:
        use.layer.bias.add_(extra)


def _merged(use: Use, found: Constants, removed: Tensor) -> Tensor:
    """Constants that no bias can stand for go into the largest of them: which are removed thereby, (units,)."""
    others = found.known & ~removed
    if int(others.sum()) < 2:
        return torch.zeros_like(removed)
    kept = int(torch.where(others, found.values.abs(), 0.0).argmax())
    others[kept] = False
    shares = torch.where(others, found.values, 0.0) / found.values[kept]
    weight = use.layer.weight
    weight[:, kept] += torch.einsum("oi...,i->o...", weight, shares)
    return others


def _keep(units: Units, kept: Tensor) -> None:
    """Cut the layer, the batch norms behind it and the layers that see it down to these units."""
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
    """The module with every `Chain` as a plain `nn.Sequential`: its constructor's arguments are true no more."""
    for name, child in module.named_children():
        setattr(module, name, _without_config(child))
    hooked = module._forward_hooks or module._forward_pre_hooks
    if not isinstance(module, Chain) or type(module).forward is not nn.Sequential.forward or hooked:
        return module
    plain = nn.Sequential(OrderedDict(module.named_children()))
    return plain.train(module.training)
