"""Fits of the study: one small file for each network, eta and seed."""

import time
from dataclasses import dataclass
from pathlib import Path

from posterity.inference import infer
from posterity.inference.sweep import Result, stored_results, write_result
from posterity.model.data import as_data
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Posterior
from posterity.storage import Part
from posterity_studies.images.protocol import NETWORKS, Images, problem, scores
from posterity_studies.images.settings import Settings
from posterity_studies.results import depends_on


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

    It begins at the posterior `begin_at`, or for None at the network's first weights; its seconds are those of this
    stage.
    """
    joint = problem(cell.network, cell.eta, cell.seed, len(data.train), settings)
    method = settings.stages(cell.network, cell.eta)[-1]
    key = _key(settings, cell.seed)
    seed = key.seed if begin_at is None else key.fold("second").seed
    begin = time.perf_counter()
    posterior, trace = infer(method, joint, data.train.pair, start=begin_at, seed=seed, progress=False)
    seconds = time.perf_counter() - begin
    found = scores(posterior, data, settings)
    if isinstance(posterior, Gaussian):
        last = max(1, len(trace["kl"]) // 20)  # one draw is noisy: the mean of the last twentieth of the run
        found["mean_scale"] = float(posterior.variance.sqrt().mean())
        found |= {name: float(trace[name][-last:].mean()) for name in ("data_fit", "kl")}
    return write_result(cell, folder, depends(cell, data, settings), found, seconds)


def _key(settings: Settings, seed: int) -> Key:
    return Key(settings.seed).fold("fit").fold(seed)
