"""Training with and without dropout on few noisy rows: its speed, and the overfitting at the end."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.datasets.toys import two_moons
from posterity.inference import Method, infer
from posterity.inference.callbacks import Callback
from posterity.inference.run import Run
from posterity.likelihoods import Categorical
from posterity.methods import MAP, MCDropout
from posterity.model import Joint
from posterity.model.data import as_data
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.optim.optimizer import Adam
from posterity.priors import Normal

DATA_SETS, ROWS, HELD_OUT, NOISE = 12, 100, 500, 0.35
HIDDEN = 50
RATE = 0.5
STEPS, EVERY = 400, 5
STEP_SIZE = 0.005
PRIOR_SCALE = 10.0  # wide, so that only dropout regularises
LEVEL = 0.25  # training loss (nats per row) up to which steps are counted


@dataclass(frozen=True, eq=False)
class Losses:
    """Mean losses over data sets with their standard errors, (T,) each, in nats per row, with dropout off."""

    steps: Tensor
    train: Tensor
    held_out: Tensor
    train_error: Tensor
    held_out_error: Tensor

    @property
    def least(self) -> float:
        """The smallest held-out loss."""
        return float(self.held_out.min())

    @property
    def rise(self) -> float:
        """The held-out loss at the end minus its smallest value."""
        return float(self.held_out[-1]) - self.least

    @property
    def gap(self) -> float:
        """Held-out loss minus training loss at the end."""
        return float(self.held_out[-1] - self.train[-1])

    @property
    def steps_to_level(self) -> int | None:
        """The first recorded step with a training loss of at most `LEVEL`, or None."""
        below = (self.train <= LEVEL).nonzero()
        return int(self.steps[below[0]]) if len(below) else None


class _Looks(Callback):
    """Computes both losses of every member each `EVERY` steps."""

    def __init__(self, train: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]) -> None:
        self.parts = train, held_out
        self.steps: list[int] = []
        self.losses: list[Tensor] = []  # (2, M) each

    def start(self, run: Run) -> None:
        self.after_step(run)

    def after_step(self, run: Run) -> None:
        if run.step % EVERY == 0:
            self.steps.append(run.step)
            self.losses.append(torch.stack([_loss(run, *part) for part in self.parts]))


def claims(losses: dict[str, Losses]) -> dict[str, bool]:
    """Claims about dropout, and whether they hold here, by more than two standard errors where these are known."""
    without, dropout = losses["without dropout"], losses["with dropout"]
    first, second = without.steps_to_level, dropout.steps_to_level
    ends = float(without.held_out[-1] - dropout.held_out[-1])
    error = math.hypot(float(without.held_out_error[-1]), float(dropout.held_out_error[-1]))
    return {
        "with dropout training is slower": first is not None and (second is None or second > first),
        "with dropout the training loss stays higher": bool(
            dropout.train[-1] - dropout.train_error[-1] > without.train[-1] + without.train_error[-1]
        ),
        "with dropout the held-out loss is lower in the end": ends > 2.0 * error,
        "with dropout the held-out loss rises less after its minimum": dropout.rise < without.rise,
    }


def training(seed: int) -> dict[str, Losses]:
    """Train on many small data sets together, from the same first weights with and without dropout."""
    key = Key(seed).fold("training")
    sets = [two_moons(ROWS, NOISE, key.fold(index).seed, HELD_OUT) for index in range(DATA_SETS)]
    train, held_out = (
        (torch.stack([part.inputs for part in parts]), torch.stack([part.targets for part in parts]))
        for parts in ([data.train for data in sets], [data.test for data in sets])
    )
    methods: dict[str, Method] = {
        "without dropout": MAP(STEPS, None, Adam(STEP_SIZE)),
        "with dropout": MCDropout(STEPS, None, Adam(STEP_SIZE)),
    }
    return {name: _losses(method, train, held_out, seed) for name, method in methods.items()}


def _losses(method: Method, train: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor], seed: int) -> Losses:
    joint = Joint(MLP((2, HIDDEN, HIDDEN, 2), dropout=RATE), Categorical(), Normal(PRIOR_SCALE), ROWS)
    keys = [Key(seed).fold("first weights").fold(index) for index in range(DATA_SETS)]
    start, looks = torch.stack([joint.fresh(key) for key in keys]), _Looks(train, held_out)
    infer(method, joint, as_data(train, per_member=True), start=start, seed=seed, callbacks=[looks], progress=False)
    losses = torch.stack(looks.losses)  # (T, 2, M)
    means, errors = losses.mean(-1), losses.std(-1) / math.sqrt(DATA_SETS)
    return Losses(torch.tensor(looks.steps), means[:, 0], means[:, 1], errors[:, 0], errors[:, 1])


def _loss(run: Run, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean NLL of each member on its own rows, (M,)."""
    assert isinstance(run.joint, Joint)
    with torch.no_grad():
        outputs = run.joint.network.outputs(run.state.theta, inputs, per_member=True)  # (M, N, 2)
    return F.cross_entropy(outputs.mT, targets, reduction="none").mean(-1).double()
