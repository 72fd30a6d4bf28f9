"""What the problems of `peers_quality` share: contenders, batches, a training loop, and each library's predictions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 128
IVON_DRAWS, BAYESIAN_TORCH_DRAWS = 64, 20
MEMBERS = 5
OURS = "posterity"
Rows = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Contender:
    """A way to a posterior: `fit(data, point, seed)` gives the function that predicts.

    Contenders of the same `work` are compared. `source` says where the settings come from. `after_point` is whether
    the fit begins at the point estimate that all of these share, whose training is then part of its cost.
    """

    library: str
    work: str
    fit: Callable[[Any, nn.Module, int], Callable[[Tensor], Any]]
    source: str
    after_point: bool = False


def batches(inputs: Tensor, targets: Tensor, size: int, steps: int, seed: int) -> Rows:
    """Yield `steps` batches from passes over the rows, each in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    step = 0
    while True:
        for index in torch.randperm(len(targets), generator=generator).split(size):
            if step == steps:
                return
            step += 1
            yield inputs[index], targets[index]


def descend(
    optimizer: torch.optim.Optimizer, loss: Callable[[Tensor, Tensor], Tensor], rows: Rows, schedule: Any = None
) -> None:
    """Take a step of the optimiser, and one of the schedule, with each batch."""
    for inputs, targets in rows:
        optimizer.zero_grad()
        loss(inputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if schedule is not None:
            schedule.step()


def adam(module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], rows: Rows, steps: int, **given: float) -> None:
    """Train by torch's Adam with a step size that falls to zero along a cosine."""
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), **given)  # type: ignore[arg-type]
    descend(optimizer, loss, rows, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps))
    module.eval()


def ivon(
    optimizer: Any, loss: Callable[[Tensor, Tensor], Tensor], rows: Rows, samples: int = 1, schedule: Any = None
) -> None:
    """Train by an IVON, ours or ivon-opt's: both have the same verbs."""
    for inputs, targets in rows:
        for _ in range(samples):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                loss(inputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if schedule is not None:
            schedule.step()


@torch.no_grad()
def ivon_outputs(optimizer: Any, module: nn.Module, inputs: Tensor, size: int = 1000) -> Tensor:
    """Return outputs (S, N, C) at draws of the weights by ivon-opt."""
    draws = []
    for _ in range(IVON_DRAWS):
        with optimizer.sampled_params():
            draws.append(torch.cat([module(part) for part in inputs.split(size)]))  # type: ignore[no-untyped-call]
    return torch.stack(draws)


def bayesian_torch(module: nn.Module, **given: Any) -> nn.Module:
    """Turn a module into bayesian-torch's, in place, with the prior and the start of its README."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn  # type: ignore[import-not-found]

    settings = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    dnn_to_bnn(module, {**settings, "type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5, **given})
    return module


def bayesian_torch_loss(
    module: nn.Module, fit: Callable[[Tensor, Tensor], Tensor], kl_rows: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the mean loss of a batch plus the KL over `kl_rows`."""
    from bayesian_torch.models.dnn_to_bnn import get_kl_loss

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return fit(module(inputs), targets) + get_kl_loss(module) / kl_rows  # type: ignore[no-any-return]

    return loss


@torch.no_grad()
def repeated_outputs(module: nn.Module, inputs: Tensor, draws: int, size: int = 1000) -> Tensor:
    """Return outputs (S, N, C) of a module that draws its weights in each call."""
    parts = inputs.split(size)  # type: ignore[no-untyped-call]
    return torch.stack([torch.cat([module(part) for part in parts]) for _ in range(draws)])
