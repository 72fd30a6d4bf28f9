"""The bound of EM on a log-likelihood, point by point, for hidden variables with finitely many values.

`log_joint` is log p(y_n, z | theta) for each point n and value z, (N, K), or (N, K1, ..., KJ) for several hidden
variables; `q` are distributions over z of the same shape, one for each point. Any leading axes may come before N if
`hidden` says how many axes are those of z.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def posterior(log_joint: Tensor, hidden: int = 1) -> Tensor:
    """p(z | y_n, theta): the distribution that makes the bound tight, (..., N, K...).

    >>> posterior(torch.tensor([[0.0, 0.0]]))
    tensor([[0.5000, 0.5000]])
    """
    flat = log_joint.flatten(-hidden)
    return torch.softmax(flat, -1).reshape(log_joint.shape)


def log_likelihood(log_joint: Tensor, hidden: int = 1) -> Tensor:
    """log p(y_n | theta) = log sum over z of p(y_n, z | theta), (..., N)."""
    return torch.logsumexp(log_joint.flatten(-hidden), -1)


def q_function(log_joint: Tensor, q: Tensor, hidden: int = 1) -> Tensor:
    """sum_z q_n(z) log p(y_n, z | theta), (..., N): what the M-step makes as large as possible."""
    return _expected(log_joint, q).flatten(-hidden).sum(-1)


def entropy(q: Tensor, hidden: int = 1) -> Tensor:
    """-sum_z q_n(z) log q_n(z), (..., N)."""
    return -torch.xlogy(q, q).flatten(-hidden).sum(-1)


def jensen_bound(log_joint: Tensor, q: Tensor, hidden: int = 1) -> Tensor:
    """sum_z q_n(z) [log p(y_n, z | theta) - log q_n(z)] <= log p(y_n | theta), (..., N).

    >>> log_joint = torch.tensor([[-1.0, -2.0]])
    >>> tight = jensen_bound(log_joint, posterior(log_joint))
    >>> bool(torch.isclose(tight, log_likelihood(log_joint)))
    True
    """
    return q_function(log_joint, q, hidden) + entropy(q, hidden)


def kl_gap(log_joint: Tensor, q: Tensor, hidden: int = 1) -> Tensor:
    """KL(q_n || p(z | y_n, theta)) = log p(y_n | theta) - bound, (..., N), summed so that it keeps its digits."""
    total = log_likelihood(log_joint, hidden)
    log_posterior = log_joint - total.reshape(*total.shape, *(1,) * hidden)
    return (torch.xlogy(q, q) - _expected(log_posterior, q)).flatten(-hidden).sum(-1)


def fisher_gradient(
    log_joint: Callable[[Mapping[str, Tensor]], Tensor],
    values: Mapping[str, Tensor],
    q: Tensor | None = None,
    hidden: int = 1,
) -> dict[str, Tensor]:
    """Gradient in the values of sum_n sum_z q_n(z) log p(y_n, z | values), for each name.

    With q the posterior at the values (None) it is that of the log-likelihood itself: Fisher's identity.

    >>> y = torch.tensor([[0.0], [1.0]])
    >>> log_joint = lambda values: -0.5 * (y - values["means"]).square()
    >>> fisher_gradient(log_joint, {"means": torch.tensor([0.0, 1.0])})["means"]
    tensor([ 0.3775, -0.3775])
    """
    leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        table = log_joint(leaves)
        weights = posterior(table.detach(), hidden) if q is None else q
        total = q_function(table, weights, hidden).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def _expected(log_probability: Tensor, q: Tensor) -> Tensor:
    """q times the log, entry by entry; nothing where q is zero, whatever the log."""
    impossible = q == 0
    return q * log_probability.masked_fill(impossible, 0.0)
