"""Prior precision and noise of the linear-Gaussian model by evidence: MacKay's fixed point, and EM."""

import dataclasses
import math

import pytest
import torch
from goldcases import GoldCase, load
from torch import Tensor, nn

import posterity as po
from posterity.evidence import (
    Evidence,
    Expected,
    MacKay,
    MacKayUpdate,
    NoiseScale,
    PriorScale,
    Shared,
    marginal_likelihood,
)
from posterity.posteriors import Posterior
from posterity.precisions import Diagonal


@pytest.mark.parametrize("tuning", [Evidence(), MacKay()], ids=lambda tuning: type(tuning).__name__)
@pytest.mark.parametrize("structure", [None, po.curvature.Kronecker(), po.curvature.LowRank(4)], ids=str)
def test_mode_and_hyper_parameters_in_turn_reach_the_gold_limit(tuning, structure):
    """One output and Gaussian noise, so that factors and eigenvectors are exact; the mode moves with each answer."""
    case = load("hyperparameter_em")
    design, targets = case.inputs["X"], case.inputs["y"]
    data = (design, targets.reshape(len(design), 1))
    net = nn.Linear(design.shape[1], 1, bias=False).double()
    noise = po.likelihoods.Gaussian(case.inputs["beta0"] ** -0.5)
    joint = po.Joint(net, noise, po.priors.Normal(case.inputs["alpha0"] ** -0.5), num_data=len(design))
    method = po.methods.Laplace(structure=structure, tuning=tuning, batch_size=5)
    for _ in range(12):
        mode, _ = po.infer(po.methods.Conjugate(), joint, data, progress=False)
        q, _ = po.infer(method, joint, data, start=mode, progress=False)
        joint = po.Joint(net, q.joint.likelihood, q.joint.prior, num_data=len(design))
    case.check("limit.alpha", torch.as_tensor(q.joint.prior.scale) ** -2)
    case.check("limit.beta", torch.as_tensor(q.joint.likelihood.scale) ** -2)
    case.check("limit.log_evidence", q.log_evidence)


def _problem(case: GoldCase) -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    design, targets = case.inputs["X"], case.inputs["y"]
    net = nn.Linear(design.shape[1], 1, bias=False).double()
    noise = po.likelihoods.Gaussian(case.inputs["beta0"] ** -0.5)
    joint = po.Joint(net, noise, po.priors.Normal(case.inputs["alpha0"] ** -0.5), num_data=len(design))
    return joint, (design, targets.reshape(-1, 1))


def _expected(q: Posterior, data: tuple[Tensor, Tensor]) -> Expected:
    """The squares of the residuals under a linear model: those at the mean, and the variance of its outputs."""
    q, (design, targets) = getattr(q, "gaussian", q), data
    at_mean = (targets - design @ q.mean.unsqueeze(1)).square().sum(0)
    spread = (design @ q.precision.covariance() * design).sum()
    return Expected(torch.zeros(1), at_mean + spread, torch.tensor(float(len(design))))


def _check(case: GoldCase, path: str, joint: po.Joint) -> None:
    case.check(f"{path}.alpha", joint.prior.scale**-2)
    case.check(f"{path}.beta", joint.likelihood.scale**-2)


def _updated(joint: po.Joint, q: Posterior, data: tuple[Tensor, Tensor]) -> po.Joint:
    """Prior and noise from the same posterior."""
    expected = _expected(q, data)
    return NoiseScale()(PriorScale(groups=Shared())(joint, q, expected), q, expected)


@pytest.mark.parametrize("tempering", [po.Tempering.bayes(), po.Tempering.tempered(0.3)], ids=["bayes", "tempered"])
def test_em_by_the_exact_posterior_goes_as_in_the_gold_case(tempering):
    """A tempering of the joint that the M-steps get changes nothing in them."""
    case = load("hyperparameter_em")
    joint, data = _problem(case)
    for index in range(len(case.at("em_iterations"))):
        q, _ = po.infer(po.methods.Conjugate(), joint, data, progress=False)
        case.check(f"em_iterations.{index}.log_evidence_before", q.log_evidence)
        tempered = dataclasses.replace(joint, tempering=tempering)
        joint = dataclasses.replace(_updated(tempered, q, data), tempering=joint.tempering)
        _check(case, f"em_iterations.{index}", joint)


def test_em_reaches_the_gold_limit_and_its_evidence_never_falls():
    case = load("hyperparameter_em")
    joint, data = _problem(case)
    last = -math.inf
    for _ in range(150):
        q, _ = po.infer(po.methods.Conjugate(), joint, data, progress=False)
        assert float(q.log_evidence) >= last - 1e-12
        last, joint = float(q.log_evidence), _updated(joint, q, data)
    _check(case, "limit", joint)
    case.check("limit.log_evidence", q.log_evidence)


def test_the_m_step_of_the_best_factorised_posterior():
    """Of q = prod N(m_i, 1 / precision_ii), at the exact mean, which is the optimum of mean-field VI."""
    case = load("hyperparameter_em")
    joint, data = _problem(case)
    exact, _ = po.infer(po.methods.Conjugate(), joint, data, progress=False)
    q = po.posteriors.Gaussian(joint, exact.point(), Diagonal(exact.gaussian.precision.diagonal()))
    _check(case, "meanfield_m_step", _updated(joint, q, data))


def test_mackays_updates_go_as_in_the_gold_case():
    case = load("hyperparameter_em")
    joint, data = _problem(case)
    for index in range(len(case.at("mackay_iterations"))):
        mode, _ = po.infer(po.methods.Conjugate(), joint, data, progress=False)
        q, _ = po.infer(po.methods.Laplace(tuning=None), joint, data, start=mode, progress=False)
        of = marginal_likelihood(q)
        found = MacKay().step(of, of.prior_precision, of.noise.scale)
        case.check(f"mackay_iterations.{index}.gamma", found.effective.sum())
        joint = MacKayUpdate()(joint, q)
        _check(case, f"mackay_iterations.{index}", joint)
