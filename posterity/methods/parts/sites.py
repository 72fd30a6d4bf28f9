"""Sites of expectation propagation: one Gaussian factor along the row's direction in place of each likelihood term."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.curvature.derivatives import derivatives
from posterity.likelihoods import Bernoulli
from posterity.likelihoods.likelihood import Likelihood
from posterity.methods.parts.linear_model import placed, precision_root, refuse_curved
from posterity.model import Batch, Joint
from posterity.model.scales import random_log_prior
from posterity.model.weights import row_weights
from posterity.special.tilted import tilted_moments

_GRID = 9  # outputs, from -4 to 4 prior standard deviations, at which a log density must be concave
_BENT = 1e-9  # relative curvature upwards that rounding may leave
_EXACT_EVERY = 100  # rows between exact recomputations of the covariance in a sweep row by row
_HALVINGS = 30  # of a step that leaves no Gaussian
_LEAST_SHARE = 0.02  # of the way that sites go
MOST_UNSURE = 0.5  # the same, at most, where log-likelihoods are not concave
_ASTRAY = 3.0  # growth of the distance after which a sweep is taken back, where log-likelihoods are not concave


class Sites(NamedTuple):
    """exp(shift a - precision a^2 / 2) of a = x_i . w for each row, in natural parameters (N,)."""

    precision: Tensor
    shift: Tensor

    def towards(self, other: "Sites", share: Tensor | float) -> "Sites":
        """Return the sites after this share of the way to other ones."""
        return Sites(*(torch.lerp(mine, its, share) for mine, its in zip(self, other, strict=True)))

    def at(self, index: Tensor) -> "Sites":
        """Return the sites of these rows."""
        return Sites(self.precision[index], self.shift[index])

    def with_values(self, index: Tensor, values: "Sites") -> "Sites":
        """Return the sites with new values at these rows."""
        return Sites(*(mine.index_copy(0, index, its) for mine, its in zip(self, values, strict=True)))


class GaussianPrior(NamedTuple):
    """The prior to its power, exp(log_height - (w - centre)^T precision (w - centre) / 2)."""

    precision: Tensor  # (R, R)
    centre: Tensor  # (R,)
    log_height: Tensor  # ()

    @classmethod
    def of(cls, joint: Joint, origin: Tensor) -> "GaussianPrior":
        """Return that of a joint with a `Normal` or `Correlated` prior, given the points of `origin`, in float64."""
        root, centre = precision_root(joint, origin)
        power = float(joint.tempering.prior_power)
        height = random_log_prior(joint, placed(origin, joint.random_indices, centre))
        return cls(power * root.mT @ root, centre, power * height)

    def log_prob(self, weights: Tensor) -> Tensor:
        """Return the log density to its power at weights (R,)."""
        away = weights - self.centre
        return self.log_height - 0.5 * away @ self.precision @ away


@dataclass(frozen=True, eq=False)
class LinearRows:
    """Rows whose likelihood sees one number each: f = offset + a with a = x . w of the random weights w, in float64.

    A row of weight e (times the power of the likelihood) stands for `copies` = max(1, e) rows that share one site, each
    of the likelihood to the `power` min(1, e): a weight of two is the row twice. Rows of weight 0 are left out, and so
    are those with x = 0, whose log-likelihood is `constant`; `index` are the others among all rows.
    """

    likelihood: Likelihood
    design: Tensor  # (n, R)
    offset: Tensor  # (n,)
    targets: Tensor  # (n, ...)
    event: torch.Size  # of an output, of one entry
    copies: Tensor  # (n,)
    power: Tensor  # (n,)
    index: Tensor  # (n,)
    constant: Tensor  # ()

    @classmethod
    def of(cls, method: str, joint: Joint, origin: Tensor, batch: Batch, *, checked: bool) -> "LinearRows":
        """Return the rows of a batch; unless `checked` before, refuse a network that is not linear in its weights."""
        likelihood, targets, pieces = joint.likelihood, batch.targets, []
        for piece in derivatives(joint, origin, batch.inputs):
            jacobian, outputs = piece.jacobian.rows().double(), piece.outputs.double()  # (n, D, R)
            if not checked:
                low, size = piece.low, len(outputs)
                rows = batch.map(lambda tensor, low=low, size=size: tensor[low : low + size])  # type: ignore[misc]
                refuse_curved(method, joint, origin, rows, jacobian, outputs)
            pieces.append((jacobian, outputs))
        jacobian, outputs = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        if likelihood.link == "softmax" and outputs.shape[1:] == (2,):  # two classes have one logit, the difference
            likelihood, targets = Bernoulli(), targets.to(outputs.dtype)
            jacobian, outputs = jacobian[:, 1:] - jacobian[:, :1], outputs[:, 1] - outputs[:, 0]
        if jacobian.shape[1] != 1:
            raise ValueError(
                f"{method} needs a likelihood that sees one output a row, or two classes. Got "
                f"{type(joint.likelihood).__name__} of {jacobian.shape[1]} outputs. Use Laplace or FullRank."
            )
        design, event = jacobian[:, 0], outputs.shape[1:]
        targets = targets.double() if targets.is_floating_point() else targets
        weights = row_weights(joint.likelihood, batch, outputs.dtype)
        weights = outputs.new_ones(len(outputs)) if weights is None else weights
        exponent = float(joint.tempering.likelihood_power) * weights
        counted = exponent > 0
        free = counted & (design == 0).all(1)
        constant = exponent[free] @ likelihood.log_prob(outputs[free], targets[free])
        index = (counted & ~free).nonzero()[:, 0]
        exponent = exponent[index]
        return cls(
            likelihood,
            design[index],
            outputs[index].reshape(-1),
            targets[index],
            event,
            exponent.clamp_min(1.0),
            exponent.clamp_max(1.0),
            index,
            constant,
        )

    @property
    def concave(self) -> bool:
        """Whether every log-likelihood is concave in the output, so that no sweep can go astray for good."""
        return self.likelihood.peaks(self.targets) is None

    def refuse_bent(self, method: str, prior: GaussianPrior) -> None:
        """Raise a ValueError where a log density is not concave in the output and does not tell where it peaks."""
        if not self.concave:
            return
        scale = (self.design @ torch.linalg.inv(prior.precision) * self.design).sum(1).sqrt()
        grid = torch.linspace(-4.0, 4.0, _GRID, dtype=scale.dtype, device=scale.device)[:, None]
        points = self.offset + self.design @ prior.centre + grid * scale  # (G, n)
        hessian = self.likelihood.output_hessian(points.reshape(_GRID, -1, *self.event), self.targets).reshape(
            _GRID, -1
        )
        if bool((hessian < -_BENT * hessian.abs().amax()).any()):
            raise ValueError(
                f"{method} needs a likelihood whose log is concave in the output, or one whose `peaks` tells where "
                f"it is highest. Got {type(self.likelihood).__name__}, which is neither. Use Laplace, FullRank or NUTS."
            )

    def tilted(self, mean: Tensor, variance: Tensor, rows: Tensor | slice = slice(None)) -> tuple[Tensor, ...]:
        """Return log Z, mean and variance of a under likelihood^power N(a; mean, variance) / Z, for these rows."""
        offset, targets, power = self.offset[rows], self.targets[rows], self.power[rows]
        if bool((power == 1.0).all()):
            closed = self.likelihood.tilted_moments(mean + offset, variance, targets)
            if closed is not None:
                return closed[0], closed[1] - offset, closed[2]
        peaks = self.likelihood.peaks(targets)

        def log_factor(points: Tensor, which: Tensor) -> Tensor:
            outputs = (points + offset[which]).reshape(*points.shape, *self.event)
            return power[which] * self.likelihood.log_prob(outputs, targets[which])

        return tilted_moments(log_factor, mean, variance, None if peaks is None else peaks.reshape(-1) - offset)


class Fit(NamedTuple):
    """The Gaussian of some sites, the sites that moment matching asks for next, and how far these are."""

    mean: Tensor  # (R,)
    precision: Tensor  # (R, R)
    proposed: Sites  # (n,)
    log_evidence: Tensor  # ()
    mismatch: Tensor  # (2, n) tilted less own mean of a in standard deviations, and tilted over own variance less 1

    @property
    def distance(self) -> Tensor:
        """The largest mismatch of a moment."""
        return distance(self.mismatch)


def distance(mismatch: Tensor) -> Tensor:
    """Return the largest size of a mismatch (2, n); 0 without rows."""
    return mismatch.abs().amax() if mismatch.numel() else mismatch.new_zeros(())


def fit_of(rows: LinearRows, prior: GaussianPrior, sites: Sites) -> Fit | None:
    """Return the Gaussian of these sites (n,), compared with the tilted distributions; None where there is none.

    With the marginal N(mu, v) of a, cavity N(m, u) and tilted normaliser Z of each row, the log evidence is
    log prior(mean) + R/2 log 2 pi - logdet / 2 + sum copies (log Z + (mu - m)^2 / (2 u) + log(u / v) / 2): the values
    of the sites themselves cancel, and with them the loss of digits.
    """
    gaussian = _gaussian(rows, prior, sites)
    if gaussian is None:
        return None
    mean, precision, factor = gaussian
    marginal = rows.design @ mean
    variance = torch.linalg.solve_triangular(factor, rows.design.mT, upper=False).square().sum(0)
    rest = 1.0 - variance * sites.precision  # v / u
    if not bool((rest > 0).all()):
        return None
    cavity_mean, cavity_variance = (marginal - variance * sites.shift) / rest, variance / rest
    log_normaliser, centre, spread = rows.tilted(cavity_mean, cavity_variance)
    known = torch.isfinite(log_normaliser) & torch.isfinite(centre) & (spread > 0)
    wanted = _matching(cavity_mean, cavity_variance, centre, spread)
    proposed = Sites(*(torch.where(known, new, old) for new, old in zip(wanted, sites, strict=True)))
    mismatch = torch.stack([(centre - marginal) / variance.sqrt(), spread / variance - 1.0])
    each = log_normaliser + 0.5 * ((marginal - cavity_mean).square() / cavity_variance - rest.log())
    log_joint = prior.log_prob(mean) + rows.constant + rows.copies @ each
    log_evidence = log_joint + 0.5 * len(mean) * math.log(2.0 * math.pi) - factor.diagonal().log().sum()
    return Fit(mean, precision, proposed, log_evidence, torch.where(known, mismatch, 1.0))


def _gaussian(rows: LinearRows, prior: GaussianPrior, sites: Sites) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return mean, precision and its Cholesky factor; None where the precision is not positive definite."""
    weighted = rows.design * (rows.copies * sites.precision)[:, None]
    precision = prior.precision + rows.design.mT @ weighted
    factor, info = torch.linalg.cholesky_ex(0.5 * (precision + precision.mT))
    if int(info):
        return None
    pull = prior.precision @ prior.centre + rows.design.mT @ (rows.copies * sites.shift)
    return torch.cholesky_solve(pull[:, None], factor)[:, 0], factor @ factor.mT, factor


def _matching(mean: Tensor, variance: Tensor, centre: Tensor, spread: Tensor) -> Sites:
    """Return the sites that turn cavities N(mean, variance) into N(centre, spread)."""
    return Sites(1.0 / spread - 1.0 / variance, centre / spread - mean / variance)


def moved_together(rows: LinearRows, prior: GaussianPrior, sites: Sites, proposed: Sites, share: Tensor) -> Sites:
    """Return the sites after a share of the way to the proposed ones, halved while that leaves no Gaussian."""
    for halving in range(_HALVINGS):
        candidate = sites.towards(proposed, share * 0.5**halving)
        gaussian = _gaussian(rows, prior, candidate)
        if gaussian is not None:
            variance = torch.linalg.solve_triangular(gaussian[2], rows.design.mT, upper=False).square().sum(0)
            if bool((variance * candidate.precision < 1.0).all()):
                return candidate
    return sites


def moved_in_turn(rows: LinearRows, prior: GaussianPrior, sites: Sites, share: Tensor) -> Sites:
    """Return the sites after each row in turn went a share of the way to the site that its cavity asks for then.

    The covariance follows by updates of rank one, and is computed anew every 100 rows. A row whose update would leave
    no Gaussian keeps its site.
    """
    precision, shift = sites.precision.clone(), sites.shift.clone()
    mean, covariance = prior.centre, prior.precision
    for row in range(len(precision)):
        if row % _EXACT_EVERY == 0:
            gaussian = _gaussian(rows, prior, Sites(precision, shift))
            if gaussian is None:
                return sites
            mean, covariance = gaussian[0], torch.cholesky_inverse(gaussian[2])
        index = torch.tensor([row], device=mean.device)
        direction = covariance @ rows.design[row]
        variance, marginal = rows.design[row] @ direction, rows.design[row] @ mean
        rest = 1.0 - variance * precision[row]
        if not float(rest) > 0:
            continue
        cavity = ((marginal - variance * shift[row]) / rest).reshape(1), (variance / rest).reshape(1)
        log_normaliser, centre, spread = rows.tilted(*cavity, index)
        proposed = _matching(*cavity, centre, spread)
        moved = Sites(precision[index], shift[index]).towards(proposed, share)
        more = rows.copies[row] * (moved.precision[0] - precision[row])
        push = rows.copies[row] * (moved.shift[0] - shift[row])
        stretch = 1.0 + more * variance
        if not bool(torch.isfinite(log_normaliser + centre + spread) & (spread > 0) & (stretch > 0)):
            continue
        precision[row], shift[row] = moved.precision[0], moved.shift[0]
        mean = mean + direction * ((push - more * marginal) / stretch)
        covariance = covariance - torch.outer(direction, direction) * (more / stretch)
    return Sites(precision, shift)


class Sweep(NamedTuple):
    """Sites with their Gaussian, and the share of the way to the proposed sites that the next sweep goes."""

    sites: Sites
    fit: Fit
    share: Tensor

    def after(self, rows: LinearRows, sites: Sites, fit: Fit, most: float) -> "Sweep":
        """Return what a sweep led to, or these sites where it led astray; `most` is the largest share.

        Were the mismatch to shrink by the factor 1 - share c, a share of 1 / c would remove it: less than this one
        where it changed its sign, more where it shrank too little. The share changes by a half of itself at most.
        Where log-likelihoods are not concave it is at most a half, and falls whenever the distance grows.
        """
        before = self.fit.mismatch
        shrunk = 1.0 - (before * fit.mismatch).sum() / before.square().sum().clamp_min(1e-300)
        wanted = torch.where(shrunk > 0, self.share / shrunk, math.inf)
        grown = float(fit.distance / self.fit.distance.clamp_min(1e-300))
        if not rows.concave:
            most, wanted = min(MOST_UNSURE, most), wanted if grown <= 1.0 else torch.zeros_like(wanted)
        share = wanted.clamp(0.5 * self.share, 1.5 * self.share).clamp(min(_LEAST_SHARE, most), most)
        return self._replace(share=share) if not rows.concave and not grown <= _ASTRAY else Sweep(sites, fit, share)


def settled(
    rows: LinearRows, prior: GaussianPrior, sites: Sites, tolerance: float, sweeps: int
) -> tuple[Sites, Fit] | None:
    """Return the fixed point of parallel sweeps from these sites, with its Gaussian; None where none was reached."""
    fit = fit_of(rows, prior, sites)
    if fit is None:
        sites = Sites(*map(torch.zeros_like, sites))
        fit = fit_of(rows, prior, sites)
    if fit is None:
        return None
    sweep = Sweep(sites, fit, torch.ones_like(prior.log_height))
    for _ in range(sweeps):
        if float(sweep.fit.distance) <= tolerance:
            return sweep.sites, sweep.fit
        moved = moved_together(rows, prior, sweep.sites, sweep.fit.proposed, sweep.share)
        fit = fit_of(rows, prior, moved)
        if fit is None:
            return None
        sweep = sweep.after(rows, moved, fit, 1.0)
    return None
