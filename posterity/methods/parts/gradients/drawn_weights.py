"""Estimators at draws of all weights, each draw shared by the rows of the batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive_whole
from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Gradients, Memory, Out, shifted
from posterity.model import Batch, Buffers, Joint, Problem
from posterity.numerics.random import Key
from posterity.numerics.workspace import workspace


@dataclass(frozen=True)
class WeightSampling(Estimator):
    """Pathwise gradients at draws of all weights, each draw shared by the rows of the batch.

    **Math**: w = mean + scale * eps; with g = d/dw lp log p(D | w), d/dmean = E g and d/dscale = E[g * eps], averaged
    over `draws`. With `antithetic` the passes come in pairs eps, -eps; where `draws` is odd, the second of a pair is
    the first pass of the next step, so that half of the noise need not be drawn.

    **Limit**: unbiased for every network. Rows share their noise, so the variance does not fall with the batch size.

    **Cost**: `draws` forward and backward passes.

    **References**: Blundell et al. (2015), Weight uncertainty in neural networks, section 3.2; Kingma and Welling
    (2014), section 2.4.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda w: -w.square().sum(), {"w": (1,)})
    >>> q = Factorised(torch.ones(1), torch.full((1,), 0.5), None)
    >>> term = WeightSampling(draws=2, antithetic=True).data_term(density, q, None, {}, {}, po.Key(0))
    >>> term.grad_mean  # of a parabola the pair gives the gradient exactly
    tensor([-2.])
    """

    draws: int = 1
    antithetic: bool = False

    def __post_init__(self) -> None:
        positive_whole("WeightSampling.draws", self.draws)

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        used = memory.get("used")  # noise whose mirror image comes next
        total, values = _gradients(joint, q, "grad") if out is None else out, []
        for draw in range(self.draws):
            mirror = used is not None
            if used is not None:
                noise, used = used, None
            elif self.antithetic:
                noise = used = q.noise(key.fold(draw) if draw else key)  # it may outlive the step
            else:
                space = workspace(joint, "noise", q.scale[0] if q.scale.dim() > 1 else q.scale, torch.float32)
                noise = q.noise(key.fold(draw) if draw else key, space)
            theta = q.moved(noise, workspace(joint, "theta", q.mean), -1.0 if mirror else 1.0)
            grads = _gradients(joint, q, "another grad") if draw else total
            value, _, buffers = joint.data_value_and_grad(theta, batch, buffers, grads.mean)
            values.append(value)
            torch.mul(q.random(grads.mean), noise, out=grads.scale)
            if mirror:
                grads.scale.neg_()
            if draw:
                total.mean.add_(grads.mean)
                total.scale.add_(grads.scale)
        value, *others = values
        for other in others:
            value = value + other
        if self.draws > 1:
            value = value / self.draws
            total.mean.div_(self.draws)
            total.scale.div_(self.draws)
        return DataTerm(value, total.mean, total.scale, buffers, {} if used is None else {"used": used})


def _gradients(joint: Problem, q: Factorised, name: str) -> Gradients:
    return Gradients(workspace(joint, name, q.mean), workspace(joint, f"{name}_scale", q.scale))


@dataclass(frozen=True)
class PairedSampling(Estimator):
    """Pathwise gradients at pairs of mirrored draws of all weights, which run together.

    **Math**: as `WeightSampling` with `antithetic`, at `draws` / 2 pairs mean + scale * eps and mean - scale * eps. The
    gradient in the mean is exact where the log-likelihood is quadratic in the weights.

    **Limit**: unbiased for every network without batch norm. Rows share their noise.

    **Cost**: one forward and backward pass of all draws as members, which for small networks takes little longer than
    that of one draw; one draw at a time where theta has members already, or the network batch-norm statistics.

    **References**: Kingma and Welling (2014), section 2.4; Mohamed et al. (2020), section 7.3.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda w: -w.square().sum(), {"w": (1,)})
    >>> q = Factorised(torch.ones(1), torch.full((1,), 0.5), None)
    >>> PairedSampling(draws=4).data_term(density, q, None, {}, {}, po.Key(0)).grad_mean
    tensor([-2.])
    """

    draws: int = 8

    def __post_init__(self) -> None:
        positive_whole("PairedSampling.draws", self.draws)
        if self.draws % 2:
            raise ValueError(f"PairedSampling.draws must be even. Got {self.draws}.")

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        half = key.normal((self.draws // 2, q.scale.shape[-1]), torch.float32, q.scale.device).to(q.scale.dtype)
        noise = torch.cat([half, -half])  # (S, R)
        if q.mean.dim() == 1 and not buffers:
            values, grads, _ = joint.data_value_and_grad(shifted(q.mean, q.scale * noise, q.places), batch, buffers)
            return DataTerm(values.mean(0), grads.mean(0), (q.random(grads) * noise).mean(0), buffers, {})
        sums = [torch.zeros_like(part) for part in (q.mean[..., 0], q.mean, q.scale)]
        for eps in noise:
            value, grad, buffers = joint.data_value_and_grad(q.moved(eps), batch, buffers)
            for total, term in zip(sums, (value, grad, q.random(grad) * eps), strict=True):
                total.add_(term)
        value, grad_mean, grad_scale = (total.div_(self.draws) for total in sums)
        return DataTerm(value, grad_mean, grad_scale, buffers, {})


@dataclass(frozen=True)
class StickTheLanding(Estimator):
    """Pathwise gradients of the whole ELBO without the score of q: their noise vanishes where q is the posterior.

    **Math**: with w = mean + scale * eps and h(w) = lp log p(D | w) + pp log p(w) - log q(w), where q inside h is held
    fixed, d/dmean = E dh/dw and d/dscale = E[dh/dw * eps]; the part that is left out, the score of q, is zero on
    average. Where q is proportional to the tempered joint density every draw gives zero.

    **Limit**: unbiased. Less noise than `WeightSampling` near the optimum of a rich family, often more far from it,
    since the closed forms of cross-entropy and entropy are not used.

    **Cost**: `draws` forward and backward passes, and one gradient of the prior for each.

    **References**: Roeder, Wu and Duvenaud (2017), Sticking the landing.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda w: -0.5 * w.square().sum(), {"w": (1,)})
    >>> q = Factorised(torch.zeros(1), torch.ones(1), None)  # the density itself
    >>> term = StickTheLanding().data_term(density, q, None, {}, {}, po.Key(0))
    >>> term.grad_mean - term.divergence_grads[0]
    tensor([0.])
    """

    draws: int = 1

    def __post_init__(self) -> None:
        positive_whole("StickTheLanding.draws", self.draws)

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        sums = [torch.zeros_like(part) for part in (q.mean[..., 0], q.mean, q.scale, q.mean, q.scale)]
        for draw in range(self.draws):
            noise = q.noise(key.fold(draw))
            theta = q.moved(noise)
            value, grad, buffers = joint.data_value_and_grad(theta, batch, buffers)
            pull = _pull(joint, q, theta, noise)
            terms = value, grad, q.random(grad) * noise, pull, q.random(pull) * noise
            for total, term in zip(sums, terms, strict=True):
                total.add_(term)
        value, grad_mean, grad_scale, pull_mean, pull_scale = (total.div_(self.draws) for total in sums)
        return DataTerm(value, grad_mean, grad_scale, buffers, {}, Gradients(pull_mean, pull_scale))


def _pull(joint: Problem, q: Factorised, theta: Tensor, noise: Tensor) -> Tensor:
    """Gradient in w of log q(w) - pp log p(w) at a draw, (..., T), with q held fixed."""
    pull = torch.zeros_like(theta)
    if isinstance(joint, Joint):
        power = joint.powers[1]
        weights, raw = joint.split(theta)
        pull[..., : joint.num_weights] = joint.bound_prior.value_and_grad(weights)[1]
        if raw.shape[-1]:
            pull[..., joint.num_weights :] = joint.likelihood.free_value_and_grad(raw)[1]
        pull.mul_(-power.unsqueeze(-1) if isinstance(power, Tensor) else -power)
    score = noise / q.scale  # minus the gradient of log q
    if q.places is None:
        pull[..., : score.shape[-1]].sub_(score)
        return pull
    return pull.index_add_(-1, q.places, -score)


@dataclass(frozen=True)
class ScoreFunction(Estimator):
    """The score-function estimator (REINFORCE): the log-likelihood need not be differentiable.

    **Math**: with f = lp log p(D | w) at w = mean + scale * eps, d/dmean = E[(f - b) eps / scale] and d/dscale =
    E[(f - b) (eps^2 - 1) / scale]. `baseline` takes b = E[f g^2] / E[g^2], the constant of least variance, where g is
    eps or eps^2 - 1, for each weight, from the other draws; else b = 0. Weights that are points and the
    likelihood's learnt parameters have their ordinary gradient, if there are any.

    **Limit**: unbiased. The variance grows with the number of weights and with f itself: for comparison, for very few
    weights, or for likelihoods without gradients.

    **Cost**: `draws` forward passes (backward too where there are points), and all draws of the noise in memory.

    **References**: Williams (1992); Mohamed et al. (2020), Monte Carlo gradient estimation in machine learning.

    **Example**:

    >>> import posterity as po
    >>> density = po.Density(lambda w: w.square().sum(), {"w": (1,)})
    >>> q = Factorised(torch.tensor([0.7]), torch.tensor([0.4]), None)
    >>> term = ScoreFunction(draws=20_000).data_term(density, q, None, {}, {}, po.Key(0))
    >>> bool((term.grad_mean - 1.4).abs() < 0.1)
    True
    """

    draws: int = 8
    baseline: bool = True

    def __post_init__(self) -> None:
        positive_whole("ScoreFunction.draws", self.draws)
        if self.baseline and self.draws < 2:
            raise ValueError(
                f"ScoreFunction.draws must be at least 2 with a baseline, which comes from the other draws. "
                f"Got {self.draws}. Take more draws, or baseline=False."
            )

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        values, noises, points = [], [], torch.zeros_like(q.mean)
        for draw in range(self.draws):
            noise = q.noise(key.fold(draw))
            theta = q.moved(noise)
            if q.scale.shape[-1] == q.mean.shape[-1]:
                value, buffers = _value(joint, theta, batch, buffers)
            else:
                value, grad, buffers = joint.data_value_and_grad(theta, batch, buffers)
                points.add_(grad, alpha=1.0 / self.draws)
            values.append(value)
            noises.append(noise)
        value, noise = torch.stack(values), torch.stack(noises)  # (K, ...) and (K, R)
        grad_mean, grad_scale = (
            score_gradients(value, scores, self.baseline).mean(0) / q.scale for scores in (noise, noise.square() - 1.0)
        )
        if q.places is None:
            points[..., : grad_mean.shape[-1]] = grad_mean
        else:
            points.index_copy_(-1, q.places, grad_mean)
        return DataTerm(value.mean(0), points, grad_scale, buffers, {})


def score_gradients(values: Tensor, scores: Tensor, baseline: bool) -> Tensor:
    """(f - b) g for each draw: values (K, ...) and scores (K, R) -> (K, ..., R), b from the other draws."""
    values = values.unsqueeze(-1)  # (K, ..., 1)
    scores = scores.reshape(len(scores), *[1] * (values.dim() - 2), -1)  # (K, ..., R)
    if not baseline:
        return values * scores
    squares = scores.square()
    weighted = values * squares
    others = weighted.sum(0) - weighted, squares.sum(0) - squares
    return (values - others[0] / others[1].clamp_min(torch.finfo(squares.dtype).tiny)) * scores


def _value(joint: Problem, theta: Tensor, batch: Batch, buffers: Buffers) -> tuple[Tensor, Buffers]:
    """The tempered log-likelihood at theta, without a graph."""
    if not isinstance(joint, Joint):
        with torch.no_grad():
            return joint.log_density(theta, batch), buffers
    weights, raw = joint.split(theta)
    views = joint.network.views(weights)
    value, buffers = joint.data_value(views, raw, batch, buffers, members=theta.dim() > 1)
    return value.detach(), buffers
