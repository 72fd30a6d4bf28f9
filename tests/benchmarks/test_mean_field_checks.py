"""The checks that the mean-field benchmarks begin with: they pass on what is right, and fail on what is not."""

from dataclasses import dataclass

import pytest
import torch
from benchmarkfiles import load

import posterity as po
from posterity.methods.parts.gradients.estimator import Estimator
from posterity.numerics import Key

checks = load("mean_field_checks")


def test_the_plain_elbo_is_ours():
    errors = checks.against_autograd((3, 5, 4), rows=32)
    assert list(errors) == ["loss", "gradient in means", "gradient in log-scales"]
    assert max(errors.values()) < 1e-8


def test_another_objective_is_told_from_the_plain_one(monkeypatch):
    def other(module):
        return po.Joint(module, po.likelihoods.Categorical(), po.priors.Normal(scale=2.0), num_data=100)

    monkeypatch.setattr(checks, "our_joint", other)
    with pytest.raises(ValueError, match=r"not at the autograd ELBO: .*loss"):
        checks.against_autograd((3, 5, 4), rows=32)


@dataclass(frozen=True)
class Enlarged(Estimator):
    """Weight sampling whose value or gradients are too large."""

    part: str
    own = po.methods.WeightSampling()

    def data_term(self, joint, q, batch, buffers, memory, key, out=None):
        term = self.own.data_term(joint, q, batch, buffers, memory, key)
        return term._replace(**{self.part: 2.0 * getattr(term, self.part)})


def test_estimators_are_at_the_closed_form(monkeypatch):
    monkeypatch.setattr(checks, "KEYS", 100)
    assert 0.0 < checks.against_closed_form(po.methods.WeightSampling()) < 5.0
    assert checks.against_closed_form(po.methods.WeightSampling(draws=2, antithetic=True)) < 5.0


@pytest.mark.parametrize("part", ["value", "grad_mean", "grad_scale"])
def test_each_part_of_a_wrong_estimate_is_seen(monkeypatch, part):
    monkeypatch.setattr(checks, "KEYS", 400)
    with pytest.raises(ValueError, match="standard errors from the closed form"):
        checks.against_closed_form(Enlarged(part))


def test_the_closed_form_has_its_own_gradient_and_is_a_bound():
    key = Key(3)
    x, y = key.fold("x").normal((8, 2), torch.float64), key.fold("y").normal((8,), torch.float64)
    mean, log_scale = (key.fold(name).normal((2,), torch.float64).requires_grad_() for name in "ms")
    found = checks._linear_elbo(x, y, mean, log_scale)
    grads = torch.autograd.grad(-found[-1], (mean, log_scale))
    torch.testing.assert_close(found[:-1].detach(), torch.cat(grads))
    covariance = 0.25 * torch.eye(8, dtype=torch.float64) + x @ x.T
    evidence = torch.distributions.MultivariateNormal(torch.zeros(8, dtype=torch.float64), covariance).log_prob(y)
    assert -8 * found[-1].item() < evidence.item()
