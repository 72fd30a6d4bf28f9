"""Log densities of Gaussians over weights, in every structure."""

import pytest
import torch
from contracts.cases import classification, labels
from torch.distributions import MultivariateNormal

import posterity as po
from posterity import curvature
from posterity.methods import MAP, Laplace
from posterity.numerics import Key

STRUCTURES = [
    curvature.Full(),
    curvature.Diagonal(),
    curvature.Kronecker(),
    curvature.BlockDiagonal(),
    curvature.LowRank(rank=4),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: type(structure).__name__)
@pytest.mark.parametrize("random", ["*", "2.*"])
def test_against_the_dense_formula(structure, random):
    joint = classification(torch.float64).with_weights(random=random)
    start, _ = po.infer(MAP(steps=100, batch_size=None), joint, labels(torch.float64))
    q, _ = po.infer(Laplace(structure=structure, tuning=None), joint, labels(torch.float64), start=start)
    theta = q.sample(6, Key(1))
    index = slice(None) if q.joint.random_indices is None else q.joint.random_indices
    dense = MultivariateNormal(q.point()[index], q.gaussian.precision.covariance())
    torch.testing.assert_close(q.log_density(theta), dense.log_prob(theta[:, index]), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(q.gaussian.entropy, dense.entropy(), rtol=1e-8, atol=1e-8)
    assert torch.equal(q.gaussian.log_density(theta), q.log_density(theta))


def test_float32_weights_have_a_float64_density():
    joint = classification(torch.float32)
    q, _ = po.infer(MAP(steps=50, batch_size=None), joint, labels(torch.float32))
    q, _ = po.infer(Laplace(tuning=None), joint, labels(torch.float32), start=q)
    theta = q.sample(5, Key(1))
    dense = MultivariateNormal(q.point().double(), q.gaussian.precision.covariance())
    torch.testing.assert_close(q.log_density(theta), dense.log_prob(theta.double()))
