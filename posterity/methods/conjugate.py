"""Exact Bayesian linear regression."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.curvature.derivatives import derivatives
from posterity.errors import check_batch_size
from posterity.evidence import laplace_evidence
from posterity.inference.method import Footprint, Info, Method, Traits, Work, theta_bytes
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.methods.parts.linear_model import at_zero, placed, precision_root, refuse_curved
from posterity.methods.parts.work import row_outputs
from posterity.model import Batch, Data, Feed, Joint, Problem
from posterity.model.scales import leaves_out, random_log_prior
from posterity.model.weights import entry_weights, output_weights, weighted_log_prob
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Linearized
from posterity.precisions.dense import Dense
from posterity.priors import Correlated, Normal
from posterity.processes import Group

logger = logging.getLogger("posterity")

_LOST = 1e-6  # of the log evidence and of the mean in posterior standard deviations, by rounding in float64
_ROUNDED = 0.1  # posterior standard deviations by which the dtype of the model may round the mean


class ConjugateState(NamedTuple):
    """A triangular factor of the rows seen so far, in float64, around the origin theta = 0 of the random weights."""

    theta: Tensor
    root: Tensor  # (R + 1, R + 1), T of the QR decomposition of rows sqrt(w) (J, y - f0) / scale
    log_normaliser: Tensor  # () sum of w log p(y | y), the log-likelihood without its squares


@dataclass(frozen=True)
class Conjugate(Method):
    """The exact posterior of a model that is linear in its weights, with Gaussian noise and a normal prior.

    **Math**: f(x) = f0(x) + J(x) w. Precision Lambda = lp sum J^T J / s^2 + pp Lambda0, mean = Lambda^-1 (lp sum J^T
    (y - f0) / s^2 + pp Lambda0 m0), under the prior N(m0, Lambda0^-1), `Normal` or `Correlated`; log evidence in closed
    form. All follow from a QR decomposition of the rows (J, y - f0) / s below those of the prior: their squares, which
    would lose half the digits, are not formed.

    **Limit**: exact, tempered or not; the log warns where inputs are so large beside their spread that digits are lost
    nevertheless. A network that is not linear in its weights is refused.

    **Cost**: one pass over the data, with a QR decomposition of (R + rows) x R numbers for each batch.

    **References**: Bishop (2006), eq. 3.49-3.51, 3.86; Golub and Van Loan (2013), Matrix computations, section 5.3.

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

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        joint = super().with_scales(joint, data, start, key)
        if leaves_out(joint):
            logger.warning(
                "The scales that were left out stay at their start: Conjugate is for known ones. Give them, as in "
                "Normal(scale=0.5), or let VariationalEM(Conjugate(), (PriorScale(), NoiseScale())) choose them."
            )
        return joint

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        count = min(data.num_data, data.num_data if self.batch_size is None else self.batch_size)
        rows = 8 * count * row_outputs(joint.as_joint("Conjugate"), data) * (joint.num_random + 1)
        square = 8 * (joint.num_random + 1) ** 2
        held = {"weights": theta_bytes(joint)}
        # Rows below the old root are stacked, copied and decomposed into a new one.
        step = {"rows": 4 * rows, "root and its decomposition": 5 * square}
        return Footprint.at_peak(self.words(joint), held, step, {"root and its decomposition": 9 * square})

    def work(self, joint: Problem, data: Data) -> Work | None:
        rows = data.num_data if self.batch_size is None else min(self.batch_size, data.num_data)
        outputs = row_outputs(joint.as_joint("Conjugate"), data)
        height, width = rows * outputs + joint.num_random, joint.num_random
        units, sums = -(-data.num_data // rows), width * (width + 1) // 2
        products, moved = height * width**2, 3 * 8 * height * width
        return Work("Conjugate", products, moved, sums, 8, units, "batch", summed_once=True)

    def batches(self, data: Data, key: Key) -> Feed:
        return data.passes(self.batch_size)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> ConjugateState:
        """Check that the problem is conjugate, and return zero sums."""
        joint = joint.as_joint("Conjugate", "Use Laplace.")
        if not isinstance(joint.likelihood, GaussianNoise) or joint.likelihood.learn:
            raise ValueError("Conjugate needs a Joint with a Gaussian likelihood of fixed scale. Use Laplace.")
        if not isinstance(joint.bound_prior, (Normal, Correlated)):
            raise ValueError(f"Conjugate needs a Normal or Correlated prior. Got {joint.prior!r}. Use Laplace.")
        if theta.dim() > 1:
            raise ValueError("Conjugate solves one problem at a time. Use joint.member(i) for each member.")
        origin = at_zero(joint, theta)
        root = theta.new_zeros((joint.num_random + 1, joint.num_random + 1), dtype=torch.float64)
        return ConjugateState(origin, root, root.new_zeros(()))

    def step(self, joint: Problem, state: ConjugateState, batch: Batch, key: Key) -> tuple[ConjugateState, Info]:
        joint = joint.as_joint("Conjugate")
        assert joint.network is not None
        shared = joint.network.sharing
        rows, normaliser = (
            _whitened(joint, state.theta, batch) if shared is None else _shared(joint, shared, state.theta, batch)
        )
        root, log_normaliser = _triangular(torch.cat([state.root, rows])), state.log_normaliser + normaliser
        info = {"log_likelihood": log_normaliser - 0.5 * root[:, -1].square().sum()}
        return ConjugateState(state.theta, root, log_normaliser), info

    def keep(self, state: ConjugateState) -> ConjugateState:
        return state

    def posterior(self, joint: Problem, kept: Sequence[ConjugateState]) -> Linearized:
        joint = joint.as_joint("Conjugate")
        origin, data, log_normaliser = kept[-1]
        lp, pp = float(joint.tempering.likelihood_power), float(joint.tempering.prior_power)
        start, index = origin.to(torch.float64), joint.random_indices
        prior_root, centre = precision_root(joint, start)
        prior_rows = torch.cat([prior_root, (prior_root @ centre).unsqueeze(-1)], -1)
        both = _triangular(torch.cat([lp**0.5 * data, pp**0.5 * prior_rows]))
        root, target = both[:-1, :-1], both[:-1, -1:]
        shift = torch.linalg.solve_triangular(root, target, upper=True).squeeze(-1)
        highest = random_log_prior(joint, placed(start, index, centre))
        log_joint = lp * log_normaliser + pp * highest - 0.5 * both[-1, -1].square()  # at the mean
        precision = Dense(root.mT @ root, factor=root.mT)
        mean = placed(start, index, shift).to(origin.dtype)
        rounded = mean.double() if index is None else mean.double()[index]
        _warn_of_lost_digits(root, rounded - shift, origin.dtype)
        gaussian = Gaussian(joint, mean, precision, {}, laplace_evidence(log_joint, precision))
        return Linearized(joint, gaussian)


def _whitened(joint: Joint, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Rows sqrt(w) (J, y - f0) / scale (n D, R + 1) of a batch of n rows with D outputs, and its log normaliser ()."""
    stack, log_normaliser = list[Tensor](), theta.new_zeros((), dtype=torch.float64)
    for piece in derivatives(joint, theta, batch.inputs):
        low, size = piece.low, len(piece.outputs)
        rows = batch.rows(low, low + size)
        jacobian, outputs, targets = piece.jacobian.rows().double(), piece.outputs.double(), rows.targets.double()
        refuse_curved("Conjugate", joint, theta, rows, jacobian, outputs)
        log_normaliser = log_normaliser + weighted_log_prob(joint.likelihood, targets, targets, rows.weights).sum()
        information = joint.likelihood.output_fisher(outputs, outputs.dim() - 1)  # (n, D, D), diagonal
        information = information.diagonal(dim1=-2, dim2=-1)  # (n, D)
        if (weights := entry_weights(joint.likelihood, rows, torch.float64)) is not None:
            information = information * output_weights(joint.likelihood, weights, outputs).reshape(size, -1)
        residual = torch.where(targets.isnan(), 0.0, targets - outputs).reshape(size, -1, 1)
        stack.append((information.sqrt().unsqueeze(-1) * torch.cat([jacobian, residual], -1)).flatten(0, 1))
    return torch.cat(stack), log_normaliser


def _shared(joint: Joint, processes: Group, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """As `_whitened`, by several processes, with a triangular factor in place of a block of more rows than that has."""
    alone, width, blocks = joint.alone, joint.num_random + 1, processes.blocks

    def part(low: int, high: int) -> list[Tensor]:
        rows, normaliser = _whitened(alone, theta, batch.rows(low, high))
        most = -(-batch.size // blocks) * (len(rows) // (high - low))  # rows of a block
        rows = _triangular(rows) if len(rows) > width else rows
        placed = rows.new_zeros(blocks, min(most, width), width)
        placed[-(-low * blocks // batch.size), : len(rows)] = rows  # a place that no other block has
        return [placed, normaliser]

    placed, normaliser = processes.total(part, batch.size)
    return placed.flatten(0, 1), normaliser


def _triangular(rows: Tensor) -> Tensor:
    """Upper triangular T with T^T T = rows^T rows and a diagonal of no number below 0."""
    triangle: Tensor = torch.linalg.qr(rows, mode="r").R
    return triangle * torch.where(triangle.diagonal() < 0.0, -1.0, 1.0).unsqueeze(-1)


def _warn_of_lost_digits(root: Tensor, rounding: Tensor, dtype: torch.dtype) -> None:
    """Warn where float64 loses digits of evidence and mean, or the dtype of the model rounds the mean too much."""
    singular = torch.linalg.svdvals(root / root.norm(dim=0))  # however large the weights are
    lost = torch.finfo(torch.float64).eps * float(singular[0] / singular[-1])
    moved = float((root @ rounding).norm())
    if not lost <= _LOST:
        logger.warning(
            f"Conjugate: the columns of the design are nearly dependent, and the log evidence is accurate to some "
            f"{lost:.0e} at best. Centre the inputs, x - x.mean(0)."
        )
    if not moved <= _ROUNDED:
        logger.warning(
            f"Conjugate: {dtype} rounds the mean by {moved:.2g} posterior standard deviations. Centre the inputs, "
            "x - x.mean(0), or use a float64 model."
        )
