"""A Gaussian at a mode, from the curvature there."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.curvature import Curvature, GaussNewton
from posterity.curvature.curvature import num_random, over_members
from posterity.evidence import laplace_evidence
from posterity.inference.method import Info, Method, Target
from posterity.methods.buffers import starting_buffers
from posterity.methods.memory import refuse_too_large
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
    all data. log evidence = log density at theta* + R/2 log 2 pi - 1/2 logdet Lambda. The log
    density there holds the prior of every weight of theta, points included, and that of a learnt noise.

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

    anytime: ClassVar[bool] = False
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
        lead, size = theta.shape[:-1], num_random(joint)
        shape = (*lead, *self.structure.shape(size))
        formed = (*lead, size, size) if self.curvature.forms_matrix else shape
        refuse_too_large(
            f"Laplace with {self.curvature} and {self.structure} over {size:,} weights",
            4 * 8 * prod(formed),  # the sum, what is added to it, the precision and its factor
            theta.device,
            "Use curvature=GaussNewton() with structure=Diagonal(), or fewer weights: "
            "joint.with_weights('<last layer>.*').",
        )
        curvature = theta.new_zeros(shape, dtype=torch.float64)
        log_likelihood = theta.new_zeros(lead, dtype=torch.float64)
        return LaplaceState(theta.clone(), curvature, log_likelihood, starting_buffers(joint, theta))

    def step(self, joint: Target, state: LaplaceState, batch: Batch, key: Key) -> tuple[LaplaceState, Info]:
        """Add the curvature and the log-likelihood of these rows."""
        buffers = state.buffers or None

        def kept(joint: Target, theta: Tensor, rows: Batch | None, buffers: Buffers | None) -> Tensor:
            return self.structure.of(self.curvature, joint, theta, rows, buffers)

        with torch.no_grad():
            row_bytes = self.curvature.row_bytes(joint, batch.member(0).inputs) if isinstance(joint, Joint) else 0
            part = over_members(kept, joint, state.theta, batch, buffers, row_bytes)
            rows = joint.log_likelihood(state.theta, batch, buffers)
            if isinstance(joint, Joint):
                rows = rows * (batch.size / joint.num_data)  # the sum over these rows, not its estimate of the whole
        log_likelihood = state.log_likelihood + rows.to(torch.float64)
        after = state._replace(curvature=state.curvature + part, log_likelihood=log_likelihood)
        return after, {"log_likelihood": log_likelihood}

    def posterior(self, joint: Target, kept: Sequence[LaplaceState]) -> Posterior:
        """The Gaussian, seen through the network's linearisation where there is a network."""
        theta, curvature, log_likelihood, buffers = kept[-1]
        weights = theta[..., : joint.num_weights].detach().clone()
        likelihood_power, prior_power = (
            power.to(log_likelihood) if isinstance(power, Tensor) else power
            for power in (joint.tempering.likelihood_power, joint.tempering.prior_power)
        )
        total = self.structure.tempered(curvature, likelihood_power)
        if isinstance(joint, Joint):
            prior = joint.bound_prior.precision(weights.to(torch.float64))
            if joint.random_indices is not None:
                prior = prior.index_select(-1, joint.random_indices)
            prior = prior * (prior_power.unsqueeze(-1) if isinstance(prior_power, Tensor) else prior_power)
            total = self.structure.with_diagonal(total, prior)
        precision = self.structure.precision(total)
        log_joint = likelihood_power * log_likelihood + prior_power * joint.log_prior(theta.to(torch.float64))
        fitted = joint.fitted(theta)
        gaussian = Gaussian(fitted, weights, precision, buffers, laplace_evidence(log_joint, precision))
        return gaussian if isinstance(joint, Density) else Linearized(fitted, gaussian)
