"""Expectation propagation for models that are linear in their weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from posterity.errors import fraction, positive, positive_whole, shown
from posterity.inference.method import Footprint, Info, Method, Traits, theta_bytes
from posterity.inference.run import Trace
from posterity.methods.parts.linear_model import at_zero, placed
from posterity.methods.parts.site_scales import by_site_evidence
from posterity.methods.parts.sites import (
    MOST_UNSURE,
    Fit,
    GaussianPrior,
    LinearRows,
    Sites,
    Sweep,
    distance,
    fit_of,
    moved_in_turn,
    moved_together,
)
from posterity.model import Batch, Data, Feed, Joint, Problem
from posterity.model.data import in_memory
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Linearized
from posterity.precisions.dense import Dense
from posterity.priors import Correlated, Normal

Order = Literal["parallel", "sequential"]

NAME = "ExpectationPropagation"


class SiteState(NamedTuple):
    """The sites, and the Gaussian of these sites with what moment matching asks for next."""

    theta: Tensor  # (P,) with the random weights at 0
    precision: Tensor  # (N,) natural parameters of the sites
    shift: Tensor  # (N,)
    proposed_precision: Tensor  # (N,)
    proposed_shift: Tensor  # (N,)
    mean: Tensor  # (R,)
    matrix: Tensor  # (R, R) precision
    log_evidence: Tensor  # ()
    mismatch: Tensor  # (2, N) of the moments
    share: Tensor  # () of the way to the proposed sites that the next sweep goes
    sweeps: int


@dataclass(frozen=True)
class ExpectationPropagation(Method):
    """A Gaussian that has, along each row, the moments of the exact likelihood term in the context of all others.

    **Math**: the likelihood of row i sees f_i = x_i . w alone, and a site exp(nu_i f_i - tau_i f_i^2 / 2) stands for
    it. q(w) is the prior times all sites. Without its own site the marginal of f_i is the cavity N(m_i, v_i); the new
    site is the one with which q has the mean and variance of the tilted distribution p(y_i | f) N(f; m_i, v_i) / Z_i.
    At a fixed point this holds for all rows, and log Z = log integral of prior times sites, each scaled to Z_i, is
    stationary in the sites: its derivative in a log prior precision is (1 - E_q (w - m)^2 / scale^2) / 2 a weight.
    Tilted moments come in closed form (`Probit`, `Gaussian`) or by adaptive quadrature. `order="parallel"` moves all
    sites at once, "sequential" one after another. `damping` is the least share of the old site that stays; more stays
    while mismatches of moments change their sign from sweep to sweep. A row of weight w is w rows with a site each, or
    below 1 its likelihood to the power w; so is the likelihood of a tempered problem.

    **Limit**: exact for Gaussian noise, after one sweep; for labels and counts much closer than `Laplace` in mean,
    covariance and evidence, though nothing is a bound. Where the log-likelihood is concave sites are positive and every
    update is possible, though no proof says that they settle. Else (`StudentT`) site precisions may be negative, sites
    go half of their way at most, and nothing may settle. A run that did not reach `tolerance` (in posterior standard
    deviations) says so in the log. The likelihood must see one number a row, linear in the weights: one output, or the
    difference of two classes. The prior is `Normal` or `Correlated`.

    **Cost**: a sweep in parallel is N R^2 and, without a closed form, some 200 likelihoods a row; one in sequence is N
    updates of R^2 with their overhead. Ten sweeps are usual.

    **References**: Minka (2001), Expectation propagation for approximate Bayesian inference; Rasmussen and Williams
    (2006), Gaussian processes for machine learning, sections 3.6 and 5.5; Seeger (2005), Expectation propagation for
    exponential families.

    **Example**:

    >>> import posterity as po
    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [1.0]])
    >>> joint = po.Joint(torch.nn.Linear(1, 1, bias=False), po.likelihoods.Probit(), po.priors.Normal(1.0), num_data=2)
    >>> q, _ = po.infer(po.methods.ExpectationPropagation(), joint, (x, y))
    >>> q.point(), round(float(q.log_evidence), 4)  # the posterior has 0.8899 and -1.0245
    (tensor([0.8885]), -1.0292)
    """

    sweeps: int = 200
    order: Order = "parallel"
    damping: float = 0.0
    tolerance: float = 1e-9

    def __post_init__(self) -> None:
        positive_whole(f"{NAME}.sweeps", self.sweeps)
        fraction(f"{NAME}.damping", self.damping)
        positive(f"{NAME}.tolerance", self.tolerance)
        if self.order not in get_args(Order):
            raise ValueError(f"{NAME}.order must be 'parallel' or 'sequential'. Got {shown(self.order)}.")

    @property
    def traits(self) -> Traits:
        return Traits(takes_members=False)

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        _refuse(joint)
        joint = super().with_scales(joint, data, start, key)
        return by_site_evidence(NAME, joint, in_memory(data).first().member(0))

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        parts = {
            "weights": 3 * theta_bytes(joint),
            "rows": 8 * joint.num_data * (3 * joint.num_random + 30),
            "precision": 5 * 8 * joint.num_random**2,
        }
        return replace(super().footprint(joint, data), parts=parts)

    def batches(self, data: Data, key: Key) -> Feed:
        """All rows in every sweep; rows of a loader are read once and held."""
        return in_memory(data).passes(None, self.sweeps)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> SiteState:
        """Check the problem, and return sites of 1."""
        joint = joint.as_joint(NAME, "Use Laplace.")
        _refuse(joint, theta.dim() > 1)
        size = joint.num_random
        none = theta.new_zeros(joint.num_data, dtype=torch.float64)
        gaussian = none.new_zeros(size), none.new_zeros(size, size), none.new_zeros(())
        share = none.new_tensor(1.0 - self.damping)
        return SiteState(
            at_zero(joint, theta), none, none, none, none, *gaussian, none.new_zeros(2, len(none)), share, 0
        )

    def step(self, joint: Problem, state: SiteState, batch: Batch, key: Key) -> tuple[SiteState, Info]:
        """Move every site once, and compare the new Gaussian with its tilted distributions."""
        joint, first = joint.as_joint(NAME), state.sweeps == 0
        rows = LinearRows.of(NAME, joint, state.theta, batch, checked=not first)
        prior = GaussianPrior.of(joint, state.theta.double())
        sites = Sites(state.precision, state.shift).at(rows.index)
        if first:
            rows.refuse_bent(NAME, prior)
            fit = _known(fit_of(rows, prior, sites))
        else:
            proposed = Sites(state.proposed_precision, state.proposed_shift).at(rows.index)
            fit = Fit(state.mean, state.matrix, proposed, state.log_evidence, state.mismatch[:, rows.index])
        share = state.share if rows.concave else state.share.clamp_max(MOST_UNSURE)
        sweep, target = Sweep(sites, fit, share), fit.proposed
        if self.order == "sequential":
            target, share = moved_in_turn(rows, prior, sites, share), torch.ones_like(share)
        moved = moved_together(rows, prior, sites, target, share)
        sites, fit, share = sweep.after(rows, moved, _known(fit_of(rows, prior, moved)), 1.0 - self.damping)
        every, wanted = (Sites(state.precision, state.shift).with_values(rows.index, s) for s in (sites, fit.proposed))
        mismatch = state.mismatch.index_copy(1, rows.index, fit.mismatch)
        after = SiteState(
            state.theta, *every, *wanted, fit.mean, fit.precision, fit.log_evidence, mismatch, share, state.sweeps + 1
        )
        return after, {"distance": fit.distance, "log_evidence": fit.log_evidence, "damping": 1.0 - share}

    def finished(self, state: SiteState) -> str:
        away = float(distance(state.mismatch))
        return f"moments agree to {away:.1g}" if away <= self.tolerance else ""

    def doubts(self, joint: Problem, trace: Trace) -> Sequence[str]:
        away = float(trace["distance"][-1].max())  # of all members of an ensemble
        if away <= self.tolerance:
            return ()
        return (
            f"{NAME} did not settle: after {len(trace['distance'])} sweeps moments still differ by {away:.2g} "
            f"posterior standard deviations, and {self.tolerance:.1g} was wanted. Use more damping= or sweeps=, or "
            "another method: there may be no fixed point.",
        )

    def keep(self, state: SiteState) -> SiteState:
        return state

    def posterior(self, joint: Problem, kept: Sequence[SiteState]) -> Linearized:
        joint, state = joint.as_joint(NAME), kept[-1]
        mean = placed(state.theta.double(), joint.random_indices, state.mean).to(state.theta.dtype)
        return Linearized(joint, Gaussian(joint, mean, Dense(state.matrix), {}, state.log_evidence))


def _refuse(joint: Joint, members: bool = False) -> None:
    """Raise a ValueError for members, and for a prior or a likelihood that has no sites."""
    if members or joint.num_members is not None:
        raise ValueError(f"{NAME} solves one problem at a time. Use joint.member(i) for each member.")
    if joint.likelihood.num_free:
        raise ValueError(
            f"{NAME} needs a likelihood without parameters of its own. Got {joint.likelihood!r}. Give its scale, or "
            "leave it out: Gaussian()."
        )
    if not isinstance(joint.bound_prior, (Normal, Correlated)):
        raise ValueError(f"{NAME} needs a Normal or Correlated prior. Got {joint.prior!r}. Use Laplace.")


def _known(fit: Fit | None) -> Fit:
    """The Gaussian of sites that were chosen so that there is one."""
    assert fit is not None
    return fit
