"""The EM lower bound of the log-likelihood, point by point, for discrete hidden variables.

`log_joint` is log p(y_n, z | theta) for each point n and value z, (N, K), or (N, K1, ..., KJ) for several hidden
variables; `q` holds a distribution over z for each point, of the same shape. `hidden` is the number of axes of z; any
leading axes may come before N.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def posterior(log_joint: Tensor, hidden: int = 1) -> Tensor:
    """p(z | y_n, theta), (..., N, K...): the q that makes the bound tight.

    >>> posterior(torch.tensor([[0.0, 0.0]]))
    tensor([[0.5000, 0.5000]])
    """
    return torch.softmax(log_joint.flatten(-hidden), -1).reshape(log_joint.shape)


def log_likelihood(log_joint: Tensor, hidden: int = 1) -> Tensor:
    """log p(y_n | theta) = log sum over z of p(y_n, z | theta), (..., N)."""
    return torch.logsumexp(log_joint.flatten(-hidden), -1)


def q_function(log_joint: Tensor, q: Tensor, hidden: int = 1) -> Tensor:
    """sum_z q_n(z) log p(y_n, z | theta), (..., N): the objective of the M-step."""
    return _expected(log_joint, q).flatten(-hidden).sum(-1)


def entropy(q: Tensor, hidden: int = 1) -> Tensor:
    """Entropy -sum_z q_n(z) log q_n(z), (..., N)."""
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
    """KL(q_n || p(z | y_n, theta)) = log p(y_n | theta) - bound, (..., N), summed without cancellation."""
    total = log_likelihood(log_joint, hidden)
    log_posterior = log_joint - total.reshape(*total.shape, *(1,) * hidden)
    return (torch.xlogy(q, q) - _expected(log_posterior, q)).flatten(-hidden).sum(-1)


def fisher_gradient(
    log_joint: Callable[[Mapping[str, Tensor]], Tensor],
    values: Mapping[str, Tensor],
    q: Tensor | None = None,
    hidden: int = 1,
) -> dict[str, Tensor]:
    """Gradient of sum_n sum_z q_n(z) log p(y_n, z | values) with respect to each named value.

    With q the posterior at the values (None) it is the gradient of the log-likelihood: Fisher's identity.

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
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def _expected(log_probability: Tensor, q: Tensor) -> Tensor:
    """q times the log, entry by entry; zero where q is zero, even if the log is infinite."""
    return q * log_probability.masked_fill(q == 0, 0.0)
