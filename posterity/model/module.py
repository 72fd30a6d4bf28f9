"""Preparation of a user's `nn.Module` as a function of one weight vector."""

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import ParametrizationList

from posterity.errors import BadData
from posterity.numerics.layout import Layout
from posterity.numerics.modules import check_shapes, uncompiled
from posterity.numerics.random import GlobalStates, Key, global_generators

logger = logging.getLogger("posterity")

T = TypeVar("T", bound=Tensor)
R = TypeVar("R")

_NAMED = 3  # parameters that a log line lists

_RECOMPUTES = (
    "Network: the model must keep its activations for backward. It runs parts of itself again then, or keeps them "
    "through hooks (torch.utils.checkpoint), when the weights of theta are no longer in it. Switch that off, as by "
    "gradient_checkpointing_disable()."
)


class Turn:
    """A reentrant lock for `with`, which copies of its owner do not share."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["Turn"], tuple[()]]:
        return Turn, ()  # a lock is not copied


@contextmanager
def last_batch_alone(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Let the running statistics of batch norm forget all batches but the last."""
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 1.0  # type: ignore[assignment]
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def private(module: object) -> nn.Module:
    """Copy the user's module in evaluation mode; raises an error that says what to do where it cannot be used."""
    module = uncompiled(module) if isinstance(module, nn.Module) else module
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"Network: the model must be a torch.nn.Module with Python code. Got {type(module).__name__}. "
            "Pass the module itself."
        )
    check_shapes("Network", module)
    _refuse_meta(module)
    copy = copied(module).eval()
    dropouts = [
        name
        for name, layer in copy.named_modules()
        if isinstance(layer, nn.modules.dropout._DropoutNd)
        or (isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0)
    ]
    if dropouts:
        logger.info("dropout is off but under MCDropout (layers: %s)", ", ".join(dropouts))
    for layer in copy.modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            if layer.max_norm is not None:
                raise ValueError(
                    f"Network: {layer} changes its own weights in every call, so it is no function of theta. "
                    "Make it with max_norm=None; a prior keeps the weights small."
                )
            layer.sparse = False  # the gradient of theta is dense
        elif isinstance(layer, nn.RNNBase):
            layer.dropout = 0.0
            layer.train()  # cuDNN has gradients in training mode alone, which differs by nothing but dropout
    return copy


def _refuse_meta(module: nn.Module) -> None:
    """Raise a ValueError where a weight or buffer has a shape and no values."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type == "meta":
            raise ValueError(
                f"Network: the model must have values. '{name}' is on the meta device, which has shapes only. Call "
                "module.to_empty(device='cpu') and give it weights (load_state_dict, or reset_parameters)."
            )


def recurrent_rates(module: nn.Module, copy: nn.Module) -> list[tuple[nn.RNNBase, float]]:
    """The recurrent layers of the private copy whose originals have dropout between layers, and their rates."""
    return [
        (own, layer.dropout)
        for layer, own in zip(uncompiled(module).modules(), copy.modules(), strict=True)
        if isinstance(layer, nn.RNNBase) and layer.dropout > 0 and isinstance(own, nn.RNNBase)
    ]


class OutputError(TypeError):
    """The model returned something else than one tensor."""


class RowsError(BadData):
    """The model returned another number of rows than it was given."""


def check_rows(outputs: Tensor, rows: int) -> None:
    """Raise a `RowsError` unless the outputs have a row for each of the inputs."""
    if outputs.dim() and outputs.shape[0] == rows:
        return
    remedy = "Take the right one of what it returns: Network(module, outputs=lambda out: ...)."
    if rows == 1:
        remedy = (
            "Where it squeezes its outputs, name the axis, as in squeeze(-1): squeeze() drops that of a single row."
        )
    raise RowsError(
        f"The model must return one row of outputs for each row of inputs. Got outputs {tuple(outputs.shape)} for "
        f"{rows} row{'s' * (rows != 1)}. {remedy}"
    )


def single_output(returned: object, adapter: Callable[[Any], Tensor] | None, said: list[str]) -> Tensor:
    """The outputs for the likelihood: by the adapter, else `logits` of a model output or the first of a tuple.

    What was chosen is logged once, and then stands in `said`.
    """
    outputs, chosen = returned, ""
    if adapter is not None:
        outputs = adapter(returned)
    elif isinstance(logits := getattr(returned, "logits", None), Tensor):
        outputs = logits
    elif isinstance(returned, Mapping) and isinstance(returned.get("logits"), Tensor):
        outputs = returned["logits"]
    elif isinstance(returned, (tuple, list)) and returned and isinstance(returned[0], Tensor):
        outputs, chosen = returned[0], f"the first of the {len(returned)} values that the model returns is its output"
    if not isinstance(outputs, Tensor):
        raise OutputError(
            f"Network: the model must return one tensor, logits, or a tuple that begins with the outputs. Got "
            f"{type(outputs).__name__}{'' if adapter is None else ' from outputs='}. Give the function that makes the "
            "outputs of it: Network(module, outputs=lambda out: ...)."
        )
    if chosen and not said:
        said.append(chosen)
        logger.info("%s: Network(module, outputs=...) takes another", chosen)
    return outputs


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy; raises an error that says what to do where that fails."""
    try:
        return deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"Network: the model cannot be copied: {str(error).splitlines()[0]}. If it uses nn.utils.weight_norm, "
            "take nn.utils.parametrizations.weight_norm; if it keeps tensors of its last call, delete them."
        ) from error


def without_recomputation(call: Callable[[], tuple[Tensor, R]]) -> tuple[Tensor, R]:
    """Return the outputs of a call, and what comes with them; raises a ValueError where backward would recompute."""
    try:
        with disable_saved_tensors_hooks(_RECOMPUTES):
            pass
    except RuntimeError:  # hooks set outside do no harm, and cannot be told from the module's
        return call()
    try:
        with disable_saved_tensors_hooks(_RECOMPUTES):
            outputs, others = call()
    except RuntimeError as error:
        if _RECOMPUTES not in str(error):
            raise
        raise ValueError(_RECOMPUTES) from None
    nodes, seen = [outputs.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(_RECOMPUTES)
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return outputs, others


def unique(named: Iterable[tuple[str, T]]) -> tuple[dict[str, T], dict[str, list[str]]]:
    """Each tensor once, under its first name, and all its names (tied weights have several)."""
    tensors: dict[str, T] = {}
    names: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for name, tensor in named:
        key = first.setdefault(id(tensor), name)
        tensors[key] = tensor
        names.setdefault(key, []).append(name)
    return tensors, names


def say_frozen(frozen: Mapping[str, Tensor], trained: int) -> None:
    """Log which parameters stay at their values because they do not require a gradient."""
    if frozen:
        count = sum(value.numel() for value in frozen.values())
        names = [*frozen] if len(frozen) <= _NAMED else [*[*frozen][:_NAMED], f"{len(frozen) - _NAMED} more"]
        logger.info(
            f"{count:,} weights with requires_grad=False stay at their values ({', '.join(names)}), without a prior: "
            f"theta has the other {trained:,}"
        )


def check_one_kind(trainable: Mapping[str, Tensor]) -> None:
    """Refuse weights that do not fit in one vector: none, or several dtypes or devices."""
    if not trainable:
        raise ValueError("Network: the model has no trainable parameters. Set requires_grad=True on some.")
    kinds = {(p.dtype, p.device) for p in trainable.values()}
    if len(kinds) > 1 or not next(iter(kinds))[0].is_floating_point:
        shown = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(
            f"Network: all trainable weights must have one floating dtype and device. Got {shown}. "
            "Convert the model with .to(dtype=..., device=...), or set requires_grad=False on the odd ones."
        )


def fresh_weights(module: nn.Module, wanted: Iterable[str], key: Key) -> dict[str, Tensor]:
    """Return the weights of a copy on the CPU after its layers' `reset_parameters`; refuse weights without one.

    Matrices that are zero in the model stay so, as the second factor of an adapter must, unless all are: no layer of
    torch begins at a matrix of zeros by itself.
    """
    module = copied(module).to("cpu", torch.float32)
    wanted, layers = [*wanted], dict(module.named_modules())
    matrices = [module.get_parameter(name) for name in wanted if module.get_parameter(name).dim() > 1]
    zeros = [weight for weight in matrices if not bool(weight.any())]
    resets: dict[str, Callable[[], object]] = {}
    for name, layer in layers.items():
        for method in ("_reset_parameters", "reset_parameters"):  # the first is torch's name in attention layers
            if callable(reset := getattr(layer, method, None)):
                resets[name] = reset
        if callable(reset := getattr(layer, "reset_lora_parameters", None)):  # of peft, whose second factor is zero
            resets[name] = partial(_reset_adapters, layer, reset)
    for weight in wanted:
        owner = weight.rpartition(".")[0]
        above = [name for name in resets if name in ("", owner) or owner.startswith(f"{name}.")]
        if not above or isinstance(
            layers[owner], ParametrizationList
        ):  # its layer would reset a temporary product of it
            raise ValueError(
                f"Network.fresh: {type(layers[owner]).__name__} has the weight '{weight}' but no reset_parameters(). "
                "Give it one, or pass infer(..., start=function), a function that returns a new module."
            )
    with seeded(key.seed):
        for name in reversed(resets):  # a layer after its children, which it may initialise itself
            resets[name]()
    if len(zeros) < len(matrices):
        for matrix in zeros:
            matrix.detach().zero_()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def made_by(
    factory: Callable[[], object], key: Key, device: torch.device, fixed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights of a module that a function makes while every global generator is seeded by the key.

    The generators are restored. What is `fixed`, being no part of theta, must be the same in the module.
    """
    generators = global_generators(device)
    before = GlobalStates.now(generators)
    seeds = [key.generator(generator.device).get_state() for generator in generators]
    numpy_state = np.random.RandomState(key.seed % 2**32).get_state()
    GlobalStates(random.Random(key.seed).getstate(), numpy_state, seeds).restore(generators)
    try:
        module = factory()
    finally:
        before.restore(generators)
    if not isinstance(module, nn.Module):
        raise TypeError(f"start: the function must return a torch.nn.Module. Got {type(module).__name__}.")
    module = uncompiled(module)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in fixed.items():
        if name not in own or not torch.equal(own[name].detach().to(value), value):
            raise ValueError(
                f"start: '{name}' is no part of theta, and differs in the module that the function returned. Let it be "
                "the same in all modules, or a weight that is trained."
            )
    return {name: value.detach() for name, value in own.items()}


def named_weights(owner: str, given: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a layout among those given; raises a ValueError where one is missing or misshapen."""
    for part in layout:
        if part.name not in given or given[part.name].shape != part.shape:
            came = f"shape {tuple(given[part.name].shape)}" if part.name in given else "none"
            raise ValueError(
                f"{owner}: the weights must be those of the joint's network, with '{part.name}' of shape "
                f"{tuple(part.shape)}. Got {came}. Use the same architecture."
            )
    return {part.name: given[part.name].detach() for part in layout}


def _reset_adapters(layer: Any, reset: Callable[..., object]) -> None:
    """Initialise the active adapters of a layer of peft in its own way."""
    further = (True,) * (len(signature(reset).parameters) - 1)  # whether to initialise, where that is a choice
    for adapter in layer.active_adapters:
        reset(adapter, *further)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let weights that are made inside `with` begin from the seed; torch's own generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def in_training(modules: Sequence[nn.Module], recurrences: Sequence[tuple[nn.RNNBase, float]]) -> Iterator[None]:
    """Let modules see `self.training`, and recurrent layers drop outputs at their rates, inside `with`."""
    try:
        for module in modules:
            module.training = True
        for layer, rate in recurrences:
            layer.dropout = rate
        yield
    finally:
        for module in modules:
            module.training = False
        for layer, _ in recurrences:
            layer.dropout = 0.0


@contextmanager
def plain_attention() -> Iterator[None]:
    """Run attention by plain operations inside `with`: vmap has no rule for the fused kernels."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
