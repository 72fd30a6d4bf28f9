"""Modules of predictions as programs in a file, of `torch.export` or of ONNX, each run once before it is written."""

import io
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posterity.errors import BadData, PosterityError
from posterity.model.batch import Inputs, map_inputs, named_tensors, num_rows
from posterity.storage.disk import write_file

AGREES = 1e-5
"""How far the outputs of a program may be from those of the module, absolutely and relative to their size."""
FACTS = "posterity.json"
"""The extra file of a .pt2 program with its facts; an ONNX file has them in its metadata, under "posterity"."""
LARGEST_ONNX = 1 << 31  # bytes of a protocol buffer

logger = logging.getLogger("posterity")


def check_program_path(path: str | os.PathLike[str]) -> None:
    """Refuse a path of another format, and ONNX where its packages are missing."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".pt2", ".onnx"):
        raise ValueError(
            f"export: the file must end in .pt2 (torch.export) or .onnx (ONNX). Got '{os.fspath(path)}'. Rename it."
        )
    if suffix == ".onnx" and (missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]):
        raise PosterityError(
            f"export: ONNX needs {' and '.join(missing)}. Install with: pip install 'posterity[onnx]'."
        )


def write_program(module: nn.Module, path: str | os.PathLike[str], rows: Inputs, facts: Mapping[str, Any]) -> None:
    """Write a module that takes such rows and returns a dict of tensors, as the program that the suffix names.

    `facts` are stored beside it as JSON, with the names of inputs and outputs.
    """
    check_program_path(path)
    if not num_rows(rows):
        raise BadData("export: inputs must have a few rows, by which the network is traced. Got none. Pass x[:2].")
    rows = map_inputs(lambda tensor: tensor.detach().clone(), rows)
    while num_rows(rows) < 2:  # a single row would be taken for a constant
        rows = map_inputs(lambda tensor: torch.cat([tensor, tensor]), rows)
    with torch.inference_mode(False), torch.no_grad():
        wanted: dict[str, Tensor] = module(rows)
        program = _traced(module, rows)
        given = _input_names(rows)
        about = json.dumps({**facts, "inputs": list(given), "outputs": list(wanted), "torch": torch.__version__})
        if Path(path).suffix.lower() == ".pt2":
            _check_equal("The program", program.module()(rows), wanted)
            file = io.BytesIO()
            torch.export.save(program, file, extra_files={FACTS: about})
            write_file(Path(path), file.getvalue())
            return
        data = _onnx(program, list(given), list(wanted), about)
    _check_onnx(data, dict(zip(given, named_tensors(rows).values(), strict=True)), wanted)
    write_file(Path(path), data)


def _traced(module: nn.Module, rows: Inputs) -> torch.export.ExportedProgram:
    size = torch.export.Dim("rows")
    shapes: Any = _like(rows, {0: size})
    try:
        with _quiet():
            return torch.export.export(module, (rows,), dynamic_shapes=(shapes,))
    except Exception as error:  # whatever torch or the network's own code raises
        raise TypeError(
            f"export: torch.export cannot trace the network for batches of any size ({_first_line(error)}). Its code "
            "must have tensor operations only, without branches on values, and x.shape[0] instead of len(x). Change "
            "it, or deploy q.save(...) and posterity.load."
        ) from error


def _like(rows: Inputs, leaf: Any) -> Any:
    """Return the leaf in the place of each tensor."""
    if isinstance(rows, Tensor):
        return leaf
    if isinstance(rows, Mapping):
        return {name: _like(value, leaf) for name, value in rows.items()}
    return tuple(_like(value, leaf) for value in rows)


def _input_names(rows: Inputs) -> dict[str, Tensor]:
    """Return the tensors by their names in a program: "inputs", or those of a mapping."""
    tensors = named_tensors(rows)
    names = [name.removeprefix("inputs").strip("[]'").replace("']['", "_") or "inputs" for name in tensors]
    names = [f"inputs_{name}" if name.isdigit() else name for name in names]
    return dict(zip(names, tensors.values(), strict=True))


def _onnx(program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str], about: str) -> bytes:
    """Return the program as the bytes of an ONNX file."""
    try:
        with _quiet():
            made = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=inputs, custom_translation_table=_translations()
            )
    except Exception as error:  # of the exporter, whose classes are private
        raise TypeError(
            f"export: the network has an operation that ONNX cannot express ({_first_line(error)}). Use another layer, "
            "or export to .pt2."
        ) from error
    assert made is not None
    graph = made.model.graph
    for node in graph.all_nodes():  # values inside may be called as an output is to be, which the format forbids
        for value in node.outputs:
            value.name = f"{value.name}_inside" if value.name in outputs else value.name
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    proto = made.model_proto
    proto.metadata_props.add(key="posterity", value=about)
    if proto.ByteSize() >= LARGEST_ONNX:
        raise ValueError(f"export: an ONNX file holds 2 GiB, and this needs {proto.ByteSize():,} bytes. Take .pt2.")
    return bytes(proto.SerializeToString(deterministic=True))


# erfc(x) = t exp(-x^2 + p(t)) with t = 1 / (1 + x / 2), x >= 0, to 1.2e-7 of its size: Press et al. (2007), 6.2.2.
_TAIL = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)


def _translations() -> dict[Any, Any]:
    """Return translations of operations of which onnxruntime has float32 kernels only, or none: exact to 2e-7."""
    from onnxscript import opset18

    op: Any = opset18  # whose types say that each operation may return None

    def erf(x: Any) -> Any:
        return op.CastLike(op.Erf(op.Cast(x, to=1)), x)  # 1 is float32

    def number(value: float, like: Any) -> Any:
        return op.CastLike(op.Constant(value_float=value), like)

    def erfc(x: Any) -> Any:
        return op.Sub(number(1.0, x), erf(x))

    def erfcx(x: Any) -> Any:  # exp(x^2) erfc(x), which torch uses at x > 0
        t = op.Reciprocal(op.Add(number(1.0, x), op.Mul(number(0.5, x), x)))
        power = number(_TAIL[-1], x)
        for coefficient in reversed(_TAIL[:-1]):
            power = op.Add(op.Mul(power, t), number(coefficient, x))
        return op.Mul(t, op.Exp(power))

    aten = torch.ops.aten
    return {aten.erf.default: erf, aten.erfc.default: erfc, aten.special_erfcx.default: erfcx}


def _check_onnx(data: bytes, rows: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Run the file, where onnxruntime is installed."""
    if find_spec("onnxruntime") is None:
        logger.info("export: onnxruntime is not installed, so the ONNX file was not run.")
        return
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        results = session.run(list(wanted), {name: tensor.cpu().numpy() for name, tensor in rows.items()})
    except Exception as error:  # of onnxruntime, whose classes are private
        raise TypeError(
            f"export: onnxruntime cannot run the program ({_first_line(error)}). Convert the network to float32 before "
            "the fit, or export to .pt2."
        ) from error
    _check_equal("The ONNX file", dict(zip(wanted, map(torch.from_numpy, results), strict=True)), wanted)


def _check_equal(what: str, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        if not torch.allclose(given[name].cpu(), tensor.cpu(), rtol=AGREES, atol=AGREES, equal_nan=True):
            away = float((given[name].cpu() - tensor.cpu()).abs().max())
            raise TypeError(
                f"export: {what} does not predict as the posterior does: its {name!r} is off by {away:.2g}. The "
                "network has an operation that is traced wrongly. Deploy q.save(...) and posterity.load."
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what exporters say about themselves, and their use of deprecated names."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
