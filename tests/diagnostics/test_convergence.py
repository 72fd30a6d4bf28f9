"""The report on chains: its numbers are those of the functions, its advice fits what is wrong."""

import math
import sys

import pytest
import torch
from torch import nn

import posterity as po
from posterity.diagnostics import bulk_ess, convergence, e_bfmi, mcse_mean, rhat, tail_ess
from posterity.model.density import Positive
from posterity.numerics import Key
from posterity.posteriors import Point, Samples

FLOAT64 = torch.float64
module = sys.modules["posterity.diagnostics.convergence"]  # the package has a function of this name
CHAINS, DRAWS = 4, 300


def problem(random="*", noise=None):
    net = po.networks.MLP((2, 3, 1), activation="tanh").to(FLOAT64)
    likelihood = po.likelihoods.Gaussian() if noise is None else po.likelihoods.Gaussian(noise, learn=True)
    return po.Joint(net, likelihood, po.priors.Normal(), num_data=5, random=random)


def good(joint, draws=DRAWS, chains=CHAINS, seed=0):
    return Key(seed).normal((chains, draws, joint.size), FLOAT64, "cpu")


def statistics(**changed):
    known = {
        "log_density": Key(1).normal((CHAINS, DRAWS), device="cpu"),
        "energy": Key(2).normal((CHAINS, DRAWS), device="cpu"),
        "accept": torch.full((CHAINS, DRAWS), 0.8),
        "divergent": torch.zeros(CHAINS, DRAWS, dtype=torch.bool),
        "depth": torch.full((CHAINS, DRAWS), 3),
    }
    return {**known, **changed}


def slow(shape, rho, seed=0):
    noise = Key(seed).normal(shape, FLOAT64, "cpu")
    draws = [noise[:, 0]]
    for t in range(1, shape[1]):
        draws.append(rho * draws[-1] + math.sqrt(1.0 - rho**2) * noise[:, t])
    return torch.stack(draws, 1)


def test_numbers_are_those_of_the_functions():
    """To rounding: the report is made on the model's device."""
    joint = problem()
    theta = good(joint)
    report = convergence(Samples(joint, theta, statistics()))
    assert [q.name for q in report.quantities] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for name, draws in joint.layout.unflatten(theta).items():
        found = report[name]
        for value, function in ((found.rhat, rhat), (found.bulk_ess, bulk_ess), (found.tail_ess, tail_ess)):
            torch.testing.assert_close(value, function(draws))
        torch.testing.assert_close(found.mcse, mcse_mean(draws))
        torch.testing.assert_close(found.scale, draws.flatten(0, 1).std(0))
        assert found.worst_rhat == pytest.approx(float(rhat(draws).max()), rel=1e-9)
        assert found.least_bulk_ess == pytest.approx(float(bulk_ess(draws).min()), rel=1e-9)
        assert found.least_tail_ess == pytest.approx(float(tail_ess(draws).min()), rel=1e-9)
        assert found.worst_error == pytest.approx(float((found.mcse / found.scale).max()), rel=1e-9)
    assert report.rhat == pytest.approx(float(rhat(theta).max()), rel=1e-9)
    assert report.bulk_ess == pytest.approx(float(bulk_ess(theta).min()), rel=1e-9)
    assert report.tail_ess == pytest.approx(float(tail_ess(theta).min()), rel=1e-9)
    torch.testing.assert_close(report.e_bfmi, e_bfmi(statistics()["energy"]))
    assert report.acceptance.tolist() == pytest.approx([0.8] * CHAINS)
    assert (report.num_divergences, report.share_divergent, report.at_depth_limit) == (0, 0.0, 0.0)
    assert report.converged
    assert str(report).endswith("Nothing speaks against these draws.")
    with pytest.raises(KeyError, match="nothing is called 'x'"):
        report["x"]


def test_numbers_are_looked_at_in_pieces(monkeypatch):
    q = Samples(problem(), good(problem()))
    whole = convergence(q)
    monkeypatch.setattr(module, "_LARGE", 2 * CHAINS * DRAWS)
    pieces = convergence(q)
    for name in ("0.weight", "2.bias"):
        assert pieces[name].rhat.shape == whole[name].rhat.shape
        torch.testing.assert_close(pieces[name].rhat, whole[name].rhat)
        torch.testing.assert_close(pieces[name].mcse, whole[name].mcse)


def test_outputs_are_judged_where_weights_swap():
    joint = problem(noise=0.5)
    theta = 0.05 * good(joint) + torch.linspace(-1.0, 1.0, joint.size, dtype=FLOAT64, device="cpu")
    swap = torch.arange(joint.size, device="cpu")
    swap[:6] = swap[:6].reshape(3, 2).flip(0).reshape(-1)  # hidden units in reverse order, in one chain
    swap[6:9], swap[9:12] = swap[6:9].flip(0), swap[9:12].flip(0)
    theta[0] = theta[0][:, swap]
    q, x = Samples(joint, theta), Key(5).normal((7, 2), FLOAT64)
    alone, with_outputs = convergence(q), convergence(q, x)
    assert alone.rhat > 1.5
    assert any("look at its outputs" in text for text in alone.warnings)
    assert [part.name for part in with_outputs.judged] == ["likelihood.log_scale", "outputs"]
    assert with_outputs["0.weight"].worst_rhat == alone["0.weight"].worst_rhat
    assert with_outputs.rhat < 1.01
    assert with_outputs.converged
    outputs = q.outputs(x, CHAINS * DRAWS, Key(0)).reshape(CHAINS, DRAWS, 7, 1)
    torch.testing.assert_close(with_outputs["outputs"].rhat, rhat(outputs).cpu())
    torch.testing.assert_close(
        outputs[2, 5], Samples(joint, theta[2:3, 5:6]).outputs(x, 1, Key(0))[0]
    )  # chain by chain, draw by draw


def test_noise_is_judged_with_outputs():
    joint = problem(noise=0.5)
    theta = good(joint)
    theta[0, :, -1] += 3.0
    report = convergence(Samples(joint, theta), torch.zeros(3, 2, dtype=FLOAT64))
    (warning,) = [text for text in report.warnings if text.startswith("R-hat")]
    assert "'likelihood.log_scale'" in warning


def test_densities_are_reported_in_their_own_values():
    density = po.Density(
        lambda v: -0.5 * v["mu"].square().sum() - v["tau"], {"mu": (2,), "tau": ()}, {"tau": Positive()}
    )
    theta = Key(0).normal((2, 50, 3), FLOAT64, "cpu")
    report = convergence(Samples(density, theta))
    assert [q.name for q in report.quantities] == ["mu", "tau"]
    torch.testing.assert_close(report["tau"].scale, density.constrained(theta)["tau"].std())
    with pytest.raises(TypeError, match="a Density has no outputs"):
        convergence(Samples(density, theta), torch.zeros(2, 2))


def advice(theta=None, joint=None, **changed):
    joint = joint or problem()
    return convergence(Samples(joint, good(joint) if theta is None else theta, statistics(**changed))).warnings


def test_chains_that_nearly_agree_should_run_longer():
    theta = good(problem())
    theta[0, :, 6] += 0.6
    value = float(rhat(theta[..., 6]))
    assert 1.01 < value < 1.09
    report = convergence(Samples(problem(), theta))
    first, short, hint = report.warnings
    assert short.startswith(f"Bulk ESS {report.bulk_ess:,.0f}, wanted 400, in '0.bias'")  # as the table has it
    draws = int(first.split("draws=")[1].split(",")[0])
    assert first.startswith(
        f"R-hat {value:.3g} in '0.bias' (1 of 3 numbers): run longer (draws={draws}, warmup={draws})"
    )
    assert draws >= 2 * DRAWS
    assert draws >= DRAWS * (value**2 - 1) / 0.0201
    assert "outputs" in hint


def test_chains_far_apart_should_start_elsewhere():
    theta = good(problem())
    theta[0] += 5.0
    first, _ = advice(theta)
    assert "'" in first
    assert "and 3 more (13 of 13 numbers): chains are in different places. Run much longer (warmup=3000)" in first


def test_slow_chains():
    theta = good(problem())
    theta[..., 12] = slow((CHAINS, DRAWS), 0.6)
    report = convergence(Samples(problem(), theta))
    (text,) = report.warnings
    size = report.bulk_ess
    assert text.startswith(f"Bulk ESS {size:.0f}, wanted 400, in '2.bias': run longer (draws=")
    assert int(text.split("draws=")[1].split(")")[0]) == pytest.approx(DRAWS * 400 / size, rel=0.1)
    quick = good(problem(), draws=40)
    texts = convergence(Samples(problem(), quick)).warnings
    bulk, tail = (next(t for t in texts if t.startswith(kind)) for kind in ("Bulk", "Tail"))
    assert "wanted 400, in '" in bulk
    assert "run longer (draws=" in bulk
    assert int(tail.split("draws=")[1].split(")")[0]) > 40


def test_sampler_statistics():
    wild = torch.zeros(CHAINS, DRAWS, dtype=torch.bool)
    wild[1, :37] = True
    (text,) = advice(divergent=wild)
    assert text.startswith("37 divergences (3.1% of draws)")
    assert "target_accept to 0.95" in text
    energy = Key(2).normal((CHAINS, DRAWS), device="cpu")
    energy[2] = energy[2].cumsum(0)
    (text,) = advice(energy=energy)
    assert text.startswith(f"E-BFMI {float(e_bfmi(energy)[2]):.2g}, wanted 0.3, in chain 2: ")
    accept = torch.full((CHAINS, DRAWS), 0.8)
    accept[[0, 3]] = 0.05
    (text,) = advice(accept=accept)
    assert text.startswith("Chains 0 and 3 accepted 5.0% of proposals: lower step_size")
    depth = torch.full((CHAINS, DRAWS), 3)
    depth[0, :120] = 10
    (text,) = advice(depth=depth)
    assert text.startswith("10.0% of trajectories were cut off at depth 10")
    assert "max_depth=12" in text
    q = Samples(problem(), good(problem()), statistics(depth=depth))
    assert convergence(q, max_depth=11).converged


def test_trajectories_that_nuts_marks_are_those_that_count():
    wide = po.Density(lambda x: -0.5 * (x / torch.tensor([1.0, 300.0])).square().sum(), {"x": (2,)})
    method = po.methods.NUTS(draws=40, warmup=0, chains=2, step_size=0.5, max_depth=3, mass=po.kernels.UnitMass())
    q, _ = po.infer(method, wide, None)
    share = float((q.statistics["depth"] == 3).double().mean())
    report = convergence(q)
    assert report.at_depth_limit == share > 0.5
    assert f"{share:.1%} of trajectories were cut off at depth 3: correct but slow" in " ".join(report.warnings)
    assert "set max_depth=5" in " ".join(report.warnings)
    assert convergence(q, max_depth=4).at_depth_limit == 0.0


def test_energy_without_momentum_and_depth_without_trees_say_nothing():
    known = statistics(depth=torch.zeros(CHAINS, DRAWS))
    known["energy"] = -known["log_density"].cumsum(1)
    known["log_density"] = -known["energy"]
    report = convergence(Samples(problem(), good(problem()), known))
    assert report.e_bfmi is None
    assert report.at_depth_limit is None
    bare = convergence(Samples(problem(), good(problem())))
    assert (bare.acceptance, bare.divergences, bare.e_bfmi, bare.at_depth_limit) == (None, None, None, None)
    assert bare.num_divergences == 0
    assert "4 chains of 300 draws." in str(bare).splitlines()


def test_one_chain_few_draws_no_motion_and_nan():
    joint = problem()
    theta = good(joint)
    (text,) = convergence(Samples(joint, theta[:1])).warnings
    assert text.startswith("One chain cannot disagree")
    assert "       -  " in str(convergence(Samples(joint, theta[:1])))
    (text,) = convergence(Samples(joint, theta[:, :3])).warnings
    assert text.startswith("3 draws a chain are too few")
    (text,) = convergence(Samples(joint, torch.zeros_like(theta))).warnings
    assert text.startswith("No chain ever moved")
    part = theta.clone()
    part[..., 12] = 0.1
    (text,) = convergence(Samples(joint, part)).warnings
    assert text == "'2.bias' never moved: all draws are equal."
    theta[1, 3, 12] = math.nan
    (text,) = convergence(Samples(joint, theta)).warnings
    assert text.startswith("Draws of '2.bias' are not finite")


def test_points_among_the_weights_are_left_out():
    joint = problem(random="2.*")
    theta = good(joint)
    theta[..., :9] = 0.3
    report = convergence(Samples(joint, theta))
    assert [q.name for q in report.quantities] == ["2.weight", "2.bias"]
    assert report.converged


def test_the_table():
    theta = good(problem())
    lines = str(convergence(Samples(problem(), theta, statistics()))).splitlines()
    assert lines[0].split() == ["numbers", "R-hat", "bulk", "ESS", "tail", "ESS", "MCSE/sd"]
    row = lines[1].split()
    assert row[:3] == ["0.weight", "6", f"{float(rhat(theta[..., :6]).max()):.3f}"]
    assert row[3] == f"{float(bulk_ess(theta[..., :6]).min()):,.0f}"
    assert len({len(line) for line in lines[:5]}) == 1
    low = float(e_bfmi(statistics()["energy"]).min())
    assert lines[5] == (
        f"4 chains of 300 draws, acceptance 0.80, 0 divergences (0.0%), E-BFMI from {low:.2f}, "
        "0.0% of trajectories cut off."
    )


def test_refusals():
    joint = problem()
    with pytest.raises(TypeError, match="q must be Samples"):
        convergence(Point(joint, joint.initial()))
    with pytest.raises(ValueError, match="max_depth must be a positive whole number"):
        convergence(Samples(joint, good(joint)), max_depth=0)
    several = po.Joint(nn.Linear(2, 1), po.likelihoods.Gaussian(), po.priors.Normal(torch.tensor([1.0, 2.0])), 5)
    with pytest.raises(TypeError, match=r"each of the 2 chains .* Choose one: convergence\(q.member\(0\)\)"):
        convergence(Samples(several, torch.zeros(2, 5, 3)))
