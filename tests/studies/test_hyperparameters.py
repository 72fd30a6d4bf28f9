"""The study of hyper-parameters: the grid as members, EM, resumable fits, the comparison and the figure."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from ucitable import write_energy

from posterity.errors import BadFolder, Diverged, PosterityError
from posterity.inference import infer
from posterity.inference.sweep import Result
from posterity.likelihoods import Gaussian
from posterity.model import Joint
from posterity.priors import Normal
from posterity_studies.hyperparameters import figures, study
from posterity_studies.hyperparameters.figures import draw
from posterity_studies.hyperparameters.settings import Settings
from posterity_studies.hyperparameters.study import (
    EM,
    GOAL,
    GRID,
    NOISE_SCALES,
    PRIOR_SCALES,
    RECIPES,
    SIDE,
    Cell,
    Study,
    comparisons,
    grid_key,
    grid_problem,
    run,
)
from posterity_studies.uci.protocol import mlp, standard_split

pytestmark = pytest.mark.cpu  # the study runs there
TINY = Settings(("energy",), steps=25, batch_size=16, jobs=1)


@pytest.fixture
def energy(tmp_path, monkeypatch):
    write_energy(tmp_path / "data", monkeypatch)
    monkeypatch.setattr(study, "ROUNDS", 2)
    monkeypatch.setattr(study, "DRAWS", 5)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "study"


def made(em, grids, data_set="energy", method="laplace"):
    """Results with the test NLL `em` of each split, and a grid of 9 but for the cells in `grids`."""
    results = []
    for split, (nll, cells) in enumerate(zip(em, grids, strict=True)):
        scores = {"test_nll": nll, "prior_scale": 0.1 * 4**split, "noise_scale": 0.2}
        results.append(Result(Cell(data_set, method, split, EM), scores, 1.0))
        grid = {grid_key(row, column): cells.get((row, column), 9.0) for row in range(SIDE) for column in range(SIDE)}
        results.append(Result(Cell(data_set, method, split, GRID), grid, 2.0))
    return results


def test_the_grid_is_seven_by_seven_and_even_in_logs():
    for scales, ends in ((PRIOR_SCALES, (10**-1.5, 10**0.5)), (NOISE_SCALES, (0.02, 1.28))):
        assert len(scales) == SIDE == 7
        assert (scales[0], scales[-1]) == pytest.approx(ends)
        steps = torch.tensor(scales, dtype=torch.float64).log().diff()
        torch.testing.assert_close(steps, steps[:1].expand(6))


@pytest.mark.usefixtures("energy")
@pytest.mark.parametrize("method", RECIPES)
def test_a_cell_of_the_grid_is_the_fit_at_its_prior_and_noise(method):
    split, row, column = standard_split("energy", 1), 4, 2
    result = study.fit_grid(split, method, TINY)
    assert list(result) == [grid_key(i, j) for i in range(SIDE) for j in range(SIDE)]
    recipe = RECIPES[method]
    noise, prior = Gaussian(NOISE_SCALES[column]), Normal(PRIOR_SCALES[row])
    alone, start = Joint(mlp(split, TINY), noise, prior, len(split.train)), None
    for stage in recipe.stages(TINY):
        start, _ = infer(stage, alone, split.train, start=start, seed=TINY.key("energy", 1).seed, progress=False)
    nll = split.scores(recipe.predict(start, split.test.inputs))["test_nll"]
    assert result[grid_key(row, column)] == pytest.approx(nll, rel=1e-2)
    assert result[grid_key(row, column + 1)] != pytest.approx(nll, rel=2e-2)
    assert result[grid_key(row + 1, column)] != pytest.approx(nll, rel=1e-4)


@pytest.mark.usefixtures("energy")
def test_the_members_of_the_grid_go_prior_by_prior():
    joint = grid_problem(standard_split("energy", 0), TINY)
    assert joint.num_members == SIDE * SIDE
    single = joint.member(SIDE * 2 + 5)
    assert (single.prior.scale, single.likelihood.scale) == pytest.approx((PRIOR_SCALES[2], NOISE_SCALES[5]))


@pytest.mark.usefixtures("energy")
@pytest.mark.parametrize("method", RECIPES)
def test_em_moves_prior_and_noise_and_tells_where_they_ended(method):
    result = study.fit_em(standard_split("energy", 0), method, TINY)
    assert {"test_nll", "test_rmse", "prior_scale", "noise_scale", "bound"} <= set(result)
    assert all(math.isfinite(value) for value in result.values())
    assert abs(math.log(result["prior_scale"] / TINY.prior_scale)) > 1e-3
    assert abs(math.log(result["noise_scale"] / study.FIRST_NOISE)) > 1e-3


@pytest.mark.usefixtures("energy")
def test_no_test_row_takes_part_in_em():
    split = standard_split("energy", 0)
    other = standard_split("energy", 1)
    mixed = replace(split, test=other.test)
    both = [study.fit_em(item, "laplace", TINY) for item in (split, mixed)]
    assert both[0]["test_nll"] != both[1]["test_nll"]
    for name in ("prior_scale", "noise_scale", "bound"):
        assert both[0][name] == both[1][name]


@pytest.mark.usefixtures("energy")
def test_the_study_goes_on_where_it_stopped_and_refuses_other_settings(folder, monkeypatch):
    first = run(replace(TINY, splits=1), folder)
    assert [result.cell for result in first.results] == [Cell("energy", "laplace", 0, part) for part in (EM, GRID)]
    fitted, fit, lines = [], study.fit, []
    monkeypatch.setattr(study, "fit", lambda *words: fitted.append(words[0]) or fit(*words))
    both = run(replace(TINY, splits=2), folder, report=lines.append)
    assert fitted == [Cell("energy", "laplace", 1, part) for part in (EM, GRID)]
    assert both.results[:2] == first.results
    assert lines[0] == "2 of 4 results are there already"
    assert lines[1].startswith("1/2 energy, Laplace, em, split 1: NLL ")
    assert lines[2].startswith("2/2 energy, Laplace, grid, split 1: best NLL ")
    document = both.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))
    assert (len(document["fits"]), len(document["comparisons"]), len(document["notes"])) == (4, 1, 1)
    with pytest.raises(BadFolder, match="seed differs: 0, now 1"):
        run(replace(TINY, splits=1, seed=1), folder)
    monkeypatch.setattr(study, "NOISE_SCALES", tuple(2 * scale for scale in NOISE_SCALES))
    with pytest.raises(BadFolder, match=r"grid-00\.json' holds a fit with other settings: its likelihood"):
        run(replace(TINY, splits=1), folder)


@pytest.mark.usefixtures("energy")
def test_a_fit_that_fails_is_named(folder, monkeypatch):
    def diverge(*words):
        raise Diverged("the loss is nan.", step=3, tensor="loss")

    monkeypatch.setattr(study, "fit_grid", diverge)
    with pytest.raises(PosterityError, match="energy, Laplace, grid, split 0: the loss is nan"):
        run(replace(TINY, splits=1), folder)


def test_the_best_cell_is_that_of_the_mean_over_splits_and_the_error_that_of_paired_differences():
    em = [1.0, 1.2]
    grids = [{(2, 3): 1.1, (4, 5): 0.5}, {(2, 3): 1.0, (4, 5): 3.0}]
    (result,) = comparisons(made(em, grids))
    assert (result.best_prior_scale, result.best_noise_scale) == (PRIOR_SCALES[2], NOISE_SCALES[3])
    assert (result.best.mean, result.em.mean) == pytest.approx((1.05, 1.1))
    assert (result.difference.mean, result.difference.error) == pytest.approx((0.05, 0.15))  # -0.1 and 0.2
    assert result.split_oracle == pytest.approx(0.75)  # 0.5 and 1.0
    assert result.grid[4][5] == pytest.approx(1.75)
    assert result.point == pytest.approx((0.2, 0.2))  # 0.1 and 0.4
    assert (result.splits, result.seconds) == (2, 6.0)


@pytest.mark.parametrize(("excess", "reached"), [(-1.0, True), (0.9 * GOAL, True), (1.1 * GOAL, False)])
def test_the_goal_is_for_the_difference(excess, reached):
    (result,) = comparisons(made([1.0 + excess], [{(3, 3): 1.0}]))
    assert result.reached is reached
    assert ("is not within 0.05" in result.note()) is not reached
    assert result.difference.error is None


@pytest.mark.parametrize(("index", "edge"), [((3, 3), False), ((0, 3), True), ((3, 6), True)])
def test_a_best_cell_at_the_edge_is_told(index, edge):
    (result,) = comparisons(made([1.0], [{index: 1.0}]))
    assert result.at_the_edge is edge
    assert ("at the edge of the grid" in result.note()) is edge


def test_the_figure_has_a_panel_for_each_data_set_and_approximation(folder):
    results = [
        result
        for name in ("energy", "kin8nm")
        for method in RECIPES
        for result in made([1.0, 1.1], [{(2, 2): 0.9}] * 2, name, method)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(Study(TINY, tuple(results)), folder) == ["grid.png"]
    assert (folder / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_positions_are_those_of_cells_and_stay_inside():
    result = figures._position([NOISE_SCALES[0], NOISE_SCALES[4], 1e-9, 1e9], NOISE_SCALES)
    assert result == pytest.approx([0.0, 4.0, -0.5, 6.5])
