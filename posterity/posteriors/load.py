"""Read a posterior back from its run folder."""

import os
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
    """Read the posterior in the run folder `path`, for the network (or density) that it was fitted with.

    The module gives the architecture and the device; all weights, buffers and settings come from the folder. The
    caller must pass the same function of a density: it is not stored, so it cannot be compared.
    """
    folder = RunFolder(path)
    if folder.exists() and "posterior" not in folder.parts() and "run" in folder.parts():
        raise BadFolder(f"{os.fspath(path)!r} holds a run, no posterior. Run infer to its end, then q.save() it.")
    part = folder.read("posterior")
    config: dict[str, Any] = dict(part.config)
    if "mixture" not in config:
        return _read(config, dict(part.tensors), model, repr(os.fspath(path)))
    components: list[Posterior] = []
    first: dict[str, Tensor] = {}  # tensors of the first component, which others may share
    for index, component in enumerate(config["mixture"]):
        start = f"{index}."
        tensors = {name.removeprefix(start): t for name, t in part.tensors.items() if name.startswith(start)}
        first = first if index else tensors
        components.append(_read(component, {**first, **tensors}, model, repr(os.fspath(path))))
    return Mixture(components, part.tensors["weights"])


def _read(config: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module | Density, shown: str) -> Posterior:
    kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    if "density" in config:
        if not isinstance(model, Density):
            raise BadFolder(f"{shown} holds the posterior of a Density. Pass that Density, not {kind}.")
        if model.encode() != config["density"]:
            raise BadFolder(
                f"{shown} belongs to another Density: its parameters, constraints or dtype differ. "
                "Pass the one it was fitted with."
            )
        return _build(config["posterior"], tensors, model)
    if not isinstance(model, nn.Module):
        raise BadFolder(f"{shown} holds the posterior of a network. Pass that nn.Module, not {kind}.")
    return _build(config["posterior"], tensors, Joint.decode(model, config["joint"], tensors))


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
