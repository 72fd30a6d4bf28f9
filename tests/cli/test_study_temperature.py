"""`posterity study temperature`: the table, the folder, going on, and what is refused."""

import pytest

from posterity.inference import sweep
from posterity_studies.temperature import problem, settings

pytestmark = pytest.mark.cpu
TINY = (
    *("--data", "two-moons", "--widths", "3,5", "--etas", "0.1,1", "--seeds", "2", "--steps", "3", "--draws", "2"),
    *("--batch-size", "50", "--device", "cpu"),
)


def test_the_table_and_the_folder(study):
    told = (
        "--data two-moons --widths 3,5 --etas 0.1,1 --taus 0.001,0.01,0.1 --seeds 2 --steps 3 --batch-size 50 "
        "--draws 2 --device cpu"
    )
    result = study("temperature", *TINY, "--taus", "1e-3:1e-1:3", told=told, seed=3, goes_on=True)
    assert "two-moons, one hidden layer, averaged over its neurons, width 5: 5 neurons" in result.out
    assert result.err.splitlines()[0] == "width 3: 10 fits together, 3 steps"
    assert result.stored["settings"]["taus"] == [0.001, 0.01, 0.1]
    assert result.stored["fits"]


def test_goes_on_where_it_was_interrupted(interrupted):
    resumed, there = interrupted("temperature", *TINY, writer=sweep)
    assert "width 3: takes up 4 fits that were interrupted" in resumed
    assert there == [f"width {width}: 4 of 4 fits are there already" for width in (3, 5)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data", "mnits"), "Did you mean 'mnist'?"),
        (("--net", "lenett"), "Did you mean 'lenet'?"),
        (("--method", "vi"), "Unknown method 'vi'"),
        (("--etas", "1,x"), "--etas must be numbers"),
        (("--etas", ","), "--etas must have at least one number"),
        (("--etas", "0"), "must be a positive number. Got 0.0."),
        (("--etas", "nan"), "must be a positive number. Got nan."),
        (("--taus", "-1"), "must be a positive number. Got -1.0."),
        (("--taus", "inf"), "must be a positive number. Got inf."),
        (("--taus", "1:0.1:3"), "low must be below high"),
        (("--taus", "0.1:1:x"), "--taus must be numbers"),
        (("--widths", "0"), "--widths must be a positive whole number. Got 0."),
        (("--widths", "1.5"), "--widths must be whole numbers"),
        (("--widths", ""), "--widths must have at least one number"),
        (("--rows", "1000"), "rows must be at most the 458"),
        (("--ood", "mnist"), "Use ood 'uniform'"),
        (("--seeds", "0"), "seeds must be a positive whole number. Got 0."),
        (("--device", "gpu"), "Unknown device 'gpu'."),
    ],
)
def test_what_cannot_be_used_is_refused(refused, words, said):
    assert said in refused("temperature", *TINY, *words)


@pytest.mark.parametrize("net", ["one-hidden", "mlp"])
def test_networks_have_usual_widths(net):
    assert settings.Settings(net=net).all_widths == (50, 200, 400)


def test_cold_posteriors_have_a_table_of_their_own(study):
    words = ("--data", "two-moons", "--cold", "0.1", "--widths", "3", "--steps", "8", "--draws", "2", "--device", "cpu")
    told = "--data two-moons --widths 3 --cold 0.1 --steps 8 --draws 2 --device cpu"
    result = study("temperature", *words, told=told, seed=3, goes_on=True)
    assert "averaged over its neurons, width 3: 3 neurons, cold posteriors by SGHMC" in result.shown
    assert "temperatures of the sampler, which should be 1 at every T" in result.shown
    assert [row["temperature"] for row in result.stored["rows"]] == [0.1, 1.0]


def test_the_names_of_the_options_are_those_of_the_study():
    assert tuple(problem.ARCHITECTURES) == settings.NETWORKS
