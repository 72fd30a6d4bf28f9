"""The bound of every width and its limit: inequalities, invariances, derivatives, and optima over neurons."""

import math

import pytest
import torch
from drawn import normal
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor

from posterity.numerics import Key
from posterity.theory import (
    Activation,
    Logistic,
    Loss,
    NeuronPrior,
    Neurons,
    Rectified,
    Smooth,
    Softmax,
    Square,
    WideProblem,
    collapse_law,
    optimum,
)

LOSSES: list[tuple[Loss, int]] = [(Square(), 1), (Square(0.5), 2), (Logistic(), 1), (Softmax(), 3)]
WIDTHS = torch.tensor([6.0, 12.0, 120.0, 12_000.0], dtype=torch.float64)  # whole numbers of 1, 2 or 3 kinds of neurons


def neurons(key: Key, kinds: int, outputs: int, inputs: int = 2, *lead: int, spread: float = 1.0) -> Neurons:
    means, scales = (
        [normal(key.fold(name).fold(size), *lead, kinds, size) for size in (outputs, 100 + inputs)]
        for name in ("mean", "scale")
    )
    return Neurons(
        spread * means[0],
        0.5 * (0.6 * scales[0]).exp(),
        spread * means[1][..., :inputs],
        0.5 * (0.6 * scales[1][..., :inputs]).exp(),
    )


def problem(loss: Loss, outputs: int, key: Key, rows: int = 4, activation: Activation | None = None) -> WideProblem:
    inputs, targets = normal(key.fold("inputs"), rows, 2), normal(key.fold("targets"), rows, outputs)
    if isinstance(loss, Logistic):
        targets = targets.sign()
    if isinstance(loss, Softmax):
        targets = targets.argmax(-1)
    return WideProblem(inputs, targets, loss, NeuronPrior(), activation or Rectified())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    case=st.sampled_from(LOSSES),
    activation=st.sampled_from([Rectified(), Smooth("tanh"), Smooth("gelu")]),
    spread=st.floats(0.01, 5.0),
    eta=st.floats(1e-4, 10.0),
    kinds=st.integers(1, 3),
)
def test_the_bound_is_below_its_limit_and_the_gap_below_its_own_bound(seed, case, activation, spread, eta, kinds):
    loss, outputs = case
    given_data, nu = problem(loss, outputs, Key(seed), 2, activation), neurons(Key(seed), kinds, outputs, spread=spread)
    bound, limit = given_data.elbo(nu, WIDTHS, eta), given_data.functional(nu, WIDTHS, eta)
    gap, most = given_data.gap(nu, WIDTHS), given_data.gap_bound(nu, WIDTHS)
    rounding = 1e-13 * limit.abs().clamp_min(1.0)
    assert (bound <= limit + rounding).all()
    torch.testing.assert_close(limit - bound, gap, rtol=0.0, atol=float(rounding.max()))
    zero = 1e-15 * (1.0 + float(given_data.law(nu, 1.0).mean.abs().sum()))  # rounding of t f in the logistic one
    assert (gap >= -zero).all()
    assert (gap <= most * (1.0 + 1e-9) + zero).all()
    if isinstance(loss, Square):
        torch.testing.assert_close(gap, most, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
@pytest.mark.parametrize("activation", [Rectified(), Smooth("tanh")], ids=repr)
def test_the_gap_falls_as_one_over_the_width(loss, outputs, activation):
    data, nu = problem(loss, outputs, Key(1), activation=activation), neurons(Key(2), 3, outputs)
    widths = torch.tensor([300.0, 3000.0, 30_000.0, 300_000.0, 3e6], dtype=torch.float64)
    gap = data.gap(nu, widths)
    slopes = (gap[1:] / gap[:-1]).log10()
    assert (slopes + 1.0).abs().max() < 0.01
    assert abs(float(slopes[-1]) + 1.0) < 1e-5  # the digits of a gap of 1e-7 hold
    torch.testing.assert_close(data.data_terms(nu, torch.inf), data.limit_terms(nu), rtol=1e-15, atol=0.0)


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_order_and_copies_of_neurons_change_nothing(loss, outputs):
    data, nu, tau = problem(loss, outputs, Key(3)), neurons(Key(4), 3, outputs), 0.3
    theta = nu.theta
    same = [
        Neurons.from_theta(theta[[2, 0, 1]], outputs),
        Neurons.from_theta(theta.repeat(2, 1), outputs),
        Neurons.from_theta(
            theta[[0, 1, 2, 2]], outputs, torch.tensor([1 / 3, 1 / 3, 0.1, 1 / 3 - 0.1], dtype=torch.float64)
        ),
    ]
    for other in same:
        for value in (data.data_terms, data.gap):
            torch.testing.assert_close(value(other, WIDTHS), value(nu, WIDTHS), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(data.elbo(other, WIDTHS, 0.7), data.elbo(nu, WIDTHS, 0.7), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(data.balanced(other, tau), data.balanced(nu, tau), rtol=1e-12, atol=1e-15)
        extra = neurons(Key(5), 2, outputs)
        torch.testing.assert_close(
            data.first_variation(other, extra, tau), data.first_variation(nu, extra, tau), rtol=1e-12, atol=1e-15
        )


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_many_at_once_are_each_as_alone(loss, outputs):
    data, nu = problem(loss, outputs, Key(6)), neurons(Key(7), 2, outputs, 2, 4)  # four distributions
    etas = torch.tensor([0.1, 1.0, 2.0, 0.5], dtype=torch.float64)
    bound, limit = data.elbo(nu, WIDTHS, etas), data.functional(nu, WIDTHS, etas)
    gradient = data.particle_gradient(nu, etas)
    for k in range(4):
        one = Neurons.from_theta(nu.theta[k], outputs)
        width, eta = float(WIDTHS[k]), float(etas[k])
        torch.testing.assert_close(bound[k], data.elbo(one, width, eta), rtol=1e-11, atol=0.0)
        torch.testing.assert_close(limit[k], data.functional(one, width, eta), rtol=1e-12, atol=0.0)
        torch.testing.assert_close(gradient[k], data.particle_gradient(one, eta), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_balanced_temperature_takes_the_width_out_of_the_functional(loss, outputs):
    data, nu = problem(loss, outputs, Key(8)), neurons(Key(9), 3, outputs)
    functional = data.functional(nu, WIDTHS, data.eta(0.4, WIDTHS)) / data.num_data
    torch.testing.assert_close(functional, data.balanced(nu, 0.4).expand(4), rtol=1e-13, atol=0.0)
    torch.testing.assert_close(data.tau(data.eta(0.4, WIDTHS), WIDTHS), torch.full((4,), 0.4, dtype=torch.float64))


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_particle_gradient_is_that_of_the_functional_times_the_width(loss, outputs):
    data, tau, width = problem(loss, outputs, Key(10)), 0.2, 3
    leaf = neurons(Key(11), width, outputs).theta.requires_grad_()
    value = data.functional(Neurons.from_theta(leaf, outputs), width, data.eta(tau, width)) / data.num_data
    (gradient,) = torch.autograd.grad(value, leaf)
    found = data.particle_gradient(Neurons.from_theta(leaf.detach(), outputs), tau)
    torch.testing.assert_close(found, width * gradient, rtol=1e-10, atol=1e-13)
    shares = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    weighted = data.balanced(Neurons.from_theta(leaf, outputs, shares), tau)
    (gradient,) = torch.autograd.grad(weighted, leaf)
    found = data.particle_gradient(Neurons.from_theta(leaf.detach(), outputs, shares), tau)
    torch.testing.assert_close(found, gradient / shares.unsqueeze(-1), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_first_variation_is_the_derivative_along_mixtures(loss, outputs):
    data, tau = problem(loss, outputs, Key(12)), 0.2
    nu, extra = neurons(Key(13), 2, outputs), neurons(Key(14), 1, outputs)
    theta = torch.cat([nu.theta, extra.theta])

    def mixed(share: float) -> float:
        shares = torch.tensor([0.5 * (1.0 - share)] * 2 + [share], dtype=torch.float64)
        return float(data.balanced(Neurons.from_theta(theta, outputs, shares), tau))

    step = 1e-4  # one-sided, second order: shares are not negative
    slope = (-3.0 * mixed(0.0) + 4.0 * mixed(step) - mixed(2.0 * step)) / (2.0 * step)
    expected = data.first_variation(nu, extra, tau)[0] - data.first_variation(nu, nu, tau).mean()
    assert slope == pytest.approx(float(expected), rel=1e-5, abs=1e-7)


def flat(data: WideProblem, nu: Neurons, tau: float) -> tuple[Tensor, Tensor]:
    """F'(nu) on the support, and the largest of it at twenty thousand other neurons."""
    others = neurons(Key(15), 20_000, 1, spread=1.5)
    return data.first_variation(nu, nu, tau), data.first_variation(nu, others, tau).max()


def test_first_variation_is_constant_on_the_support_of_an_optimum_and_nowhere_larger():
    inputs = load("meanfield_balanced").inputs
    data, tau = WideProblem(inputs["X"], inputs["y"], activation=Smooth("erf")), inputs["tau"]
    theta = torch.tensor([[0.9, 0.4, 0.6, -0.3, 0.3, 0.5]], dtype=torch.float64)
    one = optimum(data, Neurons.from_theta(theta), torch.inf, tau).neurons
    assert data.particle_gradient(one, tau).abs().max() < 1e-12
    on_support, elsewhere = flat(data, one, tau)
    assert elsewhere <= on_support.max() + 1e-12
    # an odd activation: the mirror image is the same neuron, so that both may share the mass
    mirror = one.theta * torch.tensor([-1.0, 1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    two = Neurons.from_theta(torch.cat([one.theta, mirror]), 1, torch.tensor([0.8, 0.2], dtype=torch.float64))
    on_support, elsewhere = flat(data, two, tau)
    torch.testing.assert_close(on_support[0], on_support[1], rtol=1e-12, atol=0.0)
    assert elsewhere <= on_support.max() + 1e-12
    # at a lower temperature one kind of neuron is not enough, and the first variation says so
    one = optimum(data, Neurons.from_theta(theta), torch.inf, 0.005).neurons
    on_support, elsewhere = flat(data, one, 0.005)
    assert elsewhere > on_support.max() + 0.01


def test_first_variation_is_constant_over_two_kinds_of_neurons_at_the_best_shares():
    inputs = load("meanfield_balanced").inputs
    data, tau = WideProblem(inputs["X"], inputs["y"], activation=Smooth("erf")), 0.005
    start = torch.tensor([[1.8, 0.4, 0.8, -1.6, 0.1, 0.3], [-1.1, 0.4, -0.5, -1.2, 0.2, 0.3]], dtype=torch.float64)
    kept = [start]

    def best(share: float) -> float:
        shares = torch.tensor([share, 1.0 - share], dtype=torch.float64)
        kept[0] = optimum(data, Neurons.from_theta(kept[0], 1, shares), torch.inf, tau).neurons.theta
        return -float(data.balanced(Neurons.from_theta(kept[0], 1, shares), tau))

    share = minimize_scalar(best, bounds=(0.45, 0.65), method="bounded", options={"xatol": 1e-7, "maxiter": 14}).x
    best(share)
    nu = Neurons.from_theta(kept[0], 1, torch.tensor([share, 1.0 - share], dtype=torch.float64))
    values = data.first_variation(nu, nu, tau)
    uneven = data.first_variation(Neurons.from_theta(kept[0]), nu, tau)
    assert abs(float(values[0] - values[1])) < 1e-5
    assert abs(float(uneven[0] - uneven[1])) > 1e-3  # at shares of one half they differ
    assert (kept[0][0] - kept[0][1]).norm() > 1.0  # two kinds, and no mirror images
    assert (kept[0][0] + kept[0][1])[[0, 2, 3]].norm() > 1.0


def test_rectified_neurons_may_be_few_and_large():
    """They are homogeneous: the best network of equal neurons is not the best, and larger ones are always better."""
    case = load("meanfield_balanced")
    data, tau = WideProblem(case.inputs["X"], case.inputs["y"]), case.inputs["tau"]
    best = torch.as_tensor(case.at("rows.4.theta")).to(case.inputs["X"])
    theta = torch.tensor([-1.0, 0.45, -0.5, 0.9, 0.45, 0.45], dtype=torch.float64)
    mixtures, variations = [], []
    for size in (30.0, 300.0, 3000.0):
        large = theta * torch.tensor([size, 1.0, size, size, 1.0, 1.0], dtype=torch.float64)
        shares = torch.tensor([1.0 - 0.05 / size**2, 0.05 / size**2], dtype=torch.float64)
        mixtures.append(float(data.balanced(Neurons.from_theta(torch.stack([best, large]), 1, shares), tau)))
        variations.append(
            float(data.first_variation(Neurons.from_theta(best[None]), Neurons.from_theta(large[None]), tau))
        )
    assert mixtures[2] == pytest.approx(mixtures[1], rel=1e-4)
    assert mixtures[2] > case.at("rows.4.elbo_eta_over_p") + 1e-3
    assert variations[2] / variations[1] == pytest.approx(100.0, rel=0.01)
    assert variations[0] > 0.0


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_law_of_collapse_is_the_limit_of_optima(loss, outputs):
    data = problem(loss, outputs, Key(16))
    widths = torch.tensor([300.0, 3000.0], dtype=torch.float64)
    best = optimum(data, data.prior.neurons(2, outputs), widths, data.tau(1.0, widths))
    assert best.gradient.max() < 1e-13
    kl, law = widths * data.kl(best.neurons), collapse_law(data, outputs)
    assert law.exponent == -1
    errors = (kl / law.kl(widths) - 1.0).abs()
    assert errors[1] < 0.01
    assert errors[1] < 0.15 * errors[0] + 1e-9  # the next order is 1/N


def test_law_of_collapse_with_a_mean_in_the_prior():
    """E1.5: the data term goes to sum |y - m_a c|^2, and inner weights move, too."""
    inputs = load("meanfield_collapse").inputs
    data = WideProblem(inputs["X"], inputs["y"], prior=NeuronPrior(outer_mean=0.5))
    width = torch.tensor(30_000.0, dtype=torch.float64)
    best = optimum(data, data.prior.neurons(2), width, data.tau(1.0, width)).neurons
    assert float(width * data.kl(best)) == pytest.approx(collapse_law(data).constant / 30_000, rel=1e-3)
    c = math.sqrt(0.2 / (2.0 * math.pi)) * inputs["X"].norm(dim=-1)
    expected = (inputs["y"] - 0.5 * c).square().sum()
    assert float(data.data_terms(best, width).sum()) == pytest.approx(float(expected), rel=1e-3)


def test_classes_collapse_to_uniform_probabilities():
    data = problem(Softmax(), 3, Key(17))
    best = optimum(data, data.prior.neurons(2, 3), 1e5, data.tau(1.0, 1e5)).neurons
    torch.testing.assert_close(
        data.data_terms(best, 1e5), torch.full((4,), math.log(3.0), dtype=torch.float64), rtol=0.0, atol=1e-3
    )


def test_optimum_of_several_kinds_and_temperatures_at_once():
    data = problem(Square(), 1, Key(18))
    start, taus = neurons(Key(19), 2, 1), torch.tensor([[0.05], [0.5]], dtype=torch.float64)
    widths = torch.tensor([20.0, 200.0, torch.inf], dtype=torch.float64)
    best = optimum(data, start, widths, taus)
    assert best.neurons.theta.shape == (2, 3, 2, 6)
    assert best.gradient.max() < 1e-10
    bound = -data.data_terms(best.neurons, widths).mean(-1) - taus * data.kl(best.neurons)
    began = -data.data_terms(start, widths).mean(-1) - taus * data.kl(start)
    assert (bound > began).all()
    alone = optimum(data, start, 200.0, 0.5).neurons
    torch.testing.assert_close(best.neurons.theta[1, 1], alone.theta, rtol=1e-7, atol=1e-8)
