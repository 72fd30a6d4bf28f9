"""What methods that follow gradients choose where nothing is set, and their check that the loss fell."""

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from posterity.model import Data, Problem

if TYPE_CHECKING:
    from posterity.inference.run import Trace

SETTLED_LATER: Any = None  # default of a setting that `Method.settled` chooses
_PASSES, _LEAST_STEPS, _MOST_STEPS = 100, 3000, 20_000
_MOST_RATE = 0.03  # step size of Adam
_SHARE, _LEAST = 0.05, 20  # share of a run that counts as its start and its end; steps of a run that can be judged
_SPREADS = 3.0  # a rise that counts, in robust standard deviations of the loss of a batch


def batches_in_pass(data: Data, batch_size: int | None) -> int:
    """Return the number of batches in a pass over the data, 1 where a step sees all rows."""
    return 1 if batch_size is None or not data.num_data else max(1, math.ceil(data.num_data / batch_size))


def usual_steps(num_data: int, batch_size: int | None) -> int:
    """Return the number of steps of a fit, where it was left out: 100 passes, at least 3,000 and at most 20,000.

    >>> usual_steps(12_800, 128)
    10000
    """
    rows = max(1, num_data)
    return min(max(_LEAST_STEPS, _PASSES * rows // min(rows, batch_size or rows)), _MOST_STEPS)


def usual_rate(joint: Problem) -> float:
    """Return the first step size of Adam, 1 / sqrt(length of theta), at most 0.03."""
    return min(_MOST_RATE, 1.0 / math.sqrt(joint.size))


def risen(name: str, trace: "Trace", expected: float = 0.0) -> list[str]:
    """Return a warning where the loss of a run ended above its start, else nothing.

    The medians of the first and the last twentieth of the run are compared. A rise by `expected` nats per datum is no
    fault, nor one within three robust standard deviations of the loss of a batch. Members are judged one by one.
    """
    if "loss" not in trace or len(trace["loss"]) < _LEAST:
        return []
    loss = trace["loss"].reshape(len(trace["loss"]), -1)
    count = max(5, int(_SHARE * len(loss)))
    first, last = loss[:count], loss[-count:]
    spread = 1.4826 * _median((last - _median(last)).abs())
    bad = _median(last) > _median(first[:5]) + expected + _SPREADS * spread
    if not bool(bad.any()):
        return []
    start, end = (float(_median(part)[bad][0]) for part in (first[:5], last))
    which = "" if loss.shape[1] == 1 else f" in {int(bad.sum())} of {loss.shape[1]} rows"
    return [
        f"{name}: the loss rose{which}, from {start:.4g} to {end:.4g} nats per datum, so that the result is worse than "
        "the start. Use a smaller step size, standardise inputs and targets, or begin at a mode (start=)."
    ]


def _median(values: Tensor) -> Tensor:
    return values.median(0).values
