"""Where a network calls for dropout: found by running it on a few rows."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.model.inputs import Inputs, map_inputs, named_tensors, num_rows
from posterity.model.network import Network
from posterity.numerics.masks import NoMasks, Site
from posterity.numerics.random import torch_states

Call = tuple[tuple[int, ...], float, int]
Calls = list[Call]

_KNOWN: WeakKeyDictionary[Network, dict[tuple[torch.Size, ...], "DropoutSites"]] = WeakKeyDictionary()


@dataclass(frozen=True)
class DropoutSites:
    """The calls of dropout in a pass, in order; `training`: whether `self.training` must be set to see them all."""

    sites: tuple[Site, ...]
    training: bool


def dropout_sites(network: Network, inputs: Inputs, theta: Tensor | None = None) -> DropoutSites:
    """The sites of a network with dropout, at theta (P,) or at its own weights; ValueError where there are none.

    Two rows of the inputs are run, then three, to see which axis of a mask is that of the rows. What it finds without
    theta is kept for the network and the form of a row, so rates that are learnt are only those of its own weights.
    """
    form = tuple(tensor.shape[1:] for tensor in named_tensors(inputs).values())
    known = _KNOWN.setdefault(network, {})
    if theta is None and form in known:
        return known[form]
    weights = network.views(network.initial if theta is None else theta)
    quiet = _calls(network, weights, inputs, training=False)
    loud = _calls(network, weights, inputs, training=True)
    training = loud is not None and quiet is not None and len(loud[0]) > len(quiet[0])
    found = loud if training else quiet
    assert found is not None
    if not found[0]:
        raise ValueError(
            "MCDropout needs a network with dropout. Got one without: no layer drops with a rate above 0. Add "
            "torch.nn.Dropout layers, as in posterity.networks.MLP(sizes, dropout=0.1)."
        )
    sites = DropoutSites(tuple(_site(*pair) for pair in zip(*found, strict=True)), training)
    if theta is None:
        known[form] = sites
    return sites


def _calls(network: Network, weights: list[Tensor], inputs: Inputs, *, training: bool) -> tuple[Calls, Calls] | None:
    """The calls of passes on two and on three rows; None where a module in training mode does something else."""
    runs = []
    before = torch_states(network.device)
    for count in (2, 3):
        masks, few = NoMasks(), [index % num_rows(inputs) for index in range(count)]
        rows = map_inputs(lambda tensor, few=few: tensor[few].to(network.device), inputs)  # type: ignore[misc]
        try:
            with torch.no_grad(), network.dropping(masks, training=training):
                network.run(weights, rows, {name: buffer.clone() for name, buffer in network.buffers.items()})
        except Exception:
            if training:
                return None
            raise
        runs.append(masks.calls)
    if any(not torch.equal(one, two) for one, two in zip(before, torch_states(network.device), strict=True)):
        _restore(before, network.device)
        if training:
            return None
        raise ValueError(
            "MCDropout: the module draws random numbers in another way than by dropout, so its draws have no key. Use "
            "torch.nn.Dropout, torch.nn.functional.dropout or scaled_dot_product_attention(dropout_p=)."
        )
    return runs[0], runs[1]


def _restore(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _site(two: Call, three: Call) -> Site:
    """The site of which the mask was asked for with two and with three rows."""
    (small, rate, few), (large, _, more) = two, three
    entries = max(0, more - few)
    changed = [axis for axis, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
    if len(small) == len(large) and not changed:
        return Site(rate, small, None, entries=entries)
    if len(small) != len(large) or len(changed) > 1 or 3 * small[changed[0]] != 2 * large[changed[0]]:
        return Site(rate, small, None, clear=False, entries=entries)
    axis = changed[0]
    repeats = small[axis] // 2
    return Site(rate, (*small[:axis], repeats, *small[axis + 1 :]), axis, repeats, entries=entries)
