"""IVON in a form that CUDA graphs can record: the plain form's numbers, and nothing that a recording cannot hold."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import generator_states
from recordable import NothingRead
from torch import nn
from torch.nn import functional as F

from posterity.numerics import Key
from posterity.optim import IVON, ivon
from tests.optim.test_ivon import FLOAT64, network, optimiser, rows, state, train, values

SETTINGS: list[dict[str, Any]] = [
    {},
    {"hess_init": None, "beta2": None},
    {"hess_init": None, "hess_approx": "gradsq", "clip_radius": 0.05},
    {"debias": False, "rescale_lr": False, "clip_radius": 0.05},
]


def lifted(lr: float = 0.1) -> torch.Tensor:
    return torch.tensor(lr, dtype=FLOAT64)


def pair(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """A plain optimiser and a capturable one, whose noise is the same."""
    nets = network(), network()
    plain = optimiser(nets[0], **settings)
    own = optimiser(nets[1], lr=lifted(), capturable=True, **settings)
    same_noise(monkeypatch, own)
    return nets, (plain, own)


def same_noise(monkeypatch: pytest.MonkeyPatch, own: IVON) -> None:
    """Let the keys of plain optimisers hand out the noise that the capturable one draws from here on."""
    noise = torch.Generator()
    noise.set_state(own.generators[0].get_state())

    class Source(Key):
        def fold(self, label: int | str) -> Key:
            return self

        def generator(self, device: Any = None) -> torch.Generator:
            return noise

    monkeypatch.setattr(ivon, "Key", Source)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_equals_the_plain_form_under_a_schedule(monkeypatch, settings, samples):
    nets, optimisers = pair(monkeypatch, **settings)
    x, y = rows()
    for net, opt in zip(nets, optimisers, strict=True):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 150)
        for _ in range(150):
            train(net, opt, steps=1, samples=samples, x=x, y=y)
            schedule.step()
    plain, own = optimisers
    torch.testing.assert_close(values(nets[1]), values(nets[0]), rtol=1e-9, atol=1e-11)
    for name in ("curvature", "momentum"):
        torch.testing.assert_close(state(own, name), state(plain, name), rtol=1e-9, atol=1e-11)
    assert float(own.param_groups[0]["step"]) == plain.param_groups[0]["step"] == 150
    assert abs(float(own.param_groups[0]["lr"])) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_no_number_is_a_tensor_the_bits_are_the_plain_form_s(monkeypatch, dtype):
    """With a learning rate that is a number, no bias correction and a beta2, the arithmetic is the same."""
    nets = network(dtype), network(dtype)
    settings = {"debias": False, "beta2": 0.95}
    plain, own = optimiser(nets[0], **settings), optimiser(nets[1], capturable=True, **settings)
    same_noise(monkeypatch, own)
    x, y = rows(dtype=dtype)
    for net, opt in zip(nets, (plain, own), strict=True):
        train(net, opt, steps=50, x=x, y=y)
    assert torch.equal(values(nets[0]), values(nets[1]))
    assert torch.equal(state(plain, "curvature"), state(own, "curvature"))


@pytest.mark.parametrize("capturable", [False, True])
def test_states_pass_between_the_forms(monkeypatch, tmp_path, capturable):
    """A state saved by one form resumes in the other with its count, rates and Hessian, and keeps the form."""
    (first, second), (plain, own) = pair(monkeypatch)
    net, opt, other_net, other = (second, own, first, plain) if capturable else (first, plain, second, own)
    train(net, opt, steps=4)
    opt.param_groups[0]["lr"] = 0.03
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, tmp_path / "run.pt")
    rate = own.param_groups[0]["lr"]
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    other_net.load_state_dict(saved["net"])
    other.load_state_dict(saved["opt"])
    for group, tensors in ((plain.param_groups[0], False), (own.param_groups[0], True)):
        assert group["capturable"] is tensors
        assert group["lr"] == pytest.approx(0.03)
    assert own.param_groups[0]["lr"] is rate  # a scheduler and a recording hold it
    same_noise(monkeypatch, own)
    for trained, its in ((first, plain), (second, own)):
        train(trained, its, steps=20)
    torch.testing.assert_close(values(second), values(first), rtol=1e-9, atol=1e-11)
    assert plain.param_groups[0]["step"] == int(own.param_groups[0]["step"]) == 24
    assert isinstance(plain.param_groups[0]["step"], int)


@pytest.mark.parametrize("how", ["saved", "copied"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, how):
    net, resumed = network(), network()
    random = generator_states()
    opt = optimiser(net, lr=lifted(), capturable=True)
    train(net, opt, steps=3)
    if how == "saved":
        torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, tmp_path / "run.pt")
        saved = torch.load(tmp_path / "run.pt", weights_only=True)
        other = optimiser(resumed, lr=lifted(0.7), capturable=True, seed=9)
        train(resumed, other, steps=1)
        resumed.load_state_dict(saved["net"])
        other.load_state_dict(saved["opt"])
    else:
        resumed, other = copy.deepcopy((net, opt))
    for trained, its in ((net, opt), (resumed, other)):
        train(trained, its, steps=2)
        with its.sampled_params():
            pass  # a prediction does not disturb the noise of training
        its.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=FLOAT64))]})
        train(trained, its, steps=2)
    assert torch.equal(values(net), values(resumed))
    assert torch.equal(state(opt, "curvature"), state(other, "curvature"))
    assert torch.equal(generator_states(), random)


def test_seeds_decide_the_noise_and_groups_differ_in_it():
    results = []
    for seed in (0, 0, 1):
        net = network()
        halves = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
        opt = IVON(halves, lr=0.1, ess=100.0, seed=seed, capturable=True)
        before = values(net)
        with opt.sampled_params(train=True):
            results.append(values(net) - before)
        assert len(opt.generators) == 2
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(results[0][:10], results[0][20:30])


def take_step(opt: IVON, samples: int, gradients: Callable[[], None]) -> None:
    for _ in range(samples):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            gradients()
    opt.step()


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_reads_no_number(settings, samples):
    net, (x, y) = network(), rows()
    opt = optimiser(net, lr=lifted(), capturable=True, **settings)
    for seen in (False, True):
        with NothingRead() if seen else torch.enable_grad():
            take_step(opt, samples, lambda: F.cross_entropy(net(x), y).backward())


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_touches_no_other_device(monkeypatch, settings, samples):
    """The meta device stands for a GPU: it has no numbers to read, and a tensor on the CPU is seen."""
    monkeypatch.setattr(IVON, "_generator", lambda optimizer, index: torch.Generator())
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to("meta")
    x, rate = torch.empty(7, 3, device="meta"), torch.empty((), device="meta")
    opt = IVON(net.parameters(), **{"lr": 0.1, "ess": 100.0, **settings}, capturable=True)
    opt.param_groups[0]["lr"] = rate
    for seen in (False, True):
        with NothingRead("meta") if seen else torch.enable_grad():
            take_step(opt, samples, lambda: net(x).square().mean().backward())
    with NothingRead("meta"), pytest.raises(RuntimeError, match="tensor on the cpu in"):
        opt.param_groups[0]["step"].copy_(torch.tensor(1.0))
    with NothingRead("meta"), pytest.raises(RuntimeError, match="reads numbers by"):
        float(rate)


def test_what_a_recording_cannot_hold_is_refused(monkeypatch):
    plain, net, (x, y) = network(), network(), rows()
    monkeypatch.setattr(ivon, "_recording", lambda: True)
    opt = optimiser(net, capturable=True)
    with pytest.raises(RuntimeError, match="take a step before recording one"), opt.sampled_params(train=True):
        pass
    with pytest.raises(RuntimeError, match="needs IVON"), optimiser(plain).sampled_params(train=True):
        pass
    monkeypatch.setattr(ivon, "_recording", lambda: False)
    train(net, opt, steps=1)
    monkeypatch.setattr(ivon, "_recording", lambda: True)
    train(net, opt, steps=1)
    monkeypatch.undo()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with opt.sampled_params(train=True):
        scaler.scale(F.cross_entropy(net(x), y)).backward()
    with pytest.raises(RuntimeError, match="GradScaler needs capturable=False"):
        scaler.step(opt)
    devices = [nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "meta")]
    with pytest.raises(ValueError, match="must have parameters on one device"):
        IVON(devices, lr=0.1, ess=1.0, capturable=True).state_dict()


def test_warnings_of_a_posterior_read_tensors(caplog):
    net = network()
    opt = optimiser(net, lr=lifted(), beta2=0.999, capturable=True)
    train(net, opt, steps=3)
    with caplog.at_level("WARNING", logger="posterity"):
        opt._warn_of_first_precisions()
    assert "after 3 steps" in caplog.text
    assert math.isfinite(float(opt.param_groups[0]["lr"]))


@pytest.mark.parametrize("samples", [1, 2])
def test_steps_keep_to_their_memory(samples):
    net, (x, y) = network(), rows()
    opt = optimiser(net, lr=lifted(), hess_init=None, capturable=True)

    def places() -> list[int]:
        slab, group = opt._slabs[0][0], opt.param_groups[0]
        kept = [slab.curvature, slab.scale, slab.momentum, slab.mean, slab.noise, group["step"], group["lr"]]
        assert slab.sums is None
        return [tensor.data_ptr() for tensor in (*kept, *net.parameters())]

    train(net, opt, steps=1, samples=samples, x=x, y=y)
    before = places()
    train(net, opt, steps=3, samples=samples, x=x, y=y)
    assert places() == before
