"""Figures: what is drawn, where it is written, and what is refused."""

import subprocess
import sys

import pytest
import torch

import posterity as po
from posterity import report
from posterity.errors import PosterityError
from posterity.posteriors import Point
from posterity.report import figures, files

pytestmark = pytest.mark.cpu


def point(data, seed=0):
    """A posterior for the data with random weights: what is drawn, not how good it is, is looked at."""
    inputs = data.train.inputs.shape[1]
    outputs = 1 if data.classes is None else len(data.classes)
    likelihood = po.likelihoods.Gaussian(0.3) if data.classes is None else po.likelihoods.Categorical()
    net = po.networks.MLP((inputs, 4, outputs), activation="tanh")
    joint = po.Joint(net, likelihood, po.priors.Normal(1.0), num_data=len(data.train))
    return Point(joint, po.Key(seed).normal((joint.size,)))


def laplace(data):
    q = point(data)
    return po.infer(po.methods.Laplace(tuning=None), q.joint, data.train.pair, start=q, progress=False)[0]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be written."""
    found = []
    monkeypatch.setattr(figures.canvas, "save", lambda figure, path, margin: found.append(figure))
    return found


def test_a_map_for_each_posterior_with_a_shared_scale(drawn):
    data = po.datasets.load("two-moons")
    panels = {"first": point(data, 0), "second": point(data, 1)}
    report.class_probability_maps(panels, data, "maps.png")
    (figure,) = drawn
    first, second, bar = figure.axes
    nll = po.metrics.negative_log_likelihood(panels["second"].predict(data.test.inputs), data.test.targets)
    assert second.get_title() == f"second   test NLL {nll:.3f}"
    assert bar.get_ylabel() == "p(y = lower | x)"
    for place in (first, second):
        (image,) = place.get_images()
        assert image.get_clim() == (0.0, 1.0)  # the middle of the diverging colours is 0.5
    low, high = data.train.inputs.amin(0), data.train.inputs.amax(0)
    span = float((high - low).max())
    for limits, side in ((first.get_xlim(), 0), (first.get_ylim(), 1)):
        assert limits[0] < float(low[side]) - 0.5 * span
        assert limits[1] > float(high[side]) + 0.5 * span
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["training rows: upper", "training rows: lower"]


def test_the_map_shows_the_probabilities_at_their_places(drawn):
    data = po.datasets.load("two-moons")
    q = point(data, 3)
    report.class_probability_maps({"q": q}, data, "maps.png", {"q": 0.0})
    place = drawn[0].axes[0]
    (image,) = place.get_images()
    left, right, bottom, top = image.get_extent()
    shown = torch.as_tensor(image.get_array().filled())
    rows, columns = 5, 40
    x = torch.tensor(left + (right - left) * (columns + 0.5) / figures.GRID)  # the middle of the pixel
    y = torch.tensor(bottom + (top - bottom) * (rows + 0.5) / figures.GRID)
    expected = q.predict(torch.stack([x, y])[None]).probs[0, 1]
    assert image.origin == "lower"
    assert float(shown[rows, columns]) == pytest.approx(float(expected), abs=1e-5)


def test_known_scores_are_not_computed_again(drawn):
    data = po.datasets.load("two-moons")
    report.class_probability_maps({"q": point(data)}, data, "maps.png", {"q": 1.25})
    assert drawn[0].axes[0].get_title() == "q   test NLL 1.250"


@pytest.mark.parametrize("name", ["two-moons", "blobs", "sine"])
def test_a_title_may_have_a_second_line(drawn, name):
    data = po.datasets.load(name)
    q = point(data)
    report.comparison({"q": q, "r": q}, data, "a.png", {"q": 1.0, "r": 2.0}, {"r": "far away 0.50"})
    first, second = drawn[0].axes[:2]
    assert [text.get_text() for text in first.texts] == []
    assert [text.get_text() for text in second.texts] == ["far away 0.50"]
    assert second.get_title() == "r   test NLL 2.000"


def test_confidence_is_for_many_classes(drawn):
    data = po.datasets.load("blobs")
    report.confidence_maps({"q": point(data)}, data, "maps.png", {"q": 1.0})
    first, bar = drawn[0].axes
    (image,) = first.get_images()
    assert image.get_clim() == (pytest.approx(1 / 3), 1.0)
    assert bar.get_ylabel() == "probability of the most probable class"
    assert len(drawn[0].legends[0].get_texts()) == 3


def test_the_margin_of_a_class_is_over_the_best_other_one():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], dtype=torch.float64)
    expected = torch.tensor([[0.2, 0.0], [-0.2, 0.0], [-0.3, -0.2]], dtype=torch.float64)
    assert torch.allclose(figures.class_margins(probs), expected)


def test_bands_split_what_the_weights_leave_open_from_the_noise(drawn):
    data = po.datasets.load("sine")
    report.regression_bands({"MAP": point(data), "Laplace": laplace(data)}, data, "bands.png")
    (figure,) = drawn
    plain, banded = figure.axes
    assert len(plain.collections) == 2  # the total band and the points: a point leaves nothing open
    assert len(banded.collections) == 3
    total, weights = (band.get_paths()[0].vertices for band in banded.collections[:2])
    assert total[:, 1].max() > weights[:, 1].max()
    assert total[:, 1].min() < weights[:, 1].min()
    assert plain.get_xlim() == banded.get_xlim()
    assert plain.get_xlim()[1] > float(data.test.inputs.max())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "95 % of targets (total)",
        "mean",
        "training rows",
        "test rows",
        "95 % of functions (epistemic)",
    ]


@pytest.mark.parametrize(("data", "suffix"), [("two-moons", "png"), ("blobs", "pdf"), ("sine", "svg"), ("line", "PNG")])
def test_comparison_draws_what_suits_the_data(tmp_path, data, suffix):
    data = po.datasets.load(data)
    path = tmp_path / "new" / f"figure.{suffix}"
    report.comparison({"q": point(data)}, data, path)
    begin = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[suffix.lower()]
    assert path.read_bytes().startswith(begin)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_no_global_state_of_matplotlib_is_touched():
    code = """
import sys
import posterity as po
from posterity import report
from posterity.posteriors import Point
assert "matplotlib" not in sys.modules
data = po.datasets.load("line")
joint = po.Joint(po.networks.MLP((1, 1)), po.likelihoods.Gaussian(0.5), po.priors.Normal(), num_data=len(data.train))
report.regression_bands({"q": Point(joint, joint.initial())}, data, sys.argv[1])
print("matplotlib.pyplot" in sys.modules)
"""
    import os
    import tempfile

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, os.path.join(folder, "a.png")]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert result.stdout == "False\n"


def test_a_figure_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    data = po.datasets.load("line")
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(PosterityError, match="No space left on device"):
        report.comparison({"q": point(data)}, data, path, {"q": 1.0})
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["figure.png"]


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    data = po.datasets.load("line")
    with pytest.raises(PosterityError, match=r"pip install 'posterity\[report\]'"):
        report.regression_bands({"q": point(data)}, data, "bands.png")


def test_a_broken_matplotlib_is_told_apart_from_a_bug(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    data = po.datasets.load("line")
    with pytest.raises(PosterityError, match=r"pip install 'posterity\[report\]'"):
        report.regression_bands({"q": point(data)}, data, "bands.png")


@pytest.mark.parametrize(
    ("draw", "data", "message"),
    [
        (report.class_probability_maps, "blobs", "two classes. Got 3. Use confidence_maps"),
        (report.class_probability_maps, "line", "needs data with classes"),
        (report.confidence_maps, "sine", "Use regression_bands"),
        (report.regression_bands, "two-moons", "one input and one output"),
    ],
)
def test_data_that_do_not_suit_a_figure_are_refused(draw, data, message, tmp_path):
    data = po.datasets.load(data)
    with pytest.raises(ValueError, match=message):
        draw({"q": point(data)}, data, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_a_figure_needs_a_panel_and_a_known_format(tmp_path):
    data = po.datasets.load("line")
    with pytest.raises(ValueError, match="at least one panel"):
        report.comparison({}, data, tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"must be a \.png, \.pdf or \.svg file"):
        report.comparison({"q": point(data)}, data, tmp_path / "a.gif")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(ValueError, match="must be a file"):
        report.comparison({"q": point(data)}, data, tmp_path / "b.png")
