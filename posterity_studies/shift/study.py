"""Images, fits and scores of the study, each row stored with its curves, tables and one document."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from posterity import __version__
from posterity.cli.frame.output import table
from posterity.datasets import LabelledData
from posterity.inference.callbacks import tracked
from posterity.inference.identity import identity
from posterity.inference.sweep import Curves, Result, stored_results, write_result
from posterity.likelihoods import Categorical
from posterity.metrics import (
    accuracy,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    out_of_distribution_auroc,
)
from posterity.model import Joint
from posterity.model.data import Data, as_data
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity.predictive import Predictive, TemperatureScaling
from posterity.priors import Normal
from posterity.report.files import processor
from posterity.storage import Part
from posterity_studies.frame import notes, remark, title
from posterity_studies.options import Report, silent
from posterity_studies.rows import split_rows
from posterity_studies.shared_fits import Deadline, Fits, OutOfTime, first
from posterity_studies.shift.changes import CHANGES
from posterity_studies.shift.recipes import RATE, RECIPES, ROWS, Length, augmentation, fits_of
from posterity_studies.shift.settings import Settings
from posterity_studies.temperature.problem import data_set, foreign_inputs

FOREIGN = {
    "mnist": ("fashion-mnist", "kmnist", "uniform"),
    "fashion-mnist": ("mnist", "kmnist", "uniform"),
    "cifar-10": ("fashion-mnist", "kmnist", "uniform"),
}
"""Where the foreign images of each data set come from; "uniform" are independent uniform numbers."""
CURVES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
CHUNK = 500  # images predicted at once


@dataclass(frozen=True, eq=False)
class Images:
    """Training, held-out and test images with labels, images from elsewhere by name, and changed test images."""

    train: LabelledData
    held_out: LabelledData
    test: LabelledData
    foreign: Mapping[str, Tensor]
    first: LabelledData  # of the test images, those that are changed

    def changed(self, key: Key) -> Iterator[tuple[str, float, Tensor]]:
        """Each change, its strength, and the changed images."""
        for name, change in CHANGES.items():
            for strength in change.strengths:
                yield name, strength, change.apply(self.first.inputs, strength, key.fold(name).fold(f"{strength:g}"))


def read(settings: Settings) -> Images:
    """The images on the device, with pixels in [0, 1]; the seed chooses those held out."""
    whole = data_set(settings.data, settings.seed)
    train, held_out = split_rows(whole, rows=None, held_out=settings.held_out, seed=settings.seed)
    assert held_out is not None
    count = min(settings.shifted, len(whole.test))
    elsewhere = {name: foreign_inputs(name, train.inputs, count, settings.seed) for name in FOREIGN[settings.data]}

    def part(rows: LabelledData) -> LabelledData:
        return LabelledData(rows.inputs.to(settings.device), rows.targets.to(settings.device))

    return Images(
        part(train),
        part(held_out),
        part(whole.test),
        {name: inputs[:count].to(settings.device) for name, inputs in elsewhere.items()},
        part(whole.test.rows(torch.arange(count))),
    )


@dataclass(frozen=True)
class Cell:
    """A row of the table: a network and a method."""

    network: str
    method: str

    def path(self, folder: Path) -> Path:
        """Its file in the folder of the study."""
        return folder / "runs" / self.network / "rows" / f"{self.method}.json"

    def __str__(self) -> str:
        return f"{RECIPES[self.network].label}, {ROWS[self.method].label}"


def problem(network: str, dropping: bool, images: Images, settings: Settings) -> Joint:
    """The joint of a network; its first weights follow from the seed."""
    recipe, shape = RECIPES[network], tuple(images.train.inputs.shape[1:])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Key(settings.seed).fold(network).seed)
        module = recipe.make(shape, 10, RATE if dropping else 0.0)
    prior = Normal(recipe.prior_scale)
    return Joint(module.to(settings.device), Categorical(), prior, len(images.train))


def training(images: Images, settings: Settings) -> Data:
    """The training images, changed at random in mini-batches if so wanted."""
    return as_data(images.train.pair, augmentation=augmentation(settings.data) if settings.augment else None)


def fits(network: str, images: Images, folder: Path, settings: Settings, report: Report) -> Fits:
    """The fits of a network."""
    recipe = RECIPES[network]
    return Fits(
        fits_of(recipe),
        Length(recipe, len(images.train), _factor(network, settings)),
        lambda dropping: problem(network, dropping, images, settings),
        training(images, settings),
        folder / "checkpoints" / network,
        Key(settings.seed).fold(network).seed,
        recipe.label,
        report,
    )


def _factor(network: str, settings: Settings) -> float:
    """The factor on the lengths of all fits of a network."""
    return settings.epochs * (RECIPES[network].longer if settings.augment else 1.0)


def depends(cell: Cell, known: Fits, images: Images, settings: Settings) -> Part:
    """All that the scores of a row depend on."""
    row = ROWS[cell.method]
    tested = (images.test.inputs, *images.foreign.values())
    seen = hashlib.sha256(b"".join(inputs.cpu().numpy().tobytes() for inputs in tested)).hexdigest()
    return identity(
        **asdict(cell),
        **settings.common(),
        stages=known.methods(row.fit),
        draws=row.draws,
        prior=Normal(RECIPES[cell.network].prior_scale),
        changes={name: list(change.strengths) for name, change in CHANGES.items()},
        **{"training images": training(images, settings), "test images": seen},
        posterity=__version__,
    )


def scores(posterior: Posterior, draws: int, images: Images, seed: int) -> tuple[dict[str, float], Curves]:
    """Scores on held-out, test and foreign images, as predicted and calibrated, and curves on changed test images.

    The temperature is fitted to the held-out images. AUROC is that of the entropy, of foreign against test images.
    """
    key = Key(seed)

    def predicted(inputs: Tensor) -> Predictive:
        with torch.no_grad():
            return posterior.predict(inputs, draws=draws, batch_size=CHUNK, seed=key.fold("predictions").seed)

    held_out, test = predicted(images.held_out.inputs), predicted(images.test.inputs)
    scaling = TemperatureScaling.fit(held_out, images.held_out.targets)
    results = {f"held_out_{name}": value for name, value in _scores(held_out, images.held_out.targets).items()}
    results |= _scores(test, images.test.targets)
    results["temperature"] = scaling.temperature
    calibrated = _scores(scaling.apply(test), images.test.targets)
    results |= {f"calibrated_{name}": calibrated[name] for name in ("nll", "ece", "brier")}
    for name, inputs in images.foreign.items():
        results[f"auroc_{name}"] = out_of_distribution_auroc(test, predicted(inputs))
    as_is = _scores(test.rows(slice(0, len(images.first))), images.first.targets)
    curves = {f"{change}/{score}": [[0.0, as_is[score]]] for change in CHANGES for score in CURVES}
    for change, strength, inputs in images.changed(key.fold("changes")):
        shifted = _scores(predicted(inputs), images.first.targets)
        for score in CURVES:
            curves[f"{change}/{score}"].append([strength, shifted[score]])
    return results, curves


def _scores(pred: Predictive, labels: Tensor) -> dict[str, float]:
    return {
        "accuracy": accuracy(pred, labels),
        "nll": negative_log_likelihood(pred, labels),
        "ece": expected_calibration_error(pred, labels),
        "brier": brier_score(pred, labels),
    }


@dataclass(frozen=True, eq=False)
class Study:
    """The rows that are complete, and those whose fits the next call continues."""

    settings: Settings
    results: tuple[Result[Cell], ...]
    waiting: tuple[str, ...]

    def rows(self, network: str) -> list[Result[Cell]]:
        """The rows of a network, in the order of the table."""
        return [result for result in self.results if result.cell.network == network]

    @property
    def networks(self) -> list[str]:
        """The networks with rows."""
        return [name for name in self.settings.chosen_networks if self.rows(name)]

    def best(self, network: str) -> Result[Cell]:
        """The row with the least NLL on held-out images."""
        return min(self.rows(network), key=lambda result: result.scores["held_out_nll"])

    @staticmethod
    def changed(result: Result[Cell], score: str) -> float:
        """The mean of a score over all changes and strengths."""
        curves = [curve for name, curve in result.curves.items() if name.endswith(f"/{score}")]
        return fmean(value for curve in curves for strength, value in curve if strength)

    def notes(self) -> list[str]:
        """For each network the method that held-out images choose, with its test scores; and what is not there."""
        lines = []
        for network in self.networks:
            best = self.best(network)
            numbers = best.scores
            lines.append(
                f"{best.cell} has the least NLL on held-out images: test error "
                f"{100.0 * (1.0 - numbers['accuracy']):.2f} %, NLL {numbers['nll']:.4f} and ECE {numbers['ece']:.4f}, "
                f"calibrated {numbers['calibrated_nll']:.4f} and {numbers['calibrated_ece']:.4f}."
            )
        return lines + [f"{line}: not complete; the same command continues it." for line in self.waiting]

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        used = {name: RECIPES[name] for name in self.networks}
        return {
            "settings": self.settings.config(),
            **processor(self.settings.device),
            "networks": {
                name: {
                    "label": recipe.label,
                    "members": recipe.members,
                    "prior_scale": recipe.prior_scale,
                    "epochs": {fit: _factor(name, self.settings) * epochs for fit, epochs in recipe.epochs.items()},
                }
                for name, recipe in used.items()
            },
            "minutes": "of the clock, of all fits that a row builds on; of an ensemble's fit each member has its share",
            "rows": [
                {
                    **asdict(result.cell),
                    "label": ROWS[result.cell.method].label,
                    **result.scores,
                    **{f"changed_{score}": self.changed(result, score) for score in CURVES},
                    "minutes": result.seconds / 60.0,
                    "curves": result.curves,
                }
                for result in self.results
            ],
            "best_by_held_out_nll": {name: self.best(name).cell.method for name in self.networks},
            "not_complete": list(self.waiting),
            "notes": self.notes(),
        }


def run(settings: Settings, folder: Path, report: Report = silent, images: Images | None = None) -> Study:
    """Compute the rows that the folder does not hold, each for at most its minutes."""
    images = read(settings) if images is None else images
    results, waiting = [], []
    wanted = {name: fits(name, images, folder, settings, report) for name in settings.chosen_networks}
    cells = [Cell(network, method) for network in wanted for method in settings.methods]

    def identity_of(cell: Cell) -> Part:
        return depends(cell, wanted[cell.network], images, settings)

    for cell in tracked(cells, "rows"):
        result = next(stored_results([cell], folder, identity_of), None)
        if result is None:
            try:
                result = _scored(cell, wanted[cell.network], images, folder, settings)
            except OutOfTime as error:
                report(f"{cell}: {error}")
                waiting.append(str(cell))
                continue
        report(f"{cell}: held-out NLL {result.scores['held_out_nll']:.4f}, {result.seconds / 60.0:.1f} minutes")
        results.append(result)
    return Study(settings, tuple(results), tuple(waiting))


def _scored(cell: Cell, known: Fits, images: Images, folder: Path, settings: Settings) -> Result[Cell]:
    """Fit a row, score it, and store its scores."""
    row, deadline = ROWS[cell.method], Deadline(settings.minutes)
    posterior = row.part(known.fitted(row.fit, deadline=deadline).posterior)
    members = 1 if row.part is first else fits_of(RECIPES[cell.network])[row.fit].members
    seconds = known.seconds(row.fit, members)
    numbers, curves = scores(posterior, row.draws, images, settings.seed)
    return write_result(cell, folder, depends(cell, known, images, settings), numbers, seconds, curves)


def show(out: Any, study: Study) -> None:
    """Print a table for each network."""
    settings = study.settings
    for network in study.networks:
        how = ", with augmentation" if settings.augment else ""
        title(out, f"{settings.data}, {RECIPES[network].label}{how}, test images")
        elsewhere = FOREIGN[settings.data]
        heads = ("error %", "NLL", "ECE", "Brier", "NLL cal.", "ECE cal.", "NLL chd.")
        rows = table("method", *heads, *(f"AUROC {short(name)}" for name in elsewhere), "minutes", wrap=False)
        for result in study.rows(network):
            numbers = result.scores
            rows.add_row(
                ROWS[result.cell.method].label,
                f"{100.0 * (1.0 - numbers['accuracy']):.2f}",
                *(f"{numbers[name]:.4f}" for name in ("nll", "ece", "brier", "calibrated_nll", "calibrated_ece")),
                f"{study.changed(result, 'nll'):.3f}",
                *(f"{numbers[f'auroc_{name}']:.3f}" for name in elsewhere),
                f"{result.seconds / 60.0:.1f}",
            )
        out.print(rows)
    remark(out, f"cal.: with a temperature fitted to {settings.held_out:,} held-out training images.")
    remark(out, f"chd.: mean over all changes of the first {settings.shifted:,} images.")
    notes(out, study.notes())


def short(name: str) -> str:
    """The name of a set of foreign images in tables and figures."""
    return {"fashion-mnist": "Fashion", "uniform": "noise"}.get(name, name.upper())
