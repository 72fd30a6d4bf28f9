"""Means as tables show them."""

import math


def with_error(mean: float, error: float | None) -> str:
    """A mean and its error, to the second digit of that.

    >>> with_error(0.078899, 0.0006), with_error(2.09, None)
    ('0.07890 ± 0.00060', '2.09')
    """
    if not error:
        return f"{mean:.4g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
