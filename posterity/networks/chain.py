"""Layers in a row that remember how they were built."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


class Chain(nn.Sequential):
    """Base of the networks here: takes the layers and the constructor's arguments, and keeps both.

    Weights start as torch starts them, from torch's global generator: call `torch.manual_seed` first.
    """

    def __init__(self, layers: Sequence[nn.Module], config: Mapping[str, Any]) -> None:
        super().__init__(*layers)
        self._config = dict(config)

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments as plain values: `type(net)(**net.config)` has the same architecture."""
        return {name: list(value) if isinstance(value, list) else value for name, value in self._config.items()}

    def __getitem__(self, index: slice | int) -> Any:
        """One layer, or for a slice the `nn.Sequential` of those layers."""
        # nn.Sequential would call this class's constructor with the sliced layers.
        return nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)
