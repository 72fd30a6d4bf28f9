"""Read a posterior back from its run folder, and check all of it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from posterity.errors import BadFolder, shown, unknown
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Network
from posterity.model.problem import Problem
from posterity.posteriors.calibrated import PREFIX, Calibrated
from posterity.posteriors.mixture import Mixture
from posterity.posteriors.posterior import Posterior
from posterity.precisions.precision import Precision
from posterity.predictive import Scaling
from posterity.priors.prior import Prior
from posterity.storage import Part, RunFolder, decode, references
from posterity.storage.schema import AGAIN, check_fields, check_names, check_tensor, hints, reading, same_form

Given: TypeAlias = Mapping[str, Likelihood | Prior | None]


def load(
    path: str | os.PathLike[str],
    model: nn.Module | Network | Density,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
) -> Posterior:
    """Read the posterior in the run folder `path`, for the network (or density) that it was fitted with.

    The module gives the architecture and the device; all weights, buffers and settings come from the folder. Of a
    `likelihood` or `prior` of your own class, and of `Custom`, only the class name and fields are stored: pass the
    object again, and it is compared with them; the log names functions, which cannot be compared. The caller must pass
    the same function of a density: it is not stored, either. Raises BadFolder where the folder holds anything but a
    posterior as `Posterior.save` writes it.
    """
    given = {"likelihood": likelihood, "prior": prior}
    for name, kind in (("likelihood", Likelihood), ("prior", Prior)):
        if given[name] is not None and not isinstance(given[name], kind):
            raise TypeError(f"load: {name} must be a {kind.__name__}. Got {shown(given[name])}.")
    folder = RunFolder(path)
    if folder.exists() and "posterior" not in folder.parts() and "run" in folder.parts():
        raise BadFolder(f"{os.fspath(path)!r} holds a run, no posterior. Run infer to its end, then q.save() it.")
    return posterior_of(folder.read("posterior"), model, repr(os.fspath(path)), given=given)


def posterior_of(
    part: Part,
    model: nn.Module | Network | Density,
    where: str,
    name: str = "posterior",
    given: Given = MappingProxyType({}),
) -> Posterior:
    """Read the posterior in the part `name` of the run folder `where`; see `load`."""
    if "scaling" in part.config:
        return _calibrated(part, model, where, name, given)
    kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    is_density = "density" in _components(part)[0]
    if is_density and not isinstance(model, Density):
        raise BadFolder(f"{where} holds the posterior of a Density. Pass that Density, not {kind}.")
    if not is_density and not isinstance(model, (nn.Module, Network)):
        raise BadFolder(f"{where} holds the posterior of a network. Pass that nn.Module, not {kind}.")
    problem = Network(model) if isinstance(model, nn.Module) else model
    with reading(f"Run folder {where}: part {name!r}"):
        if "mixture" not in part.config:
            return _read(dict(part.config), dict(part.tensors), problem, part.older, given)
        return _mixture(part, problem, given)


def _calibrated(part: Part, model: nn.Module | Network | Density, where: str, name: str, given: Given) -> Posterior:
    with reading(f"Run folder {where}: part {name!r}"):
        check_names("The calibrated posterior", list(part.config), ["scaling", "of"])
        own = {key: tensor for key, tensor in part.tensors.items() if key.startswith(f"{PREFIX}.")}
        check_names("The scaling", sorted(own), sorted(references(part.config["scaling"])))
        scaling = decode(part.config["scaling"], own)
        inside = part.config["of"]
        if not isinstance(scaling, Scaling) or not isinstance(inside, dict) or "scaling" in inside:
            raise BadFolder(f"The calibrated posterior must hold a scaling and a posterior. {AGAIN}")
    tensors = {key: tensor for key, tensor in part.tensors.items() if key not in own}
    return Calibrated(posterior_of(Part(inside, tensors, part.older), model, where, name, given), scaling)


def _components(part: Part) -> Sequence[Mapping[str, Any]]:
    """Return the configurations of the components of a mixture, or the only one."""
    each = part.config.get("mixture", [dict(part.config)])
    return [item if isinstance(item, dict) else {} for item in each] if isinstance(each, list) and each else [{}]


def _mixture(part: Part, problem: Network | Density, given: Given) -> Posterior:
    check_names("The mixture", list(part.config), ["mixture"])
    each: list[Posterior] = []
    first: dict[str, Tensor] = {}  # tensors of the first component, which others may share
    for index, component in enumerate(_components(part)):
        start = f"{index}."
        tensors = {name.removeprefix(start): t for name, t in part.tensors.items() if name.startswith(start)}
        config = dict(component)
        if part.older:  # the names of shared tensors were not stored
            shared = list(references(config) - tensors.keys()) + [
                name for name in first if name not in tensors and name.startswith(("joint.frozen.", "joint.buffer."))
            ]
        else:
            shared = config.pop("shared")
            check_fields("The mixture", {"shared": shared}, {"shared": list[str]})
        tensors.update({name: first[name] for name in shared if name not in tensors})
        first = first or tensors
        with reading(f"Component {index} of the mixture"):
            each.append(_read(config, tensors, problem, part.older, given))
    own = {name for name in part.tensors if name.partition(".")[0] in map(str, range(len(each)))}
    check_names("The mixture", sorted(part.tensors.keys() - own), ["weights"])
    check_tensor("The tensor 'weights'", part.tensors["weights"], (len(each),), torch.float64)
    mixture = Mixture(each, part.tensors["weights"])
    if not torch.allclose(mixture.shares, part.tensors["weights"], rtol=1e-9, atol=0.0):
        raise BadFolder("The tensor 'weights' must hold shares that sum to 1. Save the run again.")
    return mixture


def _read(
    config: dict[str, Any], tensors: dict[str, Tensor], problem: Network | Density, older: bool, given: Given
) -> Posterior:
    is_density = isinstance(problem, Density)
    check_names("The posterior", list(config), ["posterior", "density" if is_density else "joint"])
    _kind(config["posterior"]["type"])
    needed = references(config)
    if isinstance(problem, Network):
        needed |= {f"joint.buffer.{name}" for name in problem.buffers}
        needed |= {f"joint.frozen.{name}" for name, _ in config["joint"]["frozen"]}
    check_names("The tensor file", sorted(tensors), sorted(needed))
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not name.startswith("joint.buffer.") and ".buffers." not in name:
            # An improper prior may have an infinite scale.
            sound = tensor if not name.startswith("joint.prior") else torch.nan_to_num(tensor, torch.nan, 0.0, 0.0)
            check_tensor(f"The tensor {name!r}", sound, tensor.shape, tensor.dtype)
            if tensor.dtype not in (problem.dtype, torch.float32, torch.float64):
                raise BadFolder(f"The tensor {name!r} must be {problem.dtype}. Got {tensor.dtype}. {AGAIN}")
    if isinstance(problem, Density):
        for name in (name for name, value in given.items() if value is not None):
            raise BadFolder(f"The posterior is of a Density, which has no {name}. Leave it out.")
        if problem.encode() != config["density"]:
            raise BadFolder(
                "The folder belongs to another Density: its parameters, constraints or dtype differ. "
                "Pass the one it was fitted with."
            )
        return _build(config["posterior"], tensors, problem, older)
    joint = Joint.decode(problem, config["joint"], tensors, **given)
    if joint.encode({}).keys() != config["joint"].keys():
        raise BadFolder(f"The joint must have {', '.join(joint.encode({}))}. Got {', '.join(config['joint'])}.")
    _check_fixed("frozen weight", joint.network.frozen, {**problem.frozen, **problem.layout.unflatten(problem.initial)})
    _check_fixed("buffer", joint.network.buffers, problem.buffers)
    return _build(config["posterior"], tensors, joint, older)


def _check_fixed(kind: str, stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Check frozen weights or buffers against the module's own; these may have entries that are not finite."""
    for name, tensor in stored.items():
        members = tensor.shape[: max(0, tensor.dim() - own[name].dim())][:1]  # each member may have its own
        check_tensor(f"The {kind} {name!r}", tensor, (*members, *own[name].shape), own[name].dtype, own[name])


def _build(config: dict[str, Any], tensors: dict[str, Tensor], joint: Problem, older: bool) -> Posterior:
    check_names("The posterior", list(config), ["type", "fields"])
    name = config["type"]
    kind: Any = _kind(name)  # its fields are its own
    own = [field for field in fields(kind) if field.name != "joint"]
    later = [
        f.name
        for f in own
        if older and f.name not in config["fields"] and not f.default is f.default_factory is MISSING
    ]
    check_names(name, list(config["fields"]), [field.name for field in own if field.name not in later])
    placed = tensors if kind.on_cpu else {name: tensor.to(joint.device) for name, tensor in tensors.items()}
    values = {
        field: _build(value["posterior"], tensors, joint, older)
        if isinstance(value, dict) and "posterior" in value
        else decode(value, placed)
        for field, value in config["fields"].items()
    }
    check_fields(name, values, hints(kind))
    posterior: Posterior = kind(joint, **values)
    for field, value in values.items():
        if not same_form(value, getattr(posterior, field)):
            raise BadFolder(f"{name}: {field!r} is not stored so. Save the run again.")
    _check_tensors(posterior, values)
    return posterior


def _kind(name: object) -> type[Posterior]:
    known: dict[str, type[Posterior]] = {
        name: kind
        for name, kind in vars(import_module("posterity.posteriors")).items()
        if isinstance(kind, type) and issubclass(kind, Posterior) and kind not in (Posterior, Mixture, Calibrated)
    }
    if not isinstance(name, str) or name not in known:
        raise BadFolder(f"{unknown('posterior', str(name), known)} Upgrade posterity, or save the run again.")
    return known[name]


def _check_tensors(posterior: Posterior, values: Mapping[str, Any]) -> None:
    """Check the fields that a posterior declares by shape, its buffers and its precision."""
    joint, name, lead = posterior.joint, type(posterior).__name__, torch.Size()
    for field, letters in posterior.tensor_shapes.items():
        tables = values[field] if isinstance(values[field], dict) else {field: values[field]}
        for key, tensor in tables.items():
            if tensor is None:
                continue
            what = f"{name}.{field}" if key == field else f"{name}.{field}[{key!r}]"
            if "P" in letters:
                lead = tensor.shape[:-1]
                axes = {len(letters) - 1, len(letters.replace("m", "")) - 1}
                if len(lead) not in axes or tensor.shape[-1] not in (joint.size, joint.num_weights) or 0 in lead:
                    raise BadFolder(f"{what} must have {joint.size} weights. Got {tuple(tensor.shape)}. {AGAIN}")
                if "m" in letters and lead and joint.num_members not in (None, lead[0]):
                    raise BadFolder(f"{what} must have {joint.num_members} members. Got {lead[0]}. {AGAIN}")
            shape = (*lead, *tensor.shape[len(lead) :]) if set("P*") & set(letters) else lead
            check_tensor(what, tensor, shape, joint.dtype if "P" in letters else tensor.dtype)
    own = joint.network.buffers if isinstance(joint, Joint) else {}
    for key, tensor in values.get("buffers", {}).items():
        if key not in own:
            raise BadFolder(f"{name}.buffers: the network has no buffer {key!r}. {AGAIN}")
        plain = own[key] if own[key].dim() <= tensor.dim() - len(lead) else own[key][0]  # of a member
        check_tensor(f"{name}.buffers[{key!r}]", tensor, (*lead, *plain.shape), plain.dtype, plain)
    if isinstance(precision := values.get("precision"), Precision):
        _check_precision(precision, joint, lead)


def _check_precision(precision: Precision, joint: Problem, lead: torch.Size) -> None:
    """Check that a precision matrix is over the random weights, and that its parts fit and are finite."""
    size = joint.num_weights if joint.random_indices is None else joint.random_indices.numel()
    ones = torch.ones((*lead, size), dtype=torch.float64, device=joint.device)
    if precision.size != size:
        raise BadFolder(f"The precision must be of {size} weights. Got {precision.size}. {AGAIN}")
    check_tensor("The precision times a vector", precision.matvec(ones), (*lead, size), torch.float64)
    check_tensor("A draw of the precision", precision.colour(ones[..., None, :]), (*lead, 1, size), torch.float64)
    check_tensor("The log determinant of the precision", precision.logdet, lead, torch.float64)
