"""The distance of weights from a mode, in posterior standard deviations, by one pass over the data."""

import dataclasses
import logging
import math
from collections.abc import Iterable
from functools import partial
from math import prod

import torch
from torch import Tensor

from posterity.curvature import Curvature, Diagonal, GaussNewton, Hessian, MonteCarloFisher
from posterity.curvature.curvature import Rows
from posterity.curvature.survey import survey
from posterity.errors import PosterityError
from posterity.inference.allocations import gradient_bytes
from posterity.methods.parts.curvature_memory import pass_bytes
from posterity.model import Batch, Buffers, Data, Joint, Problem
from posterity.model.backward import batch_log_likelihood
from posterity.model.data import NoData
from posterity.numerics.random import Key

logger = logging.getLogger("posterity")

FAR = 1.0  # standard deviations from the mode, root mean square over the weights, that raise a warning
WHOLE = 300  # weights up to which the whole curvature is formed, not its diagonal
CURVED = 512  # rows for the curvature
SHARE = 0.1  # of the rows of a fit: the most that the gradient is taken at
LEAST = 1000  # rows, for which it is taken at in any case
COLUMNS = 10  # outputs up to which the curvature is exact; else by random draws of the targets


def root_mean_square(slope: Tensor, curvature: Tensor) -> float:
    """Return the distance in conditional standard deviations, from a gradient and a curvature's diagonal, (R,)."""
    return float((slope.square() / curvature).mean().sqrt())


def mode_distance(joint: Problem, theta: Tensor, buffers: Buffers, data: Data, seen: int, size: int | None) -> Tensor:
    """Return the distance (...) of theta (..., P) from a mode in posterior standard deviations, in float64.

    It is (g H^-1 g / P)^1/2, with g the gradient of the log density and H the Gauss-Newton matrix and the prior's
    precision: of up to 300 weights the whole matrix, of more its diagonal. H is from 512 rows; g is from all rows, in
    batches of `size`, unless they are more than 1,000 and than a tenth of the `seen` rows of the fit. From a sample of
    rows it is a lower bound: what the noise of the sample explains, with three standard deviations, is subtracted. A
    learnt parameter of the likelihood counts by its own second derivative. Raises a ValueError where there is no such
    distance: see the messages.
    """
    if not bool(torch.isfinite(theta).all()):
        raise ValueError("the weights are not finite")
    if isinstance(joint, Joint):
        _refuse_unmeasured(joint, data)
        measured = _of_rows(joint, theta, buffers, data, seen, size)
    elif joint.size <= WHOLE:
        slope = joint.value_and_grad(theta, None)[1].to(torch.float64)  # type: ignore[arg-type]
        each = [(slope, theta)] if theta.dim() == 1 else list(zip(slope, theta, strict=True))
        measured = [_solved(g, Rows(Hessian(), joint, own, None, None, Key(0)).matrix()) for g, own in each]
    else:
        raise ValueError(f"the density has more than {WHOLE} parameters")
    distance = torch.stack(measured).clamp_min(0.0).sqrt()
    return distance if theta.dim() > 1 else distance[0]


def distance_bytes(joint: Problem, data: Data, seen: int, size: int | None) -> list[dict[str, int]]:
    """Return the bytes that `mode_distance` takes, in its phases; none where there is no distance."""
    if not isinstance(joint, Joint):
        return [{"distance to the mode": 8 * 4 * joint.size**2 if joint.size <= WHOLE else 0}]
    try:
        _refuse_unmeasured(joint, data)
    except ValueError:
        return []
    name, double, own = "distance to the mode", 8 * joint.size, joint.size * joint.dtype.itemsize
    members, rows = joint.num_members or 1, min(data.num_data, data.num_data if size is None else size)
    sums = members * (2 if rows < data.num_data else 1) * double  # the gradient, and the curvature of batches before
    derivatives = curvature_bytes(joint, data, _curved(rows, min(data.num_data, _allowed(seen))))
    return [
        {name: sums + members * own, "activations of a batch": gradient_bytes(joint, data, size)},
        {name: sums + members * (own + double)},  # a gradient is added, in float64
        {name: 2 * members * double + own, "derivatives of some rows": derivatives},
        {name: (2 * members + 3) * double},  # with the prior's precision
    ]


def curvature_bytes(joint: Joint, data: Data, rows: int) -> int:
    """Return the bytes of the derivatives for the curvature of so many rows."""
    joint = dataclasses.replace(joint.member(0), random="*")
    known = survey(joint, data.first().member(0).inputs)
    kind = _kind(max(1, prod(known.event)))
    return pass_bytes(joint, known, kind, Diagonal(), rows)["derivatives of some rows"]


def _refuse_unmeasured(joint: Joint, data: Data) -> None:
    if joint.bound_prior.nonsmooth:
        raise ValueError("the prior has kinks, where a gradient does not vanish")
    if data.augmentation is not None:
        raise ValueError("an augmentation changes the rows of each step")
    if joint.network.trains_statistics or joint.network.mixes_rows:
        raise ValueError("batch norm makes the density depend on the batches")
    if joint.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{joint.dtype} has too few digits")
    if isinstance(data, NoData):
        raise ValueError("there are no rows")


def _allowed(seen: int) -> int:
    """The most rows that the gradient is taken at."""
    return max(LEAST, int(SHARE * seen))


def _curved(rows: int, number: int) -> int:
    """Rows of a batch that the curvature is taken at, where the gradient is taken at this number in all."""
    return max(1, min(rows, -(-CURVED * rows // number)))


def _of_rows(joint: Joint, theta: Tensor, buffers: Buffers, data: Data, seen: int, size: int | None) -> list[Tensor]:
    """Squared distances of the members."""
    joint = dataclasses.replace(joint, random="*")
    number, allowed = data.num_data, _allowed(seen)
    feed: Iterable[Batch | None] = data.passes(size).from_step(0)
    if allowed < number:
        rows = min(number, LEAST if size is None else size)
        feed = data.minibatches(rows, max(1, allowed // rows), Key(0).fold("mode distance")).from_step(0)
    members = 1 if theta.dim() == 1 else len(theta)
    grad = torch.zeros_like(theta, dtype=torch.float64)
    curvatures: list[Tensor] = []
    counted = curved = 0
    for batch in feed:
        assert batch is not None
        grad.add_(joint.value_and_grad(theta, batch, buffers, train=False)[1], alpha=batch.size)
        counted += batch.size
        few = _curved(batch.size, min(number, allowed))
        curved += few
        part = batch.map(partial(torch.narrow, dim=1 if batch.per_member else 0, start=0, length=few))
        for index in range(members):
            own, at, rows_of, kept = joint, theta, part, buffers
            if theta.dim() > 1:
                own, at, rows_of = joint.member(index), theta[index], part.member(index)
                kept = {name: b[index] for name, b in buffers.items()}
            if len(curvatures) <= index:
                curvatures.append(_curvature(own, at, rows_of, kept))
            else:
                curvatures[index].add_(_curvature(own, at, rows_of, kept))
    slope = grad.div_(counted).reshape(members, -1)
    lacking = number / counted - 1.0
    measured = []
    for index, total in enumerate(curvatures):
        own, at = (joint, theta) if theta.dim() == 1 else (joint.member(index), theta[index])
        known = total.mul_(float(own.tempering.likelihood_power)).mul_(number / curved)
        squared = _solved(slope[index], _with_prior(own, at, known))
        measured.append(squared - lacking * (1.0 + 3.0 * math.sqrt(2.0 / at.numel())) if lacking > 0.0 else squared)
    return measured


def _kind(outputs: int) -> Curvature:
    return GaussNewton() if outputs <= COLUMNS else MonteCarloFisher(COLUMNS)


def _curvature(joint: Joint, theta: Tensor, batch: Batch, buffers: Buffers) -> Tensor:
    """The curvature of these rows: (P, P) of few weights, else its diagonal (P,)."""
    weights, raw = joint.split(theta.detach())
    exact = joint.network.outputs(weights, batch.inputs, buffers or None)
    rows = Rows(_kind(exact[0].numel()), joint, theta, batch, buffers or None, Key(0).fold("curvature"))
    found = rows.matrix() if joint.num_weights <= WHOLE else rows.diagonal()
    if not raw.numel():
        return found
    leaf = raw.clone().requires_grad_()
    with torch.enable_grad():
        value = batch_log_likelihood(joint.likelihood, leaf, exact.detach(), batch)
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        own = [torch.autograd.grad(entry, leaf, retain_graph=True)[0][i] for i, entry in enumerate(first)]
    second = -torch.stack(own).to(torch.float64)
    if found.dim() == 1:
        return torch.cat([found, second])
    whole = torch.cat([found.new_zeros(len(found)), second]).diag()
    whole[: len(found), : len(found)] = found
    return whole


def _with_prior(joint: Joint, theta: Tensor, curvature: Tensor) -> Tensor:
    """The curvature with the prior's precision added in place; heavy tails, where that is negative, add none."""
    own = joint.bound_prior.precision(theta[: joint.num_weights].to(torch.float64)).clamp_min(0.0)
    diagonal = curvature if curvature.dim() == 1 else curvature.diagonal()
    diagonal[: joint.num_weights].add_(own, alpha=float(joint.tempering.prior_power))
    return curvature


def _solved(slope: Tensor, curvature: Tensor) -> Tensor:
    """g H^-1 g / P; by the diagonal where the whole matrix is not positive definite."""
    if curvature.dim() == 2:
        factor, bad = torch.linalg.cholesky_ex(curvature)
        if not int(bad):
            white: Tensor = torch.linalg.solve_triangular(factor, slope.unsqueeze(-1), upper=False)
            return white.square().mean()
        curvature = curvature.diagonal()
    if not bool((curvature > 0.0).all()):
        raise ValueError("the log density is not concave there")
    return slope.square().div_(curvature).mean()


def measured_distance(
    joint: Problem, theta: Tensor, buffers: Buffers, data: Data, seen: int, size: int | None, remedy: str
) -> dict[str, Tensor]:
    """Return "mode_distance" for a trace, with a warning where it is far; nothing where there is none, with a log."""
    try:
        distance = mode_distance(joint, theta, buffers, data, seen, size)
    except (PosterityError, ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        logger.info("the distance to the mode is not known: %s", reason.rstrip("."))
        return {}
    far = int((distance > FAR).sum())
    if far:
        which = f"{far} of {distance.numel()} members lie up to" if distance.dim() else "The weights lie"
        logger.warning(
            f"MAP has not reached a mode. {which} {float(distance.max()):.3g} posterior standard deviations from it "
            f"(root mean square over the weights). {remedy}"
        )
    return {"mode_distance": distance}
