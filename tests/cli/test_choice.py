"""The network of a file whose hidden layers were left out."""

import json

import pytest
import torch

import posterity as po
from posterity.recipes import choice
from posterity.recipes.choice import sufficient

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Fits of few steps, which these small tables need no more of."""
    monkeypatch.setattr(choice, "STEPS", 300)


def _chosen(x, y):
    """What is chosen of a linear model and one with eight units."""

    def joint_with(hidden):
        torch.manual_seed(0)
        net = po.networks.MLP((x.shape[1], *hidden, 1), activation="tanh")
        return po.Joint(net, po.likelihoods.Gaussian(), po.priors.Normal(), num_data=len(x))

    return sufficient(joint_with, (8,), (x, y.unsqueeze(1)))


def _rows(count, columns):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, columns, generator=generator), torch.randn(count, generator=generator)


def test_a_linear_target_keeps_a_linear_model():
    x, noise = _rows(60, 2)
    hidden, why = _chosen(x, x[:, 0] - 0.5 * x[:, 1] + 0.5 * noise)
    assert hidden == ()
    assert "as a network of 8 hidden units is not surely better (its leave-one-out NLL is" in why


@pytest.mark.parametrize(("whole", "how"), [(choice.WHOLE, "leave-one-out"), (10, "held-out")])
def test_a_curved_target_takes_the_hidden_units(monkeypatch, whole, how):
    monkeypatch.setattr(choice, "WHOLE", whole)
    x, noise = _rows(80, 1)
    hidden, why = _chosen(x, torch.sin(3 * x[:, 0]) + 0.1 * noise)
    assert hidden == (8,)
    assert f"8 hidden units predicts better than a linear model (its {how} NLL is lower by " in why


def test_far_more_weights_than_rows_are_not_tried(monkeypatch):
    monkeypatch.setattr(choice, "infer", None)  # would fail
    x, noise = _rows(10, 100)
    hidden, why = _chosen(x, torch.sin(3 * x[:, 0]) + 0.1 * noise)
    assert hidden == ()
    assert why == "a linear model is taken, as 8 hidden units would be 817 weights."


@pytest.fixture
def curve(tmp_path):
    x, noise = _rows(60, 1)
    lines = (f"{a:.4f},{torch.sin(3 * a) + 0.1 * b:.4f}" for a, b in zip(x[:, 0], noise, strict=True))
    (tmp_path / "curve.csv").write_text("\n".join(["x,y", *lines]))
    return tmp_path / "curve.csv"


def test_files_say_what_was_chosen(run, curve, monkeypatch):
    seen = []

    def choose(joint_with, hidden, rows):
        seen.append((joint_with(()).num_weights, joint_with(hidden).num_weights, len(rows[0])))
        return (), "a linear model is enough."

    monkeypatch.setattr(choice, "sufficient", choose)
    words = ("plan", curve, "--target", "y", "--methods", "map", "--device", "cpu", "--json")
    result = run(*words)
    assert seen == [(2, 151, 48)]
    assert "MAP over 2 weights" in json.loads(result.out)["stages"][0]["method"]
    compared = run("compare", *words[1:], "--prior-scale", "1", "--noise", "0.1")
    said = "a linear model is enough; --hidden 50 takes these."
    assert said in json.loads(compared.out)["notes"]
    assert said in compared.err
    assert json.loads(compared.out)["settings"]["hidden"] == []
    assert run(*words, "--hidden", "3").code == 0
    assert len(seen) == 2  # layers that are given are taken


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--methods", "map", "--structure", "full"), "--structure is for laplace"),
        (("--figure", "figure.pnk"), "'png'"),
        (("--task", "classification", "--figure", "figure.png"), "--figure draws classification with 2 inputs. Got 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_fitted(run, curve, monkeypatch, words, said):
    monkeypatch.setattr(choice, "sufficient", lambda *_: pytest.fail("fitted"))
    curve.write_text("x,y\n" + "".join(f"{i},{i % 3}\n" for i in range(60)))
    result = run("compare", curve, "--target", "y", *words)
    assert result.code == 2
    assert said in result.err.splitlines()[0]
