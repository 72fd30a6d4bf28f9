"""Probabilistic backpropagation against gold numbers, quadrature, brute-force moment matching and exact posteriors."""

import dataclasses
import math

import pytest
import torch
from goldcases import load
from torch import Tensor, nn
from torch.distributions import Gamma as TorchGamma
from torch.distributions import Normal as TorchNormal

import posterity as po
from posterity.evidence import Gamma
from posterity.likelihoods import Gaussian
from posterity.methods import Conjugate, ProbabilisticBackpropagation
from posterity.methods.probabilistic_backpropagation import matched_precision
from posterity.model import Network, Tempering
from posterity.numerics import Key
from posterity.posteriors.moments import backward, forward, rectified, relu_chain
from posterity.priors import Normal

FLOAT64 = torch.float64
ONE_PASS = ProbabilisticBackpropagation(passes=1)


def double(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=FLOAT64)


def in_theta(first: Tensor, second: Tensor) -> Tensor:
    """Layers with the bias as last column, in the order of theta."""
    return torch.cat([part.flatten() for layer in (first, second) for part in (layer[:, :-1], layer[:, -1])])


def test_gold_update() -> None:
    case = load("pbp_update")
    given = case.inputs
    roots = (3**0.5, 4**0.5)  # the paper divides the outputs of a layer, we divide its weights
    mean = in_theta(given["M1"] / roots[0], given["M2"] / roots[1])
    variance = in_theta(given["V1"] / 3, given["V2"] / 4)
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    joint = po.Joint(net, Gaussian(), Normal(variance.sqrt().unsqueeze(0)), num_data=1)
    method = ProbabilisticBackpropagation(1, noise_precision=Gamma(given["gamma_a"], given["gamma_b"]))
    rows = (given["x"].unsqueeze(0), double([[given["y"]]]))
    q, trace = po.infer(method, joint, rows, start=mean)

    chain = relu_chain(joint.network)
    layers = [chain.matrices(flat[chain.order].unsqueeze(0)) for flat in (mean, variance)]
    output, spread, passages = forward(chain, *layers, rows[0].unsqueeze(0))
    case.check("hidden_mean", passages[0].after.mean.flatten())
    case.check("hidden_var", passages[0].after.variance.flatten())
    case.check("out_mean", output.reshape(()))
    case.check("out_var", spread.reshape(()))
    case.check("logZ", -trace["loss"][0])
    for shift, name in ((0, "logZ1"), (1, "logZ2")):
        total = spread + given["gamma_b"] / (given["gamma_a"] + shift)
        case.check(name, TorchNormal(output, total.sqrt()).log_prob(rows[1]).reshape(()))
    shape, rate = trace["noise_precision"][-1]
    case.check("gamma_a_new", shape)
    case.check("gamma_b_new", rate)
    assert q.joint.likelihood.scale == pytest.approx(float(rate / (shape - 1)) ** 0.5, rel=1e-12)
    for values, key, power in ((q.point(), "M", 1), (q.gaussian.variance, "V", 2)):
        flat = values[chain.order]
        case.check(f"{key}1_new", flat[:9].reshape(3, 3) * roots[0] ** power)
        case.check(f"{key}2_new", flat[9:].reshape(1, 4) * roots[1] ** power)


def test_moments_of_the_rectifier_equal_quadrature() -> None:
    mean, variance = double([-9.0, -2.0, -0.3, 0.0, 0.7, 4.0, 30.0]), double([2.0, 0.5, 3.0, 1.0, 0.2, 4.0, 0.01])
    nodes = torch.linspace(0, 1, 400_001, dtype=FLOAT64)[:, None]
    low, high = (mean - 12 * variance.sqrt()).clamp_min(0), (mean + 12 * variance.sqrt()).clamp_min(0)
    u = low + (high - low) * nodes
    density = TorchNormal(mean, variance.sqrt()).log_prob(u).exp()
    first = torch.trapezoid(u * density, u, dim=0)
    shift = torch.trapezoid((u - first).square() * density, u, dim=0)
    below = TorchNormal(mean, variance.sqrt()).cdf(torch.zeros_like(mean))
    moments = rectified(mean, variance)
    torch.testing.assert_close(moments.mean, first, rtol=1e-8, atol=0)
    torch.testing.assert_close(moments.variance, shift + below * first.square(), rtol=1e-8, atol=0)


def test_moments_of_one_hidden_layer_are_those_of_drawn_networks() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    joint = po.Joint(net, Gaussian(0.5), Normal(0.8), num_data=5)
    q, _ = po.infer(ONE_PASS, joint, (Key(0).normal((5, 2), FLOAT64), Key(1).normal((5, 1), FLOAT64)))
    x, draws = Key(2).normal((4, 2), FLOAT64), 10_000
    drawn = q.outputs(x, draws, Key(3))[..., 0]
    mean, variance = q.output_moments(x, marginal=True)
    spread = (drawn - drawn.mean(0)).square()
    assert ((drawn.mean(0) - mean[:, 0]).abs() < 5 * drawn.std(0) / draws**0.5).all()
    assert ((spread.mean(0) - variance[:, 0]).abs() < 5 * spread.std(0) / draws**0.5).all()
    predictive = q.predict(x)
    torch.testing.assert_close(predictive.variance, variance + 0.25)
    torch.testing.assert_close(predictive.mean, mean)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_equal_autograd(bias: bool) -> None:
    layers = [nn.Linear(2, 4, bias=bias), nn.ReLU(), nn.Linear(4, 3), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)]
    chain = relu_chain(Network(nn.Sequential(*layers).double()))
    size = len(chain.order)
    mean = Key(0).normal((3, size), FLOAT64).requires_grad_()
    variance = Key(1).normal((3, size), FLOAT64).square().requires_grad_()
    rows, by_mean, by_variance = (Key(k).normal((3, 5, n), FLOAT64) for k, n in ((2, 2), (3, 2), (4, 2)))
    means, variances = chain.matrices(mean), chain.matrices(variance)
    output, spread, passages = forward(chain, means, variances, rows)
    wanted = torch.autograd.grad((output * by_mean + spread * by_variance).sum(), (mean, variance))
    with torch.no_grad():
        result = backward(chain, means, variances, passages, by_mean, by_variance)
    torch.testing.assert_close(result, wanted, rtol=1e-10, atol=1e-12)


def linear_problem(columns: int, bias: bool) -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    x = 0.5 + Key(0).normal((6, columns), FLOAT64)
    y = x.sum(1, keepdim=True) + 0.3 * Key(1).normal((6, 1), FLOAT64)
    module = nn.Linear(columns, 1, bias=bias).double()
    return po.Joint(module, Gaussian(0.3), Normal(0.7, mean=0.2), num_data=6), (x, y)


@pytest.mark.parametrize("tempering", [Tempering(), Tempering(2.0, 0.5)])
def test_one_weight_has_the_exact_posterior(tempering: Tempering) -> None:
    joint, rows = linear_problem(1, bias=False)
    joint = dataclasses.replace(joint, tempering=tempering)
    q, _ = po.infer(ONE_PASS, joint, (*rows, double([1.0, 2.0, 0.5, 1.0, 0.0, 1.0])))
    exact, _ = po.infer(Conjugate(), joint, (*rows, double([1.0, 2.0, 0.5, 1.0, 0.0, 1.0])))
    torch.testing.assert_close(q.point(), exact.point())
    torch.testing.assert_close(q.gaussian.variance, exact.gaussian.variance)


def test_two_weights_have_the_moments_of_the_tilted_density() -> None:
    joint, (x, y) = linear_problem(1, bias=True)
    q, _ = po.infer(ONE_PASS, dataclasses.replace(joint, num_data=1), (x[:1], y[:1]))
    grid = torch.linspace(-6, 6, 1201, dtype=FLOAT64)
    weight, bias = torch.meshgrid(grid, grid, indexing="ij")
    prior = TorchNormal(double(0.2), double(0.7))
    noise = TorchNormal(weight * x[0] + bias, double(0.3))
    tilted = (prior.log_prob(weight) + prior.log_prob(bias) + noise.log_prob(y[0])).exp()
    for index, values in enumerate((weight, bias)):
        mean = (tilted * values).sum() / tilted.sum()
        variance = (tilted * (values - mean).square()).sum() / tilted.sum()
        torch.testing.assert_close(q.point()[index], mean, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(q.gaussian.variance[index], variance, rtol=1e-8, atol=0)


@pytest.mark.parametrize("power", [None, 1.0, 0.5, 3.0])
def test_a_gamma_has_the_moments_of_the_tilted_precision(power: float | None) -> None:
    shape, rate, square, spread = (
        double([400.0, 900.0]),
        double([300.0, 1200.0]),
        double([4.0, 0.01]),
        double([0.5, 2.0]),
    )
    matched = matched_precision(square, spread, shape, rate, None if power is None else double([power]))
    tau = torch.linspace(0.3, 2.5, 40_001, dtype=FLOAT64).unsqueeze(-1)
    c = 1.0 if power is None else power
    # N(r; f, 1 / tau)^c over f ~ N(0, spread), in closed form for each tau
    likelihood = 0.5 * (c - 1) * tau.log() + TorchNormal(0.0, (spread + 1 / (c * tau)).sqrt()).log_prob(square.sqrt())
    tilted = (TorchGamma(shape, rate).log_prob(tau) + likelihood).exp()
    mean = torch.trapezoid(tau * tilted, tau, dim=0) / torch.trapezoid(tilted, tau, dim=0)
    variance = torch.trapezoid((tau - mean).square() * tilted, tau, dim=0) / torch.trapezoid(tilted, tau, dim=0)
    assert matched.good.all()
    # what remains is the Student-t density that counts as Gaussian: of relative size 1 / shape^2
    change = (mean - shape / rate).abs()
    assert ((matched.shape / matched.rate - mean).abs() < 0.02 * change + 1e-6).all()
    torch.testing.assert_close(matched.shape / matched.rate.square(), variance, rtol=2e-3, atol=0)


def test_updates_that_leave_no_variance_are_rejected() -> None:
    net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    joint = po.Joint(net, Gaussian(0.1), Normal(0.1**0.5), num_data=1)
    start = double(Key(1).normal((13,), FLOAT64, "cpu"))  # the same on every device
    rows = double([[2.0]]), double([[-9.0]])
    q, _ = po.infer(ONE_PASS, joint, rows, start=start)
    chain = relu_chain(joint.network)
    mean, variance = start[chain.order].unsqueeze(0).requires_grad_(), torch.full((1, 13), 0.1, dtype=FLOAT64)
    variance.requires_grad_()
    output, spread, _ = forward(chain, chain.matrices(mean), chain.matrices(variance), rows[0].unsqueeze(0))
    log_z = TorchNormal(output, (spread + 0.01).sqrt()).log_prob(rows[1]).sum()
    slope, bend = torch.autograd.grad(log_z, (mean, variance))
    narrowed = chain.in_theta((variance - variance.square() * (slope.square() - 2 * bend)).detach()[0])
    bad = narrowed <= 0
    assert bad.any()
    assert not bad.all()
    moved = chain.in_theta((mean + variance * slope).detach()[0])
    torch.testing.assert_close(q.gaussian.variance, torch.where(bad, 0.1, narrowed))
    torch.testing.assert_close(q.point(), torch.where(bad, start, moved))


def test_the_noise_is_found() -> None:
    x, noise = (double(Key(seed).normal((300, 2), FLOAT64, "cpu")) for seed in (0, 1))
    y = x[:, :1] - x[:, 1:] + 0.2 * noise[:, :1]
    joint = po.Joint(nn.Linear(2, 1).double(), Gaussian(), Normal(), num_data=300)
    q, _ = po.infer(ProbabilisticBackpropagation(passes=4), joint, (x, y))
    squares = 4 * float((y - x[:, :1] + x[:, 1:]).square().sum())  # of all passes
    conjugate = math.sqrt((6.0 + squares / 2) / (6.0 + 4 * 300 / 2 - 1.0))
    assert q.joint.likelihood.scale == pytest.approx(conjugate, rel=0.06)  # the first rows are seen at other weights
    torch.testing.assert_close(q.point(), double([1.0, -1.0, 0.0]), rtol=0, atol=5 * 0.2 / 300**0.5)


def test_the_prior_scale_is_that_of_its_gamma() -> None:
    x = Key(0).normal((40, 2), FLOAT64)
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    joint = po.Joint(net, Gaussian(), Normal(), num_data=40)
    q, trace = po.infer(ProbabilisticBackpropagation(passes=3), joint, (x, x.abs().sum(1, keepdim=True)))
    assert (q.joint.bound_prior.chosen, q.joint.likelihood.chosen) == ("Gamma posterior", "Gamma posterior")
    assert trace.steps("noise_precision").tolist() == [40, 80, 120]
    shape, rate = trace["prior_precision"][-1]
    scale = math.sqrt(float(rate / (shape - 1)))
    assert trace["prior_scale"][-1].tolist() == pytest.approx([scale / n**0.5 for n in (3, 3, 9, 9)])
    assert 6 < float(shape) < 6 + 33 / 2  # a weight that were known would add 1 / 2


def test_prior_factors_are_expectation_propagation() -> None:
    """One weight, no data about it: its factor alone moves lambda, and taking it out gives back the hyper-prior."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    joint = po.Joint(net, Gaussian(1.0), Normal(), num_data=1)
    method = ProbabilisticBackpropagation(passes=1, prior_precision=Gamma(7.0, 3.0))
    state = method.init(joint, double([1.5, -0.5]), Key(0))
    old = state.variance.clone()
    torch.testing.assert_close(old, double([0.5, 0.5]))  # rate / (shape - 1), one input to each layer
    state.variance.copy_(double([0.2, 0.3]))  # as if rows had said something
    mean, variance = state.mean.clone(), state.variance.clone()
    rows = po.model.Batch(double([[1.0]]), double([[0.0]]), double([0.0]))  # a row without weight
    state, _ = method.step(joint, state, rows, Key(0))
    cavity = 1 / variance - 1 / old
    first = matched_precision((mean[:1] / variance[:1] / cavity[:1]) ** 2, 1 / cavity[:1], double([7.0]), double([3.0]))
    second = matched_precision((mean[1:] / variance[1:] / cavity[1:]) ** 2, 1 / cavity[1:], first.shape, first.rate)
    torch.testing.assert_close(state.prior, torch.cat([second.shape, second.rate]))
    torch.testing.assert_close(state.sites[1:].sum(1), state.prior - double([7.0, 3.0]))
    now = torch.cat([first.noise, second.noise])
    torch.testing.assert_close(state.variance, 1 / (cavity + 1 / now))
    torch.testing.assert_close(state.mean, mean / variance / (cavity + 1 / now))


def test_given_scales_stay() -> None:
    x, y = Key(0).normal((8, 1), FLOAT64), Key(1).normal((8, 1), FLOAT64)
    net = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    half = po.priors.Layerwise({"0.*": Normal(0.6), "*": Normal()})
    q, trace = po.infer(ONE_PASS, po.Joint(net, Gaussian(0.4), half, num_data=8), (x, y))
    assert q.joint.likelihood.scale == 0.4
    assert "noise_precision" not in trace
    shape, rate = trace["prior_precision"][-1]
    first, last = float(trace["prior_scale"][-1][0]), float(trace["prior_scale"][-1][2])
    assert first == pytest.approx(0.6)
    assert last == pytest.approx(math.sqrt(float(rate / (shape - 1)) / 4))
