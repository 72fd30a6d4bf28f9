"""A Gaussian at a mode, from the curvature there."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.curvature import Curvature, GaussNewton
from posterity.curvature.curvature import over_members
from posterity.evidence import laplace_evidence
from posterity.inference.method import Info, Method, Target
from posterity.methods.structure import Full, Structure
from posterity.model.data import Batch, Data, Feed, check_batch_size
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.numerics.random import Key
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.linearized import Linearized
from posterity.posteriors.posterior import Posterior


class LaplaceState(NamedTuple):
    """theta, and the sums over the rows seen so far: curvature and log-likelihood, both untempered, in float64."""

    theta: Tensor
    curvature: Tensor
    log_likelihood: Tensor
    buffers: Buffers


@dataclass(frozen=True)
class Laplace(Method):
    """The Laplace approximation: N(theta*, Lambda^-1) with Lambda the curvature of the negative log posterior.

    **Math**: Lambda = lp C + pp diag(-d^2 log p / d theta^2), C the TOTAL curvature of the negative log-likelihood over
    all data. log evidence = log density at theta* + R/2 log 2 pi - 1/2 logdet Lambda.

    **Limit**: exact for linear models with Gaussian noise; local: it sees nothing but the curvature at theta*, which
    must be a mode (start from MAP).

    **Cost**: one pass over the data; `Full` holds R x R numbers and factors them once, R^3 / 3.

    **References**: MacKay (1992); Ritter et al. (2018); Immer et al. (2021).

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 10).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=10)
    >>> q, _ = po.infer(po.methods.MAP(steps=500, batch_size=None), joint, (x, 2 * x))
    >>> q, _ = po.infer(po.methods.Laplace(), joint, (x, 2 * x), start=q)
    >>> bool(q.predict(torch.tensor([[10.0]])).std > q.predict(torch.tensor([[0.0]])).std)
    True
    """

    curvature: Curvature = field(default_factory=GaussNewton)
    structure: Structure = field(default_factory=Full)
    batch_size: int | None = 1024

    def __post_init__(self) -> None:
        check_batch_size("Laplace.batch_size", self.batch_size)
        for name, kind in (("curvature", Curvature), ("structure", Structure)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"Laplace.{name} must be of kind {kind.__name__}. Got {getattr(self, name)!r}.")

    def batches(self, data: Data, key: Key) -> Feed:
        """One pass over all rows."""
        return data.passes(self.batch_size)

    def init(self, joint: Target, theta: Tensor, key: Key) -> LaplaceState:
        """Zero sums at theta."""
        if isinstance(joint, Joint) and joint.network.mixes_rows:
            raise ValueError(
                "Laplace needs a likelihood that factorises over rows, but a batch norm layer uses batch statistics in "
                "evaluation mode. Make it with track_running_stats=True."
            )
        size = joint.num_weights if joint.random_indices is None else joint.random_indices.numel()
        lead = theta.shape[:-1]
        zeros = theta.new_zeros((), dtype=torch.float64)
        buffers = dict(joint.network.buffers) if isinstance(joint, Joint) else {}
        return LaplaceState(
            theta.clone(), zeros.expand(*lead, *self.structure.shape(size)).clone(), zeros.expand(lead).clone(), buffers
        )

    def step(self, joint: Target, state: LaplaceState, batch: Batch, key: Key) -> tuple[LaplaceState, Info]:
        """Add the curvature and the log-likelihood of these rows."""
        buffers = state.buffers or None
        with torch.no_grad():
            part = over_members(
                lambda theta, rows, b: self.structure.of(self.curvature, joint, theta, rows, b),
                state.theta,
                batch,
                _per_member(joint, state.theta, buffers),
            )
            rows = joint.log_likelihood(state.theta, batch, buffers)
            if isinstance(joint, Joint):
                rows = rows * (batch.size / joint.num_data)  # the sum over these rows, not its estimate of the whole
        log_likelihood = state.log_likelihood + rows.to(torch.float64)
        return state._replace(curvature=state.curvature + part, log_likelihood=log_likelihood), {
            "log_likelihood": log_likelihood
        }

    def posterior(self, joint: Target, kept: Sequence[LaplaceState]) -> Posterior:
        """The Gaussian, seen through the network's linearisation where there is a network."""
        theta, curvature, log_likelihood, buffers = kept[-1]
        tempering = joint.tempering
        weights = theta[..., : joint.num_weights].detach().clone()
        total = self.structure.tempered(curvature, tempering.likelihood_power)
        if isinstance(joint, Joint):
            prior = joint.bound_prior.precision(weights).to(torch.float64)
            index = joint.random_indices
            prior = prior if index is None else prior.index_select(-1, index)
            power = tempering.prior_power
            prior = prior * (power.to(prior).unsqueeze(-1) if isinstance(power, Tensor) else power)
            total = self.structure.with_diagonal(total, prior)
        precision = self.structure.precision(total)
        powers = (
            p.to(log_likelihood) if isinstance(p, Tensor) else p
            for p in (tempering.likelihood_power, tempering.prior_power)
        )
        log_joint = next(powers) * log_likelihood + next(powers) * joint.log_prior(theta).to(torch.float64)
        fitted = joint.fitted(theta)
        gaussian = Gaussian(fitted, weights, precision, buffers, laplace_evidence(log_joint, precision))
        return gaussian if isinstance(joint, Density) else Linearized(fitted, gaussian)


def _per_member(joint: Target, theta: Tensor, buffers: Buffers | None) -> Buffers | None:
    """Buffers with a member axis where theta has one."""
    if buffers is None or theta.dim() == 1 or not isinstance(joint, Joint):
        return buffers
    base = joint.network.member(0).buffers
    return {name: b if b.dim() > base[name].dim() else b.expand(theta.shape[0], *b.shape) for name, b in buffers.items()}
