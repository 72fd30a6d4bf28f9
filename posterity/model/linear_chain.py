"""Members of a chain of linear layers and activations, as batched products of matrices."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.model.inputs import Inputs
from posterity.networks.entrywise import Erf, Scaled

# Layers that act on each number by itself, so that axes in front of the rows change nothing.
ENTRYWISE = (
    *(nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.LeakyReLU, nn.Softplus, nn.Identity),
    *(nn.Hardtanh, nn.ReLU6, nn.LogSigmoid, nn.Mish),
    *(Erf, Scaled),
)


@dataclass(frozen=True)
class LinearChain:
    """Linear layers and activations one after the other.

    `vmap` runs any module, but takes as long to send one operation on its way as a small layer takes to run, and the
    gradients of its products do not lie in memory as the activations do.
    """

    layers: tuple[nn.Module, ...]

    def takes(self, inputs: Inputs, per_member: bool) -> bool:
        """Whether the first layer takes such rows; an error of the module itself says best why not."""
        first = self.layers[0]
        if not isinstance(first, nn.Linear) or not isinstance(inputs, Tensor):
            return False
        return inputs.dim() == (3 if per_member else 2) and inputs.shape[-1] == first.in_features

    def laid_out(self, inputs: Inputs) -> Inputs:
        """Inputs of one network: rows are well as they are."""
        return inputs

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
            elif inputs.stride(0) == 0 and len(inputs) > 1:  # all see the same rows: one large product serves them
                flat, rows = weight.reshape(-1, weight.shape[-1]), inputs[0].T
                column = None if bias is None else bias.expand(weight.shape[:2]).reshape(-1, 1)
                product = flat @ rows if column is None else torch.addmm(column, flat, rows)
                inputs = product.view(*weight.shape[:2], -1).mT
            # Here as above the weights come first: so their gradients are made as they lie in theta, and those of the
            # activations as these do; where the two differ every operation on both walks through memory in leaps.
            elif bias is None:
                inputs = torch.bmm(weight, inputs.mT).mT
            else:
                inputs = torch.baddbmm(bias.unsqueeze(-1), weight, inputs.mT).mT
        return inputs


def linear_chain(module: nn.Module) -> LinearChain | None:
    """The chain of a module that is nothing but linear layers and activations one after the other, else None.

    >>> linear_chain(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))).layers
    (Linear(in_features=2, out_features=3, bias=True), Tanh(), Linear(in_features=3, out_features=1, bias=True))
    >>> linear_chain(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())) is None
    True
    """
    layers = plain_layers(module, (nn.Linear,))
    # A first layer that works in place would write into rows that the members share.
    return LinearChain(layers) if layers and isinstance(layers[0], nn.Linear) else None


def plain_layers(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> tuple[nn.Module, ...] | None:
    """The layers of a module that calls one after the other, all of these kinds or entrywise; None for another one."""
    if _hooked(module):
        return None
    if type(module) in (*kinds, *ENTRYWISE):
        return (module,)
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return None
    parts = [plain_layers(part, kinds) for part in module]
    return None if None in parts else tuple(layer for part in parts if part is not None for layer in part)


def _hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than its `forward`."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)
