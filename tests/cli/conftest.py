"""The command line run inside the test, run folders to try it on, and what every study does."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from datetime import datetime, timedelta
from html import escape
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from posterity.cli.frame import columns
from posterity.cli.main import main

TINY = ("--hidden", "6", "--steps", "40", "--checkpoint-steps", "7", "--prior-scale", "1", "--device", "cpu")


@pytest.fixture(autouse=True)
def few_resamples(request, monkeypatch):
    """Intervals from 40 resamples, not 1000, which take most of a comparison; test_evaluate.py has them all."""
    if request.path.name != "test_evaluate.py":
        whole = columns.bootstrap
        monkeypatch.setattr(
            columns, "bootstrap", lambda *words, **options: whole(*words, **{**options, "resamples": 40})
        )


@pytest.fixture
def run(capsys):
    """A function that runs the command line with these words and gives its exit code, output and error output."""

    def call(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        output, errors = capsys.readouterr()
        return SimpleNamespace(code=code, out=output, err=errors)

    return call


@pytest.fixture
def process():
    """A function that runs Python in a process of its own."""

    def call(*words, **options):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment.pop("NO_COLOR", None)
        return subprocess.run(
            [sys.executable, *map(str, words)], capture_output=True, text=True, env=environment, timeout=60, **options
        )

    return call


@pytest.fixture(scope="session")
def fitted_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["fit", "two-moons", "--out", str(folder), *TINY]) == 0
    return folder


@pytest.fixture
def fitted(fitted_once, tmp_path):
    """A finished Laplace run on two-moons, to do with as the test likes."""
    return Path(shutil.copytree(fitted_once, tmp_path / "run"))


@pytest.fixture
def content():
    """A function that gives the sha256 of every file under a folder, by its path there."""

    def read(folder):
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    return read


def _remembering(compute):
    """The function, called at the first call only."""
    kept = []

    def call(*words, **options):
        if not kept:
            kept.append(compute(*words, **options))
        return kept[0]

    return call


@pytest.fixture
def study(run, tmp_path, monkeypatch):
    """A function that runs a study twice, checks what holds of all of them, and gives what the first run told.

    The first run is shown, in the folder of its own accord; the second is JSON, quiet, and goes into another folder, or
    into the same where a study goes on from what is there. `told` are the options in the command that is stored. Both
    runs compute, unless `once`.
    """

    def call(name, *options, seed, told="", goes_on=False, once=False):
        module, here = import_module(f"posterity_studies.{name}.study"), tmp_path / "here"
        here.mkdir()
        monkeypatch.chdir(here)
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(f"posterity_studies.{name}.figures.draw", lambda result, folder: ["figure.png"])
        if once:
            monkeypatch.setattr(module, "run", _remembering(module.run))
        words = ("study", name, *options, "--seed", seed)
        first = run(*words)
        assert first.code == 0
        assert first.out.splitlines()[-1] == f"figures, report.html and results.json: study-{name}"
        assert "…" not in first.out
        assert first.err.splitlines()[-1] == f"drawing into study-{name}"
        assert os.listdir(here) == [f"study-{name}"]
        stored = json.loads((here / f"study-{name}" / "results.json").read_text())
        page = (here / f"study-{name}" / "report.html").read_text(encoding="utf-8")
        assert escape(stored["command"]) in page
        assert escape(first.out.split()[0]) in page
        assert stored["study"] == name
        assert stored["command"] == " ".join(f"posterity study {name} --out study-{name} {told} --seed {seed}".split())
        assert stored["figures"] == ["figure.png"]
        assert set(stored["versions"]) == {"posterity", "python", "torch", "matplotlib"}
        assert datetime.fromisoformat(stored["date"]).utcoffset() == timedelta(0)
        assert stored["machine"]["cpu"]
        assert stored["machine"]["cores"] == os.cpu_count()
        folder = (here if goes_on else tmp_path / "a" / "new") / f"study-{name}"
        second = run(*words, "--out", folder, "--json", "--quiet")
        assert second.code == 0
        assert second.err == ""
        document = json.loads(second.out)
        assert document == json.loads((folder / "results.json").read_text())
        assert {**document, "date": stored["date"]} == stored
        return SimpleNamespace(out=first.out, shown=" ".join(first.out.split()), err=first.err, stored=stored)

    return call


@pytest.fixture
def interrupted(run, tmp_path, monkeypatch):
    """A function that interrupts a study at its third result and checks that it goes on.

    `writer` is the module of the study that writes results. Gives the lines about the progress of the run that goes on,
    and of one more, which finds everything there.
    """

    def call(name, *options, writer):
        folder, write, count = tmp_path / "study", writer.write_result, iter(range(3))

        def stopping(*words):
            if next(count) == 2:
                raise KeyboardInterrupt
            return write(*words)

        monkeypatch.setattr(f"posterity_studies.{name}.figures.draw", lambda result, folder: ["figure.png"])
        words = ("study", name, *options, "--out", folder, "--seed")
        with monkeypatch.context() as patch:
            patch.setattr(writer, "write_result", stopping)
            assert run(*words, "3").code == 130
        assert len(list((folder / "runs").rglob("*.json"))) == 2
        second = run(*words, "3", "--json")
        assert second.code == 0
        third = run(*words, "3", "--json")
        assert third.code == 0
        before, after = json.loads(second.out), json.loads(third.out)
        assert {**after, "date": before["date"]} == before
        other = run(*words, "4")
        assert other.code == 4
        assert len(other.err.splitlines()) == 1
        assert "holds a fit with other settings: its seed differs: 3, now 4." in other.err
        return tuple(one.err.splitlines()[:-1] for one in (second, third))

    return call


@pytest.fixture
def refused(run, tmp_path, monkeypatch):
    """A function that has a study refuse its options before anything is computed, and gives the line that says why."""

    def call(name, *options):
        monkeypatch.setattr(f"posterity_studies.{name}.study.run", lambda *_, **__: pytest.fail("computed"))
        result = run("study", name, "--out", tmp_path / "study", *options)
        assert result.code == 2
        error, hint = result.err.splitlines()
        assert hint.startswith("hint: ")
        assert not (tmp_path / "study").exists()
        return error

    return call
