"""Laplace on a one-dimensional log density of one's own."""

import torch
from goldcases import load

import posterity as po


def test_mode_precision_and_normaliser():
    case = load("laplace_1d")
    k, r = case.inputs["k"], case.inputs["r"]
    density = po.Density(lambda u: k * u - r * u.exp(), {"u": ()}, dtype=torch.float64)
    sgd = po.optim.SGD(step_size=0.1, momentum=0.0)
    start, _ = po.infer(po.methods.MAP(steps=500, batch_size=None, optimizer=sgd), density, None, progress=False)
    case.check("mode", start.theta.squeeze())
    laplace = po.methods.Laplace(tuning=None, curvature=po.curvature.Hessian())
    q, _ = po.infer(laplace, density, None, start=start, progress=False)
    case.check("precision", q.precision.matrix.squeeze())
    case.check("laplace_log_normaliser", q.log_evidence)
    assert abs(case.expected["exact_log_normaliser"] - float(q.log_evidence)) < 0.02


def test_the_same_gamma_variable_through_a_constraint():
    """exp(u) ~ Gamma(k, r): the log-Jacobian of the constraint makes the two descriptions one."""
    case = load("laplace_1d")
    k, r = case.inputs["k"], case.inputs["r"]
    density = po.Density(
        lambda rate: (k - 1) * rate.log() - r * rate, {"rate": ()}, {"rate": po.model.Positive()}, dtype=torch.float64
    )
    u = torch.linspace(-1.0, 2.0, 7, dtype=torch.float64).unsqueeze(1)
    torch.testing.assert_close(density.log_density(u), (k * u - r * u.exp()).squeeze(1))
