"""Kronecker factors, their posteriors and the whole Gauss-Newton matrix of two small networks, at given weights."""

import pytest
import torch
from goldcases import load
from matrixcases import as_matrix
from torch import nn

import posterity as po
from posterity.curvature import CorrectedKronecker, Diagonal, Full, GaussNewton, Kronecker, LowRank
from posterity.curvature.curvature import Rows
from posterity.curvature.survey import survey
from posterity.numerics import Key

FLOAT64 = torch.float64


def linear_network():
    """The joint of the linear network, its weights and its rows; targets do not matter to the Gauss-Newton matrix."""
    case = load("kfac_linear_network")
    module = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)).double()
    theta = torch.cat([case.inputs["W1"].flatten(), case.inputs["W2"].flatten()])
    noise, prior = po.likelihoods.Gaussian(case.inputs["beta"] ** -0.5), po.priors.Normal(case.inputs["alpha"] ** -0.5)
    joint = po.Joint(module, noise, prior, num_data=4)
    return case, joint, theta, (case.inputs["X"], torch.zeros(4, 2, dtype=FLOAT64))


def softmax_network():
    """The same for the classifier, whose gold matrices hold the bias as the last column of each weight."""
    case = load("kfac_softmax_network")
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    first, second = case.inputs["W1"], case.inputs["W2"]
    theta = torch.cat([first[:, :-1].flatten(), first[:, -1], second[:, :-1].flatten(), second[:, -1]])
    joint = po.Joint(module, po.likelihoods.Categorical(), po.priors.Normal(case.inputs["alpha"] ** -0.5), num_data=4)
    return case, joint, theta, (case.inputs["X"], case.inputs["y"].long())


def fitted(problem, structure, batch_size=3):
    _, joint, theta, data = problem
    method = po.methods.Laplace(structure=structure, tuning=None, batch_size=batch_size)
    return po.infer(method, joint, data, start=theta, progress=False)[0]


def order(problem):
    """Places in theta of the weights in the order of the gold file: layer by layer, (W b) row-major."""
    _, joint, _, data = problem
    return torch.cat([place.block.index for place in survey(joint, data[0]).places])


PROBLEMS = {"linear": linear_network, "softmax": softmax_network}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_factors_and_the_whole_matrix(name, batch_size):
    problem = case, joint, theta, data = PROBLEMS[name]()
    sums = {}
    for part in torch.arange(4).split(batch_size or 4):
        batch = po.model.Batch(data[0][part], data[1][part])
        rows = Rows(GaussNewton(), joint, theta, batch, None, Key(0))
        sums = Kronecker().add(sums, rows, 0)
    sums = Kronecker().end(sums, rows, 0, torch.ones_like(theta))
    for layer in range(2):
        case.check(f"A.{layer}", sums[f"{layer}.inner"].squeeze(0) / sums["count"])
        case.check(f"G.{layer}", sums[f"{layer}.outer"].squeeze(0) / sums["count"])
    index = order(problem)
    whole = as_matrix(fitted(problem, Full(), batch_size).gaussian.precision)[index[:, None], index]
    case.check("ggn_full", whole - case.inputs["alpha"] * torch.eye(len(index), dtype=FLOAT64))


@pytest.mark.parametrize("damping", [False, True], ids=["exact", "ritter_split"])
def test_posteriors_of_the_linear_network(damping):
    case, *_ = problem = linear_network()
    q = fitted(problem, Kronecker(factored_damping=damping))
    name = "ritter_split" if damping else "exact"
    for layer, part in enumerate(q.gaussian.precision.parts):
        case.check(f"posterior.{layer}.logdet_{name}", part.logdet)
        case.check(f"posterior.{layer}.cov_diag_{name}", part.variance())
    total = sum(case.at(f"posterior.{layer}.logdet_{name}") for layer in range(2))
    assert float(q.gaussian.precision.logdet) == pytest.approx(total, rel=1e-10)


def test_the_factors_of_the_linear_network_are_exact_and_so_corrected():
    case, *_ = problem = linear_network()
    ggn, alpha = case.expected["ggn_full"], case.inputs["alpha"]
    for structure in (Kronecker(), CorrectedKronecker()):
        matrix = as_matrix(fitted(problem, structure).gaussian.precision)
        for block in (slice(0, 6), slice(6, 12)):
            wanted = ggn[block, block] + alpha * torch.eye(6, dtype=FLOAT64)
            torch.testing.assert_close(matrix[block, block], wanted, rtol=1e-9, atol=1e-9)
        assert not matrix[:6, 6:].any()


STRUCTURES = {"full_ggn": Full(), "diag_ggn": Diagonal(), "kfac": Kronecker()}


@pytest.mark.parametrize("name", STRUCTURES)
def test_posteriors_of_the_softmax_network(name):
    case, *_ = problem = softmax_network()
    q = fitted(problem, STRUCTURES[name])
    case.check(f"logdet.{name}", q.gaussian.precision.logdet)
    mean, covariance = q.output_moments(case.inputs["X_test"])
    probit = q.predict(case.inputs["X_test"], integrator=po.predictive.Probit()).probs
    for row in range(2):
        case.check(f"predictive.{row}.logit_mean", mean[row])
        case.check(f"predictive.{row}.{name}.logit_cov", covariance[row])
        case.check(f"predictive.{row}.{name}.meanfield_probit", probit[row])


def test_the_bias_is_in_the_block_of_its_layer():
    """Blocks of their own for biases, as some libraries have them, give another determinant."""
    q = fitted(softmax_network(), Kronecker())
    assert abs(float(q.gaussian.precision.logdet) - -2.685033) > 1.0


def test_evidence_of_the_softmax_network():
    case, joint, theta, data = problem = softmax_network()
    for structure in (Full(), LowRank(rank=21)):
        case.check("laplace_log_evidence", fitted(problem, structure).log_evidence)
    case.check("log_lik", joint.log_likelihood(theta, po.model.Batch(*data)))
    case.check("log_prior", joint.log_prior(theta))
