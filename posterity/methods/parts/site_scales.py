"""Scales of prior and noise that were left out, by the log evidence of expectation propagation."""

import logging
import math
from dataclasses import replace

import torch
from torch import Tensor

from posterity.evidence import Evidence, PerLayer
from posterity.evidence.marginal import GIVEN, Groups, LeftOut, grouped, left_out, parted
from posterity.evidence.tuning import Point, Tuned, tuned_joint
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.methods.parts.linear_model import at_zero
from posterity.methods.parts.sites import GaussianPrior, LinearRows, Sites, settled
from posterity.model import Batch, Joint
from posterity.model.scales import as_chosen, leaves_out
from posterity.model.tempering import Tempering
from posterity.priors import Normal

logger = logging.getLogger("posterity")

_SWEEPS, _TOLERANCE = 200, 1e-8  # for each evidence
_LIMIT = 1e6  # of a precision, over its start: separable labels have the more evidence, the wider the prior


def by_site_evidence(method: str, joint: Joint, batch: Batch) -> Joint:
    """Return the problem with the scales that were left out, at the largest log evidence; untempered.

    One prior scale for each layer, and the noise of a Gaussian. Where there is no largest one all stay at their start,
    and the log says why.
    """
    if not leaves_out(joint):
        return joint
    groups, noise = LeftOut.of(joint, PerLayer()), left_out(joint)[1]
    search = SiteSearch(method, replace(joint, tempering=Tempering.bayes()), batch, groups, noise)
    start, reason = search.at(search.start), "the log evidence has no finite value there."
    if start is not None:
        best, reason = Evidence(groups, noise, limit=_LIMIT).climb(search, start)
        if not reason:
            return tuned_joint(joint, search.tuned(groups, start, best))
    logger.warning("The scales that were left out stay at their start: %s Give them, as in Normal(scale=0.5).", reason)
    return as_chosen(joint, "start")


class SiteSearch:
    """The log evidence of the fixed point as a function of logs (K,): prior precisions by group, then 1 / noise^2.

    At a fixed point the sites do not enter the derivatives: 2 d log Z / d log alpha of a group is its number of weights
    less alpha E (w - m)^2, and 2 d log Z / d log(1 / noise^2) the number of rows less E (y - f)^2 / noise^2.
    """

    def __init__(self, method: str, joint: Joint, batch: Batch, groups: Groups, noise: bool) -> None:
        origin = at_zero(joint, joint.initial())
        self.rows = LinearRows.of(method, joint, origin, batch, checked=False)
        self.prior = GaussianPrior.of(joint, origin.double())
        self.rows.refuse_bent(method, self.prior)
        self.noise, self.evaluations = noise, 0
        precision = self.prior.precision.diagonal()
        self.groups: tuple[str, ...] = ()
        self.group = torch.zeros(len(precision), dtype=torch.long, device=precision.device)
        alpha, self.pattern = precision.new_zeros(0), precision
        if isinstance(joint.bound_prior, Normal):
            self.groups, self.group = grouped(joint, groups)
            alpha, self.pattern = parted(precision, self.group, len(self.groups))
        self.given = torch.tensor([name == GIVEN for name in self.groups], dtype=torch.bool, device=precision.device)
        self.names = (*(f"the prior precision of {name}" for name in self.groups), *["the noise"] * noise)
        self.start = alpha.log()
        if noise:
            assert isinstance(joint.likelihood, GaussianNoise)
            scale = torch.as_tensor(joint.likelihood.scale, dtype=alpha.dtype, device=alpha.device)
            self.start = torch.cat([self.start, -2.0 * scale.log().reshape(1)])
        self.sites = Sites(torch.zeros_like(self.rows.offset), torch.zeros_like(self.rows.offset))

    @property
    def size(self) -> int:
        """The number of random weights."""
        return len(self.pattern)

    def values(self, logs: Tensor) -> tuple[Tensor, float | None]:
        """Return prior precisions (G,), and the noise scale if it is searched for."""
        return (logs[:-1].exp(), math.exp(-0.5 * float(logs[-1]))) if self.noise else (logs.exp(), None)

    def at(self, logs: Tensor) -> Point | None:
        """Evaluate the evidence and its gradient; None where no fixed point was reached."""
        self.evaluations += 1
        alpha, scale = self.values(logs)
        prior, rows = self.prior, self.rows
        if self.groups:
            present = prior.precision.diagonal()
            precision = alpha[self.group] * self.pattern
            height = prior.log_height + 0.5 * (precision / present).log().sum()
            prior = GaussianPrior(torch.diag(precision), prior.centre, height)
        if scale is not None:
            rows = replace(rows, likelihood=GaussianNoise(scale))
        fixed = settled(rows, prior, self.sites, _TOLERANCE, _SWEEPS)
        if fixed is None:
            return None
        self.sites, fit = fixed
        covariance = torch.linalg.inv(fit.precision)
        away = (fit.mean - prior.centre).square() * prior.precision.diagonal()
        spread = covariance.diagonal() * prior.precision.diagonal()
        sums = alpha.new_zeros(3, max(1, len(alpha))).index_add(
            1, self.group, torch.stack([torch.ones_like(away), spread, away])
        )[:, : len(alpha)]
        gradient, lost = 0.5 * (sums[0] - sums[1] - sums[2]), sums[2]
        gradient[self.given] = 0.0
        if scale is not None:
            exponent = rows.copies * rows.power
            variance = (rows.design @ covariance * rows.design).sum(1)
            squares = (rows.targets.reshape(-1) - rows.offset - rows.design @ fit.mean).square() / scale**2
            chi, inflated = exponent @ squares, exponent @ (1.0 - squares - variance / scale**2)
            gradient, lost = torch.cat([gradient, 0.5 * inflated[None]]), torch.cat([lost, chi[None]])
        number = float(fit.log_evidence)
        if not math.isfinite(number) or not bool(torch.isfinite(gradient).all()):
            return None
        return Point(logs, number, gradient, lost)

    def tuned(self, groups: Groups, start: Point, best: Point) -> Tuned:
        """The outcome of a successful search."""
        return Tuned(groups, self.groups, *self.values(best.logs), start.value, best.value, self.evaluations)
