"""Hyper-parameters of a posterior that is there already, and of one over part of the weights."""

import math

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.curvature import Diagonal, EmpiricalFisher, Full, Kronecker
from posterity.errors import BadData
from posterity.evidence import Evidence, PerTensor, ValidationGrid, marginal_likelihood, retuned
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import MAP, Conjugate, Laplace, LastLayer
from posterity.numerics import Key
from posterity.priors import Normal

ROWS = 30


def lines(noise: float = 0.2) -> tuple[Tensor, Tensor]:
    x = Key(1).normal((ROWS, 2), torch.float64)
    return x, x @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + noise * Key(2).normal((ROWS, 1), torch.float64)


def regression(learn: bool = False) -> po.Joint:
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(0.5 * Key(3).fold(name).normal(tuple(parameter.shape), torch.float64))
    return po.Joint(net, Gaussian(0.5, learn=learn), Normal(0.8), ROWS)


def classification() -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    x, _ = lines()
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(0.7 * Key(4).fold(name).normal(tuple(parameter.shape), torch.float64))
    return po.Joint(net, Categorical(), Normal(1.0), ROWS), (x, (x[:, 0] * 2).round().long().clamp(-1, 1) + 1)


@pytest.mark.parametrize("structure", [Full(), Kronecker(), Diagonal()])
@pytest.mark.parametrize("learn", [False, True])
def test_retuning_afterwards_is_tuning_in_the_fit(structure: po.curvature.Structure, learn: bool) -> None:
    joint, data = regression(learn), lines()
    start, _ = po.infer(MAP(steps=300, batch_size=None), joint, data)
    within, _ = po.infer(Laplace(structure=structure, tuning=Evidence()), joint, data, start=start)
    plain, _ = po.infer(Laplace(structure=structure, tuning=None), joint, data, start=start)
    after = retuned(plain, Evidence())
    assert math.isclose(after.joint.prior.scale, within.joint.prior.scale, rel_tol=1e-4)
    assert math.isclose(after.joint.likelihood.scale, within.joint.likelihood.scale, rel_tol=1e-4)
    assert math.isclose(float(after.log_evidence), float(within.log_evidence), rel_tol=1e-7)
    assert float(after.log_evidence) > float(plain.log_evidence)
    torch.testing.assert_close(after.predict(data[0]).variance, within.predict(data[0]).variance, rtol=1e-4, atol=0.0)


def test_the_marginal_likelihood_of_a_posterior_is_its_evidence_and_has_gradients() -> None:
    joint, data = regression(), lines()
    q, _ = po.infer(Laplace(tuning=None), joint, data, start=po.infer(MAP(steps=50, batch_size=None), joint, data)[0])
    of = marginal_likelihood(q)
    alpha = of.prior_precision.clone().requires_grad_()
    noise = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    value = of.log_evidence(alpha, noise)
    torch.testing.assert_close(value.detach(), q.log_evidence, rtol=1e-12, atol=1e-12)
    value.backward()
    step = 1e-5
    with torch.no_grad():
        by_alpha = (of.log_evidence(alpha + step, noise) - of.log_evidence(alpha - step, noise)) / (2 * step)
        by_noise = (of.log_evidence(alpha, noise + step) - of.log_evidence(alpha, noise - step)) / (2 * step)
    torch.testing.assert_close(alpha.grad.squeeze(), by_alpha, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(noise.grad, by_noise, rtol=1e-6, atol=1e-6)


def test_only_the_prior_of_random_weights_is_tuned() -> None:
    joint, data = classification()
    start, _ = po.infer(MAP(steps=400, batch_size=None), joint, data)
    q, _ = po.infer(Laplace(subset=LastLayer(), tuning=Evidence()), joint, data, start=start)
    precision = q.joint.bound_prior.precision(torch.zeros(q.joint.num_weights, dtype=torch.float64))
    assert torch.equal(precision[:15], torch.ones(15, dtype=torch.float64))  # the first layer is a point
    assert float(precision[15]) != 1.0
    assert torch.equal(precision[15:], precision[15].expand(18))
    # The same last layer as a model of its own, on the features, has the same optimum.
    alone, _ = po.infer(Laplace(tuning=None), joint.with_weights("2.*"), data, start=start)
    best = retuned(alone, Evidence())
    assert math.isclose(float(precision[15]), best.joint.prior.scale**-2, rel_tol=1e-4)


def test_the_noise_is_left_alone_where_the_curvature_does_not_go_with_it() -> None:
    joint, data = regression(), lines()
    q, _ = po.infer(Laplace(curvature=EmpiricalFisher()), joint, data)
    assert q.joint.likelihood.scale == 0.5


def test_groups_by_tensor_and_structure_that_forbids_them() -> None:
    joint, data = regression(), lines()
    start, _ = po.infer(MAP(steps=300, batch_size=None), joint, data)
    q, _ = po.infer(Laplace(tuning=None), joint, data, start=start)
    many = retuned(q, Evidence(groups=PerTensor()))
    assert float(many.log_evidence) >= float(retuned(q, Evidence()).log_evidence) - 1e-8
    assert len({prior.scale for prior in many.joint.prior.rules.values()}) > 1


def test_a_validation_grid_takes_the_best_of_its_values() -> None:
    joint, data = classification()
    start, _ = po.infer(MAP(steps=400, batch_size=None), joint, data)
    q, _ = po.infer(Laplace(tuning=None), joint, data, start=start)
    held = Key(7).normal((40, 2), torch.float64)
    rows = (held, (held[:, 0] * 2).round().long().clamp(-1, 1) + 1)
    grid = ValidationGrid(lowest=1e-2, highest=1e2, count=9)
    best = retuned(q, grid, rows)
    losses = {alpha: -float(_at(q, alpha).predict(rows[0]).log_prob(rows[1]).mean()) for alpha in (1.0, *grid.values)}
    found = min(losses, key=losses.__getitem__)
    assert math.isclose(best.joint.prior.scale**-2, found, rel_tol=1e-9)
    assert math.isclose(-float(best.predict(rows[0]).log_prob(rows[1]).mean()), losses[found], rel_tol=1e-9)


def _at(q: po.posteriors.Linearized, alpha: float) -> po.posteriors.Linearized:
    """The posterior of a fit whose prior has this precision, at the same weights."""
    joint = po.Joint(q.joint.network, q.joint.likelihood, Normal(alpha**-0.5), ROWS)
    _, data = classification()
    return po.infer(Laplace(tuning=None), joint, data, start=q.point())[0]


def test_retuning_says_what_it_needs() -> None:
    joint, data = regression(), lines()
    q, _ = po.infer(Laplace(tuning=None), joint, data)
    with pytest.raises(BadData, match="validation"):
        retuned(q, ValidationGrid())
    net = nn.Linear(2, 1).double()
    exact, _ = po.infer(Conjugate(), po.Joint(net, Gaussian(0.5), Normal(0.8), ROWS), data)
    with pytest.raises(ValueError, match=r"methods\.Laplace"):
        retuned(exact, Evidence())
