"""Cold posteriors of the study of temperature: chains, where they begin, their own temperatures, and what is said."""

import json

import pytest
import torch
from noiseimages import noise_images

from posterity.inference.sweep import Result
from posterity.model.data import as_data
from posterity.model.tempering import Tempering
from posterity_studies.temperature import problem as module
from posterity_studies.temperature import study
from posterity_studies.temperature.cold import ColdCell, ColdStudy
from posterity_studies.temperature.figures import draw
from posterity_studies.temperature.problem import problem, read
from posterity_studies.temperature.settings import Settings
from posterity_studies.temperature.study import run

pytestmark = pytest.mark.cpu


@pytest.fixture
def digits(monkeypatch):
    data = noise_images("mnist", (1, 28, 28), 48, 20)
    monkeypatch.setattr(module, "mnist", lambda name: data)
    monkeypatch.setattr(module, "mnist_test", lambda name: data.test)


def test_cold_posteriors_record_both_temperatures_of_their_chains(tmp_path, digits, fitted, monkeypatch):
    settings = Settings(
        "mnist", "lenet", cold=(0.01, 0.1), seeds=2, steps=12, batch_size=12, draws=3, device="cpu", held_out=12
    )
    traces, recorded = [], study.sampler_temperatures

    def noted(trace, chain, warmup):
        traces.append((trace, chain, warmup))
        return recorded(trace, chain, warmup)

    monkeypatch.setattr(study, "sampler_temperatures", noted)
    result = run(settings, folder=tmp_path)
    assert fitted == [1, 6]  # the modes; 0.01, 0.1 and 1, of two seeds
    for item, (trace, chain, warmup) in zip(result.results, traces, strict=True):
        assert warmup == 6
        for kind in ("kinetic", "configurational"):
            column = trace[f"{kind}_temperature"]
            assert column.shape == (12, 6)
            assert item.scores[kind] == pytest.approx(float(column[6:, chain].mean()), rel=1e-5)
    document = result.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [row["temperature"] for row in document["rows"]] == [0.01, 0.1, 1.0]
    assert document["best_by_held_out_nll"] in (0.01, 0.1, 1.0)
    assert draw(result, tmp_path) == ["cold.png"]
    assert (tmp_path / "cold.png").read_bytes()[:4] == b"\x89PNG"
    assert run(settings, folder=tmp_path).results == result.results
    assert fitted == [1, 6]


def test_chains_of_a_seed_begin_at_one_mode_that_is_stored(tmp_path, fitted):
    settings = Settings(
        "two-moons", cold=(0.1,), widths=(5,), seeds=2, steps=400, batch_size=50, device="cpu", dtype="float64"
    )
    rows = read(settings)
    own = problem(5, rows, settings)
    runs = study.Runs(ColdCell, own, tmp_path, settings, print, as_data(rows.train.pair).fingerprint())
    cells = runs.cells()
    assert [(cell.temperature, cell.seed) for cell in cells] == [(0.1, 0), (1.0, 0), (0.1, 1), (1.0, 1)]
    start = runs.task(cells).start
    assert torch.equal(start[0], start[1])
    assert not torch.equal(start[0], start[2])
    assert torch.equal(runs.task(cells).start, start)
    assert fitted == [1]
    torch.testing.assert_close(runs.task(cells[:1]).start, start[0])
    fresh = own.start([0, 1], study.Key(0).fold("temperature").fold("start"))
    batch = own.joint.check(as_data(rows.train.pair).rows)
    before, after = (own.joint.value_and_grad(theta, batch)[0] for theta in (fresh, start[[0, 2]]))
    assert bool((after > before + 10.0).all())


def test_chains_that_are_not_at_their_temperature_are_told():
    settings = Settings("mnist", "lenet", cold=(0.01, 0.1), seeds=2, device="cpu")
    usual = {"accuracy": 0.9, "nll": 0.3, "kinetic": 1.02, "configurational": 0.95}
    changes = {(0.01, 1): {"kinetic": 1.3, "nll": 0.1}, (0.1, 0): {"nll": 0.2}, (1.0, 1): {"configurational": 0.89}}
    changes |= {(0.001, seed): {"nll": 2.29} for seed in (0, 1)}
    results = tuple(
        Result(ColdCell(None, temperature, seed), {**usual, **changes.get((temperature, seed), {})}, 1.0)
        for temperature in (0.001, 0.01, 0.1, 1.0)
        for seed in (0, 1)
    )
    result = ColdStudy(settings, 100, 0, 10, 61706, results, (ColdCell(None, 0.5, 0),))
    assert [row.off for row in result.rows()] == [(), ("kinetic",), (), ("configurational",)]
    assert result.notes() == [
        "least test NLL of the chains at their temperature: NLL 0.2500, accuracy 0.9000 at T = 0.1; "
        "NLL 0.3000, accuracy 0.9000 at T = 1",
        "T = 0.001: nothing is learnt, NLL 2.290 where a guess has 2.303: the prior outweighs the rows. Take more "
        "rows, or a larger prior variance",
        "T = 0.01: kinetic temperature 1.16, more than 10 % from 1 in a chain: its draws are not those of the density "
        "at T",
        "T = 1: configurational temperature 0.92, more than 10 % from 1 in a chain: its draws are not those of the "
        "density at T",
        "T 0.5, seed 0: diverged, no result",
    ]


def test_the_joint_of_a_cold_posterior_has_both_powers():
    settings = Settings("two-moons", cold=(0.1,), widths=(3,), device="cpu")
    own = problem(3, read(settings), settings)
    assert own.tempered([0.1], cold=True).tempering == Tempering.cold(0.1)
    assert own.tempered([0.1], cold=False).tempering == Tempering.tempered(0.1)
