"""Gradients through a chain of linear layers without autograd's graph of it: fewer calls, and no copies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from posterity.model.layer_chains import LinearChain

_ops: Any = torch.ops.aten

_ALIGNED = 64  # bytes: new tensors begin at multiples, and products at other addresses are rounded otherwise

Slope = Callable[[Tensor, nn.Module, Tensor, Tensor], Tensor]  # of the gradient, the layer, its input and its output

# Derivatives as autograd computes them.
_SLOPES: dict[type[nn.Module], Slope] = {
    nn.ReLU: lambda grad, layer, x, y: _ops.threshold_backward(grad, y, 0),
    nn.Tanh: lambda grad, layer, x, y: _ops.tanh_backward(grad, y),
    nn.Sigmoid: lambda grad, layer, x, y: _ops.sigmoid_backward(grad, y),
    nn.SiLU: lambda grad, layer, x, y: _ops.silu_backward(grad, x),
    nn.GELU: lambda grad, layer, x, y: _ops.gelu_backward(grad, x, approximate=layer.approximate),
    nn.Identity: lambda grad, layer, x, y: grad,
}


@dataclass(frozen=True)
class Direct:
    """A chain of linear layers and activations, with the index of each layer's weight and bias among the weights."""

    layers: tuple[tuple[nn.Module, int, int | None], ...]

    @classmethod
    def of(cls, chain: object, slots: Sequence[tuple[dict[str, Any], str, int]]) -> "Direct | None":
        """The layers of a `LinearChain`; None where autograd is needed, as for any other module.

        `slots` are the trained weights: the table of the layer, the name there, and the index among the weights.
        """
        if not isinstance(chain, LinearChain):
            return None
        indices = {(id(table), name): index for table, name, index in slots}
        steps: list[tuple[nn.Module, int, int | None]] = []
        for layer in chain.layers:
            if isinstance(layer, nn.Linear):
                own = {name: indices.get((id(layer._parameters), name)) for name in ("weight", "bias")}
                if any(own[name] is None and layer._parameters[name] is not None for name in own):
                    return None  # frozen
                assert own["weight"] is not None
                steps.append((layer, own["weight"], own["bias"]))
            elif type(layer) not in _SLOPES or getattr(layer, "inplace", False):
                return None
            else:
                steps.append((layer, -1, None))
        used = [index for _, *own in steps for index in own if index is not None and index >= 0]
        return cls(tuple(steps)) if len(used) == len({*used}) == len(indices) else None

    def taking(self, inputs: object) -> "Direct | None":
        """Itself if the first layer takes such rows as they are, outside of autocast; else None."""
        first = self.layers[0][0]
        assert isinstance(first, nn.Linear)
        if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.shape[1] != first.in_features:
            return None
        return None if torch.is_autocast_enabled(inputs.device.type) else self

    @torch.no_grad()
    def gradients(self, weights: Sequence[Tensor], inputs: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        """Write the gradient of a function of the outputs to the `.grad` of each weight, in place of what it holds.

        `head` is given the outputs (n, C), and returns their gradient.
        """
        x, kept = inputs, []
        for layer, weight, bias in self.layers:
            kept.append(x)
            if weight < 0:
                x = layer.forward(x)
            elif bias is None:
                x = torch.mm(x, weights[weight].t())
            else:
                x = torch.addmm(weights[bias], x, weights[weight].t())
        grad, after = head(x), x
        for number in range(len(self.layers) - 1, -1, -1):
            layer, weight, bias = self.layers[number]
            before = kept[number]
            if weight < 0:
                grad = _SLOPES[type(layer)](grad, layer, before, after)
            else:
                slot = cast(Tensor, weights[weight].grad)
                if slot.data_ptr() % _ALIGNED:
                    slot.copy_(torch.mm(grad.t(), before))
                else:
                    torch.mm(grad.t(), before, out=slot)
                if bias is not None:
                    torch.sum(grad, 0, out=weights[bias].grad)
                if number:
                    grad = grad.mm(weights[weight])
            after = before
