"""Steps with the network as it is or compiled, whichever a few of them show to be faster."""

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from posterity.inference.acceleration import Stepper
from posterity.inference.callbacks import Callback
from posterity.inference.method import Info, Method, with_passes
from posterity.model import Joint, Problem
from posterity.model.data import Batch, Data
from posterity.model.passes import CompiledModule, Precision
from posterity.numerics.random import Key
from posterity.storage import clone

logger = logging.getLogger("posterity")

Step: TypeAlias = Callable[[Any, Batch, Key], tuple[Any, Info]]

_WARM, _TIMED = 6, 7  # steps of each way: the first ones compile, and record on CUDA
_GAIN = 0.95  # of the time of plain steps that compiled ones may take: less is not worth other roundings


class Fastest(Callback):
    """Steps that are taken in one of two ways, with the same results up to rounding.

    Before the first step both ways take a few on copies of its state, with its batch and key, so that no number of the
    run depends on the way that is not chosen. Where the compiled one fails or gains too little, the plain one stays.
    The choice is logged. As a callback it is stored with the run: a resumed run rounds as before.
    """

    def __init__(
        self,
        plain: Step,
        compiled: Step,
        device: torch.device,
        ready: Callable[[Any], bool] = lambda state: True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take both ways, and whether the step at a state may be measured: steps before it are plain."""
        self._plain, self._compiled = plain, compiled
        self._device, self._ready, self._clock = device, ready, clock
        self._choice = ""  # or "plain", "compiled"
        self._step: Step | None = None

    def __call__(self, state: Any, batch: Batch, key: Key) -> tuple[Any, Info]:
        """Take a step, after a choice where none was made."""
        if self._step is None and self._ready(state):
            self._step = self._chosen(state, batch, key)
            del self._compiled  # with its graph, if it was not chosen
        return (self._step or self._plain)(state, batch, key)

    def _chosen(self, state: Any, batch: Batch, key: Key) -> Step:
        before, self._choice = self._choice, "plain"
        if before == "plain":
            return self._plain
        try:
            compiled = self._seconds(self._compiled, state, batch, key)
            plain = compiled if before else self._seconds(self._plain, state, batch, key)
        except Exception as error:  # of the compiler, or of the module, whose plain step raises it again
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            more = ". The run goes on with other roundings than before" if before else ""
            logger.warning("the network is not compiled: %s%s", reason, more)
            return self._plain
        if before or compiled < _GAIN * plain:
            self._choice = "compiled"
        if not before:
            times = 1e3 * compiled, 1e3 * plain
            which = "is compiled" if self._choice == "compiled" else "runs as it is"
            logger.info("the network %s: a step takes %.3g ms compiled, and %.3g ms as it is", which, *times)
        return self._compiled if self._choice == "compiled" else self._plain

    def _seconds(self, step: Step, state: Any, batch: Batch, key: Key) -> float:
        """Return the seconds of a step of this way, which begins at a copy of the state."""
        state, times = clone(state), list[float]()
        for _ in range(_WARM + _TIMED):
            began = self._now()
            state, _ = step(state, batch, key)
            times.append(self._now() - began)
        return statistics.median(times[_WARM:])

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    def state(self) -> Any:
        return {"choice": self._choice}

    def restore(self, state: Any) -> None:
        self._choice = state["choice"]


def fastest(
    method: Method, joint: Problem, data: Data, plain: Step, precision: Precision | None, micro_batch: int | None
) -> Fastest | None:
    """Return the steps of a method that choose their way; None, with a word in the log, where there is no choice."""
    reason = _no_choice(method, joint)
    if reason or not isinstance(joint, Joint):
        logger.info("the network is not compiled: %s", reason)
        return None
    network = joint.network.replace()
    network.compiled = CompiledModule.whole(network.module)
    problem = with_passes(method, dataclasses.replace(joint, network=network), data, precision, micro_batch)

    def ready(state: Any) -> bool:
        return not method.traits.recordable or method.recordable(state) is not None

    return Fastest(plain, Stepper(method, problem, "auto"), joint.device, ready)


def _no_choice(method: Method, joint: Problem) -> str:
    """Return why the network of the steps is not compiled; "" where it may be."""
    if joint.network is None:
        return "a Density has none"
    if joint.network.compiled:
        return "torch.compile has done so already"
    if joint.network.sharing is not None:
        return "several processes share its rows"
    traits = method.traits
    if not traits.passes or traits.second_order or traits.effort is not None:  # chains choose for themselves
        return f"{type(method).__name__} with these settings does not follow gradients of batches alone"
    return ""
