"""The door of the command line: help, versions, errors and their exit codes."""

import json
import logging
import re
import sys

import pytest

import posterity
from posterity.cli.frame import tasks
from posterity.cli.frame.options import DATA_NAMES
from posterity.cli.frame.output import log, shown_warnings
from posterity.datasets import TOYS
from posterity.errors import NotPositiveDefinite
from posterity.inference import callbacks

pytestmark = pytest.mark.cpu
LINE = ("--steps", "5", "--prior-scale", "1", "--device", "cpu")


MODULES, CALLS = 400, 400_000  # of functions: 0.3 s of a CPU that does nothing else
COUNTED = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event.endswith("call")
sys.argv = ["posterity", "--help"]
sys.setprofile(count)
from posterity.cli.start import main
code = main()
sys.setprofile(None)
print(code, len(sys.modules), calls, "torch" in sys.modules, "numpy" in sys.modules, file=sys.stderr)
"""


def test_help_is_there_at_once(process):
    """Modules and calls are counted, as a clock would depend on what else the machine does."""
    result = process("-c", COUNTED)
    assert all(verb in result.stdout for verb in ("compare", "fit", "predict", "study", "doctor"))
    code, modules, calls, torch, numpy = result.stderr.split()
    assert (code, torch, numpy) == ("0", "False", "False")
    assert int(modules) < MODULES
    assert 100_000 < int(calls) < CALLS


def test_the_commands_are_made_without_torch(process):
    code = (
        "import sys; from posterity.cli.main import app, get_command; get_command(app); print('torch' in sys.modules)"
    )
    assert process("-c", code).stdout == "False\n"


def test_the_help_of_every_verb_names_the_data_sets_there_are(run):
    assert tuple(TOYS) == DATA_NAMES
    for verb in ("compare", "fit"):
        shown = " ".join(run(verb, "--help").out.replace("│", " ").split())
        assert ", ".join(TOYS) in shown


def test_switches_have_no_type_in_help(run):
    for words in ((), ("plan", "--help"), ("study", "--help"), ("study", "moons", "--help")):
        assert "<bool>" not in run(*words).out


def test_warnings_of_the_library_are_lines_that_say_so(capsys):
    record = logging.LogRecord("posterity", logging.WARNING, "", 0, "chains\n of %d draws", (9,), None)
    usual = logging.lastResort
    with shown_warnings():
        logging.lastResort.handle(record)
    assert capsys.readouterr().err == "warning: chains of 9 draws\n"
    assert logging.lastResort is usual


def test_version(run):
    result = run("--version")
    assert (result.code, result.out, result.err) == (0, f"posterity {posterity.__version__}\n", "")


def test_no_verb_is_a_usage_error_that_shows_the_help(run):
    result = run()
    assert result.code == 2
    assert "Usage: posterity" in result.out


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (("compar", "line"), "'compare'"),
        (("compare", "lime"), "'line'"),
        (("fit", "two-moon", "--out", "never"), "'two-moons'"),
        (("fit", "line", "--out", "never", "--method", "laplase"), "'laplace'"),
        (("compare", "line", "--methods", "map,conjugat"), "'conjugate'"),
        (("compare", "line", "--step-sice", "1"), "--step-size"),
        (("compare", "line", "--activation", "tahn"), "'tanh'"),
        (("compare", "line", "--device", "cuda0"), "'cuda'"),
        (("compare", "line", "--figure", "line.pnk"), "'png'"),
    ],
)
def test_an_unknown_name_is_met_with_the_nearest(run, words, nearest):
    result = run(*words)
    assert result.code == 2
    assert result.out == ""
    error, hint = result.err.splitlines()
    assert error.startswith("error: ")
    assert nearest in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--steps", "0"), "--steps"),
        (("--steps", "many"), "--steps"),
        (("--step-size", "-1"), "--step-size"),
        (("--step-size", "nan"), "--step-size"),
        (("--prior-scale", "0"), "--prior-scale"),
        (("--temperature", "0"), "--temperature"),
        (("--eta", "-2"), "--eta"),
        (("--temperature", "0.5", "--eta", "0.5"), "--eta"),
        (("--batch-size", "none"), "--batch-size"),
        (("--batch-size", "0"), "--batch-size"),
        (("--hidden", "5,,5"), "--hidden"),
        (("--hidden", "5,0"), "--hidden"),
        (("--hidden", "0"), "--hidden"),
        (("--noise", "loud"), "--noise"),
        (("--noise", "inf"), "--noise"),
        (("--seed", "-1"), "--seed"),
        (("--seed", str(2**63)), "--seed"),
        (("--methods", " , "), "method"),
        (("--methods", "conjugate", "--noise", "learn"), "conjugate"),
        (("--methods", "conjugate", "--hidden", "5"), "conjugate"),
        (("--methods", "ep", "--hidden", "5"), "ep needs a linear model"),
        (("--methods", "ep", "--noise", "inputs"), "ep needs a linear model"),
        (("--figure", "figure"), "figure"),
    ],
)
def test_a_bad_value_names_its_option(run, options, named):
    result = run("compare", "line", *options)
    assert result.code == 2
    assert result.out == ""
    error, hint = result.err.splitlines()
    assert error.startswith("error: ")
    assert named in error
    assert hint.startswith("hint: ")


def test_no_hidden_layers_are_called_none(run):
    assert "--hidden none a linear model" in run("compare", "line", "--hidden", "0").err


def test_noise_is_not_for_classes(run):
    result = run("compare", "blobs", "--noise", "0.1")
    assert result.code == 2
    assert "--noise" in result.err


def test_a_device_that_is_not_there(run, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("compare", "line", "--device", "cuda")
    assert result.code == 2
    assert "no CUDA device" in result.err


def _raise(error):
    def raiser(*arguments, **options):
        raise error

    return raiser


def test_an_expected_error_is_one_line_with_its_exit_code(run, monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "infer", _raise(NotPositiveDefinite("the matrix\nis not")))
    result = run("fit", "line", *LINE, "--out", tmp_path / "run")
    assert (result.code, result.out, result.err) == (1, "", "error: the matrix is not\n")


def test_an_unexpected_error_is_one_line_that_names_debug(run, monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "infer", _raise(RuntimeError("the sky\nfell")))
    result = run("fit", "line", *LINE, "--out", tmp_path / "run")
    assert result.code == 1
    assert result.out == ""
    assert result.err == "error: unexpected error: RuntimeError: the sky fell; run with --debug for the traceback\n"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_raises_the_error_wherever_it_stands(run, monkeypatch, place):
    monkeypatch.setattr(tasks, "infer", _raise(RuntimeError("the sky fell")))
    words = ["compare", "line"]
    words.insert(place, "--debug")
    with pytest.raises(RuntimeError, match="the sky fell"):
        run(*words, *LINE)


def test_an_interrupt_is_130(run, monkeypatch):
    monkeypatch.setattr(tasks, "infer", _raise(KeyboardInterrupt()))
    result = run("compare", "line", *LINE)
    assert result.code == 130
    assert result.out == ""
    assert result.err.split() == ["interrupted"]


def test_colours_are_for_those_who_want_them(run, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in run("compare", "line", *LINE).out  # not a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = run("compare", "line", *LINE)
    assert "\x1b[1;32m" in coloured.out
    assert "\x1b[1;31merror" in run("compare", "lime").err
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run("compare", "line", *LINE)
    assert "\x1b" not in plain.out
    assert "\x1b" not in plain.err
    assert "*" in plain.out  # the best is marked without colour too
    assert "\x1b" not in run("compare", "lime").err


def test_json_goes_to_the_output_and_progress_does_not(process):
    result = process("-m", "posterity", "compare", "line", *LINE, "--methods", "conjugate", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["data"] == "line"
    assert "Conjugate" in result.stderr


def test_main_takes_the_words_of_the_process_by_default(run, monkeypatch, capsys):
    from posterity.cli.main import main

    monkeypatch.setattr(sys, "argv", ["posterity", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("posterity ")


@pytest.mark.parametrize("columns", [30, 60])
def test_a_narrow_terminal_cuts_no_number(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    found = run("penalty", "l2", "--net", "lenet", "--rows", "60000")
    assert "7.weight     120x400      400     0.0025        200       1       0.006667" in found.out
    assert "…" not in found.out


def test_signs_that_a_terminal_does_not_have_are_spelt_out(process, monkeypatch):
    code = "from posterity.cli.frame.output import *\n"
    code += "spell_out(); console().print('1 ± 2 λ'); print_json({'a': '±'}, None)"
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert process("-c", code).stdout.splitlines() == ["1 +- 2 ?", '{"a": "\\u00b1"}']
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    assert process("-c", code, encoding="utf-8").stdout.splitlines() == ["1 ± 2 λ", '{"a": "±"}']


def test_lines_go_above_a_bar(capsys, monkeypatch):
    """A line that is said while a bar is on the screen has a line of its own, and the bar stays below."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with callbacks.bar("things", 2) as shown:
        log("one is done")
        shown.advance()
    err = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "one is done" in [line.strip() for line in re.split(r"[\r\n]+", err)]


def test_help_breaks_lines_where_the_terminal_does(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert " and ends with the same bits; auto starts again. " in run("fit", "--help").out
