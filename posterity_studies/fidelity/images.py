"""CIFAR-10 against full-batch HMC: fits that resume over calls, a row of scores for each method, and their table."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posterity import __version__
from posterity.cli.frame.output import table
from posterity.datasets import LabelledData, cifar10
from posterity.datasets.files import check_sum, content, root_folder
from posterity.inference.callbacks import tracked
from posterity.inference.identity import identity
from posterity.inference.sweep import Result, stored_results, write_result
from posterity.likelihoods import Categorical
from posterity.methods import SGHMC, SGLD
from posterity.metrics import accuracy, expected_calibration_error, negative_log_likelihood
from posterity.model import Joint
from posterity.model.data import as_data
from posterity.numerics.random import Key
from posterity.optim.schedules import Cycles
from posterity.priors import Normal
from posterity.storage import Part
from posterity_studies.fidelity.image_recipes import FITS, ROWS, Length
from posterity_studies.fidelity.network import FilterResponseResNet
from posterity_studies.fidelity.settings import CIFAR, Settings
from posterity_studies.frame import remark, title
from posterity_studies.options import Report
from posterity_studies.shared_fits import Deadline, Fits, Fitted, OutOfTime

TRAINED = 40_960  # images of the reference chains; which of the 50,000 they were is not known, these are the first
COMPARED = 5000  # the first test images, whose reference predictions are here
MEAN, SCALE = (0.49, 0.48, 0.44), 0.2  # of the pixels of each channel, as the reference scales them
VARIANCE = 0.2  # of the prior of every weight
SUM = "b9a9b4848860a4f18dec74faaf2ce70148e04ab72c46db109e69e41ed11012c1"
OFF = 0.1  # of a temperature of 1: beyond it chains are not in equilibrium
TEMPERATURES = ("kinetic_temperature", "configurational_temperature")
CHUNK = 1000  # images predicted at once


@dataclass(frozen=True, eq=False)
class Pictures:
    """Training, validation and test images, and the reference predictions (N, 10) for the test images."""

    train: LabelledData
    validation: LabelledData
    test: LabelledData
    reference: Tensor


def read(settings: Settings) -> Pictures:
    """The images on the device, scaled; the last training images validate."""
    whole = cifar10()
    count = settings.rows or TRAINED
    if count >= len(whole.train):
        raise ValueError(f"--rows must leave some of the {len(whole.train):,} images to validate by. Got {count}.")
    mean = torch.tensor(MEAN).reshape(3, 1, 1)

    def part(rows: LabelledData) -> LabelledData:
        return LabelledData(((rows.inputs - mean) / SCALE).to(settings.device), rows.targets.to(settings.device))

    order = torch.arange(len(whole.train))
    return Pictures(
        part(whole.train.rows(order[:count])),
        part(whole.train.rows(order[max(count, TRAINED) :])),
        part(whole.test.rows(torch.arange(COMPARED))),
        read_reference(),
    )


def read_reference() -> Tensor:
    """The predictions of the reference chains for the first test images, (5000, 10) in float64."""
    path = root_folder("hmc-reference", None) / "cifar10_test_probs_0_5000.npy"
    data = content(path)
    check_sum(data, SUM, path, "hmc-reference")
    return torch.from_numpy(np.load(BytesIO(data), allow_pickle=False)).double()


@dataclass(frozen=True)
class Cell:
    """A row of the table: a method, and for chains the factor on their learning rate."""

    method: str
    rate: float = 1.0

    def path(self, folder: Path) -> Path:
        """Its file in the folder of the study."""
        return folder / "runs" / CIFAR / "rows" / f"{self.method}-{self.rate:g}.json"

    def __str__(self) -> str:
        return f"CIFAR-10, {ROWS[self.method].label}{'' if self.rate == 1.0 else f', rate x {self.rate:g}'}"


def problem(dropping: bool, pictures: Pictures, settings: Settings) -> Joint:
    """The problem; every fit begins at weights that follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Key(settings.seed).fold("network").seed)
        module = FilterResponseResNet(settings.depth, settings.width, rate=0.1 if dropping else 0.0)
    return Joint(module.to(settings.device), Categorical(), Normal(VARIANCE**0.5), len(pictures.train))


def depends(cell: Cell, fits: Fits, pictures: Pictures, settings: Settings) -> Part:
    """All that the scores of a row depend on."""
    row = ROWS[cell.method]
    known = pictures.reference
    shape = list(known.shape)
    seen = hashlib.sha256(known.cpu().numpy().tobytes()).hexdigest()
    return identity(
        **asdict(cell),
        **settings.common(),
        stages=fits.methods(row.fit, cell.rate),
        draws=row.draws,
        prior=Normal(VARIANCE**0.5),
        **{"training images": as_data(pictures.train.pair), "reference": [shape, seen]},
        posterity=__version__,
    )


@dataclass(frozen=True, eq=False)
class Images:
    """The rows that are complete, and those whose fits the next call continues."""

    results: tuple[Result[Cell], ...]
    waiting: tuple[str, ...]
    settings: Settings

    @property
    def ordered(self) -> list[Result[Cell]]:
        """The rows, the nearest to the reference first."""
        return sorted(self.results, key=lambda result: result.scores["total_variation"])

    def notes(self) -> list[str]:
        """The nearest row, and what is not there yet."""
        lines = [f"{line}: not complete; the same command continues it." for line in self.waiting]
        if self.results:
            best = self.ordered[0]
            lines.insert(
                0,
                f"Nearest to HMC: {label(best.cell)}, agreement {best.scores['agreement']:.3f} and total variation "
                f"{best.scores['total_variation']:.3f} in {best.seconds / 60.0:.1f} minutes.",
            )
        return lines

    def document(self) -> dict[str, Any]:
        """Every number, ready for JSON."""
        return {
            "minutes": "of the clock, of all fits that a row builds on; of an ensemble's fit each member has its share",
            "rows": [
                {
                    **asdict(result.cell),
                    "label": label(result.cell),
                    **result.scores,
                    "minutes": result.seconds / 60.0,
                    "in_equilibrium": equilibrium(result),
                }
                for result in self.ordered
            ],
            "not_complete": list(self.waiting),
        }


def label(cell: Cell) -> str:
    """The name of a row."""
    return ROWS[cell.method].label + ("" if cell.rate == 1.0 else f", rate x {cell.rate:g}")


def equilibrium(result: Result[Cell]) -> bool | None:
    """Whether the temperatures of chains are within 10 % of 1; None where there are no chains."""
    known = [value for name, value in result.scores.items() if name.endswith("_temperature")]
    return all(abs(value - 1.0) <= OFF for value in known) if known else None


def run(settings: Settings, folder: Path, report: Report, pictures: Pictures) -> Images:
    """Compute the rows that the folder does not hold, each for at most its minutes."""
    fits = Fits(
        FITS,
        Length(len(pictures.train), settings.epochs),
        lambda dropping: problem(dropping, pictures, settings),
        pictures.train.pair,
        folder / "runs" / CIFAR / "fits",
        settings.seed,
        "CIFAR-10",
        report,
        settings.bf16,
    )
    results, waiting = [], []
    for cell in tracked([*cells(settings)], "fits"):
        result = next(stored_results([cell], folder, lambda cell: depends(cell, fits, pictures, settings)), None)
        if result is None:
            try:
                result = _scored(cell, fits, pictures, folder, settings)
            except OutOfTime as error:
                report(f"{cell}: {error}")
                waiting.append(str(cell))
                continue
        scores = result.scores
        report(
            f"{cell}: validation NLL {scores['validation_nll']:.4f}, {result.seconds / 60.0:.1f} minutes"
            + "".join(f", {name.replace('_', ' ')} {scores[name]:.2f}" for name in scores if "temperature" in name)
        )
        results.append(result)
    return Images(tuple(results), tuple(waiting), settings)


def cells(settings: Settings) -> Iterator[Cell]:
    """The rows that are asked for; chains have one for each factor on their learning rate."""
    for method in settings.methods_of(CIFAR):
        rates = settings.rates if FITS[ROWS[method].fit].samples else (1.0,)
        yield from (Cell(method, rate) for rate in rates)


def _scored(cell: Cell, fits: Fits, pictures: Pictures, folder: Path, settings: Settings) -> Result[Cell]:
    """Fit a row, score it, and store its scores."""
    row, deadline = ROWS[cell.method], Deadline(settings.minutes)
    last = fits.fitted(row.fit, cell.rate, deadline)
    seconds = fits.seconds(row.fit, row.members, cell.rate, deadline)
    posterior, key = row.part(last.posterior), Key(settings.seed).fold("predictions")
    with torch.no_grad():
        validation, test = (
            posterior.predict(part.inputs, draws=row.draws, batch_size=CHUNK, seed=key.seed)
            for part in (pictures.validation, pictures.test)
        )
    scores = {
        **compared(test.probs.double().cpu(), pictures.reference),
        "accuracy": accuracy(test, pictures.test.targets),
        "nll": negative_log_likelihood(test, pictures.test.targets),
        "ece": expected_calibration_error(test, pictures.test.targets),
        "validation_nll": negative_log_likelihood(validation, pictures.validation.targets),
        "validation_accuracy": accuracy(validation, pictures.validation.targets),
        "validation_ece": expected_calibration_error(validation, pictures.validation.targets),
        **temperatures(last),
    }
    return write_result(cell, folder, depends(cell, fits, pictures, settings), scores, seconds)


def compared(probs: Tensor, reference: Tensor) -> dict[str, float]:
    """Agreement of the labels, and mean total variation, of two tables (N, K) of probabilities.

    >>> compared(torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]]))["total_variation"]
    0.25
    """
    agreement = (probs.argmax(-1) == reference.argmax(-1)).double().mean()
    return {"agreement": float(agreement), "total_variation": float(0.5 * (probs - reference).abs().sum(-1).mean())}


def temperatures(fitted: Fitted) -> dict[str, float]:
    """The mean temperatures of the steps in which chains sample: of momenta, where there are any, and of positions."""
    known: dict[str, float] = {}
    for name in (name for name in TEMPERATURES if name in fitted.trace):
        values, chains = fitted.trace[name], fitted.method
        assert isinstance(chains, SGHMC | SGLD)
        steps = torch.arange(len(values))
        sampling = steps >= chains.warmup
        if isinstance(chains.schedule, Cycles):
            sampling &= chains.schedule.samples(steps)
        known[name] = float(values[sampling].mean())
    return known


def show(out: Any, images: Images) -> None:
    """Print the table."""
    title(out, "CIFAR-10: distance to full-batch HMC on the first 5,000 test images")
    rows = table("method", "agreement", "TV", "accuracy", "NLL", "ECE", "T kin.", "T conf.", "minutes", wrap=False)
    for result in images.ordered:
        scores = result.scores
        hot = (f"{scores[name]:.2f}" if name in scores else "" for name in TEMPERATURES)
        rows.add_row(
            label(result.cell) + (" *" if equilibrium(result) is False else ""),
            *(f"{scores[name]:.3f}" for name in ("agreement", "total_variation", "accuracy", "nll", "ece")),
            *hot,
            f"{result.seconds / 60.0:.1f}",
        )
    out.print(rows)
    if any(equilibrium(result) is False for result in images.results):
        remark(out, "* not in equilibrium: a temperature is more than 10 % from 1.")
