"""The choice of hidden layers for a table: none, unless hidden units predict better.

Both models are fitted to the training rows, with their scales chosen by the evidence, and compared by leave-one-out.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from posterity.evidence import left_out_rows
from posterity.inference import infer
from posterity.methods import MAP, Laplace
from posterity.methods.laplace import WHOLE
from posterity.methods.parts.scales import evidence_fit
from posterity.model import Joint
from posterity.model.data import as_data
from posterity.posteriors import Linearized

ROWS = 2048  # most rows of a comparison, each of which then stands for several
STEPS = 1000
ROUNDS = 8
MOST = 50  # largest number of weights for each row
FIFTH = 5


def sufficient(
    joint_with: Callable[[tuple[int, ...]], Joint], hidden: tuple[int, ...], rows: tuple[torch.Tensor, ...]
) -> tuple[tuple[int, ...], str]:
    """Return the hidden layers to take, () or `hidden`, and a sentence on why.

    A linear model is enough unless the network predicts better by more than a standard error: by leave-one-out where
    the whole curvature of its weights is known, else on a fifth of the rows. A network with more than 50 weights for
    each row is not tried.
    """
    sizes, weights = ",".join(str(size) for size in hidden), joint_with(hidden).num_weights
    if weights > MOST * len(rows[0]):
        return ((), f"a linear model is taken, as {sizes} hidden units would be {weights:,} weights.")
    score, how = (_left_out, "leave-one-out") if weights <= WHOLE else (_held_out, "held-out")
    linear, network = (score(joint_with(layers), rows) for layers in ((), hidden))
    gain = network - linear
    gain = gain[torch.isfinite(gain)]
    mean, error = float(gain.mean()), float(gain.std()) / max(1, len(gain)) ** 0.5
    comparison = f"its {how} NLL is {'lower' if mean > 0 else 'higher'} by {abs(mean):.3g}, standard error {error:.2g}"
    if mean > error:
        return hidden, f"a network of {sizes} hidden units predicts better than a linear model ({comparison})."
    return (), f"a linear model is taken, as a network of {sizes} hidden units is not surely better ({comparison})."


def _left_out(joint: Joint, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return leave-one-out log densities of the rows; NaN for rows without one."""
    problem, posterior = _fitted(joint, rows)
    sample = as_data(rows).to(joint.device).sample(ROWS, for_all=False)  # one of those that a row stands for
    return left_out_rows(posterior, problem.check(sample)).posterior


def _held_out(joint: Joint, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return log densities of every fifth row under a fit to the others."""
    held = torch.arange(len(rows[0]), device=rows[0].device) % FIFTH == 0
    _, posterior = _fitted(joint, tuple(part[~held] for part in rows))
    inputs, targets = (part[held].to(joint.device) for part in rows[:2])
    return posterior.predict(inputs).log_prob(targets)


def _fitted(joint: Joint, rows: tuple[torch.Tensor, ...]) -> tuple[Joint, Linearized]:
    """Fit a sample of the rows; return its joint and the Laplace posterior."""
    sample = as_data(rows).to(joint.device).sample(ROWS)
    problem = replace(joint, num_data=sample.size)
    start, _ = infer(evidence_fit(STEPS, ROUNDS), problem, tuple(sample[:3]), progress=False)
    mode, _ = infer(MAP(), problem, tuple(sample[:3]), start=start, progress=False)
    posterior, _ = infer(Laplace(tuning=None), problem, tuple(sample[:3]), start=mode, progress=False)
    assert isinstance(posterior, Linearized)
    return problem, posterior
