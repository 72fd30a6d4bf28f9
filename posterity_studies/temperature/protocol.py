"""The problem of each width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.likelihoods import Categorical
from posterity.model import Joint, Tempering
from posterity.numerics.random import Key
from posterity.priors import Normal
from posterity_studies.groups import first_weights
from posterity_studies.temperature.data import DTYPES, Rows
from posterity_studies.temperature.settings import Settings


@dataclass(frozen=True, eq=False)
class Problem:
    """A width: its joint without a temperature, N, and the rows."""

    width: int | None
    joint: Joint
    units: int
    rows: Rows

    @property
    def num_data(self) -> int:
        """p."""
        return len(self.rows.train)

    def tau(self, eta: float) -> float:
        """The tau of eta = tau p/N."""
        return eta * self.units / self.num_data

    def tempered(self, etas: Sequence[float]) -> Joint:
        """The joint with one eta, or with a member for each."""
        joint = self.joint
        eta = etas[0] if len(etas) == 1 else torch.tensor(etas, dtype=torch.float64, device=joint.device)
        return Joint(joint.network, joint.likelihood, joint.prior, joint.num_data, Tempering.tempered(eta))

    def start(self, seeds: Sequence[int], key: Key) -> Tensor:
        """First weights, (P,) for one seed or a row for each."""
        return first_weights(self.joint.fresh, seeds, key)


def problem(width: int | None, rows: Rows, settings: Settings) -> Problem:
    """The problem of a width."""
    architecture = settings.architecture
    with torch.random.fork_rng(devices=[]):  # weights that nobody sees: every fit has fresh ones
        torch.default_generator.manual_seed(0)
        module = architecture.make(rows.shape, rows.classes, width)
    module = module.to(settings.device, DTYPES[settings.dtype])
    prior = Normal(math.sqrt(settings.prior_variance))
    joint = Joint(module, Categorical(), prior, len(rows.train))
    return Problem(width, joint, architecture.count(joint.network), rows)
