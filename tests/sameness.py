"""When what was stored has come back."""

import torch


def same(first, second):
    """Equal, with equal types all the way down, tensors to the bit and dicts in order."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, float):
        return repr(first) == repr(second)
    return first == second
