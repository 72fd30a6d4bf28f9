"""Chains of linear layers and activations, whose members run as batched products."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.model.batch import Inputs
from posterity.networks.layers import Erf, Scaled

# Entrywise layers, to which further leading axes make no difference.
ENTRYWISE = (
    *(nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.LeakyReLU, nn.Softplus, nn.Identity),
    *(nn.Hardtanh, nn.ReLU6, nn.LogSigmoid, nn.Mish),
    *(Erf, Scaled),
)


@dataclass(frozen=True)
class LinearChain:
    """A sequence of linear layers and activations.

    `vmap` runs any module, but its overhead per operation equals the time of a small layer, and the gradients of its
    products have another memory layout than the activations.
    """

    layers: tuple[nn.Module, ...]

    def takes(self, inputs: Inputs, per_member: bool) -> bool:
        """Whether the first layer takes such rows; if not, the module itself raises the clearest error."""
        first = self.layers[0]
        if not isinstance(first, nn.Linear) or not isinstance(inputs, Tensor):
            return False
        return inputs.dim() == (3 if per_member else 2) and inputs.shape[-1] == first.in_features

    def run(self, inputs: Tensor, count: int, per_member: bool) -> Tensor:
        """Outputs (M, n, C) of rows (n, D) or (M, n, D); weights of the layers have a leading axis M or are shared."""
        return self.through(inputs if per_member else inputs.expand(count, *inputs.shape))

    def through(self, inputs: Tensor) -> Tensor:
        """Outputs (M, n, C) of (M, n, D)."""
        for layer in self.layers:
            if not isinstance(layer, nn.Linear):
                inputs = layer(inputs)
                continue
            weight: Tensor = layer.weight
            bias: Tensor | None = layer.bias
            if weight.dim() == 2:
                inputs = F.linear(inputs, weight)
                inputs = inputs if bias is None else inputs + bias.reshape(-1, 1, bias.shape[-1])
            elif inputs.stride(0) == 0 and len(inputs) > 1:  # shared rows: one large product for all members
                flat, rows = weight.reshape(-1, weight.shape[-1]), inputs[0].T
                column = None if bias is None else bias.expand(weight.shape[:2]).reshape(-1, 1)
                product = flat @ rows if column is None else torch.addmm(column, flat, rows)
                inputs = product.view(*weight.shape[:2], -1).mT
            else:
                inputs = products(inputs, weight, bias)
        return inputs


def products(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs (M, n, O) of linear layers with weights (M, O, D) and biases (M, O) for rows (M, n, D).

    As for shared rows the weights come first, so that gradients of weights have the memory layout of theta, and
    gradients of activations that of the activations; operations on unequal layouts are slow.
    """
    if bias is None:
        return torch.bmm(weight, inputs.mT).mT
    return torch.baddbmm(bias.unsqueeze(-1), weight, inputs.mT).mT


def linear_chain(module: nn.Module) -> LinearChain | None:
    """The chain of a module that is a sequence of linear layers and activations, else None.

    >>> linear_chain(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))).layers
    (Linear(in_features=2, out_features=3, bias=True), Tanh(), Linear(in_features=3, out_features=1, bias=True))
    >>> linear_chain(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())) is None
    True
    """
    layers = plain_layers(module, (nn.Linear,))
    # A first layer that works in place would write into rows shared by the members.
    return LinearChain(layers) if layers and isinstance(layers[0], nn.Linear) else None


def plain_layers(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> tuple[nn.Module, ...] | None:
    """The layers of a sequential module, all of these kinds or entrywise; None for any other module."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module):  # a call does more than the `forward` of the class
        return None
    if type(module) in (*kinds, *ENTRYWISE):
        return (module,)
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    parts = [plain_layers(part, kinds) for part in module]
    return None if None in parts else tuple(layer for part in parts if part is not None for layer in part)
