"""Any `nn.Module` as a pure function of one flat weight vector."""

import copy
import fnmatch
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from posterity.errors import unknown
from posterity.model.inputs import Inputs, map_inputs
from posterity.numerics.layout import Layout
from posterity.numerics.random import Key

logger = logging.getLogger("posterity")

Buffers = dict[str, Tensor]


class Network:
    """A module's function f(theta, inputs), its layout, starting weights, frozen weights and buffers.

    Takes an `nn.Module`, of which it keeps a private copy: the user's module is never changed. theta (P,) holds
    the trainable parameters in module order, each row-major; a weight shared by two layers appears once.
    Parameters with `requires_grad=False` are frozen at their values. Every layer runs in evaluation mode (so
    dropout is off), except batch norm, which runs on batch statistics when `train=True`.

    >>> network = Network(nn.Linear(2, 1))
    >>> network.layout.names, network.layout.size
    (('weight', 'bias'), 3)
    >>> network.outputs(torch.zeros(3), torch.ones(4, 2)).shape
    torch.Size([4, 1])
    >>> network.outputs(torch.zeros(5, 3), torch.ones(4, 2)).shape  # five members
    torch.Size([5, 4, 1])
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"Network: the model must be a torch.nn.Module. Got {type(module).__name__}.")
        self._module = copy.deepcopy(module).eval()
        places = _places(self._module)
        parameters = {names[0]: parameter for names, parameter in places.values()}
        trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        if not trainable:
            raise ValueError("Network: the model has no trainable parameters. Set requires_grad=True on some.")
        _same_kind(trainable)
        self.layout = Layout.of({name: p.shape for name, p in trainable.items()})
        self.initial = self.layout.flatten({name: p.detach() for name, p in trainable.items()})  # (P,)
        self.frozen: dict[str, Tensor] = {
            name: p.detach().clone() for name, p in parameters.items() if name not in trainable
        }
        self.buffers: Buffers = {name: b.detach().clone() for name, b in self._module.named_buffers()}
        self._buffer_dims = {name: b.dim() for name, b in self.buffers.items()}
        self._aliases = {names[0]: names for names, _ in places.values()}
        self._batch_norms = [m for m in self._module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._vmaps = True
        self._index()
        dropouts = [name for name, m in self._module.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        if dropouts:
            logger.info("dropout is off under every method except MCDropout (layers: %s)", ", ".join(dropouts))

    def _index(self) -> None:
        """Where each tensor goes in the private module: (owner, attribute) pairs, resolved once."""
        owner = {name: module for name, module in self._module.named_modules(remove_duplicate=False)}

        def places(full_name: str) -> list[tuple[nn.Module, str]]:
            return [
                (owner[alias.rpartition(".")[0]], alias.rpartition(".")[2])
                for alias in self._aliases.get(full_name, [full_name])
            ]

        self._slots = [
            (module, name, index)
            for index, part in enumerate(self.layout)
            for module, name in places(part.name)
        ]
        self._frozen_slots = [(m, name, key) for key in self.frozen for m, name in places(key)]
        self._buffer_slots = [(m, name, key) for key in self.buffers for m, name in places(key)]
        self._sizes = [part.size for part in self.layout]
        self._shapes = [part.shape for part in self.layout]

    @property
    def dtype(self) -> torch.dtype:
        """Number type of the weights."""
        return self.initial.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.initial.device

    @property
    def description(self) -> str:
        """The module as it prints itself, one line a layer."""
        return str(self._module)

    @property
    def mixes_rows(self) -> bool:
        """Whether an output row depends on the other rows of its batch even in evaluation mode."""
        return any(not m.track_running_stats for m in self._batch_norms)

    def replace(
        self,
        *,
        initial: Tensor | None = None,
        frozen: Mapping[str, Tensor] | None = None,
        buffers: Buffers | None = None,
    ) -> "Network":
        """The same network with other starting weights, frozen weights or buffers."""
        new = copy.copy(self)
        new.initial = self.initial if initial is None else initial.detach().clone()
        new.frozen = self.frozen if frozen is None else {k: frozen[k].detach().clone() for k in self.frozen}
        new.buffers = self.buffers if buffers is None else dict(buffers)
        new._index()
        return new

    def member(self, index: int) -> "Network":
        """The network with the buffers of one member (itself when members share them)."""
        if all(b.dim() == self._buffer_dims[name] for name, b in self.buffers.items()):
            return self
        return self.replace(buffers={name: b[index] for name, b in self.buffers.items()})

    def with_weights(self, *patterns: str) -> "Network":
        """The same network where only the parameters matching a pattern are in theta; the rest is frozen."""
        views = self.layout.unflatten(self.initial)
        for pattern in patterns:
            if not self.layout.matching(pattern):
                raise ValueError(f"Network.with_weights: {unknown('parameter', pattern, self.layout.names)}")
        chosen = {n for n in views if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)}
        new = copy.copy(self)
        new.layout = Layout.of({p.name: p.shape for p in self.layout if p.name in chosen})
        new.initial = new.layout.flatten(views)
        new.frozen = {**self.frozen, **{n: v.clone() for n, v in views.items() if n not in chosen}}
        new._index()
        return new

    def fresh(self, key: Key) -> Tensor:
        """Newly initialised weights (P,), as the layers' own `reset_parameters` draw them under `key`."""
        module = copy.deepcopy(self._module)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(key.seed)
            for layer in module.modules():
                reset = getattr(layer, "reset_parameters", None)
                if callable(reset):
                    reset()
                elif any(True for _ in layer.parameters(recurse=False)):
                    names = ", ".join(name for name, _ in layer.named_parameters(recurse=False))
                    raise ValueError(
                        f"Network.fresh: {type(layer).__name__} has weights ({names}) but no reset_parameters(). "
                        "Give it one, or pass start= with the weights to begin from."
                    )
        return self.layout.flatten({name: p.detach() for name, p in module.named_parameters()})

    def views(self, theta: Tensor) -> list[Tensor]:
        """theta (..., P) as one tensor for each parameter, (..., *shape), in layout order."""
        lead = theta.shape[:-1]
        return [
            piece.view(lead + shape)
            for piece, shape in zip(theta.split(self._sizes, dim=-1), self._shapes, strict=True)
        ]

    def outputs(self, theta: Tensor, inputs: Inputs, buffers: Buffers | None = None, *, per_member: bool = False) -> Tensor:
        """f(theta, inputs) in evaluation mode: (P,) -> (N, *event), (M, P) -> (M, N, *event).

        `per_member` says that the inputs have a member axis of their own, (M, N, ...).
        """
        return self.run(self.views(theta), inputs, buffers, members=theta.dim() > 1, per_member=per_member)[0]

    def run(
        self,
        weights: Sequence[Tensor],
        inputs: Inputs,
        buffers: Buffers | None = None,
        *,
        members: bool = False,
        per_member: bool = False,
        train: bool = False,
    ) -> tuple[Tensor, Buffers]:
        """Outputs and the buffers after the call, from one tensor for each parameter of the layout.

        With `members`, weights (and buffers, if given) have a leading axis M. With `train`, batch norm uses the
        statistics of the batch and the returned buffers hold the updated running ones.
        """
        buffers = self.buffers if buffers is None else buffers
        if not members:
            return self._call(weights, inputs, buffers, train)
        count = weights[0].shape[0]
        stacked = {
            name: b if b.dim() > self._buffer_dims[name] else b.expand(count, *b.shape) for name, b in buffers.items()
        }
        if self._vmaps:
            try:
                mapped = torch.func.vmap(
                    lambda w, x, b: self._call(w, x, b, train), in_dims=(0, 0 if per_member else None, 0)
                )
                outputs, after = mapped(tuple(weights), inputs, stacked)
                return outputs, after
            except (RuntimeError, NotImplementedError, ValueError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                looped = self._loop(weights, inputs, stacked, per_member, train)  # raises if the module is at fault
                self._vmaps = False
                logger.warning("members run one after the other because vmap refused this module: %s", reason)
                return looped
        return self._loop(weights, inputs, stacked, per_member, train)

    def _loop(
        self, weights: Sequence[Tensor], inputs: Inputs, buffers: Buffers, per_member: bool, train: bool
    ) -> tuple[Tensor, Buffers]:
        results = [
            self._call(
                [w[i] for w in weights],
                map_inputs(lambda x, i=i: x[i], inputs) if per_member else inputs,  # type: ignore[misc]
                {name: b[i] for name, b in buffers.items()},
                train,
            )
            for i in range(weights[0].shape[0])
        ]
        outputs = torch.stack([outputs for outputs, _ in results])
        return outputs, {name: torch.stack([after[name] for _, after in results]) for name in buffers}

    def _call(
        self, weights: Sequence[Tensor], inputs: Inputs, buffers: Buffers, train: bool
    ) -> tuple[Tensor, Buffers]:
        """One call of the private module with these tensors in place of its own, which are put back after."""
        if train and self._batch_norms:
            buffers = {name: b.clone() for name, b in buffers.items()}  # batch norm writes into them
        borrowed = [(m._parameters, name, m._parameters[name]) for m, name, _ in (*self._slots, *self._frozen_slots)]
        for module, name, index in self._slots:
            module._parameters[name] = weights[index]  # type: ignore[assignment]
        for module, name, key in self._frozen_slots:
            module._parameters[name] = self.frozen[key]  # type: ignore[assignment]
        for module, name, key in self._buffer_slots:
            module._buffers[name] = buffers[key]
        for norm in self._batch_norms:
            norm.training = train
        try:
            if isinstance(inputs, Tensor):
                outputs = self._module(inputs)
            elif isinstance(inputs, Mapping):
                outputs = self._module(**inputs)
            else:
                outputs = self._module(*inputs)
        finally:
            for table, name, original in borrowed:
                table[name] = original
            for module, name, key in self._buffer_slots:
                module._buffers[name] = self.buffers[key]
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"Network: the model must return one tensor. Got {type(outputs).__name__}. "
                "Wrap it in a module that returns the outputs the likelihood needs."
            )
        return outputs, buffers


def _places(module: nn.Module) -> dict[int, tuple[list[str], nn.Parameter]]:
    """Every parameter once, with all the names it goes by (tied weights have several)."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), ([], parameter))[0].append(name)
    return found


def _same_kind(parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights of several number types or devices: they cannot lie in one vector."""
    kinds = {(p.dtype, p.device) for p in parameters.values()}
    if len(kinds) > 1 or not next(iter(kinds))[0].is_floating_point:
        shown = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(
            f"Network: all trainable weights must have one floating dtype and device. Got {shown}. "
            "Convert the model with .to(dtype=..., device=...), or set requires_grad=False on the odd ones."
        )
