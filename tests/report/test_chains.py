"""Figures of chains: lines, bars and rows are the draws they should be, for one chain and for many."""

import math

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

import posterity as po
from posterity.diagnostics import bulk_ess, e_bfmi, rhat
from posterity.numerics import Key
from posterity.posteriors import Samples
from posterity.report import chains as drawing
from posterity.report import energy_plot, rank_plot, trace_plot
from posterity.report.canvas import BLACK, BLUE, RED

pytestmark = pytest.mark.cpu
FLOAT64 = torch.float64


def draws(chains=4, length=100, count=3, seed=0):
    values = Key(seed).normal((chains, length, count), FLOAT64)
    values[0, :, 1:2] += 2.0 if chains > 1 else 0.0
    return values


def samples(theta, **statistics):
    joint = po.Joint(torch.nn.Linear(theta.shape[-1] - 1, 1), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=5)
    return Samples(joint, theta, statistics)


def shown_axes(figure):
    return [place for place in figure.axes if place.get_visible()]


def titles(figure):
    return [place.get_title(loc="left") for place in shown_axes(figure) if place.get_title(loc="left")]


@pytest.mark.parametrize("chains", [1, 4, 20])
def test_traces_are_the_draws_of_each_chain(chains):
    theta = draws(chains)
    figure = trace_plot(samples(theta))
    axes = shown_axes(figure)
    assert len(axes) == 6  # a trace and a margin for each number
    assert [title.split()[0] for title in titles(figure)] == ["weight[0,", "weight[0,", "bias[0]"]
    for number in range(3):
        lines = axes[2 * number].get_lines()
        assert len(lines) == chains
        for line, values in zip(lines, theta[..., number], strict=True):
            np.testing.assert_array_equal(line.get_xdata(), np.arange(100))
            np.testing.assert_allclose(line.get_ydata(), values)
        assert len({to_hex(line.get_color()) for line in lines}) == chains
        edges = np.linspace(float(theta[..., number].min()), float(theta[..., number].max()), 11)
        margins = axes[2 * number + 1].get_lines()
        for line, values in zip(margins, theta[..., number], strict=True):
            heights = np.histogram(values, edges, density=True)[0]
            np.testing.assert_allclose(line.get_xdata(), heights, atol=1e-12)
            np.testing.assert_allclose(line.get_ydata(), 0.5 * (edges[1:] + edges[:-1]))


def test_titles_tell_rhat_and_size_in_red_where_chains_disagree():
    theta = draws()
    figure = trace_plot({"beta": theta})
    good, bad = shown_axes(figure)[0], shown_axes(figure)[2]
    size = float(bulk_ess(theta[..., 0]))
    assert good.get_title(loc="left") == f"beta[0]   R-hat {float(rhat(theta[..., 0])):.3f}   ESS {size:,.0f}"
    assert bad.get_title(loc="left").startswith(f"beta[1]   R-hat {float(rhat(theta[..., 1])):.3g}")
    assert to_hex(bad._left_title.get_color()) == RED
    assert to_hex(good._left_title.get_color()) == (RED if rhat(theta[..., 0]) > 1.01 else BLACK)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"chain {index}" for index in range(4)]


def test_long_names_stay_in_their_panel():
    name = "encoder.layers.11.self_attention.in_projection_weight$"
    (title,) = titles(rank_plot({name: draws()[..., 0]}))
    first, second = title.split("\n")
    assert first.startswith("...")
    assert first.endswith(r"weight\$")
    assert len(first) <= 45
    assert second.startswith("R-hat")


def test_divergent_draws_are_marked():
    divergent = torch.zeros(4, 100, dtype=torch.bool)
    divergent[1, 17] = divergent[3, 60] = True
    figure = trace_plot(samples(draws(), divergent=divergent))
    for place in shown_axes(figure)[::2]:
        marks = place.get_lines()[-1]
        assert marks.get_marker() == "|"
        assert list(marks.get_xdata()) == [17, 60]
        assert set(marks.get_ydata()) == {place.get_ylim()[0]}
    assert figure.legends[0].get_texts()[-1].get_text() == "divergent"
    calm = trace_plot(samples(draws(), divergent=torch.zeros_like(divergent)))
    assert len(shown_axes(calm)[0].get_lines()) == 4


def test_long_chains_are_drawn_at_even_distances(monkeypatch):
    monkeypatch.setattr(drawing, "POINTS", 40)
    theta = draws(2, 100, 1)
    line = shown_axes(trace_plot({"beta": theta}))[0].get_lines()[0]
    np.testing.assert_array_equal(line.get_xdata(), np.arange(0, 100, 3))
    np.testing.assert_allclose(line.get_ydata(), theta[0, ::3, 0])


def test_the_worst_are_shown_where_there_are_many():
    theta = draws(3, 50, 30)
    worst = set(rhat(theta).argsort(descending=True)[:12].tolist())
    assert [title.split()[0] for title in titles(trace_plot({"beta": theta}))] == [
        f"beta[{index}]" for index in sorted(worst)
    ]


def test_names_choose():
    q = samples(draws(count=6))
    assert len(titles(trace_plot(q, ["bias"]))) == 1
    assert [title.split("  ")[0] for title in titles(rank_plot(q, ["weight[0, 2]", "b*"]))] == [
        "weight[0, 2]",
        "bias[0]",
    ]
    with pytest.raises(ValueError, match="Did you mean 'bias'"):
        trace_plot(q, ["bais"])
    with pytest.raises(ValueError, match="at least one quantity"):
        rank_plot(q, [])


def test_bars_count_ranks():
    theta = draws(4, 100, 1)
    theta[0, :, 0] += 2.0
    (place,) = shown_axes(rank_plot({"beta": theta}, bins=10))
    order = theta[..., 0].flatten().argsort().argsort().reshape(4, 100).numpy()
    counts = np.stack([np.histogram(ranks, np.arange(0, 401, 40))[0] for ranks in order])
    heights = np.array([bar.get_height() for bar in place.patches]).reshape(4, 10)
    np.testing.assert_allclose(heights / heights.sum() * 400, counts)
    bases = np.array([bar.get_y() for bar in place.patches]).reshape(4, 10)
    np.testing.assert_allclose(bases, np.arange(4)[:, None] + 0.45 + 0 * bases)
    lines = [line.get_ydata()[0] for line in place.get_lines()]
    unit = -heights.sum() / 400  # height of one draw
    np.testing.assert_allclose(lines, np.arange(4) + 0.45 - 10 * unit)
    assert place.get_xticklabels()[1].get_text() == "400"


def test_one_chain_is_drawn_as_halves():
    theta = torch.linspace(0.0, 1.0, 101, dtype=FLOAT64)[None, :, None]
    (place,) = shown_axes(rank_plot({"beta": theta}, bins=10))
    heights = np.array([bar.get_height() for bar in place.patches]).reshape(2, 10)
    assert (heights[0, 5:] == 0).all()  # a trend: the first half has the low ranks
    assert (heights[1, :5] == 0).all()
    assert place.get_ylabel() == "half"


def test_ties_go_to_all_chains_alike():
    (place,) = shown_axes(rank_plot({"beta": torch.full((4, 50), 3.0)}))
    assert len({round(bar.get_height(), 9) for bar in place.patches}) == 1


def test_many_chains_are_rows_of_colour():
    theta = draws(64, 50, 2)
    figure = rank_plot({"beta": theta}, bins=20)
    first = figure.axes[0].get_images()[0].get_array()
    assert first.shape == (64, 10)  # at least five draws of a chain in a bin
    spread = math.sqrt(5.0 * 0.9)
    order = theta[..., 0].flatten().argsort().argsort().reshape(64, 50).numpy()
    counts = np.stack([np.histogram(ranks, np.arange(0, 3201, 320))[0] for ranks in order])
    np.testing.assert_allclose(first, (counts - 5.0) / spread)
    shifted = figure.axes[1].get_images()[0].get_array()
    assert shifted[0, -1] > 5
    assert figure.axes[-1].get_ylabel() == "standard deviations"


@pytest.mark.parametrize(("count", "grid"), [(1, (1, 1)), (4, (1, 4)), (5, (2, 3)), (9, (3, 3)), (12, (3, 4))])
def test_panels_fill_their_grid(count, grid):
    figure = rank_plot({"beta": draws(2, 20, count)})
    assert figure.axes[0].get_gridspec().get_geometry() == grid
    assert len(shown_axes(figure)) == count


def test_energies_and_their_jumps():
    energy = Key(0).normal((4, 400), FLOAT64) + 100.0
    energy[2] = energy[2].cumsum(0)
    theta = draws(4, 400)
    left, right = energy_plot(samples(theta, energy=energy)).axes
    away = (energy - energy.mean(1, keepdim=True)).flatten().numpy()
    jumps = energy.diff(dim=1).flatten().numpy()
    edges = np.linspace(min(away.min(), jumps.min()), max(away.max(), jumps.max()), 41)
    np.testing.assert_allclose(
        [bar.get_height() for bar in left.containers[0]], np.histogram(away, edges, density=True)[0], atol=1e-12
    )
    outline = left.patches[-1].get_xy()[:, 1]
    np.testing.assert_allclose(outline[1:-1:2], np.histogram(jumps, edges, density=True)[0], atol=1e-12)
    fine, low, limit = right.get_lines()
    assert list(low.get_xdata()) == [2]
    assert to_hex(low.get_color()) == RED
    assert to_hex(fine.get_color()) == BLUE
    np.testing.assert_allclose(fine.get_ydata(), e_bfmi(energy)[[0, 1, 3]])
    assert limit.get_ydata()[0] == 0.3
    assert energy_plot(energy).axes[1].get_ylabel() == "E-BFMI"


@pytest.mark.parametrize("plot", [trace_plot, rank_plot])
def test_odd_draws_are_drawn(plot, tmp_path):
    theta = draws(2, 40, 4)
    theta[..., 0] = 3.0
    theta[0, 5, 1], theta[1, 7, 1] = math.nan, math.inf
    theta[..., 2] = math.nan
    figure = plot({"beta": theta})
    figure.savefig(tmp_path / "odd.png")
    assert len(titles(figure)) == 4
    assert (tmp_path / "odd.png").stat().st_size > 1000
    assert len(titles(plot({"beta": theta[:, :1, :1]}))) == 1


def test_refusals():
    with pytest.raises(ValueError, match="energy_plot needs energies"):
        energy_plot(samples(draws()))
    with pytest.raises(ValueError, match="energy_plot needs energies"):
        energy_plot(torch.zeros(3, 1))
    with pytest.raises(ValueError, match="A figure of chains needs Samples or draws"):
        trace_plot({"a": torch.zeros(2, 5), "b": torch.zeros(2, 6)})
    with pytest.raises(ValueError, match="A figure of chains needs Samples or draws"):
        rank_plot({})
    with pytest.raises(ValueError, match="bins must be a positive whole number"):
        rank_plot({"a": torch.zeros(2, 5)}, bins=0)
