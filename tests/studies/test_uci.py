"""The study of the UCI splits: protocol, resumable fits, published rows, means and figures."""

import json
import math
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from ucitable import GOAL, HEADER, write_energy

from posterity.datasets import UCI_REGRESSION, DataSet, LabelledData, uci_regression
from posterity.errors import BadData, BadFolder, Diverged, PosterityError
from posterity.methods import MAP
from posterity.numerics import Key
from posterity.predictive.gaussian import GaussianPredictive
from posterity_studies import options
from posterity_studies.uci import runs, study
from posterity_studies.uci.figures import draw
from posterity_studies.uci.protocol import problem, standard_split, standardised
from posterity_studies.uci.recipes import RECIPES, Recipe
from posterity_studies.uci.runs import Cell
from posterity_studies.uci.settings import Settings
from posterity_studies.uci.study import COMPARED, Mean, Row, at_least_as_good, mean_and_error, read_published, run

pytestmark = pytest.mark.cpu  # the study runs there
TINY = Settings(("energy",), steps=30, batch_size=16, jobs=1)


@pytest.fixture
def energy(tmp_path, monkeypatch):
    write_energy(tmp_path / "data", monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "study"


def real():
    root = os.environ.get("POSTERITY_DATA", "")
    if not root:
        pytest.skip("POSTERITY_DATA is not set: the real UCI files are not here")
    if not (Path(root) / "uci").is_dir() or not (Path(root) / "published_results.csv").is_file():
        pytest.skip("POSTERITY_DATA has no folder 'uci' with 'published_results.csv' beside it")
    return Path(root)


def scores(results):
    return {result.cell: result.scores for result in results.results}


@pytest.mark.usefixtures("energy")
def test_rows_are_standardised_by_the_training_rows():
    raw, split = uci_regression("energy", 1), standard_split("energy", 1)
    inputs, targets = split.train.pair
    torch.testing.assert_close(inputs.mean(0), torch.zeros(3), rtol=0, atol=1e-6)
    torch.testing.assert_close(inputs[:, :2].std(0, correction=0), torch.ones(2))
    assert torch.equal(inputs[:, 2], torch.zeros(36))  # the constant one
    torch.testing.assert_close(targets.std(correction=0), torch.tensor(1.0))
    mean, scale = raw.train.targets.mean(), raw.train.targets.std(correction=0)
    assert split.target_scale == pytest.approx(float(scale))
    torch.testing.assert_close(split.test.targets.double() * scale + mean, raw.test.targets, rtol=0, atol=1e-5)


def test_the_rounding_of_a_mean_makes_a_constant_input_a_bias():
    """As in published runs on naval: 288 is exact, 0.998 is not."""
    count = 10_741
    varied = Key(0).normal((count, 1), torch.float64)
    inputs = torch.cat([varied, torch.tensor([288.0, 0.998], dtype=torch.float64).expand(count, 2)], 1)
    rows = LabelledData(inputs, varied)
    data = DataSet("constants", "regression", rows, rows)
    assert torch.equal(standardised(data, 0).train.inputs[:, 1:], torch.zeros(count, 2))
    rounded = standardised(data, 0, "rounded").train.inputs
    assert torch.equal(rounded[:, 1], torch.zeros(count))
    torch.testing.assert_close(rounded[:, 2].abs(), torch.ones(count))
    torch.testing.assert_close(rounded[:, 0], standardised(data, 0).train.inputs[:, 0])


@pytest.mark.usefixtures("energy")
def test_scores_are_in_the_units_of_the_target():
    raw, split = uci_regression("energy", 0), standard_split("energy", 0)
    outputs, variance = torch.linspace(-1, 1, 4).unsqueeze(1), torch.linspace(0.1, 0.4, 4).unsqueeze(1)
    result = split.scores(GaussianPredictive(outputs, variance, torch.tensor(0.5)))
    mean, scale = raw.train.targets.mean(), raw.train.targets.std(correction=0)
    deviation = (variance + 0.5).sqrt().double() * scale
    normal = torch.distributions.Normal(outputs.double() * scale + mean, deviation)
    assert result["test_nll"] == pytest.approx(-float(normal.log_prob(raw.test.targets).mean()), abs=1e-5)
    assert result["test_rmse"] == pytest.approx(
        float((normal.mean - raw.test.targets).square().mean().sqrt()), abs=1e-5
    )
    assert result["mean_std"] == pytest.approx(float(deviation.mean()), abs=1e-5)
    assert (result["smallest_std"], result["largest_std"]) == pytest.approx((float(deviation[0]), float(deviation[-1])))


@pytest.mark.usefixtures("energy")
def test_the_network_is_that_of_the_protocol_and_its_start_follows_from_seed_and_split():
    joint = problem(standard_split("energy", 0), TINY)
    assert [part.shape for part in joint.network.layout] == [(50, 3), (50,), (1, 50), (1,)]
    state = torch.get_rng_state()
    assert torch.equal(problem(standard_split("energy", 0), TINY).network.initial, joint.network.initial)
    assert torch.equal(torch.get_rng_state(), state)
    others = (standard_split("energy", 1), TINY), (standard_split("energy", 0), Settings(seed=1))
    for split, other in others:
        assert not torch.equal(problem(split, other).network.initial, joint.network.initial)


@pytest.mark.usefixtures("energy")
def test_every_fit_is_there_with_its_own_uncertainty(folder):
    result = run(replace(TINY, methods=("map", "laplace")), folder)
    assert list(scores(result)) == [
        Cell("energy", method, split) for split in range(3) for method in ("map", "laplace")
    ]
    for split in range(3):
        point, laplace = (scores(result)[Cell("energy", method, split)] for method in ("map", "laplace"))
        assert laplace["test_rmse"] == pytest.approx(point["test_rmse"], rel=1e-5)  # the same mode
        assert point["largest_std"] == pytest.approx(point["smallest_std"], rel=1e-6)  # one noise for all rows
        assert laplace["largest_std"] > 1.001 * laplace["smallest_std"]  # weights add to it, more at some rows
    assert len({values["mean_std"] for values in scores(result).values()}) == 6
    document = result.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["settings"]["steps"] == 30
    assert len(document["splits"]) == 6


@pytest.mark.usefixtures("energy")
def test_a_stage_that_methods_share_is_run_once(folder, monkeypatch):
    stages = []
    infer = runs.infer

    def counted(method, *words, **options):
        stages.append(type(method).__name__)
        return infer(method, *words, **options)

    monkeypatch.setattr(runs, "infer", counted)
    both = run(replace(TINY, methods=("map", "laplace"), splits=1), folder)
    assert stages == ["MAP", "Laplace"]
    alone = run(replace(TINY, methods=("laplace",), splits=1), folder / "alone")
    assert scores(alone).items() <= scores(both).items()


@pytest.mark.usefixtures("energy")
def test_an_interrupted_study_goes_on_and_ends_as_an_uninterrupted_one(folder, monkeypatch):
    whole = run(TINY, folder / "whole")

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(TINY, folder, report=stop)
    draft = Cell("energy", "map", 1).path(folder).parent / ".draft-0123456789abcdef"
    draft.write_bytes(b'{"identity')
    first = {path: path.read_bytes() for path in (folder / "runs").rglob("split-*.json")}
    assert {path.name for path in first} == {"split-00.json"}
    fitted, fit = [], runs.fit
    monkeypatch.setattr(runs, "fit", lambda *words: fitted.append(words[0].index) or fit(*words))
    lines = []
    resumed = run(TINY, folder, report=lines.append)
    assert fitted == [1, 2]
    assert not draft.exists()
    assert lines[0] == "2 of 6 results are there already"
    assert lines[1].startswith("1/2 energy split 1: MAP NLL ")
    assert scores(resumed) == scores(whole)
    assert all(path.read_bytes() == content for path, content in first.items())
    assert run(TINY, folder) == resumed
    assert fitted == [1, 2]


@pytest.mark.usefixtures("energy")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 31}, "steps differs: 30, now 31"),
        ({"seed": 1}, "seed differs: 0, now 1"),
        ({"prior_scale": 2.0}, "prior_scale differs: "),
    ],
)
def test_results_of_other_settings_are_refused_and_stay(folder, change, said):
    run(replace(TINY, methods=("map",), splits=1), folder)
    before = Cell("energy", "map", 0).path(folder).read_bytes()
    with pytest.raises(BadFolder, match=said):
        run(replace(TINY, methods=("map",), **change), folder)
    assert [path.read_bytes() for path in (folder / "runs").rglob("*.json")] == [before]


def test_results_of_other_rows_are_refused(folder, tmp_path, monkeypatch):
    write_energy(tmp_path / "data", monkeypatch)
    run(replace(TINY, methods=("map",), splits=1), folder)
    index = tmp_path / "data" / "uci" / "energy" / "data"
    for part in ("train", "test"):
        (index / f"index_{part}_0.txt").write_bytes((index / f"index_{part}_1.txt").read_bytes())
    with pytest.raises(BadFolder, match="its training rows differs: "):
        run(replace(TINY, methods=("map",), splits=1), folder)


@pytest.mark.usefixtures("energy")
@pytest.mark.parametrize("content", [b"", b"[]", b'{"identity": {}}', b'{"identity": 1, "scores": {}, "seconds": 0}'])
def test_a_damaged_result_is_refused_by_name(folder, content):
    path = Cell("energy", "map", 0).path(folder)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(BadFolder, match=r"split-00\.json' holds no result"):
        run(replace(TINY, methods=("map",)), folder)


@pytest.mark.usefixtures("energy")
def test_a_fit_that_fails_is_named_and_survives_the_way_between_processes(folder, monkeypatch):
    def diverge(*words, **options):
        raise Diverged("The loss is NaN at step 3.", step=3, tensor="loss")

    monkeypatch.setattr(runs, "infer", diverge)
    with pytest.raises(PosterityError, match=r"energy, MAP, split 0: The loss is NaN at step 3\.") as caught:
        run(TINY, folder)
    travelled = pickle.loads(pickle.dumps(caught.value))
    assert (str(travelled), travelled.exit_code) == (str(caught.value), Diverged.exit_code)


@pytest.mark.usefixtures("energy")
@pytest.mark.parametrize("method", ["laplace-ensemble", "auto"])
def test_rows_are_predicted_better_than_by_their_mean(folder, method):
    split = standard_split("energy", 0)
    mean = GaussianPredictive(torch.zeros(4, 1), torch.zeros(4, 1), torch.tensor(1.0))
    (nll,) = (score["test_nll"] for score in scores(run(replace(TINY, methods=(method,), splits=1), folder)).values())
    assert nll < split.scores(mean)["test_nll"] - 0.2


@pytest.mark.usefixtures("energy")
def test_a_new_method_is_one_row(folder, monkeypatch):
    row = Recipe("Short", lambda settings: (MAP(steps=settings.steps // 2),))
    for module in (runs, study):
        monkeypatch.setattr(module, "RECIPES", MappingProxyType({**RECIPES, "short": row}))
    monkeypatch.setattr(options, "check", lambda settings: None)  # which does not know the name
    result = run(replace(TINY, methods=("map", "short"), splits=2), folder)
    assert [(row.method, row.splits) for row in result.rows if not row.published] == [("MAP", 2), ("Short", 2)]
    longer, short = (row.scores["test_nll"].mean for row in result.rows if not row.published)
    assert longer < short


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((("enrgy",), ("map",)), "Did you mean 'energy'?"),
        ((("energy",), ("laplas",)), "Did you mean 'laplace'?"),
        (((), ("map",)), "--datasets must name at least one"),
    ],
)
def test_an_unknown_name_is_met_with_the_nearest(words, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        Settings(*words)


def test_published_rows_are_read_with_the_sign_turned(tmp_path, monkeypatch):
    write_energy(tmp_path, monkeypatch)
    values = read_published(tmp_path / "published_results.csv", ["energy"])
    goal = GOAL.strip('"')
    assert [(value.method.split(" (")[0], value.metric, value.mean, value.error) for value in values] == [
        (goal.split(" (")[0], "test_rmse", 0.54, 0.01),
        (goal.split(" (")[0], "test_nll", 1.25, 0.02),
        ("Deep ensembles", "test_nll", 1.38, None),
        ("Another", "test_rmse", 3.0, None),
    ]
    assert {value.data_set for value in values} == {"energy"}


def test_the_real_published_rows():
    values = read_published(real() / "published_results.csv", UCI_REGRESSION)
    results = {(value.data_set, value.method, value.metric): (value.mean, value.error) for value in values}
    goal = GOAL.strip('"')
    assert results["energy", goal, "test_nll"] == (1.21152, 0.005319)
    assert results["naval-propulsion-plant", goal, "test_nll"] == (-4.44954, 0.00216)
    assert results["kin8nm", goal, "test_rmse"] == (0.0788986, 0.000595)
    for name in UCI_REGRESSION:
        assert {(name, method, metric) for method in COMPARED for metric in study.METRICS} <= set(results)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER + "energy,A,test_ll,x,,,s,p,n\n", "line 2: mean and std_err must be numbers. Got 'x'"),
        (HEADER + "energy,A,test_ll,1,nan,,s,p,n\n", "line 2: mean and std_err must be numbers. Got 'nan'"),
        ("dataset,method\nenergy,A\n", "metric, mean, std_err, source is missing"),
    ],
)
def test_a_damaged_file_of_published_results_is_refused(tmp_path, text, said):
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(BadData, match=said):
        read_published(tmp_path / "p.csv", ["energy"])


def test_the_standard_error_is_the_naive_one():
    values = [0.3, -1.2, 2.5, 0.7]
    mean = sum(values) / 4
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / 3) / math.sqrt(4)
    result = mean_and_error(values)
    assert (result.mean, result.error) == pytest.approx((mean, error))
    assert mean_and_error([2.0]) == Mean(2.0, None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Mean(0.0788986, 0.000595), "0.07890 ± 0.00060"),
        (Mean(-1.13643, 0.006625), "-1.1364 ± 0.0066"),
        (Mean(123.4, 25.0), "123 ± 25"),
        (Mean(2.09, None), "2.09"),
        (Mean(0.1, 0.0), "0.1"),
    ],
)
def test_a_mean_is_shown_to_the_second_digit_of_its_error(value, text):
    assert str(value) == text


def test_equal_is_at_least_as_good():
    def row(name, method, nll, splits):
        return Row(name, method, {"test_nll": Mean(nll, None)}, splits)

    rows = [row(name, "Laplace", nll, 20) for name, nll in (("a", 1.0), ("b", 1.1), ("c", 0.0))]
    rows += [row(name, next(iter(COMPARED.values())), 1.0, None) for name in ("a", "b")]
    assert at_least_as_good(rows, "Laplace") == (["a"], ["a", "b"])


@pytest.mark.parametrize("splits", [1, 2])
def test_figures_and_notes_with_and_without_published_results(folder, tmp_path, monkeypatch, splits):
    write_energy(tmp_path / "data", monkeypatch, **({} if splits == 2 else {"published": None}))
    result = run(replace(TINY, splits=splits), folder)
    if splits == 2:
        assert [row.method for row in result.rows] == ["MAP", "Laplace", "MC dropout 2018", "Deep ensembles"]
        assert result.notes()[1] == "Laplace: NLL at least as good as MC dropout 2018 on 0 of 1"
    else:
        assert [row.method for row in result.rows] == ["MAP", "Laplace"]
        assert "published_results.csv was not found" in result.notes()[0]
        assert result.document()["published"] == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(result, folder) == ["nll.png", "rmse.png"]
    for name in ("nll.png", "rmse.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_two_processes_give_what_one_gives_on_the_real_table(folder):
    real()
    single, two = (run(replace(TINY, methods=("map",), splits=2, jobs=jobs), folder / str(jobs)) for jobs in (1, 2))
    assert len(single.results) == 2
    assert scores(two) == scores(single)
    assert single.rows[0].published is False
