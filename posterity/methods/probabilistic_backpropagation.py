"""Probabilistic backpropagation: a Gaussian over the weights of a ReLU network, updated row by row."""

import dataclasses
import glob
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.errors import of_kinds, positive_whole, shown
from posterity.evidence import Gamma
from posterity.inference.method import Footprint, Info, Method, theta_bytes
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.model import Batch, Data, Feed, Joint, Problem
from posterity.model.data import in_memory
from posterity.model.weights import row_weights
from posterity.numerics.random import Key
from posterity.options import LEFT_OUT
from posterity.posteriors import Gaussian, Propagated
from posterity.posteriors.moments import Chain, backward, forward, relu_chain
from posterity.precisions.diagonal import Diagonal
from posterity.priors import Layerwise, Normal

WAY = "Gamma posterior"
"""How a scale that was left out is said to be chosen."""
WIDEST = 1e6  # prior variances: a site waits while the other factors say less about its weight
_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class PBPState(NamedTuple):
    """Moments of the weights, in the order of the `Chain`, in float64; Gammas as (..., 2), shape and rate."""

    mean: Tensor  # (..., P)
    variance: Tensor  # (..., P)
    sites: Tensor  # (..., 3, P): of each prior factor the precision of its Gaussian, shape and rate of its Gamma
    noise: Tensor  # (..., 2), precision of the noise
    prior: Tensor  # (..., 2), precision of the prior
    rows: int  # seen so far


@dataclass(frozen=True)
class ProbabilisticBackpropagation(Method):
    """Probabilistic backpropagation: independent Gaussian weights of a ReLU network, matched to one row after another.

    **Math**: q(w) = prod N(m, v). Moments of the output f(x) come by propagation through the layers (`Propagated`);
    then Z = N(y; E f, Var f + noise) and each row moves m += v dlogZ/dm, v -= v^2 ((dlogZ/dm)^2 - 2 dlogZ/dv), the
    moments of q(w) p(y | x, w) if f is Gaussian. The gradients are in closed form. A weight whose variance would not
    stay positive is left as it is. Scales that are left out have a Gamma posterior, by default Gamma(6, 6) at first:
    the precision tau of the noise, and the precision lambda of all weights, of variance 1 / (lambda n) in a layer of
    n - 1 inputs and a bias. (The paper divides the output of a layer by sqrt(n) instead, which is the same.) The
    Student-t density of a Gaussian with Gamma precision (a, b) counts as a Gaussian of variance b / (a - 1), and the
    normalisers at a, a + 1, a + 2 give the new Gamma. After each of `passes` passes over the rows, in a new order, the
    prior factors are refined by expectation propagation. A scale that was given is known; powers of a tempering, and
    weights of rows, act as exponents. The trace has the "loss" of each row, -log Z before its update, and after each
    pass the Gammas "noise_precision" and "prior_precision", (shape, rate).

    **Limit**: one pass is assumed density filtering, exact for one weight of a linear model with known scales. Further
    passes take each row for new data, which makes q too narrow by up to sqrt(passes); the noise stays right, and
    predictions are those of the paper. Standardise inputs and targets: the Gammas are about scales near 1. One output;
    no start but m = randn / n (the prior mean, without hidden layers), or `start`.

    **Cost**: for each row about six forward passes; rows cannot run together, but members do. After a pass, some 30
    small operations for each weight whose prior scale is left out.

    **References**: Hernandez-Lobato and Adams (2015), Probabilistic backpropagation for scalable learning of Bayesian
    neural networks, section 3; Minka (2001), A family of algorithms for approximate Bayesian inference.

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1.5, 1.5, 40).unsqueeze(1)
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 10), torch.nn.ReLU(), torch.nn.Linear(10, 1))
    >>> joint = po.Joint(net, po.likelihoods.Gaussian(), po.priors.Normal(), num_data=40)
    >>> q, trace = po.infer(po.methods.ProbabilisticBackpropagation(passes=10), joint, (x, x.abs()))
    >>> q.joint.likelihood.chosen, bool(q.predict(x).mean.sub(x.abs()).abs().mean() < 0.2)
    ('Gamma posterior', True)
    """

    passes: int = 40
    noise_precision: Gamma = field(default_factory=lambda: Gamma(6.0, 6.0))
    prior_precision: Gamma = field(default_factory=lambda: Gamma(6.0, 6.0))

    def __post_init__(self) -> None:
        positive_whole("ProbabilisticBackpropagation.passes", self.passes)
        of_kinds(self, noise_precision=Gamma, prior_precision=Gamma)
        for name in ("noise_precision", "prior_precision"):
            if not getattr(self, name).shape > 1.0:
                raise ValueError(
                    f"ProbabilisticBackpropagation.{name} must have a shape above 1, so that the variance has a mean. "
                    f"Got {shown(getattr(self, name).shape)}."
                )

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        return joint  # they are chosen during the fit

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        numbers = theta_bytes(joint) * 8 // joint.dtype.itemsize
        parts = {"moments and prior factors": 5 * numbers, "gradients": 6 * numbers}
        return dataclasses.replace(super().footprint(joint, data), parts=parts)

    def batches(self, data: Data, key: Key) -> Feed:
        return in_memory(data).minibatches(1, self.passes * data.num_data, key)

    def initial(self, joint: Problem, key: Key) -> Tensor:
        known = _known(joint)
        fans = known.chain.fans
        start = known.centre
        if len(known.chain.layers) > 1:  # hidden units must differ
            start = start + key.normal(tuple(fans.shape), torch.float64, "cpu").to(fans) / fans
        theta = known.chain.in_theta(start).to(joint.dtype)
        return theta[0] if len(theta) == 1 else theta

    def init(self, joint: Problem, theta: Tensor, key: Key) -> PBPState:
        known = _known(joint)
        mean = theta.to(torch.float64)[..., known.chain.order]
        noise, prior = (
            mean.new_tensor([gamma.shape, gamma.rate]).expand(*mean.shape[:-1], 2).clone()
            for gamma in (self.noise_precision, self.prior_precision)
        )
        variance = (known.variance[0] if mean.dim() == 1 else known.variance.expand(mean.shape)).clone()
        variance[..., known.left_out] *= self.prior_precision.rate / (self.prior_precision.shape - 1.0)
        sites = torch.stack([1.0 / variance, torch.zeros_like(variance), torch.zeros_like(variance)], dim=-2)
        return PBPState(mean.contiguous(), variance, sites, noise, prior, 0)

    def step(self, joint: Problem, state: PBPState, batch: Batch, key: Key) -> tuple[PBPState, Info]:
        known, alone = _known(joint), state.mean.dim() == 1
        own = _with_member_axis(state) if alone else state
        assert isinstance(batch.inputs, Tensor)
        axis, losses = batch.rows_axis, []
        inputs, targets = batch.inputs.to(torch.float64), batch.targets.to(torch.float64).nan_to_num()
        weights = row_weights(joint.as_joint(_NAME).likelihood, batch, torch.float64)  # 0 for missing targets
        for row in range(batch.size):
            weight = None if weights is None else weights.select(axis, row)
            x = inputs.narrow(axis, row, 1).expand(len(own.mean), 1, -1)
            with torch.inference_mode():  # a fifth faster: the operations are many and small
                losses.append(_absorb(known, own, x, targets.select(axis, row).reshape(-1), weight))
        rows = state.rows + batch.size
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean(0)
        info: dict[str, Tensor | float] = {"loss": loss[0] if alone else loss}
        if rows // known.num_data > state.rows // known.num_data:
            if known.noise is None:
                info["noise_precision"] = state.noise.clone()
            if known.left_out.numel():
                _refine_prior(known, own)
                info["prior_precision"] = state.prior.clone()
        return state._replace(rows=rows), info

    def keep(self, state: PBPState) -> PBPState:
        return state

    def posterior(self, joint: Problem, kept: Sequence[PBPState]) -> Propagated:
        known, last = _known(joint), kept[-1]
        fitted = _with_scales(joint.as_joint(_NAME), known, last)
        mean = known.chain.in_theta(last.mean).to(joint.dtype)
        gaussian = Gaussian(fitted, mean, Diagonal(1.0 / known.chain.in_theta(last.variance)))
        return Propagated(fitted, gaussian)


_NAME = ProbabilisticBackpropagation.__name__


def _with_member_axis(state: PBPState) -> PBPState:
    """The state of a single run with a member axis of length 1; it shares its memory."""
    mean, variance, sites, noise, prior = (
        part.unsqueeze(0) for part in (state.mean, state.variance, state.sites, state.noise, state.prior)
    )
    return PBPState(mean, variance, sites, noise, prior, state.rows)


class _Known(NamedTuple):
    """What a run needs of its problem; the first axis is 1, or counts its members."""

    chain: Chain
    num_data: int
    noise: Tensor | None  # (1,) or (M,), a known variance; None: it has a Gamma posterior
    power: Tensor | None  # (1,) or (M,), of the likelihood; None: 1
    centre: Tensor  # (1, P) or (M, P), mean of the prior
    variance: Tensor  # (1, P) or (M, P), of the tempered prior; where the scale is left out, at lambda = 1
    left_out: Tensor  # positions of weights whose prior scale is left out
    prior_power: Tensor  # (1,) or (M,)


_problems: "WeakKeyDictionary[Joint, _Known]" = WeakKeyDictionary()


def _known(problem: Problem) -> _Known:
    """Return what a run needs of its problem, found once; a ValueError where the problem is of another kind."""
    joint = problem.as_joint(_NAME, "Use NUTS.")
    if joint not in _problems:
        _problems[joint] = _examined(joint)
    return _problems[joint]


def _examined(joint: Joint) -> _Known:
    chain, likelihood, prior = relu_chain(joint.network), joint.likelihood, joint.bound_prior
    if not isinstance(likelihood, GaussianNoise) or likelihood.learn or chain.layers[-1].outputs != 1:
        raise ValueError(
            f"{_NAME} needs one output with Gaussian noise, known or left out: Gaussian(scale=0.1) or Gaussian(). Got "
            f"{shown(likelihood)} and {chain.layers[-1].outputs} outputs. Use MeanField."
        )
    if not isinstance(prior, Normal):
        raise ValueError(f"{_NAME} needs a Normal prior. Got {shown(joint.prior)}. Use MeanField.")
    if joint.random_indices is not None:
        raise ValueError(f"{_NAME} needs all weights random. Got random={shown(joint.random)}. Use random='*'.")
    order, layout = chain.order, joint.network.layout
    powers = (joint.tempering.likelihood_power, joint.tempering.prior_power)
    power, prior_power = (torch.as_tensor(p, dtype=torch.float64, device=order.device).reshape(-1) for p in powers)
    like = torch.zeros((joint.num_members or 1, layout.size), dtype=torch.float64, device=order.device)
    centre = like + torch.as_tensor(prior.mean, dtype=torch.float64, device=like.device)
    left_out = torch.zeros(layout.size, dtype=torch.bool, device=order.device)
    for part, own in zip(layout, joint.prior.by_tensor(layout), strict=True):
        left_out[part.offset : part.offset + part.size] = own.chosen == LEFT_OUT
    variance = torch.where(left_out[order], 1.0 / chain.fans, prior.variance(like)[:, order])
    noise = None
    if likelihood.chosen != LEFT_OUT:
        noise = likelihood.variance(like[:, :1].unsqueeze(-1) if joint.num_members else like[:, :1]).reshape(-1)
    return _Known(
        chain,
        joint.num_data,
        noise,
        None if bool((power == 1.0).all()) else power,
        centre[:, order],
        variance / prior_power.unsqueeze(-1),
        left_out[order].nonzero().squeeze(-1),
        prior_power,
    )


def _absorb(known: _Known, state: PBPState, inputs: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Move the state, in place, to the moments of its product with the likelihood of one row (M, 1, D), (1 or M,).

    Returns -log Z of the row, (M,), at a likelihood of power 1.
    """
    mean, variance, power = state.mean, state.variance, known.power
    if weight is not None:
        power = weight.reshape(-1) if power is None else power * weight
    means, variances = known.chain.matrices(mean), known.chain.matrices(variance)
    output, spread, passages = forward(known.chain, means, variances, inputs)
    spread, residual = spread.reshape(-1), target - output.reshape(-1)
    square = residual * residual
    if known.noise is None:
        shape, rate = state.noise.unbind(-1)
        learnt = matched_precision(square, spread, shape, rate, power)
        noise = learnt.noise if power is None else rate / (shape - 1.0)
        total = spread + learnt.noise
        state.noise.copy_(torch.stack([learnt.shape, learnt.rate], dim=-1))
    else:
        noise = known.noise
        total = spread + (noise if power is None else noise / power)
    inverse = total.reciprocal()
    slope = residual * inverse  # d log Z / d E f
    bend = torch.addcmul(inverse, slope, slope, value=-1.0) * -0.5  # d log Z / d Var f
    in_mean, in_variance = backward(known.chain, means, variances, passages, slope.view(-1, 1, 1), bend.view(-1, 1, 1))
    move = variance * in_mean
    half = torch.addcmul(variance * in_variance, in_mean, move, value=-0.5)
    narrowed = torch.addcmul(variance, variance, half, value=2.0)
    lowest, highest = narrowed.aminmax()
    if not (lowest > 0.0 and highest < math.inf):  # NaN compares as false
        good = (narrowed > 0.0) & (narrowed < math.inf)
        move, narrowed = torch.where(good, move, 0.0), torch.where(good, narrowed, variance)
    mean.add_(move)
    variance.copy_(narrowed)
    plain = total if power is None else spread + noise
    return torch.addcdiv(plain.log(), square, plain) * 0.5 + _HALF_LOG_TWO_PI


class MatchedPrecision(NamedTuple):
    """The Gamma of a precision after a look at a residual; the old one where `good` is false."""

    noise: Tensor  # E 1 / (power tau) before
    shape: Tensor
    rate: Tensor
    good: Tensor


def matched_precision(
    square: Tensor, spread: Tensor, shape: Tensor, rate: Tensor, power: Tensor | None = None
) -> MatchedPrecision:
    """Match the Gamma(shape, rate) of tau to the moments of tau under its product with N(r; f, 1 / tau)^power.

    All are (n,); `square` is r^2, and f ~ N(0, spread). Z(a, b) = N(r; 0, spread + b / (a - 1)) stands for the
    Student-t density; then E tau = (a / b) Z(a + 1) / Z(a) and E tau^2 = (a (a + 1) / b^2) Z(a + 2) / Z(a), and the new
    Gamma has that mean and variance. N^power is, up to a constant, tau^((power - 1) / 2) N(r; f, 1 / (power tau)), so
    that a power shifts the shape and divides the rate. Where no Gamma of shape above 1 has these moments the old one
    stays.

    >>> one = torch.ones(1).double()
    >>> matched_precision(square=9.0 * one, spread=one, shape=6.0 * one, rate=6.0 * one).shape < 6.5
    tensor([True])
    """
    a, b = (shape, rate) if power is None else (shape + 0.5 * (power - 1.0), rate / power)
    noises = b.unsqueeze(-1) / (a.unsqueeze(-1) + _shifts(a.device))  # (n, 3)
    totals = spread.unsqueeze(-1) + noises
    logs = torch.addcdiv(totals.log(), square.unsqueeze(-1), totals)  # -2 log Z
    first, second = (logs[:, :2] - logs[:, 1:]).unbind(-1)  # 2 log(Z1 / Z), 2 log(Z2 / Z1)
    mean = a / b * (0.5 * first).exp()  # E tau
    new_shape = torch.add(a.reciprocal().log1p(), second - first, alpha=0.5).expm1().reciprocal()
    new_rate = new_shape / mean if power is None else new_shape / mean * power
    good = (new_shape > 1.0) & (new_rate < math.inf)  # false for NaN
    return MatchedPrecision(noises[:, 0], torch.where(good, new_shape, shape), torch.where(good, new_rate, rate), good)


@cache
def _shifts(device: torch.device) -> Tensor:
    """Shape - 1 of the Gammas in the three normalisers, relative to the shape."""
    return torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64, device=device)


def _refine_prior(known: _Known, state: PBPState) -> None:
    """Refine the prior factor of each weight whose scale is left out by expectation propagation, in place.

    The factor N(w; centre, 1 / (lambda n)) is taken out of q and put in again, at what the others say about lambda. As
    its Student-t density counts as Gaussian, it is one: N(w; centre, E 1 / (lambda n)). One weight follows another, for
    each moves lambda; what does not depend on lambda is computed for all at once.
    """
    index = known.left_out
    old, old_shape, old_rate = state.sites[:, :, index].unbind(1)  # (M, R)
    centre, unit = known.centre[:, index], known.variance[:, index] * known.prior_power.unsqueeze(-1)  # 1 / n
    now = state.variance[:, index].reciprocal()
    cavity = now - old
    spread = cavity.reciprocal()
    residual = (state.mean[:, index] * now - centre * old) * spread - centre
    wide = (cavity * (unit * WIDEST) <= 1.0).unbind(-1)
    power = None if bool((known.prior_power == 1.0).all()) else known.prior_power
    shape, rate = state.prior.unbind(-1)
    columns = (residual.square() / unit, spread / unit, old_shape, old_rate)  # in units of 1 / n
    changes = []
    for square, width, less, lower, skip in zip(*(part.unbind(-1) for part in columns), wide, strict=True):
        a, b = shape - less, rate - lower
        matched = matched_precision(square, width, a, b, power)
        good = matched.good & (matched.noise > 0.0) & (b > 0.0) & ~skip
        changes.append(torch.stack([matched.noise, matched.shape - a, matched.rate - b, good]))
        shape, rate = torch.where(good, matched.shape, shape), torch.where(good, matched.rate, rate)
    noise, more, higher, good = torch.stack(changes, dim=-1)  # (M, R) each
    site = (noise * unit).reciprocal()
    precision = cavity + site
    kept = good > 0.0
    state.sites[:, :, index] = torch.where(
        kept.unsqueeze(1), torch.stack([site, more, higher], 1), state.sites[:, :, index]
    )
    state.mean[:, index] = torch.where(kept, centre + residual * cavity / precision, state.mean[:, index])
    state.variance[:, index] = torch.where(kept, precision.reciprocal(), state.variance[:, index])
    state.prior.copy_(torch.stack([shape, rate], dim=-1))


def _with_scales(joint: Joint, known: _Known, state: PBPState) -> Joint:
    """The joint at the expected variances of noise and prior, where they were left out."""
    prior, likelihood, layout = joint.prior, joint.likelihood, joint.network.layout
    if known.noise is None:
        scale = (state.noise[..., 1] / (state.noise[..., 0] - 1.0)).sqrt()
        shaped = float(scale) if scale.dim() == 0 else scale.reshape(-1, 1, 1)
        likelihood = GaussianNoise(scale=shaped, chosen=WAY)
    if known.left_out.numel():
        scale = (state.prior[..., 1] / (state.prior[..., 0] - 1.0)).sqrt()
        fans, priors = known.chain.in_theta(known.chain.fans), {}
        for part, own in zip(layout, prior.by_tensor(layout), strict=True):
            if own.chosen == LEFT_OUT:
                each = (scale / fans[part.offset].sqrt()).cpu()
                own = own.rescaled(each if each.dim() else float(each)).as_chosen(WAY)
            priors[glob.escape(part.name)] = own
        prior = Layerwise(priors)
    return dataclasses.replace(joint, prior=prior, likelihood=likelihood)
