"""Read a posterior back from its run folder."""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from posterity.errors import BadFolder, unknown
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.problem import Problem
from posterity.posteriors.mixture import Mixture
from posterity.posteriors.posterior import Posterior
from posterity.storage import RunFolder, decode


def load(path: str | os.PathLike[str], model: nn.Module | Density) -> Posterior:
    """The posterior in the run folder `path`, for the network (or density) it was fitted with.

    The module gives the architecture and the device; all weights, buffers and settings come from the folder. The
    function of a density cannot be compared with the one that was saved: that it is the same is up to the caller.
    """
    folder = RunFolder(path)
    if folder.exists() and "posterior" not in folder.parts() and "run" in folder.parts():
        raise BadFolder(f"{os.fspath(path)!r} holds a run, no posterior. Run infer to its end, then q.save() it.")
    part = folder.read("posterior")
    config: dict[str, Any] = dict(part.config)
    if "mixture" not in config:
        return _read(config, dict(part.tensors), model, repr(os.fspath(path)))
    each = [_numbered(part.tensors, index) for index in range(len(config["mixture"]))]
    components = [
        _read(one, {**each[0], **tensors}, model, repr(os.fspath(path)))
        for one, tensors in zip(config["mixture"], each, strict=True)
    ]
    return Mixture(components, part.tensors["weights"])


def _numbered(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """The tensors of one component; what it shares with the first is stored there."""
    start = f"{index}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _read(config: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module | Density, shown: str) -> Posterior:
    if "density" in config:
        if not isinstance(model, Density):
            raise BadFolder(f"{shown} holds the posterior of a Density. Pass that Density, not {_kind(model)}.")
        if model.encode() != config["density"]:
            raise BadFolder(
                f"{shown} belongs to another Density: its parameters, constraints or dtype differ. "
                "Pass the one it was fitted with."
            )
        return _build(config["posterior"], tensors, model)
    if not isinstance(model, nn.Module):
        raise BadFolder(f"{shown} holds the posterior of a network. Pass that nn.Module, not {_kind(model)}.")
    joint = Joint.decode(model, config["joint"], tensors)
    return _build(config["posterior"], tensors, joint)


def _kind(model: object) -> str:
    name = model.__name__ if isinstance(model, type) else type(model).__name__
    return f"the class {name}" if isinstance(model, type) else f"a {name}"


def _build(config: dict[str, Any], tensors: dict[str, Tensor], joint: Problem) -> Posterior:
    name = config["type"]
    known: dict[str, type[Posterior]] = {
        name: kind
        for name, kind in vars(import_module("posterity.posteriors")).items()
        if isinstance(kind, type) and issubclass(kind, Posterior) and kind is not Posterior
    }
    if name not in known:
        raise BadFolder(f"{unknown('posterior', name, known)} Upgrade posterity, or save the run again.")
    kind: Any = known[name]  # its fields are its own
    placed = tensors if kind.on_cpu else {name: tensor.to(joint.device) for name, tensor in tensors.items()}
    values = {
        field: _build(value["posterior"], tensors, joint)
        if isinstance(value, dict) and "posterior" in value
        else decode(value, placed)
        for field, value in config["fields"].items()
    }
    posterior: Posterior = kind(joint, **values)
    return posterior
