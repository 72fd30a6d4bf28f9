"""Priors around pretrained weights: with the Laplace approximation against closed forms."""

import math

import pytest
import torch
from torch import nn

import posterity as po
from posterity.numerics import Key
from posterity.numerics.layout import Layout
from posterity.priors import Correlated, FanIn, Normal, around

NOISE, SCALE = 0.5, 0.3


def test_mode_and_evidence_are_those_of_linear_regression() -> None:
    generator = Key(0).generator()
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.1
    pretrained = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    mean = pretrained.weight.detach().flatten()
    for weights in (dict(pretrained.named_parameters()), mean):
        module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        joint = po.Joint(module, po.likelihoods.Gaussian(scale=NOISE), around(weights, SCALE), num_data=12)
        precision = x.T @ x / NOISE**2 + torch.eye(3, dtype=torch.float64) / SCALE**2
        mode = torch.linalg.solve(precision, x.T @ y.flatten() / NOISE**2 + mean / SCALE**2)
        train = po.methods.MAP(800, None, po.optim.Adam(0.05), schedule=po.optim.Cosine())
        found, _ = po.infer(train, joint, (x, y))
        assert torch.allclose(found.point(), mode, atol=1e-4)
        q, _ = po.infer(po.methods.Laplace(tuning=None), joint, (x, y), start=mode)
        covariance = NOISE**2 * torch.eye(12, dtype=torch.float64) + SCALE**2 * x @ x.T
        away = y.flatten() - x @ mean
        evidence = -0.5 * (away @ torch.linalg.solve(covariance, away) + torch.logdet(2.0 * math.pi * covariance))
        assert float(q.log_evidence) == pytest.approx(float(evidence), rel=1e-10)
        assert torch.allclose(q.gaussian.precision.covariance(), torch.linalg.inv(precision), rtol=1e-9)


def test_tensors_without_a_name_have_another_prior() -> None:
    layout = Layout.of({"body.weight": (2, 2), "head.weight": (1, 4)})
    prior = around({"body.weight": torch.arange(4.0).reshape(2, 2)}, 0.1, others=FanIn()).bound(layout)
    assert isinstance(prior, Normal)
    assert prior.mean.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert torch.allclose(prior.variance(torch.zeros(8)), torch.tensor([0.01] * 4 + [0.25] * 4))


def test_names_are_no_patterns() -> None:
    prior = around({"w[0]": torch.ones(2)}, 0.1)
    assert prior.bound(Layout.of({"w[0]": (2,)})).mean.tolist() == [1.0, 1.0]


def test_weights_are_copied() -> None:
    weights = torch.zeros(2)
    prior = around(weights)
    weights.fill_(5.0)
    assert prior.mean.tolist() == [0.0, 0.0]


def test_bad_weights_are_refused() -> None:
    with pytest.raises(TypeError, match=r"such as dict\(module.named_parameters\(\)\). Got"):
        around(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names no tensors"):
        around(torch.zeros(3), others=Normal())
    with pytest.raises(ValueError, match="no pattern matches tensor 'bias'"):
        around({"weight": torch.zeros(1, 1)}).bound(Layout.of({"weight": (1, 1), "bias": (1,)}))


def test_a_correlated_prior_must_fit_its_matrix_and_the_weights() -> None:
    matrix = po.precisions.Dense(torch.eye(2))
    with pytest.raises(ValueError, match=r"finite, of shape \(2,\)"):
        Correlated(torch.zeros(3), matrix)
    with pytest.raises(ValueError, match="must be finite"):
        Correlated(torch.tensor([0.0, math.nan]), matrix)
    with pytest.raises(TypeError, match=r"such as precisions.Dense\(matrix\)"):
        Correlated(torch.zeros(2), torch.eye(2))  # type: ignore[arg-type]
    prior = Correlated(torch.zeros(2), matrix)
    with pytest.raises(ValueError, match=r"for 2 weights. Got tensors of 3"):
        prior.bound(Layout.of({"w": (3,)}))
    with pytest.raises(ValueError, match=r"for 2 weights. Got theta of shape \(3,\)"):
        prior.log_prob(torch.zeros(3))
    members = Correlated(torch.zeros(3, 2), po.precisions.PerMember((matrix,) * 3))
    with pytest.raises(ValueError, match=r"theta must be \(..., 3, P\)"):
        members.log_prob(torch.zeros(2))
