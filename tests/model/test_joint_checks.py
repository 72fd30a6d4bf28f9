"""What a Joint says of data that do not fit it, in one line with a remedy."""

import modulezoo as zoo
import pytest
import torch
from torch import nn

from posterity.errors import BadData
from posterity.likelihoods import Bernoulli, Categorical, Gaussian
from posterity.model import Batch, Joint, Network, as_data
from posterity.numerics import Key
from posterity.priors import Normal

NAN, INF = float("nan"), float("inf")


def joint_of(likelihood, module=None):
    return Joint(zoo.make(zoo.mlp) if module is None else module, likelihood, Normal(), num_data=6)


def rows(likelihood):
    x = zoo.inputs(zoo.mlp)
    if isinstance(likelihood, Categorical):
        return Batch(x, torch.tensor([0, 1, 1, 0, 1, 0]))
    if isinstance(likelihood, Bernoulli):
        return Batch(x[:, :1].repeat(1, 3), torch.tensor([0, 1, 1, 0, 1, 0]))
    return Batch(x, Key(1).normal((6, 2), torch.float64).to(x.device))


def put(tensor, place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


BAD = {
    "float32 inputs": (
        Gaussian(),
        lambda b: b._replace(inputs=b.inputs.float()),
        r"inputs must have the model's dtype float64\. Got float32\. Convert one of them: inputs\.to\(torch\.float64\)",
    ),
    "nan": (
        Gaussian(),
        lambda b: b._replace(inputs=put(b.inputs, (4, 1), NAN)),
        r"1 NaN or infinite .* in row 4\. Remove",
    ),
    "inf": (
        Gaussian(),
        lambda b: b._replace(inputs=put(b.inputs, (0, 0), -INF)),
        r"1 NaN or infinite .* in row 0\. Remove",
    ),
    "both": (Gaussian(), lambda b: b._replace(inputs=put(b.inputs, 3, INF)), r"3 NaN or infinite .* in row 3\. Remove"),
    "inf target": (
        Gaussian(),
        lambda b: b._replace(targets=put(b.targets, (2, 1), INF)),
        r"targets must be finite.*row 2",
    ),
    "narrow inputs": (
        Gaussian(),
        lambda b: b._replace(inputs=b.inputs[:, :2]),
        r"does not accept these inputs \(inputs \(6, 2\) of torch\.float64\): mat1 and mat2 .*Pass inputs of the shape",
    ),
    "whole numbers": (
        Gaussian(),
        lambda b: b._replace(inputs=torch.ones(6, 3, dtype=torch.int64)),
        r"does not accept these inputs \(inputs \(6, 3\) of torch\.int64\): .*Pass inputs of the shape and dtype",
    ),
    "two inputs": (
        Gaussian(),
        lambda b: b._replace(inputs=(b.inputs, b.inputs)),
        r"does not accept these inputs .*takes",
    ),
    "wide targets": (
        Gaussian(),
        lambda b: b._replace(targets=b.targets.repeat(1, 2)),
        r"\(6, 2\)\. Got \(6, 4\)\. Reshape",
    ),
    "float32 targets": (Gaussian(), lambda b: b._replace(targets=b.targets.float()), r"Convert"),
    "label too high": (
        Categorical(),
        lambda b: b._replace(targets=put(b.targets, 3, 2)),
        r"in 0\.\.1 .*Got 2 in row 3\. ",
    ),
    "label below": (Categorical(), lambda b: b._replace(targets=put(b.targets, 1, -1)), r"Got -1 in row 1\. Number"),
    "one-hot": (Categorical(), lambda b: b._replace(targets=torch.eye(6, 2)), r"argmax"),
    "float labels": (Categorical(), lambda b: b._replace(targets=b.targets.double()), r"Convert with y\.long"),
    "-1 and 1": (
        Bernoulli(),
        lambda b: b._replace(targets=2 * b.targets - 1),
        r"must be 0 or 1\. Got -1.* in row 0\. ",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_rows_are_refused_in_one_line(name):
    likelihood, spoil, message = BAD[name]
    joint = joint_of(likelihood, nn.Linear(3, 1).double() if isinstance(likelihood, Bernoulli) else None)
    batch = rows(likelihood)
    joint.check(batch)
    with pytest.raises(BadData, match=message) as caught:
        joint.check(spoil(batch))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_the_member_of_a_bad_row_is_named():
    x = torch.zeros(3, 6, 3, dtype=torch.float64)
    y = torch.zeros(3, 6, 2, dtype=torch.float64)
    with pytest.raises(BadData, match=r"inputs must be finite\. Got 1 NaN .* in row 4 of member 2\."):
        joint_of(Gaussian()).check(Batch(put(x, (2, 4, 0), NAN), y, None, True))
    with pytest.raises(BadData, match=r"targets must be finite, .* Got 1 infinite .* in row 5 of member 1\."):
        joint_of(Gaussian()).check(Batch(x, put(y, (1, 5, 0), INF), None, True))


def test_named_inputs_are_named():
    joint = joint_of(Gaussian(), zoo.make(zoo.Pair))
    a, b = torch.zeros(6, 3, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.float64)
    y = torch.zeros(6, 2, dtype=torch.float64)
    for inputs, name in (({"a": a, "b": b.float()}, r"inputs\['b'\]"), ((a.float(), b), r"inputs\[0\]")):
        with pytest.raises(BadData, match=rf"{name} must have the model's dtype float64"):
            joint.check(Batch(inputs, y))
    with pytest.raises(BadData, match=r"does not accept these inputs .*unexpected keyword argument 'c'"):
        joint.check(Batch({"a": a, "c": b}, y))


def test_a_sum_that_overflows_is_no_infinity():
    x = torch.full((6, 3), 1e38)
    batch = Batch(x, torch.zeros(6, 2))
    assert torch.isinf(x.sum())
    assert joint_of(Gaussian(), zoo.mlp()).check(batch).size == 6


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.Sequential(nn.Linear(3, 2), nn.Flatten(0)),
            r"one row of outputs for each row of inputs\. Got outputs \(4,\)",
        ),
        (nn.Sequential(nn.Linear(3, 2), nn.AdaptiveAvgPool1d(1), nn.Unflatten(1, (1,))), None),
    ],
)
def test_outputs_need_as_many_rows(module, message):
    joint = joint_of(Gaussian(), module.double())
    batch = Batch(zoo.inputs(zoo.mlp), torch.zeros(6, 1, dtype=torch.float64))
    if message is None:
        assert joint.check(batch).size == 6
        return
    with pytest.raises(BadData, match=message):
        joint.check(batch)


def test_a_model_that_returns_no_tensor_says_so_itself():
    network = Network(nn.LSTM(3, 2, batch_first=True).double(), outputs=lambda out: out[1])
    joint = Joint(network, Gaussian(), Normal(), 6)
    with pytest.raises(TypeError, match=r"must return one tensor.* Got tuple from outputs=\. Give the function"):
        joint.check(Batch(torch.zeros(6, 4, 3, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.float64)))


def test_one_row_will_do():
    for likelihood in (Gaussian(), Categorical()):
        batch = rows(likelihood).map(lambda t: t[:1])
        joint = Joint(zoo.make(zoo.mlp), likelihood, Normal(), num_data=1)
        value, grad, _ = joint.value_and_grad(joint.initial(), joint.check(batch))
        assert bool(torch.isfinite(value))
        assert bool(torch.isfinite(grad).all())


def test_no_rows_will_not():
    with pytest.raises(BadData, match=r"The data have no rows\. Pass at least one\."):
        as_data((torch.zeros(0, 3), torch.zeros(0, 2)))


def test_targets_are_shaped_for_the_likelihood_and_inputs_are_left():
    joint = joint_of(Gaussian(0.5, learn=True), nn.Linear(3, 1).double())
    batch = Batch(zoo.inputs(zoo.mlp), torch.arange(6.0, dtype=torch.float64), torch.ones(6))
    checked = joint.check(batch)
    assert checked.targets.shape == (6, 1)
    assert checked.weights.dtype == torch.float64
    assert checked.inputs is batch.inputs
    members = Batch(batch.inputs.expand(2, -1, -1), batch.targets.expand(2, -1), None, True)
    assert joint.check(members).targets.shape == (2, 6, 1)
    labels = joint_of(Categorical()).check(rows(Categorical())._replace(targets=torch.tensor([0, 1, 0, 1, 0, 1]).int()))
    assert labels.targets.dtype == torch.int64


def test_the_check_looks_at_members_buffers_and_leaves_them():
    joint = joint_of(Gaussian(), zoo.make(zoo.batch_norm))
    stacked = {name: torch.stack([b, b]) for name, b in joint.network.buffers.items()}
    several = Joint(joint.network.replace(buffers=stacked), joint.likelihood, joint.prior, 6)
    assert several.check(rows(Gaussian())).size == 6
    assert all(torch.equal(b, stacked[name]) for name, b in several.network.buffers.items())


@pytest.mark.parametrize("random", [(), [], [0, 1], ("weight", 1), None, 3])
def test_random_must_be_patterns_or_places(random):
    with pytest.raises(ValueError, match=r"Joint\.random must be patterns such as 'head\.\*', or places"):
        Joint(nn.Linear(2, 1), Gaussian(1.0), Normal(), num_data=4, random=random)


def test_patterns_may_come_in_a_list():
    joint = Joint(nn.Linear(2, 1), Gaussian(1.0), Normal(), num_data=4, random=["weight"])
    assert joint.random == ("weight",)  # a value that can be a key
    assert joint.random_indices.tolist() == [0, 1]
