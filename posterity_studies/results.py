"""What results of a study depend on, and means as tables show them."""

import math
from dataclasses import asdict
from typing import Any

from posterity import __version__
from posterity.inference.identity import identity
from posterity.storage import Part


def depends_on(cell: Any, settings: Any, **how: object) -> Part:
    """All that the numbers of a cell depend on: its own values, the settings that all share, and `how` it is fitted."""
    own = {"fit" if name == "seed" else name: value for name, value in asdict(cell).items()}
    return identity(**own, **settings.common(), **how, posterity=__version__)


def with_error(mean: float, error: float | None) -> str:
    """A mean and its error, to the second digit of that.

    >>> with_error(0.078899, 0.0006), with_error(2.09, None)
    ('0.07890 ± 0.00060', '2.09')
    """
    if not error:
        return f"{mean:.4g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
