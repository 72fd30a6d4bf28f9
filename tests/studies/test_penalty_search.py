"""The study of penalties: step sizes found in short runs, grids that extend, and learning curves."""

import warnings
from dataclasses import asdict, replace

import pytest
from noiseimages import noise_images

from posterity.inference.sweep import Result
from posterity_studies.penalties import figures
from posterity_studies.penalties import problem as module
from posterity_studies.penalties.grid import Grid, rows_of
from posterity_studies.penalties.problem import Cell, problem, read
from posterity_studies.penalties.settings import Settings
from posterity_studies.penalties.study import run

pytestmark = pytest.mark.cpu
SEARCH = Settings(
    penalties=("l2",),
    setups=("bayesian",),
    ratios=(0.1,),
    step_size=(0.1, 0.02),
    search_epochs=1,
    epochs=2,
    seeds=1,
    extend=1,
    rows=24,
    width=1,
    batch_size=8,
    held_out=10,
    device="cpu",
)


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(module, "mnist", lambda name="mnist": noise_images(name, (1, 28, 28), 40, 20))


def fit_lines(settings, folder):
    """The study, and what it said about the fits that it made."""
    lines = []
    return run(settings, folder=folder, report=lines.append), [line for line in lines if line.endswith(" steps")]


def test_a_search_chooses_step_sizes_long_fits_surround_the_best_and_all_of_it_resumes(tmp_path):
    whole, lines = fit_lines(SEARCH, tmp_path / "whole")
    assert lines[:2] == [f"l2, step size {size}, 1 epoch: 2 fits together, 3 steps" for size in (0.02, 0.1)]
    assert [(fit.cell.epochs, fit.cell.seed) for fit in whole.search] == [(1, 0)] * 4
    assert set(whole.search[0].scores) == {"held_out_accuracy", "held_out_nll", "held_out_ece"}  # no test rows
    grid = Grid(problem("l2", read(SEARCH), SEARCH), SEARCH)
    assert {fit.cell for fit in whole.results} >= set(grid.around(whole.search))
    assert whole.at_theory("l2", "bayesian").ratio == 1.0
    document = whole.document()
    assert len(document["search"]) == 4
    for curve in document["learning_curves"]:
        steps, values = zip(*curve["held_out_accuracy"], strict=True)
        assert steps == tuple(range(1, 7))  # two passes of three steps
        own = next(fit for fit in whole.results if all(curve[key] == value for key, value in asdict(fit.cell).items()))
        assert values[-1] == pytest.approx(own.scores["held_out_accuracy"])
        assert len(curve["training_accuracy"]) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures.step_sizes(whole, tmp_path / "step-sizes.png")

    def stop(line):
        if line == "l2, step size 0.02, 2 epochs: a fit, 6 steps":  # the lambda beyond the others
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SEARCH, folder=tmp_path / "part", report=stop)
    told = []
    resumed = run(SEARCH, folder=tmp_path / "part", report=told.append)
    assert "l2, step size 0.02, 2 epochs: takes up 1 fits that were interrupted" in told
    for left, right in ((whole.search, resumed.search), (whole.results, resumed.results)):
        assert [(fit.cell, fit.scores, fit.curves) for fit in left] == [
            (fit.cell, fit.scores, fit.curves) for fit in right
        ]
    assert not (tmp_path / "part" / "checkpoints").exists()
    again, lines = fit_lines(SEARCH, tmp_path / "part")
    assert (again.results, lines) == (resumed.results, [])


def test_no_more_fits_step_together_than_are_asked_for(tmp_path):
    settings = replace(SEARCH, search_epochs=None, step_size=(), epochs=1, extend=0, together=1)
    _, lines = fit_lines(settings, tmp_path)
    assert lines == ["l2, step size 0.1, 1 epoch: a fit, 3 steps"] * 2


def cell(ratio, step_size, epochs):
    return Cell("l2", "bayesian", ratio, step_size, epochs, 0)


def fits(held, epochs):
    """Results of held-out accuracies by ratio and step size, in the Bayesian setup."""
    return [
        Result(cell(ratio, step, epochs), {"held_out_accuracy": value, "held_out_nll": 1.0}, 1.0)
        for (ratio, step), value in held.items()
    ]


def test_long_fits_have_the_step_sizes_of_the_search_and_neighbours_on_both_sides():
    settings = replace(SEARCH, setups=("bayesian",), seeds=1, ratios=(0.01, 0.1))
    grid = Grid(problem("l2", read(settings), settings), settings)
    held = {
        (0.01, 0.1): 0.90, (0.01, 0.02): 0.80, (0.1, 0.1): 0.85, (0.1, 0.02): 0.86, (1.0, 0.1): 0.2, (1.0, 0.02): 0.7
    }  # fmt: skip
    search = fits(held, 1)
    chosen = grid.around(search)
    assert [(own.ratio, own.step_size, own.epochs) for own in chosen] == [
        (pytest.approx(0.01 / 10**0.5), 0.1, 2),
        (0.01, 0.1, 2),
        (pytest.approx(0.01 * 10**0.5), 0.1, 2),  # between two lambdas: as at the best
        (1.0, 0.02, 2),  # lambda_Th is judged at its own best step size
    ]
    least, middle, most, _ = (own.ratio for own in chosen)
    inside = fits({(least, 0.1): 0.90, (middle, 0.1): 0.92, (most, 0.1): 0.91, (1.0, 0.02): 0.8}, 2)
    assert grid.beyond(inside, chosen, search) == []
    at_end = fits({(least, 0.1): 0.90, (middle, 0.1): 0.91, (most, 0.1): 0.92, (1.0, 0.02): 0.8}, 2)
    (more,) = grid.beyond(at_end, chosen, search)
    assert (more.ratio, more.step_size) == (pytest.approx(0.1), 0.02)
    assert grid.beyond(at_end, [*chosen, more], search) == []  # also where the fit diverged
    ratio_one = fits({(least, 0.1): 0.90, (middle, 0.1): 0.91, (most, 0.1): 0.91, (1.0, 0.02): 0.95}, 2)
    assert sorted(own.ratio for own in grid.beyond(ratio_one, chosen, search)) == pytest.approx([10**-0.5, 10**0.5])
    assert [own.ratio for own in grid.around(fits({(0.316, 0.1): 0.9}, 1))] == [
        pytest.approx(0.0999, abs=1e-4),
        0.316,
        1.0,
    ]
    without = replace(settings, search_epochs=None)
    plain = Grid(grid.problem, without)
    cells = plain.all(2, 1)
    first = fits({(own.ratio, own.step_size): 1 - own.ratio / 2 + own.step_size for own in cells}, 2)
    assert {(own.ratio, own.step_size) for own in plain.beyond(first, cells, [])} == {
        (0.00316227766017, 0.02), (0.00316227766017, 0.1)
    }  # fmt: skip


def test_a_lambda_takes_the_step_size_that_is_best_on_held_out_rows():
    held = {(0.1, 0.1): 0.9, (0.1, 0.02): 0.8, (1.0, 0.1): 0.3, (1.0, 0.02): 0.7}
    rows = rows_of(fits(held, 1), "l2", "bayesian", 4.0, 100)
    assert [(row.ratio, row.step_size, row.scores["held_out_accuracy"][0]) for row in rows] == [
        (0.1, 0.1, 0.9), (1.0, 0.02, 0.7)
    ]  # fmt: skip
    lucky = fits(held, 1) + [replace(fit, cell=replace(fit.cell, seed=1)) for fit in fits(held, 1)[1:]]
    assert rows_of(lucky, "l2", "bayesian", 4.0, 100)[0].step_size == 0.02  # at 0.1 the second seed diverged
