"""The log evidence as a function of its hyper-parameters, against dense formulas and exact marginals."""

import math

import pytest
import torch
from contracts.cases import network, numbers
from goldcases import load
from torch import nn

import posterity as po
from posterity.evidence import Marginal, PerLayer, PerTensor, Shared, residual_sums
from posterity.likelihoods import Gaussian, Heteroscedastic, StudentT
from posterity.model import Batch
from posterity.numerics import Key
from posterity.precisions import Dense, Diagonal
from posterity.priors import Layerwise, Normal

FLOAT64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=FLOAT64)


def linear(size, likelihood, prior, num_data, **options):
    return po.Joint(nn.Linear(size, 1, bias=False, dtype=FLOAT64), likelihood, prior, num_data, **options)


def mode(design, targets, alpha, scale, mean=0.0, likelihood_power=1.0, prior_power=1.0):
    """Mode of a linear model with prior precision alpha, a number or (R,)."""
    prior = prior_power * alpha * torch.ones(design.shape[1], dtype=FLOAT64)
    precision = likelihood_power * design.T @ design / scale**2 + torch.diag(prior)
    return torch.linalg.solve(precision, likelihood_power * design.T @ targets / scale**2 + prior * mean)


def marginal_of_linear(joint, theta, design, targets, weights=None, groups=None):
    """The marginal of a linear model, its curvature X^T X / s^2 at the joint's noise."""
    scale = float(joint.fitted(theta).likelihood.scale)
    each = torch.ones(len(targets), dtype=FLOAT64) if weights is None else weights
    outputs = (design @ theta[: joint.num_weights]).unsqueeze(1)
    rows = torch.distributions.Normal(outputs, scale).log_prob(targets.unsqueeze(1))[:, 0]
    residuals = residual_sums(joint.likelihood, outputs, Batch(design, targets.unsqueeze(1), weights))
    curvature = (each.unsqueeze(1) * design).T @ design / scale**2
    return Marginal.of(joint, theta, Dense(curvature), (each * rows).sum(), residuals, groups)


def rows(count=12, size=3, seed=0):
    design = Key(seed).normal((count, size), FLOAT64)
    return design, design @ Key(seed + 1).normal((size,), FLOAT64) + 0.4 * Key(seed + 2).normal((count,), FLOAT64)


@pytest.mark.parametrize("alpha", [0.1, 0.7, 20.0])
@pytest.mark.parametrize("scale", [0.2, 1.5])
@pytest.mark.parametrize("mean", [0.0, 0.8])
def test_at_the_mode_of_a_linear_model_it_is_the_density_of_the_targets(alpha, scale, mean):
    design, targets = rows()
    exact = torch.distributions.MultivariateNormal(
        design.sum(1) * mean, scale**2 * torch.eye(12, dtype=FLOAT64) + design @ design.T / alpha
    ).log_prob(targets)
    theta = mode(design, targets, alpha, scale, mean)
    here = linear(3, Gaussian(scale), Normal(alpha**-0.5, mean), 12)
    torch.testing.assert_close(marginal_of_linear(here, theta, design, targets).log_evidence(), exact)
    # Made at another prior and noise, and asked for these: the curvature must go with 1 / noise^2.
    elsewhere = marginal_of_linear(linear(3, Gaussian(0.5), Normal(1.3, mean), 12), theta, design, targets)
    torch.testing.assert_close(elsewhere.log_evidence(tensor(alpha), torch.tensor(scale, dtype=FLOAT64)), exact)


def test_gold_evidence():
    case = load("linear_regression")
    design, targets, alpha, scale = (
        case.inputs["X"],
        case.inputs["y"],
        case.inputs["alpha"],
        case.inputs["beta"] ** -0.5,
    )
    joint = linear(2, Gaussian(scale), Normal(alpha**-0.5), 7)
    theta = mode(design, targets, alpha, scale)
    case.check("log_evidence", marginal_of_linear(joint, theta, design, targets).log_evidence())


def dense_formula(design, targets, theta, prior, scale, mean, likelihood_power, prior_power):
    """Everything by torch.distributions and slogdet; prior (R,) and scale () may need a gradient."""
    log_likelihood = torch.distributions.Normal(design @ theta, scale).log_prob(targets).sum()
    log_prior = torch.distributions.Normal(mean, prior**-0.5).log_prob(theta).sum()
    precision = likelihood_power * design.T @ design / scale**2 + prior_power * torch.diag(prior)
    constant = 0.5 * len(theta) * math.log(2 * math.pi)
    return likelihood_power * log_likelihood + prior_power * log_prior + constant - 0.5 * torch.logdet(precision)


@pytest.mark.parametrize(
    "tempering", [po.Tempering.bayes(), po.Tempering.tempered(0.4), po.Tempering(0.5, 2.0)], ids=repr
)
@pytest.mark.parametrize("mean", [0.0, -0.5])
@pytest.mark.parametrize("groups", [Shared(), PerTensor()], ids=repr)
def test_value_and_gradient_are_those_of_the_dense_formula(tempering, mean, groups):
    x, y = numbers(FLOAT64)
    net = network([3, 1], FLOAT64)
    joint = po.Joint(net, Gaussian(0.6), Normal(0.9, mean), 20, tempering)
    theta = Key(4).normal((4,), FLOAT64)  # weight (1, 3), bias (1,): no mode
    design, targets = torch.cat([x, torch.ones(20, 1, dtype=FLOAT64)], 1), y[:, 0]
    marginal = marginal_of_linear(joint, theta, design, targets, groups=groups)
    alpha = tensor(0.3, 5.0)[: len(marginal.names)].requires_grad_()
    scale = torch.tensor(0.25, dtype=FLOAT64, requires_grad=True)
    each = alpha[0].expand(4) if len(alpha) == 1 else torch.cat([alpha[0].expand(3), alpha[1:]])
    powers = tempering.likelihood_power, tempering.prior_power
    expected = dense_formula(design, targets, theta, each, scale, mean, *powers)
    value = marginal.log_evidence(alpha, scale)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        torch.autograd.grad(value, [alpha, scale]), torch.autograd.grad(expected, [alpha, scale])
    )


def test_a_pattern_of_scales_is_kept_and_weighed_by_its_geometric_mean():
    design, targets = rows()
    scales = tensor(0.5, 1.0, 4.0).unsqueeze(0)
    theta = Key(4).normal((3,), FLOAT64)
    marginal = marginal_of_linear(linear(3, Gaussian(0.6), Normal(scales, 0.1), 12), theta, design, targets)
    torch.testing.assert_close(marginal.prior_precision, scales.prod().pow(-2 / 3).reshape(1))
    powers = 1.0, 1.0
    for factor in (1.0, 3.0):
        expected = dense_formula(design, targets, theta, factor * scales[0] ** -2, 0.6, 0.1, *powers)
        torch.testing.assert_close(marginal.log_evidence(factor * marginal.prior_precision), expected)


def test_groups_of_a_network():
    layout = po.Joint(network([3, 4, 1], FLOAT64), Gaussian(), Normal(), 5).network.layout
    assert len(Shared().names(layout)) == 1
    assert len(PerLayer().names(layout)) == 2
    assert PerTensor().names(layout) == layout.names
    assert PerLayer().index(layout).tolist() == [0] * 16 + [1] * 5
    assert PerTensor().index(layout).tolist() == [0] * 12 + [1] * 4 + [2] * 4 + [3]


@pytest.mark.parametrize("random", ["*", "*.weight", "layers.0.*"])
@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("diagonal", [False, True])
def test_at_the_present_hyper_parameters_it_is_the_evidence_of_laplace(random, learn, diagonal):
    """The prior of a learnt noise is in it, and that of the random weights alone."""
    x, y = numbers(FLOAT64)
    net = network([3, 4, 1], FLOAT64)
    if random not in ("*", "*.weight"):
        random = PerLayer().names(po.Joint(net, Gaussian(), Normal(), 20).network.layout)[0] + ".*"
    noise = Gaussian(0.4, learn=True, log_scale_prior=(-1.0, 0.5)) if learn else Gaussian(0.4)
    joint = po.Joint(
        net, noise, Layerwise({"*.bias": Normal(2.0, 0.3), "*": Normal(0.8)}), 20, po.Tempering(0.8, 1.2), random
    )
    theta = joint.initial()
    batch = Batch(x, y)
    log_likelihood, prior = joint.log_likelihood(theta, batch), joint.bound_prior.precision(joint.split(theta)[0])
    curvature = po.curvature.GaussNewton().matrix(joint, theta, batch, None)
    prior = prior if joint.random_indices is None else prior[joint.random_indices]
    structured, matrix = (Diagonal, curvature.diagonal()) if diagonal else (Dense, curvature)
    total = structured(0.8 * matrix, 1.2 * prior)
    log_prior = joint.likelihood.free_log_prior(joint.split(theta)[1])
    for part in joint.random_slices:
        own = Normal(2.0, 0.3) if part.name.endswith("bias") else Normal(0.8)
        log_prior = log_prior + own.log_prob(theta[part.offset : part.offset + part.size])
    expected = po.evidence.laplace_evidence(0.8 * log_likelihood + 1.2 * log_prior, total)
    residuals = residual_sums(noise, joint.outputs(theta, x), batch)
    for groups in (Shared(), PerTensor()):
        marginal = Marginal.of(joint, theta, structured(matrix, prior), log_likelihood, residuals, groups)
        torch.testing.assert_close(marginal.log_evidence(), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            marginal.log_evidence(marginal.prior_precision, torch.tensor(0.4, dtype=FLOAT64)),
            expected,
            rtol=1e-12,
            atol=1e-12,
        )


def test_weighted_rows_are_repeated_rows():
    design, targets = rows()
    weights = torch.tensor([1.0, 2.0, 3.0] * 4, dtype=FLOAT64)
    repeats = weights.long()
    theta = Key(4).normal((3,), FLOAT64)
    weighted = marginal_of_linear(linear(3, Gaussian(0.6), Normal(), 12), theta, design, targets, weights)
    repeated = marginal_of_linear(
        linear(3, Gaussian(0.6), Normal(), 24),
        theta,
        design.repeat_interleave(repeats, 0),
        targets.repeat_interleave(repeats),
    )
    assert weighted.noise.count == repeated.noise.count == 24.0
    for scale in (0.6, 0.2):
        hyper = tensor(2.0), torch.tensor(scale, dtype=FLOAT64)
        torch.testing.assert_close(weighted.log_evidence(*hyper), repeated.log_evidence(*hyper))


def test_residual_sums_of_members_events_and_weights():
    outputs, targets = Key(0).normal((2, 5, 3), FLOAT64), Key(1).normal((5, 3), FLOAT64)
    weights = torch.arange(5.0, dtype=FLOAT64)
    squares = ((targets - outputs).square().sum(-1) * weights).sum(-1)
    expected = torch.stack([squares, torch.full((2,), 30.0, dtype=FLOAT64)], -1)
    batch = Batch(targets, targets, weights)
    torch.testing.assert_close(residual_sums(Gaussian(), outputs, batch), expected)
    torch.testing.assert_close(residual_sums(Gaussian(), outputs[0], batch), expected[0])
    each = Batch(*(t.expand(2, *t.shape) for t in batch[:3]), per_member=True)
    torch.testing.assert_close(residual_sums(Gaussian(), outputs, each), expected)
    plain = residual_sums(Gaussian(), outputs[0, :, 0].float(), Batch(targets, targets[:, 0].float()))
    assert plain.dtype == FLOAT64
    assert plain[1] == 5
    assert residual_sums(po.likelihoods.Categorical(), outputs, Batch(targets, torch.zeros(5).long())).tolist() == [
        0,
        0,
    ]


@pytest.mark.parametrize(
    "likelihood", [StudentT(scale=0.5), Gaussian(scale=(0.5, 0.6)), Heteroscedastic()], ids=lambda x: type(x).__name__
)
def test_other_noise_is_left_alone_and_said(likelihood, caplog):
    outputs = 2
    joint = po.Joint(network([3, outputs], FLOAT64), likelihood, Normal(), 5)
    with caplog.at_level("INFO", logger="posterity"):
        marginal = Marginal.of(joint, joint.initial(), Diagonal(torch.ones(8)), tensor(0.0)[0], tensor(1.0, 5.0))
    assert marginal.noise is None
    assert "noise is left as it is" in caplog.text
    with pytest.raises(ValueError, match="no noise of one scale"):
        marginal.log_evidence(None, torch.tensor(0.1))


def test_a_prior_that_is_not_normal_is_a_constant():
    design, targets = rows()
    joint = linear(3, Gaussian(0.5), po.priors.StudentT(degrees=4.0), 12)
    theta = mode(design, targets, 1.0, 0.5)
    marginal = marginal_of_linear(joint, theta, design, targets)
    log_joint = joint.log_density(theta, Batch(design, targets.unsqueeze(1)))
    precision = Dense(design.T @ design / 0.25, joint.bound_prior.precision(theta))
    assert marginal.names == ()
    torch.testing.assert_close(marginal.log_evidence(), po.evidence.laplace_evidence(log_joint, precision))


def test_members_are_refused():
    joint = linear(3, Gaussian(0.5), Normal(), 12)
    with pytest.raises(ValueError, match=r"joint.member\(i\)"):
        Marginal.of(joint, torch.zeros(2, 3, dtype=FLOAT64), Diagonal(torch.ones(3)), torch.zeros(2))


@pytest.mark.parametrize("kind", ["student-t", "a scale for each output", "one scale, not asked for"])
def test_a_learnt_noise_that_is_not_tuned_keeps_its_prior_in_the_evidence(kind):
    learnt = {"learn": True, "log_scale_prior": (-1.0, 0.5)}
    likelihood = {
        "student-t": StudentT(scale=0.5, **learnt),
        "a scale for each output": Gaussian(scale=(0.5, 0.6), **learnt),
        "one scale, not asked for": Gaussian(scale=0.5, **learnt),
    }[kind]
    joint = po.Joint(network([3, 2], FLOAT64), likelihood, Normal(0.7), 5, po.Tempering(1.0, 1.5))
    theta = joint.initial()
    residuals = tensor(1.0, 10.0) if kind != "one scale, not asked for" else None
    marginal = Marginal.of(joint, theta, Diagonal(torch.ones(8)), tensor(-3.0)[0], residuals)
    precision = Diagonal(torch.ones(8), torch.full((8,), 1.5 * 0.7**-2))
    expected = po.evidence.laplace_evidence(-3.0 + 1.5 * joint.log_prior(theta), precision)
    torch.testing.assert_close(marginal.log_evidence(), expected)
