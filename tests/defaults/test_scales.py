"""Scales of prior and noise: given ones stay, left-out ones are chosen and said (docs/scales.md)."""

import functools
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import posterity as po
from posterity.curvature import Full, Kronecker
from posterity.evidence import Evidence, PerLayer, PredictiveFit, PriorScale, ValidationGrid, left_out_rows, retuned
from posterity.evidence.marginal import LeftOut
from posterity.inference import Callback, Checkpoint
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import MAP, NUTS, SGHMC, SWAG, Conjugate, Ensemble, Laplace, MCDropout, MeanField, OnlineLaplace
from posterity.methods.parts import scales
from posterity.model import Batch
from posterity.optim import Adam, Cosine
from posterity.options import LEFT_OUT
from posterity.priors import Hierarchical, Layerwise, LogNormal, Normal

pytestmark = pytest.mark.cpu  # truths are on the CPU

BRIEF = MAP(200, None, Adam(0.02), Cosine())
CHOOSING = {
    "MAP": MAP(),
    "MAP by Adam": BRIEF,
    "OnlineLaplace": OnlineLaplace(BRIEF),
    "MeanField": MeanField(100),
    "SWAG": SWAG(BRIEF, every=5, rank=3, warmup=100),
    "MCDropout": MCDropout(100),
    "Ensemble": Ensemble(MAP(), 2),
}
SAMPLERS = {"NUTS": NUTS(draws=5, warmup=10, chains=2), "SGHMC": SGHMC(draws=5, warmup=10, chains=2, thin=1)}


def normal(key, shape):
    """The same numbers on every device."""
    return key.normal(shape, torch.float64, "cpu").to(torch.get_default_device())


def rows(count=12, columns=4, noise=0.3, seed=0):
    key = po.Key(seed)
    x = normal(key.fold("inputs"), (count, columns))
    weights = normal(key.fold("weights"), (columns, 1))
    return x, x @ weights + noise * normal(key.fold("noise"), (count, 1))


def linear(likelihood, prior, data, columns=4):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Dropout(0.1), nn.Linear(columns, 1)).double()
    return po.Joint(net, likelihood, prior, len(data[0]))


def fit(method, joint, data, **options):
    return po.infer(method, joint, data, progress=False, **options)


def prior_scale(q):
    """The prior scale of each weight, (P,)."""
    prior = q.joint.bound_prior
    like = q.joint.network.initial if prior.num_members is None else q.joint.network.initial.expand(2, -1)
    return prior.variance(like).sqrt().reshape(-1, q.joint.num_weights)[0]


def log_evidence(data, prior, noise):
    """log N(y | 0, prior^2 X X^T + noise^2) of a linear model with a bias."""
    x, y = data
    design = torch.cat([x, x.new_ones(len(x), 1)], 1)
    covariance = prior**2 * design @ design.mT + noise**2 * torch.eye(len(x), dtype=x.dtype)
    return torch.distributions.MultivariateNormal(x.new_zeros(len(x)), covariance).log_prob(y[:, 0])


def best_scales(data, prior=None):
    """Prior scale and noise of the largest log evidence; the prior scale may be known."""
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([logs], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss():
        search.zero_grad()
        value = -log_evidence(data, logs[0].exp() if prior is None else prior, logs[1].exp())
        value.backward()
        return value

    search.step(loss)
    return logs.detach().exp().tolist()


# Given scales are known.


@pytest.mark.parametrize("name", [*CHOOSING, *SAMPLERS, "Laplace"])
def test_given_scales_stay(name):
    data = rows()
    joint = linear(Gaussian(scale=1.0), Normal(1.2), data)
    q, trace = fit({**CHOOSING, **SAMPLERS, "Laplace": Laplace()}[name], joint, data)
    torch.testing.assert_close(prior_scale(q), torch.full((5,), 1.2, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert q.joint.likelihood == Gaussian(scale=1.0)
    assert q.joint.bound_prior.chosen == ""
    assert {"prior_scale", "noise_scale"} & set(trace) == set()
    assert "chosen" not in repr(q)


def test_laplace_at_given_scales_has_the_evidence_in_closed_form():
    data = rows()
    joint = linear(Gaussian(scale=1.0), Normal(1.2), data)
    mode, _ = fit(MAP(), joint, data)
    q, _ = fit(Laplace(), joint, data, start=mode)
    exact, _ = fit(Conjugate(), joint, data)
    assert q.joint.prior == Normal(1.2)
    assert float(q.log_evidence) == pytest.approx(float(exact.log_evidence), abs=1e-6)
    assert float(q.log_evidence) == pytest.approx(float(log_evidence(data, 1.2, 1.0)), abs=1e-6)


def test_tuning_that_is_asked_for_moves_given_scales():
    data = rows()
    joint = linear(Gaussian(scale=1.0), Normal(1.2), data)
    mode, _ = fit(Conjugate(), joint, data)
    q, _ = fit(Laplace(tuning=Evidence()), joint, data, start=mode)
    assert q.joint.likelihood.scale < 0.9
    assert float(q.log_evidence) > float(mode.log_evidence) + 0.5


PARTS = {"1.weight": Normal(), "1.bias": Normal(0.7)}


@pytest.mark.parametrize(
    ("name", "part"),
    [*itertools.product(["MAP", "OnlineLaplace", "Laplace"], ["prior", "noise", "bias"]), ("MeanField", "bias")],
)
def test_a_part_that_is_given_stays_beside_one_that_is_left_out(name, part):
    data = rows(40)
    likelihood = Gaussian(0.3) if part == "noise" else Gaussian()
    prior = {"prior": Normal(1.2), "noise": Normal(), "bias": Layerwise(PARTS)}[part]
    joint = linear(likelihood, prior, data)
    method = Laplace() if name == "Laplace" else CHOOSING[name]
    start = fit(BRIEF, linear(Gaussian(0.3), Normal(1.0), data), data)[0].point() if name == "Laplace" else None
    q, trace = fit(method, joint, data, start=start)
    each, noise = prior_scale(q), q.joint.likelihood.scale
    assert (noise == 0.3) == (part == "noise") == ("noise_scale" not in trace)
    if part == "prior":
        assert each.tolist() == pytest.approx([1.2] * 5)
        assert noise == pytest.approx(best_scales(data, 1.2)[1], rel=0.1)
    elif part == "bias":
        assert float(each[4]) == pytest.approx(0.7)
        assert len(set(each[:4].tolist())) == 1
        assert float(each[0]) not in (1.0, 0.7)
    else:
        assert float(each[0]) != 1.0


def test_an_m_step_leaves_given_parts_alone():
    joint = linear(Gaussian(1.0), Layerwise(PARTS), rows())
    q = po.posteriors.Point(joint, torch.tensor([3.0, 0.0, 0.0, 4.0, 9.0]).double())
    prior = PriorScale(LeftOut.of(joint, PerLayer()))(joint, q).prior.by_tensor(joint.network.layout)
    assert [float(part.scale) for part in prior] == pytest.approx([2.5, 0.7])  # (9 + 16) / 4 = 2.5^2


def test_powers_of_two_for_classes_leave_given_parts_alone():
    key, count = po.Key(4), 60
    x = normal(key.fold("inputs"), (count, 3))
    y = (x[:, 0] > 0).long()
    narrow = Layerwise({"weight": Normal(0.05, chosen="evidence"), "bias": Normal(0.7)})
    net = nn.Linear(3, 2).double()
    problem = po.Joint(net, Categorical(), Layerwise({"weight": Normal(), "bias": Normal(0.7)}), count)
    q = po.posteriors.Point(po.Joint(net, Categorical(), narrow, count), torch.zeros(8, dtype=torch.float64))
    weight, bias = scales._refined(problem, q, Batch(x, y)).prior.by_tensor(problem.network.layout)
    assert float(bias.scale) == 0.7
    assert math.log2(float(weight.scale) / 0.05) in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


# What is left out is chosen, and said.


@functools.cache
def chosen():
    """The mode of a linear regression with its scales left out, the problem and the rows."""
    data = rows(40)
    joint = linear(Gaussian(), Normal(), data)
    return fit(MAP(), joint, data)[0], joint, data


def test_map_and_laplace_choose_the_maximum_of_the_evidence():
    data = rows(12)
    joint = linear(Gaussian(), Normal(), data)
    prior, noise = best_scales(data)
    mode, trace = fit(MAP(), joint, data)
    assert float(trace["prior_scale"][-1][0]) == pytest.approx(prior, rel=0.03)
    assert float(trace["noise_scale"][-1]) == pytest.approx(noise, rel=0.03)
    assert float(log_evidence(data, prior, noise) - log_evidence(data, mode.joint.prior.scale, noise)) < 0.01
    assert repr(mode).count("chosen='evidence'") == 2
    q, _ = fit(Laplace(), joint, data, start=mode)  # takes them over: chance alone speaks against them
    assert (q.joint.prior, q.joint.likelihood) == (mode.joint.prior, mode.joint.likelihood)
    assert float(q.log_evidence) == pytest.approx(float(log_evidence(data, prior, noise)), abs=0.02)
    residual = float((data[1] - q.predict(data[0]).mean).square().mean().sqrt())
    assert noise > 1.1 * residual  # which maximum likelihood would take


def test_mean_field_is_at_the_fixed_point_of_its_m_steps():
    x, y = data = rows(40)
    q, trace = fit(MeanField(250), linear(Gaussian(), Normal(), data), data)
    gaussian = q.as_gaussian()
    variance = gaussian.precision.variance()
    design = torch.cat([x, x.new_ones(len(x), 1)], 1)
    squares = (y[:, 0] - design @ gaussian.mean).square() + design.square() @ variance
    assert q.joint.prior.scale**2 == pytest.approx(float((gaussian.mean.square() + variance).mean()), rel=0.03)
    assert q.joint.likelihood.scale**2 == pytest.approx(float(squares.mean()), rel=0.05)
    assert float(trace["noise_scale"][-1]) == q.joint.likelihood.scale
    assert repr(q).count("chosen='M-steps'") == 2


def test_samplers_of_all_rows_give_left_out_scales_a_hyper_prior():
    data = rows()
    q, trace = fit(SAMPLERS["NUTS"], linear(Gaussian(), Normal(), data), data)
    assert isinstance(q.joint.prior, Hierarchical)
    assert q.joint.prior.scale == LogNormal(1.0, 1.5)
    assert q.joint.likelihood == Gaussian(1.0, learn=True, log_scale_prior=(0.0, 1.5), chosen="hyper-prior")
    assert repr(q).count("chosen='hyper-prior'") == 2
    assert {"prior_scale", "noise_scale"} & set(trace) == set()  # no single value was chosen
    draws = q.theta.reshape(-1, 6)[:, 5]
    assert len(set(draws.tolist())) > 1


def test_samplers_of_mini_batches_do_not_collapse_where_scales_are_left_out():
    """Under a hyper-prior their search for a mode would end at weights of 0, which predict the class frequencies."""
    moons = po.datasets.two_moons(60).train
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = po.networks.MLP([2, 8, 2], activation="tanh")
    joint = po.Joint(net, Categorical(), Normal(), num_data=len(moons))
    q, trace = po.infer(SGHMC(draws=20, warmup=300), joint, moons.pair, progress=False)
    assert po.metrics.negative_log_likelihood(q.predict(moons.inputs), moons.targets) < 0.3  # frequencies: log 2
    assert q.joint.bound_prior.chosen == "evidence"
    assert "prior_scale" in trace


def test_conjugate_says_that_it_chooses_nothing(caplog):
    data = rows()
    q, _ = fit(Conjugate(), linear(Gaussian(scale=0.3), Normal(), data), data)
    assert "stay at their start: Conjugate is for known ones" in caplog.text
    assert q.joint.prior.scale == 1.0
    caplog.clear()
    fit(Conjugate(), linear(Gaussian(scale=0.3), Normal(1.0), data), data)
    assert caplog.text == ""


def test_a_start_brings_its_scales():
    begun, joint, data = chosen()
    again, trace = fit(BRIEF, joint, rows(40, seed=5), start=begun)
    assert (again.joint.prior, again.joint.likelihood) == (begun.joint.prior, begun.joint.likelihood)
    assert float(trace["noise_scale"][-1]) == begun.joint.likelihood.scale
    given, _ = fit(BRIEF, linear(Gaussian(0.5), Normal(2.0), data), data, start=begun)
    assert (given.joint.prior, given.joint.likelihood) == (Normal(2.0), Gaussian(0.5))


def test_a_stopped_run_ends_like_an_uninterrupted_one(tmp_path):
    class Stop(Callback):
        def after_step(self, run):
            if run.step == 90:
                raise RuntimeError("stop here")

    data = rows(40)
    joint, method = linear(Gaussian(), Normal(), data), MAP(200, 16, Adam(0.02))
    where = Checkpoint(tmp_path / "run", steps=30)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(method, joint, data, checkpoint=where, callbacks=[Stop()])
    again, trace = fit(method, joint, data, checkpoint=where)
    whole, straight = fit(method, joint, data)
    assert torch.equal(again.theta, whole.theta)
    assert (again.joint.prior, again.joint.likelihood) == (whole.joint.prior, whole.joint.likelihood)
    assert set(trace) == set(straight)
    assert all(torch.equal(torch.as_tensor(trace[name]), torch.as_tensor(straight[name])) for name in straight)


def test_storage_keeps_how_scales_were_chosen(tmp_path):
    data = rows(40)
    joint = linear(Gaussian(0.3), Layerwise(PARTS), data)
    q, _ = fit(MAP(), joint, data)
    q.save(tmp_path / "run")
    loaded = po.load(tmp_path / "run", joint.network.module)
    assert (loaded.joint.prior, loaded.joint.likelihood) == (q.joint.prior, q.joint.likelihood)
    assert [part.chosen for part in loaded.joint.prior.by_tensor(joint.network.layout)] == ["evidence", ""]
    assert repr(loaded) == repr(q)
    po.posteriors.Point(joint, q.theta).save(tmp_path / "begun")
    assert po.load(tmp_path / "begun", joint.network.module).joint.bound_prior.chosen == LEFT_OUT


def test_scales_of_a_linear_model_with_more_weights_than_rows_are_at_the_maximum_of_the_evidence(monkeypatch):
    """Noise and weights explain much the same there: alternating fits come to the maximum slowly, and are not made."""
    monkeypatch.delattr(scales, "evidence_fit")
    data = rows(60, columns=240, noise=3.0)
    data = data[0], data[1] / data[1].std()
    q, _ = fit(MAP(), linear(Gaussian(), Normal(), data, columns=240), data)
    chosen = log_evidence(data, float(prior_scale(q)[0]), q.joint.likelihood.scale)
    grid = itertools.product(torch.logspace(-2, 0, 21).tolist(), torch.logspace(-3, 0.5, 36).tolist())
    assert float(chosen) > max(float(log_evidence(data, *point)) for point in grid) - 0.11
    assert q.joint.likelihood.scale > 0.01  # of all that the evidence hardly tells apart the largest
    assert q.joint.prior.chosen == q.joint.likelihood.chosen == "evidence"


def test_the_evidence_of_a_linear_model_finds_noise_that_is_nearly_none():
    data = rows(60, noise=1e-4)
    q, _ = fit(MAP(), linear(Gaussian(), Normal(), data), data)
    assert q.joint.likelihood.scale == pytest.approx(1e-4, rel=0.3)


# Leave-one-out predictions against refits.


def test_left_out_rows_of_a_linear_regression_are_exact():
    x, y = data = rows(15, noise=0.5)
    joint = linear(Gaussian(0.5), Normal(1.2), data)
    mode, _ = fit(Conjugate(), joint, data)
    q, _ = fit(Laplace(structure=Full(), tuning=None), joint, data, start=mode)
    left = left_out_rows(q, Batch(x, y))
    assert left.undefined == 0
    for index in range(len(x)):
        others = torch.arange(len(x)) != index
        refit, _ = fit(Conjugate(), linear(Gaussian(0.5), Normal(1.2), (x[others], y[others])), (x[others], y[others]))
        alone, target = x[index : index + 1], y[index : index + 1]
        assert float(left.posterior[index]) == pytest.approx(float(refit.predict(alone).log_prob(target)), abs=1e-8)
        plain = Gaussian(0.5).log_prob(joint.outputs(refit.point(), alone), target)
        assert float(left.plug_in[index]) == pytest.approx(float(plain), abs=1e-8)
    assert left.cost == pytest.approx(float((left.plug_in - left.posterior).mean()))


def test_a_left_out_row_takes_its_weight_along():
    x, y = data = rows(15, noise=0.5)
    weights = 0.5 + torch.arange(15, dtype=torch.float64) / 5.0
    joint = linear(Gaussian(0.5), Normal(1.2), data)
    mode, _ = fit(Conjugate(), joint, (x, y, weights))
    q, _ = fit(Laplace(structure=Full(), tuning=None), joint, (x, y, weights), start=mode)
    left = left_out_rows(q, Batch(x, y, weights))
    for index in range(len(x)):
        others = torch.arange(len(x)) != index
        less = x[others], y[others], weights[others]
        refit, _ = fit(Conjugate(), linear(Gaussian(0.5), Normal(1.2), less[:2]), less)
        truth = refit.predict(x[index : index + 1]).log_prob(y[index : index + 1])
        assert float(left.posterior[index]) == pytest.approx(float(truth), abs=1e-8)
    assert left.cost == pytest.approx(float((weights * (left.plug_in - left.posterior)).sum() / weights.sum()))


def test_left_out_rows_of_a_logistic_regression_are_near_those_of_refits():
    key, count = po.Key(4), 30
    x = normal(key.fold("inputs"), (count, 3))
    y = (x[:, 0] + 0.7 * normal(key.fold("noise"), (count,)) > 0).long()
    joint = po.Joint(nn.Linear(3, 2).double(), Categorical(), Normal(1.0), count)
    method = Laplace(structure=Full(), tuning=None)

    def fitted(inputs, targets):
        problem = po.Joint(joint.network.module, Categorical(), Normal(1.0), len(inputs))
        mode, _ = fit(MAP(), problem, (inputs, targets))
        return fit(method, problem, (inputs, targets), start=mode)[0]

    whole = fitted(x, y)
    left = left_out_rows(whole, Batch(x, y))
    truth = []
    for index in range(count):
        others = torch.arange(count) != index
        truth.append(fitted(x[others], y[others]).predict(x[index : index + 1]).log_prob(y[index : index + 1]))
    truth, seen = torch.cat(truth), whole.predict(x).log_prob(y)
    assert float(left.posterior.mean()) == pytest.approx(float(truth.mean()), rel=0.03)
    assert float((left.posterior - truth).abs().mean()) < 0.2 * float((seen - truth).abs().mean())


def classes(gap, count=400, columns=5):
    """Rows of two classes that lie `gap` apart, a quarter of them to train on."""
    key = po.Key(2)
    y = torch.arange(count) % 2
    x = normal(key, (count, columns))
    x[:, 0] += gap * (2.0 * y - 1.0)
    return (x[: count // 4], y[: count // 4]), (x[count // 4 :], y[count // 4 :])


def test_the_gaussian_at_a_mode_of_clear_classes_is_narrowed_until_it_does_no_harm():
    train, (x, y) = classes(2.5)
    joint = po.Joint(nn.Linear(5, 2).double(), Categorical(), Normal(3.0, chosen="evidence"), len(train[0]))
    mode, _ = fit(MAP(), joint, train)
    q, _ = fit(Laplace(), joint, train, start=mode)
    wide, _ = fit(Laplace(tuning=None), joint, train, start=mode)
    losses = [-float(p.predict(x).log_prob(y).mean()) for p in (mode, q, wide)]
    assert losses[2] > losses[0] + 0.02
    assert losses[1] < losses[0] + 0.001
    assert torch.equal(q.point(), mode.point())
    assert q.joint.bound_prior.chosen == "leave-one-out"
    assert float(q.output_moments(x, marginal=True)[1].min()) > 0.0


def test_the_gaussian_at_a_mode_of_classes_that_overlap_stays():
    train, _ = classes(0.3)
    joint = po.Joint(nn.Linear(5, 2).double(), Categorical(), Normal(0.3, chosen="evidence"), len(train[0]))
    mode, _ = fit(MAP(), joint, train)
    q, _ = fit(Laplace(), joint, train, start=mode)
    assert q.joint.bound_prior.chosen == "evidence"


def test_a_left_out_row_moves_the_mode_by_the_posterior_s_own_cavity_at_every_width():
    """Weights that memorise their rows: the row that is left out would not move the mode of a narrow Gaussian."""
    key, count = po.Key(5), 30
    x = normal(key.fold("inputs"), (count, 12))
    y = (x[:, 0] + normal(key.fold("noise"), (count,)) > 0).long()
    joint = po.Joint(nn.Linear(12, 2).double(), Categorical(), Normal(3.0, chosen="evidence"), count)
    mode, _ = fit(MAP(), joint, (x, y))
    q, _ = fit(Laplace(structure=Full(), tuning=None), joint, (x, y), start=mode)
    narrow = PredictiveFit(tolerance=1e-4).by_cavities(q, Batch(x, y), at_mode=True)
    own = PredictiveFit(tolerance=1e-4).narrowed(q, Batch(x, y))
    assert float(own.joint.prior.scale) > 3.0 * float(narrow.joint.prior.scale)


def test_a_cost_within_its_error_is_no_cost():
    each = torch.tensor([1.0, -0.9] * 50).double()
    chance = po.evidence.LeftOutRows(-each, torch.zeros(100).double())
    assert chance.cost == pytest.approx(0.05)
    assert not chance.surely_cost_more_than(0.004)
    sure = po.evidence.LeftOutRows(-0.05 - 0.01 * each, torch.zeros(100).double())
    assert sure.surely_cost_more_than(0.004)
    assert not sure.surely_cost_more_than(0.1)


# Networks.


@functools.cache
def digits():
    """Inputs and targets of 300 digits to train on, 200 to choose by and the others."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = (torch.as_tensor(value) for value in datasets.load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return [(x[part].float() / 16.0, y[part].long()) for part in (order[:300], order[300:500], order[500:])]


@functools.cache
def trained(steps):
    """A network trained by plain gradients, with its loss on the test rows."""
    (x, y), _, test = digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = po.networks.MLP([64, 30, 10], activation="tanh")
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net, float(cross_entropy(net(test[0]), test[1]).detach())


def nll(q):
    test = digits()[2]
    return -float(q.predict(test[0]).log_prob(test[1]).mean())


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize(("steps", "gain"), [(500, 0.005), (100, -0.005)])
def test_the_width_of_a_network_trained_elsewhere_helps_or_does_no_harm(steps, gain, validated):
    train, validation, _ = digits()
    net, plain = trained(steps)
    joint = po.Joint(net, Categorical(), Normal(), 300)
    rows = validation if validated else None
    q, trace = fit(Laplace(structure=Kronecker()), joint, train, validation=rows)
    assert q.joint.prior.chosen == ("validation" if validated else "leave-one-out")
    assert nll(q) < plain - gain
    assert float(trace["prior_scale"][-1][0]) == pytest.approx(q.joint.prior.scale)
    again = PredictiveFit().chosen_on(q, Batch(*validation))
    assert again.joint.prior.chosen == "validation"
    assert nll(again) < plain + 0.005
    assert retuned(q, ValidationGrid(count=3), validation).joint.prior.chosen == "validation"


def test_held_out_rows_narrow_a_posterior_that_is_far_too_wide():
    train, validation, _ = digits()
    net, plain = trained(100)
    wide, _ = fit(Laplace(structure=Kronecker(), tuning=None), po.Joint(net, Categorical(), Normal(100.0), 300), train)
    assert nll(wide) > plain + 1.0
    assert nll(PredictiveFit().chosen_on(wide, Batch(*validation))) < plain + 0.02


def test_map_and_laplace_of_a_table_beat_the_mean():
    """Scikit-learn's diabetes, with a network that at prior scale 1 learns its rows by heart."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = (torch.as_tensor(value).float() for value in datasets.load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:353], order[353:]
    x = (x - x[train].mean(0)) / x[train].std(0)
    y = ((y - y[train].mean()) / y[train].std()).unsqueeze(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = po.networks.MLP([10, 50, 1], activation="tanh")
    joint = po.Joint(net, Gaussian(), Normal(), len(train))
    mode, _ = fit(MAP(), joint, (x[train], y[train]))
    q, _ = fit(Laplace(), joint, (x[train], y[train]), start=mode)
    mean = -float(torch.distributions.Normal(0.0, 1.0).log_prob(y[test]).mean())
    losses = [-float(p.predict(x[test]).log_prob(y[test]).mean()) for p in (mode, q)]
    assert max(losses) < mean - 0.2
    assert math.isfinite(float(q.log_evidence))
