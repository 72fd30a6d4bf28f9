"""Where rows come from: data sets made on the spot, and files of tables with a target column."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from posterity.cli.frame.options import DATA_NAMES, TEST_FRACTION, ReadingOptions, TableOptions
from posterity.cli.frame.output import UsageError, log
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
    """Rows to fit or to score; a file's come with its path, how it was read, and what became of its columns.

    `table` and `test` are the file as written and its test rows there, `train` its training rows; `config` is what a
    run on the file depends on. `by` has the group or the time of each training row, where these were asked for, as
    `folds` takes them.
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
        """What one unit of the targets is in the units of the file; 1 for classes and for made data."""
        return 1.0 if self.preprocessing is None else self.preprocessing.target.scale

    @property
    def shift(self) -> float:
        """Where the targets' zero is in the units of the file; 0 for classes and for made data."""
        return 0.0 if self.preprocessing is None else self.preprocessing.target.mean

    @property
    def log_target(self) -> bool:
        """Whether the targets are logarithms of what the file has."""
        return self.preprocessing is not None and self.preprocessing.target.log

    @property
    def order(self) -> Literal["random", "group", "time"]:
        """How rows are divided into folds."""
        return "group" if "groups" in self.by else "time" if "times" in self.by else "random"

    def affine_units(self, predictive: Predictive) -> tuple[Predictive, torch.Tensor]:
        """The predictive and the test targets, or their logarithms where these were modelled, in units of the file."""
        targets = self.data.test.targets
        if self.preprocessing is None or predictive.classifies:
            return predictive, targets
        return AffinePredictive(predictive, self.shift, self.scale), self.shift + self.scale * targets.double()

    def own_units(self, predictive: Predictive) -> tuple[Predictive, torch.Tensor, float]:
        """The predictive and the test targets, and what one unit of both is in the units of the file.

        Where logarithms were modelled, both are of the target itself.
        """
        targets = self.data.test.targets
        if not self.log_target:
            return predictive, targets, self.scale
        own = (self.shift + self.scale * targets.double()).exp()
        return ExponentialPredictive(predictive, self.shift, self.scale), own, 1.0

    def final_units(self, predictive: Predictive) -> tuple[Predictive, torch.Tensor]:
        """The predictive and the test targets in the units of the file."""
        return self.own_units(predictive)[:2] if self.log_target else self.affine_units(predictive)

    def part(self) -> dict[str, Part]:
        """What a run folder keeps to recognise its training rows and, for a file, to read other files."""
        rows = {"rows": Part({}, {"hashes": row_hashes(self.data.train)})}
        if self.preprocessing is None:
            return rows
        tensors: dict[str, torch.Tensor] = {}
        value = encode(self.preprocessing, tensors)
        return {**rows, "preprocessing": Part({"file": str(self.path), "value": value}, tensors)}


def say_notes(source: Source, *, quiet: bool = False) -> None:
    """Say on standard error what the reader of a file had to decide."""
    for note in source.notes:
        log(f"{source.data.name}: {note}", quiet=quiet)


def is_file(name: str) -> bool:
    """Whether the argument DATA means a file: there is one, or it is written like a path."""
    if name in TOYS:
        return False
    return "/" in name or "\\" in name or name.lower().endswith(SUFFIXES) or Path(name).exists()


def find_data(name: str, columns: TableOptions, reading: ReadingOptions, seed: int = 0) -> Source:
    """The data that the argument DATA names: a data set made on the spot, or a file, whose test rows the seed draws."""
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
    """The rows of a file with a target, split by the seed; BadData or `UsageError` where that cannot be.

    With the `preprocessing` of an earlier run on the file they are encoded as in that run.
    """
    how = as_json(reading)
    if columns.target is None:
        names = read_table(path, **how).names
        raise UsageError(
            f"{path} is a file: --target must name the column to predict. Its columns are {', '.join(names)}.",
            f"as in --target {_word(names[-1])}.",
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
    del config["task"]  # whether the task was given does not matter, the task does
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
    """The column by which rows are grouped or ordered, unless it is an input."""
    named = columns.group or columns.time
    return () if named is None or columns.keep or named in columns.drop else (named,)


def _ordered_by(path: Path, table: Table, columns: TableOptions, how: dict[str, Any]) -> dict[str, Any]:
    """The group or time of each row of the table, as `folds` takes them; nothing where none is asked for."""
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
    """So many folds, or as many as there are groups or times for; BadData where these are too few for any."""
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
    """Training and test rows where they are not drawn at random: all rows, whole groups, or the latest rows to test."""
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
    """A hash of each row as the network sees it, inputs and target, (N,) int64."""
    parts = [value.reshape(len(rows), -1).contiguous().cpu().numpy() for value in rows.pair]
    lines = zip(*parts, strict=True)
    digests = b"".join(
        hashlib.blake2b(x.tobytes() + y.tobytes(), digest_size=8).digest() for x, y in lines
    )  # about a second for a million rows
    return torch.from_numpy(np.frombuffer(digests, dtype="<i8").astype(np.int64))


def stored_hashes(part: Part, run: Path) -> torch.Tensor:
    """The hashes of the rows that a run was fitted to; BadFolder where they are none."""
    with reading(f"Run folder '{run}': part 'rows'"):
        hashes = part.tensors["hashes"]
        if hashes.dim() != 1 or hashes.dtype != torch.int64:
            raise BadFolder("It must have a whole number for each row. Fit it anew.")
    return hashes


def stored_preprocessing(part: Part, run: Path, config: dict[str, Any]) -> tuple[Path, Preprocessing]:
    """The file that a run was fitted to, and what became of its columns; BadFolder where they do not suit the run."""
    with reading(f"Run folder '{run}': part 'preprocessing'"):
        value = decode(part.config["value"], part.tensors)
        file = part.config["file"]
        if not isinstance(value, Preprocessing) or not isinstance(file, str):
            raise BadFolder("It must have a path and a Preprocessing. Fit it anew.")
        value.check()
        wanted = (config["task"], config["classes"], num_inputs(config))
        if (value.task, list(value.target.classes) or None, len(value.features)) != wanted:
            raise BadFolder("It is of another run: its task, classes or number of inputs differ. Fit it anew.")
    return Path(file), value


def num_inputs(config: dict[str, Any]) -> int:
    """The number of inputs that a run takes."""
    return int(config["inputs"] if "inputs" in config else config["network"]["sizes"][0])


def own_source(path: Path, config: dict[str, Any], preprocessing: Preprocessing) -> Source:
    """The file of a finished run, read as it was then; BadData where it is gone or has changed."""
    advice = "name the rows to use with --data FILE."
    try:
        digest = hashlib.sha256(content(path)).hexdigest()
    except BadData as error:
        error.add_note(advice)
        raise
    if digest != config["sha256"]:
        changed = BadData(
            f"{path}: the file has changed since the run was fitted to it, so its test rows are not known."
        )
        changed.add_note(advice)
        raise changed
    columns, reading = (
        from_mapping(kind, {name: config[name] for name in describe(kind) if name in config})
        for kind in (TableOptions, ReadingOptions)
    )
    if columns.test_fraction == 0:
        none = BadData(f"The run was fitted to all rows of {path}, so it has no test rows.")
        none.add_note(advice)
        raise none
    source = read_source(path, columns, reading, int(config["seed"]), preprocessing)
    if not (*columns.drop, *_ordering(columns)) or source.table is None:
        return source
    # What is no input may still say which row is which: show the dropped columns too.
    whole = read_table(path, **{**as_json(reading), "header": source.table.named})
    rows = {line: row for row, line in enumerate(whole.columns[0].lines)}
    lines = source.table.columns[0].lines
    return replace(source, table=whole, test=tuple(rows[lines[row]] for row in source.test))


def other_source(path: Path, preprocessing: Preprocessing, reading: ReadingOptions, *, targets: bool) -> Source:
    """The rows of another file for a run: every row without `targets`, else those that have one."""
    return source_of_table(read_table(path, **as_json(reading)), path, preprocessing, targets=targets)


def source_of_table(table: Table, path: Path, preprocessing: Preprocessing, *, targets: bool) -> Source:
    """The rows of a table for a run, as `other_source` gives them."""
    if targets:
        try:
            table.column(preprocessing.target.name)
        except BadData as error:  # it names the nearest column
            error.add_note("scores need the target; 'posterity predict' does not.")
            raise
    inputs, wanted, notes = preprocessing.transform(table, targets=targets)
    if not targets:
        kind = torch.int64 if preprocessing.target.classes else inputs.dtype
        wanted = torch.zeros(len(inputs), dtype=kind, device=inputs.device)
    assert wanted is not None
    rows = LabelledData(inputs, wanted)
    data = DataSet(path.stem, preprocessing.task, rows, rows, preprocessing.target.classes or None)
    return Source(data, path, preprocessing, table, tuple(range(len(table))), notes=(*table.notes, *notes))


def _word(name: str) -> str:
    return shown(name) if " " in name else name
