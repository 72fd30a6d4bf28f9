"""The theory of wide networks against gold numbers, all widths at once."""

import pytest
import torch
from goldcases import load
from torch import Tensor

from posterity.theory import Logistic, NeuronPrior, Neurons, Smooth, Square, WideProblem, collapse_law, optimum


def slope(widths: Tensor, values: Tensor) -> float:
    """Least squares of log values on log widths."""
    x, y = widths.log(), values.log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


@pytest.mark.parametrize(("name", "loss"), [("square", Square()), ("logistic", Logistic())])
def test_gap(name, loss):
    case = load("meanfield_gap")
    inputs = case.inputs
    neurons = Neurons.from_theta(inputs["base_thetas"])
    problem = WideProblem(inputs["X"], inputs[f"y_{name}"], loss)
    widths = 4 * inputs["multiplicities"]
    etas = problem.eta(inputs["tau"], widths)
    gap = problem.gap(neurons, widths)
    found = {
        "N": widths,
        "eta": etas,
        "kl_total": widths * problem.kl(neurons),
        "G_N": problem.data_terms(neurons, widths),
        "G_tilde": problem.limit_terms(neurons).expand(6, 5),
        "elbo_eta": problem.elbo(neurons, widths, etas),
        "F_tilde": problem.functional(neurons, widths, etas),
        "abs_gap": gap,
        "gap_times_N_over_p": gap * widths / 5,
    }
    for row in range(6):
        for key, values in found.items():
            case.check(f"{name}.rows.{row}.{key}", values[row])
        # far more closely than the case asks: its digits are those of 30-digit arithmetic
        assert float(gap[row]) == pytest.approx(case.at(f"{name}.rows.{row}.abs_gap"), rel=1e-11)
    case.check(f"{name}.slope_last_points", slope(widths[-4:], gap[-4:]))
    case.check(f"{name}.balanced_functional", problem.balanced(neurons, inputs["tau"]))


def test_moments_of_neurons_and_first_variation():
    case = load("meanfield_gap")
    inputs = case.inputs
    neurons, extra = (Neurons.from_theta(theta) for theta in (inputs["base_thetas"], inputs["theta_extra"][None]))
    problem = WideProblem(inputs["X"], inputs["y_square"])
    law = problem.law(neurons, 1.0)
    for row in range(4):
        case.check(f"neuron_moments.{row}.E_phi", law.neuron_means[row, :, 0])
        case.check(f"neuron_moments.{row}.Var_phi", law.neuron_covariances[row, :, 0, 0])
        case.check(f"neuron_moments.{row}.kl_to_prior", NeuronPrior().kl(neurons)[row])
    case.check("first_variation.value_at_theta_extra", problem.first_variation(neurons, extra, inputs["tau"])[0])
    case.check("first_variation.nu_average", problem.first_variation(neurons, neurons, inputs["tau"]).mean())


def test_several_outputs():
    case = load("meanfield_multioutput")
    inputs = case.inputs
    neurons = Neurons(*(inputs[name].unsqueeze(0) for name in ("ma", "sa", "mb", "sb")))
    problem = WideProblem(inputs["x"].unsqueeze(0), inputs["y"].unsqueeze(0))
    law = problem.law(neurons, 1.0)
    case.check("E_relu", law.moments.mean[0, 0])
    case.check("E_relu2", law.moments.second[0, 0])
    case.check("E_phi", law.mean[0])
    case.check("Cov_phi", law.covariance[0])
    terms = problem.data_terms(neurons, torch.tensor([1, 5, 50]))
    for row in range(3):
        case.check(f"rows.{row}.G_N", terms[row, 0])
    case.check("G_tilde", problem.limit_terms(neurons)[0])


def test_collapse_of_the_untempered_bound():
    case = load("meanfield_collapse")
    inputs, widths = case.inputs, case.inputs["N"]
    problem = WideProblem(inputs["X"], inputs["y"])
    best = optimum(problem, problem.prior.neurons(inputs=2), widths, problem.tau(1.0, widths))
    kl, data = widths * problem.kl(best.neurons), problem.data_terms(best.neurons, widths).sum(-1)
    for row in range(len(widths)):
        case.check(f"rows.{row}.kl_total", kl[row])
        case.check(f"rows.{row}.N_times_kl", widths[row] * kl[row])
        case.check(f"rows.{row}.data_term", data[row])
        case.check(f"rows.{row}.elbo", problem.elbo(best.neurons, widths)[row])
        case.check(f"rows.{row}.theta", best.neurons.theta[row, 0])
        # the KL of 1e-11 a neuron has its digits, too
        assert float(kl[row]) == pytest.approx(case.at(f"rows.{row}.kl_total"), rel=1e-6)
    case.check("slope", slope(widths[-4:], kl[-4:]))
    law = collapse_law(problem)
    assert law.exponent == -1
    case.check("limit_N_times_kl", law.constant)
    torch.testing.assert_close(law.kl(widths)[-1], kl[-1], rtol=1e-5, atol=0.0)
    case.check("sum_y2", problem.data_terms(problem.prior.neurons(inputs=2), torch.inf).sum())


def test_collapse_is_faster_for_an_odd_activation():
    inputs = load("meanfield_collapse").inputs
    problem = WideProblem(inputs["X"], inputs["y"], activation=Smooth("erf"))
    widths = torch.tensor([30.0, 100.0, 300.0, 1000.0], dtype=torch.float64)
    best = optimum(problem, problem.prior.neurons(inputs=2), widths, problem.tau(1.0, widths)).neurons
    kl = widths * problem.kl(best)
    law = collapse_law(problem)
    assert law.exponent == -3
    assert law.constant == pytest.approx(0.09736, abs=5e-6)  # item 001-13
    assert slope(widths, kl) == pytest.approx(-3.0, abs=0.01)
    torch.testing.assert_close(law.kl(widths)[-1], kl[-1], rtol=1e-4, atol=0.0)
    assert best.outer_mean.abs().max() < 1e-12
    assert (best.outer_scale < problem.prior.outer_scale).all()


def test_balanced_temperature():
    case = load("meanfield_balanced")
    inputs, tau = case.inputs, case.inputs["tau"]
    problem = WideProblem(inputs["X"], inputs["y"])
    theta = inputs["start_u"].clone()
    theta[[1, 4, 5]] = theta[[1, 4, 5]].exp()
    widths = torch.tensor([10.0, 100.0, 1000.0, 10000.0, torch.inf], dtype=torch.float64)
    best = optimum(problem, Neurons.from_theta(theta[None]), widths, tau).neurons
    kl, data = problem.kl(best), problem.data_terms(best, widths).mean(-1)
    for row in range(5):
        case.check(f"rows.{row}.theta", best.theta[row, 0])
        case.check(f"rows.{row}.kl_per_neuron", kl[row])
        case.check(f"rows.{row}.data_term_per_point", data[row])
        case.check(f"rows.{row}.elbo_eta_over_p", -data[row] - tau * kl[row])
    distance = (best.theta[:4, 0] - best.theta[4, 0]).norm(dim=-1)
    case.check("distance_to_limit", distance)
    case.check("slope", slope(widths[1:4], distance[1:]))
    assert float(best.outer_scale[4]) == pytest.approx(
        problem.prior.outer_scale, rel=1e-12
    )  # E phi does not contain it
