"""Collapse to the prior: against the theory's numbers for wide networks, and by hand."""

import dataclasses

import pytest
import torch
from contracts.cases import classification, labels, network
from goldcases import load
from torch import nn

import posterity as po
from posterity.diagnostics import collapse
from posterity.likelihoods import Categorical
from posterity.methods import MAP, Laplace
from posterity.numerics import Key
from posterity.posteriors import Gaussian
from posterity.precisions import Dense, Diagonal
from posterity.priors import FanIn, Layerwise, Normal, StudentT

FLOAT64 = torch.float64
GOLD = load("meanfield_collapse")


def wide(width, theta):
    """One hidden layer whose neurons are all alike: theta = (ma, sa, mb1, mb2, sb1, sb2)."""
    module = nn.Sequential(nn.Linear(2, width, bias=False), nn.ReLU(), nn.Linear(width, 1, bias=False)).to(FLOAT64)
    joint = po.Joint(module, po.likelihoods.Gaussian(), Normal(GOLD.inputs["prior_var"] ** 0.5), 5)
    mean = torch.cat([theta[2:4].repeat(width), theta[:1].repeat(width)])
    scale = torch.cat([theta[4:].repeat(width), theta[1:2].repeat(width)])
    return Gaussian(joint, mean, Diagonal(scale**-2))


@pytest.mark.parametrize("row", range(5))
def test_gold_networks_collapse_as_they_get_wide(row):
    width = GOLD.at(f"rows.{row}.N")
    found = collapse(wide(width, GOLD.at(f"rows.{row}.theta")))
    GOLD.check(f"rows.{row}.kl_total", found.kl_per_weight.sum())
    assert found.sizes.tolist() == [2 * width, width]
    assert found.suggested == po.Tempering.balanced(1.0, 5, 3 * width)


def test_the_widest_gold_network_is_at_the_prior():
    shares = [collapse(wide(GOLD.at(f"rows.{row}.N"), GOLD.at(f"rows.{row}.theta"))).share for row in range(5)]
    assert shares == sorted(shares)
    assert shares[0] < 1.0
    assert shares[-1] == 1.0


@pytest.mark.parametrize("random", ["*", "2.*"])
def test_kl_is_that_of_the_prior_for_a_factorised_gaussian(random):
    prior = Layerwise({"*.bias": Normal(0.3, 0.2), "*": FanIn()})
    joint = po.Joint(network([3, 4, 2], FLOAT64), Categorical(), prior, 20, random=random)
    places = torch.arange(joint.num_weights) if joint.random_indices is None else joint.random_indices
    scale = (0.3 * Key(1).normal((len(places),), FLOAT64)).exp()
    found = collapse(Gaussian(joint, joint.initial(), Diagonal(scale**-2)))
    own_scale = joint.bound_prior.variance(joint.initial()).sqrt()[places]
    own_mean = torch.cat(
        [torch.full((part.size,), 0.2 if "bias" in part.name else 0.0) for part in joint.network.layout]
    )[places]
    theirs = torch.distributions.kl_divergence(
        torch.distributions.Normal(joint.initial()[places], scale),
        torch.distributions.Normal(own_mean.to(FLOAT64), own_scale),
    )
    torch.testing.assert_close(found.kl_per_weight, theirs)
    assert list(found.names) == [part.name for part in joint.random_slices]
    assert found.sizes.tolist() == [part.size for part in joint.random_slices]
    torch.testing.assert_close(found.kl.sum(), theirs.sum())


def test_within_a_hundredth_of_the_prior_in_mean_and_scale():
    joint = po.Joint(nn.Linear(5, 1, bias=False, dtype=FLOAT64), Categorical(), Normal(0.5, 2.0), 3)
    mean = torch.tensor([2.0, 2.0049, 2.0051, 2.0, 1.9951], dtype=FLOAT64)
    scale = torch.tensor([0.5, 0.5, 0.5, 0.506, 0.4951], dtype=FLOAT64)
    q = Gaussian(joint, mean, Diagonal(scale**-2))
    assert collapse(q).at_prior.tolist() == [True, True, False, False, True]
    assert collapse(q).share == pytest.approx(0.6)
    assert collapse(q, tolerance=0.02).share == 1.0
    assert float(collapse(q).kl_per_weight[0]) == pytest.approx(0.0, abs=1e-30)


def test_advice():
    joint = po.Joint(nn.Linear(40, 1, bias=False, dtype=FLOAT64), Categorical(), Normal(), 4)
    at_prior = Gaussian(joint, torch.zeros(40, dtype=FLOAT64), Diagonal(torch.ones(40)))
    text = str(collapse(at_prior))
    assert "collapsed at eta = 1" in text
    assert "Tempering.balanced(1.0, num_data=4, units=40) is eta = 0.1" in text
    assert text.splitlines()[1].split() == ["weight", "40", "0", "0", "100.0%"]
    cold = dataclasses.replace(joint, tempering=po.Tempering.tempered(0.01))
    assert "not above the balanced 0.1" in str(collapse(dataclasses.replace(at_prior, joint=cold)))
    learnt = dataclasses.replace(at_prior, precision=Diagonal(torch.full((40,), 9.0)))
    assert str(collapse(learnt)).endswith("0.0% of the weights are within 1% of the prior: no collapse.")


def test_marginals_of_a_laplace_posterior():
    joint = classification(FLOAT64)
    q, _ = po.infer(MAP(steps=200, batch_size=None), joint, labels(FLOAT64))
    q, _ = po.infer(Laplace(tuning=None), joint, labels(FLOAT64), start=q)
    found = collapse(q)
    marginal = Gaussian(joint, q.point(), Diagonal(1.0 / q.gaussian.precision.covariance().diagonal()))
    torch.testing.assert_close(found.kl_per_weight, collapse(marginal).kl_per_weight)
    assert not found.collapsed


def test_doors():
    joint = classification(FLOAT64)
    q = Gaussian(joint, joint.initial(), Dense(torch.eye(joint.size)))
    with pytest.raises(ValueError, match="tolerance must be a positive number"):
        collapse(q, tolerance=0.0)
    with pytest.raises(TypeError, match="Got StudentT"):
        collapse(dataclasses.replace(q, joint=dataclasses.replace(joint, prior=StudentT(3.0))))
    with pytest.raises(TypeError, match="Got 'Point'"):
        collapse(po.infer(MAP(steps=1), joint, labels(FLOAT64))[0])
    with pytest.raises(TypeError, match="holds 2 posteriors"):
        collapse(Gaussian(joint, joint.initial().expand(2, -1), Diagonal(torch.ones(2, joint.size))))
