"""Read a posterior back from its run folder."""

import os
from typing import Any

from torch import Tensor, nn

import posterity.posteriors as classes
from posterity.errors import BadFolder, unknown
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.posteriors.posterior import Posterior
from posterity.storage import RunFolder, decode


def load(path: str | os.PathLike[str], model: nn.Module | Density) -> Posterior:
    """The posterior in the run folder `path`, for the network (or density) it was fitted with.

    The module gives the architecture and the device; all weights, buffers and settings come from the folder.
    """
    part = RunFolder(path).read("posterior")
    config: dict[str, Any] = dict(part.config)
    tensors = dict(part.tensors)
    if "density" in config:
        if not isinstance(model, Density):
            raise BadFolder(f"{path} holds the posterior of a Density. Pass that Density, not {type(model).__name__}.")
        if list(model.layout.names) != config["density"]["names"] or model.size != config["density"]["size"]:
            raise BadFolder(f"{path} belongs to another Density: its parameters differ. Pass the one it was fitted with.")
        return _build(config["posterior"], tensors, model)
    if not isinstance(model, nn.Module):
        raise BadFolder(f"{path} holds the posterior of a network. Pass that nn.Module, not {type(model).__name__}.")
    joint = Joint.decode(model, config["joint"], tensors)
    tensors = {name: tensor.to(joint.device) for name, tensor in tensors.items()}
    return _build(config["posterior"], tensors, joint)


def _build(config: dict[str, Any], tensors: dict[str, Tensor], joint: Joint | Density) -> Posterior:
    name = config["type"]
    known = {n: c for n, c in vars(classes).items() if isinstance(c, type) and issubclass(c, Posterior)}
    if name not in known or known[name] is Posterior:
        raise BadFolder(f"{unknown('posterior', name, known)} Upgrade posterity, or save the run again.")
    values = {
        field: _build(value["posterior"], tensors, joint)
        if isinstance(value, dict) and "posterior" in value
        else decode(value, tensors)
        for field, value in config["fields"].items()
    }
    return known[name](joint, **values)
