"""A likelihood of counts for tests: neither Gaussian nor of classes, written from the abstract interface alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Counts(Likelihood):
    """y ~ Poisson(exp(f)) for each entry of the output."""

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.shape != outputs.shape or bool((targets < 0).any()):
            raise BadData("Counts: targets must be counts shaped as the outputs.")
        return targets

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        entries = targets * outputs - outputs.exp() - torch.lgamma(targets + 1.0)
        return entries.sum(tuple(range(1 - targets.dim(), 0))) if targets.dim() > 1 else entries

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        return torch.poisson(outputs.exp(), generator=key.generator(outputs.device))

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def variance(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.output_fisher(outputs)

    def output_fisher(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        return torch.diag_embed(outputs.exp())
