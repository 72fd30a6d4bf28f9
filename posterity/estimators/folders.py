"""Run folders of estimators: parameters and encodings as JSON beside the posterior, without pickle."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from posterity.errors import BadFolder, shown
from posterity.estimators.encoding import Encoding
from posterity.networks import MLP
from posterity.posteriors import Posterior
from posterity.posteriors.load import load
from posterity.storage import Part, RunFolder, decode, encode
from posterity.storage.schema import check_names, reading

AGAIN = "Save the estimator again."
FIELDS = ("estimator", "parameters", "fitted", "network")


def save(path: str | os.PathLike[str], name: str, parameters: dict[str, Any], fitted: dict[str, Any], q: Any) -> None:
    """Write an estimator's parameters, what its fit has noted, and the posterior, atomically."""
    tensors: dict[str, Any] = {}
    config: dict[str, Any] = {"estimator": name, "network": None}
    for field, values in (("parameters", parameters), ("fitted", fitted)):
        config[field] = encode({key: _plain(value) for key, value in values.items()}, tensors, field)
    if isinstance(q, Posterior) and isinstance(module := q.joint.as_joint("save").network.module, MLP):
        config["network"] = module.config
    RunFolder(path).commit({**q.parts(), "estimator": Part(config, tensors)})


def read(
    path: str | os.PathLike[str], name: str, network: Callable[[Mapping[str, Any] | None, int], nn.Module]
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return what `save` has written: parameters, fitted values and the posterior; BadFolder where it is not sound.

    `network` makes the module from the stored configuration, None for a network of the user's own, and the number of
    inputs.
    """
    folder = RunFolder(path)
    part = folder.read("estimator")
    with reading(f"Run folder {os.fspath(path)!r}: part 'estimator'"):
        check_names("The estimator", list(part.config), list(FIELDS))
        if part.config["estimator"] != name:
            raise BadFolder(f"It holds a {shown(part.config['estimator'])}, no {name}. Load it with its own class.")
        parameters, fitted = (decode(part.config[field], part.tensors) for field in ("parameters", "fitted"))
        if not isinstance(parameters, dict) or not isinstance(fitted, dict):
            raise BadFolder(f"It must have parameters and fitted values by name. {AGAIN}")
        encoding = fitted.get("encoding_")
        if not isinstance(encoding, Encoding):
            raise BadFolder(f"It must have the encoding of the columns. {AGAIN}")
        encoding.check()
        module = network(part.config["network"], len(encoding.features))
    fitted = {key: _rebuilt(value) for key, value in fitted.items()}
    return parameters, fitted, load(path, module)


def _plain(value: Any) -> Any:
    """Return arrays as their dtype and a tuple, labels of class weights as pairs, everything else as it is."""
    if isinstance(value, np.ndarray):
        return {"array": str(value.dtype), "values": tuple(value.tolist())}
    if isinstance(value, dict):
        return {"pairs": tuple((_scalar(key), float(number)) for key, number in value.items())}
    return value


def _rebuilt(value: Any) -> Any:
    """Return what `_plain` was given."""
    if isinstance(value, dict) and value.keys() == {"array", "values"}:
        return np.array(value["values"], dtype=value["array"])
    return dict(value["pairs"]) if isinstance(value, dict) and value.keys() == {"pairs"} else value


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
