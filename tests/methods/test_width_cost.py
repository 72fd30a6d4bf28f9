"""What the width of a posterior costs: closed forms, the claim about left-out rows, and when a warning comes."""

import logging
import math

import pytest
import torch
from torch import nn

from posterity import infer
from posterity.curvature import Kronecker
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import MAP, SWAG, Laplace, MeanField, OnlineLaplace
from posterity.methods.parts.width_cost import measured_width_cost, that_predicts, width_cost
from posterity.model import Batch, Joint
from posterity.model.data import as_data
from posterity.networks import MLP
from posterity.numerics import Key
from posterity.optim import Adam
from posterity.posteriors import Gaussian as GaussianPosterior
from posterity.posteriors import Linearized
from posterity.precisions import Dense, Diagonal
from posterity.priors import FanIn, Normal

NOISE = 0.5


def normal(key: Key, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same numbers on every device."""
    return key.normal(shape, dtype, "cpu").to(torch.get_default_device())


def regression(rows: int, columns: int = 3) -> tuple[Joint, Batch, torch.Tensor, torch.Tensor]:
    """A linear regression without intercept, with the mean and covariance of its exact posterior under N(0, 1)."""
    key = Key(0)
    x = normal(key.fold("x"), (rows, columns), torch.float64)
    y = x.sum(1, keepdim=True) + NOISE * normal(key.fold("y"), (rows, 1), torch.float64)
    joint = Joint(nn.Linear(columns, 1, bias=False).double(), Gaussian(scale=NOISE), Normal(scale=1.0), rows)
    covariance = torch.linalg.inv(x.T @ x / NOISE**2 + torch.eye(columns, dtype=torch.float64))
    return joint, Batch(x, y), (covariance @ x.T @ y / NOISE**2).squeeze(1), covariance


def log_normal(away: torch.Tensor, variance: torch.Tensor | float) -> torch.Tensor:
    variance = torch.as_tensor(variance, dtype=away.dtype)
    return -0.5 * (away.square() / variance + variance.log() + math.log(2 * math.pi))


class Curved(nn.Module):
    """A linear layer whose outputs bend by so little that closed forms of linear ones hold."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.layer = nn.Linear(columns, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(x)
        return outputs + 0.01 * outputs.square()


def exact_terms(rows: Batch, mean: torch.Tensor, covariance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Residuals at the mean, and variances of the outputs."""
    away = (rows.targets - rows.inputs @ mean[:, None]).squeeze(1)
    return away, torch.einsum("ni,ij,nj->n", rows.inputs, covariance, rows.inputs)


@pytest.mark.parametrize("kind", ["linearized", "drawn"])
def test_left_out_rows_of_a_linear_regression(kind):
    joint, rows, mean, covariance = regression(60)
    q = GaussianPosterior(joint, mean, Dense(torch.linalg.inv(covariance)), {})
    away, spread = exact_terms(rows, mean, covariance)
    leverage = spread / NOISE**2
    away, spread = away / (1 - leverage), spread / (1 - leverage)
    each = log_normal(away, NOISE**2) - log_normal(away, NOISE**2 + spread)
    cost = width_cost(Linearized(joint, q) if kind == "linearized" else q, rows, 100)
    assert cost.nats == pytest.approx(float(each.mean()), abs=1e-9)
    assert cost.error >= float(each.std()) / math.sqrt(60) - 1e-9
    some = torch.arange(60, dtype=torch.float64) < 20
    part = width_cost(Linearized(joint, q), rows._replace(weights=some.double()), 100)
    assert part.nats == pytest.approx(float(each[some].mean()), abs=1e-9)


def test_rows_of_the_fit_where_outputs_bend():
    """To second order the difference is that of left-out rows, and draws agree with the closed form."""
    _, rows, mean, covariance = regression(200)
    module = Curved(3).double()
    joint = Joint(module, Gaussian(scale=NOISE), Normal(scale=1.0), 200)
    q = GaussianPosterior(joint, mean, Dense(torch.linalg.inv(covariance)), {})
    outputs = rows.inputs @ mean[:, None]
    bent = Batch(rows.inputs, rows.targets + 0.01 * outputs.square())
    closed = width_cost(Linearized(joint, q), bent, 0)
    away, spread = exact_terms(rows, mean, covariance)
    plain = log_normal(away, NOISE**2) - log_normal(away, NOISE**2 + spread)
    leverage = spread / NOISE**2
    without, wider = away / (1 - leverage), spread / (1 - leverage)
    lost = log_normal(away, NOISE**2) - log_normal(without, NOISE**2)
    left_out = log_normal(without, NOISE**2) - log_normal(without, NOISE**2 + wider)
    assert closed.nats == pytest.approx(float(plain.mean()), abs=1e-3)
    assert float((plain - left_out).mean().abs()) < 0.1 * float(lost.mean())
    fine, coarse = width_cost(q, bent, 4_000), width_cost(q, bent, 100)
    assert abs(fine.nats - closed.nats) < 5 * fine.error
    assert abs(coarse.nats - closed.nats) < 5 * coarse.error


def classes() -> tuple[Joint, tuple[torch.Tensor, torch.Tensor]]:
    """A logistic regression that is right: weights from the prior, classes from the likelihood."""
    x, weights, bias = normal(Key(1), (120, 2)), normal(Key(2), (2, 2)), normal(Key(3), (2,))
    chances = (x @ weights.T + bias).softmax(-1)
    y = (Key(4).uniform((120,), device="cpu").to(chances) < chances[:, 1]).long()
    return Joint(nn.Linear(2, 2), Categorical(), Normal(scale=1.0), 120), (x, y)


@pytest.mark.parametrize(("scale", "warned"), [(0.05, False), (3.0, True)])
def test_a_posterior_is_doubted_where_it_is_too_wide(scale, warned, caplog):
    joint, data = classes()
    mode, _ = infer(MAP(), joint, data, progress=False)
    q = GaussianPosterior(joint, mode.point(), Diagonal(torch.full((6,), scale**-2, dtype=torch.float64)), {})
    with caplog.at_level(logging.WARNING, "posterity"):
        info = measured_width_cost("Trial", joint, lambda: q, as_data(data), 10**6)
        again = measured_width_cost("Trial", joint, lambda: q, as_data(data), 10**6)
    assert ("worse than its mean" in caplog.text) == warned
    assert (float(info["width_cost"]) > 0.005) == warned
    assert torch.equal(info["width_cost"], again["width_cost"])


@pytest.mark.parametrize(("way", "remedy"), [("", "Leave the scales of"), ("evidence", "rows that it has not seen")])
def test_the_remedy_knows_who_chose_the_scales(way, remedy, caplog, monkeypatch):
    monkeypatch.setattr("posterity.methods.parts.width_cost.WIDE", math.inf)  # left-out rows have no say
    joint, data = classes()
    mode, _ = infer(MAP(), joint, data, progress=False)
    joint = Joint(joint.network.module, Categorical(), Normal(scale=1.0, chosen=way), 120)
    wide = Diagonal(torch.full((6,), 0.1, dtype=torch.float64))
    q = Linearized(joint, GaussianPosterior(joint, mode.point(), wide, {}))
    with caplog.at_level(logging.WARNING, "posterity"):
        that_predicts(q, Batch(*data))
    assert "rows of the fit worse than the weights alone" in caplog.text
    assert remedy in caplog.text


def test_it_is_skipped_where_it_would_take_long():
    joint, data = classes()
    assert measured_width_cost("Trial", joint, lambda: pytest.fail("made"), as_data(data), 10_000) == {}


def test_a_fit_that_stayed_wide_is_doubted_and_a_good_one_is_not(caplog):
    joint, data = classes()
    mode, _ = infer(MAP(), joint, data, progress=False)
    stuck = MeanField(steps=400, batch_size=None, optimizer=Adam(1e-7), initial_scales=FanIn(gain=4.0))
    with caplog.at_level(logging.WARNING, "posterity"):
        _, trace = infer(stuck, joint, data, start=mode, progress=False)
        assert "MeanField: the posterior predicts rows of the fit worse than its mean" in caplog.text
        assert float(trace["width_cost"][-1]) > 0.005
        caplog.clear()
        _, trace = infer(MeanField(steps=400), joint, data, progress=False)
    assert "worse than its mean" not in caplog.text
    assert abs(float(trace["width_cost"][-1])) < 0.02


def test_scales_of_the_evidence_that_do_harm_are_replaced_and_it_is_said(caplog):
    """Classes far apart: the evidence likes weights so uncertain that predictions suffer."""
    y = torch.arange(90) % 3
    x = 3.0 * normal(Key(5), (3, 6))[y] + normal(Key(6), (90, 6))
    x, held_out = x / x.std(0), slice(60, None)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        network = MLP([6, 8, 3], activation="tanh")
    joint = Joint(network.to(x.device), Categorical(), Normal(), 60)
    losses, fit = [], MAP(300, None, Adam(0.03))
    for tuning in ("auto", None):  # on the same problem: the second run knows nothing of the first
        caplog.clear()
        method = OnlineLaplace(fit, Laplace(structure=Kronecker(), tuning=tuning), rounds=3)
        with caplog.at_level(logging.WARNING, "posterity"):
            q, _ = infer(method, joint, (x[:60], y[:60]), progress=False)
        assert ("left-out rows are predicted worse" in caplog.text) == (tuning is not None)
        losses.append(-float(q.predict(x[held_out]).log_prob(y[held_out]).mean()))
    plug_in = nn.functional.cross_entropy(joint.outputs(q.point(), x[held_out]), y[held_out])
    assert losses[0] < float(plug_in) + 0.01
    assert losses[1] > float(plug_in) + 0.05
    assert OnlineLaplace().laplace.tuning == "auto"


def test_swag_that_wandered_too_far_is_doubted(caplog):
    joint, data = classes()
    mode, _ = infer(MAP(), joint, data, progress=False)
    for scale, warned in ((1.0, False), (30.0, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "posterity"):
            _, trace = infer(SWAG(warmup=200, scale=scale), joint, data, start=mode, progress=False)
        assert ("SWAG: the posterior predicts rows of the fit worse" in caplog.text) == warned
        assert (float(trace["width_cost"][-1]) > 0.005) == warned


@pytest.mark.parametrize(("columns", "warned"), [(500, True), (5, False)])
def test_a_point_with_more_weights_than_rows_knows_what_its_plug_in_costs(columns, warned, caplog):
    key = Key(3)
    x = normal(key.fold("x"), (420, columns))
    y = 2.0 * x[:, :5].sum(1, keepdim=True) + NOISE * normal(key.fold("y"), (420, 1))
    joint = Joint(nn.Linear(columns, 1), Gaussian(), Normal(), 120)
    with caplog.at_level(logging.WARNING, "posterity"):
        point, trace = infer(MAP(), joint, (x[:120], y[:120]), progress=False)
    assert ("MAP alone is too sure" in caplog.text) == warned
    assert ("plug_in_excess" in trace) == warned
    if warned:  # the nats by which the noise is too small for the errors on new rows
        predicted = point.predict(x[120:])
        squares = float((predicted.mean - y[120:]).square().mean())
        best = 0.5 * math.log(2 * math.pi * math.e * squares)
        actual = -float(predicted.log_prob(y[120:]).mean()) - best
        assert float(trace["plug_in_excess"]) == pytest.approx(actual, rel=0.3)
        assert actual > 1.0
        laplace, _ = infer(Laplace(), joint, (x[:120], y[:120]), start=point, progress=False)
        assert -float(laplace.predict(x[120:]).log_prob(y[120:]).mean()) < best + 0.1


def test_swag_keeps_a_start_at_a_mode_and_is_held_against_it(caplog):
    """Steps that looked for a mode cost 80 nats where they began at one."""
    key = Key(5)
    x = 4.0 * key.fold("x").uniform((200, 2), torch.float32, "cpu") - 2.0
    y = (2.0 * x[:, :1]).sin() + 0.05 * key.fold("y").normal((200, 1), torch.float32, "cpu")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        joint = Joint(MLP([2, 12, 1], activation="tanh"), Gaussian(scale=0.05), Normal(scale=1.0), 200)
    start, _ = infer(MAP(), joint, (x, y), progress=False)
    with caplog.at_level(logging.WARNING, "posterity"):
        q, _ = infer(SWAG(), joint, (x, y), start=start, progress=False)
    rows = Batch(x.to(joint.device), y.to(joint.device))
    lost = float(joint.log_density(start.point(), rows) - joint.log_density(q.point(), rows))
    assert lost < 3.0
    away = start.point() + 0.5
    cost = width_cost(q, rows, 100, away)
    assert cost.point == "its mean does"  # worse weights are no reproach
    worse = GaussianPosterior(joint, away, q.precision, {})
    against = width_cost(worse, rows, 100, start.point())
    assert against.point == "the weights that it started from do"
    assert against.harms
