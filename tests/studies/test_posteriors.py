"""The study of reference posteriors: its limits, its document and its figure, on a posterior of one's own."""

import dataclasses
import json

import pytest
import torch

import posterity as po
from posterity_studies.posteriors import study
from posterity_studies.posteriors.densities import Model
from posterity_studies.posteriors.figures import draw
from posterity_studies.posteriors.study import Comparison, Reference, Study, compared

pytestmark = pytest.mark.cpu


@pytest.fixture
def normal(monkeypatch):
    """A posterior that is two standard normal numbers, whose reference says so."""
    problem = po.Density(lambda x: -0.5 * x.square().sum(-1), {"x": (2,)}, batched=True, dtype=torch.float64)
    zero, single = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    known = Reference(("x[1]", "x[2]"), zero, 0.01 * single, single, 0.01 * single)
    monkeypatch.setattr(study, "stated", lambda name, form: Model(name, problem, start=(zero, single)))
    monkeypatch.setattr(study, "reference", lambda name: known)
    return known


def sampled() -> Comparison:
    return compared("some", "Density", seed=0, chains=16, warmup=60, draws=150, accelerate="off")


def test_a_right_reference_is_met(normal):
    result = sampled()
    assert result.parameters == 2
    assert result.good
    assert result.leapfrogs >= 1.0


def test_a_wrong_reference_is_not(normal, monkeypatch):
    for wrong in ({"mean": normal.mean + 0.3}, {"sd": 1.3 * normal.sd}):
        monkeypatch.setattr(study, "reference", lambda name, wrong=wrong: dataclasses.replace(normal, **wrong))
        assert not sampled().good


def row(**changes: object) -> Comparison:
    good = Comparison("some", "Density", 2, 3.9, 4.9, 1.009, 1001.0, 0.0009, 7.0, 1.0)
    return dataclasses.replace(good, **changes)


@pytest.mark.parametrize(
    "bad", [{"mean_errors": 4.1}, {"sd_errors": 5.1}, {"rhat": 1.011}, {"ess": 999.0}, {"divergent": 0.0011}], ids=str
)
def test_every_limit_counts(bad):
    assert row().good
    assert not row(**bad).good


def test_the_document_and_the_figure(tmp_path):
    result = Study(3, 16, 10, 20, (row(), row(posterior="other", rhat=1.2)))
    document = result.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [posterior["good"] for posterior in document["posteriors"]] == [True, False]
    assert (document["seed"], document["chains"], document["warmup"], document["draws"]) == (3, 16, 10, 20)
    pytest.importorskip("matplotlib")
    assert draw(result, tmp_path) == ["errors.png"]
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
