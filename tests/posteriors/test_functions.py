"""Draws of whole functions: the same at every call, and distributed as the posterior says."""

import drawn
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.model import Joint
from posterity.numerics.random import Key
from posterity.posteriors import Dropout, Gaussian, Linearized, Mixture, Point, Posterior, Propagated, Samples
from posterity.precisions import Dense, Diagonal


def joint_of(module: nn.Module) -> Joint:
    return Joint(module.double(), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=10)


def plain() -> Joint:
    return joint_of(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)))


def gaussian(joint: Joint, seed: int = 0) -> Gaussian:
    half = drawn.normal(Key(seed), joint.num_weights, joint.num_weights)
    precision = Dense(half @ half.T + torch.eye(joint.num_weights, dtype=torch.float64))
    return Gaussian(joint, drawn.normal(Key(seed + 1), joint.num_weights), precision)


def normed() -> Joint:
    return joint_of(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)))


def samples(joint: Joint) -> Samples:
    theta = drawn.normal(Key(2), 2, 3, joint.num_weights)
    buffers = {name: b.expand(2, 3, *b.shape).clone() for name, b in joint.network.buffers.items()}
    buffers |= {name: b + drawn.uniform(Key(3), *b.shape) for name, b in buffers.items() if b.is_floating_point()}
    return Samples(joint, theta, {}, buffers)


def dropped(one_mask_a_draw: bool = True) -> Dropout:
    joint = joint_of(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3)))
    return Dropout(joint, drawn.normal(Key(4), joint.num_weights), one_mask_a_draw=one_mask_a_draw)


def propagated() -> Propagated:
    joint = joint_of(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3)))
    size = joint.num_weights
    return Propagated(joint, Gaussian(joint, drawn.normal(Key(1), size), Diagonal(torch.full((size,), 4.0).double())))


def mixture() -> Mixture:
    joint = plain()
    parts = [
        gaussian(joint),
        Linearized(joint, gaussian(joint, 3)),
        Point(joint, drawn.normal(Key(9), joint.num_weights)),
    ]
    return Mixture(parts, torch.tensor([0.3, 0.5, 0.2]))


POSTERIORS = {
    "gaussian": lambda: gaussian(plain()),
    "linearized": lambda: Linearized(joint := plain(), gaussian(joint)),
    "propagated": propagated,
    "samples": lambda: samples(plain()),
    "samples with buffers": lambda: samples(normed()),
    "dropout": dropped,
    "dropout by rows": lambda: dropped(one_mask_a_draw=False),
    "point": lambda: Point(joint := plain(), drawn.normal(Key(5), joint.num_weights)),
    "mixture": mixture,
}


@pytest.fixture(params=POSTERIORS)
def q(request: pytest.FixtureRequest) -> Posterior:
    return POSTERIORS[request.param]()


def test_a_function_is_the_same_in_every_call_and_at_every_other_row(q: Posterior) -> None:
    x = drawn.normal(Key(7), 20, 2)
    functions = q.functions(9, Key(1))
    whole = functions(x)
    assert whole.shape == (9, 20, 3)
    assert len(functions) == len(list(functions)) == 9
    near = {"rtol": 0, "atol": 1e-12}
    assert torch.allclose(functions(x[7:9]), whole[:, 7:9], **near)
    assert torch.allclose(functions(x, batch_size=6), whole, **near)
    assert torch.allclose(functions(DataLoader(TensorDataset(x), batch_size=7)), whole, **near)
    assert torch.allclose(functions[1:3](x), whole[1:3], **near)
    for number, function in enumerate(functions):
        assert torch.allclose(function(x), whole[number], **near)
    assert torch.allclose(functions[-1](x), whole[-1], **near)
    assert torch.equal(q.functions(9, Key(1))(x), whole)
    if not isinstance(q, Point):
        assert not torch.allclose(whole[0], whole[1]) or isinstance(q, Mixture)
        assert not torch.allclose(q.functions(9, Key(2))(x), whole)


def test_functions_are_differentiable_in_their_inputs(q: Posterior) -> None:
    x = drawn.normal(Key(7), 4, 2).requires_grad_()
    function = q.functions(3, Key(1))[2]
    (grad,) = torch.autograd.grad(function(x)[:, 0].sum(), x)
    step = 1e-5 * torch.eye(2, dtype=torch.float64)[0]
    slope = (function(x.detach() + step) - function(x.detach() - step))[:, 0] / 2e-5
    assert torch.allclose(grad[:, 0], slope, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        assert not function(x).requires_grad


def test_functions_are_those_that_outputs_draw() -> None:
    x = drawn.normal(Key(7), 6, 2)
    for name in ("gaussian", "linearized", "propagated", "dropout"):
        q = POSTERIORS[name]()
        assert torch.allclose(q.functions(4, Key(3))(x), q.outputs(x, 4, Key(3)), rtol=0, atol=1e-12), name


def test_functions_of_chains_are_draws_at_random_with_their_buffers() -> None:
    q, x = samples(normed()), drawn.normal(Key(7), 6, 2)
    assert isinstance(q.joint, Joint)
    each = [
        q.joint.outputs(q.theta[c, d].to(x), x, {k: b[c, d].to(q.joint.device) for k, b in q.buffers.items()})
        for c in range(2)
        for d in range(3)
    ]
    firsts = set()
    for seed in range(30):
        outputs = q.functions(1, Key(seed))(x)[0]
        (same,) = [number for number, own in enumerate(each) if torch.allclose(own, outputs)]
        firsts.add(same)
    assert len(firsts) == 6
    assert len(q.functions(10, Key(0))) == 10  # more than there are


def test_functions_of_a_mixture_are_of_its_components_in_their_shares() -> None:
    joint = plain()
    thetas = drawn.normal(Key(9), 2, joint.num_weights)
    q, x = Mixture([Point(joint, theta) for theta in thetas], torch.tensor([0.25, 0.75])), drawn.normal(Key(7), 2, 2)
    second = joint.outputs(thetas[1], x)
    of_second = [torch.allclose(q.functions(1, Key(seed))[0](x), second) for seed in range(400)]
    assert abs(sum(of_second) / 400 - 0.75) < 5 * (0.25 * 0.75 / 400) ** 0.5
    order = [torch.allclose(own, second) for own in q.functions(40, Key(0))(x)]
    assert sum(order) == 30
    assert order != sorted(order)  # mixed, so that the first is a draw like any other


def test_moments_of_linear_functions() -> None:
    joint = plain()
    q, x = Linearized(joint, gaussian(joint)), drawn.normal(Key(7), 3, 2)
    outputs = q.functions(20_000, Key(0))(x).flatten(1)
    mean, covariance = q.joint_output_moments(x)
    assert torch.allclose(outputs.mean(0), mean.flatten(), atol=5 * float(outputs.std(0).max()) / 141)
    assert torch.allclose(torch.cov(outputs.T), covariance, atol=0.05 * float(covariance.diagonal().max()))


def test_what_is_no_function_is_refused() -> None:
    q = gaussian(plain())
    with pytest.raises(ValueError, match="positive whole number"):
        q.functions(0)
    density = po.Density(lambda u: -0.5 * (u**2).sum(-1), {"u": (2,)}, dtype=torch.float64)
    with pytest.raises(TypeError, match="a Density has no inputs"):
        Gaussian(density, torch.zeros(2).double(), Dense(torch.eye(2).double())).functions(1)
    with pytest.raises(IndexError):
        q.functions(2)[2]
