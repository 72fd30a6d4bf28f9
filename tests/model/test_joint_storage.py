"""A Joint comes back from a folder as it was, or not at all."""

import json

import modulezoo as zoo
import pytest
import torch
from torch import nn

from posterity.errors import BadFolder
from posterity.likelihoods import Gaussian
from posterity.model import Batch, Joint, Network, Tempering
from posterity.priors import Normal
from posterity.storage import Part, RunFolder


def through_a_folder(joint, path):
    tensors = {}
    config = joint.encode(tensors)
    RunFolder(path).commit({"joint": Part(config, tensors)})
    part = RunFolder(path).read("joint")
    return dict(part.config), dict(part.tensors)


def net(activation=nn.Tanh, width=5, dtype=torch.float64):
    return nn.Sequential(nn.Linear(3, width), activation(), nn.Linear(width, 2)).to(dtype)


@pytest.mark.parametrize("kind", [zoo.mlp, zoo.batch_norm, zoo.Tied, zoo.Attention])
def test_round_trip(kind, tmp_path):
    module = zoo.make(kind)
    width = 3 if kind is zoo.Tied else 2
    likelihood = Gaussian((0.3,) * width, learn=True, log_scale_prior=(0.0, 1.0))
    tempering = Tempering(torch.tensor([0.5, 2.0]), 3.0)
    joint = Joint(module, likelihood, Normal(torch.tensor([1.0, 4.0])), 17, tempering)
    joint = joint.with_weights("*weight*")
    joint = joint.with_weights(random=joint.layout.names[0])
    first = joint.network.buffers
    joint = Joint(joint.network.replace(buffers={name: b + 1 for name, b in first.items()}), *fields(joint))
    other = zoo.make(kind, seed=1)  # the architecture alone comes from the module
    back = Joint.decode(Network(other), *through_a_folder(joint, tmp_path / "run"))
    assert (back.likelihood, back.prior, back.tempering) == (joint.likelihood, joint.prior, joint.tempering)
    assert (back.num_data, back.random, back.dtype) == (17, joint.random, torch.float64)
    assert back.layout == joint.layout
    for mine, theirs in ((back.network.frozen, joint.network.frozen), (back.network.buffers, joint.network.buffers)):
        assert list(mine) == list(theirs)
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    theta = zoo.fork(joint.initial(), 2)
    batch = Batch(zoo.inputs(kind), torch.zeros(6, width, dtype=torch.float64))
    assert torch.equal(back.log_density(theta, batch), joint.log_density(theta, batch))


def fields(joint):
    return joint.likelihood, joint.prior, joint.num_data, joint.tempering, joint.random


def test_buffers_of_members_come_back(tmp_path):
    joint = Joint(zoo.make(zoo.batch_norm), Gaussian(), Normal(), 6)
    stacked = {name: torch.stack([b, b + 1]) for name, b in joint.network.buffers.items()}
    several = Joint(joint.network.replace(buffers=stacked), *fields(joint))
    back = Joint.decode(Network(zoo.make(zoo.batch_norm)), *through_a_folder(several, tmp_path / "run"))
    assert all(torch.equal(b, stacked[name]) for name, b in back.network.buffers.items())
    assert int(back.network.member(1).buffers["1.num_batches_tracked"]) == 1


def other_parameters(first, second):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, first, nn.Parameter(torch.zeros(2, dtype=torch.float64)))
            setattr(self, second, nn.Parameter(torch.zeros(2, dtype=torch.float64)))

        def forward(self, x):
            return self.a * x[:, :2] + self.b

    return Two()


REFUSALS = {
    "shape": (net(), net(width=4), r"'0\.bias' was saved with shape \(5,\) and here is shape \(4,\)"),
    "missing name": (net(), nn.Sequential(*net()[:2]), r"'2\.bias' was saved with shape \(2,\) and here is absent"),
    "new name": (nn.Sequential(*net()[:1]), net(), r"'2\.bias' was saved with absent and here is shape \(2,\)"),
    "activation": (net(), net(nn.ReLU), r"it was saved with '\(1\): Tanh\(\)' where this one has '\(1\): ReLU\(\)'"),
    "one layer more": (
        net(),
        nn.Sequential(*net(), nn.Tanh()),
        r"saved with '\)' where this one has '\(3\): Tanh\(\)'",
    ),
    "dtype": (
        net(),
        net(dtype=torch.float32),
        r"saved from a torch\.float64 model and this one is torch\.float32\. Convert",
    ),
    "order": (other_parameters("a", "b"), other_parameters("b", "a"), "its weights come in another order"),
    "frozen here": (net(), net().requires_grad_(False), "no trainable parameters"),
}


@pytest.mark.parametrize("name", list(REFUSALS))
def test_another_network_is_refused(name, tmp_path):
    saved, given, message = REFUSALS[name]
    joint = Joint(saved, Gaussian(), Normal(), 6)
    with pytest.raises(ValueError, match=message) as caught:
        Joint.decode(Network(given), *through_a_folder(joint, tmp_path / "run"))
    assert "\n" not in str(caught.value)
    if name != "frozen here":
        assert isinstance(caught.value, BadFolder)


def test_a_weight_that_is_frozen_here_is_refused(tmp_path):
    joint = Joint(net(), Gaussian(), Normal(), 6)
    given = net()
    given[0].bias.requires_grad_(False)
    with pytest.raises(BadFolder, match=r"'0\.bias' has a posterior in this folder but requires_grad=False here"):
        Joint.decode(Network(given), *through_a_folder(joint, tmp_path / "run"))


def test_another_buffer_is_refused(tmp_path):
    class Shifted(nn.Linear):
        def __init__(self, **buffers):
            super().__init__(3, 2)
            for name, value in buffers.items():
                self.register_buffer(name, value)

    config, tensors = through_a_folder(Joint(Shifted(old=torch.ones(1)), Gaussian(), Normal(), 6), tmp_path / "run")
    with pytest.raises(BadFolder, match="the buffer 'new' is only here"):
        Joint.decode(Network(Shifted(new=torch.ones(1), old=torch.ones(1))), config, tensors)
    with pytest.raises(BadFolder, match="the buffer 'old' is only in the folder"):
        Joint.decode(Network(Shifted()), config, tensors)


def test_a_subset_is_chosen_again(tmp_path):
    joint = Joint(net(), Gaussian(), Normal(), 6).with_weights("2.*")
    config, tensors = through_a_folder(joint, tmp_path / "run")
    back = Joint.decode(Network(net()), config, tensors)
    assert back.network.layout.names == ("2.weight", "2.bias")
    given = net()
    given[0].requires_grad_(False)  # what was frozen may be frozen here
    assert Joint.decode(Network(given), config, tensors).network.layout.names == ("2.weight", "2.bias")
    given[2].requires_grad_(False)
    given[0].requires_grad_(True)
    with pytest.raises(BadFolder, match=r"'2\.weight' has a posterior in this folder"):
        Joint.decode(Network(given), config, tensors)


def test_what_is_encoded_is_json():
    tensors = {}
    config = Joint(zoo.make(zoo.batch_norm), Gaussian((0.5, 1.0)), Normal(), 6).encode(tensors)
    assert json.loads(json.dumps(config)) == config
    assert set(tensors) == {f"joint.buffer.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
