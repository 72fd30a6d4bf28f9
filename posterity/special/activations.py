"""Activation functions by name, and their slopes."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.errors import shown, unknown

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": F.elu,
    "erf": torch.erf,
    "gelu": F.gelu,
    "identity": torch.clone,
    "leaky_relu": F.leaky_relu,
    "relu": torch.relu,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sin": torch.sin,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}


def activation_function(activation: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function of an activation given by name, or check one given as a function of tensors.

    The function is for tensors on the CPU; a module is copied there.

    >>> activation_function("relu")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(unknown("activation", activation, ACTIVATIONS))
        return ACTIVATIONS[activation]
    if isinstance(activation, type) or not callable(activation):
        raise TypeError(
            'An activation must be a name such as "tanh", or a function of a tensor, entry by entry. '
            f"Got {shown(activation)}."
        )
    if isinstance(activation, nn.Module):
        activation = deepcopy(activation).cpu()
    probe = torch.tensor([[-1.5, 0.5, 1.0]], dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            values = activation(probe.clone())
    except RuntimeError as error:
        raise ValueError(
            f"An activation must take tensors of float64 on the CPU. Got an error: {str(error).splitlines()[0]} "
            "Give a module with parameters as module.double()."
        ) from error
    if not isinstance(values, Tensor) or values.shape != probe.shape or not values.isfinite().all():
        raise ValueError(
            "An activation must give a finite number for each entry of its input. "
            f"Got {shown(values)} for an input of shape {tuple(probe.shape)}."
        )
    return activation


def slope_of(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the derivative of a function that works entry by entry.

    >>> slope_of(torch.square)(torch.tensor([1.0, -2.0]))
    tensor([ 2., -4.])
    """

    def slope(values: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = values.detach().clone().requires_grad_()  # a tensor made in inference mode has no graph
            outputs = function(leaf.clone())  # the function may work in place
            if not outputs.requires_grad:
                return torch.zeros_like(values)
            (grad,) = torch.autograd.grad(outputs.sum(), leaf)
        return grad

    return slope
