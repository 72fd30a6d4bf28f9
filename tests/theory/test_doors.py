"""What the theory's objects refuse, and how they say so."""

import re

import pytest
import torch

from posterity.theory import Logistic, NeuronPrior, Neurons, Softmax, Square, WideProblem, optimum

X = torch.tensor([[1.0, 0.5], [0.2, -1.0]])
ONE = NeuronPrior().neurons(inputs=2)
PROBLEM = WideProblem(X, torch.tensor([0.9, -0.3]))


def made(**changes):
    values = {
        "outer_mean": torch.zeros(3, 1),
        "outer_scale": torch.ones(3, 1),
        "inner_mean": torch.zeros(3, 2),
        "inner_scale": torch.ones(3, 2),
    }
    return Neurons(**{**values, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(outer_scale=torch.zeros(3, 1)), "Neurons.outer_scale must be a positive number. Got "),
        (lambda: made(inner_scale=torch.ones(2, 2)), "Neurons.inner_mean and inner_scale must both be (..., J, "),
        (lambda: made(outer_mean=torch.zeros(2, 1), outer_scale=torch.ones(2, 1)), "must be of the same neurons"),
        (lambda: made(shares=torch.tensor([0.5, 0.4, 0.2])), "Neurons.shares must be (..., 3), of at least 0 and"),
        (lambda: made(shares=torch.tensor([1.5, -0.5, 0.0])), "Neurons.shares must be (..., 3), of at least 0 and"),
        (lambda: made(shares=torch.tensor([0.5, 0.5])), "Neurons.shares must be (..., 3), of at least 0 and"),
        (lambda: Neurons.from_theta(torch.ones(6)), "theta must be (..., J, 2 (C + D)) with C = 1 outputs"),
        (lambda: Neurons.from_theta(torch.ones(2, 5)), "theta must be (..., J, 2 (C + D)) with C = 1 outputs"),
        (lambda: NeuronPrior(outer_scale=-1.0), "NeuronPrior.outer_scale must be a positive number. Got -1.0."),
        (lambda: NeuronPrior(outer_mean=float("nan")), "mean must be a finite number"),
        (lambda: NeuronPrior().neurons(0), "NeuronPrior.neurons needs inputs and outputs. Got (0, 1)."),
        (lambda: Square(0.0), "Square.precision must be a positive number. Got 0.0."),
        (lambda: WideProblem(X[0], torch.zeros(2)), "inputs must be (P, D) and targets (P,) or (P, C)"),
        (lambda: WideProblem(X, torch.zeros(3)), "inputs must be (P, D) and targets (P,) or (P, C)"),
        (lambda: PROBLEM.elbo(ONE, 0.5), "WideProblem: width must be at least 1. Got 0.5."),
        (lambda: PROBLEM.elbo(ONE, 5, -1.0), "WideProblem: eta must be a positive number. Got -1.0."),
        (lambda: PROBLEM.balanced(ONE, 0.0), "WideProblem.balanced: tau must be a positive number. Got 0.0."),
        (lambda: PROBLEM.first_variation(ONE, ONE, -2), "first_variation: tau must be a positive number. Got -2."),
        (lambda: PROBLEM.gap(NeuronPrior().neurons(3), 5), "must be (..., J, 2), one for each input"),
        (lambda: PROBLEM.elbo(NeuronPrior().neurons(2, 2), 5), "Square: targets must be (P, 2). Got "),
        (lambda: WideProblem(X, torch.tensor([0.0, 1.0]), Logistic()).elbo(ONE, 5), "For 0 and 1 use 2 * targets - 1."),
        (
            lambda: WideProblem(X, torch.ones(2), Logistic()).elbo(NeuronPrior().neurons(2, 2), 5),
            "Logistic takes one output and targets (P,). Got 2 outputs",
        ),
        (
            lambda: WideProblem(X, torch.tensor([0, 1]), Softmax()).elbo(ONE, 5),
            "Softmax takes 2 outputs or more and class numbers (P,). Got 1 outputs",
        ),
        (
            lambda: WideProblem(X, torch.tensor([0, 2]), Softmax()).elbo(NeuronPrior().neurons(2, 2), 5),
            "Softmax: targets must lie in 0..1. Got ",
        ),
        (lambda: optimum(PROBLEM, ONE, 5, 0.0), "optimum: tau must be a positive number. Got 0.0."),
        (lambda: optimum(PROBLEM, ONE, 5, 1.0, rounds=0), "optimum: rounds must be a positive whole number. Got 0."),
    ],
)
def test_says_what_was_wanted_and_what_came(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_everything_is_float64_whatever_comes():
    neurons = made()
    assert neurons.theta.dtype == torch.float64
    assert PROBLEM.elbo(neurons, 5).dtype == torch.float64


def test_rows_of_zeros_are_rows_like_any_other():
    data = WideProblem(torch.zeros(1, 2), torch.tensor([1.0]), Logistic())
    leaf = ONE.theta.requires_grad_()
    value = data.elbo(Neurons.from_theta(leaf), 5)
    (gradient,) = torch.autograd.grad(value, leaf)
    assert float(value.detach()) == pytest.approx(-torch.tensor(2.0).log().item())
    assert bool(torch.isfinite(gradient).all())
