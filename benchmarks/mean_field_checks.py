"""Our ELBO and its gradient against a plain autograd ELBO, and against the closed form of a linear model.

A method is looked at through `init`, `step` and `posterior` alone: one step of plain gradient ascent moves means and
log-scales by the gradient, which is read off the posteriors before and after.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from benchmarks.mean_field_parts import SameScale, our_joint
from posterity.model.data import Batch
from posterity.networks import MLP
from posterity.numerics.random import Key

SCALE = 0.01  # of all weights where the gradient is looked at
SMALL_STEP = 1e-4
KEYS = 300
STANDARD_ERRORS = 5.0
TOLERANCE = 1e-6

Moments = tuple[Tensor, Tensor]


def moments(method: Any, joint: po.Joint, state: Any) -> Moments:
    """Means and log-scales of the posterior at a state, copied."""
    q = method.posterior(joint, [method.keep(state)])
    return q.mean.clone(), 0.5 * q.variance.log()


def ascended(method: Any, joint: po.Joint, batch: Batch, key: Key, steps: int) -> tuple[Moments, Moments, float]:
    """Where a run began, its mean gradient over steps in means and log-scales, and its mean loss, for each datum."""
    state = method.init(joint, joint.initial(), key.fold("init"))
    before, losses = moments(method, joint, state), []
    for step in range(steps):
        state, info = method.step(joint, state, batch, key.fold(step))
        losses.append(float(info["loss"]))
    after = moments(method, joint, state)
    size = steps * method.optimizer.step_size
    return before, ((after[0] - before[0]) / size, (after[1] - before[1]) / size), sum(losses) / steps


def against_autograd(sizes: Sequence[int], rows: int = 128) -> dict[str, float]:
    """Relative errors of loss and gradient of one step with one draw, in float64, at the noise that the step drew.

    The noise is worked out from the two gradients (that in a log-scale is that in the mean times scale times noise,
    beside known terms), and has to look standard normal; then an ELBO written down plainly is differentiated at it.
    The network is smooth: behind a unit that is off, noise has no gradient from which it could be worked out.
    """
    torch.manual_seed(0)
    module, x = MLP(sizes, activation="tanh").double(), Key(1).normal((rows, sizes[0]), torch.float64)
    y = torch.arange(rows) % sizes[-1]
    joint, optimizer = our_joint(module), po.optim.SGD(step_size=1.0, momentum=0.0)
    method = po.methods.MeanField(1, None, optimizer, initial_scales=SameScale(SCALE))
    (mean, log_scale), (grad_mean, grad_log_scale), loss = ascended(
        method, joint, joint.check(Batch(x, y)), Key(0), steps=1
    )
    scale, share = log_scale.exp(), 1.0 / joint.num_data
    data_grad = grad_mean + share * mean
    noise = (grad_log_scale + share * (scale.square() - 1.0)) / (data_grad * scale)
    noise[data_grad.abs() < 1e-12] = 0.0  # not to be told from rounding; rare
    known = noise[data_grad.abs() > 1e-6]
    off = max(abs(float(known.mean())), abs(float(known.var()) - 1.0) / math.sqrt(2.0)) * math.sqrt(known.numel())

    leaves = mean.requires_grad_(), log_scale.requires_grad_()
    weights = mean + log_scale.exp() * noise
    parts = weights.split([p.numel() for p in module.parameters()])
    named = {name: w.view_as(p) for (name, p), w in zip(module.named_parameters(), parts, strict=True)}
    nll = nn.functional.cross_entropy(torch.func.functional_call(module, named, (x,)), y)
    kl = (-log_scale + 0.5 * (log_scale.exp().square() + mean.square()) - 0.5).sum()
    plain = nll + share * kl
    wanted = torch.autograd.grad(-plain, leaves)
    errors = {
        "loss": abs(loss / plain.item() - 1.0),
        "gradient in means": float((grad_mean - wanted[0]).norm() / wanted[0].norm()),
        "gradient in log-scales": float((grad_log_scale - wanted[1]).norm() / wanted[1].norm()),
    }
    bad = {name: error for name, error in errors.items() if not error < TOLERANCE}
    if bad or not off < STANDARD_ERRORS:
        raise ValueError(f"MeanField is not at the autograd ELBO: {bad}, noise off by {off:.3g} standard errors.")
    return errors


def against_closed_form(estimator: Any) -> float:
    """The largest distance, in standard errors, of loss and gradients from those of a linear model with known noise.

    Means over KEYS keys of two steps each (a mirrored pair, where the estimator has those), on all 20 rows.
    """
    module, x = nn.Linear(3, 1, bias=False).double(), Key(1).normal((20, 3), torch.float64)
    true = x.new_tensor([[1.0, -2.0, 0.5]])
    y = x @ true.T
    with torch.no_grad():
        module.weight.copy_(true + 0.1)  # near them noise is small, and so are errors that can be seen
    joint = po.Joint(module, po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(scale=1.0), num_data=20)
    method = po.methods.MeanField(
        2, None, po.optim.SGD(step_size=SMALL_STEP, momentum=0.0), estimator=estimator, initial_scales=SameScale(0.3)
    )
    batch, found = joint.check(Batch(x, y)), []
    for number in range(KEYS):
        (mean, log_scale), grads, loss = ascended(method, joint, batch, Key(2).fold(number), steps=2)
        found.append(torch.cat([*grads, torch.tensor([loss], dtype=torch.float64)]))
    wanted = _linear_elbo(x, y.flatten(), mean, log_scale)
    values = torch.stack(found)  # (KEYS, 7)
    errors = values.std(0) / math.sqrt(KEYS)
    # the second step begins a little off the first one's place
    away = ((values.mean(0) - wanted).abs() - 10.0 * SMALL_STEP * wanted.abs()).clamp_min(0.0)
    worst = float((away / errors.clamp_min(1e-12)).max())
    if not worst < STANDARD_ERRORS:
        raise ValueError(f"{estimator}: {worst:.3g} standard errors from the closed form of a linear model.")
    return worst


def _linear_elbo(x: Tensor, y: Tensor, mean: Tensor, log_scale: Tensor, noise: float = 0.5) -> Tensor:
    """Gradient in means and log-scales of the ELBO for each datum, and minus its value, (2 R + 1,)."""
    rows, variance = len(y), (2.0 * log_scale).exp()
    residual, squares = y - x @ mean, x.square().sum(0)
    constant = -0.5 * rows * math.log(2.0 * math.pi * noise**2)
    fit = constant - 0.5 * (residual.square().sum() + (squares * variance).sum()) / noise**2
    kl = (0.5 * (variance + mean.square() - 1.0) - log_scale).sum()
    grad_mean = x.T @ residual / noise**2 - mean
    grad_log_scale = -squares * variance / noise**2 - variance + 1.0
    return torch.cat([grad_mean, grad_log_scale, (kl - fit).reshape(1)]) / rows
