"""`posterity study penalties`: the table, the folder, going on, processes, and what is refused."""

import json

import pytest
from noiseimages import noise_images

from posterity.inference import sweep
from posterity_studies.penalties import problem, settings

pytestmark = pytest.mark.cpu
TINY = (
    *("--penalties", "l2,rows", "--ratios", "0.1,1", "--seeds", "1", "--epochs", "1", "--rows", "20", "--width", "1"),
    *("--batch-size", "10", "--held-out", "20", "--device", "cpu"),
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A handful of images: those of the data sets take long."""
    monkeypatch.setattr(problem, "mnist", lambda name="mnist": noise_images(name, (1, 28, 28), 100, 20))
    monkeypatch.setattr(problem, "cifar10", lambda: noise_images("cifar-10", (3, 32, 32), 60, 60))
    monkeypatch.setattr("posterity_studies.penalties.figures.draw", lambda study, folder: ["accuracy.png"])


def test_the_table_and_the_folder(study):
    told = (
        "--penalties l2,rows --ratios 0.1,1 --seeds 1 --epochs 1 --rows 20 --width 1 --batch-size 10 --no-augment "
        "--held-out 20 --device cpu"
    )
    result = study("penalties", *TINY, "--no-augment", told=told, seed=3, goes_on=True)
    assert "mnist, small convolutional network of width 1, n = 20: test accuracy in per cent" in result.out
    assert "rows, bayesian" in result.out
    assert result.err.splitlines()[0] == "l2, step size 0.1, 1 epoch: 4 fits together, 2 steps"
    assert result.stored["fits"]


def test_the_numbers_of_the_authors_stand_beside(run, tmp_path):
    result = run("study", "penalties", *TINY, "--data", "cifar-10", "--penalties", "rows", "--out", tmp_path / "study")
    assert result.code == 0
    theirs = result.out.partition("As the authors had it")[2]
    line = next(line for line in theirs.splitlines() if "rows, bayesian " in line).split()
    assert (line[2], line[4], line[6]) == ("88.67", "87.45", "100")
    best = result_of(tmp_path)["table"][1]["accuracy_at_best"]["mean"]
    assert line[3] == f"({100 * best - 88.67:+.2f})"
    assert "One seed. lambda* has the best accuracy on 20 held-out training rows." in result.out


def result_of(folder):
    return json.loads((folder / "study" / "results.json").read_text())


def test_goes_on_where_it_was_interrupted(interrupted):
    resumed, there = interrupted("penalties", *TINY, writer=sweep)
    assert "l2, step size 0.1, 1 epoch: takes up 4 fits that were interrupted" in resumed
    assert there == [f"{name}, step size 0.1, 1 epoch: 4 of 4 fits are there already" for name in ("l2", "rows")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "mnits"), "Did you mean 'mnist'?"),
        (("--net", "vgg"), "Did you mean 'vgg19'?"),
        (("--penalties", "l3"), "Unknown penalty 'l3'"),
        (("--penalties", ","), "--penalties must name at least one"),
        (("--setups", "bayes"), "Unknown setup 'bayes'"),
        (("--ratios", "1,x"), "--ratios must be numbers"),
        (("--ratios", "0"), "must be a positive number. Got 0.0."),
        (("--lambdas", "-1"), "must be a positive number. Got -1.0."),
        (("--lambdas", "inf"), "must be a positive number. Got inf."),
        (("--rows", "1000"), "rows must be at most the 80"),
        (("--held-out", "100"), "must leave some of the 100"),
        (("--precision", "float16"), "precision"),
        (("--jobs", "0"), "--jobs must be a positive whole number. Got 0."),
        (("--device", "gpu"), "Unknown device 'gpu'."),
    ],
)
def test_what_cannot_be_used_is_refused(refused, words, said):
    assert said in refused("penalties", *TINY, *words)


def test_the_names_of_the_options_are_those_of_the_study():
    assert tuple(problem.ARCHITECTURES) == settings.NETWORKS
    assert tuple(problem.PENALTIES) == settings.PENALTIES
