"""Finished runs: what they are, and the rows to use them on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posterity.cli.errors import UsageError, option_values
from posterity.cli.folders import open_run
from posterity.cli.options import READING, TableOptions
from posterity.cli.sources import Source, other_source, own_source, stored_preprocessing
from posterity.cli.tasks import find_data
from posterity.datasets import TOYS, Preprocessing
from posterity.errors import BadData, BadFolder
from posterity.posteriors import Posterior
from posterity.storage import RunFolder


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run: all it depended on, and its posterior; of one on a file, the file and its preprocessing too."""

    config: dict[str, Any]
    posterior: Posterior
    file: Path | None = None
    preprocessing: Preprocessing | None = None


def find_run(path: Path) -> Run:
    """The run in a folder; BadFolder where there is none that is sound."""
    try:
        config, posterior = open_run(path)
        folder = RunFolder(path)
        if "preprocessing" not in folder.parts():
            return Run(config, posterior)
        return Run(config, posterior, *stored_preprocessing(folder.read("preprocessing"), path))
    except BadFolder as error:
        error.add_note("a run folder is made by 'posterity fit DATA --out RUN'.")
        raise


def find_rows(run: Run, data: str | None, options: TableOptions, verb: str, *, targets: bool) -> Source:
    """The rows that --data names, or the run's own test rows; BadData where the run does not fit them.

    With `targets` the rows are to be scored, so they must have them; without, every row of a file is kept.
    """
    with option_values(verb):
        if run.preprocessing is not None and data not in TOYS:
            assert run.file is not None
            if data is not None:
                return other_source(Path(data), run.preprocessing, _reading(run, options), targets=targets)
            if given := options.given():
                raise UsageError(f"--{given[0]} is for --data FILE.", "the run's own file is read as it was before.")
            return own_source(run.file, run.config)
        if data is not None and data not in TOYS and Path(data).exists():
            raise _misfit(run, f"the file {data}")
        source = find_data(str(run.config["data"]) if data is None else data, options)
    rows, wanted = source.data, run.config["network"]["sizes"][0]
    if run.preprocessing is not None or rows.task != run.config["task"] or rows.test.inputs.shape[1:] != (wanted,):
        raise _misfit(run, f"{rows.task} with {rows.test.inputs.shape[1]} ({rows.name})")
    if targets and rows.classes is not None and list(rows.classes) != run.config["classes"]:
        raise _misfit(run, f"the classes {', '.join(rows.classes)} ({rows.name})")
    return source


def _reading(run: Run, options: TableOptions) -> TableOptions:
    """What is said now of how to read the file, and else what was said when the run was fitted."""
    before: dict[str, Any] = {name: run.config.get(name) for name in READING if getattr(options, name) is None}
    return replace(options, **before)


def _misfit(run: Run, came: str) -> BadData:
    wanted = run.config["network"]["sizes"][0]
    error = BadData(
        f"The run was fitted to {run.config['task']} with {wanted} inputs ({run.config['data']}). Got {came}."
    )
    error.add_note("name data of the same kind with --data, or leave it out.")
    return error
