"""R-hat, effective sample sizes, Monte Carlo errors, E-BFMI: against ArviZ on 200 arrays, and by what they mean."""

import importlib.util
import json
import math
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from chaincases import KINDS, SEEDS, cases

from posterity import diagnostics
from posterity.numerics import Key

FLOAT64 = torch.float64
shared = import_module("posterity.diagnostics.chains")


ARVIZ = json.loads((Path(__file__).parent / "arviz_gold.json").read_text())
ARRAYS = dict(cases())
OURS = {
    "rhat": diagnostics.rhat,
    "bulk_ess": diagnostics.bulk_ess,
    "tail_ess": diagnostics.tail_ess,
    "mean_ess": diagnostics.mean_ess,
    "sd_ess": diagnostics.sd_ess,
    "quantile_ess": lambda draws: diagnostics.quantile_ess(draws, 0.3),
    "mcse_mean": diagnostics.mcse_mean,
    "mcse_sd": diagnostics.mcse_sd,
    "mcse_median": diagnostics.mcse_median,
    "mcse_quantile": lambda draws: diagnostics.mcse_quantile(draws, 0.9),
    "e_bfmi": diagnostics.e_bfmi,
}
OF_QUANTITIES = {name: function for name, function in OURS.items() if name != "e_bfmi"}


def same(found, wanted):
    """Equal within 1e-6, NaN where NaN is. Beyond 1e12 only rounding keeps ArviZ's R-hat from infinity."""
    found, wanted = np.atleast_1d(found.cpu().numpy()), np.atleast_1d(np.array(wanted, dtype=float))
    return bool(
        (np.isclose(found, wanted, rtol=1e-6, atol=0.0, equal_nan=True) | (np.minimum(found, wanted) > 1e12)).all()
    )


def ar1(shape, rho, seed=0):
    noise = Key(seed).normal(shape, FLOAT64)
    draws = [noise[:, 0]]
    for t in range(1, shape[1]):
        draws.append(rho * draws[-1] + math.sqrt(1.0 - rho**2) * noise[:, t])
    return torch.stack(draws, 1)


def test_there_are_two_hundred_arrays():
    assert len(ARRAYS) == len(KINDS) * len(SEEDS) == 200
    assert set(ARVIZ) == {"arviz", *ARRAYS}


@pytest.mark.parametrize("kind", KINDS)
def test_as_arviz_says(kind):
    for seed in SEEDS:
        draws = torch.from_numpy(ARRAYS[f"{kind} {seed}"])
        for name, function in OURS.items():
            found, wanted = function(draws), ARVIZ[f"{kind} {seed}"][name]
            assert same(found, wanted), (name, seed, found, wanted)


def gold_script():
    spec = importlib.util.spec_from_file_location("arviz_gold", Path(__file__).with_name("arviz_gold.py"))
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_stored_numbers_are_arvizs():
    arviz = pytest.importorskip("arviz", minversion="0.23")
    if int(arviz.__version__.split(".")[0]) > 0:
        pytest.skip("the stored numbers are those of ArviZ 0.23")
    script = gold_script()
    for array, row in script.computed(script.diagnostics(arviz)).items():
        for name, value in row.items():
            assert np.allclose(value, ARVIZ[array][name], rtol=1e-6, atol=0.0, equal_nan=True), (array, name)


def test_arviz_1_says_the_same_of_all_but_the_error_of_an_sd():
    stats = pytest.importorskip("arviz_stats.base").array_stats
    script = gold_script()
    for array, row in script.computed(script.newer(stats)).items():
        for name, value in row.items():
            if array.startswith("many infinities") and "ess" in name:
                continue  # its quantiles between infinities are NaN
            assert np.allclose(value, ARVIZ[array][name], rtol=1e-6, atol=0.0, equal_nan=True), (array, name)


@pytest.mark.parametrize("name", OF_QUANTITIES)
def test_many_quantities_are_one_after_another(name, monkeypatch):
    draws = ar1((3, 60), 0.6)[..., None, None] * torch.arange(1.0, 7.0).reshape(2, 3)
    draws = draws + Key(1).normal((3, 60, 2, 3), FLOAT64)
    draws[0, 3, 1, 1] = math.nan
    whole = OURS[name](draws)
    assert whole.shape == (2, 3)
    assert whole.isnan().sum() == 1
    assert whole[1, 1].isnan()
    single = torch.stack([OURS[name](draws[..., i, j]) for i in range(2) for j in range(3)]).reshape(2, 3)
    torch.testing.assert_close(whole, single, rtol=1e-12, atol=0.0, equal_nan=True)
    monkeypatch.setattr(shared, "_BUDGET", 2 * 180)
    torch.testing.assert_close(OURS[name](draws), whole, rtol=1e-12, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", OF_QUANTITIES)
def test_numbers_are_float64_inside(name):
    draws = Key(0).normal((2, 40, 3))
    assert OURS[name](draws).dtype == FLOAT64
    torch.testing.assert_close(OURS[name](draws), OURS[name](draws.double()), rtol=0.0, atol=0.0)
    assert OURS[name](draws[..., :0]).shape == (0,)
    assert OURS[name](draws[:, :3]).isnan().all()


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.5, 0.9])
def test_sizes_of_autoregressive_chains(rho):
    draws = ar1((8, 4000), rho)
    for function, slope in ((diagnostics.mean_ess, rho), (diagnostics.bulk_ess, rho), (diagnostics.sd_ess, rho**2)):
        time = (1.0 + slope) / (1.0 - slope)  # autocorrelation slope^t; that of squares is rho^2t
        window = 3.0 * max(time, 1.0)  # lags that are added, about
        error = math.sqrt(2.0 * (2.0 * window + 1.0) / draws.numel())  # relative, of a sum of so many lags
        assert float(function(draws)) == pytest.approx(draws.numel() / time, rel=5 * error)


def test_errors_are_the_spread_of_estimates_over_many_runs():
    draws = ar1((4 * 400, 250), 0.6).reshape(400, 4, 250).permute(1, 2, 0)  # 400 runs of 4 chains
    flat = draws.reshape(1000, 400)
    estimates = {
        "mcse_mean": flat.mean(0),
        "mcse_sd": flat.std(0),
        "mcse_median": flat.quantile(0.5, dim=0),
        "mcse_quantile": flat.quantile(0.9, dim=0),
    }
    for name, values in estimates.items():  # relative standard error of a spread over 400 runs: 3.5 %
        assert float(OURS[name](draws).mean()) == pytest.approx(float(values.std()), rel=5 * 0.035), name


def test_rhat_sees_other_places_other_scales_and_trends():
    good = Key(3).normal((4, 1000), FLOAT64, "cpu").to(torch.get_default_device())  # bounds hold for these numbers
    far, wide = good.clone(), good.clone()
    far[0] += 1.0
    wide[0] *= 3.0
    found = diagnostics.rhat(torch.stack([good, far, wide, good + torch.linspace(0.0, 2.0, 1000)], -1))
    assert found[0] < 1.01
    assert (found[1:] > 1.05).all()
    skewed = float(diagnostics.rhat(torch.exp(20.0 * good)))
    assert skewed == pytest.approx(float(found[0]), abs=2e-3)  # ranks: bulk as before


def test_chains_that_stand_still():
    still = torch.full((3, 50), 0.1, dtype=FLOAT64)  # whose sums are not exact
    apart = still + torch.arange(3.0)[:, None]
    assert diagnostics.rhat(still).isnan()
    assert diagnostics.rhat(apart) == math.inf
    assert diagnostics.bulk_ess(still) == 150
    assert diagnostics.bulk_ess(apart) < 10
    assert diagnostics.e_bfmi(apart).isnan().all()
    assert diagnostics.mcse_quantile(still, 0.3) == 0.0


def test_rhat_needs_two_chains():
    assert diagnostics.rhat(Key(0).normal((1, 100))).isnan()
    assert not diagnostics.rhat(Key(0).normal((2, 100))).isnan()


def test_e_bfmi_of_a_slow_energy_is_small():
    quick, slow = ar1((2, 5000), 0.0), ar1((2, 5000), 0.98)
    torch.testing.assert_close(diagnostics.e_bfmi(quick), torch.full((2,), 2.0, dtype=FLOAT64), rtol=0.1, atol=0.0)
    assert (diagnostics.e_bfmi(slow) < 0.1).all()  # 2 (1 - rho) = 0.04
    assert diagnostics.e_bfmi(quick[:, :1]).isnan().all()


def test_what_is_not_chains_is_refused():
    with pytest.raises(ValueError, match=r"rhat needs a tensor \(chains, draws\).*Got tensor\(7,\)"):
        diagnostics.rhat(torch.zeros(7))
    with pytest.raises(ValueError, match=r"mcse_mean needs a tensor"):
        diagnostics.mcse_mean([[1.0, 2.0]])
    with pytest.raises(ValueError, match=r"e_bfmi needs energies \(chains, draws\)"):
        diagnostics.e_bfmi(torch.zeros(2, 3, 4))
    for function in (diagnostics.quantile_ess, diagnostics.mcse_quantile):
        for p in (0.0, 1.0, "a", True):
            with pytest.raises(ValueError, match="p must be a number above 0 and below 1"):
                function(torch.zeros(2, 8), p)
