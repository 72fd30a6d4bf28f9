"""Any `nn.Module` as a pure function of one flat weight vector."""

import copy
import fnmatch
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from posterity.errors import unknown
from posterity.model.batch import LABELS, Inputs, map_inputs, num_rows
from posterity.model.direct import Direct
from posterity.model.layer_chains import linear_chain
from posterity.model.layouts import ImageLayout
from posterity.model.members import Members
from posterity.model.module import (
    Turn,
    check_one_kind,
    check_rows,
    fresh_weights,
    in_training,
    last_batch_alone,
    made_by,
    named_weights,
    private,
    recurrent_rates,
    say_frozen,
    single_output,
    unique,
    without_recomputation,
)
from posterity.model.passes import CompiledModule, Passes
from posterity.model.side_effects import UNKNOWN, SideEffects, check_unwritten, side_effects, watchable, write_counts
from posterity.numerics.dropout import Dropping, Masks, NoMasks, scattered_weights
from posterity.numerics.layout import Layout, Slice
from posterity.numerics.random import Key
from posterity.processes import Group

logger = logging.getLogger("posterity")

Weights = Sequence[Tensor]
Function = Callable[..., Any]
Buffers = dict[str, Tensor]
"""Batch-norm statistics and other buffers of a network, by name."""


class Network:
    """A module's function f(theta, inputs), its layout, starting weights, frozen weights and buffers.

    Takes an `nn.Module`, of which it keeps a private copy: the user's module is never changed. `outputs` makes the
    tensor that the likelihood needs of what the module returns: `lambda out: out.logits.movedim(-1, 1)` for tokens
    of a Hugging Face model, whose classes are last. Without it that is the tensor returned, `logits` of a model output,
    or the first of a tuple. `labels` names the targets in a batch that is a mapping; the module is not given them.
    theta (P,) holds the trainable parameters in module order, each row-major; a weight shared by two layers appears
    once. Parameters with `requires_grad=False` are frozen at their values. Every layer runs in evaluation mode (so
    dropout is off outside `dropping`), except batch norm, which runs on batch statistics when `train=True` unless its
    weights are frozen. Threads may share a network: their calls take turns.

    A call is a function of theta and inputs. Two rows of the first inputs show what else it does: a module that writes
    into its inputs or buffers is given copies in every call; one that draws random numbers in evaluation mode, keeps a
    state between calls or writes into its weights is refused.

    >>> network = Network(nn.Linear(2, 1))
    >>> network.layout.names, network.layout.size
    (('weight', 'bias'), 3)
    >>> network.outputs(torch.zeros(3), torch.ones(4, 2)).shape
    torch.Size([4, 1])
    >>> network.outputs(torch.zeros(5, 3), torch.ones(4, 2)).shape  # five members
    torch.Size([5, 4, 1])
    """

    def __init__(
        self, module: nn.Module, *, outputs: Callable[[Any], Tensor] | None = None, labels: str = LABELS
    ) -> None:
        self.adapter, self.labels = outputs, labels
        self._said: list[str] = []  # what was logged about the outputs; shared with the copies of this network
        self._module = private(module)
        parameters, names = unique(self._module.named_parameters(remove_duplicate=False))
        buffers, buffer_names = unique(self._module.named_buffers(remove_duplicate=False))
        trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        check_one_kind(trainable)
        self.layout = Layout.of({name: p.shape for name, p in trainable.items()})
        self.initial = self.layout.flatten({name: p.detach() for name, p in trainable.items()})  # (P,)
        self.frozen: Buffers = {name: p.detach() for name, p in parameters.items() if name not in trainable}
        self.buffers: Buffers = {name: b.detach().clone() for name, b in buffers.items()}
        self._buffer_dims = {name: b.dim() for name, b in buffers.items()}
        self._names = {**names, **buffer_names}
        say_frozen(self.frozen, self.layout.size)
        self._dropping: list[Masks] = []  # masks of active dropout; shared with the copies of this network
        self._recurrences = recurrent_rates(module, self._module)
        self._scattered = self.recurrent and self.device.type == "cuda"
        self._batch_norms = [m for m in self._module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        written = {id(own) for norm in self._batch_norms for own in norm.buffers(recurse=False)}
        self._running = frozenset(name for name, b in buffers.items() if id(b) in written)
        self._chain = linear_chain(self._module) if outputs is None else None
        self._images = ImageLayout.of(module)
        self._together = Members(self._module, adapted=outputs is not None)
        self._own = [(table, name, table[name]) for key in self._names for table, name in self._tables(key)]
        self._looked: list[str] = []  # not empty after the check for recomputation; shared with the copies, too
        self._effects: list[SideEffects] = []  # of a call, once found; shared with the copies, too
        self._factory: Callable[[], nn.Module] | None = None  # of the user, for fresh weights
        self.compiled = CompiledModule(module, self._module)
        self.passes = Passes()  # other ones in the steps of a run
        self._turn = Turn()  # guards the module; shared with the copies of this network
        self._index()

    def _tables(self, key: str) -> Iterator[tuple[dict[str, Any], str]]:
        """The tables of the private module that hold this parameter or buffer, and its name in each."""
        for full_name in self._names[key]:
            owner, _, name = full_name.rpartition(".")
            module = self._module.get_submodule(owner)
            yield module._parameters if name in module._parameters else module._buffers, name

    def _index(self) -> None:
        """Find the slots of each tensor, once: (table, name in it, index in the layout or key)."""
        self._slots = [(*slot, index) for index, part in enumerate(self.layout) for slot in self._tables(part.name)]
        self._frozen_slots = [(*slot, key) for key in self.frozen for slot in self._tables(key)]
        self._buffer_slots = [(*slot, key) for key in self.buffers for slot in self._tables(key)]
        trained = {id(table) for table, _, _ in self._slots}
        self._direct = Direct.of(self._chain, self._slots)
        self._norms = [  # batch norm, and whether it trains: a layer whose own weights are all frozen does not
            (norm, not any(True for _ in norm.parameters(recurse=False)) or id(norm._parameters) in trained)
            for norm in self._batch_norms
        ]

    def __repr__(self) -> str:
        return f"Network({type(self._module).__name__} of {self.layout.size} weights)"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.initial.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.initial.device

    @property
    def module(self) -> nn.Module:
        """The private copy with its initial weights."""
        return self._module

    @property
    def description(self) -> str:
        """The module as it prints itself, one line per layer."""
        return re.sub(r" at 0x[0-9a-f]+", "", str(self._module))  # an address differs from run to run

    @property
    def recurrent(self) -> bool:
        """Whether it has recurrent layers of torch."""
        return any(isinstance(m, nn.RNNBase) for m in self._module.modules())

    @property
    def trains_statistics(self) -> bool:
        """Whether batch norm uses the statistics of the batch during inference of the weights."""
        return any(trains for _, trains in self._norms)

    @property
    def sharing(self) -> Group | None:
        """The processes that share the rows of a pass; none inside `dropping`, whose masks are for all rows."""
        return None if self._dropping else self.passes.processes

    @property
    def mixes_rows(self) -> bool:
        """Whether an output row depends on the other rows of its batch even in evaluation mode."""
        norms: Any = [m for m in self._batch_norms if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        return not all(norm.track_running_stats for norm in norms)

    def replace(
        self,
        *,
        initial: Tensor | None = None,
        frozen: Buffers | None = None,
        buffers: Buffers | None = None,
        passes: Passes | None = None,
    ) -> "Network":
        """The same network with other starting weights, frozen weights, buffers or passes."""
        new = copy.copy(self)
        new.initial = self.initial if initial is None else initial.detach().clone()
        new.frozen = self.frozen if frozen is None else {k: frozen[k].detach().clone() for k in self.frozen}
        new.buffers = self.buffers if buffers is None else {k: buffers.get(k, b) for k, b in self.buffers.items()}
        new.passes = self.passes if passes is None else passes
        new._index()
        return new

    def member(self, index: int) -> "Network":
        """The network with the buffers of one member (itself when members share them)."""
        shared = all(b.dim() == self._buffer_dims[name] for name, b in self.buffers.items())
        return self if shared else self.replace(buffers=self.buffers_of(self.buffers, index))

    def buffers_of(self, buffers: Buffers, index: int) -> Buffers:
        """Buffers of one member, from buffers with or without a leading axis M."""
        return {name: b[index] if b.dim() > self._buffer_dims[name] else b for name, b in buffers.items()}

    @property
    def running(self) -> frozenset[str]:
        """Names of the buffers that batch norm writes into; no other buffer changes in a run."""
        return self._running

    @property
    def one_by_one(self) -> bool:
        """Whether members run faster one by one than together: convolutions on a CPU, wide ones on a GPU."""
        return self._together.convolve and (self.device.type == "cpu" or self._together.wide)

    def matching(self, pattern: str) -> tuple[Slice, ...]:
        """The slices of theta that match a shell pattern such as `head.*` by any of the names of a tied weight."""
        return tuple(
            part for part in self.layout if any(fnmatch.fnmatchcase(name, pattern) for name in self._names[part.name])
        )

    def with_weights(self, *patterns: str) -> "Network":
        """The same network where only the parameters matching a pattern are in theta; the rest is frozen."""
        chosen: set[str] = set()
        for pattern in patterns:
            matching = {part.name for part in self.matching(pattern)}
            if not matching:
                raise ValueError(f"Network.with_weights: {unknown('parameter', pattern, self.layout.names)}")
            chosen |= matching
        if not chosen:
            raise ValueError("Network.with_weights must be given at least one pattern, such as 'head.*'. Got none.")
        views = self.layout.unflatten(self.initial)
        new = copy.copy(self)
        new.layout = Layout.of({part.name: part.shape for part in self.layout if part.name in chosen})
        new.initial = new.layout.flatten(views)
        new.frozen = {**self.frozen, **{name: v.clone() for name, v in views.items() if name not in chosen}}
        new._index()
        return new

    def fresh(self, key: Key) -> Tensor:
        """Newly initialised weights (P,), drawn under `key` by the layers' own `reset_parameters`, or see `made_by`.

        They are drawn on the CPU in float32, so that they do not depend on the network's device and dtype.
        """
        if self._factory is None:
            drawn = fresh_weights(self._module, self.layout.names, key)
        else:
            fixed = {**self.frozen, **{name: b for name, b in self.buffers.items() if name not in self._running}}
            drawn = named_weights("start", made_by(self._factory, key, self.device, fixed), self.layout)
        return self.layout.flatten(drawn).to(self.initial)

    def made_by(self, factory: Callable[[], nn.Module], key: Key) -> "Network":
        """The network that begins at the weights of `factory()`, made under the key, as does every `fresh` start."""
        new = copy.copy(self)
        new._factory = factory
        new.initial = new.fresh(key)
        return new

    def views(self, theta: Tensor) -> list[Tensor]:
        """theta (..., P) as one tensor for each parameter, (..., *shape), in layout order."""
        return self.layout.views(theta)

    def outputs(
        self, theta: Tensor, inputs: Inputs, buffers: Buffers | None = None, *, per_member: bool = False
    ) -> Tensor:
        """f(theta, inputs) in evaluation mode: (P,) -> (N, *event), (M, P) -> (M, N, *event).

        `per_member` says that the inputs have a member axis of their own, (M, N, ...).
        """
        return self.run(self.views(theta), inputs, buffers, members=theta.dim() > 1, per_member=per_member)[0]

    @contextmanager
    def dropping(self, masks: Masks, *, training: bool = False) -> Iterator[None]:
        """Apply `masks`, the same for all members, to the dropout of every pass inside `with`.

        With `training`, all modules but batch norm see `self.training`, for code that depends on it.
        """
        with self._turn:
            flags = [m for m in self._module.modules() if training and not m.training and m not in self._batch_norms]
            self._dropping.append(masks)
            try:
                with in_training(flags, self._recurrences):
                    yield
            finally:
                self._dropping.pop()

    def run(
        self,
        weights: Weights,
        inputs: Inputs,
        buffers: Buffers | None = None,
        *,
        members: bool = False,
        per_member: bool = False,
        train: bool = False,
    ) -> tuple[Tensor, Buffers]:
        """Outputs and the running statistics after the call, from one tensor for each parameter of the layout.

        `buffers` replace the network's own by name. With `members`, weights (and buffers that differ by member) have a
        leading axis M. With `train`, batch norm uses the statistics of the batch and updates the running ones.
        Raises a ValueError for a module that draws random numbers in evaluation mode, unless inside `dropping`.
        """
        buffers = {**self.buffers, **buffers} if buffers else self.buffers
        count = weights[0].shape[0] if members else None
        if per_member and num_rows(inputs) != count:
            raise ValueError(
                f"Network: the inputs are those of {num_rows(inputs)} members, so theta must be (members, P) with as "
                f"many. Got {'one theta' if count is None else count}."
            )
        if not self._dropping:
            known = self._effects or [self.side_effects(map_inputs(lambda x: x[0], inputs) if per_member else inputs)]
            known[0].refuse_draws()
        if self._looked or not torch.is_grad_enabled() or not any(w.requires_grad for w in weights):
            return self._run(weights, inputs, buffers, count, per_member, train)
        result = without_recomputation(lambda: self._run(weights, inputs, buffers, count, per_member, train))
        self._looked.append("backward")
        return result

    def _run(
        self, weights: Weights, inputs: Inputs, buffers: Buffers, count: int | None, per_member: bool, train: bool
    ) -> tuple[Tensor, Buffers]:
        """As `run`, for `count` members, or None without a member axis."""
        chain = self._chain
        if count is None:
            return self._images.call(lambda w, x: self._call(w, x, buffers, train), weights, inputs, train)
        shared = {name for name, b in buffers.items() if b.dim() == self._buffer_dims[name]}
        stacked = {
            name: b.expand(count, *b.shape) if name in shared & self._running else b for name, b in buffers.items()
        }
        if chain is not None and chain.takes(inputs, per_member):
            return self._call(weights, inputs, stacked, train, lambda rows: chain.run(rows, count, per_member))

        def loop() -> tuple[Tensor, Buffers]:
            return self._loop(weights, inputs, stacked, per_member, train)

        if self.one_by_one:
            return loop()

        def call(w: Weights, x: Inputs, b: Buffers, function: Function | None = None) -> tuple[Tensor, Buffers]:
            return self._call(w, x, b, train, function)

        kind = shared - self._running, per_member, bool(self._dropping)
        return self._together.run(call, loop, weights, inputs, stacked, *kind)

    def direct(self, inputs: Inputs) -> Direct | None:
        """The chain of linear layers that takes such rows without autograd's graph, once a first call was looked at."""
        busy = self._dropping or self.compiled or self.passes.precision or self.passes.micro_batch
        return None if busy or not self._looked or self._direct is None else self._direct.taking(inputs)

    def side_effects(self, inputs: Inputs) -> SideEffects:
        """What a call on such inputs writes into and draws, found once at the starting weights, on two rows."""
        if self._effects:
            return self._effects[0]
        if self._dropping or not watchable(inputs):
            return UNKNOWN
        network = self.member(0)
        views = dict(zip(self.layout.names, self.views(self.initial), strict=True))

        def call(weights: Buffers, rows: Inputs, buffers: Buffers) -> Tensor:
            return network._called([*weights.values()], rows, buffers, False, network._module)

        def undropped(*given: Any) -> Tensor:
            with self.dropping(NoMasks()):
                return call(*given)

        effects = side_effects(call, undropped, views, inputs, network.buffers)
        if effects.inputs:
            logger.info("the model writes into its inputs: it is given a copy of the rows in every call")
        if effects.buffers:
            names = ", ".join(sorted(effects.buffers))
            logger.info("the model writes into its buffers (%s): every call begins at their first values", names)
        self._effects.append(effects)
        return effects

    def without_dropout(self, inputs: Inputs) -> AbstractContextManager[None]:
        """Switch off dropout that the module leaves on in evaluation mode, which only `dropping` may run."""
        return self.dropping(NoMasks()) if self.side_effects(inputs).draws == "by dropout" else nullcontext()

    def batch_statistics(
        self, theta: Tensor, inputs: Inputs, buffers: Buffers | None = None, *, per_member: bool = False
    ) -> Buffers:
        """Running statistics of batch norm from this batch alone, at theta (P,) or (M, P); empty without batch norm."""
        if not self._running:
            return {}
        with self._turn, last_batch_alone(self._batch_norms), torch.no_grad():
            kind = {"members": theta.dim() > 1, "per_member": per_member}
            after = self.run(self.views(theta), inputs, buffers, **kind, train=True)[1]
        return {name: after[name] for name in after if name in self._running and after[name].is_floating_point()}

    def _loop(
        self, weights: Weights, inputs: Inputs, buffers: Buffers, per_member: bool, train: bool
    ) -> tuple[Tensor, Buffers]:
        """Run members one after the other."""

        def run(index: int) -> tuple[Tensor, Buffers]:
            own = map_inputs(lambda x: x[index], inputs) if per_member else inputs
            return self._run([w[index] for w in weights], own, self.buffers_of(buffers, index), None, False, train)

        results = [run(index) for index in range(weights[0].shape[0])]
        outputs = torch.stack([outputs for outputs, _ in results])
        return outputs, {name: torch.stack([after[name] for _, after in results]) for name in results[0][1]}

    def _call(
        self, weights: Weights, inputs: Inputs, buffers: Buffers, train: bool, function: Function | None = None
    ) -> tuple[Tensor, Buffers]:
        """Call the private module, or a function of its layers, with these tensors in place of its own."""
        whole = function is None
        if function is None:
            compiled = self.compiled.call(self.passes.compiled) if self._looked and not self._dropping else None
            function = compiled or self._module
        effects = self._effects[0] if self._effects else UNKNOWN
        written = None if self._dropping or effects.inputs else write_counts(inputs)  # the user's rows run again
        if written is None:
            inputs = map_inputs(torch.clone, inputs)
        copies = (
            frozenset(buffers) if effects.buffers is None else effects.buffers | (self._running if train else {*()})
        )
        if copies:
            buffers = {name: b.clone() if name in copies else b for name, b in buffers.items()}
        outputs = self._called(weights, inputs, buffers, train, function)
        if whole:
            check_rows(outputs, num_rows(inputs))
        check_unwritten(inputs, written)
        return outputs, {name: b for name, b in buffers.items() if name in self._running}

    def _called(self, weights: Weights, inputs: Inputs, buffers: Buffers, train: bool, function: Function) -> Tensor:
        """As `_call`, on tensors that the module may write into."""
        with self._turn:
            try:
                for table, name, index in self._slots:
                    table[name] = weights[index]
                for table, name, key in self._frozen_slots:
                    table[name] = self.frozen[key]
                for table, name, key in self._buffer_slots:
                    table[name] = buffers[key]
                for norm, trains in self._norms:
                    norm.training = train and trains
                with (
                    self.passes.autocast(self.device),
                    Dropping(self._dropping[-1]) if self._dropping else nullcontext(),
                    scattered_weights() if self._scattered else nullcontext(),
                ):
                    if isinstance(inputs, Mapping):
                        outputs = function(**inputs)
                    else:
                        outputs = function(*((inputs,) if isinstance(inputs, Tensor) else inputs))
            finally:
                for table, name, own in self._own:
                    table[name] = own
        if not isinstance(outputs, Tensor) or self.adapter is not None:
            outputs = single_output(outputs, self.adapter, self._said)
        return outputs if self.passes.precision is None else outputs.to(self.dtype)
