"""Prior precision and noise of the linear-Gaussian model by evidence, through `infer`: MacKay's fixed point."""

import pytest
import torch
from goldcases import load
from torch import nn

import posterity as po
from posterity.evidence import Evidence, MacKay


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
