"""Records what the present release does: `PYTHONPATH=tests python -m releases.record`, in the root of the repository.

It writes beside itself, in a folder that has the name of the release and must not be there yet. What it records is
listed in `release.py`. The record of 0.1.0 also has the calls of its library and the names of its tests.
"""

import contextlib
import gzip
import io
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from releases.added import FRAME
from releases.cases import ASKED, FIT, Case, tasks
from releases.observed import estimated, machine, observed, plain, trace_of
from releases.release import RELEASES, Release
from safetensors.torch import save_file

import posterity
from posterity.cli.main import main as command_line
from posterity.inference import Callback, Run, Sequential
from posterity.inference.checkpoint import Checkpointer
from posterity.posteriors import Posterior
from posterity.storage import Part, RunFolder


class StoppedError(Exception):
    """What ends a run."""


class StopAfter(Callback):
    """Ends a run after a step, before that is stored."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Run) -> None:
        if run.step == self.step:
            raise StoppedError


def write(folder: Path, case: Case, posterior: Posterior, trace: object) -> None:
    """The numbers of a fit."""
    each = getattr(posterior, "posteriors", (posterior,))
    x = None if case.problem.data() is None else case.problem.data()[0]
    if x is not None and case.integrator is None and case.member is None:
        assert all(one.output_moments(x) is None for one in each), f"{case.name} needs an integrator"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(plain({**observed(case, posterior), **trace_of(trace)}), folder / "expected.safetensors")


def posteriors(root: Path, release: Release) -> None:
    for case in release.cases.values():
        posterior, trace = case.fit()
        posterior.save(root / case.name / "run")
        write(root / case.name, case, posterior, trace)


def checkpoints(root: Path, release: Release) -> None:
    for name, stopped in release.stopped.items():
        with contextlib.suppress(StoppedError):
            stopped.fit(root / name / "run", StopAfter(stopped.step))
            raise AssertionError(f"{name} came to its end before step {stopped.step}")
        with tempfile.TemporaryDirectory() as folder:
            write(root / name, stopped.case, *stopped.fit(Path(folder) / "run"))


def estimators(root: Path, release: Release) -> None:
    for name, (estimator, target) in release.estimators.items():
        estimator.fit(FRAME, target).save(root / name / "run")
        save_file(plain(estimated(estimator)), root / name / "expected.safetensors")


def executed(root: Path) -> None:
    for outcome in Sequential().run(tasks(), root / "run"):
        assert not outcome.error, outcome.error
        save_file(plain(trace_of(outcome.trace)), root / f"{outcome.name}.safetensors")


def said(*words: str) -> str:
    """What the command line prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert command_line(list(words)) == 0, words
    return text.getvalue()


def forget_place(run: RunFolder) -> None:
    """The command line stores where the table was, as a whole path: leave its name alone."""
    if "preprocessing" in run.parts():
        part = run.read("preprocessing")
        run.commit({"preprocessing": Part({**part.config, "file": Path(str(part.config["file"])).name}, part.tensors)})


@contextlib.contextmanager
def interrupted(after: int) -> Iterator[None]:
    """Runs are interrupted, as by Ctrl-C, when they have been stored so many times."""
    write, count = Checkpointer.write, iter(range(after))

    def stopping(self: Checkpointer, run: Run) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt
        write(self, run)

    Checkpointer.write = stopping  # type: ignore[method-assign]
    try:
        yield
    finally:
        Checkpointer.write = write  # type: ignore[method-assign]


def commands(root: Path, release: Release) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("table.csv").write_text(release.table)
        for name, words in release.commands.items():
            said("fit", *words, "--out", name, *FIT, "--quiet")
            if name in release.begun:
                with interrupted(after=2):
                    assert command_line(["fit", *words, "--out", f"{name}-stopped", *FIT, "--quiet"]) == 130
                shutil.copytree(f"{name}-stopped", root / name / "stopped")
            told = {f"{asked}.txt.gz": said(*release.asked(asked, name)) for asked in ASKED}
            shutil.copytree(name, root / name / "run")
            forget_place(RunFolder(root / name / "run"))
            for file, text in told.items():
                (root / name / file).write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    torch.set_num_threads(1)
    release = RELEASES.get(posterity.__version__)
    if release is None:
        sys.exit(f"release.py says what is recorded of {', '.join(RELEASES)}, and {posterity.__version__} is here.")
    here = release.folder
    if here.exists():
        sys.exit(f"{here} is there already. Delete it to record anew.")
    posteriors(here / "posteriors", release)
    checkpoints(here / "checkpoints", release)
    estimators(here / "estimators", release)
    executed(here / "tasks")
    commands(here / "cli", release)
    for lock in here.rglob(".*lock"):
        os.remove(lock)
    manifest = {
        "posterity": posterity.__version__,
        **machine(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, 1 thread",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "PYTHONPATH=tests python -m releases.record",
    }
    (here / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
