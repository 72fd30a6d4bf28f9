"""`posterity study`: what every study refuses."""

import dataclasses
from importlib import import_module
from importlib.util import find_spec

import pytest

from posterity.cli.verbs.study import study as studies
from posterity.options import describe

pytestmark = pytest.mark.cpu
every_study = pytest.mark.parametrize("name", [command.name for command in studies.registered_commands])


def test_an_unknown_study_is_met_with_the_nearest(run):
    result = run("study", "logistik")
    assert result.code == 2
    error, hint = result.err.splitlines()
    assert "'logistic'" in error
    assert hint == (
        "hint: the studies are calibration, collapse, dropout, fidelity, gradients, hyperparameters, images, logistic, "
        "misspecification, mixtures, moons, penalties, posteriors, shift, surface, temperature, uci."
    )


@every_study
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seed", "-1"), "--seed must be a whole number from 0 to 2^63 - 1. Got -1."),
        (("--seed", 2**63), f"Got {2**63}."),
        (("--seed", "often"), "'--seed'"),
        (("--sede", "5"), "--sede"),
    ],
)
def test_a_bad_option_is_one_line_and_a_hint(refused, name, options, said):
    assert said in refused(name, *options)


@every_study
def test_a_file_is_refused_as_folder(refused, tmp_path, name):
    (tmp_path / "file").write_text("mine")
    needed = ("--widths", "3") if name == "temperature" else ()
    assert "--out must be a folder" in refused(name, *needed, "--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@every_study
def test_a_study_is_made_of_its_settings(run, name):
    module = f"posterity_studies.{name}.settings"
    settings = import_module(module if find_spec(module) else "posterity_studies.options").Settings
    assert list(describe(settings)) == [field.name for field in dataclasses.fields(settings)]
    shown = " ".join(run("study", name, "--help").out.split())
    assert f"Example: posterity study {name} " in shown
    assert all(panel in shown for panel in ("Method", "Output"))


def test_the_help_needs_no_torch(process):
    code = "import sys; from posterity.cli.main import main; main(['study', 'uci', '--help']); "
    code += "assert 'torch' not in sys.modules"
    assert process("-c", code).returncode == 0


@pytest.mark.parametrize(
    ("name", "data", "options"),
    [
        ("images", "mnist", ()),
        ("uci", "uci", ("--jobs", "1")),
        ("hyperparameters", "uci", ("--jobs", "1")),
        ("temperature", "mnist", ("--widths", "3")),
        ("penalties", "cifar-10", ("--data", "cifar-10")),
    ],
)
def test_data_that_are_absent_are_told_where_to_go(run, tmp_path, monkeypatch, name, data, options):
    monkeypatch.setenv("POSTERITY_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = run("study", name, *options, "--out", tmp_path / "study")
    assert result.code == 3
    assert f"Data set '{data}' was not found. Looked for a folder '{data}' in " in result.err
    assert "POSTERITY_DATA" in result.err
    assert "Fetch it with 'posterity data " in result.err
    assert "Traceback" not in result.err
