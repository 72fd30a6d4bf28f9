"""Models of the folds of a run's training rows: cross-validated scores, and conformal intervals and sets."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posterity.cli.frame.executors import executor_named
from posterity.cli.frame.fitting import Fitter, Model, stored_model
from posterity.cli.frame.output import UsageError, log
from posterity.cli.frame.sources import Source, at_most
from posterity.datasets import LabelledData, Preprocessing
from posterity.errors import BadFolder
from posterity.inference.folds import Fold, folds
from posterity.predictive import Predictive
from posterity.predictive.conformal import Conformal, ConformalIntervals, ConformalSets
from posterity.storage import Part, RunFolder, decode, encode
from posterity.storage.schema import reading

if TYPE_CHECKING:
    from posterity.cli.frame.folders import Run

NUM_FOLDS = 5
"""Number of folds of CV+. Split conformal prediction keeps one of as many folds out of the fit."""

NAME = "fold{number}."
"""Prefix of the parts of a fold's model in a run folder."""


@dataclass(frozen=True, eq=False)
class FoldModel:
    """A model fitted to part of the training rows, with their encoding; `network` is its configuration, if any."""

    model: Model
    preprocessing: Preprocessing | None
    network: dict[str, Any] | None

    def predict(self, source: Source) -> tuple[Predictive, Tensor]:
        """Return the predictive at the test rows of a source, and their targets, both in units of the file."""
        own = source
        if self.preprocessing is not None and self.preprocessing is not source.preprocessing:
            assert source.table is not None
            inputs = self.preprocessing.transform(source.table.rows(list(source.test)), targets=False).inputs
            rows = LabelledData(inputs, source.data.test.targets)
            own = replace(source, data=replace(source.data, test=rows), preprocessing=self.preprocessing)
        pred = self.model.predict(own.data.test.inputs)
        return own.affine_units(pred)[0], source.affine_units(pred)[1]  # targets are encoded as the source has it

    def parts(self) -> dict[str, Part]:
        """Return the model and its encoding as parts of a run folder."""
        tensors: dict[str, Tensor] = {}
        config = {"network": self.network, "preprocessing": encode(self.preprocessing, tensors)}
        return {**self.model.parts(), "fold": Part(config, tensors)}

    @classmethod
    def load(cls, path: Path, config: Mapping[str, Any]) -> "FoldModel":
        """Load the model from a run folder with nothing else in it; `config` is the configuration of the run."""
        part = RunFolder(path).read("fold")
        with reading(f"Run folder '{path}': part 'fold'"):
            preprocessing, network = decode(part.config["preprocessing"], part.tensors), part.config["network"]
            if preprocessing is not None:
                if not isinstance(preprocessing, Preprocessing):
                    raise BadFolder("It must have a Preprocessing. Fit the run anew.")
                preprocessing.check()
                config = {**config, "inputs": len(preprocessing.features)}
            model = stored_model(path, config, network if isinstance(network, dict) else None)
        return cls(model, preprocessing, network if isinstance(network, dict) else None)


def fold_of(source: Source, fold: Fold) -> Source:
    """Return the source with the training and test rows of a fold, encoded by its training rows alone."""
    by = {name: values[fold.train.numpy()] for name, values in source.by.items()}
    if source.table is None or source.preprocessing is None:
        rows = source.data.train
        data = replace(source.data, train=rows.rows(fold.train), test=rows.rows(fold.test))
        return replace(source, data=data, by=by)
    index, table = torch.tensor(source.train, device="cpu"), source.table
    train, test = index[fold.train], index[fold.test]
    fitted = Preprocessing.fit(table, train, log_target=source.log_target)
    if source.data.classes:  # a class may be missing from these rows
        fitted = replace(fitted, target=source.preprocessing.target)
    return replace(
        source,
        data=replace(source.data, train=_encoded(fitted, source, train), test=_encoded(fitted, source, test)),
        preprocessing=fitted,
        test=tuple(test.tolist()),
        train=tuple(train.tolist()),
        by=by,
    )


def _encoded(fitted: Preprocessing, source: Source, rows: Tensor) -> LabelledData:
    assert source.table is not None
    if not len(rows):
        empty = source.data.test.targets[:0]
        return LabelledData(torch.zeros(0, len(fitted.features), device=empty.device), empty)
    inputs, targets, _ = fitted.transform(source.table.rows(rows.numpy()))
    assert targets is not None
    return LabelledData(inputs, targets)


def training_folds(source: Source, num_folds: int, seed: int, *, stratified: bool) -> tuple[Fold, ...]:
    """Divide the training rows into folds: at random, by group, or in time order.

    Folds that are `stratified` by class score with less variance. Their rows are not exchangeable with new rows, which
    conformal prediction needs.
    """
    labels = source.data.train.targets.cpu() if source.data.classes and stratified else None
    return folds(len(source.data.train), num_folds, labels=labels, seed=seed, **source.by)


def split_calibration(source: Source, seed: int) -> tuple[Source, Source]:
    """Return the source without one fold of its training rows, and the source whose test rows are that fold."""
    held = fold_of(source, training_folds(source, at_most(NUM_FOLDS, source.by), seed, stratified=False)[-1])
    rest = held.data.train
    if held.preprocessing is None:
        test = source.data.test
    else:
        test = _encoded(held.preprocessing, source, torch.tensor(source.test, dtype=torch.int64, device="cpu"))
    return replace(held, data=replace(source.data, train=rest, test=test), test=source.test), held


def fold_models(
    fitter: Fitter,
    source: Source,
    num_folds: int,
    config: Mapping[str, Any],
    folder: Path,
    *,
    stratified: bool,
    quiet: bool,
) -> list[tuple[Source, FoldModel]]:
    """Fit every fold, or load the fit that an earlier process stored in `folder`."""
    parts = training_folds(source, num_folds, fitter.settings.seed, stratified=stratified)
    own = [fold_of(source, fold) for fold in parts]
    paths = [folder / f"{number}-fold" for number in range(1, num_folds + 1)]
    models = {number: FoldModel.load(path, config) for number, path in enumerate(paths) if RunFolder(path).exists()}

    def report(number: int) -> None:
        rows = f"{len(parts[number].train)} rows fitted, {len(parts[number].test)} scored"
        log(f"fold {number + 1} of {num_folds}: {rows}", quiet=quiet)

    for number in models:
        report(number)
    alone = replace(fitter, executor=None)  # the executor runs folds, and the fits within a fold run in turn
    work = {f"fold {n + 1}": partial(_fitted, alone, part, n) for n, part in enumerate(own) if n not in models}
    for number, model in executor_named(fitter.executor).results(work, progress=False if quiet else None):
        RunFolder(paths[number]).commit(model.parts())
        models[number] = model
        report(number)
    return [(part, models[number]) for number, part in enumerate(own)]


def _fitted(fitter: Fitter, source: Source, number: int) -> tuple[int, FoldModel]:
    model, network = fitter.fit(source)
    return number, FoldModel(model, source.preprocessing, network)


def calibrate(fits: Sequence[tuple[Source, FoldModel]], source: Source) -> Conformal:
    """Calibrate conformal intervals or sets on the rows that each model has not seen."""
    predictives, targets = zip(*(model.predict(own) for own, model in fits), strict=True)
    kind: Any = ConformalSets if source.data.classes else ConformalIntervals
    conformal: Conformal = kind.fit(list(predictives), list(targets), order=source.order)
    return conformal


def conformal_parts(conformal: Conformal, models: Sequence[FoldModel]) -> dict[str, Part]:
    """Return the parts that `stored_conformal` reads; `models` is empty for split conformal prediction."""
    tensors: dict[str, Tensor] = {}
    parts = {"conformal": Part({"value": encode(conformal, tensors), "folds": len(models)}, tensors)}
    for number, model in enumerate(models, start=1):
        parts.update({NAME.format(number=number) + name: part for name, part in model.parts().items()})
    return parts


def stored_conformal(path: Path, config: Mapping[str, Any]) -> tuple[Conformal, list[FoldModel]] | None:
    """Load the conformal scores of a run and the models of its folds; None for a run without them."""
    folder = RunFolder(path)
    if "conformal" not in folder.parts():
        return None
    part = folder.read("conformal")
    with reading(f"Run folder '{path}': part 'conformal'"):
        conformal, count = decode(part.config["value"], part.tensors), part.config["folds"]
        kind = ConformalIntervals if config["classes"] is None else ConformalSets
        if not isinstance(conformal, kind) or not isinstance(count, int) or conformal.num_folds != max(1, count):
            raise BadFolder("It must have conformal scores, and a number of folds. Fit the run anew.")
    models = []
    for number in range(1, count + 1):
        start = NAME.format(number=number)
        parts = {name.removeprefix(start): folder.read(name) for name in folder.parts() if name.startswith(start)}
        with tempfile.TemporaryDirectory() as place:  # each model is loaded from a folder
            RunFolder(place).commit(parts)
            models.append(FoldModel.load(Path(place), config))
    return conformal, models


def predicted_by_folds(path: Path, run: "Run", source: Source) -> tuple[Conformal, list[Predictive], Tensor]:
    """Return the conformal scores of a run, and predictives and targets at the test rows of a source.

    Predictives, one for each fold model, and targets are in units of the file. Raise a `UsageError` for a run without
    conformal scores.
    """
    stored = stored_conformal(path, run.config)
    if stored is None:
        raise UsageError(
            f"--conformal needs calibration rows or fold models, and the run {path} has kept none.",
            "fit with --conformal split, or --conformal cv+.",
        )
    conformal, models = stored
    pairs = [model.predict(source) for model in models or [FoldModel(run.posterior, run.preprocessing, None)]]
    return conformal, [pred for pred, _ in pairs], pairs[0][1]
