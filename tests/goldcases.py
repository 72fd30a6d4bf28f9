"""Gold numbers from tests/gold: load a case, and compare a computed value with what the case expects.

    from goldcases import load

    case = load("linear_regression")
    design = case.inputs["X"]                           # float64 tensor (7, 2)
    case.check("posterior_mean", mean)                  # a number or tensor of exactly the expected shape
    case.check("predictive.1.meanfield_probit", probs)  # list indices are part of the path

`inputs`, `expected` and `must_not_equal` are the file's own dictionaries, where every list of numbers (of one
shape) has become a float64 tensor; single numbers, strings, lists of dictionaries stay what they are.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "gold"


@dataclass(frozen=True, eq=False)
class GoldCase:
    """One gold file: what goes in, what must come out, and how closely."""

    id: str
    inputs: dict[str, Any]
    expected: dict[str, Any]
    must_not_equal: dict[str, Any]
    tolerance: dict[str, Any]

    def at(self, path: str) -> Any:
        """The expected value at a dotted path such as `rows.0.M`."""
        return self._walk(path)[0]

    def limits(self, path: str) -> tuple[float, float] | None:
        """(rtol, atol) at a path, or None where the case says not to compare.

        An override's key is one key name anywhere on the path or a dotted path without list indices; it
        replaces both numbers for all that is below it. The longest that applies wins.
        """
        keys = self._walk(path)[1]
        chosen, chosen_length = self.tolerance, 0
        for name, override in self.tolerance["overrides"].items():
            wanted = name.split(".")
            applies = keys[: len(wanted)] == wanted if len(wanted) > 1 else name in keys
            if applies and len(wanted) > chosen_length:
                chosen, chosen_length = override, len(wanted)
        if chosen.get("ignore"):
            return None
        if "rtol" not in chosen or "atol" not in chosen:
            raise ValueError(f"{self.id}: the tolerance at '{path}' depends on the route: {chosen}. Compare by hand.")
        return chosen["rtol"], chosen["atol"]

    def check(self, path: str, value: float | Tensor) -> None:
        """Assert that `value` is the expected one at `path`: |value - expected| <= atol + rtol |expected|.

        It must also differ from every `must_not_equal` entry of its shape: those are the results of known
        mistakes. (An entry that equals the expected number at this path belongs to another path.)
        """
        limits = self.limits(path)
        if limits is None:
            return
        rtol, atol = limits
        expected = torch.as_tensor(self.at(path), dtype=torch.float64).cpu()
        got = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        torch.testing.assert_close(
            got, expected, rtol=rtol, atol=atol, msg=lambda text: f"{self.id}.{path}: value against gold. {text}"
        )
        for name, wrong in self.must_not_equal.items():
            if not isinstance(wrong, (Tensor, int, float)):
                continue  # a note, or a table of another form
            mistake = torch.as_tensor(wrong, dtype=torch.float64).cpu()
            if mistake.shape != got.shape or torch.allclose(expected, mistake, rtol=rtol, atol=0.0):
                continue
            assert not torch.allclose(got, mistake, rtol=rtol, atol=0.0), f"{self.id}.{path} equals {name}"

    def _walk(self, path: str) -> tuple[Any, list[str]]:
        """The expected value at a path, and the names of the dictionary keys on the way (no list indices)."""
        value, keys, rest = self.expected, [], path
        while rest:
            if isinstance(value, dict):  # some keys hold a dot themselves (`eta_0.3`): match whole keys
                fitting = [name for name in value if rest == name or rest.startswith(f"{name}.")]
                if not fitting:
                    raise KeyError(f"{self.id}: no '{rest}' on the path '{path}'. Known: {list(value)}.")
                name = max(fitting, key=len)
                keys.append(name)
                value = value[name]
            else:
                name = rest.split(".")[0]
                if not name.isdigit() or int(name) >= len(value):
                    raise KeyError(f"{self.id}: '{name}' on the path '{path}' must be an index below {len(value)}.")
                value = value[int(name)]
            rest = rest[len(name) + 1 :]
        return value, keys


def load(case_id: str) -> GoldCase:
    """The gold case in tests/gold/<case_id>.json."""
    raw = json.loads((FOLDER / f"{case_id}.json").read_text())
    return GoldCase(
        id=case_id,
        inputs=_tensors(raw["inputs"]),
        expected=_tensors(raw["expected"]),
        must_not_equal=_tensors(raw.get("must_not_equal", {})),
        tolerance=raw["tolerance"],
    )


def _tensors(value: Any) -> Any:
    """The same structure with every rectangular list of numbers as a float64 tensor."""
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    return torch.tensor(value, dtype=torch.float64) if _shape(value) is not None else [_tensors(item) for item in value]


def _shape(value: Any) -> tuple[int, ...] | None:
    """Shape of a nested list of numbers, or None where it is ragged or holds something else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return ()
    if not isinstance(value, list):
        return None
    shapes = [_shape(item) for item in value]
    same = None not in shapes and all(first == second for first, second in pairwise(shapes))
    return (len(value), *(shapes[0] or ())) if same and shapes else None
