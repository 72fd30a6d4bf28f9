"""Functions compiled to machine code, and recorded as CUDA graphs."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from posterity.numerics.simplified import simplify
from posterity.numerics.workspace import own_workspaces


@contextmanager
def nothing_read() -> Iterator[None]:
    """Raise an error inside `with` where the CPU waits to read a number from the device, which no recording can."""
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
    """Record the work inside `with` into the graph; an error leaves torch as it was."""
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
        # torch seeds the generators of a recording on another stream, for which a replay would not wait.
        torch.cuda.synchronize()
    except BaseException:
        # A failed recording leaves torch's own generator waiting for its end: make a recording that succeeds.
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros((), device="cuda")
        raise


logger = logging.getLogger("posterity")

LOOKS = 3  # calls that may differ from plain calls by a decision that rounding has turned


class Compiled:
    """A function of tensors and tuples of them, compiled at its first call for each kind of arguments.

    The function is traced with all that it calls, gradients included, into one graph of tensor operations, which
    becomes machine code; on CUDA its kernels are recorded, too. Where not `fused`, its operations are recorded as they
    are, in a second at most, and replayed without Python. It must therefore do the same work whatever the numbers are,
    and draw none itself. Arguments other than tensors are constants. The result of a recording is valid until the next
    call. A function that cannot be compiled is called plainly from then on, with one warning that says why. The
    same happens if its numbers differ from a plain call's, which is compared at the first call of each kind and the
    first after `doubt`: Python that draws numbers or changes as it runs would be frozen. Tensors of the first argument,
    if it is `held`, are never changed in place: a recording copies them only where they are other tensors.

    >>> double = Compiled(lambda pair: (2 * pair[0], pair[1]))
    >>> double((torch.ones(2), torch.zeros(1)))
    (tensor([2., 2.]), tensor([0.]))
    """

    def __init__(self, function: Callable[..., Any], *, held: bool = False, fused: bool = True) -> None:
        self._function = function
        self._held, self._fused = held, fused
        self._made: dict[object, tuple[Callable[..., Any], Any]] = {}
        self._refused = False
        self._doubts: dict[object, int] = {}  # remaining comparisons, by kind
        self._old: set[object] = set()  # kinds that were made before a doubt came up

    def doubt(self) -> None:
        """Compare the next call of each kind with a plain call: what the function reads may have changed."""
        self._old = set(self._made)
        self._doubts = dict.fromkeys(self._made, LOOKS)

    def __call__(self, *arguments: Any) -> Any:
        if self._refused:
            return self._function(*arguments)
        tensors: list[Tensor] = []
        constants: list[Any] = []
        _flatten(arguments, tensors, constants)
        kind = (tensors[0].device, *constants, *[part for tensor in tensors for part in (tensor.shape, tensor.dtype)])
        made = self._made.get(kind)
        if made is None:
            try:
                made = self._made[kind] = self._make(arguments, tensors)
            except Exception as error:  # in a user's function, the tracer or the compiler; a plain call may succeed
                self._refused = True
                logger.warning("a log density is not compiled, and runs one operation at a time: %s", _reason(error))
                return self._function(*arguments)
            self._doubts[kind] = LOOKS
        run, shape = made
        result = _rebuilt(shape, iter(run(*tensors)))
        return self._compared(kind, result, arguments) if kind in self._doubts else result

    def _compared(self, kind: object, result: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the result if a plain call agrees, else the result of the plain call."""
        plain = self._function(*arguments)
        # A changed variable may change the result by little; to compile anew for rounding alone costs time.
        if _alike(result, plain, strict=kind in self._old):
            del self._doubts[kind]
            return result
        if kind in self._old:  # at once: a diverging trajectory is the same for many densities, and tells nothing
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
            if not self._fused:
                try:
                    return _replayed(self._function, arguments, tensors)
                except Exception as error:  # the recorder does not know gradients of convolutions: they take time
                    logger.info("a piece is compiled, since it cannot be recorded: %s", _reason(error))
            try:
                return _compiled(self._function, arguments, tensors)
            except ImportError as error:
                if not _discarded(error.path):
                    raise
                return _compiled(self._function, arguments, tensors)
        code: Callable[..., Any] = lambda *given: _flat(self._function, arguments, given)[0]  # noqa: E731
        shape = _flat(self._function, arguments, tensors)[1]
        if self._fused:
            try:
                code, shape = _compiled(self._function, arguments, tensors)
            except Exception as error:  # a recording of the kernels as they are is nearly as good
                logger.info("kernels are recorded without being fused: %s", _reason(error))
        held: list[Tensor] = []
        _flatten(arguments[:1] if self._held else (), held, [])
        return _recorded(code, tensors, len(held)), shape


def _discarded(path: str | None) -> bool:
    """Delete a file of machine code, as a killed compiler leaves unfinished; return whether the compiler made it."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    own = path is not None and Path(path).is_relative_to(cache_dir())
    if own:
        Path(str(path)).unlink(missing_ok=True)
    return own


def _reason(error: Exception) -> str:
    """First line of an error's message."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _alike(result: Any, plain: Any, *, strict: bool = False) -> bool:
    """Whether two results agree up to rounding in at least one chain (row) of each tensor.

    The tolerance is relative to the largest number of a tensor, or, where `strict`, of the chain. Rounding may turn a
    decision of a chain, after which all of it differs; it hardly turns all of many chains.
    """
    tensors: list[Tensor] = []
    plain_tensors: list[Tensor] = []
    _flatten((result,), tensors, [])
    _flatten((plain,), plain_tensors, [])
    for first, second in zip(tensors, plain_tensors, strict=True):
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
    """Append the tensors of nested tuples to `tensors`, contiguous, and all else to `constants`."""
    for item in value:
        if isinstance(item, Tensor):
            tensors.append(item if item.is_contiguous() else item.contiguous())
        elif isinstance(item, tuple):
            _flatten(item, tensors, constants)
        else:
            constants.append(item)


def _rebuilt(shape: Any, tensors: Any) -> Any:
    """Nested tuples of this `_shape`, from their tensors."""
    if shape is None:
        return next(tensors)
    kind, parts = shape
    items = [next(tensors) if part is None else _rebuilt(part, tensors) for part in parts]
    return kind(items) if kind is tuple else kind(*items)


def _shape(value: Any) -> Any:
    """Structure of nested tuples, for `_rebuilt`: None for a tensor, else the class and parts."""
    return None if isinstance(value, Tensor) else (type(value), [_shape(item) for item in value])


def _filled(value: Any, tensors: Any) -> Any:
    """Replace the tensors of the arguments, in order."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        items = [_filled(item, tensors) for item in value]
        return type(value)(items) if type(value) is tuple else type(value)(*items)
    return value


def _tanh(x: Tensor) -> Any:
    """Return tanh(x) to 3e-7 of itself in float32, a fifth of the time of the vector library that compilers call.

    A polynomial for |x| < 5/8 (Moshier, Cephes), else 1 - 2 / (exp(2 x) + 1). Other dtypes are not decomposed.
    """
    if x.dtype != torch.float32 or x.is_cuda:
        return NotImplemented
    square = x * x
    series: Any = -5.70498872745e-3
    for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        series = series * square + coefficient
    return torch.where(square < 0.390625, x + x * (square * series), 1.0 - 2.0 / ((x + x).exp() + 1.0))


def _traced(
    function: Callable[..., Any], arguments: tuple[Any, ...], tensors: list[Tensor], *, shorter: bool = False
) -> tuple[fx.GraphModule, list[Tensor], list[Tensor], Any]:
    """Trace the function at such arguments: the graph, its arguments, the data it closes over, its result's `_shape`.

    The graph takes the arguments, then the data. It is simplified where it is to be `shorter`; a compiler does so.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    shapes: list[Any] = []

    def flat(*given: Tensor) -> list[Tensor]:
        results, shape = _flat(function, arguments, given)
        shapes.append(shape)
        return results

    own = [tensor.clone() for tensor in tensors]  # arguments that are the same tensor now may differ next time
    known = {} if shorter else {torch.ops.aten.tanh.default: _tanh}
    graph = make_fx(flat, known, tracing_mode="fake", _allow_non_fake_inputs=True)(*own)
    if shorter:
        simplify(graph)
    return graph, own, _lifted(graph), shapes[0]


def _compiled(
    function: Callable[..., Any], arguments: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[Callable[..., Any], Any]:
    """Machine code for the function at such arguments, from tensors to tensors, and the `_shape` of its result."""
    import torch._inductor as inductor

    logger.info("compiling a piece of the sampler's work, which takes some seconds")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler warns about the user's settings of torch
        graph, own, constants, shape = _traced(function, arguments, tensors)
        # A kind fixes shapes and strides: to assert them takes a tenth of the time. The compiler would test what the
        # CPU can do with six programs, which take some seconds; torch has found it out already.
        vectors = True if torch.backends.cpu.get_cpu_capability() == "AVX512" else None
        patches = {"size_asserts": False, "alignment_asserts": False, "cpp.vec_isa_ok": vectors}
        # Machine code of the same graph is found again on the disk.
        shapes: Any = "from_example_inputs"  # nor are they to be looked up in each call
        code: Callable[..., Any] = inductor.standalone_compile(
            graph, [*own, *constants], dynamic_shapes=shapes, options={"config_patches": patches}
        )
        code(*own, *constants)  # the first call completes the compilation
    return (lambda *given: code(*given, *constants)), shape


def _replayed(
    function: Callable[..., Any], arguments: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[Callable[..., Any], Any]:
    """Record the operations of the function, to be replayed without Python, and the `_shape` of its result."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which torch develops no further
        graph, own, constants, shape = _traced(function, arguments, tensors, shorter=True)
        record: Callable[..., Any] = torch.jit.trace
        code = record(graph, (*own, *constants), check_trace=False, strict=False)
    return (lambda *given: code(*given, *constants)), shape


def _flat(
    function: Callable[..., Any], arguments: tuple[Any, ...], given: Sequence[Tensor]
) -> tuple[list[Tensor], Any]:
    """Tensors of the function's result and its `_shape`, with the `given` tensors in the arguments."""
    result = function(*_filled(arguments, iter(given)))
    tensors: list[Tensor] = []
    _flatten((result,), tensors, [])
    return tensors, _shape(result)


def _recorded(code: Callable[..., Any], tensors: list[Tensor], held: int) -> Callable[..., Any]:
    """Record the kernels of machine code as a CUDA graph with its own memory.

    The first `held` tensors are never changed in place.
    """
    own = [tensor.clone() for tensor in tensors]
    for _ in range(2):  # libraries set themselves up in the first call
        code(*own)
    with nothing_read():
        code(*own)
    graph = torch.cuda.CUDAGraph()
    with own_workspaces(), recording(graph):
        results = list(code(*own))
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(own[held:], held):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    last = tensors[:held]

    def play(*given: Tensor) -> list[Tensor]:
        for index in range(held):
            if given[index] is not last[index]:
                own[index].copy_(given[index])
                last[index] = given[index]
        for indices in by_dtype.values():  # in one kernel each
            torch._foreach_copy_([own[index] for index in indices], [given[index] for index in indices])
        graph.replay()
        return results

    return play


def _lifted(graph: fx.GraphModule) -> list[Tensor]:
    """Make the tensors that the traced function closes over, such as data, arguments of the graph, and return them."""
    constants: list[Tensor] = []
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    arguments: dict[str, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        if node.target not in arguments:
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"constant_{len(constants)}")
            last.meta = node.meta
            arguments[node.target] = last
            constants.append(getattr(graph, node.target).contiguous())
        node.replace_all_uses_with(arguments[node.target])
        graph.graph.erase_node(node)
    for name in arguments:
        delattr(graph, name)  # else it is an argument twice
    graph.recompile()
    return constants
