"""Modules as pure functions of one flat vector."""

import copy
import logging
import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor

import modulezoo as zoo
import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.errors import BadData
from posterity.model.network import Network
from posterity.numerics import Key

pytestmark = [  # what torch says where it is slow: vmap of weight norm, and copies of recurrent layers on CUDA
    pytest.mark.filterwarnings("ignore:There is a performance drop.*_weight_norm"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]

MEMBERS = 3
NOT_MAPPED = (zoo.Recurrent,)


def outputs_of(module, x):
    """What the module itself gives in evaluation mode."""
    return copy.deepcopy(module).eval()(x)


def snapshot(module):
    """All that could change in a module, and in the world around it."""
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "identity": {name: id(p) for name, p in module.named_parameters()},
        "grad": {name: (p.requires_grad, p.grad) for name, p in module.named_parameters()},
        "mode": {name: m.training for name, m in module.named_modules()},
        "random": (torch.random.get_rng_state(), numpy.random.get_state()[1].copy(), random.getstate()),
    }


def assert_same(first, second):
    assert first["state"].keys() == second["state"].keys()
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
    assert first["identity"] == second["identity"]
    assert first["grad"] == second["grad"]
    assert first["mode"] == second["mode"]
    assert torch.equal(first["random"][0], second["random"][0])
    assert (first["random"][1] == second["random"][1]).all()
    assert first["random"][2] == second["random"][2]


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_the_network_is_the_module(kind):
    module, x = zoo.make(kind), zoo.inputs(kind)
    network = Network(module)
    torch.testing.assert_close(network.outputs(network.initial, x), outputs_of(module, x), rtol=1e-12, atol=1e-12)
    other = zoo.make(kind, seed=1)  # another theta is the module with other weights
    theta = network.layout.flatten(dict(other.named_parameters())).detach()
    buffers = dict(other.named_buffers())
    torch.testing.assert_close(network.outputs(theta, x, buffers), outputs_of(other, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_gradients_are_those_of_the_module(kind):
    module, x = zoo.make(kind).eval(), zoo.inputs(kind)
    network = Network(module)
    theta = network.initial.clone().requires_grad_()
    (grad,) = torch.autograd.grad(network.outputs(theta, x).square().sum(), theta)
    with torch.backends.cudnn.flags(enabled=False):  # whose recurrent layers have no gradient in evaluation mode
        module(x).square().sum().backward()
    wanted = {name: p.grad.to_dense() for name, p in module.named_parameters()}
    torch.testing.assert_close(grad, network.layout.flatten(wanted), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", zoo.KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_the_users_module_is_never_touched(kind, training):
    module, x = zoo.make(kind).train(training), zoo.inputs(kind)
    before = snapshot(module)
    network = Network(module)
    theta = network.initial.clone().requires_grad_()
    for members in (False, True):
        weights = network.views(zoo.fork(theta, 2) if members else theta)
        network.run(weights, x, train=True, members=members)[0].sum().backward()
        network.outputs(zoo.fork(theta, 2) if members else theta, x)
    if kind is not zoo.weight_norm:
        network.fresh(Key(0))
    network.with_weights(network.layout.names[0]).outputs(torch.zeros(network.layout.slices[0].size).double(), x)
    assert_same(before, snapshot(module))


def test_theta_is_in_module_order_and_row_major():
    module = zoo.make(zoo.mlp)
    network = Network(module)
    assert network.layout.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    wanted = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    assert torch.equal(network.initial, wanted)
    assert network.initial.data_ptr() != next(module.parameters()).data_ptr()
    assert (network.dtype, network.layout.size) == (torch.float64, 32)
    assert repr(network) == "Network(Sequential of 32 weights)"


def test_a_tied_weight_is_in_theta_once_and_gets_both_gradients():
    module, x = zoo.make(zoo.Tied), zoo.inputs(zoo.Tied)
    network = Network(module)
    assert network.layout.names == ("scale", "encoder.weight", "decoder.bias")
    theta = network.initial * 1.1
    scale, weight, bias = network.views(theta)
    wanted = scale * ((x @ weight.T).tanh() @ weight.T + bias)
    torch.testing.assert_close(network.outputs(theta, x), wanted, rtol=1e-12, atol=1e-12)
    assert network.with_weights("decoder.weight").layout.names == ("encoder.weight",)  # any of its names will do


def test_a_shared_module_is_in_theta_once():
    shared = nn.Linear(3, 3).double()
    module = nn.Sequential(shared, nn.Tanh(), shared)
    network, x = Network(module), zoo.inputs(zoo.mlp)
    assert network.layout.names == ("0.weight", "0.bias")
    theta = network.initial * 0.5
    weight, bias = network.views(theta)
    wanted = (x @ weight.T + bias).tanh() @ weight.T + bias
    torch.testing.assert_close(network.outputs(theta, x), wanted, rtol=1e-12, atol=1e-12)


def test_frozen_parameters_stay_where_they_are(caplog):
    module, x = zoo.make(zoo.mlp), zoo.inputs(zoo.mlp)
    module[0].weight.requires_grad_(False)
    with caplog.at_level(logging.INFO, "posterity"):
        network = Network(module)
    (record,) = caplog.records
    frozen, trained = module[0].weight.numel(), network.layout.size
    assert record.message.startswith(f"{frozen} weights with requires_grad=False stay at their values (0.weight)")
    assert record.message.endswith(f"theta has the other {trained}")
    assert network.layout.names == ("0.bias", "2.weight", "2.bias")
    assert list(network.frozen) == ["0.weight"]
    torch.testing.assert_close(network.outputs(network.initial, x), outputs_of(module, x), rtol=1e-12, atol=1e-12)
    bias = outputs_of(module, x)[:1] * 0
    assert not torch.equal(network.outputs(network.initial * 0.0, x), outputs_of(module, x))
    torch.testing.assert_close(network.outputs(network.initial * 0.0, x), bias.expand(6, -1), rtol=0, atol=0)
    with torch.no_grad():
        module[0].weight.zero_()  # the user goes on with the module
    assert bool(network.frozen["0.weight"].abs().sum() > 0)


def test_with_weights_chooses_what_is_in_theta():
    module, x = zoo.make(zoo.mlp), zoo.inputs(zoo.mlp)
    network = Network(module)
    head = network.with_weights("2.*")
    assert head.layout.names == ("2.weight", "2.bias")
    assert list(head.frozen) == ["0.weight", "0.bias"]
    assert network.layout.size == 32  # the first one is as it was
    assert torch.equal(head.initial, network.initial[-12:])
    torch.testing.assert_close(head.outputs(head.initial, x), outputs_of(module, x), rtol=1e-12, atol=1e-12)
    moved = torch.cat([network.initial[:-12], head.initial * 2.0])
    torch.testing.assert_close(head.outputs(head.initial * 2.0, x), network.outputs(moved, x), rtol=1e-12, atol=1e-12)
    both = network.with_weights("2.bias", "*.weight")
    assert both.layout.names == ("0.weight", "2.weight", "2.bias")  # module order, not that of the patterns
    again = head.with_weights("*.bias")
    assert (again.layout.names, set(again.frozen)) == (("2.bias",), {"0.weight", "0.bias", "2.weight"})
    torch.testing.assert_close(again.outputs(again.initial, x), outputs_of(module, x), rtol=1e-12, atol=1e-12)


def test_with_weights_names_the_nearest_parameter():
    network = Network(zoo.make(zoo.mlp))
    with pytest.raises(ValueError, match=r"Unknown parameter '2\.wieght'\. Did you mean '2\.weight'\?"):
        network.with_weights("0.bias", "2.wieght")
    with pytest.raises(ValueError, match="at least one pattern"):
        network.with_weights()


def test_replace_changes_only_what_it_is_given():
    network, x = Network(zoo.make(zoo.mlp)).with_weights("2.*"), zoo.inputs(zoo.mlp)
    frozen = {name: value * 0.0 for name, value in network.frozen.items()}
    other = network.replace(frozen=frozen, initial=network.initial + 1.0)
    assert torch.equal(other.initial, network.initial + 1.0)
    assert bool((other.outputs(network.initial, x) == other.outputs(network.initial, x)[:1]).all())  # inputs are lost
    assert not torch.equal(other.outputs(network.initial, x), network.outputs(network.initial, x))
    frozen["0.weight"] += 5.0
    assert bool((other.frozen["0.weight"] == 0.0).all())


def test_inputs_by_position_and_by_name():
    module = zoo.make(zoo.Pair)
    network = Network(module)
    a, b = (
        Key(0).normal((6, 3), torch.float64).to(network.device),
        Key(1).normal((6, 2), torch.float64).to(network.device),
    )
    wanted = module(a, b)
    torch.testing.assert_close(network.outputs(network.initial, (a, b)), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(network.outputs(network.initial, {"b": b, "a": a}), wanted, rtol=1e-12, atol=1e-12)
    theta = zoo.fork(network.initial, MEMBERS)
    for shared in ((a, b), {"b": b, "a": a}):
        together = network.outputs(theta, shared)
        for index in range(MEMBERS):
            wanted = network.outputs(theta[index], shared)
            torch.testing.assert_close(together[index], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", zoo.KINDS)
@pytest.mark.parametrize("per_member", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_members_are_a_loop(kind, per_member, train, grad, caplog):
    network = Network(zoo.make(kind))
    theta = zoo.fork(network.initial, MEMBERS).requires_grad_(grad)
    x = zoo.inputs(kind)
    if per_member:
        x = torch.stack([zoo.inputs(kind, seed=seed) for seed in range(MEMBERS)])
    buffers = {  # every member has its own
        name: torch.stack([b + index for index in range(MEMBERS)]) for name, b in network.buffers.items()
    }
    kept = {name: b.clone() for name, b in buffers.items()}
    with torch.set_grad_enabled(grad), caplog.at_level(logging.WARNING, "posterity"):
        together, after = network.run(
            network.views(theta), x, buffers, members=True, per_member=per_member, train=train
        )
        assert bool(caplog.records) == (kind in NOT_MAPPED)
        for index in range(MEMBERS):
            one, one_after = network.run(
                network.views(theta[index]),
                x[index] if per_member else x,
                {name: b[index] for name, b in buffers.items()},
                train=train,
            )
            torch.testing.assert_close(together[index], one, rtol=1e-12, atol=1e-12)
            for name in network.buffers:
                torch.testing.assert_close(after[name][index], one_after[name], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(buffers[name], value) for name, value in kept.items())


@pytest.mark.parametrize("enabled", [False, True])
def test_the_switch_of_fused_attention_is_put_back(enabled):
    before = torch.backends.mha.get_fastpath_enabled()
    network = Network(zoo.make(zoo.Attention))
    try:
        torch.backends.mha.set_fastpath_enabled(enabled)
        network.outputs(zoo.fork(network.initial, 2), zoo.inputs(zoo.Attention))
        assert torch.backends.mha.get_fastpath_enabled() == enabled
        with pytest.raises(AssertionError, match="embedding dimension"):
            network.outputs(zoo.fork(network.initial, 2), torch.ones(2, 3))
        assert torch.backends.mha.get_fastpath_enabled() == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_members_have_different_outputs():
    network, x = Network(zoo.make(zoo.mlp)), zoo.inputs(zoo.mlp)
    outputs = network.outputs(zoo.fork(network.initial, MEMBERS), x)
    assert outputs.shape == (MEMBERS, 6, 2)
    assert not torch.equal(outputs[0], outputs[1])


def test_what_vmap_refuses_is_said_once(caplog):
    network, x = Network(zoo.make(zoo.Recurrent)), zoo.inputs(zoo.Recurrent)
    theta = zoo.fork(network.initial, MEMBERS)
    with caplog.at_level(logging.WARNING, "posterity"):
        network.outputs(theta, x)
        network.outputs(theta, x)
        network.with_weights("head.*").replace().outputs(theta[:, -10:], x)  # the same module
    (record,) = caplog.records
    assert record.name == "posterity"
    assert "members run one after the other because vmap refused this module" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_an_error_of_the_model_is_not_taken_for_a_refusal(caplog):
    network = Network(zoo.make(zoo.mlp))
    theta = zoo.fork(network.initial, MEMBERS)
    with (
        caplog.at_level(logging.WARNING, "posterity"),
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        network.outputs(theta, zoo.inputs(zoo.mlp)[:, :2])
    network.outputs(theta, zoo.inputs(zoo.mlp))
    assert not caplog.records


def test_inputs_of_members_need_as_many_thetas():
    network = Network(zoo.make(zoo.mlp))
    x = zoo.inputs(zoo.mlp).expand(MEMBERS, -1, -1)
    for theta in (network.initial, zoo.fork(network.initial, MEMBERS + 1), zoo.fork(network.initial, MEMBERS - 1)):
        with pytest.raises(ValueError, match=r"those of 3 members, so theta must be \(members, P\)"):
            network.outputs(theta, x, per_member=True)


@pytest.mark.parametrize("kind", [zoo.batch_norm, zoo.conv_batch_norm])
def test_batch_norm_in_training_mode_is_torchs(kind):
    module = zoo.make(kind).train()
    network = Network(module)
    buffers = None
    for seed in range(4):
        x = zoo.inputs(kind, seed=seed)
        outputs, buffers = network.run(network.views(network.initial), x, buffers, train=True)
        torch.testing.assert_close(outputs, module(x), rtol=1e-12, atol=1e-12)
    for name, value in module.named_buffers():
        torch.testing.assert_close(buffers[name], value, rtol=1e-12, atol=1e-12)
    x = zoo.inputs(kind, seed=9)
    torch.testing.assert_close(
        network.outputs(network.initial, x, buffers), outputs_of(module, x), rtol=1e-12, atol=1e-12
    )
    fresh = dict(zoo.make(kind).named_buffers())  # the network's own are as at the start
    assert all(torch.equal(value, fresh[name]) for name, value in network.buffers.items())


def test_batch_norm_in_evaluation_mode_changes_nothing():
    network, x = Network(zoo.make(zoo.batch_norm)), zoo.inputs(zoo.batch_norm)
    buffers = {name: value.clone() for name, value in network.buffers.items()}
    _, after = network.run(network.views(network.initial), x, buffers)
    assert all(torch.equal(after[name], value) for name, value in network.buffers.items())
    alone = network.outputs(network.initial, x[:1])
    torch.testing.assert_close(network.outputs(network.initial, x)[:1], alone, rtol=1e-12, atol=1e-12)
    assert not network.mixes_rows


def test_a_frozen_batch_norm_does_not_train():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
    whole, x = Network(module), torch.linspace(-2.0, 3.0, 12, dtype=torch.float64).view(4, 3)
    head = whole.with_weights("2.*")
    outputs, after = head.run(head.views(head.initial), x, train=True)
    assert torch.equal(outputs, module.eval()(x))
    assert all(torch.equal(after[name], buffer) for name, buffer in head.buffers.items())
    assert not torch.equal(whole.run(whole.views(whole.initial), x, train=True)[0], outputs)


def test_batch_norm_without_running_statistics_mixes_rows():
    network = Network(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)).double())
    x = zoo.inputs(zoo.mlp)
    assert network.mixes_rows
    assert network.buffers == {}
    assert not torch.equal(network.outputs(network.initial, x)[:2], network.outputs(network.initial, x[:2]))


def test_only_what_batch_norm_writes_is_copied():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    module.register_buffer("table", torch.ones(5))
    network = Network(module)
    _, after = network.run(network.views(network.initial), zoo.inputs(zoo.mlp), train=True)
    assert after.keys() == network.running == {f"1.{name}" for name, _ in module[1].named_buffers()}
    assert after["1.running_mean"] is not network.buffers["1.running_mean"]


def test_member_takes_its_own_buffers():
    network = Network(zoo.make(zoo.batch_norm))
    assert network.member(1) is network
    stacked = {name: torch.stack([b, b + 1]) for name, b in network.buffers.items()}
    several = network.replace(buffers=stacked)
    assert all(torch.equal(value, network.buffers[name] + 1) for name, value in several.member(1).buffers.items())
    x, theta = zoo.inputs(zoo.batch_norm), zoo.fork(network.initial, 2)
    one = several.member(1).outputs(theta[1], x)
    torch.testing.assert_close(several.outputs(theta, x)[1], one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("train", [False, True])
def test_dropout_is_off_and_it_is_said(train, caplog):
    with caplog.at_level(logging.INFO, "posterity"):
        network = Network(zoo.make(zoo.Dropping))
        Network(zoo.make(zoo.Recurrent)), Network(zoo.make(zoo.Attention)), Network(zoo.make(zoo.mlp))
    said = "dropout is off but under MCDropout (layers: %s)"
    assert [record.getMessage() for record in caplog.records] == [said % name for name in ("drop", "cell", "mix")]
    x = zoo.inputs(zoo.Dropping)
    weight, bias = network.views(network.initial)
    outputs, _ = network.run([weight, bias], x, train=train)
    torch.testing.assert_close(outputs, x @ weight.T + bias, rtol=1e-12, atol=1e-12)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        outputs = self.norm(self.layer(x))
        if bool((x > 100).any()):
            raise RuntimeError("too hot")
        return outputs


def test_the_private_module_is_as_before_after_an_error():
    module = Failing().double()
    network = Network(module)
    private = network._module
    own = {name: id(value) for name, value in [*private.named_parameters(), *private.named_buffers()]}
    values = {name: value.clone() for name, value in private.state_dict().items()}
    x = zoo.inputs(zoo.mlp)
    with pytest.raises(RuntimeError, match="too hot"):
        network.run(network.views(network.initial + 1.0), x + 1000, train=True)
    assert {name: id(value) for name, value in [*private.named_parameters(), *private.named_buffers()]} == own
    assert all(torch.equal(value, values[name]) for name, value in private.state_dict().items())
    torch.testing.assert_close(network.outputs(network.initial, x), outputs_of(module, x), rtol=1e-12, atol=1e-12)


class Returning(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.layer(x))


@pytest.mark.parametrize("wrap", [lambda y: ((y, y), y), lambda y: {"scores": y}, lambda y: None, lambda y: []])
@pytest.mark.parametrize("members", [False, True])
def test_a_model_that_returns_no_tensor_is_refused(wrap, members):
    network = Network(Returning(wrap))
    theta = zoo.fork(network.initial, 2) if members else network.initial
    with pytest.raises(TypeError, match=r"the model must return one tensor, logits.* Got \w+\. Give the function"):
        network.outputs(theta, torch.ones(4, 3))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(2, 2), nn.Linear(2, 1), reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x).tanh(), use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("members", [False, True])
def test_a_model_that_runs_again_in_backward_is_refused(reentrant, members):
    """The weights would then be the module's own, and the gradient silently wrong."""
    network, x = Network(Checkpointed(reentrant)), torch.ones(3, 2)
    theta = zoo.fork(network.initial, 2) if members else network.initial
    plain = network.outputs(theta, x)  # predictions have no backward pass
    assert plain.isfinite().all()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"must keep its activations for backward.*torch\.utils\.checkpoint"):
            network.outputs(theta.clone().requires_grad_(), x)
    assert torch.equal(network.outputs(theta, x), plain)


def test_hooks_of_the_user_around_a_call_do_no_harm():
    network, x = Network(nn.Linear(2, 1)), torch.ones(3, 2)
    theta = network.initial.requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        network.outputs(theta, x).sum().backward()
    torch.testing.assert_close(theta.grad, torch.full((3,), 3.0))


class Slow(nn.Module):
    """Lets other threads run in the middle of a call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        hidden = self.first(x)
        time.sleep(0.01)
        return self.second(hidden)


def test_threads_take_turns():
    network, x = Network(Slow()), torch.randn(3, 2)
    networks = [network, network.replace(initial=network.initial + 1.0)] * 2  # of one private module
    thetas = [torch.randn(network.layout.size) for _ in networks]
    alone = [network.outputs(theta, x) for theta in thetas]
    with ThreadPoolExecutor(len(thetas)) as pool:
        together = list(pool.map(lambda one, theta: one.outputs(theta, x), networks, thetas))
    for one, two in zip(alone, together, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_a_copy_has_a_turn_of_its_own(copied):
    network, x = Network(nn.Linear(2, 1)), torch.randn(3, 2)
    other = copied(network)
    with network._turn, ThreadPoolExecutor(1) as pool:
        found = pool.submit(other.outputs, other.initial, x).result(timeout=30)
    assert torch.equal(found, network.outputs(network.initial, x))


@pytest.mark.parametrize("kind", [kind for kind in zoo.KINDS if kind is not zoo.weight_norm])
def test_fresh_weights_depend_on_the_key_alone(kind):
    network = Network(zoo.make(kind))
    before = torch.random.get_rng_state()
    first, second = network.fresh(Key(1)), network.fresh(Key(1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, second)
    assert not torch.equal(first, network.fresh(Key(2)))
    assert not torch.equal(first, network.initial)
    assert first.shape == network.initial.shape
    assert (first.dtype, first.device) == (network.dtype, network.device)


def test_fresh_weights_are_drawn_as_the_layers_draw_them():
    """Of attention: the layer sets its children in its own way, whatever they would have done."""
    theta = Network(zoo.make(zoo.Attention)).fresh(Key(0))
    named = Network(zoo.make(zoo.Attention)).layout.unflatten(theta)
    assert bool((named["mix.in_proj_bias"] == 0).all())
    assert bool((named["mix.out_proj.bias"] == 0).all())
    assert bool((named["head.bias"] != 0).any())
    assert float(named["head.weight"].abs().max()) <= 4**-0.5  # uniform on +- 1 / sqrt(fan in)


def test_fresh_weights_need_a_way_to_draw_them():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.tilt = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return self.layer(x) + self.tilt

    network = Network(Bare())
    with pytest.raises(ValueError, match=r"Bare has the weight 'tilt' but no reset_parameters\(\)\. Give it one"):
        network.fresh(Key(0))
    assert network.with_weights("layer.*").fresh(Key(0)).shape == (8,)  # a frozen weight needs none

    class Whole(Bare):
        def reset_parameters(self):
            nn.init.normal_(self.tilt)

    assert Network(Whole()).fresh(Key(0)).shape == (10,)
    with pytest.raises(ValueError, match=r"ParametrizationList has the weight '0\.parametrizations\.weight\.orig"):
        Network(zoo.make(zoo.weight_norm)).fresh(Key(0))


def test_bad_models_are_refused():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module with Python code\. Got function"):
        Network(lambda x: x)
    with pytest.raises(ValueError, match="no trainable parameters"):
        Network(nn.ReLU())
    with pytest.raises(ValueError, match="no trainable parameters"):
        Network(nn.Linear(2, 1).requires_grad_(False))
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet"):
        Network(nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ValueError, match=r"Embedding\(5, 3, max_norm=1\.0\) changes its own weights"):
        Network(nn.Embedding(5, 3, max_norm=1.0))
    with pytest.raises(ValueError, match=r"must have one floating dtype and device\. Got torch\.complex64"):
        Network(nn.Linear(2, 1, dtype=torch.complex64))
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2).double())
    with pytest.raises(ValueError, match=r"Got torch\.float32 on \w+(:0)?, torch\.float64 on"):
        Network(mixed)
    mixed[1].requires_grad_(False)
    assert Network(mixed).dtype == torch.float32  # the remedy that it names


def test_a_model_that_cannot_be_copied_says_why():
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = nn.utils.weight_norm(nn.Linear(3, 2))
    old(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"cannot be copied: .* take nn\.utils\.parametrizations\.weight_norm"):
        Network(old)
    keeps = zoo.make(zoo.mlp)
    keeps.last = keeps(zoo.inputs(zoo.mlp))
    with pytest.raises(ValueError, match="if it keeps tensors of its last call, delete them"):
        Network(keeps)


class Compiled(nn.Module):
    """What torch.compile makes of a module, as far as a Network sees it."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_a_compiled_model_is_taken_as_it_was(caplog):
    module, x = zoo.make(zoo.mlp), zoo.inputs(zoo.mlp)
    with caplog.at_level(logging.INFO, "posterity"):
        network = Network(Compiled(module))
    assert "as it was before torch.compile" in caplog.text
    assert network.layout.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    torch.testing.assert_close(network.outputs(network.initial, x), module(x), rtol=1e-12, atol=1e-12)


def test_the_description_has_no_addresses():
    class Strange(nn.Linear):
        def extra_repr(self):
            return f"activation={torch.relu}, callback={object()}"

    text = Network(Strange(2, 1)).description
    assert text == Network(Strange(2, 1)).description
    assert "0x" not in text
    assert "Linear(in_features=3, out_features=5, bias=True)" in Network(zoo.make(zoo.mlp)).description


def test_a_tensor_that_is_a_buffer_twice_is_replaced_twice():
    class Shifted(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.register_buffer("shift", shift)

        def forward(self, x):
            return x + self.shift

    shift = torch.ones(2)
    network = Network(nn.Sequential(Shifted(shift), nn.Linear(2, 2, bias=False), Shifted(shift)))
    assert list(network.buffers) == ["0.shift"]
    with torch.no_grad():
        outputs = network.outputs(torch.eye(2).reshape(-1), torch.zeros(1, 2), {"0.shift": torch.full((2,), 3.0)})
    assert outputs.tolist() == [[6.0, 6.0]]


def test_a_theta_of_any_strides_will_do():
    network, x = Network(zoo.make(zoo.mlp)), zoo.inputs(zoo.mlp)
    wanted = network.outputs(network.initial, x)
    spread = torch.stack([network.initial, torch.zeros_like(network.initial)], dim=1)[:, 0]
    torch.testing.assert_close(network.outputs(spread, x), wanted, rtol=1e-12, atol=1e-12)
    expanded = network.outputs(network.initial.expand(2, -1), x)
    torch.testing.assert_close(expanded, wanted.expand(2, -1, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.cuda
def test_on_a_cuda_device():
    module, x = zoo.make(zoo.mlp), zoo.inputs(zoo.mlp)
    here, there = Network(module.cpu()), Network(copy.deepcopy(module).cuda())
    assert there.device.type == "cuda"
    outputs = there.outputs(there.initial, x.cuda())
    torch.testing.assert_close(outputs.cpu(), here.outputs(here.initial, x.cpu()), rtol=1e-10, atol=1e-10)
    before = torch.cuda.get_rng_state()
    assert torch.equal(there.fresh(Key(0)).cpu(), here.fresh(Key(0)))
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_layers_that_work_in_place_leave_the_rows_as_they_are():
    """The first layer would write into the user's tensor, in a fit and in predictions."""
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 3))
    rows = torch.tensor([[-1.0, 2.0], [3.0, -4.0], [0.5, -0.5]])
    before, labels = rows.clone(), torch.tensor([0, 1, 2])
    joint = po.Joint(module, po.likelihoods.Categorical(), po.priors.Normal(), num_data=3)
    q, _ = po.infer(po.methods.MAP(steps=3, batch_size=None), joint, (rows, labels))
    q.predict(rows)
    joint.network.outputs(joint.initial().expand(2, -1), rows)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_module_that_loses_the_axis_of_a_single_row_is_told_so(outputs):
    class Squeezed(nn.Linear):
        def forward(self, x):
            return super().forward(x).squeeze()

    x, y = torch.randn(5, 3), torch.randn(5, outputs).squeeze(-1)
    joint = po.Joint(Squeezed(3, outputs), po.likelihoods.Gaussian(1.0), po.priors.Normal(1.0), num_data=5)
    loader = DataLoader(TensorDataset(x, y), batch_size=2)  # the last batch has one row
    for method in (po.methods.MAP(5), po.methods.Laplace(tuning=None)):
        with pytest.raises(BadData, match=r"for 1 row\. Where it squeezes its outputs, name the axis"):
            po.infer(method, joint, loader, progress=False)
    with pytest.raises(BadData, match=r"for 1 row\. Where it squeezes"):
        po.posteriors.Point(joint, joint.initial()).predict(x[:1])


def test_a_module_that_returns_its_loss_first_is_told_so():
    class WithLoss(nn.Linear):
        def forward(self, x):
            outputs = super().forward(x)
            return outputs.square().mean(), outputs

    network = po.model.Network(WithLoss(3, 1))
    with pytest.raises(BadData, match=r"Got outputs \(\) for 4 rows\. Take the right one of what it returns"):
        network.outputs(network.initial, torch.zeros(4, 3))
