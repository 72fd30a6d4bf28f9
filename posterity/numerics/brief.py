"""Short texts of values, without the numbers of tensors, for the reprs of larger ones."""

import dataclasses
import numbers
from typing import Any

from torch import Tensor, nn

_LONGEST = 160  # characters
_MOST = 6  # items of a list, or layers of a module


def brief(value: object) -> str:
    """A value on one line: numbers with 4 digits, tensors by their range and shape, dataclasses by their fields.

    Fields that are None, False or empty are left out.

    >>> import torch
    >>> from posterity.priors import Normal
    >>> brief(Normal(torch.tensor([0.12345, 2.0, 1.0])))
    'Normal(scale=0.1235 .. 2 of shape (3,), mean=0)'
    """
    return _cut(_brief(value))


def repr_of_set(value: Any) -> str:
    """The repr of a dataclass without the fields that are stored only if set, where they are not.

    >>> from posterity.priors import Normal
    >>> Normal(0.5), Normal()
    (Normal(scale=0.5, mean=0.0), Normal(scale=1.0, mean=0.0, chosen='left out'))
    """
    shown = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.repr}
    unset = {f.name for f in dataclasses.fields(value) if "stored" in f.metadata and not shown[f.name]}
    return f"{type(value).__name__}({', '.join(f'{k}={v!r}' for k, v in shown.items() if k not in unset)})"


def _brief(value: object) -> str:
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, numbers.Integral)):
        return f"{value:.4g}"
    if isinstance(value, dict):
        items = [f"{name}: {_brief(item)}" for name, item in list(value.items())[:_MOST]]
        return f"{{{', '.join(items + ['...'] * (len(value) > _MOST))}}}"
    if isinstance(value, (tuple, list)):
        items = [_brief(item) for item in value[:_MOST]]
        return f"({', '.join(items + ['...'] * (len(value) > _MOST))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        known = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr)
        fields = [f"{name}={_brief(item)}" for name, item in known if isinstance(item, Tensor) or _says(item)]
        return f"{type(value).__name__}({', '.join(fields)})"
    return " ".join(repr(value).split())


def _says(item: object) -> bool:
    return item is not None and item is not False and (not isinstance(item, (tuple, list, dict, str)) or bool(item))


def _tensor(value: Tensor) -> str:
    if value.is_meta or not value.numel() or value.is_complex():
        return f"tensor of shape {tuple(value.shape)}"
    low, high = (float(end) for end in value.detach().double().aminmax())
    if low == high:
        return f"{low:.4g}"
    return f"{low:.4g} .. {high:.4g} of shape {tuple(value.shape)}"


def brief_module(module: nn.Module) -> str:
    """The kind of a module and its layers in the order of their definition, on one line.

    >>> brief_module(nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1)))
    'Sequential of Linear(2, 10), Tanh, Linear(10, 1)'
    """
    name = type(module).__name__
    layers = [_layer(part) for part in module.modules() if part is not module and not any(part.children())]
    if not layers:
        return _layer(module)
    if len(layers) > _MOST:
        layers = [*layers[: _MOST - 2], f"{len(layers) - _MOST + 1} more", layers[-1]]
    return _cut(f"{name} of {', '.join(layers)}")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _layer(module: nn.Module) -> str:
    """A layer with the whole numbers that its repr begins with, such as inputs and outputs."""
    sizes = []
    for item in module.extra_repr().split(", "):
        value = item.partition("=")[2] or item
        if not value.isdigit():
            break
        sizes.append(value)
    return f"{type(module).__name__}({', '.join(sizes)})" if sizes else type(module).__name__
