"""Fixed points, hard cases, scales and refusals of expectation propagation."""

import dataclasses
import logging
import math

import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    Poisson,
    Probit,
    StudentT,
)
from posterity.methods import Conjugate, Ensemble, ExpectationPropagation, Laplace
from posterity.methods.expectation_propagation import SiteState
from posterity.model import Batch, Joint, Tempering
from posterity.networks import MLP
from posterity.numerics import Key
from posterity.priors import Laplace as LaplacePrior
from posterity.priors import Layerwise, Normal
from posterity.special.tilted import tilted_moments

FLOAT64 = torch.float64
ROWS = 8
EVERY = [Bernoulli(), Probit(), Poisson(), StudentT(3.0, 0.5)]


def rows(likelihood: Likelihood, columns: int = 2, count: int = ROWS) -> tuple[Tensor, Tensor]:
    x = Key(1).normal((count, columns), FLOAT64, "cpu")
    y = likelihood.sample(x.sum(-1, keepdim=True), Key(2))
    return torch.as_tensor(x), torch.as_tensor(y)  # the same on every device


def linear(likelihood: Likelihood, prior: object, x: Tensor, bias: bool = True) -> Joint:
    return Joint(nn.Linear(x.shape[1], 1, bias=bias).double(), likelihood, prior, len(x))


def fixed_point(joint: Joint, data: tuple[Tensor, ...], **settings: object) -> SiteState:
    """The last state of a run, by hand."""
    method = ExpectationPropagation(**settings)
    batch = joint.check(Batch(*data))
    state = method.init(joint, joint.initial(), Key(0))
    while not state.sweeps or (not method.finished(state) and state.sweeps < method.sweeps):
        state, _ = method.step(joint, state, batch, Key(0))
    return state


@pytest.mark.parametrize("likelihood", EVERY, ids=str)
def test_moments_match_at_the_fixed_point(likelihood: Likelihood) -> None:
    x, y = rows(likelihood)
    joint = linear(likelihood, Normal(1.5), x)
    state = fixed_point(joint, (x, y))
    design = torch.cat([x, torch.ones(ROWS, 1, dtype=FLOAT64)], 1)
    precision = torch.eye(3, dtype=FLOAT64) / 1.5**2 + design.mT @ (state.precision[:, None] * design)
    covariance = torch.linalg.inv(precision)
    mean = covariance @ design.mT @ state.shift
    torch.testing.assert_close(state.mean, mean, rtol=1e-9, atol=1e-9)
    for i in range(ROWS):
        own, variance = design[i] @ mean, design[i] @ covariance @ design[i]
        cavity = 1.0 / (1.0 / variance - state.precision[i])
        centre = cavity * (own / variance - state.shift[i])
        log_factor = lambda a, _, i=i: likelihood.log_prob(a.unsqueeze(-1), y[i : i + 1])  # noqa: E731
        peaks = None if likelihood.peaks(y) is None else y[i]
        _, tilted_mean, tilted_variance = tilted_moments(log_factor, centre[None], cavity[None], peaks)
        assert float(tilted_mean) == pytest.approx(float(own), abs=1e-8)
        assert float(tilted_variance) == pytest.approx(float(variance), abs=1e-8)


@pytest.mark.parametrize("likelihood", EVERY, ids=str)
def test_order_and_damping_do_not_move_the_fixed_point(likelihood: Likelihood) -> None:
    x, y = rows(likelihood)
    joint = linear(likelihood, Normal(1.5), x)
    plain, *others = (
        fixed_point(joint, (x, y), **settings) for settings in ({}, {"order": "sequential"}, {"damping": 0.5})
    )
    for other in others:
        for name in ("precision", "shift", "mean", "matrix", "log_evidence"):
            torch.testing.assert_close(getattr(other, name), getattr(plain, name), rtol=1e-7, atol=1e-7)


def test_rows_that_say_nothing_have_no_site() -> None:
    x, y = rows(Bernoulli())
    joint, weights = linear(Bernoulli(), Normal(1.0), x, bias=False), torch.ones(ROWS, dtype=FLOAT64)
    x[3], weights[5] = 0.0, 0.0
    state = fixed_point(joint, (x, y, weights))
    used = [index for index in range(ROWS) if index not in (3, 5)]
    assert state.precision[[3, 5]].tolist() == state.shift[[3, 5]].tolist() == [0.0, 0.0]
    assert bool((state.precision[used] > 0).all())
    fewer = fixed_point(dataclasses.replace(joint, num_data=ROWS - 2), (x[used], y[used]))
    torch.testing.assert_close(state.mean, fewer.mean)
    assert float(state.log_evidence) == pytest.approx(float(fewer.log_evidence) - math.log(2.0), abs=1e-9)


def test_likelihoods_to_a_power_are_those_of_a_custom_density() -> None:
    """Below 1 a row is one site of its likelihood to the power."""
    x, y = rows(Bernoulli())
    tempered = dataclasses.replace(linear(Bernoulli(), Normal(1.0), x), tempering=Tempering(0.3, 1.0))
    root = Custom(lambda f, t: 0.3 * Bernoulli().log_prob(f, t))
    one, two = fixed_point(tempered, (x, y)), fixed_point(linear(root, Normal(1.0), x), (x, y))
    torch.testing.assert_close(one.mean, two.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.log_evidence, two.log_evidence, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Probit()], ids=str)
@pytest.mark.parametrize("scale", [0.1, 10.0, 1e4])
def test_separable_labels_settle(likelihood: Likelihood, scale: float, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.as_tensor(Key(3).normal((30, 2), FLOAT64, "cpu"))
    y = (x[:, :1] - 2.0 * x[:, 1:] > 0).to(FLOAT64)
    q, _ = po.infer(ExpectationPropagation(), linear(likelihood, Normal(scale), x), (x, y))
    assert not caplog.records
    assert float(q.predict(x).log_prob(y).exp().min()) > 0.45


def test_a_label_at_forty_standard_deviations_stays_finite() -> None:
    x = torch.cat([torch.ones(400, 1), torch.full((1, 1), 40.0)]).double()
    y = torch.cat([torch.ones(400, 1), torch.zeros(1, 1)]).double()
    joint = linear(Probit(), Normal(1.0), x, bias=False)
    q, trace = po.infer(ExpectationPropagation(), joint, (x, y))
    theta = torch.linspace(-1.0, 3.0, 200_001, dtype=FLOAT64)[:, None]
    log = 400.0 * Probit().log_prob(theta, torch.ones_like(theta)) + Probit().log_prob(40.0 * theta, 0.0 * theta)
    log = log + Normal(1.0).log_prob(theta)
    mass = (log - log.max()).exp()
    mean = float((mass * theta[:, 0]).sum() / mass.sum())
    spread = float((mass * (theta[:, 0] - mean).square()).sum() / mass.sum()) ** 0.5
    assert float(trace["distance"][-1]) <= 1e-9
    assert float(q.point()) == pytest.approx(mean, abs=1e-3 * spread)
    assert float(q.gaussian.variance.sqrt()) == pytest.approx(spread, rel=1e-3)
    assert float(q.log_evidence) == pytest.approx(float(log.max() + (mass.sum() * 2e-5).log()), abs=1e-3)


def test_outliers_of_student_t_get_negative_sites() -> None:
    x, noise = (torch.as_tensor(Key(seed).normal((30, 2), FLOAT64, "cpu")) for seed in (4, 5))
    y = x.sum(-1, keepdim=True) + 0.3 * noise[:, :1]
    y[7] += 20.0
    joint = linear(StudentT(3.0, 0.3), Normal(1.0), x)
    state = fixed_point(joint, (x, y))
    kept = torch.arange(30) != 7
    without = fixed_point(dataclasses.replace(joint, num_data=29), (x[kept], y[kept]))
    assert float(state.precision[7]) < 0.0
    torch.testing.assert_close(state.mean, without.mean, rtol=0.0, atol=0.05)
    assert bool(torch.isfinite(state.log_evidence))


def test_a_run_that_did_not_settle_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    x, y = rows(Bernoulli())
    _, trace = po.infer(ExpectationPropagation(sweeps=2), linear(Bernoulli(), Normal(1.0), x), (x, y))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "did not settle: after 2 sweeps" in record.message
    assert f"{float(trace['distance'][-1]):.2g} posterior standard deviations" in record.message


def test_two_classes_are_one_logit() -> None:
    x, y = rows(Bernoulli())
    classes = Joint(nn.Linear(2, 2).double(), Categorical(), Normal(1.0), ROWS)
    one = linear(Bernoulli(), Normal(2.0**0.5), x)  # the difference of two weights has twice their variance
    pair, _ = po.infer(ExpectationPropagation(), classes, (x, y[:, 0].long()))
    single, _ = po.infer(ExpectationPropagation(), one, (x, y))
    torch.testing.assert_close(pair.log_evidence, single.log_evidence, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pair.predict(x).probs, single.predict(x).probs, rtol=1e-8, atol=1e-8)


def test_a_part_of_the_weights_and_an_offset() -> None:
    x, y = rows(Probit())
    joint = linear(Probit(), Normal(1.0), x)
    fixed = dataclasses.replace(joint, random="weight")
    start = torch.tensor([0.0, 0.0, 0.7], dtype=FLOAT64)
    q, _ = po.infer(ExpectationPropagation(), fixed, (x, y), start=start)
    shifted = Custom(lambda f, t: Probit().log_prob(f + 0.7, t))
    other, _ = po.infer(ExpectationPropagation(), linear(shifted, Normal(1.0), x, bias=False), (x, y))
    torch.testing.assert_close(q.point(), torch.cat([other.point(), start[2:]]), rtol=1e-8, atol=1e-8)
    assert float(q.log_evidence) == pytest.approx(float(other.log_evidence), abs=1e-8)


def test_the_posterior_of_earlier_rows_is_the_prior_of_later_ones() -> None:
    x, y = rows(Gaussian(0.5), count=20)
    joint = linear(Gaussian(0.5), Normal(1.0), x)
    first, _ = po.infer(ExpectationPropagation(), dataclasses.replace(joint, num_data=10), (x[:10], y[:10]))
    later = po.continued(dataclasses.replace(joint, num_data=10), first)
    second, _ = po.infer(ExpectationPropagation(), later, (x[10:], y[10:]))
    whole, _ = po.infer(Conjugate(), joint, (x, y))
    torch.testing.assert_close(second.point(), whole.point(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(first.log_evidence + second.log_evidence, whole.log_evidence, rtol=1e-9, atol=1e-9)


def evidence_at(likelihood: Likelihood, prior: object, data: tuple[Tensor, Tensor]) -> float:
    return float(fixed_point(linear(likelihood, prior, data[0]), data).log_evidence)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Probit(), Poisson()], ids=str)
def test_a_prior_scale_that_was_left_out_maximises_the_evidence(likelihood: Likelihood) -> None:
    data = rows(likelihood, count=40)
    q, trace = po.infer(ExpectationPropagation(), linear(likelihood, Normal(), data[0]), data)
    scale = float(q.joint.prior.scale)
    assert q.joint.prior.chosen == "evidence"
    assert trace["prior_scale"][-1].tolist() == pytest.approx([scale, scale])
    assert float(q.log_evidence) == pytest.approx(evidence_at(likelihood, Normal(scale), data), abs=1e-9)
    lower, upper = (evidence_at(likelihood, Normal(scale * factor), data) for factor in (0.99, 1.01))
    assert max(lower, upper) < float(q.log_evidence)
    assert abs(upper - lower) <= 1e-5  # a derivative of 0: the difference is of third order


def test_noise_and_a_part_of_the_prior_that_were_left_out() -> None:
    x, y = rows(Gaussian(0.4), count=40)
    joint = linear(Gaussian(), Layerwise({"weight": Normal(), "bias": Normal(0.3)}), x)
    q, _ = po.infer(ExpectationPropagation(), joint, (x, y))
    noise, (weight, bias) = float(q.joint.likelihood.scale), q.joint.prior.by_tensor(q.joint.network.layout)
    assert (q.joint.likelihood.chosen, weight.chosen, bias.chosen) == ("evidence", "evidence", "")
    assert float(torch.as_tensor(bias.scale).reshape(-1)[0]) == pytest.approx(0.3)
    scale = float(torch.as_tensor(weight.scale).reshape(-1)[0])

    def exact(noise: float, scale: float) -> float:
        prior = Layerwise({"weight": Normal(scale), "bias": Normal(0.3)})
        return float(po.infer(Conjugate(), linear(Gaussian(noise), prior, x), (x, y))[0].log_evidence)

    best = exact(noise, scale)
    assert float(q.log_evidence) == pytest.approx(best, abs=1e-9)
    for other in ((1.02, 1.0), (0.98, 1.0), (1.0, 1.05), (1.0, 0.95)):
        assert exact(noise * other[0], scale * other[1]) < best


@pytest.mark.parametrize("labels", [[0.0, 1.0], [1.0, 1.0]], ids=["say nothing", "separable"])
def test_scales_stay_where_the_evidence_has_no_maximum(labels: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """It grows as the prior narrows to zero, or for ever as it widens."""
    x, y = torch.ones(4, 1, dtype=FLOAT64), torch.tensor([labels], dtype=FLOAT64).repeat(2, 1).reshape(4, 1)
    q, _ = po.infer(ExpectationPropagation(), linear(Probit(), Normal(), x, bias=False), (x, y))
    assert "stay at their start: the evidence has no maximum" in caplog.text
    assert (q.joint.prior.scale, q.joint.prior.chosen) == (1.0, "start")


def test_a_start_brings_its_scales() -> None:
    data = rows(Probit(), count=40)
    joint = linear(Probit(), Normal(), data[0])
    first, _ = po.infer(ExpectationPropagation(), joint, data)
    second, _ = po.infer(ExpectationPropagation(), joint, data, start=first)
    after, _ = po.infer(Laplace(tuning=None), joint, data, start=first)
    assert first.joint.prior == second.joint.prior == after.joint.prior


def test_an_ensemble_of_them_steps_in_turn() -> None:
    x, y = rows(Bernoulli())
    joint = linear(Bernoulli(), Normal(1.0), x)
    alone, _ = po.infer(ExpectationPropagation(), joint, (x, y))
    q, _ = po.infer(Ensemble(ExpectationPropagation(), size=2), joint, (x, y))
    torch.testing.assert_close(q.predict(x).probs, alone.predict(x).probs)


REFUSALS = [
    ("curved", MLP([2, 3, 1]), Bernoulli(), Normal(1.0), "linear in its weights"),
    ("three classes", nn.Linear(2, 3), Categorical(), Normal(1.0), "one output a row, or two classes.*3 outputs"),
    ("two outputs", nn.Linear(2, 2), Heteroscedastic(), Normal(1.0), "Heteroscedastic of 2 outputs"),
    ("learnt noise", nn.Linear(2, 1), Gaussian(1.0, learn=True), Normal(1.0), "leave it out: Gaussian()"),
    ("prior", nn.Linear(2, 1), Bernoulli(), LaplacePrior(1.0), "Normal or Correlated prior"),
    ("members", nn.Linear(2, 1), Bernoulli(), Normal(torch.ones(3)), "one problem at a time"),
    (
        "bent",
        nn.Linear(2, 1),
        Custom(lambda f, t: -torch.log1p((t - f).square()).sum(-1)),
        Normal(1.0),
        "concave in the output.*Got Custom",
    ),
]


@pytest.mark.parametrize(
    ("module", "likelihood", "prior", "message"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_other_problems_are_refused_with_the_reason(
    module: nn.Module, likelihood: Likelihood, prior: object, message: str
) -> None:
    x = Key(0).normal((6, 2))
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    targets = y if isinstance(likelihood, Categorical) else y.float().unsqueeze(-1)
    with pytest.raises(ValueError, match=message):
        po.infer(ExpectationPropagation(), Joint(module, likelihood, prior, 6), (x, targets))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "random"}, "'parallel' or 'sequential'"),
        ({"damping": 1.0}, "damping"),
        ({"sweeps": 0}, "sweeps"),
        ({"tolerance": 0.0}, "tolerance"),
    ],
    ids=str,
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpectationPropagation(**settings)
