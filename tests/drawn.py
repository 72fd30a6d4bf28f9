"""Test data that are the same numbers on every device, and the states of torch's own generators."""

import torch
from torch import Tensor

from posterity.numerics import Key


def normal(key: Key, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers from the CPU, on the default device: a GPU draws others by the same key."""
    return key.normal(shape, dtype, "cpu").to(torch.get_default_device())


def uniform(key: Key, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers below 1, likewise."""
    return key.uniform(shape, dtype, "cpu").to(torch.get_default_device())


def labels_of(probs: Tensor, key: Key) -> Tensor:
    """A label for each row of probabilities (..., C), likewise."""
    flat = probs.reshape(-1, probs.shape[-1]).cpu()
    drawn = torch.multinomial(flat, 1, generator=key.generator("cpu"))
    return drawn.reshape(probs.shape[:-1]).to(probs.device)


def generator_states() -> Tensor:
    """Of the CPU and of all GPUs, as one tensor: equal as long as nothing was drawn without a key."""
    return torch.cat([torch.get_rng_state(), *torch.cuda.get_rng_state_all()])
