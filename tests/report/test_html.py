"""The HTML page of a comparison: its structure, that it escapes and needs nothing else; the pictures made for it."""

import struct
import zlib
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch

import posterity as po
from posterity import report
from posterity.posteriors import Point
from posterity.report import figures as diagnostics
from posterity.report.html import Picture, comparison_page

pytestmark = pytest.mark.cpu
VOID = {"meta", "img", "br"}
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


def column(key, heading):
    return SimpleNamespace(key=key, heading=heading, shown=lambda value: f"{value:.3f}")


def png(width=30, height=15):
    """A black PNG image."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" * (width + 1)) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def page(name="data", notes=(), **changes):
    row = {"test_nll": 0.1, "ece": 0.2, "seconds": 2.0, "best": ["test_nll"], "failed": None, "reason": None}
    first = {"method": "a", **row, "starts_from": None}
    second = {**first, "method": "b", "test_nll": 0.3, "starts_from": "a", "best": []}
    failed = {**second, "method": "c", "test_nll": None, "ece": None, "seconds": None, "starts_from": None}
    failed |= {"failed": f"it broke: {name}", "reason": f"broke {name}"}
    document = {
        "data": name,
        "task": "classification",
        "train_rows": 12,
        "test_rows": 34,
        "settings": {"seed": 5, "step_size": 0.01, "target": name, "hidden": [6, 7], "drop": [], "header": None},
        "notes": list(notes),
        "methods": [first, second, failed],
        "baselines": [{**row, "baseline": "z", "test_nll": 0.5, "best": []}],
        "verdict": {"sentence": f"Take First on {name}."},
    }
    options = {
        "network": "2-3-2",
        "remarks": [f"remark {name}"],
        "command": f"posterity compare {name}",
        "date": "2026-01-02 03:04 UTC",
        "versions": {"torch": "2.13"},
        "pictures": [Picture("Seen", png(), f"what {name} shows", "how to read it")],
        **changes,
    }
    return comparison_page(
        document,
        [column("test_nll", "test NLL"), column("ece", "ECE")],
        {"a": "First", "b": "Second", "c": "Third", "z": "mean"},
        options.pop("pictures"),
        **options,
    )


@pytest.mark.parametrize("name", ["data", HOSTILE])
def test_the_page_is_well_formed_whatever_the_names(name):
    text = page(name, notes=[f"note {name}"])
    found = Page(text)
    assert text.startswith("<!DOCTYPE html>\n")
    assert found.wrong == []
    assert found.open == []
    assert len(found.all("h1")) == len(found.all("title")) == len(found.all("main")) == 1
    assert [image["alt"] for image in found.all("img")] == [f"what {name} shows"]
    assert found.all("script") == []
    assert not any(attribute.startswith("on") for _, attributes in found.tags for attribute in attributes)
    words = "".join(part for _, part in found.texts)
    told = (f"First, Second and Third on {name}", f"note {name}", f"remark {name}", f"posterity compare {name}")
    for wanted in (*told, f"broke {name}", f"Take First on {name}."):
        assert wanted in words


def test_the_page_says_what_was_compared():
    words = "".join(part for _, part in Page(page()).texts)
    for wanted in ("12 for training, 34 for the test", "2-3-2", "2026-01-02 03:04 UTC", "torch 2.13", "step size"):
        assert wanted in words
    for score in ("NLL, the negative log-likelihood", "ECE, the expected calibration error"):
        assert score in words
    assert "RMSE" not in words
    shown = Page(page()).texts
    values = {shown[at - 1][1]: part for at, (tag, part) in enumerate(shown) if tag == "dd"}
    assert (values["hidden"], values["drop"], values["header"], values["seed"]) == ("6, 7", "-", "-", "5")
    assert "How the file was read" not in words  # made data have no file


def test_the_best_of_each_column_is_marked():
    found = Page(page())
    cells = [attributes for tag, attributes in found.tags if tag == "td"]
    assert [cell.get("class") for cell in cells] == [None] * 3 + ["best"] + [None] * 5 + ["failed"]
    assert cells[-1]["colspan"] == "3"  # scores and seconds
    texts = [part for tag, part in found.texts if tag == "td"]
    assert texts[:3] == ["0.500", "0.200", "2.00"]  # the baseline
    assert texts[3:] == ["0.100", "0.200", "2.00", "0.300", "0.200", "+2.00", "broke data"]
    assert [tag.get("class") for tag in found.all("tr")] == [None, "baseline", None, None, None]
    assert [part for tag, part in found.texts if tag == "span"] == ["*", " best"]


def test_the_page_needs_no_other_file():
    text = page()
    found = Page(text)
    assert all(image["src"].startswith("data:image/png;base64,") for image in found.all("img"))
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert found.all("link") == []
    (policy,) = [tag["content"] for tag in found.all("meta") if "http-equiv" in tag]
    assert policy.startswith("default-src 'none'")


def test_a_picture_has_the_size_and_the_bytes_of_its_png():
    (small,) = Page(page()).all("img")
    assert (small["width"], small["height"]) == ("20", "10")
    assert "class" not in small
    (broad,) = Page(page(pictures=[Picture("", png(1200, 300), "", "")])).all("img")
    assert broad["class"] == "broad"  # scrolls on a phone, where it would be too small


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
