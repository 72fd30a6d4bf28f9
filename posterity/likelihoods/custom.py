"""Likelihoods from functions of the user."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import BadData, shown
from posterity.likelihoods.likelihood import Likelihood, event_shape
from posterity.numerics.random import Key


@dataclass(frozen=True)
class Custom(Likelihood):
    """A likelihood given by functions.

    **Math**: `log_density(outputs, targets)` takes outputs (N, *event) and targets (N, ...) and gives log p(y_n | f_n),
    (N,), each from its own row alone; `event_dims` is the number of axes of the event. The Hessian of -log p is
    taken by autodiff. The Fisher information E[s s^T], s the gradient of log p in f at y ~ p(y | f), is an average
    over `fisher_draws` targets from `sampler(outputs, key)`, the same ones at every call: positive semi-definite and
    unbiased. `mean_function(outputs)` and `variance_function(outputs)` give E[y | f] and Var[y | f] entry by entry.

    **Limit**: a method that needs a missing function raises a TypeError that names it; training by gradients and log
    scores need `log_density` alone. `log_density` should keep the constants of the density, or evidences and scores are
    off by them. Functions are not stored with a posterior: pass it again, `load(path, network, likelihood=...)`.

    **Cost**: the cost of the functions; the Hessian takes D backward passes, the Fisher information `fisher_draws`.

    **References**: Kunstner et al. (2019), Limitations of the empirical Fisher approximation.

    **Example**:

    >>> def laplace(outputs, targets):
    ...     return -(targets - outputs).abs().sum(-1) - outputs.shape[-1] * torch.log(torch.tensor(2.0))
    >>> Custom(laplace).log_prob(torch.zeros(1, 1), torch.tensor([[3.0]]))
    tensor([-3.6931])
    """

    log_density: Callable[[Tensor, Tensor], Tensor]
    sampler: Callable[[Tensor, Key], Tensor] | None = None
    mean_function: Callable[[Tensor], Tensor] | None = None
    variance_function: Callable[[Tensor], Tensor] | None = None
    event_dims: int = 1
    fisher_draws: int = 100

    def __post_init__(self) -> None:
        for name in ("log_density", "sampler", "mean_function", "variance_function"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "log_density"):
                raise TypeError(f"Custom.{name} must be a function. Got {shown(value)}.")
        for name, least in (("event_dims", 0), ("fisher_draws", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Custom.{name} must be a whole number from {least} up. Got {shown(value)}.")

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.dim() != 1 + self.event_dims:
            raise BadData(
                f"Custom: outputs must have {self.event_dims} axes after the rows. Got {tuple(outputs.shape)}. "
                f"Give Custom(..., event_dims={outputs.dim() - 1})."
            )
        if not targets.dim() or len(targets) != len(outputs):
            raise BadData(
                f"Custom: targets must have one row for each of the {len(outputs)} rows of outputs. "
                f"Got {tuple(targets.shape)}. Pair every input with its target."
            )
        value = self.log_density(outputs[:2], targets[:2])  # two rows suffice to check the shape
        if value.shape != outputs[:2].shape[:1]:
            raise ValueError(
                f"Custom.log_density must give one number for each row, {tuple(outputs[:2].shape[:1])}. "
                f"Got {tuple(value.shape)}. Sum it over the event: .sum(-1)."
            )
        return targets

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        lead = outputs.shape[: outputs.dim() - 1 - self.event_dims]
        if not lead:
            return self.log_density(outputs, targets)
        # Leading axes become rows: the function sees (N, *event) only, and no loop is needed.
        rows = targets.expand(*lead, *targets.shape).reshape(-1, *targets.shape[1:])
        return self.log_density(self._as_rows(outputs), rows).reshape(*lead, len(targets))

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        return self._mapped("sampler", "sample", outputs, key)

    def mean(self, outputs: Tensor) -> Tensor:
        return self._mapped("mean_function", "mean", outputs)

    def variance(self, outputs: Tensor) -> Tensor:
        return self._mapped("variance_function", "variance", outputs)

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows, size = event_shape("Custom", outputs, self.event_dims)

        def negative(flat: Tensor) -> Tensor:
            return -self.log_prob(flat.reshape(outputs.shape), targets).sum()

        flat = outputs.reshape(*rows, size)
        # A row's density depends on that row alone, so one backward pass gives the same column of every row.
        pull = torch.func.vjp(torch.func.grad(negative), flat)[1]
        basis = torch.eye(size, dtype=flat.dtype, device=flat.device)
        hessian = torch.stack([pull(column.expand(flat.shape))[0] for column in basis], dim=-1)
        return 0.5 * (hessian + hessian.mT)

    def output_fisher(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        """Average s s^T over targets from `sampler`, (..., N, D, D)."""
        if event_dims not in (None, self.event_dims):
            raise ValueError(
                f"Custom.output_fisher: the event has {self.event_dims} axes. Got event_dims {event_dims}. "
                "Pass the outputs as the network gave them."
            )
        rows, size = event_shape("Custom", outputs, self.event_dims)
        sampler, flat = self._needed("sampler", "output_fisher"), self._as_rows(outputs)
        total = flat.new_zeros(len(flat), size, size)
        for draw in range(self.fisher_draws):
            targets = sampler(flat, Key(0).fold("fisher").fold(draw))
            score = torch.func.grad(lambda f, y=targets: self.log_density(f, y).sum())(flat).reshape(len(flat), size)
            total = total + score.unsqueeze(-1) * score.unsqueeze(-2)
        return (total / self.fisher_draws).reshape(*rows, size, size)

    def _as_rows(self, outputs: Tensor) -> Tensor:
        """Reshape outputs (..., N, *event) to (rows, *event)."""
        return outputs.reshape(-1, *outputs.shape[outputs.dim() - self.event_dims :])

    def _mapped(self, name: str, method: str, outputs: Tensor, *options: Key) -> Tensor:
        values = self._needed(name, method)(self._as_rows(outputs), *options)
        return values.reshape(*outputs.shape[: outputs.dim() - self.event_dims], *values.shape[1:])

    def _needed(self, name: str, method: str) -> Callable[..., Tensor]:
        function: Callable[..., Tensor] | None = getattr(self, name)
        if function is None:
            other = " Of the curvatures, Hessian() and EmpiricalFisher() need none." if name == "sampler" else ""
            raise TypeError(f"Custom.{method} needs {name}. Got none. Give Custom(..., {name}=...).{other}")
        return function
