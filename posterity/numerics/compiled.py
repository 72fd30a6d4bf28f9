"""Functions compiled to machine code, and recorded as CUDA graphs."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from posterity.numerics.workspace import own_workspaces


@contextmanager
def nothing_read() -> Iterator[None]:
    """An error where work waits for the device to read a number: a recording could not, and would end in pieces."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it does not see every case
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """The work inside `with` goes into the graph; an error leaves torch as it was."""
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    except BaseException:
        # A recording that failed leaves torch's own generator waiting for the end of it: make one that succeeds.
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros((), device="cuda")
        raise


logger = logging.getLogger("posterity")

LOOKS = 3  # calls that may differ from plain ones by a decision that rounding has turned


class Compiled:
    """A function of tensors and tuples of them, compiled at its first call for each kind of arguments.

    The function is traced with all that it calls, gradients included, into one graph of tensor operations, which
    becomes machine code; on CUDA its kernels are recorded, too. So it must do the same work whatever the numbers are,
    and draw none itself. Arguments that are no tensors are constants. What a recording gives is good until the next
    call. What cannot be compiled is called as it is from then on, which is said once with the reason; so is what gives
    other numbers than a plain call, to which the first call of each kind, and the first after `doubt`, is compared:
    Python that draws numbers or changes as it runs would be frozen. The tensors of the first argument, if it is `held`,
    are never changed in place: a recording reads them again only where they are other ones.

    >>> double = Compiled(lambda pair: (2 * pair[0], pair[1]))
    >>> double((torch.ones(2), torch.zeros(1)))
    (tensor([2., 2.]), tensor([0.]))
    """

    def __init__(self, function: Callable[..., Any], *, held: bool = False, fused: bool = True) -> None:
        """Nothing is compiled yet."""
        self._function = function
        self._held, self._fused = held, fused
        self._made: dict[object, tuple[Callable[..., Any], Any]] = {}
        self._refused = False
        self._doubts: dict[object, int] = {}  # looks that are left, by kind
        self._old: set[object] = set()  # kinds that were made before a doubt came up

    def doubt(self) -> None:
        """Compare the next call of each kind with a plain one: what the function reads may have changed since."""
        self._old = set(self._made)
        self._doubts = dict.fromkeys(self._made, LOOKS)

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives."""
        if self._refused:
            return self._function(*arguments)
        tensors: list[Tensor] = []
        constants: list[Any] = []
        _flatten(arguments, tensors, constants)
        first = tensors[0]
        kind = (first.device, *constants, *[(tensor.shape, tensor.dtype) for tensor in tensors])
        made = self._made.get(kind)
        if made is None:
            try:
                made = self._made[kind] = self._make(arguments, tensors)
            except Exception as error:  # of a user's function, the tracer or the compiler; called plainly it may do
                self._refused = True
                reason = _reason(error)
                logger.warning("a log density is not compiled, and runs one operation at a time: %s", reason)
                return self._function(*arguments)
            self._doubts[kind] = LOOKS
        run, shape = made
        result = _rebuilt(shape, iter(run(*tensors)))
        return self._compared(kind, result, arguments) if kind in self._doubts else result

    def _compared(self, kind: object, result: Any, arguments: tuple[Any, ...]) -> Any:
        """The result if a plain call gives the same, else what that gives."""
        plain = self._function(*arguments)
        # A variable that has another value now may change it by little; to compile anew for rounding alone costs time.
        if _alike(result, plain, strict=kind in self._old):
            del self._doubts[kind]
            return result
        if kind in self._old:  # at once: a trajectory that runs off is the same for many densities, and tells nothing
            logger.info("a log density is compiled anew: what it reads has changed")
            self._made, self._doubts, self._old = {}, {}, set()
            return plain
        self._doubts[kind] -= 1
        if not self._doubts[kind]:
            self._refused = True
            logger.warning(
                "a log density is not compiled, and runs one operation at a time: compiled, it gives other numbers. "
                "Does it draw random numbers, or change as it runs?"
            )
        return plain

    def _make(self, arguments: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Callable[..., Any], Any]:
        if not tensors[0].is_cuda:
            return _compiled(self._function, arguments, tensors)
        code, shape = _as_it_is(self._function, arguments, tensors)
        if self._fused:
            try:
                code, shape = _compiled(self._function, arguments, tensors)
            except Exception as error:  # a recording of the kernels as they are is nearly as good
                logger.info("kernels are recorded without being fused: %s", _reason(error))
        held: list[Tensor] = []
        _flatten(arguments[:1] if self._held else (), held, [])
        return _recorded(code, tensors, len(held)), shape


def _reason(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _alike(one: Any, other: Any, *, strict: bool = False) -> bool:
    """Whether two results are the same but for rounding, in at least one chain (row) of each tensor.

    The tolerance is relative to the largest number of a tensor, or, where `strict`, of the chain.
    Rounding may turn a decision of a chain, after which all of it differs; of many chains it hardly turns all.
    """
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    for result, found in zip((one, other), both, strict=True):
        _flatten((result,), found, [])
    for first, second in zip(*both, strict=True):
        if not first.is_floating_point() or not first.numel():
            continue
        tolerance = 1e-6 if first.dtype == torch.float64 else 1e-4 if strict else 1e-2
        rows, wanted = (tensor.reshape(len(tensor) if tensor.dim() else 1, -1) for tensor in (first, second))
        size = wanted.abs().nan_to_num(0.0, 0.0).amax(1, keepdim=True)
        allowed = tolerance * (size if strict else size.amax())
        near = (rows == wanted) | (rows.isnan() & wanted.isnan()) | ((rows - wanted).abs() <= allowed)
        if not bool(near.all(1).any()):
            return False
    return True


def _flatten(value: tuple[Any, ...], tensors: list[Tensor], constants: list[Any]) -> None:
    """Put the tensors of a nest of tuples into the one list, dense in memory, and all else into the other."""
    for item in value:
        if isinstance(item, Tensor):
            tensors.append(item if item.is_contiguous() else item.contiguous())
        elif isinstance(item, tuple):
            _flatten(item, tensors, constants)
        else:
            constants.append(item)


def _rebuilt(shape: Any, tensors: Any) -> Any:
    """The nest of tuples of this shape, from its tensors."""
    if shape is None:
        return next(tensors)
    kind, parts = shape
    items = [next(tensors) if part is None else _rebuilt(part, tensors) for part in parts]
    return kind(items) if kind is tuple else kind(*items)


def _shape(value: Any) -> Any:
    """What `_rebuilt` needs to know of a nest of tuples: None for a tensor, else its class and parts."""
    return None if isinstance(value, Tensor) else (type(value), [_shape(item) for item in value])


def _filled(value: Any, tensors: Any) -> Any:
    """The arguments with other tensors in place of their own."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        items = [_filled(item, tensors) for item in value]
        return type(value)(items) if type(value) is tuple else type(value)(*items)
    return value


def _compiled(
    function: Callable[..., Any], arguments: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[Callable[..., Any], Any]:
    """Machine code for the function at such arguments, from tensors to tensors, and the shape of what it gives."""
    import torch._inductor as inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    logger.info("compiling a piece of the sampler's work, which takes some seconds")
    shapes: list[Any] = []

    def flat(*given: Tensor) -> list[Tensor]:
        found, shape = _flat(function, arguments, given)
        shapes.append(shape)
        return found

    own = [tensor.clone() for tensor in tensors]  # two arguments that are one tensor now need not be so next time
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, about settings of torch that are the user's
        graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*own)
        constants = _lifted(graph)
        # Shapes and strides are those of the kind that is looked up: to assert them takes a tenth of the time.
        options = {"size_asserts": False, "alignment_asserts": False}
        code = inductor.compile(graph, [*own, *constants], options=options)
        code(*own, *constants)  # the last of it is made in the first call
    return (lambda *given: code(*given, *constants)), shapes[0]


def _as_it_is(
    function: Callable[..., Any], arguments: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[Callable[..., Any], Any]:
    """The function from tensors to tensors, and the shape of what it gives."""
    return (lambda *given: _flat(function, arguments, given)[0]), _flat(function, arguments, tensors)[1]


def _flat(
    function: Callable[..., Any], arguments: tuple[Any, ...], given: Sequence[Tensor]
) -> tuple[list[Tensor], Any]:
    """The tensors that the function gives, where its arguments have these in place of their own, and their shape."""
    result = function(*_filled(arguments, iter(given)))
    found: list[Tensor] = []
    _flatten((result,), found, [])
    return found, _shape(result)


def _recorded(code: Callable[..., Any], tensors: list[Tensor], held: int) -> Callable[..., Any]:
    """The kernels of machine code as a CUDA graph, which reads and writes memory of its own.

    The first `held` tensors are those that nobody changes in place.
    """
    own = [tensor.clone() for tensor in tensors]
    for _ in range(2):  # libraries set themselves up in the first call
        code(*own)
    with nothing_read():
        code(*own)
    graph = torch.cuda.CUDAGraph()
    with own_workspaces(), recording(graph):
        results = list(code(*own))
    alike: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(own[held:], held):
        alike.setdefault(tensor.dtype, []).append(index)
    last = tensors[:held]

    def play(*given: Tensor) -> list[Tensor]:
        for index in range(held):
            if given[index] is not last[index]:
                own[index].copy_(given[index])
                last[index] = given[index]
        for places in alike.values():  # in one kernel each
            torch._foreach_copy_([own[index] for index in places], [given[index] for index in places])
        graph.replay()
        return results

    return play


def _lifted(graph: fx.GraphModule) -> list[Tensor]:
    """The tensors that the traced function had in itself, such as data, made into arguments of the graph."""
    constants: list[Tensor] = []
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    places: dict[str, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        if node.target not in places:
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"constant_{len(constants)}")
            last.meta = node.meta
            places[node.target] = last
            constants.append(getattr(graph, node.target).contiguous())
        node.replace_all_uses_with(places[node.target])
        graph.graph.erase_node(node)
    graph.recompile()
    return constants
