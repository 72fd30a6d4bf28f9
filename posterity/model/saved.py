"""Whether a network is the one that a run folder was saved from."""

from itertools import zip_longest
from typing import Any

from torch import Tensor

from posterity.errors import BadFolder
from posterity.model.network import Network


def like_saved(network: Network, config: dict[str, Any], tensors: dict[str, Tensor]) -> Network:
    """The network with the saved choice of weights; BadFolder when it is another model than the saved one."""
    remedy = "Pass the network this folder was fitted with."
    wanted = dict([*config["weights"], *config["frozen"]])
    here = {part.name: list(part.shape) for part in network.layout}
    here.update({name: list(value.shape) for name, value in network.frozen.items()})
    for name in sorted(wanted.keys() | here.keys()):
        if wanted.get(name) != here.get(name):
            was, is_ = (f"shape {tuple(t[name])}" if name in t else "absent" for t in (wanted, here))
            raise BadFolder(
                f"The folder belongs to another network: '{name}' was saved with {was} and here is {is_}. {remedy}"
            )
    if config["dtype"] != str(network.dtype):
        raise BadFolder(
            f"The folder was saved from a {config['dtype']} model and this one is {network.dtype}. "
            f"Convert it with model.to({config['dtype']})."
        )
    for saved, line in zip_longest(config["module"], network.description.splitlines(), fillvalue="nothing"):
        if saved != line:
            raise BadFolder(
                f"The folder belongs to another network: it was saved with '{saved.strip()}' where this one has "
                f"'{line.strip()}'. {remedy}"
            )
    buffers = {name.removeprefix("joint.buffer.") for name in tensors if name.startswith("joint.buffer.")}
    for name in sorted(buffers ^ network.buffers.keys()):
        where = "only in the folder" if name in buffers else "only here"
        raise BadFolder(f"The folder belongs to another network: the buffer '{name}' is {where}. {remedy}")
    chosen = [name for name, _ in config["weights"]]
    for name in chosen:
        if name in network.frozen:
            raise BadFolder(f"'{name}' has a posterior in this folder but requires_grad=False here. {remedy}")
    network = network.with_weights(*chosen)
    if list(network.layout.names) != chosen:
        raise BadFolder(f"The folder belongs to another network: its weights come in another order. {remedy}")
    return network
