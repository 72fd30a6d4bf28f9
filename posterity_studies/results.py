"""Results of single fits as small files, so that a study goes on where it stopped; and means as tables show them."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from posterity.errors import BadFolder
from posterity.storage.disk import write_file

Identity = dict[str, Any]
C = TypeVar("C")


@dataclass(frozen=True)
class Result(Generic[C]):
    """What a cell of a study gave: its scores, and the seconds that its fit took, or its share of those of a group."""

    cell: C
    scores: dict[str, float]
    seconds: float


def read_result(path: Path, wanted: Identity) -> tuple[dict[str, float], float]:
    """Scores and seconds in the file; BadFolder where it is damaged, or was made with anything else than `wanted`."""
    try:
        content = json.loads(path.read_bytes())
        kept, scores, seconds = content["identity"], content["scores"], content["seconds"]
        whole = isinstance(kept, dict) and all(math.isfinite(value) for value in (*scores.values(), seconds))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise BadFolder(f"'{path}' holds no result of the study. Delete it, and it is computed again.")
    for key in dict.fromkeys((*wanted, *kept)):
        if kept.get(key) != wanted.get(key):
            raise BadFolder(
                f"'{path}' was made with other settings. Its {key}: {kept.get(key)}, now {wanted.get(key)}. "
                "Give another --out, or delete the folder 'runs' in this one."
            )
    return scores, seconds


def write_result(path: Path, identity: Identity, scores: dict[str, float], seconds: float) -> None:
    """Write what a fit gave, with all that it depends on, whole or not at all."""
    document = {"identity": identity, "scores": scores, "seconds": seconds}
    write_file(path, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())


def with_error(mean: float, error: float | None) -> str:
    """A mean and its error, to the second digit of that.

    >>> with_error(0.078899, 0.0006), with_error(2.09, None)
    ('0.07890 ± 0.00060', '2.09')
    """
    if not error:
        return f"{mean:.4g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
