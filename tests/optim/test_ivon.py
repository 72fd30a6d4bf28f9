"""IVON in training loops: what a plain torch optimiser is expected to do, and what is its own."""

import contextlib
import copy
import math

import pytest
import torch
from drawn import generator_states, normal
from torch import nn
from torch.nn import functional as F

import posterity as po
from posterity.numerics import Key
from posterity.optim import IVON

FLOAT64 = torch.float64


def network(dtype=FLOAT64):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(0.5 * normal(Key(3).fold(name), *p.shape))
    return net


def rows(count=16, dtype=FLOAT64):
    x = normal(Key(1), count, 3)
    return x.to(dtype), (x.sum(-1) > 0).long()


def optimiser(net, **settings):
    return IVON(net.parameters(), **{"lr": 0.1, "ess": 100.0, "hess_init": 0.5, "beta2": 0.95, **settings})


def train(net, opt, steps=5, samples=1, x=None, y=None):
    x, y = rows() if x is None else (x, y)
    for _ in range(steps):
        for _ in range(samples):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
        opt.step()


def values(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def state(opt, name):
    return torch.cat([opt.state[p][name].reshape(-1) for group in opt.param_groups for p in group["params"]])


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    "settings", [{}, {"hess_approx": "gradsq"}, {"clip_radius": 0.01}, {"debias": False, "rescale_lr": False}], ids=str
)
def test_the_update_is_that_of_the_paper(settings, samples):
    """Against the formulas as they are written, with the draws that the context shows."""
    net, (x, y) = network(), rows()
    opt = optimiser(net, weight_decay=0.02, **settings)
    decay, ess, beta1, beta2 = 0.02, 100.0, 0.9, 0.95
    h, v, mean = torch.full((32,), 0.5, dtype=FLOAT64), torch.zeros(32, dtype=FLOAT64), values(net)
    for step in range(1, 5):
        grads, estimates = [], []
        for _ in range(samples):
            with opt.sampled_params(train=True):
                noise = values(net) - mean
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
                grad = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
            grads.append(grad)
            squared = "hess_approx" in settings
            estimates.append(ess * grad**2 if squared else grad * noise * ess * (h + decay))
        opt.step()
        gradient, estimate = torch.stack(grads).mean(0), torch.stack(estimates).mean(0)
        v = beta1 * v + (1 - beta1) * gradient
        h = beta2 * h + (1 - beta2) * estimate + 0.5 * (1 - beta2) ** 2 * (h - estimate) ** 2 / (h + decay)
        corrected = v / (1 - beta1**step) if settings.get("debias", True) else v
        radius = settings.get("clip_radius", math.inf)
        lr = 0.1 * (0.5 + decay) if settings.get("rescale_lr", True) else 0.1
        mean = mean - lr * ((corrected + decay * mean) / (h + decay)).clamp(-radius, radius)
        torch.testing.assert_close(values(net), mean, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(state(opt, "curvature"), h + decay, rtol=1e-10, atol=1e-12)


def test_draws_have_the_scale_of_the_posterior():
    net = nn.Linear(100, 100).to(FLOAT64)
    opt = IVON(net.parameters(), lr=0.1, ess=40.0, hess_init=0.6, weight_decay=0.025)
    mean = values(net)
    with opt.sampled_params():
        whitened = (values(net) - mean) * math.sqrt(40.0 * 0.625)
    count = len(mean)
    assert abs(float(whitened.mean())) < 5 / math.sqrt(count)
    assert abs(float(whitened.square().mean()) - 1) < 5 * math.sqrt(2 / count)
    with opt.sampled_params():
        assert not torch.equal((values(net) - mean) * math.sqrt(40.0 * 0.625), whitened)
    assert torch.equal(values(net), mean)


def test_it_reaches_the_gold_optimum_in_a_plain_loop():
    from goldcases import load

    case = load("linear_meanfield_vi")
    x, y, wanted = case.inputs["X"], case.inputs["y"], case.expected["rows"][1]
    net = nn.Linear(2, 1, bias=False).to(FLOAT64)
    opt = IVON(net.parameters(), lr=0.3, ess=7.0, hess_init=4.0, beta2=0.995, weight_decay=case.inputs["alpha"] / 7)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 1500)
    for _ in range(1500):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            loss = 0.5 * case.inputs["beta"] * (net(x).squeeze(-1) - y).square().mean()
            loss.backward()
        opt.step()
        schedule.step()
    joint = po.Joint(net, po.likelihoods.Gaussian(0.5), po.priors.Normal(case.inputs["alpha"] ** -0.5), num_data=7)
    q = opt.posterior(joint, net)
    torch.testing.assert_close(q.mean, wanted["mean"], rtol=0.1, atol=0.0)
    torch.testing.assert_close(q.variance.sqrt(), wanted["std"], rtol=0.25, atol=0.0)


def test_an_exception_leaves_the_weights_clean_and_does_not_count():
    net, (x, y) = network(), rows()
    opt = optimiser(net)
    before = values(net)

    def interrupted():
        with opt.sampled_params(train=True):
            F.cross_entropy(net(x), y).backward()
            assert not torch.equal(values(net), before)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert torch.equal(values(net), before)
    with pytest.raises(RuntimeError, match="needs gradients at drawn weights"):
        opt.step()
    other = network()
    train(net, opt)
    train(other, optimiser(other))
    assert torch.equal(values(net), values(other))  # as if nothing had been


def test_predictions_between_sample_and_step_do_no_harm():
    nets = [network(), network()]
    x, y = rows()
    for net in nets:
        opt = optimiser(net)
        for _ in range(3):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
            if net is nets[1]:
                with opt.sampled_params():
                    net(x)
            opt.step()
    torch.testing.assert_close(values(nets[0]), values(nets[1]), rtol=1e-13, atol=1e-14)


def test_a_draw_that_fails_changes_nothing(monkeypatch):
    net = network()
    opt = optimiser(net)
    with opt.sampled_params():
        pass
    with torch.no_grad():
        net[0].weight.fill_(1.0)
    monkeypatch.setattr(Key, "generator", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), opt.sampled_params():
        pass
    assert bool((net[0].weight == 1.0).all())


def test_misuse_is_refused():
    net, (x, y) = network(), rows()
    opt = optimiser(net)
    F.cross_entropy(net(x), y).backward()
    with pytest.raises(RuntimeError, match=r"with optimizer.sampled_params\(train=True\)"):
        opt.step()
    opt.zero_grad()
    with opt.sampled_params(), pytest.raises(RuntimeError, match="drawn already"), opt.sampled_params():
        pass
    with opt.sampled_params(train=True), pytest.raises(RuntimeError, match="after the sampled_params context"):
        opt.step()
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.step()
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        optimiser(net, sync=True)


@pytest.mark.parametrize("verb", ["posterior", "load_state_dict", "add_param_group"])
def test_what_would_leave_the_draw_behind_is_refused(verb):
    net = network()
    opt = optimiser(net)
    arguments = {"posterior": (None, net), "load_state_dict": ({},), "add_param_group": ({"params": []},)}[verb]
    before = values(net)
    with opt.sampled_params(), pytest.raises(RuntimeError, match=f"{verb}: call it after"):
        getattr(opt, verb)(*arguments)
    assert torch.equal(values(net), before)


def test_a_batch_may_be_skipped():
    nets, (x, y) = [network(), network()], rows()
    train(nets[0], optimiser(nets[0]))
    opt = optimiser(nets[1])
    for step in range(5):
        if step == 2:
            with opt.sampled_params(train=True):
                opt.zero_grad()  # a bad batch: no backward pass, no step
        with opt.sampled_params(train=True):
            opt.zero_grad()
            F.cross_entropy(nets[1](x), y).backward()
        opt.step()
    assert torch.equal(values(nets[0]), values(nets[1]))
    assert opt.step(lambda: F.cross_entropy(nets[1](x), y).backward()) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "IVON.lr must be a positive number"),
        ({"ess": -1}, "IVON.ess must be a positive number"),
        ({"weight_decay": 0.0}, "IVON.weight_decay must be a positive number"),
        ({"beta2": 1.0}, "IVON.beta2 must be at least 0 and below 1"),
        ({"mc_samples": 0}, "IVON.mc_samples must be a positive whole number"),
        ({"hess_approx": "exact"}, "IVON.hess_approx must be one of"),
        ({"clip_radius": 0.0}, "IVON.clip_radius must be a positive number or infinity"),
        ({"clip_radius": None}, "IVON.clip_radius must be a positive number or infinity"),
        ({"beta1": "0.9"}, "IVON.beta1 must be at least 0 and below 1"),
        ({"seed": "7"}, "IVON.seed must be a whole number"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        optimiser(network(), **settings)
    with pytest.raises(ValueError, match="real numbers"):
        IVON([torch.zeros(2, dtype=torch.complex64)], lr=0.1, ess=1.0)


def test_micro_batches_are_the_large_batch():
    x, y = rows()
    whole, parts = network(torch.float32), network(torch.float32)
    train(whole, optimiser(whole), x=x.float(), y=y)
    opt = optimiser(parts)
    for _ in range(5):
        opt.zero_grad()
        with opt.sampled_params(train=True):
            for index in range(4):
                piece = slice(4 * index, 4 * index + 4)
                (F.cross_entropy(parts(x[piece].float()), y[piece]) / 4).backward()
        opt.step()
    torch.testing.assert_close(values(parts), values(whole), rtol=0.0, atol=1e-6)


def test_where_gradients_are_cleared_does_not_matter():
    first, second = network(), network()
    train(first, optimiser(first), samples=2)
    opt, (x, y) = optimiser(second), rows()
    for _ in range(5):
        for _ in range(2):
            opt.zero_grad()
            with opt.sampled_params(train=True):
                F.cross_entropy(second(x), y).backward()
        opt.step()
    assert torch.equal(values(first), values(second))


@pytest.mark.parametrize("samples", [1, 2])
def test_closures_may_open_the_context_or_not(samples):
    nets = [network() for _ in range(3)]
    x, y = rows()
    train(nets[0], optimiser(nets[0]), samples=samples)
    for net in nets[1:]:
        opt = optimiser(net, mc_samples=samples)

        def plain(net=net, opt=opt):
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        def sampling(opt=opt, plain=plain):
            with opt.sampled_params(train=True):
                return plain()

        for _ in range(5):
            loss = opt.step(plain if net is nets[1] else sampling)
        assert 0.0 < loss.item() < 2.0
    assert torch.equal(values(nets[0]), values(nets[1]))
    assert torch.equal(values(nets[0]), values(nets[2]))


def test_clipping_after_the_context_acts():
    net, (x, y) = network(), rows()
    opt = optimiser(net, debias=False)
    with opt.sampled_params(train=True):
        F.cross_entropy(net(x), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    opt.step()
    assert float(state(opt, "momentum").norm()) == pytest.approx(1e-3 * (1 - 0.9), rel=1e-3)


@pytest.mark.parametrize("samples", [1, 2])
def test_unused_and_frozen_parameters_stay(samples):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Linear(3, 2).to(FLOAT64) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(x) + self.frozen(x)

    net = Two()
    opt = optimiser(net)
    before = copy.deepcopy(net)
    with opt.sampled_params():
        assert torch.equal(net.frozen.weight, before.frozen.weight)
        assert not torch.equal(net.unused.weight, before.unused.weight)
    train(net, opt, samples=samples)
    assert not torch.equal(net.used.weight, before.used.weight)
    for name in ("unused", "frozen"):
        assert torch.equal(getattr(net, name).weight, getattr(before, name).weight)
        assert bool((opt.state[getattr(net, name).weight]["curvature"] == 0.5 + 1e-4).all())
    alone = nn.Linear(3, 2).to(FLOAT64)
    assert opt.state[net.used.weight]["curvature"].shape == alone.weight.shape


def test_groups_and_schedulers():
    net = network()
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 1e-9, "ess": 1e12}]
    opt = IVON(groups, lr=0.1, ess=100.0, beta2=0.95)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    before = copy.deepcopy(net)
    with opt.sampled_params():
        assert float((net[0].weight - before[0].weight).detach().abs().max()) > 1e-2
        assert float((net[2].weight - before[2].weight).detach().abs().max()) < 1e-4
    for _ in range(3):
        train(net, opt, steps=1)
        schedule.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    torch.testing.assert_close(net[2].weight, before[2].weight, rtol=0.0, atol=1e-7)
    assert float((net[0].weight - before[0].weight).detach().abs().max()) > 1e-3
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=FLOAT64))]})
    train(net, opt, steps=1)
    assert [group["step"] for group in opt.param_groups] == [4, 4, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_run_goes_on_bit_by_bit(tmp_path, dtype):
    x, y = rows(dtype=dtype)
    whole = network(dtype)
    opt = optimiser(whole)
    train(whole, opt, steps=3, x=x, y=y)
    with opt.sampled_params():
        pass  # predictions in between
    opt.param_groups[0]["weight_decay"] = 0.01
    torch.save({"net": whole.state_dict(), "opt": opt.state_dict()}, tmp_path / "run.pt")
    train(whole, opt, steps=4, samples=2, x=x, y=y)
    resumed = network(dtype)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    other = optimiser(resumed, lr=0.7, seed=9)
    resumed.load_state_dict(saved["net"])
    other.load_state_dict(optimiser(network(dtype)).state_dict())  # some trainers load a state at their start
    other.load_state_dict(saved["opt"])
    torch.manual_seed(5)  # the noise is the optimiser's own
    train(resumed, other, steps=4, samples=2, x=x, y=y)
    assert torch.equal(values(whole), values(resumed))
    assert torch.equal(state(opt, "curvature"), state(other, "curvature"))
    with opt.sampled_params(), other.sampled_params():
        assert torch.equal(values(whole), values(resumed))
    adam = torch.optim.Adam(resumed.parameters())
    resumed(x).float().sum().backward()
    adam.step()
    with pytest.raises(ValueError, match="must be IVON's"):
        other.load_state_dict(adam.state_dict())


def test_seeds_decide_the_noise_and_predictions_do_not_disturb_it():
    nets = [network() for _ in range(3)]
    optimisers = [optimiser(net, seed=seed) for net, seed in zip(nets, (0, 0, 1), strict=True)]
    random = generator_states()
    for index, (net, opt) in enumerate(zip(nets, optimisers, strict=True)):
        for _ in range(3):
            train(net, opt, steps=1)
            if index == 1:
                with opt.sampled_params():
                    pass
    assert torch.equal(values(nets[0]), values(nets[1]))
    assert not torch.equal(values(nets[0]), values(nets[2]))
    assert torch.equal(generator_states(), random)


def test_copies_and_other_number_types_go_on():
    net = network()
    opt = optimiser(net)
    train(net, opt)
    both = copy.deepcopy((net, opt))
    train(net, opt)
    train(*both)
    assert torch.equal(values(net), values(both[0]))
    net.to(torch.float32)  # the parameters are the same objects with other numbers
    train(net, opt, x=rows()[0].float(), y=rows()[1])
    assert state(opt, "curvature").dtype == torch.float32
    assert bool(torch.isfinite(values(net)).all())


@pytest.mark.cpu
def test_bf16_autocast_trains():
    x, y = rows(dtype=torch.float32)
    net = network(torch.float32)
    opt = optimiser(net)
    losses = []
    for _ in range(60):
        with opt.sampled_params(train=True), torch.autocast("cpu", torch.bfloat16):
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
        opt.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert values(net).dtype == torch.float32


@pytest.mark.cpu
@pytest.mark.parametrize("samples", [1, 2])
def test_a_grad_scaler_changes_nothing_and_skips_what_is_not_finite(samples):
    plain, scaled, (x, y) = network(), network(), rows()
    train(plain, optimiser(plain), samples=samples)
    opt, scaler = optimiser(scaled), torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(5):
        for _ in range(samples):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                scaler.scale(F.cross_entropy(scaled(x), y)).backward()
        if samples == 1:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    torch.testing.assert_close(values(scaled), values(plain), rtol=1e-12, atol=1e-13)
    before = values(scaled)
    with opt.sampled_params(train=True):
        opt.zero_grad()
        scaler.scale(F.cross_entropy(scaled(x), y) * math.inf).backward()
    scaler.step(opt)
    scaler.update()
    assert torch.equal(values(scaled), before)
    train(scaled, opt)
    assert bool(torch.isfinite(values(scaled)).all())


@pytest.mark.cpu
def test_a_grad_scaler_skips_a_step_of_which_any_sample_is_not_finite():
    net, (x, y) = network(), rows()
    opt, scaler, before = optimiser(net), torch.amp.GradScaler("cpu", init_scale=64.0), values(net)
    for factor in (math.inf, 1.0):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            scaler.scale(F.cross_entropy(net(x), y) * factor).backward()
    scaler.step(opt)
    assert torch.equal(values(net), before)
    train(net, opt)
    assert bool(torch.isfinite(values(net)).all())


def test_gradients_of_a_context_left_by_an_exception_are_dropped():
    clean, net, (x, y) = network(), network(), rows()
    opt, other = optimiser(net), optimiser(clean)
    with contextlib.suppress(ZeroDivisionError), opt.sampled_params(train=True):
        F.cross_entropy(net(x), y).backward()
        raise ZeroDivisionError
    for one, its in ((net, opt), (clean, other)):
        with its.sampled_params(train=True):
            F.cross_entropy(one(x), y).backward()  # a loop that clears gradients after its steps
        its.step()
    assert torch.equal(values(net), values(clean))


def test_an_evaluation_in_inference_mode_may_come_first():
    plain, net, (x, _) = network(), network(), rows()
    opt = optimiser(net)
    with torch.inference_mode(), opt.sampled_params():
        net(x)
    train(net, opt)
    train(plain, optimiser(plain))
    assert torch.equal(values(net), values(plain))


def test_a_copy_has_the_decay_that_a_schedule_has_set():
    net = network()
    opt = optimiser(net)
    train(net, opt)
    opt.param_groups[0]["weight_decay"] = 0.5
    other, its = copy.deepcopy((net, opt))
    train(net, opt)
    train(other, its)
    assert torch.equal(values(net), values(other))


def test_the_state_of_another_optimiser_is_refused():
    net = network()
    opt, before = optimiser(net), values(net)
    with pytest.raises(ValueError, match=r"must be IVON's.*without 'ess'"):
        opt.load_state_dict(torch.optim.SGD(net.parameters(), lr=0.1).state_dict())
    train(net, opt, steps=1)
    assert not torch.equal(values(net), before)


def test_channels_last_weights_keep_their_order_in_memory():
    nets = [nn.Conv2d(3, 4, 3).to(FLOAT64) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    nets[1].to(memory_format=torch.channels_last)
    stride = nets[1].weight.stride()
    x = normal(Key(4), 2, 3, 6, 6)
    for net in nets:
        opt = optimiser(net, ess=1e18)  # hardly any noise, whose order differs
        for _ in range(3):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                net(x).square().mean().backward()
            opt.step()
    assert nets[1].weight.stride() == stride
    torch.testing.assert_close(nets[1].weight, nets[0].weight, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch.compile's own
def test_posterior_is_found_by_name_and_serves_predictions():
    net, (x, y) = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).to(FLOAT64), rows()
    groups = [{"params": net[3].parameters()}, {"params": [*net[0].parameters(), *net[1].parameters()], "ess": 50.0}]
    opt = IVON(groups, lr=0.1, ess=100.0, beta2=0.95)
    train(net, opt)
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(), num_data=16)
    q = opt.posterior(joint, net)
    torch.testing.assert_close(q.mean, values(net))
    parts = joint.network.layout.unflatten(1.0 / q.variance)
    torch.testing.assert_close(parts["3.weight"], 100.0 * opt.state[net[3].weight]["curvature"])
    torch.testing.assert_close(parts["0.weight"], 50.0 * opt.state[net[0].weight]["curvature"])
    net.eval()
    torch.testing.assert_close(joint.outputs(q.mean, x, q.buffers), net(x))
    assert float(po.metrics.negative_log_likelihood(q.predict(x), y)) < 1.0
    compiled = torch.compile(net)  # its parameters have other names
    other = opt.posterior(po.Joint(compiled, po.likelihoods.Categorical(), po.priors.Normal(), num_data=16), compiled)
    assert torch.equal(other.mean, q.mean)
    assert torch.equal(other.variance, q.variance)
    last = opt.posterior(po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(), 16, random="3.*"), net)
    assert last.precision.size == 10
    head = IVON(net[3].parameters(), lr=0.1, ess=100.0)
    assert head.posterior(last.joint, net).precision.size == 10
    with pytest.raises(ValueError, match=r"no parameter '0.weight', which is random"):
        head.posterior(joint, net)
    with pytest.raises(ValueError, match="must be that of the joint"):
        opt.posterior(joint, network())
