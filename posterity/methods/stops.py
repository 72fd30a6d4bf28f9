"""When a run of steps stops for a pass over all rows, to tune hyper-parameters there."""

import math


def equal_stops(steps: int, burn_in: float, rounds: int) -> tuple[int, ...]:
    """Numbers of steps after which there is a pass: `rounds` at equal distances after a share `burn_in`, and the end.

    >>> equal_stops(100, 0.2, 4)
    (20, 40, 60, 80, 100)
    """
    first = max(1, math.ceil(burn_in * steps))
    return tuple(sorted({*(first + (steps - first) * k // rounds for k in range(rounds)), steps}))
