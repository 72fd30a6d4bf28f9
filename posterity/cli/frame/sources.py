"""Sources of rows: built-in data sets, and files of tables with a target column."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from posterity.cli.frame.options import DATA_NAMES, TEST_FRACTION, ReadingOptions, TableOptions
from posterity.cli.frame.output import UsageError, hint, log
from posterity.datasets import TOYS, DataSet, LabelledData, Preprocessing, Table, load, prepare, read_table
from posterity.datasets.dates import find_order
from posterity.datasets.files import content
from posterity.datasets.kinds import infer_kind
from posterity.errors import BadData, BadFolder, shown, unknown
from posterity.inference.folds import folds
from posterity.options import as_json, describe, from_mapping, words
from posterity.predictive import AffinePredictive, ExponentialPredictive, Predictive
from posterity.storage import Part, decode, encode
from posterity.storage.part import JSON
from posterity.storage.schema import reading

SUFFIXES = (".csv", ".tsv", ".txt", ".dat", ".data", ".tab", ".gz", ".zip", ".parquet", ".xlsx")


@dataclass(frozen=True, eq=False)
class Source:
    """Rows to fit or to score; for a file also its path, its table and its preprocessing.

    `table` is the file as written; `train` and `test` are the indices of its training and test rows. `config` is the
    part of a run's configuration that describes the file. `by` has "groups" or "times" of the training rows for
    --group or --time, as `folds` takes them.
    """

    data: DataSet
    path: Path | None = None
    preprocessing: Preprocessing | None = None
    table: Table | None = None
    test: tuple[int, ...] = ()
    train: tuple[int, ...] = ()
    by: dict[str, Any] = field(default_factory=dict)
    config: dict[str, JSON] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """The unit of the encoded targets, in units of the file; 1 for classes and built-in data sets."""
        return 1.0 if self.preprocessing is None else self.preprocessing.target.scale

    @property
    def shift(self) -> float:
        """The zero of the encoded targets, in units of the file; 0 for classes and built-in data sets."""
        return 0.0 if self.preprocessing is None else self.preprocessing.target.mean

    @property
    def log_target(self) -> bool:
        """Whether the targets are logarithms of the values in the file."""
        return self.preprocessing is not None and self.preprocessing.target.log

    @property
    def unit(self) -> str:
        """The name of the target's column, or y."""
        return "y" if self.preprocessing is None else self.preprocessing.target.name

    @property
    def order(self) -> Literal["random", "group", "time"]:
        """The rule by which rows are divided into folds."""
        return "group" if "groups" in self.by else "time" if "times" in self.by else "random"

    def affine_units(self, predictive: Predictive) -> tuple[Predictive, torch.Tensor]:
        """Return the predictive and the test targets in units of the file, or of its logarithm with --log-target."""
        targets = self.data.test.targets
        if self.preprocessing is None or predictive.classifies:
            return predictive, targets
        return AffinePredictive(predictive, self.shift, self.scale), self.shift + self.scale * targets.double()

    def own_units(self, predictive: Predictive) -> tuple[Predictive, torch.Tensor, float]:
        """Return the predictive, the test targets, and their common unit in units of the file.

        With --log-target both are of the target itself, with the unit 1.
        """
        targets = self.data.test.targets
        if not self.log_target:
            return predictive, targets, self.scale
        own = (self.shift + self.scale * targets.double()).exp()
        return ExponentialPredictive(predictive, self.shift, self.scale), own, 1.0

    def final_units(self, predictive: Predictive) -> tuple[Predictive, torch.Tensor]:
        """Return the predictive and the test targets in units of the file."""
        return self.own_units(predictive)[:2] if self.log_target else self.affine_units(predictive)

    def part(self) -> dict[str, Part]:
        """Return the parts of a run folder by which training rows are recognised and other files are encoded."""
        rows = {"rows": Part({}, {"hashes": row_hashes(self.data.train)})}
        if self.preprocessing is None:
            return rows
        tensors: dict[str, torch.Tensor] = {}
        value = encode(self.preprocessing, tensors)
        return {**rows, "preprocessing": Part({"file": str(self.path), "value": value}, tensors)}


def say_notes(source: Source, *, quiet: bool = False) -> None:
    """Print on standard error the decisions that were made when the file was read."""
    for note in source.notes:
        log(f"{source.data.name}: {note}", quiet=quiet)


def is_file(name: str) -> bool:
    """Return whether DATA means a file: one of that name exists, or the name looks like a path."""
    if name in TOYS:
        return False
    return "/" in name or "\\" in name or name.lower().endswith(SUFFIXES) or Path(name).exists()


def find_data(name: str, columns: TableOptions, reading: ReadingOptions, seed: int = 0) -> Source:
    """Load the built-in data set or the file that DATA names; the seed draws the test rows of a file."""
    if is_file(name):
        return read_source(Path(name), columns, reading, seed)
    if name not in TOYS:
        raise UsageError(
            unknown("data set", name, TOYS),
            f"the data sets are {', '.join(DATA_NAMES)}; a file is given by its path, as in data.csv.",
        )
    if given := (*words(columns), *words(reading)):
        raise UsageError(f"{given[0]} is for files, and {name} is made on the spot.", f"leave {given[0]} out.")
    return Source(load(name))


def read_source(
    path: Path, columns: TableOptions, reading: ReadingOptions, seed: int, preprocessing: Preprocessing | None = None
) -> Source:
    """Read the rows of a file with a target, split by the seed; raise BadData or `UsageError` for bad files or options.

    With the `preprocessing` of an earlier run on the file they are encoded as in that run.
    """
    how = as_json(reading)
    if columns.target is None:
        names = read_table(path, **how).names
        raise UsageError(
            f"{path} is a file: --target must name the column to predict. Its columns are {', '.join(names)}.",
            f"as in --target {shown(names[-1]) if ' ' in names[-1] else names[-1]}.",
        )
    digest = hashlib.sha256(content(path)).hexdigest()
    try:
        table = read_table(
            path,
            columns.target,
            task=columns.task,  # type: ignore[arg-type]  # read_table refuses other words by name
            drop=(*columns.drop, *_ordering(columns)),
            category=columns.category,
            **how,
        )
    except BadData as error:
        if "Unknown column" in str(error) and "Did you mean" in str(error):
            error.add_note(f"its columns are {', '.join(read_table(path, **how).names)}.")
        raise
    fraction = TEST_FRACTION if columns.test_fraction is None else columns.test_fraction
    by = _ordered_by(path, table, columns, how)
    parts = _parts(len(table), fraction, by, seed)
    prepared = prepare(table, fraction, seed, preprocessing, log_target=columns.log_target, parts=parts)
    config = {"sha256": digest, **as_json(columns), "test_fraction": fraction, **how}
    for name in ("log_target", "group", "time", "keep", "thousands", "dates"):
        if not config[name]:
            del config[name]  # runs of earlier releases do not have it
    del config["task"]  # the run stores the task itself, whether given or inferred
    return Source(
        prepared.data,
        path.absolute(),
        prepared.preprocessing,
        table,
        tuple(prepared.test.tolist()),
        tuple(prepared.train.tolist()),
        {name: values[prepared.train.numpy()] for name, values in by.items()},
        config,
        prepared.notes,
    )


def _ordering(columns: TableOptions) -> tuple[str, ...]:
    """Return the column that groups or orders the rows and is no input; () if there is none."""
    named = columns.group or columns.time
    return () if named is None or columns.keep or named in columns.drop else (named,)


def _ordered_by(path: Path, table: Table, columns: TableOptions, how: dict[str, Any]) -> dict[str, Any]:
    """Return the group or time of each row of the table, as `folds` takes them; {} without --group and --time."""
    name = columns.group or columns.time
    if name is None:
        return {}
    whole = read_table(path, **{**how, "header": table.named})
    rows = {line: row for row, line in enumerate(whole.columns[0].lines)}
    column = whole.column(name).rows(np.array([rows[line] for line in table.columns[0].lines]))
    option = "--group" if columns.group else "--time"
    if column.missing.any():
        row = int(column.missing.argmax())
        raise BadData(f"{column.at(row)}: there is no value, and {option} needs one in every row. Fill it, or drop it.")
    if columns.group:
        return {"groups": np.array(column.words)[column.codes]}
    assert table.roles is not None
    try:
        kind = infer_kind(column, table.roles.decimal)
    except BadData as error:
        if "--dates" in str(error):
            raise
        kind = "category"  # text
    if kind == "date":
        return {"times": column.times("" if column.is_date else find_order(column.words))}
    if kind not in ("number", "constant"):
        raise BadData(
            f"{path}: --time needs a column of numbers or dates, and {shown(name)} has {shown(column.fields[0])}. "
            "Name another, or leave --time out."
        )
    return {"times": column.numbers(table.roles.decimal)}


def at_most(num_folds: int, by: dict[str, Any]) -> int:
    """Limit a number of folds by the number of groups or times; raise BadData if these are too few for two folds."""
    for name, values in by.items():
        distinct, later = len(np.unique(values)), name == "times"
        if distinct < 2 + later:
            raise BadData(
                f"--{name[:-1]}: {2 + later} different {name} are wanted among the training rows. Got {distinct}. "
                f"Leave --{name[:-1]} out, or give more rows."
            )
        num_folds = min(num_folds, distinct - later)
    return num_folds


def _parts(count: int, fraction: float, by: dict[str, Any], seed: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return indices of training and test rows: no test rows, whole groups, or the latest rows; None: random rows."""
    everything = torch.arange(count, device="cpu")
    at_most(2, by)
    if fraction == 0:
        return everything, everything[:0]
    if "groups" in by:
        return folds(count, at_most(max(2, round(1 / fraction)), by), seed=seed, **by)[-1]
    if "times" not in by:
        return None
    times = by["times"]
    distinct, sizes = np.unique(times, return_counts=True)
    before = np.cumsum(sizes)[:-1]  # rows up to each time that may be the last of the training rows
    last = distinct[int(np.abs(before - (1 - fraction) * count).argmin())]
    late = torch.from_numpy(times > last)
    return everything[~late], everything[late]


def row_hashes(rows: LabelledData) -> torch.Tensor:
    """Return a hash of the encoded inputs and target of each row, (N,) int64."""
    parts = [value.reshape(len(rows), -1).contiguous().cpu().numpy() for value in rows.pair]
    lines = zip(*parts, strict=True)
    digests = b"".join(
        hashlib.blake2b(x.tobytes() + y.tobytes(), digest_size=8).digest() for x, y in lines
    )  # about a second for a million rows
    return torch.from_numpy(np.frombuffer(digests, dtype="<i8").astype(np.int64))


def stored_hashes(part: Part, run: Path) -> torch.Tensor:
    """Return the stored hashes of the training rows; raise BadFolder if they are malformed."""
    with reading(f"Run folder '{run}': part 'rows'"):
        hashes = part.tensors["hashes"]
        if hashes.dim() != 1 or hashes.dtype != torch.int64:
            raise BadFolder("It must have a whole number for each row. Fit it anew.")
    return hashes


def stored_preprocessing(part: Part, run: Path, config: dict[str, Any]) -> tuple[Path, Preprocessing]:
    """Return the file of a run and its preprocessing; raise BadFolder if they do not suit the run."""
    with reading(f"Run folder '{run}': part 'preprocessing'"):
        value = decode(part.config["value"], part.tensors)
        file = part.config["file"]
        if not isinstance(value, Preprocessing) or not isinstance(file, str):
            raise BadFolder("It must have a path and a Preprocessing. Fit it anew.")
        value.check()
        wanted = (config["task"], config["classes"], num_inputs(config))
        if (value.task, list(value.target.classes) or None, len(value.features)) != wanted:
            raise BadFolder("It belongs to another run: its task, classes or number of inputs differ. Fit it anew.")
    return Path(file), value


def num_inputs(config: dict[str, Any]) -> int:
    """Return the number of inputs of a run."""
    return int(config["inputs"] if "inputs" in config else config["network"]["sizes"][0])


def own_source(path: Path, config: dict[str, Any], preprocessing: Preprocessing) -> Source:
    """Read the file of a finished run with its options; raise BadData if the file is gone or has changed."""
    with hint(BadData, "name the rows to use with --data FILE."):
        if hashlib.sha256(content(path)).hexdigest() != config["sha256"]:
            raise BadData(
                f"{path}: the file has changed since the run was fitted to it, so its test rows are not known."
            )
        columns, reading = (
            from_mapping(kind, {name: config[name] for name in describe(kind) if name in config})
            for kind in (TableOptions, ReadingOptions)
        )
        if columns.test_fraction == 0:
            raise BadData(f"The run was fitted to all rows of {path}, so it has no test rows.")
    source = read_source(path, columns, reading, int(config["seed"]), preprocessing)
    if not (*columns.drop, *_ordering(columns)) or source.table is None:
        return source
    # Columns that are not inputs may identify rows, so show the dropped columns too.
    whole = read_table(path, **{**as_json(reading), "header": source.table.named})
    rows = {line: row for row, line in enumerate(whole.columns[0].lines)}
    lines = source.table.columns[0].lines
    return replace(source, table=whole, test=tuple(rows[lines[row]] for row in source.test))


def source_of_table(table: Table, path: Path, preprocessing: Preprocessing, *, targets: bool) -> Source:
    """Encode the rows of a table for a run; with `targets`, only rows that have one."""
    if targets:
        with hint(BadData, "scores need the target; 'posterity predict' does not."):
            table.column(preprocessing.target.name)  # the error names the nearest column
    inputs, wanted, notes = preprocessing.transform(table, targets=targets)
    if not targets:
        kind = torch.int64 if preprocessing.target.classes else inputs.dtype
        wanted = torch.zeros(len(inputs), dtype=kind, device=inputs.device)
    assert wanted is not None
    rows = LabelledData(inputs, wanted)
    data = DataSet(path.stem, preprocessing.task, rows, rows, preprocessing.target.classes or None)
    return Source(data, path, preprocessing, table, tuple(range(len(table))), notes=(*table.notes, *notes))
