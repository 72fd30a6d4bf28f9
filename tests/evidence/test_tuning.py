"""Searches for hyper-parameters: they find the maximum of the evidence, or change nothing and say why."""

import dataclasses
import math
from functools import cache
from unittest import mock

import pytest
import torch
from contracts.cases import classification, labels, network, numbers
from evidence.test_marginal import linear, marginal_of_linear, mode, rows, tensor
from goldcases import load
from scipy.optimize import minimize

import posterity as po
from posterity.curvature import GaussNewton
from posterity.evidence import (
    Evidence,
    MacKay,
    Marginal,
    PerLayer,
    PerTensor,
    Shared,
    ValidationGrid,
    residual_sums,
    tuned_joint,
)
from posterity.likelihoods import Gaussian, StudentT
from posterity.model import Batch
from posterity.numerics import Key
from posterity.numerics.layout import Block
from posterity.precisions import BlockDiagonal, Dense, Diagonal, Kronecker, LowRank
from posterity.priors import FanIn, Layerwise, Normal

FLOAT64 = torch.float64


def of_network(joint, theta, batch, groups=None, diagonal=False):
    """The marginal at theta, by the dense Gauss-Newton matrix or its diagonal."""
    curvature = GaussNewton().matrix(joint, theta, batch, None)
    prior = joint.bound_prior.precision(joint.split(theta)[0])
    prior = prior if joint.random_indices is None else prior[joint.random_indices]
    precision = Diagonal(curvature.diagonal(), prior) if diagonal else Dense(curvature, prior)
    residuals = residual_sums(joint.likelihood, joint.outputs(theta, batch.inputs), batch)
    return Marginal.of(joint, theta, precision, joint.log_likelihood(theta, batch), residuals, groups)


def best(marginal, noise):
    """Logs of the hyper-parameters at the maximum, by Nelder-Mead, which knows no gradient."""
    count = len(marginal.names)

    def negative(logs):
        point = torch.tensor(logs, dtype=FLOAT64)
        return -float(marginal.log_evidence(point[:count].exp(), point[count].exp() if noise else None))

    start = [*marginal.prior_precision.log().tolist(), *([math.log(marginal.noise.scale)] if noise else [])]
    options = {"xatol": 1e-8, "fatol": 1e-11, "maxfev": 20_000, "maxiter": 20_000}
    found = minimize(negative, start, method="Nelder-Mead", options=options)
    assert found.success
    return found.x, -found.fun


@cache
def regression_network(tempering=None, random="*", mean=0.0):
    x, y = numbers(FLOAT64)
    joint = po.Joint(
        network([3, 4, 1], FLOAT64), Gaussian(0.6), Normal(0.7, mean), 20, tempering or po.Tempering.bayes(), random
    )
    q, _ = po.infer(po.methods.MAP(steps=400, batch_size=None), joint, (x, y), progress=False)
    return joint, q.point(), Batch(x, y)


PROBLEMS = {
    "shared": (Shared(), False, {}),
    "shared, diagonal": (Shared(), True, {}),
    "layers": (PerLayer(), False, {}),
    "layers, diagonal": (PerLayer(), True, {}),
    "tensors": (PerTensor(), True, {}),
    "prior mean": (PerLayer(), False, {"mean": 0.4}),
    "tempered": (Shared(), False, {"tempering": po.Tempering(0.7, 1.3)}),
    "points": (Shared(), False, {"random": "*.weight"}),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_maximum_on_a_network_is_that_of_nelder_mead(name):
    groups, diagonal, options = PROBLEMS[name]
    marginal = of_network(*regression_network(**options), groups, diagonal)
    tuned = Evidence(groups).tune(marginal)
    expected, value = best(marginal, noise=True)
    assert tuned.succeeded
    assert tuned.evaluations <= 40
    assert tuned.before == pytest.approx(float(marginal.log_evidence()), abs=1e-12)
    assert tuned.after >= value - 1e-9
    found = [*tuned.prior_precision.log().tolist(), math.log(tuned.noise_scale)]
    assert found == pytest.approx(list(expected), abs=2e-5)


@pytest.mark.parametrize("factor", [1e-8, 1e-3, 1e3, 1e8])
@pytest.mark.parametrize("groups", [Shared(), PerTensor()], ids=repr)
def test_it_is_found_from_afar(factor, groups):
    """The evidence is concave in the logs: wherever the search begins, it ends at the same point."""
    joint, theta, batch = regression_network()
    near = Evidence(groups).tune(of_network(joint, theta, batch, groups))
    far = po.Joint(joint.network, Gaussian(0.6 * factor**0.25), Normal(0.7 * factor**-0.5), 20)
    tuned = Evidence(groups).tune(of_network(far, theta, batch, groups))
    assert tuned.succeeded
    assert tuned.evaluations <= 60
    torch.testing.assert_close(tuned.prior_precision, near.prior_precision, rtol=1e-4, atol=0.0)
    assert tuned.noise_scale == pytest.approx(near.noise_scale, rel=1e-4)


def test_classification_has_no_noise():
    joint, (x, y) = classification(FLOAT64), labels(FLOAT64)
    q, _ = po.infer(po.methods.MAP(steps=300, batch_size=None), joint, (x, y), progress=False)
    marginal = of_network(joint, q.point(), Batch(x, y))
    tuned = Evidence().tune(marginal)
    expected, _ = best(marginal, noise=False)
    assert tuned.noise_scale is None
    assert math.log(tuned.prior_precision) == pytest.approx(expected[0], abs=1e-5)
    after = tuned_joint(joint, tuned)
    assert after.likelihood is joint.likelihood
    assert isinstance(after.prior, Normal)
    assert after.prior.scale == pytest.approx(float(tuned.prior_precision) ** -0.5, rel=1e-15)


def test_noise_can_be_left_out():
    marginal = of_network(*regression_network())
    tuned = Evidence(noise=False).tune(marginal)
    assert tuned.noise_scale == 0.6
    expected, _ = best(dataclasses.replace(marginal, noise=None), noise=False)
    assert math.log(tuned.prior_precision) == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize("name", PROBLEMS)
def test_mackay_ends_where_the_evidence_is_largest(name):
    groups, diagonal, options = PROBLEMS[name]
    marginal = of_network(*regression_network(**options), groups, diagonal)
    slow, quick = MacKay(groups).tune(marginal), Evidence(groups).tune(marginal)
    assert slow.succeeded
    torch.testing.assert_close(slow.prior_precision, quick.prior_precision, rtol=1e-4, atol=0.0)
    assert slow.noise_scale == pytest.approx(quick.noise_scale, rel=1e-4)
    assert slow.after == pytest.approx(quick.after, abs=1e-6)


def gold(case, alpha, beta):
    """The marginal of the gold regression at its mode under (alpha, beta)."""
    design, targets, scale = case.inputs["X"], case.inputs["y"], beta**-0.5
    joint = linear(2, Gaussian(scale), Normal(alpha**-0.5), len(targets))
    return joint, marginal_of_linear(joint, mode(design, targets, alpha, scale), design, targets)


def test_mackay_takes_the_gold_steps():
    case = load("hyperparameter_em")
    alpha, beta = case.inputs["alpha0"], case.inputs["beta0"]
    for index in range(3):
        _, marginal = gold(case, alpha, beta)
        update = MacKay().step(marginal, marginal.prior_precision, marginal.noise.scale)
        case.check(f"mackay_iterations.{index}.gamma", update.effective[0])
        alpha, beta = float(update.prior_precision), float(update.noise_scale) ** -2
        case.check(f"mackay_iterations.{index}.alpha", alpha)
        case.check(f"mackay_iterations.{index}.beta", beta)


def test_a_tempered_step_of_mackay_by_hand():
    design, targets = rows()
    joint = linear(3, Gaussian(0.5), Normal(2.0), 12, tempering=po.Tempering(0.6, 1.5))
    theta = mode(design, targets, 0.25, 0.5, likelihood_power=0.6, prior_power=1.5)
    marginal = marginal_of_linear(joint, theta, design, targets)
    update = MacKay().step(marginal, marginal.prior_precision, 0.5)
    curvature = 0.6 * design.T @ design / 0.25
    covariance = (curvature + 1.5 * 0.25 * torch.eye(3, dtype=FLOAT64)).inverse()
    alpha = (1.5 * 3 - 1.5 * 0.25 * covariance.trace()) / (1.5 * theta.square().sum())
    beta = (0.6 * 12 - (curvature @ covariance).trace()) / (0.6 * (targets - design @ theta).square().sum())
    torch.testing.assert_close(update.prior_precision, alpha.reshape(1))
    torch.testing.assert_close(update.noise_scale, beta**-0.5)
    only = MacKay().step(marginal, marginal.prior_precision)
    assert only.noise_scale is None
    torch.testing.assert_close(only.prior_precision, alpha.reshape(1))


def test_mackay_says_when_there_is_no_next_step():
    design, targets = rows()
    marginal = marginal_of_linear(
        linear(3, Gaussian(0.5), Normal(), 12), torch.zeros(3, dtype=FLOAT64), design, targets
    )
    with pytest.raises(ValueError, match="no next step"):
        MacKay().step(marginal, marginal.prior_precision)


@pytest.mark.parametrize("tuning", [Evidence(), MacKay()], ids=lambda tuning: type(tuning).__name__)
def test_mode_and_hyper_parameters_in_turn_reach_the_gold_limit(tuning):
    case = load("hyperparameter_em")
    alpha, beta = case.inputs["alpha0"], case.inputs["beta0"]
    for _ in range(12):
        joint, marginal = gold(case, alpha, beta)
        tuned = tuning.tune(marginal)
        after = tuned_joint(joint, tuned)
        alpha, beta = after.prior.scale**-2, after.likelihood.scale**-2
    case.check("limit.alpha", alpha)
    case.check("limit.beta", beta)
    case.check("limit.log_evidence", tuned.after)


def failing():
    design, targets = rows()
    theta = mode(design, targets, 1.0, 0.5)
    joint = linear(3, Gaussian(0.5), Normal(), 12)
    yield (
        "at the prior mean",
        marginal_of_linear(joint, torch.zeros(3, dtype=FLOAT64), design, targets),
        "prior precision",
    )
    exact = linear(3, Gaussian(0.5), Normal(), 12)
    yield "no residuals", marginal_of_linear(exact, theta, design, design @ theta), "noise"
    fine = marginal_of_linear(joint, theta, design, targets)
    yield "not finite", dataclasses.replace(fine, log_likelihood=torch.tensor(math.nan)), "finite"
    bent = Marginal(
        **{
            **vars(fine),
            "precision": Diagonal(tensor(-0.9, 1.0, 1.0), tensor(1.0, 1.0, 1.0)),
            "pattern": tensor(0.5, 1.0, 1.0),
        }
    )
    yield "indefinite", bent, "finite"


@pytest.mark.parametrize("tuning", [Evidence(), MacKay()], ids=lambda tuning: type(tuning).__name__)
@pytest.mark.parametrize(("name", "marginal", "why"), [pytest.param(*case, id=case[0]) for case in failing()])
def test_a_failed_search_changes_nothing_and_says_so_once(tuning, name, marginal, why, caplog):
    tuned = tuning.tune(marginal)
    assert not tuned.succeeded
    assert torch.equal(tuned.prior_precision, marginal.prior_precision)
    assert tuned.noise_scale == marginal.noise.scale
    assert tuned.before == tuned.after or math.isnan(tuned.before)
    assert why in tuned.reason
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.name == "posterity"
    assert record.getMessage() == f"The hyper-parameters stay as they were: {tuned.reason}"
    joint = linear(3, Gaussian(0.5), Normal(), 12)
    assert tuned_joint(joint, tuned) is joint


def test_a_search_that_runs_out_of_evaluations_changes_nothing(caplog):
    marginal = of_network(*regression_network())
    for tuning in (Evidence(max_evaluations=2), MacKay(max_steps=1)):
        tuned = tuning.tune(marginal)
        assert not tuned.succeeded
        assert torch.equal(tuned.prior_precision, marginal.prior_precision)
    assert len(caplog.records) == 2


def test_one_group_at_infinity_is_named(caplog):
    joint, theta, batch = regression_network()
    last = joint.network.layout.slices[-1]
    theta = theta.clone()
    theta[last.offset : last.offset + last.size] = 0.0
    tuned = Evidence(PerTensor()).tune(of_network(joint, theta, batch, PerTensor()))
    assert not tuned.succeeded
    assert last.name in caplog.text


def test_other_priors_are_not_tuned_but_their_noise_is(caplog):
    design, targets = rows()
    joint = linear(3, Gaussian(0.5), po.priors.StudentT(degrees=4.0), 12)
    tuned = Evidence().tune(marginal_of_linear(joint, mode(design, targets, 1.0, 0.5), design, targets))
    assert "only normal priors have one to tune" in caplog.text
    assert tuned.succeeded
    assert tuned.prior_precision.numel() == 0
    assert tuned.after > tuned.before
    after = tuned_joint(joint, tuned)
    assert after.prior is joint.prior
    assert after.likelihood == Gaussian(tuned.noise_scale)


def test_with_nothing_to_tune_everything_stays(caplog):
    joint = linear(3, StudentT(scale=0.5), po.priors.StudentT(degrees=4.0), 12)
    marginal = Marginal.of(joint, torch.ones(3, dtype=FLOAT64), Diagonal(torch.ones(3)), tensor(-3.0)[0])
    tuned = Evidence().tune(marginal)
    assert tuned.succeeded
    assert tuned.before == tuned.after
    assert tuned_joint(joint, tuned).likelihood is joint.likelihood


PRIORS = {
    "number": Normal(0.7, 0.2),
    "each weight": Normal(torch.linspace(0.5, 2.0, 21, dtype=FLOAT64).unsqueeze(0)),
    "means": Normal(0.7, torch.linspace(-0.5, 0.5, 21, dtype=FLOAT64)),
    "layerwise": Layerwise({"*.bias": Normal(2.0, 0.1), "*": Normal(0.8)}),
    "fans": Layerwise({"*": FanIn(1.5)}),
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
@pytest.mark.parametrize("groups", [Shared(), PerLayer(), PerTensor()], ids=repr)
def test_the_tuned_joint_has_the_evidence_that_was_found(prior, groups):
    """Its own marginal, made anew with its curvature, is at its optimum with the same value."""
    start, theta, batch = regression_network()
    joint = po.Joint(start.network, Gaussian(0.6), prior, 20)
    tuned = Evidence(groups).tune(of_network(joint, theta, batch, groups))
    after = tuned_joint(joint, tuned)
    again = of_network(after, theta, batch, groups)
    assert float(again.log_evidence()) == pytest.approx(tuned.after, abs=1e-9)
    torch.testing.assert_close(again.prior_precision, tuned.prior_precision)
    pattern = after.bound_prior.precision(theta) / joint.bound_prior.precision(theta)
    index = groups.index(joint.network.layout)
    for group in range(len(tuned.names)):
        torch.testing.assert_close(pattern[index == group], pattern[index == group][0].expand((index == group).sum()))
    assert after.likelihood == Gaussian(tuned.noise_scale)
    if len(tuned.names) == 1:
        assert type(after.prior) is type(prior)
    else:
        assert isinstance(after.prior, Layerwise)
    assert po.Joint(start.network, after.likelihood, after.prior, 20).bound_prior == after.bound_prior


def grid_marginal():
    design, targets = rows()
    return marginal_of_linear(linear(3, Gaussian(0.5), Normal(), 12), mode(design, targets, 1.0, 0.5), design, targets)


def test_the_grid_picks_the_best_and_passes_over_what_fails():
    def score(alpha):
        if alpha > 50:
            raise po.errors.NotPositiveDefinite("bent")
        return math.nan if alpha < 0.05 else (math.log10(alpha) - 1.0) ** 2

    tuned = ValidationGrid(0.01, 100.0, 5).tune(grid_marginal(), score)
    assert tuned.succeeded
    assert float(tuned.prior_precision) == pytest.approx(10.0)
    assert (tuned.before, tuned.after) == pytest.approx((-1.0, 0.0), abs=1e-12)
    assert tuned.noise_scale == 0.5


def test_the_grid_keeps_the_present_if_nothing_is_better():
    tuned = ValidationGrid(0.01, 500.0, 4).tune(grid_marginal(), lambda alpha: abs(alpha - 1.0))
    assert float(tuned.prior_precision) == 1.0


def test_a_grid_without_a_score_changes_nothing(caplog):
    tuned = ValidationGrid().tune(grid_marginal(), lambda alpha: math.nan)
    assert not tuned.succeeded
    assert float(tuned.prior_precision) == 1.0
    assert "stay as they were" in caplog.text


def test_the_end_of_the_grid_is_said(caplog):
    tuned = ValidationGrid(0.01, 100.0, 5).tune(grid_marginal(), lambda alpha: -alpha)
    assert float(tuned.prior_precision) == pytest.approx(100.0)
    assert "widen it" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Evidence(tolerance=0.0), r"Evidence.tolerance"),
        (lambda: Evidence(max_evaluations=0), r"Evidence.max_evaluations"),
        (lambda: MacKay(max_steps=0), r"MacKay.max_steps"),
        (lambda: ValidationGrid(lowest=2.0, highest=1.0), r"ValidationGrid.lowest must be below"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_one_group_factors_nothing():
    """Eigenvalues once; then each evaluation is linear in the number of weights."""
    size = 300
    root = Key(0).normal((size, 100), FLOAT64)
    joint = linear(size, Gaussian(0.5), Normal(), 500)
    theta = Key(1).normal((size,), FLOAT64)
    precision = Dense(root @ root.T, torch.ones(size, dtype=FLOAT64))
    marginal = Marginal.of(joint, theta, precision, tensor(-300.0)[0], tensor(100.0, 500.0))
    with mock.patch.object(torch.linalg, "cholesky_ex") as factored:
        assert Evidence().tune(marginal).succeeded
    factored.assert_not_called()


def structures():
    """Curvatures of the 3-4-1 network's size in each structure, each with its own dense matrix."""
    prior = torch.full((21,), 0.7**-2, dtype=FLOAT64)
    layers = Block(("0.weight", "0.bias"), 4, 3, 0, 12), Block(("2.weight", "2.bias"), 1, 4, 16, 20)

    def square(size, seed):
        root = Key(seed).normal((size, size + 2), FLOAT64)
        return root @ root.T

    parts = [
        Kronecker.of(square(b.rows, 1).unsqueeze(0), square(b.width, 2).unsqueeze(0), prior[: b.size]) for b in layers
    ]
    yield "kronecker", BlockDiagonal(layers, tuple(parts), 21)
    yield "low rank", LowRank(2.0 * Key(3).normal((5, 21), FLOAT64), prior)
    blocks = [Dense(square(b.size, 4), prior[: b.size]) for b in layers]
    yield "blocks", BlockDiagonal(layers, tuple(blocks), 21)


@pytest.mark.parametrize("groups", [Shared(), PerLayer(), PerTensor()], ids=repr)
@pytest.mark.parametrize("precision", [pytest.param(p, id=name) for name, p in structures()])
def test_every_structure_gives_what_its_dense_matrix_gives(precision, groups):
    joint, theta, batch = regression_network()
    matrix = precision.covariance().inverse() - torch.eye(21, dtype=FLOAT64) * 0.7**-2
    structured = dataclasses.replace(of_network(joint, theta, batch, groups), precision=precision)
    dense = dataclasses.replace(structured, precision=Dense(0.5 * (matrix + matrix.T), torch.ones(21, dtype=FLOAT64)))
    first, second = Evidence(groups).tune(structured), Evidence(groups).tune(dense)
    assert first.succeeded
    assert first.after == pytest.approx(second.after, abs=1e-6)
    torch.testing.assert_close(first.prior_precision, second.prior_precision, rtol=1e-4, atol=0.0)
    assert first.noise_scale == pytest.approx(second.noise_scale, rel=1e-4)
