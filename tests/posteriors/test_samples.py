"""Draws of chains: what they predict, which are taken, what they tell, and how they are kept."""

import math
import sys

import pytest
import torch
from contracts.cases import classification, inputs, labels, linear_regression, numbers
from torch import nn

import posterity as po
from posterity.errors import BadData, PosterityError
from posterity.likelihoods import Gaussian, StudentT
from posterity.methods import MAP, Conjugate
from posterity.model.data import Batch
from posterity.model.density import Positive, Simplex
from posterity.numerics import Key
from posterity.optim import SGD
from posterity.posteriors import Mixture, Point, Samples
from posterity.predictive import DrawsPredictive
from posterity.priors import Normal

FLOAT64 = torch.float64
CHAINS, DRAWS = 4, 25


def spread(joint, chains=CHAINS, draws=DRAWS, key=0, scale=0.5):
    """Chains of independent draws around the module's own weights, with a statistic."""
    away = Key(key).normal((chains, draws, joint.size), torch.float32).to(joint.dtype)
    theta = joint.initial() + scale * away
    return Samples(joint, theta, {"log_density": -away.square().sum(-1), "divergent": away[..., 0] > 2.0})


def noisy(likelihood=None, dtype=FLOAT64):
    """A line with two outputs whose noise is learnt."""
    torch.manual_seed(1)
    noise = likelihood or Gaussian(scale=(0.3, 0.7), learn=True, log_scale_prior=(0.0, 1.0))
    return po.Joint(nn.Linear(3, 2, dtype=dtype), noise, Normal(), num_data=6)


def moved(q):
    """All draws (S, P) where the model is."""
    return q.theta.flatten(0, 1).to(q.joint.device)


def same(one, other):
    assert torch.equal(one.theta, other.theta)
    for name in ("statistics", "buffers"):
        left, right = getattr(one, name), getattr(other, name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


# Predictions


def test_draws_of_an_exact_posterior_predict_as_it_does():
    joint, rows = linear_regression(FLOAT64), numbers(FLOAT64)
    exact, _ = po.infer(Conjugate(), joint, rows)
    chains, draws = 4, 2500
    theta = exact.sample(chains * draws, Key(3)).reshape(chains, draws, -1)
    x, total = inputs(FLOAT64, 5), chains * draws
    found, truth = Samples(joint, theta).predict(x, draws=total), exact.predict(x)
    assert len(found.outputs) == total
    error = truth.epistemic.sqrt() / math.sqrt(total)
    assert bool(((found.mean - truth.mean).abs() < 5.0 * error).all())
    spread_error = truth.epistemic * math.sqrt(2.0 / total)
    assert bool(((found.epistemic - truth.epistemic).abs() < 5.0 * spread_error).all())
    y = truth.mean + truth.std
    each = found.likelihood.log_prob(found.outputs, y).exp()
    bound = 5.0 * each.std(0) / each.mean(0) / math.sqrt(total)
    assert bool(((found.log_prob(y) - truth.log_prob(y)).abs() < bound).all())


@pytest.mark.parametrize(
    "noise", [Gaussian(scale=(0.3, 0.7), learn=True), Gaussian(scale=0.3, learn=True), StudentT(scale=0.5, learn=True)]
)
def test_each_draw_predicts_with_its_own_noise(noise):
    joint = noisy(noise)
    q, x = spread(joint, 2, 3), inputs(FLOAT64, 5)
    pred = q.predict(x, batch_size=2)
    assert isinstance(pred, DrawsPredictive)
    each = [
        joint.fitted(theta).likelihood.log_prob(joint.outputs(theta, x), torch.ones(5, 2, dtype=FLOAT64))
        for theta in moved(q)
    ]
    truth = torch.stack(each).logsumexp(0) - math.log(6)
    torch.testing.assert_close(pred.log_prob(torch.ones(5, 2)), truth, rtol=1e-12, atol=0.0)
    variances = [joint.fitted(theta).likelihood.variance(joint.outputs(theta, x)) for theta in moved(q)]
    torch.testing.assert_close(pred.aleatoric, torch.stack(variances).mean(0), rtol=1e-12, atol=0.0)
    assert float(torch.stack(variances).std(0).min()) > 0.0
    assert pred.sample(3, Key(0)).shape == (3, 5, 2)
    assert pred.quantile(0.5).shape == (5, 2)


def test_the_noise_is_that_of_the_draws_that_were_taken():
    joint = noisy(Gaussian(scale=0.3, learn=True))
    q, x = spread(joint, 3, 10), inputs(FLOAT64, 4)
    few = q.predict(x, draws=6)
    chains, places = q._spread(6)
    picked = q.theta[chains, places].to(joint.device)
    assert torch.equal(few.outputs, joint.outputs(picked, x))
    torch.testing.assert_close(few.aleatoric[0, 0], picked[:, -1].exp().square().mean(), rtol=1e-12, atol=0.0)


def test_draws_are_spread_over_chains_and_iterations():
    q = spread(linear_regression(FLOAT64), 4, 30)
    chains, places = q._spread(12)
    assert chains.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert places.tolist() == [5, 15, 25] * 4
    for wanted in (1, 2, 3, 5, 119, 120, 500):
        chains, places = q._spread(wanted)
        taken = set(zip(chains.tolist(), places.tolist(), strict=True))
        assert len(taken) == len(chains) == min(wanted, 120)
        counts = torch.bincount(chains, minlength=4)
        assert int(counts.max() - counts.min()) <= 1
    assert set(zip(*(index.tolist() for index in q._spread(120)), strict=True)) == {
        (chain, place) for chain in range(4) for place in range(30)
    }


def test_blocks_of_draws_are_the_draws(monkeypatch):
    joint = classification(FLOAT64)
    q, x = spread(joint), inputs(FLOAT64, 7)
    whole = q.outputs(x, 50, Key(0))
    monkeypatch.setattr("posterity.posteriors.samples.TOGETHER", 7 * 3)
    torch.testing.assert_close(q.outputs(x, 50, Key(0)), whole, rtol=1e-12, atol=1e-14)
    monkeypatch.setattr("posterity.posteriors.samples.LARGE", 1)  # one at a time
    torch.testing.assert_close(q.outputs(x, 50, Key(0)), whole, rtol=1e-12, atol=1e-14)
    assert torch.equal(
        q.outputs(x, 50, Key(0)), torch.stack([joint.outputs(t, x) for t in q.theta[q._spread(50)].to(x.device)])
    )


def test_each_draw_has_its_own_statistics_of_batch_norm():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    joint = po.Joint(net, Gaussian(scale=0.5), Normal(), num_data=6)
    plain = spread(joint, 2, 3)
    means = Key(5).normal((2, 3, 4), FLOAT64)
    buffers = {name: b.expand(2, 3, *b.shape) for name, b in joint.network.buffers.items()} | {"1.running_mean": means}
    q, x = Samples(joint, plain.theta, plain.statistics, buffers), inputs(FLOAT64, 5)
    for found in (q.outputs(x, 6, Key(0)), q.predict(x).outputs):
        for index, got in enumerate(found):
            own = {name: b.flatten(0, 1)[index] for name, b in buffers.items()}
            torch.testing.assert_close(got, joint.outputs(moved(q)[index], x, own), rtol=1e-12, atol=1e-13)
    best = int(q.statistics["log_density"].argmax())
    assert torch.equal(q.start().buffers["1.running_mean"], means.flatten(0, 1)[best])
    y = torch.ones(6, 1, dtype=FLOAT64)
    x = inputs(FLOAT64, 6)
    torch.testing.assert_close(
        q.log_likelihoods((x, y)).flatten(0, 1), joint.likelihood.log_prob(q.outputs(x, 6, Key(0)), y).cpu()
    )


# Which draws


def test_samples_are_drawn_once_each_while_there_are_enough():
    q = spread(linear_regression(FLOAT64), 2, 10)
    pool = {tuple(row) for row in q.theta.flatten(0, 1).tolist()}
    found = [tuple(row) for row in q.sample(20, Key(0)).tolist()]
    assert set(found) == pool
    assert found != [tuple(row) for row in q.theta.flatten(0, 1).tolist()]
    assert not torch.equal(q.sample(5, Key(0)), q.sample(5, Key(1)))
    more = [tuple(row) for row in q.sample(50, Key(0)).tolist()]
    assert len(more) == 50
    assert set(more) <= pool


def test_the_point_is_the_draw_of_highest_density_and_another_run_starts_there():
    joint = noisy()
    q = spread(joint)
    best = moved(q)[q.statistics["log_density"].flatten().argmax()]
    assert torch.equal(q.point(), best[: joint.num_weights])
    assert isinstance(q.start(), Point)
    assert q.start().joint.likelihood.scale == pytest.approx(best[joint.num_weights :].exp().tolist(), rel=1e-12)
    rows = (inputs(FLOAT64, 6), torch.ones(6, 2, dtype=FLOAT64))
    state, _ = po.infer(MAP(steps=1, optimizer=SGD(1e-12)), joint, rows, start=q)
    torch.testing.assert_close(state.point(), q.point(), rtol=0.0, atol=1e-9)
    assert state.joint.likelihood.scale == pytest.approx(q.start().joint.likelihood.scale, rel=1e-9)
    nameless = Samples(joint, q.theta)
    assert torch.equal(nameless.point().cpu(), q.theta[0, -1, : joint.num_weights])


def test_chains_and_thinning():
    q = spread(classification(FLOAT64))
    one = q.chain(2)
    assert (one.num_chains, one.num_draws) == (1, DRAWS)
    assert torch.equal(one.theta[0], q.theta[2])
    assert torch.equal(one.statistics["divergent"][0], q.statistics["divergent"][2])
    thin = q.thinned(10)
    assert torch.equal(thin.theta, q.theta[:, [9, 19]])
    assert torch.equal(thin.statistics["log_density"], q.statistics["log_density"][:, [9, 19]])
    assert q.num_members is None
    assert q.member(0) is q
    assert "4 chains of 25 draws" in repr(q)


def test_chains_that_were_taken_apart_are_joined_again():
    q = spread(classification(FLOAT64))
    again = Samples.joined(q.chain(index) for index in range(q.num_chains))
    assert torch.equal(again.theta, q.theta)
    assert again.statistics.keys() == q.statistics.keys()
    assert all(torch.equal(again.statistics[name], q.statistics[name]) for name in q.statistics)
    few = Samples(q.joint, q.theta[:1])
    assert Samples.joined([q.chain(0), few]).statistics == {}
    with pytest.raises(ValueError, match="needs Samples of one problem each"):
        Samples.joined([])
    with pytest.raises(ValueError, match=r"as many draws each\. Got 25 draws of .*, and 2 of"):
        Samples.joined([q, q.thinned(10)])


def test_a_chain_for_each_problem_is_a_posterior_for_each():
    joint = po.Joint(nn.Linear(3, 1).double(), Gaussian(scale=0.5), Normal(torch.tensor([0.5, 2.0])), num_data=6)
    q = spread(joint, 2, 5)
    assert q.num_members == 2
    assert q.member(1).joint is joint.member(1)
    assert torch.equal(q.member(1).theta, q.theta[1:])
    assert torch.equal(q.point(), torch.stack([q.member(i).point() for i in range(2)]))
    with pytest.raises(TypeError, match=r"2 separate posteriors.*q\.member\(0\)"):
        q.predict(inputs(FLOAT64, 4))
    with pytest.raises(ValueError, match="a chain for each of the 2 problems"):
        spread(joint, 3, 5)


def test_a_mixture_takes_chains_however_few():
    joint = linear_regression(FLOAT64)
    q, x = Mixture([spread(joint, 1, 3), spread(joint, 1, 3, key=9)]), inputs(FLOAT64, 4)
    found = q.outputs(x, 10, Key(0))
    assert found.shape == (10, 4, 1)
    assert len({tuple(draw.flatten().tolist()) for draw in found}) == 6
    assert q.predict(x, draws=10).mean.shape == (4, 1)


# Names


def test_values_by_name():
    q = spread(noisy())
    values = q.values()
    assert {name: tuple(value.shape) for name, value in values.items()} == {
        "weight": (4, 25, 2, 3),
        "bias": (4, 25, 2),
        "likelihood.log_scale": (4, 25, 2),
    }
    assert torch.equal(values["weight"][1, 2].flatten(), q.theta[1, 2, :6])
    assert q.draws(7)["likelihood.log_scale"].shape == (7, 2)


def counted(scale, shares):
    """Rates of three counts, with the log-likelihood of each."""
    counts = torch.tensor([3.0, 1.0, 4.0], device=shares.device)
    return torch.distributions.Poisson(scale * shares, validate_args=False).log_prob(counts)


def density(**options):
    shapes, constraints = {"scale": (), "shares": (3,)}, {"scale": Positive(), "shares": Simplex()}
    return po.Density(lambda scale, shares: counted(scale, shares).sum() - scale, shapes, constraints, **options)


def test_values_of_a_density_are_constrained():
    q = spread(density())
    values = q.values()
    assert values["scale"].shape == (4, 25)
    assert float(values["scale"].min()) > 0.0
    torch.testing.assert_close(values["shares"].sum(-1), torch.ones(4, 25, device="cpu"))
    drawn = q.draws(100)
    # The one on the model's device, the other on the CPU: exp may round otherwise.
    torch.testing.assert_close(drawn["scale"].cpu().sort().values, values["scale"].flatten().sort().values)
    with pytest.raises(TypeError, match="no inputs to predict at"):
        q.predict(torch.ones(2, 2))


# Log-likelihoods of rows


@pytest.mark.parametrize("weighted", [False, True])
def test_log_likelihoods_of_rows_are_those_of_the_joint(weighted, monkeypatch):
    monkeypatch.setattr("posterity.posteriors.samples.ROWS", 4)
    joint = noisy()
    tempered = po.Joint(joint.network, joint.likelihood, joint.prior, 6, po.Tempering.cold(0.1))
    q, x = spread(tempered, 2, 3), inputs(FLOAT64, 6)
    y, weights = torch.ones(6, 2, dtype=FLOAT64), torch.arange(6.0, dtype=FLOAT64)
    rows = (x, y, weights) if weighted else (x, y)
    found = q.log_likelihoods(rows)
    assert found.shape == (2, 3, 6)
    assert found.dtype == FLOAT64
    for chain in range(2):
        for draw in range(3):
            truth = joint.log_likelihood(q.theta[chain, draw].to(x.device), Batch(*rows))
            torch.testing.assert_close(found[chain, draw].sum(), truth.cpu(), rtol=1e-12, atol=0.0)


def test_log_likelihoods_of_classes():
    joint = classification(FLOAT64)
    q, (x, y) = spread(joint, 2, 2), labels(FLOAT64)
    truth = torch.stack([joint.outputs(t, x).log_softmax(-1)[torch.arange(len(y)), y] for t in moved(q)])
    torch.testing.assert_close(q.log_likelihoods((x, y)).flatten(0, 1), truth.cpu(), rtol=1e-12, atol=0.0)


def test_a_density_tells_its_data_apart_by_pointwise():
    q = spread(density(pointwise=counted))
    values = q.values()
    each = q.log_likelihoods()
    assert each.shape == (4, 25, 3)
    torch.testing.assert_close(each[2, 3], counted(values["scale"][2, 3], values["shares"][2, 3]).double())
    batched = po.Density(
        lambda scale, shares: counted(scale.unsqueeze(-1), shares).sum(-1) - scale,
        {"scale": (), "shares": (3,)},
        {"scale": Positive(), "shares": Simplex()},
        batched=True,
        pointwise=lambda scale, shares: counted(scale.unsqueeze(-1), shares),
    )
    torch.testing.assert_close(Samples(batched, q.theta).log_likelihoods(), each)


def test_log_likelihoods_that_cannot_be_told_are_refused():
    with pytest.raises(TypeError, match="Make it with pointwise="):
        spread(density()).log_likelihoods()
    summed = density(pointwise=lambda scale, shares: counted(scale, shares).sum())
    with pytest.raises(ValueError, match=r"pointwise must return one number for each datum.*Got shape \(100,\)"):
        spread(summed).log_likelihoods()
    with pytest.raises(BadData, match="This needs data"):
        spread(classification(FLOAT64)).log_likelihoods()
    with pytest.raises(BadData, match="has its data inside"):
        spread(density(pointwise=counted)).log_likelihoods(numbers(FLOAT64))


# Kept and refused


def test_saved_chains_come_back(tmp_path):
    joint = noisy()
    q, x = spread(joint), inputs(FLOAT64, 5)
    q.save(tmp_path / "q")
    back = po.load(tmp_path / "q", nn.Linear(3, 2, dtype=FLOAT64))
    same(back, q)
    assert back.statistics["divergent"].dtype == torch.bool
    assert back.joint.likelihood == joint.likelihood
    y = torch.ones(5, 2)
    assert torch.equal(back.predict(x).log_prob(y), q.predict(x).log_prob(y))
    assert torch.equal(back.point(), q.point())


def test_saved_draws_of_a_density_come_back(tmp_path):
    q = spread(density())
    q.save(tmp_path / "q")
    back = po.load(tmp_path / "q", density())
    same(back, q)
    assert torch.equal(back.values()["shares"], q.values()["shares"])


@pytest.mark.parametrize(
    ("theta", "statistics", "message"),
    [
        (torch.zeros(4, 5), {}, r"must be \(chains, draws, 4\).*Got \(4, 5\)"),
        (torch.zeros(2, 0, 4), {}, r"none of them 0. Got \(2, 0, 4\)"),
        (torch.zeros(2, 5, 3), {}, r"Got \(2, 5, 3\)"),
        (torch.zeros(2, 5, 4), {"energy": torch.zeros(5, 2)}, r"statistics\['energy'\].*Got \(5, 2\)"),
        (torch.zeros(2, 5, 4), {"energy": torch.zeros(2, 5, 1)}, r"Got \(2, 5, 1\)"),
    ],
)
def test_draws_that_do_not_fit_are_refused(theta, statistics, message):
    joint = po.Joint(nn.Linear(3, 1), Gaussian(), Normal(), num_data=1)
    with pytest.raises(ValueError, match=message):
        Samples(joint, theta, statistics)


def test_bad_thinning_is_refused():
    q = spread(linear_regression(FLOAT64))
    with pytest.raises(ValueError, match="at most the 25 draws of a chain"):
        q.thinned(26)
    with pytest.raises(ValueError, match="positive whole number"):
        q.thinned(0)


# For ArviZ


def test_arviz_gets_names_and_numbers():
    pytest.importorskip("arviz")
    joint = noisy()
    plain, rows = spread(joint), (inputs(FLOAT64, 6), torch.ones(6, 2, dtype=FLOAT64))
    told = {"accept": 0.8, "leapfrogs": 7, "depth": 3, "energy": 2.0, "step_size": 0.1, "temperature": 1.0}
    statistics = plain.statistics | {name: torch.full((CHAINS, DRAWS), value) for name, value in told.items()}
    q = Samples(joint, plain.theta, statistics)
    tree = q.to_inference_data(rows, log_likelihood=True)
    posterior, values = tree["posterior"], q.values()
    assert set(posterior.data_vars) == set(values) == {"weight", "bias", "likelihood.log_scale"}
    for name, value in values.items():
        assert posterior[name].dims[:2] == ("chain", "draw")
        assert torch.equal(torch.as_tensor(posterior[name].values, device="cpu"), value)
    stats = tree["sample_stats"]
    assert set(stats.data_vars) == {
        *("lp", "diverging", "acceptance_rate", "n_steps", "tree_depth", "energy", "step_size", "temperature")
    }
    assert torch.equal(torch.as_tensor(stats["lp"].values, device="cpu"), q.statistics["log_density"])
    assert stats["diverging"].dtype == bool
    assert torch.equal(torch.as_tensor(tree["log_likelihood"]["y"].values, device="cpu"), q.log_likelihoods(rows))


def test_arviz_gets_constrained_values():
    arviz = pytest.importorskip("arviz")
    q = spread(density())
    tree = q.to_inference_data()
    assert torch.equal(torch.as_tensor(tree["posterior"]["shares"].values, device="cpu"), q.values()["shares"])
    assert list(arviz.summary(tree, var_names=["scale"]).index) == ["scale"]
    bare = Samples(q.joint, q.theta).to_inference_data()
    assert not hasattr(bare, "sample_stats")
    with pytest.raises(ValueError, match="Add log_likelihood=True"):
        q.to_inference_data(numbers(FLOAT64))


def test_without_arviz_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(PosterityError, match=r"pip install 'posterity\[arviz\]'"):
        spread(density()).to_inference_data()
