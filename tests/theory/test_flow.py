"""The gradient flow of particles: F rises at the rate of theory, and ends at optima found in another way."""

import pytest
import torch
from goldcases import load

from posterity.numerics import Key
from posterity.theory import Neurons, Smooth, WideProblem, optimum, particle_flow

pytestmark = pytest.mark.cpu


def cloud(count: int, inputs: int = 2, spread: float = 0.5) -> Neurons:
    sizes = (1, 1, inputs, inputs)
    rows = [Key(3).fold(index).normal((count, size), torch.float64, "cpu") for index, size in enumerate(sizes)]
    return Neurons(spread * rows[0], 0.4 * (0.2 * rows[1]).exp(), spread * rows[2], 0.4 * (0.2 * rows[3]).exp())


def problem(activation=None) -> tuple[WideProblem, float]:
    inputs = load("meanfield_balanced").inputs
    return WideProblem(inputs["X"], inputs["y"], **({} if activation is None else {"activation": activation})), inputs[
        "tau"
    ]


def test_one_kind_of_neuron_reaches_the_gold_optimum():
    case = load("meanfield_balanced")
    data, tau = problem()
    start = torch.tensor([[0.5, 0.447, 0.3, 0.1, 0.447, 0.447]], dtype=torch.float64)
    flow = particle_flow(data, Neurons.from_theta(start), tau, torch.tensor([0.0, 1.0, 100.0]), tolerance=1e-3)
    torch.testing.assert_close(flow.neurons.theta[0], start)
    expected = torch.as_tensor(case.at("rows.4.theta"), dtype=torch.float64)
    torch.testing.assert_close(flow.neurons.theta[-1, 0], expected, rtol=0.0, atol=1e-6)
    assert float(flow.values[-1]) == pytest.approx(case.at("rows.4.elbo_eta_over_p"), abs=1e-10)


def test_many_particles_reach_the_global_optimum():
    data, tau = problem(Smooth("erf"))
    theta = torch.tensor([[0.9, 0.4, 0.6, -0.3, 0.3, 0.5]], dtype=torch.float64)
    best = optimum(data, Neurons.from_theta(theta), torch.inf, tau).neurons  # test_problem certifies it
    flow = particle_flow(data, cloud(4), tau, torch.tensor([0.0, 5.0, 200.0]), tolerance=1e-3)
    assert bool((flow.values.diff() > 0.0).all())
    assert float(flow.values[-1]) == pytest.approx(float(data.balanced(best, tau)), abs=1e-7)
    at_end, at_best = (data.law(neurons, torch.inf).mean for neurons in (flow.neurons, best))
    torch.testing.assert_close(at_end[-1], at_best, rtol=0.0, atol=1e-4)


def test_the_functional_rises_by_the_mean_square_of_the_velocity():
    data, tau = problem()
    step, shares = 1e-3, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    start = Neurons.from_theta(cloud(4).theta, 1, shares)
    flow = particle_flow(data, start, tau, torch.tensor([0.2 - step, 0.2, 0.2 + step]), tolerance=1e-7)
    middle = Neurons.from_theta(flow.neurons.theta[1], 1, shares)
    rate = (data.particle_gradient(middle, tau).square().sum(-1) * shares).sum()
    assert float(flow.values[2] - flow.values[0]) / (2.0 * step) == pytest.approx(float(rate), rel=1e-4)


def test_the_path_does_not_depend_on_the_times_asked_for_and_converges_with_the_tolerance():
    data, tau = problem()
    few, many = torch.tensor([0.3]), torch.linspace(0.0, 0.3, 5)
    exact = particle_flow(data, cloud(3), tau, few, tolerance=1e-7).neurons.theta[-1]
    errors = []
    for tolerance in (1e-3, 1e-5):
        flows = [particle_flow(data, cloud(3), tau, times, tolerance=tolerance) for times in (few, many)]
        ends = [flow.neurons.theta[-1] for flow in flows]
        errors.append(max(float((end - exact).abs().max()) for end in ends))
    assert errors[0] < 1e-2
    assert errors[1] < 0.1 * errors[0]


def test_scales_stay_positive_however_small_they_start():
    data, tau = problem()
    start = Neurons.from_theta(torch.tensor([[1.0, 1e-3, 1.0, 0.0, 1e-3, 1e-3]], dtype=torch.float64))
    flow = particle_flow(data, start, tau, torch.tensor([0.01, 1.0]), tolerance=1e-3)
    assert bool((flow.neurons.inner_scale > 1e-3).all())
    assert bool((flow.values.diff() > 0.0).all())


def test_temperatures_run_together():
    data, taus = problem()[0], torch.tensor([0.02, 0.1], dtype=torch.float64)
    times = torch.tensor([0.0, 0.3])
    both = particle_flow(data, cloud(2), taus, times, tolerance=1e-6)
    assert both.neurons.theta.shape == (2, 2, 2, 6)
    for index, tau in enumerate(taus.tolist()):
        alone = particle_flow(data, cloud(2), tau, times, tolerance=1e-6)
        torch.testing.assert_close(both.neurons.theta[:, index], alone.neurons.theta, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("times", [torch.tensor([]), torch.tensor(1.0), torch.tensor([-1.0]), torch.tensor([2.0, 1.0])])
def test_says_which_times_are_wanted(times):
    data, tau = problem()
    with pytest.raises(ValueError, match="times must be"):
        particle_flow(data, cloud(2), tau, times)
