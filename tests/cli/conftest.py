"""The command line run inside the test, and run folders to try it on."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from posterity.cli.main import main

TINY = ("--hidden", "6", "--steps", "40", "--checkpoint-steps", "7", "--device", "cpu")


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
