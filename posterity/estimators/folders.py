"""Run folders of estimators: parameters and encodings as JSON beside the posterior, without pickle."""

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from posterity.errors import BadFolder, shown
from posterity.estimators.automatic import Stacked
from posterity.estimators.encoding import Encoding
from posterity.model import Joint
from posterity.networks import MLP
from posterity.posteriors import Posterior
from posterity.storage import Part, RunFolder, decode, encode
from posterity.storage.schema import check_names, reading

AGAIN = "Save the estimator again."
FIELDS = ("estimator", "parameters", "fitted", "network")


def save(
    path: str | os.PathLike[str],
    name: str,
    parameters: dict[str, Any],
    fitted: dict[str, Any],
    posterior: Posterior | Stacked,
) -> None:
    """Write an estimator's parameters, its fitted attributes and the posterior into a run folder."""
    tensors: dict[str, Any] = {}
    config: dict[str, Any] = {"estimator": name, "network": None}
    for field, values in (("parameters", parameters), ("fitted", fitted)):
        config[field] = encode({key: _plain(value) for key, value in values.items()}, tensors, field)
    joint = None if isinstance(posterior, Stacked) else posterior.joint
    if isinstance(joint, Joint) and isinstance(joint.network.module, MLP):
        config["network"] = joint.network.module.config
    own = Part(config, tensors)
    RunFolder(path).commit({**posterior.parts(), "estimator": own}, drop=["posterior", "stacked", "fit-*"])


def folds(path: str | os.PathLike[str], *, new: bool = False) -> Iterator[Path]:
    """Yield the run folders of fold models, in order; with `new`, folders of an earlier estimator are removed."""
    folder = Path(path) / "folds"
    if new:
        shutil.rmtree(folder, ignore_errors=True)
    return (folder / str(number) for number in count())


def read(path: str | os.PathLike[str], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters and fitted attributes that `save` wrote; raise BadFolder for anything else."""
    folder = RunFolder(path)
    if folder.exists() and "estimator" not in (parts := folder.parts()) and "task" in parts:
        raise BadFolder(
            f"{os.fspath(path)!r} holds a run of the command line, not a {name}. Use it there: posterity predict "
            f"{os.fspath(path)} --data FILE."
        )
    part = folder.read("estimator")
    with reading(f"Run folder {os.fspath(path)!r}: part 'estimator'"):
        check_names("The estimator", list(part.config), list(FIELDS))
        if part.config["estimator"] != name:
            raise BadFolder(f"It holds a {part.config['estimator']}, no {name}. Load it with its own class.")
        parameters, fitted = (decode(part.config[field], part.tensors) for field in ("parameters", "fitted"))
        if not isinstance(parameters, dict) or not isinstance(fitted, dict):
            raise BadFolder(f"It must have parameters and fitted values by name. {AGAIN}")
        if not isinstance(encoding := fitted.get("encoding_"), Encoding):
            raise BadFolder(f"It must have the encoding of the columns. Got {shown(encoding)}. {AGAIN}")
        encoding.check()
        return tuple({key: _rebuilt(value) for key, value in values.items()} for values in (parameters, fitted))  # type: ignore[return-value]


def network(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the configuration of a folder's `MLP`; None for another network, or none."""
    config = RunFolder(path).read("estimator").config["network"]
    return dict(config) if isinstance(config, dict) else None


def _plain(value: Any) -> Any:
    """Return arrays as their dtype and values, and dicts as pairs, for JSON; other values unchanged."""
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, dict):
        return {"pairs": [(_scalar(key), float(number)) for key, number in value.items()]}
    return _scalar(value)


def _rebuilt(value: Any) -> Any:
    """Invert `_plain`."""
    if isinstance(value, dict) and value.keys() == {"dtype", "values"}:
        return np.array(value["values"], dtype=value["dtype"])
    return dict(value["pairs"]) if isinstance(value, dict) and value.keys() == {"pairs"} else value


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
