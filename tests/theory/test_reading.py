"""Fitted networks in the theory's terms: the bound is that of `evidence.elbo`, and of a run of MeanField."""

import math

import pytest
import torch
from drawn import normal
from torch import nn

import posterity as po
from posterity.networks import MeanFieldNetwork
from posterity.numerics import Key
from posterity.posteriors import Gaussian
from posterity.precisions import Dense, Diagonal
from posterity.theory import Logistic, NeuronPrior, Neurons, Smooth, Softmax, Square, neurons_of, optimum, problem_of

PRIOR = po.priors.Normal(scale=0.2**0.5)
ROWS, WIDTH = 5, 4


def joint(likelihood=None, prior=PRIOR, outputs=1, activation="relu", width=WIDTH):
    net = MeanFieldNetwork(2, width, outputs, activation).double()
    return po.Joint(net, likelihood or po.likelihoods.Gaussian(scale=0.5**0.5), prior, num_data=ROWS)


def belief(problem, members=()):
    mean = normal(Key(1), *members, problem.size)
    return Gaussian(
        problem, mean, Diagonal(1.0 / (0.3 * (0.3 * normal(Key(2), *members, problem.size)).exp()).square())
    )


def rows(likelihood):
    inputs, targets = normal(Key(3), ROWS, 2), normal(Key(4), ROWS, 1)
    if isinstance(likelihood, po.likelihoods.Categorical):
        return inputs, torch.tensor([0, 2, 1, 1, 0])
    return inputs, (targets > 0).double() if isinstance(likelihood, po.likelihoods.Bernoulli) else targets


CASES = [
    (po.likelihoods.Gaussian(scale=0.5**0.5), Square(2.0), 1, 2e-13),
    (po.likelihoods.Gaussian(scale=0.3), Square(0.3**-2), 1, 2e-13),
    (po.likelihoods.Bernoulli(), Logistic(), 1, 2e-13),
    (po.likelihoods.Categorical(), Softmax(), 3, 0.05),  # the excess to second order, at a width of 4
]


@pytest.mark.parametrize(("likelihood", "loss", "outputs", "error"), CASES)
@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_the_bound_is_that_of_the_posterior(likelihood, loss, outputs, error, activation):
    q = belief(joint(likelihood, outputs=outputs, activation=activation))
    inputs, targets = rows(likelihood)
    problem, nu = problem_of(q.joint, inputs, targets), neurons_of(q)
    assert type(problem.loss) is type(loss)
    assert problem.loss.smoothness == pytest.approx(loss.smoothness)
    expected = po.evidence.elbo(q, (inputs, targets), draws=4000)
    kl = WIDTH * problem.kl(nu)
    fit = -problem.data_terms(nu, WIDTH).sum() - ROWS * problem.loss.log_normaliser(outputs)
    assert float(kl) == pytest.approx(expected.kl, rel=1e-12)
    assert abs(float(fit) - expected.data_fit) <= 5.0 * expected.data_fit_standard_error + error


def test_members_are_a_leading_axis():
    q = belief(joint(outputs=2), members=(3,))
    nu = neurons_of(q)
    assert nu.outer_mean.shape == (3, WIDTH, 2)
    for index in range(3):
        assert torch.equal(neurons_of(q.member(index)).theta, nu.theta[index])


def test_prior_is_read_layer_by_layer_and_with_its_mean():
    likelihood = po.likelihoods.Gaussian(scale=0.5**0.5)
    layers = po.priors.Layerwise({"0.*": po.priors.Normal(0.7), "2.*": po.priors.Normal(0.3, mean=0.1)})
    inputs, targets = rows(likelihood)
    problem = problem_of(joint(likelihood, layers, activation="tanh"), inputs, targets)
    assert problem.activation == Smooth("tanh")
    prior = problem.prior
    assert (prior.outer_scale, prior.inner_scale, prior.outer_mean) == pytest.approx((0.3, 0.7, 0.1))


def test_a_run_of_mean_field_reaches_the_bound_of_the_theory():
    """At the balanced temperature: about that of the best network of equal neurons, though its own part ways."""
    tau, width = 0.02, 20
    inputs = torch.tensor([[1.0, 0.5], [-0.7, 1.2], [0.3, -1.5], [1.8, 0.2], [-1.0, -0.6]], dtype=torch.float64)
    targets = torch.tensor([[0.9], [-0.4], [0.6], [1.4], [0.2]], dtype=torch.float64)
    net = MeanFieldNetwork(2, width).double()
    tempering = po.Tempering.balanced(tau, ROWS, width)
    tempered = po.Joint(net, po.likelihoods.Gaussian(scale=0.5**0.5), PRIOR, ROWS, tempering)
    start = torch.cat([torch.tensor([0.3, 0.1] * width), torch.full((width,), 0.5)]).double()
    method = po.methods.MeanField(steps=1500, batch_size=None, optimizer=po.optim.Adam(0.02))
    q, _ = po.infer(method, tempered, (inputs, targets), start=start)
    problem, nu = problem_of(tempered, inputs, targets), neurons_of(q)
    best = optimum(problem, Neurons.from_theta(nu.theta.mean(0, keepdim=True)), width, tau).neurons
    eta = float(tempering.eta)
    reached, most = float(problem.elbo(nu, width, eta)), float(problem.elbo(best, width, eta))
    collapsed = float(problem.elbo(problem.prior.neurons(2), width, eta))
    assert most - reached < 0.03 * (most - collapsed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: neurons_of(po.posteriors.Point(joint(), torch.zeros(12))), "must be a factorised Gaussian"),
        (lambda: neurons_of(Gaussian(joint(), torch.zeros(12), Dense(torch.eye(12)))), "must be a factorised Gaussian"),
        (
            lambda: neurons_of(
                Gaussian(
                    po.Joint(nn.Linear(2, 1), po.likelihoods.Gaussian(), PRIOR, num_data=1),
                    torch.zeros(3),
                    Diagonal(torch.ones(3)),
                )
            ),
            "must be a MeanFieldNetwork. Got Linear",
        ),
        (lambda: problem_of(joint(po.likelihoods.StudentT()), *rows(None)), "the likelihood must be Gaussian with one"),
        (
            lambda: problem_of(joint(po.likelihoods.Gaussian(learn=True)), *rows(None)),
            "the likelihood must be Gaussian with one known scale",
        ),
        (lambda: problem_of(joint(prior=po.priors.Laplace()), *rows(None)), "the prior must be normal"),
    ],
)
def test_refuses_what_is_not_of_the_theory(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_refuses_priors_that_differ_from_neuron_to_neuron():
    prior = po.priors.Normal(torch.linspace(0.1, 1.0, 12, dtype=torch.float64).unsqueeze(0))
    with pytest.raises(ValueError, match=r"^problem_of: the prior must be one for all neurons"):
        problem_of(joint(prior=prior), *rows(None))


def test_prior_variance_of_the_outputs():
    law = problem_of(joint(), *rows(None)).law(NeuronPrior().neurons(2), 7)
    expected = law.inputs.square().sum(-1) / (50.0 * 7.0)
    torch.testing.assert_close(law.total_variance, expected, rtol=1e-13, atol=0.0)
    assert math.isclose(float(law.mean.abs().max()), 0.0, abs_tol=1e-300)
