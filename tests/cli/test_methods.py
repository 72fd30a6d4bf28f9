"""Methods by their words, and options that are said once."""

import ast
import inspect
import json
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import posterity as po
from posterity import methods
from posterity.cli import verbs
from posterity.cli.frame import options
from posterity.cli.frame.executors import ExecutorOption
from posterity.cli.main import EXAMPLES, app
from posterity.cli.verbs.compare import Files
from posterity.cli.verbs.fit import FoldOptions, RunOptions
from posterity.inference import Method
from posterity.networks.mlp import ACTIVATIONS
from posterity.options import describe, flag
from posterity.recipes import methods as words
from posterity.recipes.methods import RECIPES
from posterity.recipes.settings import Settings

pytestmark = pytest.mark.cpu
WITHOUT_A_WORD = {methods.ExpectationMaximization}  # latent variables of a density, which no network has
GROUPS = (
    Settings,
    options.MethodOption,
    options.MethodsOption,
    options.ReadingOptions,
    options.TableOptions,
    ExecutorOption,
    FoldOptions,
    RunOptions,
    Files,
)
FREE = ("--hidden", "3", "--steps", "20", "--device", "cpu", "-q")
TINY = (*FREE, "--prior-scale", "1")
COUNTS = ("--draws", "4", "--warmup", "5", "--chains", "2")


def test_every_method_has_a_word():
    joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=4)
    made = {type(recipe.make(Settings(), joint)) for recipe in RECIPES.values()}
    exported = {value for value in vars(methods).values() if inspect.isclass(value) and issubclass(value, Method)}
    assert made == exported - WITHOUT_A_WORD


def test_stages_are_words_and_own_options_are_settings_that_may_be_left_out():
    for word, recipe in RECIPES.items():
        assert recipe.word == word
        assert recipe.stages[-1] == word
        assert set(recipe.stages) <= set(RECIPES)
        assert all(getattr(Settings(), name) is None for name in recipe.options)
    assert len({recipe.label for recipe in RECIPES.values()}) == len(RECIPES)


def test_the_words_of_activations_are_those_of_the_library():
    assert describe(Settings)["activation"].choices == tuple(ACTIVATIONS)


@pytest.mark.parametrize("data", ["sine", "two-moons"])
@pytest.mark.parametrize(
    "word", ["online-laplace", "variational-em", "low-rank", "full-rank", "mala", "metropolis", "langevin"]
)
def test_fit_and_evaluate_by_word(run, tmp_path, word, data):
    counts = COUNTS if RECIPES[word].samples_all_rows else ()
    folder = tmp_path / "run"
    result = run("fit", data, "--method", word, "--out", folder, *TINY, *counts, "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["method"] == word
    assert all(abs(score) < 100 for score in told["scores"].values())
    if counts:
        assert (told["chains"]["chains"], told["chains"]["draws"]) == (2, 4)
    scored = run("evaluate", folder)
    assert scored.code == 0
    assert RECIPES[word].label in scored.out


def test_pbp_fits_a_relu_network_and_says_what_it_needs(run, tmp_path):
    folder = tmp_path / "run"
    result = run("fit", "sine", "--method", "pbp", "--activation", "relu", "--out", folder, *FREE, "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["scores"]["rmse"] < 1.0
    assert "PBP" in run("evaluate", folder).out
    relu = ("--activation", "relu")
    for other in (("sine",), ("two-moons", *relu), ("sine", *relu, "--noise", "inputs")):
        refused = run("fit", *other, "--method", "pbp", "--out", tmp_path / "other", *FREE)
        assert refused.code == 2
        assert "pbp needs regression of one target" in refused.err


def test_compare_takes_the_ways_to_tune_a_prior(run):
    words = ("--methods", "online-laplace,variational-em", "--structure", "diagonal")
    result = run("compare", "two-moons", *FREE, *words)
    assert result.code == 0
    for label in ("OnlineLaplace", "VariationalEM"):
        (line,) = [line for line in result.out.splitlines() if line.startswith(f"{label}: ")]
        assert "prior scale " in line
        assert "prior scale 1," not in line
        assert ", log evidence " in line


def test_an_option_of_a_few_methods_is_refused_with_others(run):
    result = run("compare", "sine", "--methods", "full-rank", "--structure", "full")
    assert result.code == 2
    wanted = "--structure is for laplace, online-laplace and variational-em, which were not asked for."
    assert wanted in result.err


def test_each_option_is_defined_once():
    seen = {}
    for group in GROUPS:
        for name, about in describe(group).items():
            for spelt in about.flags or (flag(name),):
                assert seen.setdefault(spelt, about) is about, f"{spelt} is in two fields"
    verb_files = [path for path in Path(verbs.__file__).parent.rglob("*.py") if "penalty" not in path.parts]
    spelt = {text for path in verb_files for text in _literal_flags(path)}
    assert not spelt & {*seen, "--json", "--quiet", "--device"} - {"--out"}  # `predict` writes a file there


def _literal_flags(path):
    """The options that a file spells out for typer, by flag."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.arg) and "typer.Option(" in ast.unparse(node.annotation or node):
            yield flag(node.arg)


def test_every_option_of_fit_compare_and_plan_is_a_field_or_shared():
    fields = {name for group in GROUPS for name in describe(group)}
    for verb in ("fit", "compare", "plan"):
        names = {parameter.name for parameter in get_command(app).commands[verb].params}
        assert names - fields <= {"data", "device", "quiet", "as_json", "help", "world_size"}
        assert set(describe(Settings)) <= names


def test_examples_in_the_help_can_be_parsed(run):
    assert set(EXAMPLES) == {"compare", "fit", "predict", "evaluate", "export", "plan", "serve"}
    for verb, lines in EXAMPLES.items():
        shown = " ".join(run(verb, "--help").out.split())
        for line in lines:
            program, first, *words = line.removeprefix("POSTERITY_TOKEN=... ").split()
            assert (program, first) == ("posterity", verb)
            assert line in shown
            get_command(app).commands[verb].make_context(verb, words)


def test_settings_are_checked_wherever_they_come_from():
    with pytest.raises(ValueError, match="--steps must be a positive whole number"):
        Settings(steps=0)
    with pytest.raises(ValueError, match="Did you mean 'kronecker'"):
        Settings(structure="kroneker")
    assert words.owners("steps") == ()
