"""Identities of runs: everything their numbers depend on, and the check that a folder holds the same run."""

import os
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from posterity.errors import BadFolder, shown
from posterity.model.data import Batch, Data
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.posteriors.posterior import Posterior
from posterity.processes import Group
from posterity.storage import Part, present_names


def identity(**depends: object) -> Part:
    """Return everything that the numbers of a run depend on, by name, as JSON and tensors.

    Problems and posteriors are stored whole, data by their fingerprint, and methods, priors and likelihoods by their
    `repr`, which shows a default that has changed.

    >>> from posterity.methods import MAP
    >>> identity(method=MAP(steps=5), seed=3).config["seed"]
    3
    """
    config: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in depends.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Posterior):
            part = value.parts()["posterior"]
            config[name] = dict(part.config)
            tensors.update({f"{name}.{own}": tensor for own, tensor in part.tensors.items()})
        elif isinstance(value, Joint):
            config[name] = value.encode(tensors)
        else:
            config[name] = _as_json(value)
    return Part(config, tensors)


def _as_json(value: object) -> Any:
    if isinstance(value, Density):
        return value.encode()
    if isinstance(value, Data):
        return value.fingerprint()
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return repr(value) if is_dataclass(value) else value


def refuse_other(
    path: str | os.PathLike[str],
    wanted: Part,
    stored: Part,
    held: str = "another run",
    remedy: str = "Use another folder, or delete this one to begin anew.",
) -> None:
    """Raise BadFolder, which says what differs, unless the stored identity is the wanted one."""
    for name in dict.fromkeys((*wanted.config, *stored.config)):
        then, now = present_names(stored.config.get(name)), wanted.config.get(name)
        if then != now:
            values = "" if isinstance(then, dict) or isinstance(now, dict) else f": {shown(then)}, now {shown(now)}"
            raise BadFolder(f"{os.fspath(path)!r} holds {held}: its {name} differs{values}. {remedy}")
    for name in dict.fromkeys((*wanted.tensors, *stored.tensors)):
        before, after = stored.tensors.get(name), wanted.tensors.get(name)
        if before is None or after is None or not _equal(before.cpu(), after.cpu()):
            raise BadFolder(f"{os.fspath(path)!r} holds {held}: its {name.partition('.')[0]} differs. {remedy}")


_REMEDIES = {
    "start": "call torch.manual_seed before the module is made, or give start=",
    "data": "give each of them all rows in the same order",
}


def refuse_unlike(processes: Group, own: Part) -> None:
    """Raise an error in all processes that share a run, which says what differs, unless their parts are the same."""
    each: dict[str, list[object]] = {name: [value] for name, value in own.config.items()}
    for name, tensor in own.tensors.items():
        batch = Batch(tensor.reshape(-1, 1), tensor.reshape(-1))
        each.setdefault(name.partition(".")[0], []).append(f"{name} {batch.fingerprint()}")
    processes.refuse_differing("kind of settings", repr(list(each)))  # else they would compare others below
    for name, values in each.items():
        processes.refuse_differing(name, repr(values), _REMEDIES.get(name, ""))


def _equal(before: Tensor, after: Tensor) -> bool:
    """Return whether the tensors hold the same numbers; NaN, which a buffer may hold, is equal to itself."""
    if before.shape != after.shape:
        return False
    return bool(((before == after) | ((before != before) & (after != after))).all())
