"""Steps played as CUDA graphs: recorded once, then launched whole instead of kernel by kernel."""

import logging
from typing import Any, Literal, TypeAlias

from posterity.inference.graph import Graph, shapes
from posterity.inference.method import Info, Method, Target
from posterity.inference.potential import accelerated, doubt
from posterity.model.data import Batch
from posterity.numerics.random import Key

logger = logging.getLogger("posterity")

Acceleration: TypeAlias = Literal["auto", "off"]

_PLAIN = 3  # steps of each kind before it is recorded: libraries set themselves up in the first
_MOST_KINDS = 4  # kinds of steps, by the shapes of state and batch; more are not worth their memory


class Stepper:
    """The steps of a run, recorded and played where the method and the device allow, else called.

    Takes the method, the problem and `accelerate`: "auto" records on CUDA and lets samplers compile, "off" never does.
    A step that cannot be
    recorded is called from then on, which is said once with the reason. The numbers are those of plain steps, up to
    the rounding of kernels that add up in another order each time. A recording cannot see memory of the CPU that a
    kernel reads (batched solvers of cuBLAS pass pointers that way): switch it off for modules that solve equations.
    """

    def __init__(self, method: Method, joint: Target, accelerate: Acceleration) -> None:
        """Nothing recorded yet."""
        self._method, self._joint = method, joint
        self._wanted = accelerate == "auto" and method.recordable and joint.device.type == "cuda"
        self._auto = accelerate == "auto"
        doubt(joint)
        self._seen: dict[object, int] = {}
        self._graphs: dict[object, Graph] = {}
        self._last: tuple[Any, object] = (None, None)  # a state that came out of a graph, and its shapes

    def __call__(self, state: Any, batch: Batch, key: Key) -> tuple[Any, Info]:
        """`method.step`."""
        effort = self._method.effort(self._joint, state) if self._auto else "none"
        if effort != "none":
            with accelerated(effort):
                return self._method.step(self._joint, state, batch, key)
        if not self._wanted:
            return self._method.step(self._joint, state, batch, key)
        known, kind = self._last
        kind = (kind if known is state else shapes(state), shapes(batch))
        graph = self._graphs.get(kind)
        if graph is None:
            count = self._seen[kind] = self._seen.get(kind, 0) + 1
            if count <= _PLAIN:
                return self._method.step(self._joint, state, batch, key)
            graph = self._recorded(kind, state, batch, key)
            if graph is None:
                return self._method.step(self._joint, state, batch, key)
        state, info = graph.play(state, batch, key)
        self._last = state, graph.kind_after
        return state, info

    def _recorded(self, kind: object, state: Any, batch: Batch, key: Key) -> Graph | None:
        """The graph of a step, or None with a word about the reason, which ends all recording."""
        if len(self._graphs) == _MOST_KINDS:
            reason = f"states and batches come in more than {_MOST_KINDS} shapes"
        else:
            try:
                graph = self._graphs[kind] = Graph(self._method, self._joint, state, batch, key)
                logger.info("the steps are recorded as a CUDA graph")
                return graph
            except Exception as error:  # whatever a user's module does; the plain step raises it if it is at fault
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._wanted = False
        logger.warning("the steps are not recorded as a CUDA graph, and run one kernel at a time: %s", reason)
        return None
