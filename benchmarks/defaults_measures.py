"""Measures of `benchmarks.defaults`: how far a fit is from its own optimum, and whether it said so.

- distance: of a point to the mode of its problem, in posterior standard deviations, root mean square over weights. For
  networks the mode is where L-BFGS comes to from the point (its own basin), and the scales are of Gauss-Newton there.
- gap: nats of ELBO below the optimum of the method's family; for networks below a long run from the method's own
  result, both estimated with the same noise. For methods that tune prior and noise on linear regressions: nats of log
  evidence below its maximum.
- spread error: largest relative error of a standard deviation, of Gaussians at a mode.
- for samplers: errors of means and standard deviations in posterior standard deviations, beside what their own Monte
  Carlo standard errors allow, and R-hat (of network outputs for networks).
- NLL of held-out rows, against that of a plug-in point and against the mean or the frequencies of the targets, with
  paired standard errors. The plug-in is the point that a method started from, else its own mean, else MAP's point.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.defaults_cases import Case, Linear, minimised, with_hyper
from benchmarks.defaults_methods import METHODS, Entry, Fit, fit
from posterity.diagnostics import mcse_mean, mcse_sd, rhat
from posterity.errors import NotPositiveDefinite
from posterity.metrics import negative_log_likelihood
from posterity.model import Joint
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Mixture, Point, Posterior, Samples

LIMITS = {
    "distance": 0.05,  # standard deviations, problems with a truth
    "distance of networks": 1.0,
    "gap": 0.1,  # nats, problems with a truth
    "gap of networks": 0.02,  # of the absolute ELBO
    "spread error": 0.05,
    "Monte Carlo errors": 4.0,  # standard errors that a sampler's moments may be off by, beside the next
    "bias": 0.05,  # posterior standard deviations
    "R-hat": 1.2,
    "NLL": 0.005,  # nats per row worse than the plug-in, beside one paired standard error
}
DRAWS = 8192  # of an ELBO
REFERENCE_STEPS, REFERENCE_DRAWS, REFERENCE_STEP = 20_000, 16, 0.01
OUTPUT_ROWS = 20  # rows at which R-hat of a network is taken


@dataclass
class Row:
    """One method on one case; None where a measure does not apply."""

    case: str
    group: str
    method: str
    settings: str = ""
    posterior: str = ""
    seconds: float = 0.0
    distance: float | None = None
    worst_distance: float | None = None
    below_mode: float | None = None
    gap: float | None = None
    gap_error: float | None = None
    best: float | None = None
    spread_error: float | None = None
    moment_error: float | None = None
    moment_excess: float | None = None
    rhat: float | None = None
    nll: float | None = None
    against_plug_in: float | None = None
    nll_error: float | None = None
    against_baseline: float | None = None
    baseline_error: float | None = None
    said: list[str] = field(default_factory=list)
    error: str = ""
    far: list[str] = field(default_factory=list)

    @property
    def silent(self) -> bool:
        """Whether the result is far from what it should be, and nothing was said."""
        return bool(self.far) and not self.said and not self.error

    def document(self) -> dict[str, object]:
        """The row as JSON holds it."""
        return {**asdict(self), "far_and_silent": self.silent}


def measured(
    name: str, case: Case, start: Posterior | None, seed: int = 0, reference_steps: int = REFERENCE_STEPS
) -> Row:
    """Fit a method of `METHODS` at its defaults and measure it; `start` is MAP's posterior."""
    entry = METHODS[name]
    done = fit(entry, case, start, seed)
    row = Row(case.name, case.group, name, done.settings, seconds=done.seconds, said=done.said, error=done.error)
    if done.posterior is None:
        return row
    q = done.posterior
    row.posterior = type(q).__name__
    try:
        if case.truth is None:
            _against_own_basin(row, entry, case, q, reference_steps)
        else:
            _against_truth(row, entry, case.truth, q)
        _held_out(row, entry, case, done, start)
    except (torch.linalg.LinAlgError, NotPositiveDefinite) as error:  # numbers so far off that nothing can be said
        row.far = [f"not measurable: {error}"]
    row.far += _far(row, entry, case.truth is None)
    return row


def _against_truth(row: Row, entry: Entry, truth: Linear, q: Posterior) -> None:
    own = with_hyper(truth, _joint(q)) if entry.tunes else truth
    if entry.kind == "samples":
        _moments(row, truth, q)
    if entry.kind in ("point", "mode") or (entry.tunes and truth.family == "gaussian"):
        scale = own.covariance.diagonal().sqrt()
        _distances(row, [(part.point().double() - own.mode) / scale for part in _parts(q)])
    if entry.kind == "mode" and not entry.tunes:
        ratio = _gaussian(q).variance.sqrt().double() / truth.covariance.diagonal().sqrt()
        row.spread_error = float((ratio - 1.0).abs().max())
    moved = entry.tunes and not torch.allclose(own.prior, truth.prior, rtol=1e-6)
    if moved and truth.family == "gaussian":
        row.best = truth.best_evidence()
        row.gap = row.best - own.moments.log_evidence
    elif entry.kind in ("diagonal", "low rank", "full") or (entry.kind == "mode" and truth.family == "gaussian"):
        gaussian = _gaussian(q)
        full = entry.kind != "diagonal" or bool(entry.tunes and truth.family == "gaussian")
        factor = torch.linalg.cholesky(gaussian.precision.covariance())
        row.best = own.best_elbo(full)
        row.gap = row.best - float(own.elbo(gaussian.mean.double(), factor))


def _distances(row: Row, deviations: list[Tensor]) -> None:
    row.distance = max(float(each.square().mean().sqrt()) for each in deviations)
    row.worst_distance = max(float(each.abs().max()) for each in deviations)


def _moments(row: Row, truth: Linear, q: Posterior) -> None:
    """Errors of means and standard deviations, and by how much they exceed what Monte Carlo error allows."""
    exact = truth.moments
    if not isinstance(q, Samples):
        gaussian = _gaussian(q)
        off = torch.stack([gaussian.mean - exact.mean, gaussian.variance.sqrt() - exact.scale]) / exact.scale
        row.moment_error = row.moment_excess = float(off.abs().max())
        return
    draws = q.theta.double()
    flat = draws.flatten(0, 1)
    errors = torch.stack([(flat.mean(0) - exact.mean).abs(), (flat.std(0) - exact.scale).abs()]) / exact.scale
    allowed = LIMITS["Monte Carlo errors"] * torch.stack([mcse_mean(draws), mcse_sd(draws)]) / exact.scale
    row.moment_error = float(errors.max())
    row.moment_excess = float((errors - allowed.nan_to_num(0.0)).max())
    row.rhat = float(rhat(draws).max())


def _against_own_basin(row: Row, entry: Entry, case: Case, q: Posterior, steps: int) -> None:
    def problem(part: Posterior) -> Joint:
        return _joint(part) if entry.tunes or not case.scales_given else case.joint()

    if entry.kind in ("point", "mode"):
        pairs = [_to_own_mode(case, problem(part), part.point().double()) for part in _parts(q)]
        _distances(row, [deviations for deviations, _ in pairs])
        row.below_mode = max(nats for _, nats in pairs)
    if entry.kind == "samples":
        assert isinstance(q, Samples)
        inputs = case.test[0][:OUTPUT_ROWS]
        outputs = [case.outputs(chain, inputs).flatten(-2) for chain in q.theta[..., : _joint(q).num_weights]]
        row.rhat = float(rhat(torch.stack(outputs)).max())
    if entry.kind in ("diagonal", "low rank", "full") and case.group == "mlp":
        row.best, row.gap, row.gap_error = elbo_gap(case, problem(q), _gaussian(q), entry.kind, steps)


def log_joint(case: Case, joint: Joint, theta: Tensor) -> Tensor:
    """log p(D, theta) in float64 under the joint's likelihood and prior, for theta (..., P)."""
    return log_likelihood(case, joint, theta) + joint.bound_prior.log_prob(theta)


def log_likelihood(case: Case, joint: Joint, theta: Tensor) -> Tensor:
    """log p(D | theta) in float64 for theta (..., P)."""
    x, y = case.train
    targets = y.double() if y.is_floating_point() else y
    return joint.likelihood.log_prob(case.outputs(theta, x), targets).sum(-1)


def _to_own_mode(case: Case, joint: Joint, point: Tensor) -> tuple[Tensor, float]:
    """Distance (P,) to the mode of the point's own basin, in standard deviations of Gauss-Newton there, and in nats."""
    mode, negative = minimised(lambda theta: -log_joint(case, joint, theta), point, iterations=2000)
    jacobian = torch.func.jacrev(lambda theta: case.outputs(theta, case.train[0]))(mode)  # (N, D, P)
    outputs = case.outputs(mode, case.train[0])
    fisher = joint.likelihood.output_fisher(outputs, 1).double()  # (N, D, D)
    curvature = torch.einsum("nap,nab,nbq->pq", jacobian, fisher, jacobian)
    precision = curvature + joint.bound_prior.precision(mode).expand_as(mode).diag()
    scale = torch.linalg.inv(precision).diagonal().sqrt()
    return (point - mode) / scale, -float(negative + log_joint(case, joint, point))


class _Spread(NamedTuple):
    """A Gaussian: its mean (P,), its draws at noise (S, K), its variances (P,), and its log determinant."""

    mean: Tensor
    draws: Callable[[Tensor], Tensor]
    variance: Tensor
    logdet: Tensor


def _diagonal(values: Tensor, size: int) -> _Spread:
    mean, scale = values[:size], values[size:].exp()
    return _Spread(mean, lambda noise: mean + noise * scale, scale.square(), 2.0 * values[size:].sum())


def _full(values: Tensor, size: int) -> _Spread:
    mean, log_diagonal = values[:size], values[size : 2 * size]
    rows, columns = torch.tril_indices(size, size, offset=-1)
    factor = log_diagonal.exp().diag().index_put((rows, columns), values[2 * size :])
    return _Spread(mean, lambda noise: mean + noise @ factor.T, factor.square().sum(1), 2.0 * log_diagonal.sum())


def _low_rank(values: Tensor, size: int) -> _Spread:
    mean, scale, factor = values[:size], values[size : 2 * size].exp(), values[2 * size :].reshape(size, -1)
    inner = torch.eye(factor.shape[1], dtype=values.dtype) + factor.T @ (factor / scale.square()[:, None])
    logdet = 2.0 * values[size : 2 * size].sum() + torch.logdet(inner)
    variance = scale.square() + factor.square().sum(1)
    return _Spread(mean, lambda z: mean + z[:, :size] * scale + z[:, size:] @ factor.T, variance, logdet)


def _packed(kind: str, q: Gaussian) -> Tensor:
    """The Gaussian as the flat vector that its family is made of."""
    mean, precision = q.mean.double(), q.precision
    if kind == "diagonal":
        return torch.cat([mean, 0.5 * q.variance.double().log()])
    if kind == "low rank":
        own, factor = precision.own, precision.factor  # type: ignore[attr-defined]
        return torch.cat([mean, 0.5 * own.log(), factor.mT.flatten()])
    factor = torch.linalg.cholesky(precision.covariance())
    rows, columns = torch.tril_indices(*factor.shape, offset=-1)
    return torch.cat([mean, factor.diagonal().log(), factor[rows, columns]])


_FAMILIES = {"diagonal": _diagonal, "full": _full, "low rank": _low_rank}


def elbo_gap(case: Case, joint: Joint, q: Gaussian, kind: str, steps: int) -> tuple[float, float, float]:
    """Return the ELBO of a long run from q, by how much q's is lower, and the standard error of that difference.

    The run is Adam with a cosine to zero on `REFERENCE_DRAWS` draws a step, in float64. Both ELBOs share their noise;
    entropy and E log prior are in closed form, for a normal prior around zero.
    """
    family, size, key = _FAMILIES[kind], q.mean.shape[-1], Key(0).fold("reference")
    precision = joint.bound_prior.precision(q.mean.double()).double().expand(size)
    constant = 0.5 * float(precision.log().sum()) + 0.5 * size  # the terms log(2 pi) cancel

    def elbo(spread: _Spread, noise: Tensor) -> Tensor:
        """Estimates (S,) of the ELBO, one for each row of noise (S, K)."""
        second = (precision * (spread.mean.square() + spread.variance)).sum()
        return log_likelihood(case, joint, spread.draws(noise)) + 0.5 * (spread.logdet - second) + constant

    start = _packed(kind, q).detach()
    width = size if kind != "low rank" else len(start) // size - 2 + size
    values = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([values], lr=REFERENCE_STEP)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = key.generator("cpu")
    for _ in range(steps):
        noise = torch.randn(REFERENCE_DRAWS // 2, width, dtype=torch.float64, generator=generator)
        loss = -elbo(family(values, size), torch.cat([noise, -noise])).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    noise = key.fold("elbo").normal((DRAWS, width), torch.float64)
    with torch.no_grad():
        pairs = [[elbo(family(v, size), part) for part in noise.split(512)] for v in (start, values.detach())]
    ours, best = (torch.cat(parts) for parts in pairs)
    difference = best - ours
    return float(best.mean()), float(difference.mean()), float(difference.std()) / math.sqrt(DRAWS)


def _held_out(row: Row, entry: Entry, case: Case, done: Fit, start: Posterior | None) -> None:
    assert done.posterior is not None
    x, y = case.test
    own = negative_log_likelihood.rows(done.posterior.predict(x), y).double()
    gaussian = done.posterior.as_gaussian() if done.start is None else None
    if gaussian is not None:
        plug_in: Posterior = Point(gaussian.joint, gaussian.mean, gaussian.buffers)
    elif entry.dropout:
        plug_in = Point(_joint(done.posterior), done.posterior.point())
    else:
        plug_in = done.posterior if start is None or row.method == "MAP" else start
    row.nll = float(own.mean())
    point = negative_log_likelihood.rows(plug_in.predict(x), y).double()
    row.against_plug_in, row.nll_error = _paired(own - point)
    row.against_baseline, row.baseline_error = _paired(own - case.baseline())


def _paired(differences: Tensor) -> tuple[float, float]:
    """Mean and standard error over rows."""
    return float(differences.mean()), float(differences.std()) / math.sqrt(len(differences))


def _far(row: Row, entry: Entry, network: bool) -> list[str]:
    """The measures that are beyond their limits; a number that is not finite is.

    Where there is a truth, NLL counts for methods that have no other measure alone: on one draw of the rows the exact
    posterior, too, may lose to a point.
    """
    of = " of networks" if network else ""
    gap = LIMITS["gap"] if not network else LIMITS["gap of networks"] * abs(row.best or 0.0)
    pairs = {
        "distance": (row.distance, LIMITS["distance" + of]),
        "gap": (row.gap, gap),
        "spread error": (row.spread_error, LIMITS["spread error"]),
        "moments": (row.moment_excess, LIMITS["bias"]),
        "R-hat": (row.rhat, LIMITS["R-hat"]),
    }
    if network or entry.kind == "spread":
        pairs["NLL"] = (row.against_plug_in, LIMITS["NLL"] + (row.nll_error or 0.0))
    if network:
        pairs["baseline"] = (row.against_baseline, LIMITS["NLL"] + 2.0 * (row.baseline_error or 0.0))
    return [name for name, (value, limit) in pairs.items() if value is not None and not value <= limit]


def _parts(q: Posterior) -> Sequence[Posterior]:
    return q.posteriors if isinstance(q, Mixture) else [q]


def _joint(q: Posterior) -> Joint:
    joint = q.joint
    assert isinstance(joint, Joint)
    return joint


def _gaussian(q: Posterior) -> Gaussian:
    gaussian = q.as_gaussian()
    if gaussian is None:
        raise TypeError(f"A Gaussian posterior is wanted. Got {type(q).__name__}.")
    return gaussian
