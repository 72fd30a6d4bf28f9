"""Networks, images and fits of the study, the choice of eta, means over seeds, and one document."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from posterity.cli.frame.output import table
from posterity.datasets import LabelledData, mnist
from posterity.inference import infer
from posterity.inference.callbacks import tracked
from posterity.inference.sweep import Result, stored_results, write_result
from posterity.likelihoods import Categorical
from posterity.metrics import accuracy, expected_calibration_error, negative_log_likelihood
from posterity.model import Joint, Tempering
from posterity.model.data import as_data
from posterity.networks import MLP, LeNet
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Posterior
from posterity.priors import Normal
from posterity.report.files import processor
from posterity.storage import Part
from posterity_studies.frame import notes, remark, title
from posterity_studies.grids import mean_and_spread, row_as_json
from posterity_studies.images.settings import Settings
from posterity_studies.options import Report, silent
from posterity_studies.rows import depends_on, with_error

PIXELS = 28 * 28


@dataclass(frozen=True)
class Architecture:
    """A network of the study: label, how it is made, whether it takes rows of pixels."""

    label: str
    make: Callable[[], nn.Module]
    flat: bool = False


NETWORKS: Mapping[str, Architecture] = MappingProxyType(
    {
        "mlp": Architecture("one hidden layer of 400", lambda: MLP((PIXELS, 400, 10)), flat=True),
        "lenet": Architecture("LeNet", LeNet),
    }
)


@dataclass(frozen=True, eq=False)
class Images:
    """Training, held-out and test images, (N, 1, 28, 28), or (N, 784) for a network that takes pixels."""

    train: LabelledData
    held_out: LabelledData
    test: LabelledData

    def flat(self) -> "Images":
        """The same with each image as a row of pixels."""
        parts = (LabelledData(part.inputs.flatten(1), part.targets) for part in (self.train, self.held_out, self.test))
        return Images(*parts)

    def to(self, device: str) -> "Images":
        """The same on a device."""
        pairs = ((part.inputs.to(device), part.targets.to(device)) for part in (self.train, self.held_out, self.test))
        return Images(*(LabelledData(*pair) for pair in pairs))


def read_images(settings: Settings) -> Images:
    """The images of the study; which of the training images are held out follows from the seed."""
    whole = mnist(name=settings.data_set)
    rest, held_out = whole.validation_split(settings.held_out / len(whole.train), settings.seed)
    return Images(rest.train, held_out, rest.test).to(settings.device)


def problem(network: str, eta: float | None, seed: int, num_data: int, settings: Settings) -> Joint:
    """The joint of a fit: its first weights follow from the seed, and the KL of its bound weighs eta (None: 1)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Key(settings.seed).fold(network).fold(seed).seed)
        module = NETWORKS[network].make()
    tempering = Tempering.tempered(1.0 if eta is None else eta)
    return Joint(module.to(settings.device), Categorical(), Normal(settings.prior_scale), num_data, tempering)


def scores(posterior: Posterior, data: Images, settings: Settings) -> dict[str, float]:
    """Error in per cent, NLL in nats, ECE and mean confidence on the held-out and the test images."""
    results = {}
    for name, part in (("held_out", data.held_out), ("test", data.test)):
        predictive = posterior.predict(part.inputs, draws=settings.draws)
        results[f"{name}_error"] = 100.0 * (1.0 - accuracy(predictive, part.targets))
        results[f"{name}_nll"] = negative_log_likelihood(predictive, part.targets)
        results[f"{name}_ece"] = expected_calibration_error(predictive, part.targets)
        results[f"{name}_confidence"] = float(predictive.probs.max(-1).values.double().mean())
    return results


@dataclass(frozen=True)
class Cell:
    """One fit: a network, eta (None for MAP) and a seed."""

    network: str
    eta: float | None
    seed: int

    def path(self, folder: Path) -> Path:
        """Its file in the folder of the study."""
        method = "map" if self.eta is None else f"eta-{self.eta:g}"
        return folder / "runs" / self.network / method / f"seed-{self.seed}.json"

    def __str__(self) -> str:
        method = "MAP" if self.eta is None else f"eta {self.eta:g}"
        return f"{NETWORKS[self.network].label}, {method}, seed {self.seed}"


def depends(cell: Cell, data: Images, settings: Settings) -> Part:
    """All that the numbers of a cell depend on."""
    stages = settings.stages(cell.network, cell.eta)
    return depends_on(cell, settings, stages=stages, **{"training images": as_data(data.train.pair)})


def stored(cell: Cell, data: Images, folder: Path, settings: Settings) -> Result[Cell] | None:
    """The result of the cell if it is there; BadFolder if it is damaged or of other settings."""
    return next(stored_results([cell], folder, lambda cell: depends(cell, data, settings)), None)


def start(network: str, seed: int, data: Images, settings: Settings) -> Posterior:
    """The MAP that mean-field inference starts from, for every eta of a network and seed."""
    joint = problem(network, None, seed, len(data.train), settings)
    method = settings.stages(network, 1.0)[0]
    return infer(method, joint, data.train.pair, seed=_key(settings, seed).seed, progress=False)[0]


def fit(cell: Cell, begin_at: Posterior | None, data: Images, folder: Path, settings: Settings) -> Result[Cell]:
    """Run the last stage of a cell and store what it gave: scores, and of a Gaussian mean scale and parts of the ELBO.

    It begins at the posterior `begin_at`, or for None at the network's first weights; its seconds count this stage
    alone.
    """
    joint = problem(cell.network, cell.eta, cell.seed, len(data.train), settings)
    method = settings.stages(cell.network, cell.eta)[-1]
    key = _key(settings, cell.seed)
    seed = key.seed if begin_at is None else key.fold("second").seed
    begin = time.perf_counter()
    posterior, trace = infer(method, joint, data.train.pair, start=begin_at, seed=seed, progress=False)
    seconds = time.perf_counter() - begin
    result = scores(posterior, data, settings)
    if isinstance(posterior, Gaussian):
        last = max(1, len(trace["kl"]) // 20)  # one draw is noisy: the mean of the last twentieth of the run
        result["mean_scale"] = float(posterior.variance.sqrt().mean())
        result |= {name: float(trace[name][-last:].mean()) for name in ("data_fit", "kl")}
    return write_result(cell, folder, depends(cell, data, settings), result, seconds)


def _key(settings: Settings, seed: int) -> Key:
    return Key(settings.seed).fold("fit").fold(seed)


METRICS = {"error": "error, %", "nll": "NLL", "ece": "ECE"}
WITHIN = 0.3  # points of error


@dataclass(frozen=True)
class Row:
    """A method on a network: mean and standard deviation (None for one seed) of each score over seeds."""

    network: str
    method: str
    eta: float | None
    seeds: int
    scores: dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Study:
    """All that the study found: a result for each fit, and for each network the eta that was chosen."""

    settings: Settings
    results: tuple[Result[Cell], ...]
    chosen: dict[str, float]

    def grid(self, network: str) -> dict[float | None, Result[Cell]]:
        """The fits of the first seed by eta, those from which one was chosen; MAP under None."""
        candidates = (result for result in self.results if (result.cell.network, result.cell.seed) == (network, 0))
        return {result.cell.eta: result for result in candidates}

    def rows(self, network: str) -> list[Row]:
        """MAP, mean-field inference with the chosen eta, and with eta = 1 if that was in the grid and not chosen."""
        best = self.chosen[network]
        results = [_row(network, "MAP", None, self._of(network, None))]
        results.append(_row(network, "MeanField, chosen", best, self._of(network, best)))
        if best != 1.0 and 1.0 in self.settings.etas:
            results.append(_row(network, "MeanField", 1.0, self._of(network, 1.0)))
        return results

    def _of(self, network: str, eta: float | None) -> list[Result[Cell]]:
        return [result for result in self.results if (result.cell.network, result.cell.eta) == (network, eta)]

    def notes(self) -> list[str]:
        """For each network, how mean-field inference with the chosen eta compares with MAP on the test images."""
        results = []
        for network in self.chosen:
            point, chosen = self.rows(network)[:2]
            difference = {key: chosen.scores[f"test_{key}"][0] - point.scores[f"test_{key}"][0] for key in METRICS}
            words = [
                f"error {abs(difference['error']):.2f} points {'above' if difference['error'] > 0 else 'below'} MAP's "
                f"({'' if difference['error'] <= WITHIN else 'not '}within {WITHIN} points)",
                *(f"{METRICS[key]} {'worse' if difference[key] > 0 else 'no worse'}" for key in ("nll", "ece")),
            ]
            results.append(f"{NETWORKS[network].label}, eta {chosen.eta:g}: {', '.join(words)}")
        return results

    def document(self) -> dict[str, Any]:
        """Every number of the study, ready for JSON."""
        return {
            "settings": self.settings.config(),
            **processor(self.settings.device),
            "eta_is_chosen_by": f"NLL of the first seed on {self.settings.held_out} held-out training images",
            "chosen": self.chosen,
            "methods": [row_as_json(row) for network in self.chosen for row in self.rows(network)],
            "fits": [{**asdict(result.cell), **result.scores, "seconds": result.seconds} for result in self.results],
            "notes": self.notes(),
        }


def run(settings: Settings, folder: Path, report: Report = silent) -> Study:
    """Run the study, or the part of it that `folder` does not hold yet; `report` is told a line about each fit.

    The first seed is fitted with every eta of the grid; the others by MAP, with the eta that was chosen, and eta = 1.
    """
    whole = read_images(settings)
    results: list[Result[Cell]] = []
    chosen: dict[str, float] = {}
    for network in dict.fromkeys(settings.networks):
        data = whole.flat() if NETWORKS[network].flat else whole
        first = [Cell(network, eta, 0) for eta in (None, *dict.fromkeys(settings.etas))]
        grid = list(_results(first, data, folder, settings, report))
        best = min(grid[1:], key=lambda result: result.scores["held_out_nll"]).cell.eta
        assert best is not None
        chosen[network] = best
        report(f"{NETWORKS[network].label}: eta {best:g} has the least NLL on held-out images")
        again = (None, *dict.fromkeys((best, *(eta for eta in settings.etas if eta == 1.0))))
        others = [Cell(network, eta, seed) for seed in range(1, settings.seeds) for eta in again]
        results += [*grid, *_results(others, data, folder, settings, report)]
    return Study(settings, tuple(results), chosen)


def _results(
    cells: Sequence[Cell], data: Images, folder: Path, settings: Settings, report: Report
) -> Iterator[Result[Cell]]:
    starts: dict[int, Posterior] = {}  # of one seed at a time
    for cell in tracked(cells, "fits"):
        result = stored(cell, data, folder, settings)
        there = result is not None
        if result is None:
            if cell.eta is not None and cell.seed not in starts:
                starts = {cell.seed: start(cell.network, cell.seed, data, settings)}
            result = fit(cell, None if cell.eta is None else starts[cell.seed], data, folder, settings)
        shown = ", ".join(f"{label} {result.scores[f'held_out_{key}']:.4g}" for key, label in METRICS.items())
        report(f"{cell}: held out {shown}, {'there already' if there else f'{result.seconds:.0f} s'}")
        yield result


def _row(network: str, method: str, eta: float | None, results: Sequence[Result[Cell]]) -> Row:
    scores = {key: mean_and_spread([result.scores[key] for result in results]) for key in results[0].scores}
    return Row(network, method, eta, len(results), scores)


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    settings = study.settings
    for network in study.chosen:
        title(out, f"{settings.data_set}, {NETWORKS[network].label}, test images")
        rows = table("", "eta", *METRICS.values(), "mean sigma")
        for row in study.rows(network):
            numbers = [with_error(*row.scores[f"test_{key}"]) for key in METRICS]
            sigma = "" if row.eta is None else f"{row.scores['mean_scale'][0]:.3g}"
            rows.add_row(row.method, "" if row.eta is None else f"{row.eta:g}", *numbers, sigma)
        out.print(rows)
    choice = f"eta chosen by the NLL of the first seed on {settings.held_out} held-out training images."
    remark(out, f"Mean ± standard deviation over {settings.seeds} seeds; {choice}")
    notes(out, study.notes())
