"""Masks of units as masks of weights."""

import torch
from torch import Tensor

from posterity.model.dropout_sites import dropout_sites
from posterity.model.inputs import Inputs, map_inputs
from posterity.model.mask_draws import mask_numbers
from posterity.model.network import Network
from posterity.numerics.masks import LayersAfter
from posterity.numerics.random import Key


def masked_weights(network: Network, theta: Tensor, example: Inputs, draws: int, key: Key) -> Tensor:
    """Weights (draws, P) whose function is that of theta (P,) under the masks that the key draws.

    (x * keep) W^T = x (W diag(keep))^T: a unit that is dropped before a linear layer is a column of its weights at
    zero. A TypeError where dropout comes before anything else. `example` is a row to run the network on.
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
    for index, (site, numbers) in enumerate(
        zip(known.sites, mask_numbers(known, draws, key, theta.device), strict=True)
    ):
        scaled = (numbers >= site.rate).to(theta.dtype).flatten(1) / (1.0 - site.rate)  # (S, units)
        for name in seen.layers[index]:
            own[name].mul_(scaled.view(draws, 1, -1, *(1 for _ in own[name].shape[3:])))
    return drawn
