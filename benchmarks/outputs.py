"""Laplace fits of networks with many outputs, and of recurrent ones, against one epoch of forward and backward passes.

Sixteen images of 64 x 64 pixels with 3 classes, the whole matrix of the last layer, and Kronecker factors of all layers
(random columns before the last); a linear layer with 1,000 classes and 1,000 rows, exact Kronecker factors; and the
exact diagonal of an LSTM, against the same LSTM written as loops of cells and of linear layers. Weights are as they are
initialised, and the prior is given.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from benchmarks.laplace_parts import Batches, epoch, our_evidence
from posterity.curvature import Diagonal, Full, Kronecker, Structure
from posterity.likelihoods import Categorical
from posterity.methods import AllWeights, Laplace, LastLayer

EPOCH = "forward and backward, one epoch"
LOOP = "a loop of linear layers"
INPUTS, HIDDEN, STEPS, CLASSES = 32, 64, 20, 10


class Fused(nn.Module):
    """nn.LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(INPUTS, HIDDEN, batch_first=True), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C) of sequences (N, T, I)."""
        outputs: Tensor = self.head(self.cell(x)[0][:, -1])
        return outputs


class Cells(nn.Module):
    """The same as a loop of nn.LSTMCell."""

    def __init__(self, fused: Fused) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(INPUTS, HIDDEN), fused.head
        self.cell.load_state_dict({name.removesuffix("_l0"): value for name, value in fused.cell.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C) of sequences (N, T, I)."""
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        outputs: Tensor = self.head(state[0])
        return outputs


class Gates(nn.Module):
    """The same as a loop of two linear layers."""

    def __init__(self, fused: Fused) -> None:
        super().__init__()
        self.inside, self.recurrent = nn.Linear(INPUTS, 4 * HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN)
        self.head, weights = fused.head, fused.cell.state_dict()
        for layer, kind in ((self.inside, "ih"), (self.recurrent, "hh")):
            layer.load_state_dict({name: weights[f"{name}_{kind}_l0"] for name in ("weight", "bias")})

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C) of sequences (N, T, I)."""
        hidden = memory = x.new_zeros(len(x), HIDDEN)
        for step in x.unbind(1):
            update, forget, new, out = (self.inside(step) + self.recurrent(hidden)).chunk(4, -1)
            memory = forget.sigmoid() * memory + update.sigmoid() * new.tanh()
            hidden = out.sigmoid() * memory.tanh()
        outputs: Tensor = self.head(hidden)
        return outputs


def fit(
    module: nn.Module, x: Tensor, y: Tensor, structure: Structure, last: bool = False, positions: int = 0
) -> Callable[[], Callable[[], Any]]:
    """The Laplace posterior at the module's weights under a N(0, 1) prior, as a contender prepares it."""
    joint = po.Joint(module, Categorical(positions), po.priors.Normal(scale=1.0), num_data=len(y))
    method = Laplace(structure=structure, subset=LastLayer() if last else AllWeights(), tuning=None)
    return lambda: lambda: po.infer(method, joint, (x, y), progress=False)[0]


def pixels(rounds: int) -> Comparison:
    """Sixteen images with a class for each pixel."""
    module = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()), nn.Conv2d(16, 3, 1)
    )
    x, y = torch.randn(16, 3, 64, 64), torch.randint(0, 3, (16, 64, 64))
    return compare(
        "Sixteen images, 64 x 64, 3 classes for each pixel",
        [
            Contender(EPOCH, lambda: epoch(module, Batches(x, y, 16))),
            Contender("last layer, whole matrix", fit(module, x, y, Full(), True, 2), checksum=our_evidence),
            Contender("all layers, Kronecker, 4 random columns", fit(module, x, y, Kronecker(), False, 2)),
        ],
        limit=EPOCH,
        unit="fit",
        rounds=rounds,
    )


def classes(rounds: int) -> Comparison:
    """A linear layer with 1,000 classes."""
    module, x, y = nn.Linear(64, 1000), torch.randn(1000, 64), torch.randint(0, 1000, (1000,))
    return compare(
        "Linear(64, 1000), 1,000 rows",
        [
            Contender(EPOCH, lambda: epoch(module, Batches(x, y, 1000))),
            Contender("Kronecker, exact", fit(module, x, y, Kronecker()), checksum=our_evidence),
            Contender("diagonal, exact", fit(module, x, y, Diagonal()), checksum=our_evidence),
        ],
        limit=EPOCH,
        unit="fit",
        rounds=rounds,
    )


def recurrent(rounds: int) -> Comparison:
    """An LSTM, fused and as loops; all three are the same function, so that their evidences agree."""
    fused = Fused()
    x, y = torch.randn(64, STEPS, INPUTS), torch.randint(0, CLASSES, (64,))
    own = functools.partial(fit, x=x, y=y, structure=Diagonal())
    return compare(
        f"Exact diagonal of an LSTM, {INPUTS} inputs, {HIDDEN} units, {STEPS} steps, 64 rows, {CLASSES} classes",
        [
            Contender(LOOP, own(Gates(fused)), checksum=our_evidence),
            Contender("a loop of nn.LSTMCell", own(Cells(fused)), checksum=our_evidence),
            Contender("nn.LSTM", own(fused), checksum=our_evidence),
        ],
        limit=LOOP,
        unit="fit",
        rounds=rounds,
        tolerance=1e-4,
    )


def main() -> None:
    """Run the three cases and write `outputs.json` and `outputs.md`."""
    options = parser(__doc__ or "")
    options.set_defaults(rounds=5)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    comparisons = [pixels(chosen.rounds), classes(chosen.rounds), recurrent(chosen.rounds)]
    notes = ["Checksum: log evidence. The three forms of the LSTM are one function, so that theirs agree."]
    write("outputs", comparisons, context(chosen), notes=notes, folder=chosen.results)


if __name__ == "__main__":
    main()
