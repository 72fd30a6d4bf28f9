"""Laplace and its linearised predictive on a 1-3-1 tanh network at a known mode."""

import math

import pytest
import torch
from goldcases import load
from matrixcases import as_matrix
from torch import nn

import posterity as po
from posterity.curvature.derivatives import derivatives


class Augmented(nn.Module):
    """f = W2 [tanh(W1 [x; 1]); 1], the parametrisation of the gold case."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(1, 4, dtype=torch.float64))

    def forward(self, x):
        ones = torch.ones_like(x[..., :1])
        hidden = torch.tanh(torch.cat([x, ones], -1) @ self.first.T)
        return torch.cat([hidden, torch.ones_like(hidden[..., :1])], -1) @ self.second.T


CURVATURES = {
    "full_hessian": po.methods.Laplace(tuning=None, curvature=po.curvature.Hessian(), batch_size=3),
    "ggn": po.methods.Laplace(tuning=None, curvature=po.curvature.GaussNewton(), batch_size=3),
    "diag_ggn": po.methods.Laplace(tuning=None, structure=po.curvature.Diagonal(), batch_size=3),
}


@pytest.mark.parametrize("name", CURVATURES)
def test_laplace_at_the_mode(name):
    case = load("glm_regression_network")
    alpha, beta, theta = case.inputs["alpha"], case.inputs["beta"], case.inputs["theta_map"]
    noise, prior = po.likelihoods.Gaussian(scale=beta**-0.5), po.priors.Normal(scale=alpha**-0.5)
    joint = po.Joint(Augmented(), noise, prior, num_data=8)
    data = (case.inputs["X"], case.inputs["y"])
    batch = po.model.Batch(data[0], data[1].unsqueeze(-1))
    value, grad, _ = joint.value_and_grad(theta, batch)
    assert grad.abs().max() < 1e-8
    constants = 4 * math.log(beta / (2 * math.pi)) + 5 * math.log(alpha / (2 * math.pi))
    case.check("neg_log_joint_without_constants", constants - value)
    q, _ = po.infer(CURVATURES[name], joint, data, start=theta, progress=False)
    case.check(f"{name}.precision", as_matrix(q.gaussian.precision))
    case.check(f"{name}.log_evidence", q.log_evidence)
    pred = q.predict(case.inputs["X_test"])
    case.check("f_test", pred.mean.squeeze(-1))
    case.check(f"{name}.func_var", pred.epistemic.squeeze(-1))
    case.check(f"{name}.total_var", pred.variance.squeeze(-1))


def test_jacobians():
    case = load("glm_regression_network")
    joint = po.Joint(Augmented(), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=8)
    (piece,) = derivatives(joint, case.inputs["theta_map"], case.inputs["X_test"])
    case.check("jacobian_test", piece.jacobian.rows().squeeze(1))
    case.check("f_test", piece.outputs.squeeze(-1))
