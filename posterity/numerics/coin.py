"""The entropy of a coin."""

import torch
from torch import Tensor
from torch.nn import functional


def coin_entropy(logit: Tensor) -> Tensor:
    """-p log p - (1 - p) log(1 - p) in nats, for p = sigmoid(logit); finite at any logit.

    >>> coin_entropy(torch.tensor([0.0, 200.0])).abs()
    tensor([0.6931, 0.0000])
    """
    heads = torch.sigmoid(logit)
    return -(heads * functional.logsigmoid(logit) + (1.0 - heads) * functional.logsigmoid(-logit))
