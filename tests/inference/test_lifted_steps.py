"""What a CUDA graph needs of a step, shown on a CPU: counts are tensors, nothing is read, and the key seeds it all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recordable import NothingRead
from torch import Tensor, nn

import posterity as po
from posterity.inference import Method
from posterity.inference.acceleration import Work
from posterity.methods.low_rank_gaussian import _eliminated, _inverse_root
from posterity.networks import MLP
from posterity.numerics.random import Key, Streams, seed
from posterity.optim import gradient_scale
from posterity.optim.online_newton import online_newton_
from posterity.storage import clone, leaves, mapped
from tests.inference.test_accelerate import DROPPING, METHODS, dropping, norms, rows

STEPS = 13
CASES: dict[str, tuple[Method, Callable[[], nn.Module]]] = {
    **{name: (method, lambda: MLP([2, 16, 3])) for name, method in METHODS.items() if not name.startswith("sg")},
    **{name: (method, lambda drop=drop: dropping(drop)) for name, (method, drop) in DROPPING.items()},  # type: ignore[misc]
    **{f"{name}, norms": (METHODS[name], norms) for name in ("natural gradient", "low rank", "swag")},
}


def problem(module: nn.Module, **settings: Any) -> po.Joint:
    likelihood, prior = po.likelihoods.Categorical(), po.priors.Normal(0.8)
    return po.Joint(module, likelihood, prior, num_data=96, **settings)


def lifted(state: Any) -> Any:
    """The state with its whole numbers as tensors, as a recording sees it."""
    return mapped(lambda leaf: torch.tensor(float(leaf), dtype=torch.float64) if type(leaf) is int else leaf, state)


def played(work: Work, joint: po.Joint, state: Any, batch: Any, key: Key, other: Key) -> tuple[Any, Any]:
    """The step as a replay makes it: with generators that were handed out under another key, and seeded anew."""
    with Streams(other) as streams, NothingRead():
        work(joint, clone(lifted(state)), batch, other)
    own = [torch.Generator(device=stream.device) for stream in streams.asked]
    seed(streams.asked, own, key)
    with Streams(other, streams.asked, own), NothingRead():
        return work(joint, clone(lifted(state)), batch, other)


def numbers(state: Any) -> dict[str, Tensor]:
    return {path: torch.as_tensor(leaf).double() for path, leaf in leaves(state).items() if leaf is not None}


@pytest.mark.cpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("random", ["*", "part"])
def test_lifted_steps_are_plain_ones(name: str, random: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_scale, "READ_ON", ())  # as on a GPU
    method, make = CASES[name]
    torch.manual_seed(0)
    module = make()
    part = next(key for key in reversed([key for key, _ in module.named_parameters()]) if "weight" in key)
    joint = problem(module, random="*" if random == "*" else part)
    data = joint.checked(po.as_data(rows("cpu")))
    method = method.settled(joint, data)
    joint = method.prepared(joint, data).as_joint("this test")
    feed, state = method.batches(data, Key(1)), method.init(joint, method.initial(joint, Key(2)), Key(3))
    kinds = set()
    for index, batch in enumerate(feed.from_step(0)):
        if index == STEPS:
            break
        assert batch is not None
        work, key = method.recordable(state), Key(4).fold(index)
        assert work is not None
        kinds.add(work.__name__)
        again = None if index < 2 else played(work, joint, state, batch, key, Key(99))
        state, info = method.step(joint, state, batch, key)
        if again is None:
            continue  # the first steps make what later ones look up
        assert {*info} == {*again[1]}
        for value, other in ((numbers(state), numbers(again[0])), (numbers(info), numbers(again[1]))):
            assert value.keys() == other.keys()
            for path in value:  # step sizes are rounded to float32 where they are tensors
                torch.testing.assert_close(other[path], value[path], rtol=2e-5, atol=1e-6, msg=lambda m, p=path: p + m)
    assert len(kinds) == (2 if "swag" in name else 1)


@pytest.mark.cpu
def test_a_step_that_reads_a_number_is_seen() -> None:
    joint = problem(nn.Linear(2, 3))
    data = joint.checked(po.as_data(rows("cpu")))

    def reads(joint: Any, state: Any, batch: Any, key: Key) -> tuple[Any, Any]:
        return state, {"loss": 1.0 if state > 3 else 2.0}

    with pytest.raises(RuntimeError, match="reads numbers by"):
        played(reads, joint, 4, data.first(), Key(0), Key(1))


def test_steps_that_look_for_a_mode_are_not_recorded() -> None:
    joint = problem(nn.Linear(2, 3))
    data = po.as_data(rows("cpu"))
    for kind in (po.methods.NaturalGradient, po.methods.LowRankGaussian, po.methods.MeanField):
        method = kind().settled(joint, data)
        assert method.search > 0
        assert method.recordable(None) is None
    swag = po.methods.SWAG().settled(joint, data)
    state = swag.init(joint, joint.initial(), Key(0))
    assert swag.recordable(state) is not None
    assert swag.recordable(state._replace(fit=state.fit._replace(step=swag.fit.steps))) is None


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_elimination_is_the_factorisation(lead: tuple[int, ...], size: int) -> None:
    half = Key(size).normal((*lead, size, 2 * size), torch.float64)
    inner = half @ half.mT + torch.eye(size, dtype=torch.float64)
    inverse, log_root = _eliminated(inner)
    for own, other in zip((inverse, log_root), _inverse_root(inner), strict=True):
        torch.testing.assert_close(own, other.to(own), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_root, 0.5 * torch.linalg.slogdet(inner)[1], rtol=1e-12, atol=1e-12)
    assert float(inverse.triu(1).abs().max()) == 0.0


@pytest.mark.parametrize("decay", [0.3, "vector"])
@pytest.mark.parametrize("bend", [0.0, 0.5])
def test_settings_of_the_newton_step_may_be_tensors(decay: Any, bend: float) -> None:
    results = []
    for lift in (float, lambda number: torch.tensor(number, dtype=torch.float64)):
        key = Key(0)
        vectors = [key.fold(index).normal((50,)) for index in range(5)]
        vectors[0] = 1.0 + vectors[0].square()
        vectors[1] = vectors[0].rsqrt()
        given = vectors[0] * 0.2 if decay == "vector" else decay
        settings = {"rate": lift(0.05), "pull_factor": lift(-0.7), "radius": lift(0.4)}
        online_newton_(*vectors, given, weight=-1.0, bend=bend, **settings)
        results.append(torch.stack(vectors))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert float(results[0][4].abs().max()) == pytest.approx(0.4)  # some steps were clipped
