"""A network under many masks at once."""

import logging
from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from posterity.model.dropout_sites import DropoutSites
from posterity.model.inputs import Inputs, num_rows
from posterity.model.network import Buffers, Network
from posterity.numerics.masks import NumberedMasks
from posterity.numerics.random import Key

logger = logging.getLogger("posterity")

LARGE = {"cpu": 1 << 20, "cuda": 1 << 26}  # entries of the largest masked tensor for the draws that go together
AT_LEAST = 8  # draws go together up to so many times that size: they share what comes before the first dropout

_ALONE: WeakSet[Network] = WeakSet()  # those that vmap refused


def mask_numbers(known: DropoutSites, draws: int, key: Key, device: torch.device) -> list[Tensor]:
    """Uniform numbers (draws, *shape) for each site, in float32 whatever the network's number type."""
    if not all(site.clear for site in known.sites):
        raise ValueError(
            "One mask a draw: the rows cannot be told in every mask of this network. Use one_mask_a_draw=False."
        )
    shapes = [(draws, *site.shape) for site in known.sites]
    return [key.fold(index).uniform(shape, torch.float32, device) for index, shape in enumerate(shapes)]


def outputs_under(
    network: Network,
    theta: Tensor,
    inputs: Inputs,
    buffers: Buffers | None,
    numbers: Sequence[Tensor],
    known: DropoutSites,
) -> Tensor:
    """Outputs (S, N, *event) of theta (P,) under S masks, each for all rows, from numbers (S, *shape) for each site."""

    def one(*own: Tensor) -> Tensor:
        with network.dropping(NumberedMasks(own, known.sites), training=known.training):
            return network.outputs(theta, inputs, buffers)

    together = min(len(numbers[0]), _together(known, num_rows(inputs), theta.device))
    if together > 1 and network not in _ALONE:
        try:
            outputs: Tensor = torch.func.vmap(one, chunk_size=together)(*numbers)
            return outputs
        except (RuntimeError, ValueError) as error:
            looped = torch.stack([one(*own) for own in zip(*numbers, strict=True)])  # raises if the module is at fault
            _ALONE.add(network)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning("masks run one after the other because vmap refused this module: %s", reason)
            return looped
    return torch.stack([one(*own) for own in zip(*numbers, strict=True)])


def _together(known: DropoutSites, rows: int, device: torch.device) -> int:
    """How many draws go together."""
    large = LARGE["cuda" if device.type == "cuda" else "cpu"]
    widest = rows * max(max(site.units, site.entries) for site in known.sites)
    fit = large // widest
    return fit if fit >= AT_LEAST else min(AT_LEAST, max(1, AT_LEAST * large // widest))
