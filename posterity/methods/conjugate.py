"""Exact Bayesian linear regression."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.curvature.derivatives import derivatives
from posterity.errors import check_batch_size
from posterity.evidence import laplace_evidence
from posterity.inference.method import Footprint, Info, Method, Traits, theta_bytes
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.model import Batch, Data, Feed, Joint, Problem
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Linearized
from posterity.precisions.dense import Dense
from posterity.priors import Normal


class ConjugateState(NamedTuple):
    """Sums over the rows seen so far, in float64, around the origin theta = 0 of the random weights."""

    theta: Tensor
    precision: Tensor  # (R, R) sum of w J^T J / scale^2
    linear: Tensor  # (R,) sum of w J^T (y - f0) / scale^2
    log_likelihood: Tensor  # () sum of w log p(y | f0)


@dataclass(frozen=True)
class Conjugate(Method):
    """The exact posterior of a model that is linear in its weights, with Gaussian noise and a normal prior.

    **Math**: f(x) = f0(x) + J(x) w. Precision Lambda = lp sum J^T J / s^2 + pp / s0^2, mean = Lambda^-1 (lp sum J^T
    (y - f0) / s^2 + pp m0 / s0^2); log evidence in closed form.

    **Limit**: exact, tempered or not. A network that is not linear in its weights is refused.

    **Cost**: one pass over the data and one R x R factorisation.

    **References**: Bishop (2006), eq. 3.49-3.51, 3.86.

    **Example**:

    >>> import posterity as po
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=1.0), po.priors.Normal(), num_data=2)
    >>> q, _ = po.infer(po.methods.Conjugate(), joint, (x, x))
    >>> q.point()
    tensor([0.4000, 0.2000])
    """

    batch_size: int | None = 1024

    def __post_init__(self) -> None:
        check_batch_size("Conjugate.batch_size", self.batch_size)

    @property
    def traits(self) -> Traits:
        return Traits(takes_members=False, anytime=False)

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        parts = {"weights": 3 * theta_bytes(joint), "curvature and precision": 5 * 8 * joint.num_random**2}
        return replace(super().footprint(joint, data), parts=parts)

    def batches(self, data: Data, key: Key) -> Feed:
        return data.passes(self.batch_size)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> ConjugateState:
        """Check that the problem is conjugate, and return zero sums."""
        joint = joint.as_joint("Conjugate", "Use Laplace.")
        if not isinstance(joint.likelihood, GaussianNoise) or joint.likelihood.learn:
            raise ValueError("Conjugate needs a Joint with a Gaussian likelihood of fixed scale. Use Laplace.")
        if not isinstance(joint.bound_prior, Normal):
            raise ValueError(f"Conjugate needs a Normal prior. Got {joint.prior!r}. Use Laplace.")
        if theta.dim() > 1:
            raise ValueError("Conjugate solves one problem at a time. Use joint.member(i) for each member.")
        size = joint.num_random
        zeros = theta.new_zeros((), dtype=torch.float64)
        origin = theta.clone()
        if joint.random_indices is None:
            origin.zero_()
        else:
            origin[joint.random_indices] = 0.0
        return ConjugateState(origin, zeros.expand(size, size).clone(), zeros.expand(size).clone(), zeros.clone())

    def step(self, joint: Problem, state: ConjugateState, batch: Batch, key: Key) -> tuple[ConjugateState, Info]:
        joint = joint.as_joint("Conjugate")
        precision, linear, log_likelihood = state.precision, state.linear, state.log_likelihood
        for piece in derivatives(joint, state.theta, batch.inputs):
            low, size = piece.low, len(piece.outputs)
            rows = batch.map(lambda tensor, low=low, size=size: tensor[low : low + size])  # type: ignore[misc]
            jacobian, outputs, targets = piece.jacobian.rows().double(), piece.outputs.double(), rows.targets.double()
            _refuse_curved(joint, state.theta, rows, jacobian, outputs)
            each = joint.likelihood.log_prob(outputs, targets)
            information = joint.likelihood.output_fisher(outputs, outputs.dim() - 1)  # (n, D, D)
            if rows.weights is not None:
                each, information = each * rows.weights, information * rows.weights[:, None, None]
            scaled = (information @ jacobian).flatten(0, 1)  # (n D, R)
            precision = precision + jacobian.flatten(0, 1).T @ scaled
            linear = linear + (targets - outputs).flatten() @ scaled
            log_likelihood = log_likelihood + each.sum()
        return ConjugateState(state.theta, precision, linear, log_likelihood), {"log_likelihood": log_likelihood}

    def keep(self, state: ConjugateState) -> ConjugateState:
        return state

    def posterior(self, joint: Problem, kept: Sequence[ConjugateState]) -> Linearized:
        joint = joint.as_joint("Conjugate")
        origin, curvature, linear, log_likelihood = kept[-1]
        index = joint.random_indices
        lp, pp = float(joint.tempering.likelihood_power), float(joint.tempering.prior_power)
        value, slope = joint.bound_prior.value_and_grad(origin.to(torch.float64))
        prior = joint.bound_prior.precision(origin.to(torch.float64))
        if index is not None:
            slope, prior = slope[index], prior[index]
        precision = Dense(lp * curvature + pp * torch.diag(prior))
        tilt = lp * linear + pp * slope
        shift = precision.solve(tilt)
        # log density at the mean: a quadratic with value and slope known at the origin
        log_joint = lp * log_likelihood + pp * value + 0.5 * tilt @ shift
        mean = shift if index is None else origin.to(torch.float64).index_copy(0, index, shift)
        gaussian = Gaussian(joint, mean.to(origin.dtype), precision, {}, laplace_evidence(log_joint, precision))
        return Linearized(joint, gaussian)


def _refuse_curved(joint: Joint, origin: Tensor, rows: Batch, jacobian: Tensor, outputs: Tensor) -> None:
    """Raise a ValueError if the outputs at a random theta differ from the linearisation at the origin."""
    direction = Key(0).normal((jacobian.shape[-1],), torch.float64, origin.device)
    index = joint.random_indices
    moved = direction.to(origin.dtype) if index is None else origin.index_copy(0, index, direction.to(origin.dtype))
    with torch.no_grad():
        there = joint.outputs(moved, rows.inputs).to(torch.float64)
    linear = outputs + (jacobian @ direction).reshape(outputs.shape)
    scale = float(there.abs().max()) + 1.0
    if not float((there - linear).abs().max()) <= 1e-3 * scale:
        raise ValueError(
            "Conjugate needs a network that is linear in its weights, and this one is not. Use Laplace, or freeze all "
            "but the last layer with joint.with_weights('...')."
        )
