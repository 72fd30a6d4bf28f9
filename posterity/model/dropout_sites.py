"""The dropout sites of a network, and its outputs under many masks."""

import logging
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from posterity.model.batch import Inputs, map_inputs, named_tensors, num_rows
from posterity.model.network import Buffers, Network
from posterity.numerics.dropout import LayersAfter, NoMasks, NumberedMasks, Site
from posterity.numerics.random import GlobalStates, Key, global_generators

Call = tuple[tuple[int, ...], float, int]
Calls = list[Call]

logger = logging.getLogger("posterity")

LARGE = {"cpu": 1 << 20, "cuda": 1 << 26}  # entries of the largest masked tensor for draws that run together
AT_LEAST = 8  # draws run together up to so many times that size: they share the layers before the first dropout

_KNOWN: WeakKeyDictionary[Network, dict[tuple[torch.Size, ...], "DropoutSites"]] = WeakKeyDictionary()
_CALLS: WeakKeyDictionary[Network, dict[object, tuple[tuple[int, ...], ...]]] = WeakKeyDictionary()
_ALONE: WeakSet[Network] = WeakSet()  # networks that vmap refused


@dataclass(frozen=True)
class DropoutSites:
    """The calls of dropout in a pass, in order; `training`: whether `self.training` must be set to see them all."""

    sites: tuple[Site, ...]
    training: bool


def dropout_sites(network: Network, inputs: Inputs, theta: Tensor | None = None) -> DropoutSites:
    """The sites of a network at theta (P,) or its own weights; raises a ValueError where nothing drops.

    Two rows of the inputs are run, then three, to find the axis of the rows in each mask. The result without theta is
    cached for the network and the shape of a row, so its learnt rates are those of the network's own weights.
    """
    form = tuple(tensor.shape[1:] for tensor in named_tensors(inputs).values())
    known = _KNOWN.setdefault(network, {})
    if theta is None and form in known:
        return known[form]
    weights = network.views(network.initial if theta is None else theta)
    quiet = _calls(network, weights, inputs, training=False)
    loud = _calls(network, weights, inputs, training=True)
    training = loud is not None and quiet is not None and len(loud[0]) > len(quiet[0])
    calls = loud if training else quiet
    assert calls is not None
    if not calls[0]:
        raise ValueError(
            "MCDropout needs a network with dropout. Got one without: no layer drops with a rate above 0. Add "
            "torch.nn.Dropout layers, as in posterity.networks.MLP(sizes, dropout=0.1)."
        )
    sites = DropoutSites(tuple(_site(*pair) for pair in zip(*calls, strict=True)), training)
    if theta is None:
        known[form] = sites
    return sites


def calls_of(network: Network, inputs: Inputs, logits: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For each learnt rate, whose logit is at this position of theta, the numbers of the dropout calls that use it.

    A pass at rates that all differ tells them; it is cached like the sites.
    """
    form = tuple(tensor.shape[1:] for tensor in named_tensors(inputs).values())
    known = _CALLS.setdefault(network, {})
    if (form, logits) not in known:
        rates = [(index + 1.1372915) / (len(logits) + 2.0) for index in range(len(logits))]  # of no layer by accident
        theta = network.initial.detach().clone()
        theta[list(logits)] = torch.logit(torch.tensor(rates, dtype=torch.float64)).to(theta)
        sites = dropout_sites(network, inputs, theta).sites
        known[form, logits] = tuple(
            tuple(index for index, site in enumerate(sites) if abs(site.rate - rate) < 1e-6) for rate in rates
        )
    return known[form, logits]


def _calls(network: Network, weights: list[Tensor], inputs: Inputs, *, training: bool) -> tuple[Calls, Calls] | None:
    """The calls of passes on two and on three rows; None where a module in training mode fails or draws otherwise."""
    runs = []
    generators = global_generators(network.device)
    before = GlobalStates.now(generators)
    for count in (2, 3):
        masks, few = NoMasks(), [index % num_rows(inputs) for index in range(count)]
        rows = map_inputs(lambda tensor, few=few: tensor[few].to(network.device), inputs)  # type: ignore[misc]
        try:
            with torch.no_grad(), network.dropping(masks, training=training):
                network.run(weights, rows)
        except Exception:
            if training:
                return None
            raise
        runs.append(masks.calls)
    if not before.equals(GlobalStates.now(generators)):
        before.restore(generators)
        if training:
            return None
        raise ValueError(
            "MCDropout: the module draws random numbers in another way than by dropout, so its draws have no key. Use "
            "torch.nn.Dropout, torch.nn.functional.dropout or scaled_dot_product_attention(dropout_p=)."
        )
    return runs[0], runs[1]


def _site(two: Call, three: Call) -> Site:
    """The site of a dropout from its calls with two and with three rows."""
    (small, rate, few), (large, _, more) = two, three
    entries = max(0, more - few)
    changed = [axis for axis, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
    if len(small) == len(large) and not changed:
        return Site(rate, small, None, entries=entries)
    if len(small) != len(large) or len(changed) > 1 or 3 * small[changed[0]] != 2 * large[changed[0]]:
        return Site(rate, small, None, clear=False, entries=entries)
    axis, repeats = changed[0], small[changed[0]] // 2
    return Site(rate, (*small[:axis], repeats, *small[axis + 1 :]), axis, repeats, entries=entries)


def mask_numbers(known: DropoutSites, draws: int, key: Key, device: torch.device) -> list[Tensor]:
    """Uniform numbers (draws, *shape) for each site, in float32 whatever the network's dtype."""
    if not all(site.clear for site in known.sites):
        raise ValueError(
            "One mask a draw: the rows cannot be told in every mask of this network. Use one_mask_a_draw=False."
        )
    shapes = [(draws, *site.shape) for site in known.sites]
    return [key.fold(index).uniform(shape, torch.float32, device) for index, shape in enumerate(shapes)]


def outputs_under(
    network: Network, theta: Tensor, inputs: Inputs, buffers: Buffers | None, numbers: list[Tensor], known: DropoutSites
) -> Tensor:
    """Outputs (S, N, *event) of theta (P,) under S masks, each for all rows, from numbers (S, *shape) for each site."""

    def draw(*own: Tensor) -> Tensor:
        with network.dropping(NumberedMasks(own, known.sites), training=known.training):
            return network.outputs(theta, inputs, buffers)

    large = LARGE["cuda" if theta.is_cuda else "cpu"]
    widest = num_rows(inputs) * max(max(site.units, site.entries) for site in known.sites)
    fit = large // widest
    together = min(len(numbers[0]), fit if fit >= AT_LEAST else min(AT_LEAST, max(1, AT_LEAST * large // widest)))
    if together > 1 and network not in _ALONE:
        try:
            outputs: Tensor = torch.func.vmap(draw, chunk_size=together)(*numbers)
            return outputs
        except (RuntimeError, ValueError) as error:
            looped = torch.stack([draw(*own) for own in zip(*numbers, strict=True)])  # raises if the module is at fault
            _ALONE.add(network)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning("masks run one after the other because vmap refused this module: %s", reason)
            return looped
    return torch.stack([draw(*own) for own in zip(*numbers, strict=True)])


def masked_weights(network: Network, theta: Tensor, example: Inputs, draws: int, key: Key) -> Tensor:
    """Weights (draws, P) that compute the function of theta (P,) under masks drawn by the key.

    (x * keep) W^T = x (W diag(keep))^T: a unit dropped before a linear layer is a column of its weights at zero. Raises
    a TypeError where dropout precedes any other operation. `example` is a row to run the network on.
    """
    known = dropout_sites(network, example, theta)
    views = dict(zip(network.layout.names, network.views(theta.detach()), strict=True))
    seen = LayersAfter(views)
    with torch.no_grad(), network.dropping(seen, training=known.training):
        network.run(list(views.values()), map_inputs(lambda tensor: torch.cat([tensor[:1]] * 2), example))
    for index, site in enumerate(known.sites):
        names = seen.layers.get(index, [])
        whole = all(site.units == views[name].shape[1] and name not in seen.unmasked for name in names)
        if not names or not whole or index in seen.elsewhere:
            raise TypeError(
                f"Dropout number {index + 1} of the network, of {site.units} units, is not a mask of weights: it must "
                "come right before linear layers or, by whole channels, convolutions. Use outputs or predict."
            )
    drawn = theta.detach().repeat(draws, 1)
    own = dict(zip(network.layout.names, network.views(drawn), strict=True))  # (S, *shape) each
    for index, numbers in enumerate(mask_numbers(known, draws, key, theta.device)):
        rate = known.sites[index].rate
        scaled = (numbers >= rate).to(theta.dtype).flatten(1) / (1.0 - rate)  # (S, units)
        for name in seen.layers[index]:
            own[name].mul_(scaled.view(draws, 1, -1, *(1 for _ in own[name].shape[3:])))
    return drawn
