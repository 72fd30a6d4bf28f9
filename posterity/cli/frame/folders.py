"""Run folders of the command line: they are written by `Slot` and read by `find_run`."""

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from posterity.cli.frame.fitting import Model, stored_model
from posterity.cli.frame.options import AUTO, METHODS, ReadingOptions, TableOptions
from posterity.cli.frame.output import UsageError, hint, option_values
from posterity.cli.frame.outside import stored_reach
from posterity.cli.frame.sources import (
    Source,
    find_data,
    num_inputs,
    own_source,
    source_of_table,
    stored_hashes,
    stored_preprocessing,
)
from posterity.datasets import TOYS, LabelledData, Preprocessing, load, read_table
from posterity.datasets.splitting import SEPARATORS
from posterity.errors import BadData, BadFolder, shown, unknown
from posterity.options import as_json, describe, from_mapping, types, words
from posterity.processes import active, done_by_first, writes
from posterity.recipes.settings import Settings
from posterity.storage import Part, RunFolder, disk
from posterity.storage.part import JSON
from posterity.storage.schema import check_fields, reading

STAGES = "stages"
TASK: dict[str, Any] = {  # types of the facts that every run stores, besides its settings
    "data": str,
    "method": str,
    "task": Literal["regression", "classification"],
    "classes": list[str] | None,
    "seed": int,
}
TASK_OF_METHODS = {**TASK, "network": dict[str, Any]}
TASK_OF_AUTO = {**TASK, "inputs": int, "seconds": float}
AS_BEFORE = ("map", "laplace", "ensemble", "conjugate", "nuts")  # the same as in 0.1.0 with all options given
ANEW = "give another folder to --out, or --force to start anew: what is there is replaced when the new run is complete."


class Slot:
    """A run folder to write: the finished run in the folder itself, a run in progress in its subfolder `stages`.

    `config` determines the run. `stages` is a run folder too, whose only part is the `config` of the run in progress;
    each stage has a folder next to it. A finished run has no `stages`.
    """

    def __init__(self, path: Path, config: dict[str, JSON]) -> None:
        """Take the folder, and the configuration that determines the run."""
        self.path = path
        self.config = config
        self._folder = RunFolder(path)
        self._stages = RunFolder(path / STAGES)

    def finished(self, *, force: bool) -> bool:
        """Return whether the folder holds this run, complete and unaltered; raise BadFolder for other contents."""
        processes = active()
        if processes is None:
            return self._finished(force)
        return bool(processes.from_first(lambda: b"finished" if self._finished(force) else b""))

    def _finished(self, force: bool) -> bool:
        if not self._folder.exists():
            self._refuse_foreign()
            return False
        if force:
            self._folder.parts()  # refuse now a folder that could not be replaced at the end
            return False
        self._same(self._folder.read("task"), "another run")
        for part in self._folder.parts():
            self._folder.read(part)
        self._clear_leftovers()
        return True

    @contextmanager
    def running(self, *, force: bool) -> Iterator[None]:
        """Lock the folder during the run; raise BadFolder if another run is in progress there."""
        with ExitStack() as held:
            done_by_first(lambda: held.enter_context(self._held(force)))
            yield

    @contextmanager
    def _held(self, force: bool) -> Iterator[None]:
        new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadFolder(
                f"Cannot make the folder '{self.path}': {error.strerror}. Give another to --out."
            ) from error
        with disk.locked(self.path / ".fit.lock", seconds=0.0):
            if self._stages.exists():
                try:
                    self._same(self._stages.read("task"), "another run, unfinished")
                except BadFolder:
                    if not force:
                        raise
                    disk.remove(self._stages.path)
            self._stages.commit({"task": Part(self.config)})
            try:
                yield
            except BaseException:
                if _is_fresh(self.stages, "manifest.json"):  # nothing was fitted
                    self.discard()
                    if new:
                        disk.remove(self.path / ".fit.lock")
                        with suppress(OSError):
                            self.path.rmdir()
                raise

    @property
    def stages(self) -> Path:
        """The folder of all stages."""
        return self._stages.path

    def part(self, name: str) -> dict[str, Any]:
        """Return a part of the finished run that is only JSON."""
        return dict(self._folder.read(name).config)

    def stage(self, number: int, name: str) -> Path:
        """The folder of one stage."""
        return self._stages.path / f"{number}-{name}"

    def finish(self, parts: Mapping[str, Part]) -> None:
        """Commit the finished run in one step, then remove the stages."""
        self._folder.commit({**parts, "task": Part(self.config)}, drop=["*"])
        self.discard()

    def discard(self) -> None:
        """Remove the stages."""
        if writes():
            disk.remove(self._stages.path)

    def scores(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the scores of the finished run; raise BadFolder if one of `keys` is missing."""
        with reading(f"Run folder '{self.path}': part 'scores'"):
            values = dict(self._folder.read("scores").config)
            check_fields(
                "The scores", {**values, **{key: values[key] for key in keys}}, dict.fromkeys(values, float | None)
            )
        return values

    def _same(self, stored: Part, what: str) -> None:
        with hint(BadFolder, ANEW):
            for name in (*self.config, *stored.config):
                there, wanted = stored.config.get(name), self.config.get(name)
                if there != wanted and name == "sha256" and there and wanted:
                    raise BadFolder(
                        f"'{self.path}' holds {what}: it was fitted to {self.config['data']} with other content. The "
                        f"file has changed: its SHA-256 was {str(there)[:12]}... and is {str(wanted)[:12]}... now."
                    )
                if there != wanted:
                    raise BadFolder(
                        f"'{self.path}' holds {what}: its {name} is {shown(there)} and {shown(wanted)} was asked for."
                    )
            if stored.older and (then := _meant_then(self.config)):
                raise BadFolder(f"'{self.path}' holds {what}, of posterity 0.1.0, where {then}.")

    def _refuse_foreign(self) -> None:
        """Raise BadFolder for a file, or a folder with other contents."""
        if self.path.is_file():
            raise BadFolder(f"'{self.path}' is a file. Give a folder to --out.")
        if self.path.is_dir() and not self._stages.exists():
            others = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
            if STAGES in others and not _is_fresh(self._stages.path):
                raise BadFolder(
                    f"'{self.path}' has a folder '{STAGES}' that is not part of a run. Give another to --out."
                )
            if set(others) - {STAGES}:
                raise BadFolder(
                    f"'{self.path}' is not a run folder: it holds '{others[0]}' and no manifest.json. "
                    "Give an empty or a new folder to --out."
                )

    def _clear_leftovers(self) -> None:
        """Remove stages of this run that a process left which was killed after it committed the result."""
        try:
            other = self._stages.exists() and self._stages.read("task").config != self.config
        except BadFolder:  # half removed
            other = False
        if not other and _is_ours(self._stages.path):  # another run, begun with --force, may be in progress
            self.discard()


def _meant_then(config: Mapping[str, JSON]) -> str:
    """Return what release 0.1.0 did for this command if it was something else, else ""."""
    method = config["method"]
    if config.get("noise") == "learn":
        return "the noise was fitted along with the weights"
    if method == "laplace" and config["tune"]:
        return "laplace tuned a prior scale that was given"
    return "" if method in AS_BEFORE else f"{method} took other steps"


def open_run(path: Path) -> tuple[dict[str, Any], Model]:
    """Load the configuration and the model of a finished run, rebuilding the network."""
    config: dict[str, Any] = dict(RunFolder(path).read("task").config)
    with reading(f"Run folder '{path}': part 'task'"):
        wanted = TASK_OF_AUTO if config["method"] == AUTO else TASK_OF_METHODS
        check_fields("The task", {name: config[name] for name in wanted}, wanted)
        if config["method"] not in METHODS:
            raise BadFolder(f"{unknown('method', config['method'], METHODS)} Upgrade posterity, or fit the run anew.")
        model = stored_model(path, config, config.get("network"))
        outputs = config["network"]["sizes"][-1] if "network" in config else len(config["classes"] or ())
        if config["classes"] is not None and len(config["classes"]) != outputs:
            raise BadFolder("The network must have an output for each class. Fit the run anew.")
        if (config["task"] == "classification") != (config["classes"] is not None):
            raise BadFolder(f"Classes do not suit the task {config['task']}. Fit the run anew.")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
        check_fields("The task", values, types(Settings))
        if "sha256" not in config and config["data"] not in TOYS:
            raise BadFolder(f"{unknown('data set', config['data'], TOYS)} Upgrade posterity, or fit the run anew.")
        codecs.lookup(config.get("encoding") or "utf-8")
        signs = (None, *SEPARATORS, *SEPARATORS.values())
        if config.get("separator") not in signs or config.get("decimal") not in (None, ".", ","):
            raise BadFolder("Its separator or decimal mark is none that posterity reads. Fit the run anew.")
        for kind in (ReadingOptions, TableOptions) if "sha256" in config else ():
            options = from_mapping(kind, {name: config[name] for name in describe(kind) if name in config})
            check_fields("The task", vars(options), types(kind))
    return config, model


def _is_ours(stages: Path) -> bool:
    """Return whether the folder holds only files of a run, perhaps partly removed."""
    return not stages.is_dir() or all(
        re.fullmatch(r"\..*|manifest\.json|task-[0-9a-f]+|[0-9]+-[a-z-]+", entry.name) for entry in stages.iterdir()
    )


def _is_fresh(stages: Path, *more: str) -> bool:
    """Return whether the folder holds only an unfinished first commit (and names that start with `more`)."""
    return all(entry.name.startswith((".", "task-", *more)) for entry in stages.iterdir())


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: its configuration and posterior, and for a run on a file the file and its preprocessing.

    `fitted` has the hashes of the training rows and `reach` their ranges (see `outside.reach`); both are None for runs
    of earlier releases, which did not store them.
    """

    config: dict[str, Any]
    posterior: Model
    file: Path | None = None
    preprocessing: Preprocessing | None = None
    fitted: Tensor | None = None
    reach: Part | None = None


def find_run(path: Path) -> Run:
    """Load the run of a folder; raise BadFolder if there is none, or a damaged one."""
    folder = RunFolder(path)
    with hint(BadFolder, "a run folder is made by 'posterity fit DATA --out RUN'."):
        if folder.exists() and "estimator" in folder.parts():
            kind = folder.read("estimator").config.get("estimator")
            raise BadFolder(
                f"'{path}' holds a {kind} that was saved in Python, not a run of the command line. "
                f"Use it there: posterity.estimators.{kind}.load('{path}')."
            )
        config, posterior = open_run(path)
        fitted = stored_hashes(folder.read("rows"), path) if "rows" in folder.parts() else None
        inputs = num_inputs(config)
        reach = stored_reach(folder.read("reach"), path, inputs) if "reach" in folder.parts() else None
        if "preprocessing" not in folder.parts():
            return Run(config, posterior, fitted=fitted, reach=reach)
        return Run(config, posterior, *stored_preprocessing(folder.read("preprocessing"), path, config), fitted, reach)


def find_rows(run: Run, data: str | None, reading: ReadingOptions, verb: str, *, targets: bool) -> Source:
    """Return the rows that --data names, or the run's own test rows; raise BadData if they do not suit the run.

    With `targets`, rows without a target are left out; without, every row of a file is kept.
    """
    with option_values(verb):
        if run.preprocessing is not None and data not in TOYS:
            assert run.file is not None
            if data is not None:
                how = as_json(_read_as_before(run, reading))
                return source_of_table(read_table(Path(data), **how), Path(data), run.preprocessing, targets=targets)
            if word := next(words(reading), ""):
                raise UsageError(f"{word} is for --data FILE.", "the run's own file is read as it was before.")
            return own_source(run.file, run.config, run.preprocessing)
        if data is not None and data not in TOYS and Path(data).exists():
            raise _misfit(run, f"the file {data}")
        source = find_data(str(run.config["data"]) if data is None else data, TableOptions(), reading)
    rows, wanted = source.data, num_inputs(run.config)
    if run.preprocessing is not None or rows.task != run.config["task"] or rows.test.inputs.shape[1:] != (wanted,):
        raise _misfit(run, f"{rows.task} with {rows.test.inputs.shape[1]} ({rows.name})")
    if targets and rows.classes is not None and list(rows.classes) != run.config["classes"]:
        raise _misfit(run, f"the classes {', '.join(rows.classes)} ({rows.name})")
    return source


def training_rows(run: Run) -> LabelledData | None:
    """Return the training rows of the run, encoded as in the run; None if its file is gone or has changed."""
    name = str(run.config["data"])
    if run.preprocessing is None:
        return load(name).train if name in TOYS else None
    assert run.file is not None
    try:
        return own_source(run.file, run.config, run.preprocessing).data.train
    except BadData:
        return None


def _read_as_before(run: Run, reading: ReadingOptions) -> ReadingOptions:
    """Return the reading options given now, filled up by those with which the run was fitted."""
    unsaid = [name for name, value in as_json(reading).items() if value is None]
    return replace(reading, **{name: run.config.get(name) for name in unsaid})


def _misfit(run: Run, came: str) -> BadData:
    wanted = num_inputs(run.config)
    error = BadData(
        f"The run was fitted to {run.config['task']} with {wanted} inputs ({run.config['data']}). Got {came}."
    )
    error.add_note("name data of the same kind with --data, or leave it out.")
    return error
