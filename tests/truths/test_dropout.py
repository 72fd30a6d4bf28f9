"""Dropout as inference against the enumeration of all masks, the KL of the relaxed mixture and tau's conventions."""

import dataclasses
import math

import pytest
import torch
from drawn import normal
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import posterity as po
from posterity.evidence import DropoutObjective, dropout_divergence, dropout_divergence_far
from posterity.likelihoods import Categorical, Gaussian
from posterity.numerics import Key
from posterity.posteriors import Dropout, Point, enumerated
from posterity.predictive import moment_matched
from posterity.priors import Normal

FLOAT64 = torch.float64
CASE = load("mc_dropout_enumeration")
SCALINGS = ["deck_no_scaling", "inverted_scaling"]


def posterior(scaling: str, likelihood: po.likelihoods.Likelihood | None = None) -> Dropout:
    """The network of the case. torch's masks are scaled, so that weights of unscaled ones are M (1 - p)."""
    inputs = CASE.inputs
    net = nn.Sequential(
        nn.Dropout(inputs["p1"]), nn.Linear(2, 3), nn.ReLU(), nn.Dropout(inputs["p2"]), nn.Linear(3, 2, bias=False)
    ).double()
    first, second = inputs["M1"].T, inputs["M2"].T
    if scaling == "deck_no_scaling":
        first, second = first * (1 - inputs["p1"]), second * (1 - inputs["p2"])
    theta = torch.cat([first.flatten(), inputs["b"], second.flatten()])
    noise = Gaussian(inputs["tau"] ** -0.5)
    joint = po.Joint(net, noise if likelihood is None else likelihood, Normal(), num_data=2)
    return Dropout(joint, theta, example=torch.zeros(1, 2, dtype=FLOAT64))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_sum_over_all_masks_is_gold(scaling):
    x, y = CASE.inputs["X"], CASE.inputs["Y"]
    q = posterior(scaling)
    exact = enumerated(q, x)
    assert exact.outputs.shape == (32, 2, 2)
    assert float(exact.weights.sum()) == pytest.approx(1.0, abs=1e-14)
    matched = exact.moment_matched()
    noise = torch.eye(2, dtype=FLOAT64) / CASE.inputs["tau"]
    probs = torch.einsum("s,snd->nd", exact.weights, exact.outputs.softmax(-1))
    for row in range(2):
        path = f"{scaling}.{row}"
        mean, covariance = exact.mean[row], exact.covariance[row]
        CASE.check(f"{path}.mean", mean)
        CASE.check(f"{path}.func_cov", covariance)
        CASE.check(f"{path}.pred_cov", covariance + noise)
        CASE.check(f"{path}.second_moment", covariance + noise + torch.outer(mean, mean))
        CASE.check(f"{path}.log_pred_density", exact.log_prob(y)[row])
        CASE.check(f"{path}.moment_matched_log_density", matched.log_prob(y)[row])
        CASE.check(f"{path}.softmax_mean", probs[row])
        printed = CASE.at(f"{path}.expected_if_deck_formula_printed")
        assert not torch.allclose(covariance + noise, printed, rtol=1e-2)
        size = CASE.inputs["T"]
        CASE.check(f"{path}.expected_plugin_var_estimator_T", noise + (1 - 1 / size) * covariance)
        CASE.check(f"{path}.weight_averaging_output", Point(q.joint, q.theta).outputs(x, 1, Key(0))[0, row])


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("one_mask_a_draw", [True, False])
def test_draws_are_those_of_the_enumeration(scaling, one_mask_a_draw):
    x, y, draws = CASE.inputs["X"], CASE.inputs["Y"], 2000
    q = dataclasses.replace(posterior(scaling), one_mask_a_draw=one_mask_a_draw)
    exact, pred = enumerated(q, x), q.predict(x, draws=draws)
    spread = exact.covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert bool(((pred.mean - exact.mean).abs() <= 5 * spread / math.sqrt(draws)).all())
    squares = (exact.outputs - exact.mean).square()
    fourth = torch.einsum("s,snd->nd", exact.weights, squares.square())
    error = (fourth - spread**4).sqrt() / math.sqrt(draws)
    assert bool((((pred.outputs - exact.mean).square().mean(0) - spread**2).abs() <= 5 * error).all())
    density = (exact.log_prob(y) - pred.log_prob(y)).abs()
    each = torch.exp(q.joint.likelihood.log_prob(exact.outputs, y))
    scatter = torch.einsum("s,sn->n", exact.weights, each.square()) - exact.log_prob(y).exp().square()
    assert bool((density <= 6 * scatter.sqrt() / exact.log_prob(y).exp() / math.sqrt(draws)).all())
    classes = q.joint.network, Categorical(), Normal(), 2
    probs = dataclasses.replace(q, joint=po.Joint(*classes)).predict(x, draws=draws).probs
    expected = torch.stack([CASE.at(f"{scaling}.{row}.softmax_mean") for row in range(2)])
    assert bool(((probs - expected).abs() <= 5 * 0.5 / math.sqrt(draws)).all())


def test_rows_of_a_draw_share_a_mask_or_do_not():
    q = posterior("deck_no_scaling")
    x = CASE.inputs["X"][:1].expand(4, 2)
    shared = q.outputs(x, 50, Key(0))
    assert torch.equal(shared, shared[:, :1].expand_as(shared))
    own = dataclasses.replace(q, one_mask_a_draw=False).outputs(x, 50, Key(0))
    assert not torch.equal(own, own[:, :1].expand_as(own))
    y = CASE.inputs["Y"]
    assert bool(torch.isfinite(q.predict(CASE.inputs["X"]).joint_log_prob(y)))
    with pytest.raises(ValueError, match="weights"):
        dataclasses.replace(q, one_mask_a_draw=False).predict(CASE.inputs["X"]).joint_log_prob(y)


@pytest.mark.parametrize("unbiased", [True, False])
def test_the_moment_matched_covariance_has_its_expectation(unbiased):
    """Over many sets of T passes: the posterior's own, or (1 - 1/T) of it."""
    x, size, sets = CASE.inputs["X"], CASE.inputs["T"], 800
    q = posterior("inverted_scaling")
    outputs = q.outputs(x, size * sets, Key(3)).view(sets, size, 2, 2)
    each = [po.predictive.DrawsPredictive(q.joint.likelihood, some) for some in outputs]
    found = torch.stack([moment_matched(one, unbiased=unbiased).covariance for one in each])
    name = "func_cov" if unbiased else "expected_plugin_var_estimator_T"
    noise = 0.0 if unbiased else torch.eye(2, dtype=FLOAT64) / CASE.inputs["tau"]
    for row in range(2):
        error = found[:, row].std(0) / math.sqrt(sets)
        away = found[:, row].mean(0) + noise - CASE.at(f"inverted_scaling.{row}.{name}")
        assert bool((away.abs() <= 5 * error).all())
    one = each[0]
    torch.testing.assert_close(moment_matched(one, unbiased=False).variance, one.variance)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_masking_units_is_masking_weights(scaling):
    """(x * keep) W^T = x (W diag(keep))^T: both ways agree for the same masks."""
    q, x = posterior(scaling), normal(Key(0), 7, 2)
    weights = q.sample(40, Key(9))
    by_units, by_weights = q.outputs(x, 40, Key(9)), q.joint.outputs(weights, x)
    torch.testing.assert_close(by_weights, by_units, rtol=1e-12, atol=1e-12)
    columns = weights[:, :6].view(40, 3, 2)
    assert bool(((columns == 0).any(1) == (columns == 0).all(1)).all())  # a whole column or none of it
    kept = (columns != 0).all(1).double().mean()
    assert float(kept) == pytest.approx(1 - CASE.inputs["p1"], abs=5 * math.sqrt(0.16 / 80))


def test_divergence_is_gold():
    case = load("dropout_mixture_kl")
    for index, row in enumerate(case.inputs["rows"]):
        mean = torch.as_tensor(row["m"], dtype=FLOAT64).requires_grad_()
        setting = {"scale": row["s"], "rate": row["p"], "length_scale": row["l"]}
        exact, far = dropout_divergence(mean, **setting), dropout_divergence_far(mean, **setting)
        path = f"rows.{index}"
        case.check(f"{path}.kl_exact", exact)
        case.check(f"{path}.kl_approx", far)
        direction = mean.detach() / mean.detach().norm().clamp_min(1e-300)
        case.check(f"{path}.dkl_dnorm_exact", torch.autograd.grad(exact, mean)[0] @ direction)
        case.check(f"{path}.dkl_dnorm_approx", torch.autograd.grad(far, mean)[0] @ direction)


def test_divergence_of_rows_far_apart_is_its_limit():
    mean = torch.tensor([[30.0, 0.0], [3.0, 4.0], [500.0, 1.0]], dtype=FLOAT64)
    exact = dropout_divergence(mean, 0.01, rate=0.3, length_scale=0.5)
    torch.testing.assert_close(exact, dropout_divergence_far(mean, 0.01, 0.3, 0.5), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("width", "multiple"), [(0.1, 5.0), (0.05, 6.0), (0.01, 7.6), (0.001, 9.7)])
def test_the_slope_of_the_limit_is_wrong_in_sign_near_zero(width, multiple):
    """For p = 0.5: the exact divergence falls with |m| up to this multiple of s, where its limit rises."""

    def slope(distance: float) -> float:
        mean = torch.tensor([distance * width], dtype=FLOAT64, requires_grad=True)
        return float(torch.autograd.grad(dropout_divergence(mean, width, rate=0.5, length_scale=1.0), mean)[0])

    assert slope(multiple - 0.15) < 0 < slope(multiple + 0.15)


def test_precision_is_gold_in_every_convention():
    case = load("dropout_precision")
    for index, row in enumerate(case.inputs["rows"]):
        setting = {"rate": row["p"], "length_scale": row["l"], "num_data": int(row["N"])}
        for halved in (True, False):
            for decay in (True, False):
                objective = DropoutObjective(halved=halved, weight_decay=decay, scaled_masks=False)
                name = f"{'half_' if halved else ''}squared_error{'_weight_decay' if decay else ''}"
                found = objective.precision(row["lam"], **setting)
                case.check(f"rows.{index}.{name}", found)
                assert objective.penalty(found, **setting) == pytest.approx(row["lam"])
        half, whole = (case.at(f"rows.{index}.{name}") for name in ("half_squared_error", "squared_error"))
        assert whole == pytest.approx(2 * half)  # the factor by which the two formulas are confused
        mean_loss = DropoutObjective(halved=False, outputs=3, scaled_masks=False)
        assert mean_loss.precision(row["lam"], **setting) == pytest.approx(whole / 3)
        scaled = DropoutObjective().precision(row["lam"], **setting)
        assert scaled == pytest.approx(half / (1 - row["p"]) ** 2)


@settings(max_examples=25, deadline=None)
@given(
    rate=st.floats(0.01, 0.95),
    length_scale=st.floats(0.01, 100.0),
    precision=st.floats(1e-3, 1e3),
    scaled_masks=st.booleans(),
)
def test_rate_and_length_scale_come_back_from_the_penalty(rate, length_scale, precision, scaled_masks):
    objective = DropoutObjective(weight_decay=True, outputs=2, scaled_masks=scaled_masks)
    penalty = objective.penalty(precision, rate=rate, length_scale=length_scale, num_data=70)
    prior = objective.length_scale(penalty, rate=rate, precision=precision, num_data=70)
    assert prior == pytest.approx(length_scale, rel=1e-10)
    found = objective.rate(penalty, precision=precision, length_scale=length_scale, num_data=70)
    assert found == pytest.approx(rate, rel=1e-10)


@pytest.mark.parametrize(("scaled_masks", "factor"), [(True, 0.5), (False, 2.0)])
def test_penalties_of_no_rate_are_refused(scaled_masks, factor):
    objective = DropoutObjective(scaled_masks=scaled_masks)
    setting = {"length_scale": 1.0, "num_data": 10}
    without = objective.penalty(3.0, rate=0.0, **setting)
    assert objective.rate(without, precision=3.0, **setting) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="for any rate"):
        objective.rate(factor * without, precision=3.0, **setting)


@pytest.mark.parametrize("scaled_masks", [True, False])
def test_the_penalty_is_the_prior_of_the_joint_in_nats(scaled_masks):
    """n tau (loss) = -(log density) up to a constant, where the prior's precision is l^2 for M and W = (1 - p) M."""
    rate, length_scale, tau, rows = 0.2, 1.5, 4.0, 5
    objective = DropoutObjective(scaled_masks=scaled_masks)
    penalty = objective.penalty(tau, rate=rate, length_scale=length_scale, num_data=rows)
    precision = length_scale**2 * (1 / (1 - rate) if scaled_masks else 1 - rate)  # of E_q log p, in these weights
    joint = po.Joint(nn.Linear(2, 1, bias=False).double(), Gaussian(tau**-0.5), Normal(precision**-0.5), rows)
    x, y = normal(Key(0), rows, 2), normal(Key(1), rows, 1)
    batch = po.model.Batch(x, y)

    def loss(theta: Tensor) -> Tensor:
        return (y - x @ theta.unsqueeze(1)).square().mean() / 2 + penalty * theta.square().sum()

    one, two = normal(Key(2), 2, 2)
    nats = joint.log_density(two, batch) - joint.log_density(one, batch)
    torch.testing.assert_close(rows * tau * (loss(one) - loss(two)), nats)
