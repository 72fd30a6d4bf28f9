"""The MCMC benchmarks: targets are what they say, tables and verdicts are right; no peer and no GPU is needed."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from benchmarkfiles import load

import posterity as po

targets = load("mcmc_targets")
samplers = load("mcmc_samplers")
nuts = load("mcmc_nuts")
gradients = load("hmc_gradients_cuda")
pytestmark = pytest.mark.cpu  # targets in float32, whose products a GPU may round to ten bits


def test_the_logistic_target_is_the_posterior_of_a_linear_layer():
    pytest.importorskip("sklearn")
    target = targets.logistic()
    x, y = (torch.from_numpy(part).double() for part in targets.breast_cancer())
    theta = torch.from_numpy(target.start(3, 0)).double()
    likelihood = torch.distributions.Bernoulli(logits=theta @ x.T).log_prob(y).sum(-1)
    found = target.torch_density(torch.device("cpu"))(theta.float())
    torch.testing.assert_close(found.double(), likelihood - 0.5 * theta.square().sum(-1), rtol=1e-5, atol=1e-3)
    assert np.shares_memory(target.quantities(theta.numpy()), theta.numpy())
    torch.testing.assert_close(x[:, :-1].mean(0), torch.zeros(30).double(), rtol=0, atol=1e-5)


def test_the_net_target_is_the_density_of_its_function():
    target = targets.net()
    x, y, grid = targets.net_data()
    theta = target.start(2, 0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    for row, flat in enumerate(torch.from_numpy(theta)):
        w1, b1, w2, b2 = flat.split(targets.SIZES)
        with torch.no_grad():
            for into, value in zip(
                module.parameters(), (w1.reshape(5, 20).T / math.sqrt(5), b1, w2 / math.sqrt(20), b2), strict=True
            ):
                into.copy_(value.reshape(into.shape))
            residual = (torch.from_numpy(y) - module(torch.from_numpy(x)).squeeze(1)) / targets.NOISE
            wanted = -0.5 * residual.square().sum() - 0.5 * flat.square().sum()
            outputs = module(torch.from_numpy(grid)).squeeze(1).numpy()
        found = target.torch_density(torch.device("cpu"))(torch.from_numpy(theta))[row]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(target.quantities(theta[None])[0, row], outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(targets.TARGETS))
def test_torch_and_jax_have_the_same_density(name):
    jax = pytest.importorskip("jax")
    target = targets.TARGETS[name]()
    theta = target.start(4, 1)
    values, grads = jax.vmap(jax.value_and_grad(target.jax_density()))(theta)
    leaf = torch.from_numpy(theta).requires_grad_()
    found = target.torch_density(torch.device("cpu"))(leaf)
    np.testing.assert_allclose(found.detach().numpy(), np.asarray(values), rtol=1e-5)
    np.testing.assert_allclose(torch.autograd.grad(found.sum(), leaf)[0].numpy(), grads, rtol=1e-3, atol=1e-2)


def test_mean_depth_counts_trees_cut_short_as_begun():
    assert samplers.mean_depth(np.array([[1, 3], [7, 5]])) == (1 + 2 + 3 + 3) / 4


def test_our_nuts_gives_what_the_tables_need():
    target, length = targets.net(), samplers.Length(chains=3, warmup=20, draws=10)
    drawn = samplers.posterity(target, length, "cpu").sample(0)
    assert drawn.theta.shape == (3, 10, target.size)
    assert drawn.leapfrogs.shape == drawn.divergent.shape == (3, 10)
    assert drawn.leapfrogs.min() >= 1
    assert drawn.divergent.dtype == bool


def test_our_hmc_is_timed_over_the_second_half():
    key = po.Key(0)
    x, y = key.fold("x").normal((20, 784)), (key.fold("y").uniform((20,)) * 10).long()
    assert gradients.ours(2, gradients.problem(x, 0), x, y)() > 0


def rows(**rates):
    """Rows of runs of a second, with these ESS/s by round."""
    made = {}
    for name, of in rates.items():
        rounds = [nuts.Round(seed, 1.0, 0.9, rate, 1.001, 15.0, 4.0, 0) for seed, rate in enumerate(of)]
        made[name] = nuts.Row(name, samplers.Length(4, 10, 10), 0.5, 3.0, rounds)
    return made


@pytest.mark.parametrize(("ours", "word"), [((80.0, 90.0, 10.0), "within"), ((40.0, 49.0, 400.0), "below")])
def test_ratios_are_by_round_and_held_against_what_was_asked_for(ours, word):
    made = rows(**{nuts.OURS: ours, nuts.BLACKJAX: (100.0, 100.0, 100.0)})
    table = nuts.Table("logistic", "a title", 4, made, {nuts.PYRO: "ImportError: none"})
    assert f"{sorted(ours)[1] / 100:.3f} x the ESS/s of BlackJAX (vmap) by round, {word} the 0.7" in table.notes()[0]
    assert made[nuts.OURS].compile_seconds == 2.5
    assert made[nuts.OURS].ratio(rows(once=(10.0,))["once"]) == sorted(ours)[1] / 10  # one round serves for all
    lines = table.lines()
    widths = {line.count(" | ") for line in lines[2:5] if not line.startswith("|-")}
    assert len(widths) == 1
    assert "skipped: ImportError: none" in lines[-2]


def test_a_net_with_deep_trees_or_bad_chains_is_said():
    made = rows(NUTS=(1.0,))
    made["NUTS"].rounds[0] = nuts.Round(0, 1.0, 0.9, 10.0, 1.05, 200.0, 7.5, 0)
    (note,) = nuts.Table("net", "a net", 4, made, {}).notes()
    assert "mean depth up to 7.50 and R-hat up to 1.0500" in note


def test_contenders_take_turns_with_the_same_seeds_and_results_are_written(tmp_path, monkeypatch):
    seen = []

    def build(name, target, length, device):
        def sample(seed):
            seen.append((name, length.chains, seed))
            theta = target.start(length.chains, seed)[:, None].repeat(length.draws, 1)
            return samplers.Drawn(theta, np.full(theta.shape[:2], 7), np.zeros(theta.shape[:2], dtype=bool))

        return samplers.Sampler(sample, compiled=name != "ours")

    def missing(target, length, device):
        raise ImportError("no such peer")

    fakes = {
        key: functools.partial(build, name)
        for key, name in ((nuts.NUMPYRO, "NumPyro"), (nuts.OURS, "ours"), (nuts.PYRO, "Pyro"))
    }
    monkeypatch.setattr(nuts, "BUILD", {nuts.BLACKJAX: missing, **fakes})
    monkeypatch.setattr(nuts, "diagnosed", lambda values: (5.0, 1.0))
    given = nuts.options().parse_args(["--draws", "6", "--rounds", "2", "--pyro-draws", "5"])
    table = nuts.measure(targets.net(), 3, given, [nuts.NUMPYRO, nuts.BLACKJAX, nuts.OURS])
    # ours compiles in a run of its own, which the first round does again
    assert seen == [("ours", 3, 1), ("NumPyro", 3, 1), ("ours", 3, 1), ("ours", 3, 2), ("NumPyro", 3, 2)]
    assert table.skipped == {nuts.BLACKJAX: "ImportError: no such peer"}
    assert [each.depth for each in table.rows[nuts.NUMPYRO].rounds] == [3.0, 3.0]
    slow, without = nuts.in_turn(targets.net(), given)
    assert seen[-1] == ("Pyro", 4, 1)
    assert (slow[nuts.PYRO].length.draws, slow[nuts.PYRO].compile_seconds, without) == (5, 0.0, {})
    about = load("harness").context(given)
    nuts.write("topic", [table], about, ["a note"], tmp_path)
    assert json.loads((tmp_path / "topic.json").read_text())["tables"][0]["rows"][nuts.OURS]["length"]["chains"] == 3
    assert "- a note" in (tmp_path / "topic.md").read_text()


def test_the_hand_written_gradients_are_those_of_the_joint():
    key = po.Key(0)
    x, y = key.fold("x").normal((30, 784)), (key.fold("y").uniform((30,)) * 10).long()
    joint = gradients.problem(x, 0)
    theta = torch.stack([joint.fresh(key.fold(index)) for index in range(2)])
    leaf = theta.clone().requires_grad_()
    (found,) = torch.autograd.grad(gradients.log_density(leaf, x, y).sum(), leaf)
    for row, grad in zip(theta, found, strict=True):
        wanted = joint.value_and_grad(row, po.model.Batch(x, y))[1]
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)
    momentum, moved = torch.zeros_like(theta), theta.clone()
    gradients.trajectory(moved, momentum, x, y)
    assert bool((gradients.log_density(moved, x, y) > gradients.log_density(theta, x, y)).all())


def test_speeds_are_compared_by_round():
    speeds = [
        gradients.Speed(gradients.LIMIT, 1, [10.0, 20.0, 10.0]),
        gradients.Speed(gradients.OURS.format(64, "s"), 64, [60.0, 90.0, 80.0]),
    ]
    (said,) = gradients.verdict(speeds, 64)
    assert "6.00 x hand-written, recorded, 1 chain, within the 5" in said
    assert "6.000" in gradients.lines(speeds, "a title")[-2]
