"""MC dropout: what it trains towards, the masks it uses, learnt rates, and what is refused."""

import dataclasses
import logging
import math

import pytest
import torch
from drawn import normal
from torch import Tensor, nn
from torch.nn import functional as F

import posterity as po
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import MAP, MCDropout
from posterity.methods.dropout import learnt_rates, prior_value_and_grad
from posterity.model import Batch, Tempering
from posterity.networks import MLP, ConcreteDropout
from posterity.numerics import Key
from posterity.optim import SGD, Adam, Cosine
from posterity.posteriors import Dropout
from posterity.priors import FanIn, Laplace, Layerwise, Normal

FLOAT64 = torch.float64
ROWS = 60


def linear_data(noise: float, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    x = normal(Key(1), rows, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=FLOAT64) + noise * normal(Key(2), rows, 1)
    return x, y


def ridge(x: Tensor, y: Tensor, noise: float, precision: float, rate: float) -> Tensor:
    """The best weights: E |y - (x keep / (1-p)) w|^2 = |y - x w|^2 + p / (1-p) sum x^2 w^2."""
    added = torch.diag(x.square().sum(0)) * rate / (1 - rate)
    left = (x.T @ x + added) / noise**2 + precision * torch.eye(3, dtype=FLOAT64)
    return torch.linalg.solve(left, x.T @ y / noise**2).squeeze(1)


@pytest.mark.parametrize("one_mask_a_batch", [True, False])
def test_it_trains_towards_the_expectation_over_masks(one_mask_a_batch):
    x, y = linear_data(0.5)
    net = nn.Sequential(nn.Dropout(0.3), nn.Linear(3, 1, bias=False)).double()
    joint = po.Joint(net, Gaussian(0.5), Normal(1.0), ROWS)
    method = MCDropout(2500, None, Adam(0.02), Cosine(), one_mask_a_batch=one_mask_a_batch)
    q, _ = po.infer(method, joint, (x, y), start=torch.zeros(3, dtype=FLOAT64))
    expected = ridge(x, y, 0.5, 1.0, 0.3)
    torch.testing.assert_close(q.point(), expected, rtol=0, atol=0.1 if one_mask_a_batch else 0.03)
    plain = ridge(x, y, 0.5, 1.0, 0.0)
    assert float((expected - plain).norm()) > 0.5  # what MAP finds is far from it


@pytest.mark.parametrize("one_mask_a_batch", [True, False])
def test_rows_of_a_batch_share_a_mask_or_do_not_and_steps_have_their_own(one_mask_a_batch):
    seen: list[Tensor] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach().clone())
            return x

    net = nn.Sequential(nn.Dropout(0.5), Watch(), nn.Linear(30, 1))
    joint = po.Joint(net, Gaussian(1.0), Normal(1.0), 8)
    po.infer(MCDropout(3, None, one_mask_a_batch=one_mask_a_batch), joint, (torch.ones(8, 30), torch.zeros(8, 1)))
    steps = [x for x in seen if len(x) == 8]
    assert len(steps) == 3
    for x in steps:
        assert set(x.unique().tolist()) == {0.0, 2.0}
        assert torch.equal(x, x[:1].expand_as(x)) == one_mask_a_batch
    assert not torch.equal(steps[0], steps[1])
    assert not torch.equal(steps[1], steps[2])


class Functional(nn.Module):
    """Dropout called in forward, in evaluation mode with training=False."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.tanh(self.first(x)), 0.3, training=self.training))


def test_dropout_that_is_called_in_forward_is_that_of_a_layer():
    torch.manual_seed(0)
    called = Functional()
    layered = nn.Sequential(called.first, nn.Tanh(), nn.Dropout(0.3), called.second)
    x = normal(Key(0), 20, 2, dtype=torch.float32)
    y = (x[:, 0] > 0).long()
    found = []
    for net in (called, layered):
        joint = po.Joint(net, Categorical(), Normal(1.0), 20)
        q, _ = po.infer(MCDropout(20, 6), joint, (x, y))
        found.append((q.point(), q.predict(x).probs, q.sample(3, Key(0))))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    plain, _ = po.infer(MAP(20, 6), po.Joint(called, Categorical(), Normal(1.0), 20), (x, y))
    assert not torch.allclose(plain.point(), found[0][0])


def test_batch_norm_trains_on_batches_and_predicts_by_running_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1))
    x = 3.0 + normal(Key(0), 30, 2, dtype=torch.float32)
    joint = po.Joint(net, Gaussian(0.5), Normal(1.0), 30)
    q, _ = po.infer(MCDropout(20, 10), joint, (x, x.sum(1, keepdim=True)))
    assert int(q.buffers["1.num_batches_tracked"]) == 20
    assert not torch.equal(q.buffers["1.running_mean"], torch.zeros(6))
    together, alone = q.outputs(x, 5, Key(0)), q.outputs(x[:1], 5, Key(0))
    torch.testing.assert_close(together[:, :1], alone)  # the rows beside it do not matter


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(2, 4, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


def test_recurrent_layers_train_and_predict_one_mask_after_the_other(caplog):
    torch.manual_seed(0)
    net = Recurrent().double()
    x = normal(Key(0), 10, 5, 2)
    joint = po.Joint(net, Gaussian(0.5), Normal(1.0), 10)
    q, _ = po.infer(MCDropout(3, None), joint, (x, x[:, -1, :1]))
    with caplog.at_level(logging.WARNING, logger="posterity"):
        draws = q.outputs(x, 6, Key(0))
        q.outputs(x, 6, Key(1))
    assert len([r for r in caplog.records if "masks run one after the other" in r.getMessage()]) == 1
    assert len(draws.unique(dim=0)) > 1
    again = torch.cat([q.outputs(x[:4], 6, Key(0)), q.outputs(x[4:], 6, Key(0))], dim=1)
    torch.testing.assert_close(draws, again)  # one mask for all rows
    assert net.layers.dropout == 0.5
    assert joint.network._module.layers.dropout == 0.0


def test_a_transformer_trains_and_predicts():
    torch.manual_seed(0)

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x).mean(1))

    x = normal(Key(0), 12, 5, 8)
    joint = po.Joint(Transformer().double(), Categorical(), Normal(1.0), 12)
    q, _ = po.infer(MCDropout(3, 6, SGD(0.05)), joint, (x, (x[:, 0, 0] > 0).long()))
    draws = q.outputs(x, 6, Key(0))
    assert len(draws.unique(dim=0)) == 6
    torch.testing.assert_close(torch.cat([q.outputs(x[:4], 6, Key(0)), q.outputs(x[4:], 6, Key(0))], dim=1), draws)
    with pytest.raises(TypeError, match="is not a mask of weights"):
        q.sample(2, Key(0))
    members, _ = po.infer(
        MCDropout(3, 6, SGD(0.05)), joint, (x, (x[:, 0, 0] > 0).long()), start=joint.initial().expand(2, -1)
    )
    torch.testing.assert_close(members.member(1).point(), q.point(), rtol=1e-8, atol=1e-10)


def learnt(rate: float = 0.2) -> nn.Sequential:
    return nn.Sequential(ConcreteDropout(nn.Linear(3, 1, bias=False).double(), rate))


@pytest.mark.parametrize("tempering", [Tempering.bayes(), Tempering.cold(0.5), Tempering.tempered(2.0)], ids=str)
def test_the_objective_of_learnt_rates_is_right_in_nats(tempering):
    """By hand: log-likelihood under the masks, the prior at the weights of unscaled masks in expectation, K H(p)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), ConcreteDropout(nn.Linear(5, 2).double(), rate=0.3)).double()
    x, y = linear_data(0.5)
    scale = 0.8
    joint = po.Joint(net, Gaussian(0.5), Normal(scale), ROWS, tempering)
    theta = joint.initial()
    rates = learnt_rates(joint)
    assert [(rate.name, rate.units) for rate in rates] == [("2", 5)]
    value, grad = prior_value_and_grad(joint, theta, rates)
    p = 0.3
    named = joint.network.layout.unflatten(theta)
    plain = [named["0.weight"], named["0.bias"], named["2.layer.bias"]]
    expected = sum(Normal(scale).log_prob(t.flatten()) for t in plain)
    # a column of the last weights is W / (1 - p) with probability 1 - p, else 0
    weight = named["2.layer.weight"].flatten()
    expected += (1 - p) * Normal(scale).log_prob(weight / (1 - p)) + p * Normal(scale).log_prob(
        torch.zeros_like(weight)
    )
    entropy = -5 * (p * math.log(p) + (1 - p) * math.log(1 - p))
    assert float(value) == pytest.approx(float(joint.powers[1] * expected) + entropy, rel=1e-12)
    step = 1e-6 * Key(3).normal(tuple(theta.shape), FLOAT64)
    ahead, back = (prior_value_and_grad(joint, theta + sign * step, rates)[0] for sign in (1, -1))
    assert float(ahead - back) == pytest.approx(float(2 * grad @ step), rel=1e-6)
    method = MCDropout(1, None, Adam(), Cosine(), temperature=0.1)
    state = method.init(joint, theta, Key(0))
    _, info = method.step(joint, state, Batch(x, y.expand(-1, 2)), Key(0))
    u = Key(0).fold("masks").fold(0).uniform((ROWS, 5), torch.float32).double()
    keep = torch.sigmoid((torch.logit(u) - math.log(p / (1 - p))) / 0.1)
    hidden = torch.tanh(x @ named["0.weight"].T + named["0.bias"])
    outputs = (hidden * keep / (1 - p)) @ named["2.layer.weight"].T + named["2.layer.bias"]
    fit = joint.likelihood.log_prob(outputs, y.expand(-1, 2)).sum()
    assert float(info["loss"]) == pytest.approx(-float(joint.powers[0] * fit + value) / ROWS, rel=1e-9)
    assert float(info["rate.2"]) == pytest.approx(0.3)


def best_rate(x: Tensor, y: Tensor, noise: float) -> float:
    """The rate that maximises the expected objective of a linear model with coins, at the best weights for it."""
    rates = torch.linspace(0.002, 0.6, 300, dtype=FLOAT64)
    values = []
    for p in rates.tolist():
        w = ridge(x, y, noise, 1 / (1 - p), p)
        spread = p / (1 - p) * (x.square() @ w.square()).sum()
        fit = -((y.squeeze(1) - x @ w).square().sum() + spread) / (2 * noise**2)
        values.append(
            float(fit) - float(w.square().sum()) / (2 * (1 - p)) - 3 * (p * math.log(p) + (1 - p) * math.log1p(-p))
        )
    return float(rates[int(torch.tensor(values).argmax())])


@pytest.mark.parametrize(("noise", "direction"), [(6.0, 1), (4.0, -1)])
def test_a_rate_is_learnt_that_suits_the_noise(noise, direction):
    """Known noise: where it is large the coins' entropy wins, where it is small the data do."""
    x, y = linear_data(noise)
    expected = best_rate(x, y, noise)
    assert (expected - 0.2) * direction > 0.1  # farther from the start than what is allowed below
    joint = po.Joint(learnt(0.2), Gaussian(noise), Normal(1.0), ROWS)
    method = MCDropout(1200, None, Adam(0.03), Cosine())
    q, trace = po.infer(method, joint, (x, y))
    rate = float(trace["rate.0"][-1])
    assert rate == pytest.approx(expected, abs=0.08)  # 5 standard errors: over seeds it varies by some 0.014
    if expected < 0.05:
        assert rate < 2.5 * expected  # masks relaxed at temperature 0.1 lead to four times the best rate
    assert float(trace["rate.0"][0]) == pytest.approx(0.2)
    kept = (q.outputs(torch.eye(3, dtype=FLOAT64), 5000, Key(0)) != 0).double().mean()
    assert float(kept) == pytest.approx(1 - rate, abs=5 * math.sqrt(rate / 15000))  # predictions drop at that rate


def expected_fit(
    joint: po.Joint, theta: Tensor, x: Tensor, y: Tensor, units: list[int], chance_varies: bool = True
) -> Tensor:
    """E log p(D | f) over all masks of the learnt layers of `hidden`, enumerated, with its graph in theta."""
    named = joint.network.layout.unflatten(theta)
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=FLOAT64)] * sum(units))
    first, second = (torch.sigmoid(named[f"{name}.rate_logit"]) for name in ("0", "2"))
    one, two = masks.split(units, dim=1)
    chance = (one * (1 - first) + (1 - one) * first).prod(1) * (two * (1 - second) + (1 - two) * second).prod(1)
    chance = chance if chance_varies else chance.detach()
    hidden = (x * one.unsqueeze(1) / (1 - first)) @ named["0.layer.weight"].T + named["0.layer.bias"]
    hidden = torch.tanh(hidden) * two.unsqueeze(1) / (1 - second)
    outputs = hidden @ named["2.layer.weight"].T + named["2.layer.bias"]  # (masks, rows, 1)
    return (chance * joint.likelihood.log_prob(outputs, y).sum(1)).sum()


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_in_learnt_rates_are_those_of_the_expectation_over_all_masks(shared):
    """Of two layers of which masks can be enumerated; relaxed masks miss it by far more than the error."""
    torch.manual_seed(1)
    layers = ConcreteDropout(nn.Linear(2, 3), 0.1), nn.Tanh(), ConcreteDropout(nn.Linear(3, 1), 0.3)
    x = normal(Key(0), 12, 2)
    y = x[:, :1].sin()
    joint = po.Joint(nn.Sequential(*layers).double(), Gaussian(0.3), Normal(1.0), 12)
    theta = joint.initial()
    places = [rate.logit.offset for rate in learnt_rates(joint)]
    leaf = theta.clone().requires_grad_()
    fit = expected_fit(joint, leaf, x, y, [2, 3])
    exact = torch.autograd.grad(fit, leaf)[0][places]
    rates = torch.sigmoid(theta[places])
    exact = (exact + prior_value_and_grad(joint, theta, learnt_rates(joint))[1][places]) / (rates * (1 - rates))
    count, batch, method = 400, joint.check(Batch(x, y)), MCDropout(1, None, SGD(1.0, 0.0), Cosine(), shared)
    moves = []
    for index in range(count):
        state = method.init(joint, theta, Key(0))
        moves.append(12 * (method.step(joint, state, batch, Key(index))[0].theta - theta)[places])
    found = torch.stack(moves)
    error = found.std(0) / math.sqrt(count)
    assert bool(((found.mean(0) - exact).abs() < 5 * error).all())
    at_masks = torch.autograd.grad(expected_fit(joint, leaf, x, y, [2, 3], chance_varies=False), leaf)[0][places]
    missing = (torch.autograd.grad(expected_fit(joint, leaf, x, y, [2, 3]), leaf)[0][places] - at_masks).abs()
    assert bool((missing / (rates * (1 - rates)) > 5 * error).all())  # so that it would be missed


def test_defaults_fit_a_learnt_noise_and_any_scale_of_the_targets(caplog):
    x, y = linear_data(0.3)
    for factor in (1.0, 300.0):
        net = nn.Sequential(nn.Dropout(0.05), nn.Linear(3, 1)).double()
        joint = po.Joint(net, Gaussian(0.3, learn=True), Normal(scale=1000.0), ROWS)
        method = MCDropout(batch_size=None).settled(joint, po.as_data((x, y)))
        assert (method.steps, method.schedule) == (3000, Cosine())
        q, _ = po.infer(dataclasses.replace(method, steps=1000), joint, (x, factor * y))
        noise = float(q.joint.likelihood.scale) / factor
        assert 0.25 < noise < 2.5  # the targets have standard deviation 2.3
    others = [text for text in caplog.messages if "worse than its mean" not in text]  # rates that are given may harm
    assert not others


def test_learnt_rates_need_a_normal_prior_around_zero():
    x, y = linear_data(0.5)
    for prior in (Laplace(1.0), Normal(1.0, mean=0.5)):
        with pytest.raises(ValueError, match="normal priors with mean 0"):
            po.infer(MCDropout(1, None), po.Joint(learnt(), Gaussian(0.5), prior, ROWS), (x, y))
    prior = Layerwise({"*weight": FanIn(), "*": Normal(1.0)})
    q, _ = po.infer(MCDropout(2, None), po.Joint(learnt(), Gaussian(0.5), prior, ROWS), (x, y))
    assert isinstance(q, Dropout)
    frozen = po.Joint(learnt(), Gaussian(0.5), Normal(1.0), ROWS).with_weights("*rate_logit")
    with pytest.raises(ValueError, match="weights behind it are frozen"):
        po.infer(MCDropout(1, None), frozen, (x, y))


def test_a_convolution_drops_whole_channels_at_a_learnt_rate():
    torch.manual_seed(0)
    net = nn.Sequential(ConcreteDropout(nn.Conv2d(4, 3, 3), 0.5), nn.Flatten(), nn.Linear(12, 1))
    joint = po.Joint(net.double(), Gaussian(1.0), Normal(1.0), 6)
    x = 1 + Key(0).uniform((6, 4, 4, 4), FLOAT64)
    q, _ = po.infer(MCDropout(2, None), joint, (x, x.mean((1, 2, 3)).unsqueeze(1)))
    torch.testing.assert_close(joint.network.outputs(q.sample(8, Key(1)), x), q.outputs(x, 8, Key(1)))


@pytest.mark.parametrize(
    ("layer", "rate", "error", "message"),
    [
        (nn.Linear(2, 1), 0.0, ValueError, "above 0 and below 1. Got 0.0"),
        (nn.Linear(2, 1), 1.0, ValueError, "above 0 and below 1. Got 1.0"),
        (nn.Tanh(), 0.1, TypeError, "Linear layer or a convolution"),
        (nn.Conv2d(4, 4, 3, groups=2), 0.1, TypeError, "without groups"),
    ],
)
def test_a_learnt_rate_is_checked(layer, rate, error, message):
    with pytest.raises(error, match=message):
        ConcreteDropout(layer, rate)


def test_a_network_without_dropout_is_refused():
    x, y = linear_data(0.5)
    for net in (MLP([3, 4, 1]).double(), nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 1)).double()):
        with pytest.raises(ValueError, match="MCDropout needs a network with dropout"):
            po.infer(MCDropout(1), po.Joint(net, Gaussian(0.5), Normal(1.0), ROWS), (x, y))


def test_rates_and_settings_are_checked():
    x, y = linear_data(0.5)
    net = nn.Sequential(nn.Dropout(1.0), nn.Linear(3, 1)).double()
    with pytest.raises(ValueError, match=r"at least 0 and below 1\. Got 1\.0"):
        po.infer(MCDropout(1), po.Joint(net, Gaussian(0.5), Normal(1.0), ROWS), (x, y))
    with pytest.raises(ValueError, match=r"MCDropout\.steps"):
        MCDropout(0)
    with pytest.raises(ValueError, match=r"MCDropout\.temperature"):
        MCDropout(temperature=0.0)
    with pytest.raises(TypeError, match=r"MCDropout\.one_mask_a_draw"):
        MCDropout(one_mask_a_draw=1)
    for rate in (-0.1, 1.0, True):
        with pytest.raises(ValueError, match=r"MLP\.dropout"):
            MLP([2, 3, 1], dropout=rate)
    density = po.Density(lambda p: -p["a"].square().sum(), {"a": (1,)})
    with pytest.raises(TypeError, match="MCDropout needs a Joint"):
        po.infer(MCDropout(1), density, None)


def test_the_plan_is_that_of_map_with_room_for_masks():
    x, y = linear_data(0.5)
    joint = po.Joint(MLP([3, 50, 1], dropout=0.1).double(), Gaussian(0.5), Normal(1.0), ROWS)
    dropout, plain = (
        po.plan(method, joint, (x, y)) for method in (MCDropout(), MAP(optimizer=Adam(), batch_size=None))
    )
    assert plain.total < dropout.total < 3 * plain.total
    assert dropout.parts["optimiser"] == plain.parts["optimiser"]
