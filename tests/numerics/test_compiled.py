"""Compiled functions give what plain calls give, whatever comes after the call for which they were compiled."""

import logging
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from posterity.numerics import Key
from posterity.numerics import compiled as compiled_module
from posterity.numerics.compiled import LOOKS, Compiled, _alike, _traced

pytestmark = pytest.mark.cpu
FLOAT64 = torch.float64


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def draws(*shape, seed=0):
    return Key(seed).normal(shape, FLOAT64, "cpu")


def refused(compiled):
    return compiled._refused


@pytest.mark.parametrize("fused", [False, True])
def test_nests_constants_and_kinds_of_arguments(fused):
    calls = []

    def function(pair, factor, steps, other):
        calls.append(steps)
        for _ in range(steps):
            pair = Pair(pair.left * factor, pair.right + other[0] @ other[1])
        return pair, (pair.left > 0, pair.left.sum())

    compiled = Compiled(function, fused=fused)

    def check(seed, steps, rows=3):
        pair = Pair(draws(rows, 2, seed=seed), draws(rows, 4, seed=seed + 1))
        arguments = (pair, draws(rows, 1, seed=seed + 2), steps, (draws(rows, 5, seed=7), draws(4, 5, seed=8).mT))
        (found, (up, total)), (wanted, (above, sum_)) = compiled(*arguments), function(*arguments)
        assert isinstance(found, Pair)
        torch.testing.assert_close((*found, total), (*wanted, sum_), rtol=1e-12, atol=1e-12)
        assert torch.equal(up, above)

    check(0, 2)
    before = len(calls)
    check(10, 2)  # the same kind: nothing but the plain call of the check itself
    assert len(calls) == before + 1
    check(20, 1)  # another constant
    check(30, 2, rows=5)  # other shapes
    assert not refused(compiled)


def test_arguments_that_were_one_tensor_at_first_may_be_two_later():
    compiled = Compiled(lambda one, two: one + 2.0 * two)
    x, y = draws(4), draws(4, seed=1)
    torch.testing.assert_close(compiled(x, x), 3.0 * x)
    torch.testing.assert_close(compiled(x, y), x + 2.0 * y)
    torch.testing.assert_close(compiled(y.expand(2, 4)[0], x), y + 2.0 * x)


def test_another_dtype_at_the_same_shapes_is_another_kind():
    compiled = Compiled(lambda x, y: x * y)
    x, y = draws(3), torch.tensor([1.0, 2.0, 3.0], dtype=FLOAT64)
    torch.testing.assert_close(compiled(x, y), x * y)
    torch.testing.assert_close(compiled(x, y.long()), x * y)


def test_tensors_that_a_function_has_in_itself_may_be_changed_in_place():
    scale = torch.ones(3, dtype=FLOAT64)
    compiled = Compiled(lambda x: scale * x)
    assert torch.equal(compiled(draws(3)), draws(3))
    scale.mul_(5.0)
    assert torch.equal(compiled(draws(3)), 5.0 * draws(3))


@pytest.mark.parametrize(
    "branching",
    [
        lambda x: x.square() if float(x.sum()) > 0 else -x,
        lambda x: x.square() if bool((x > 0).all()) else -x,
        lambda x: x * x.tolist()[0],
        lambda x: torch.as_tensor(x.numpy() * 2.0),
        lambda x: x[x > 0].sum().expand(3),
    ],
    ids=["float", "bool", "tolist", "numpy", "shape"],
)
def test_a_branch_on_numbers_is_never_frozen(branching, caplog):
    compiled = Compiled(branching)
    with caplog.at_level(logging.WARNING, "posterity"):
        for x in (draws(3).abs(), -draws(3).abs(), draws(3)):
            assert torch.equal(compiled(x), branching(x))
    (message,) = caplog.messages  # said once
    assert message.startswith("a log density is not compiled, and runs one operation at a time: ")
    assert "\n" not in message
    assert refused(compiled)


@pytest.mark.parametrize(
    "function", [lambda x: x * random.random(), lambda x: x * torch.rand_like(x)], ids=["python", "torch"]
)
def test_numbers_that_a_function_draws_are_not_frozen(function, caplog):
    compiled = Compiled(function)
    torch.manual_seed(0)
    random.seed(0)
    with caplog.at_level(logging.WARNING, "posterity"):
        found = {float(compiled(draws(3).abs())[0]) for _ in range(LOOKS + 3)}
    assert len(found) == LOOKS + 3
    assert refused(compiled)
    assert "Does it draw random numbers" in caplog.text


@pytest.mark.parametrize(("dtype", "value"), [(FLOAT64, 2.0), (FLOAT64, 1.00001), (torch.float32, 1.004)])
def test_a_value_that_is_replaced_is_read_again_after_a_doubt(dtype, value, caplog):
    scale, given = torch.ones(3, dtype=dtype), draws(3).to(dtype)

    def function(x):
        return scale * x

    compiled = Compiled(function)
    assert torch.equal(compiled(given), given)
    scale = torch.full((3,), value, dtype=dtype)
    compiled.doubt()
    for _ in range(LOOKS + 2):
        assert torch.equal(compiled(given), scale * given)
    assert not refused(compiled)
    assert not [record for record in caplog.records if record.name == "posterity"]


def test_a_doubt_without_reason_compiles_nothing_again():
    calls = []

    def function(x):
        calls.append(1)
        return 2.0 * x

    compiled = Compiled(function)
    compiled(draws(3))
    compiled.doubt()
    before = len(calls)
    for _ in range(4):
        assert torch.equal(compiled(draws(3)), 2.0 * draws(3))
    assert len(calls) == before + 1


def test_decisions_that_rounding_turns_are_no_difference():
    one, two = draws(4, 2), draws(4, 2)
    two[1] = 9.0
    assert _alike((one, torch.ones(4) > 0), (two, torch.ones(4) < 0))
    assert not _alike((one,), (two + 1e-3,))
    assert not _alike((one.float(),), (one.float() * 1.1,))
    assert _alike((one.float(),), (one.float() * 1.0001,))
    assert not _alike((one.float(),), (one.float() * 1.001,), strict=True)
    large = torch.tensor([1e6, 1.0])
    assert not _alike((large,), (large * 1.001,), strict=True)
    assert not _alike((one.sum(),), (two.sum(),))
    broken = torch.tensor([torch.nan, torch.inf, 1.0])
    assert _alike((broken,), (broken.clone(),))
    assert _alike((torch.zeros(0, 3),), (torch.zeros(0, 3),))


def test_tanh_of_machine_code_is_that_of_float32():
    wide = torch.logspace(-37, 2, 20000)
    x = torch.cat([wide, -wide, torch.linspace(-1.0, 1.0, 20001), torch.tensor([torch.inf, -torch.inf, torch.nan])])
    graph, *_ = _traced(torch.tanh, (x,), [x])
    assert torch.ops.aten.tanh.default not in {node.target for node in graph.graph.nodes}
    (result,) = graph(x)
    exact = x.double().tanh()
    assert bool(((result - exact).abs() <= 3e-7 * exact.abs())[:-1].all())
    assert bool(result[-1].isnan())


@pytest.mark.parametrize(("dtype", "shorter"), [(FLOAT64, False), (torch.float32, True)])
def test_tanh_of_other_dtypes_and_of_recordings_is_left_as_it_is(dtype, shorter):
    x = draws(5).to(dtype)
    graph, *_ = _traced(torch.tanh, (x,), [x], shorter=shorter)
    assert torch.equal(graph(x)[0], torch.tanh(x))


def test_machine_code_that_a_killed_compiler_left_unfinished_is_made_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    mine, broken = tmp_path / "mine.so", tmp_path / "cache" / "broken.so"
    broken.parent.mkdir()
    calls = []

    def stand_in(function, arguments, tensors):
        calls.append(path)
        if path.exists() and path.stat().st_size < 10:
            raise ImportError("file too short", path=str(path))
        return (lambda *given: (2.0 * given[0],)), None

    monkeypatch.setattr(compiled_module, "_compiled", stand_in)
    for path, tries in ((broken, 2), (mine, 1)):  # only what the compiler made is deleted
        path.write_bytes(b"x")
        calls.clear()
        double = Compiled(lambda x: 2.0 * x)
        assert torch.equal(double(draws(3)), 2.0 * draws(3))
        assert (len(calls), path.exists(), double._refused) == (tries, path == mine, path == mine)
