"""The HTML pages: their structure, that they escape and need nothing else; numbers and charts in them; figures."""

import base64
import hashlib
import json
import re
import struct
import zlib
from html import escape
from html.parser import HTMLParser

import pytest
import torch

import posterity as po
from posterity import report
from posterity.posteriors import Point
from posterity.report import charts, html
from posterity.report import figures as diagnostics
from posterity.report.html import Picture, figure, paragraph, section, settings
from posterity.report.numbers import number, with_ends
from posterity.report.sections import (
    by_method,
    class_sections,
    made_by,
    methods_chooser,
    numbers_sections,
    scores_table,
    warnings,
)

pytestmark = pytest.mark.cpu
VOID = {"meta", "img", "br", "input"}
SVG = "http://www.w3.org/2000/svg"  # a name, which nobody opens
HOSTILE = """</title><script>alert("1")</script><img src='x' onerror=alert(2)>&amp;"""


class Page(HTMLParser):
    """The tags of a page, with its text, and what is not balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.wrong, self.texts = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.texts.append(((self.open or [""])[-1], data))

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def png(width=30, height=15):
    """A black PNG image."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" * (width + 1)) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def rows(name="data"):
    """A baseline, a method, one that starts from it, and one that failed."""
    row = {"test_nll": 0.1, "ece": 0.2, "seconds": 2.0, "failed": None, "reason": None, "starts_from": None}
    row |= {"is_baseline": False, "intervals": {"test_nll": [0.05, 0.15], "ece": None}}
    first = {**row, "word": "a", "label": "First"}
    second = {**row, "word": "b", "label": "Second", "test_nll": 0.3, "starts_from": "a", "seconds": 0.001}
    failed = {**second, "word": "c", "label": name, "failed": f"it broke: {name}", "reason": f"broke {name}"}
    return [{**row, "word": "z", "label": "mean", "is_baseline": True, "test_nll": 0.5}, first, second, failed]


COLUMNS = {"test_nll": "test NLL", "ece": "ECE"}


def whole(name="data"):
    """A page with all that takes names."""
    packed = {"methods": [], "figures": {}, "rows": [name]}
    parts = [
        f"<h1>{escape(name)}</h1>",
        scores_table(rows(name), COLUMNS, {"test_nll": ("a",)}),
        methods_chooser([("a", name)], ["a"]),
        *class_sections([name, "other"], "All.", has_map=True),
        *numbers_sections((0.5, 0.9), 0.9, name, has_line=True),
        by_method(name, name, {("a", name): paragraph(name)}),
        warnings([name]),
        section(name, html.table(name, [name, "b"], [(name, name)]), settings({"target": name, "drop": [], "x": None})),
        made_by(f"posterity compare {name}", {"Data": name}),
        figure(Picture("Seen", png(), f"what {name} shows", name)),
    ]
    return html.page(name, parts, packed)


@pytest.mark.parametrize("name", ["data", HOSTILE])
def test_the_page_is_well_formed_whatever_the_names(name):
    text = whole(name)
    found = Page(text)
    assert text.startswith("<!DOCTYPE html>\n")
    assert found.wrong == []
    assert found.open == []
    assert len(found.all("h1")) == len(found.all("title")) == len(found.all("main")) == 1
    assert [image["alt"] for image in found.all("img")] == [f"what {name} shows"]
    assert [script.get("type") for script in found.all("script")] == ["application/json", None]
    assert not any(attribute.startswith("on") for _, attributes in found.tags for attribute in attributes)
    assert not any("style" in attributes for _, attributes in found.tags)  # the policy would refuse it
    words = "".join(part for _, part in found.texts)
    for wanted in (f"posterity compare {name}", f"broke {name}"):
        assert wanted in words
    numbers = next(part for tag, part in found.texts if tag == "script")
    assert json.loads(numbers)["rows"] == [name]
    labelled = {label["for"] for label in found.all("label") if "for" in label}
    inside = set(re.findall(r'<label>[^<]+<input[^>]* id="(\w+)"', text))
    assert {control["id"] for control in found.all("input") if control["type"] != "checkbox"} == labelled | inside


def test_the_best_of_each_column_is_marked_and_intervals_stand_below():
    found = Page(scores_table(rows(), COLUMNS, {"test_nll": ("a",)}))
    cells = [attributes for tag, attributes in found.tags if tag == "td"]
    assert [cell.get("class") for cell in cells] == [None] * 3 + ["best"] + [None] * 5 + ["failed"]
    assert cells[-1]["colspan"] == "3"  # scores and seconds
    texts = [part for tag, part in found.texts if tag == "td"]
    assert texts[:3] == ["0.500", "0.2000", "2.0"]  # the baseline
    assert texts[3:] == ["0.100", "0.2000", "2.0", "0.300", "0.2000", "+under 0.01", "broke data"]
    assert [part for tag, part in found.texts if tag == "small"] == ["0.050 to 0.150"] * 3
    assert [tag.get("class") for tag in found.all("tr")] == [None, "baseline", None, None, None]
    assert [part for tag, part in found.texts if tag == "span"] == ["*", " best"]


def test_the_page_needs_no_other_file_and_runs_what_its_hash_allows():
    text = whole()
    found = Page(text)
    assert all(image["src"].startswith("data:image/png;base64,") for image in found.all("img"))
    assert "://" not in text.replace(SVG, "")
    assert "url(" not in text
    assert "@import" not in text
    assert found.all("link") == []
    (policy,) = [tag["content"] for tag in found.all("meta") if "http-equiv" in tag]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for kind, (content,) in (
        ("style", [part for tag, part in found.texts if tag == "style"]),
        ("script", [part for tag, part in found.texts if tag == "script"][1:]),
    ):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    still = html.page("page", ["<h1>page</h1>"])
    assert "<script" not in still
    assert "script-src" not in still


def test_a_picture_has_the_size_and_the_bytes_of_its_png():
    (small,) = Page(figure(Picture("", png(), "", ""))).all("img")
    assert (small["width"], small["height"]) == ("20", "10")
    assert "class" not in small
    (broad,) = Page(figure(Picture("", png(1200, 300), "", ""))).all("img")
    assert broad["class"] == "broad"  # scrolls on a phone, where it would be too small


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (71538.0657, 4, "71,538"),
        (0.000012345, 4, "1.23e-5"),
        (-0.5, 3, "-0.500"),
        (1234567.8, 3, "1,234,568"),
        (0.0, 2, "0.0"),
        (None, 4, "-"),
        (float("inf"), 4, "infinite"),
    ],
)
def test_numbers_for_people(value, digits, shown):
    assert number(value, digits) == shown


@pytest.mark.parametrize(
    ("value", "ends", "shown"),
    [
        (71538.0657, [71536.2, 71539.9], ("71,538.1", "71,536.2 to 71,539.9")),
        (0.5, [0.5, 0.5], ("0.5000", "0.5000 to 0.5000")),
        (-5.7e-8, [-2.3e-7, 0.0], ("0.0000", "0.0000 to 0.0000")),
        (0.9962, [0.9933, 0.9975], ("0.9962", "0.9933 to 0.9975")),
        (3.0, None, ("3.000", "")),
    ],
)
def test_digits_are_those_that_the_interval_supports(value, ends, shown):
    assert with_ends(value, ends) == shown


def test_a_histogram_counts_shares_of_all_rows():
    values = torch.cat([torch.arange(100.0), torch.tensor([torch.inf])])
    (series,) = charts.histogram("label", "axis", {"": values}, rule=1.0)["series"]
    assert len(series["edges"]) == len(series["y"]) + 1 == 11
    assert series["y"] == pytest.approx([10 / 101] * 10, rel=1e-6)
    assert series["notes"][0] == "10 rows"


def test_a_curve_is_thinned_and_logarithmic_where_it_spans_factors():
    steps = torch.arange(1, 1001)
    chart = charts.curves("label", "step", "loss", {"": (steps, 1000.0 / steps)})
    (line,) = chart["series"]
    assert (len(line["x"]), line["x"][0], line["x"][-1]) == (charts.POINTS, 1.0, 1000.0)
    assert chart["y"]["log"]
    assert not charts.curves("label", "step", "loss", {"": (steps, steps.double() - 5.0)})["y"]["log"]
    broken = charts.curves("label", "step", "loss", {"": (steps[:2], torch.tensor([1.0, torch.nan]))})
    assert broken["series"][0]["y"] == [1.0, None]


def point(data, seed=0):
    outputs = 1 if data.classes is None else len(data.classes)
    likelihood = po.likelihoods.Gaussian(0.3) if data.classes is None else po.likelihoods.Categorical()
    net = po.networks.MLP((data.train.inputs.shape[1], 4, outputs), activation="tanh")
    joint = po.Joint(net, likelihood, po.priors.Normal(1.0), num_data=len(data.train))
    return Point(joint, po.Key(seed).normal((joint.size,)))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be written."""
    found = []
    monkeypatch.setattr(diagnostics.canvas, "save", lambda figure, path, margin: found.append(figure))
    return found


def test_the_reliability_diagram_shows_the_bins_of_the_metric(drawn):
    data = po.datasets.load("two-moons")
    q = point(data)
    report.reliability_diagram({"q": q, "other": point(data, 1)}, data, "r.png")
    table = po.metrics.reliability(q.predict(data.test.inputs), data.test.targets)
    some = table.count > 0
    first, second = drawn[0].axes
    dots = torch.as_tensor(first.collections[-1].get_offsets().filled())
    torch.testing.assert_close(dots, torch.stack([table.confidence[some], table.accuracy[some]], 1))
    assert (first.get_title(), second.get_title()) == ("q", "other")


def test_predicted_and_observed_are_in_the_units_asked_for(drawn):
    data = po.datasets.load("sine")
    q = point(data)
    report.predicted_observed({"q": q}, data, "p.png", scale=10.0, shift=-3.0)
    (place,) = drawn[0].axes
    inside, missed, dots = place.collections
    points = torch.as_tensor(dots.get_offsets().filled())
    assert len(points) == diagnostics.MOST_INTERVALS == len(inside.get_segments()) + len(missed.get_segments())
    first = torch.stack([data.test.targets[0, 0], q.predict(data.test.inputs[:1]).mean[0, 0]])
    torch.testing.assert_close(points[0].to(first), first.detach() * 10 - 3)
    for collection, crosses in ((inside, True), (missed, False)):
        for (at, low), (_, high) in collection.get_segments():
            assert bool(low <= at <= high) is crosses


def test_pictures_are_refused_for_the_other_task():
    sine, moons = po.datasets.load("sine"), po.datasets.load("two-moons")
    with pytest.raises(ValueError, match="needs data with classes"):
        report.reliability_diagram({"q": point(sine)}, sine, "r.png")
    with pytest.raises(ValueError, match="needs regression with one output"):
        report.predicted_observed({"q": point(moons)}, moons, "p.png")
