"""Laplace at its defaults on networks that plain torch loops trained: does it predict worse than the network alone?

    python -m benchmarks.posthoc

Eight networks, each with held-out rows and foreign inputs. The prior scale is left out. NLL and ECE are of the
held-out rows, AUROC of foreign inputs among them by the entropy of the prediction, and by its epistemic part; beside
them the standard deviation of outputs on either. Warnings that predictions are worse stand as "said of harm".
"""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity as po
from benchmarks.harness import context, parser, write
from posterity.datasets import mnist, mnist_test
from posterity.likelihoods import Categorical
from posterity.metrics import expected_calibration_error, out_of_distribution_auroc
from posterity.predictive import from_outputs

Pair = tuple[Tensor, Tensor]
ABOUT_HARM = re.compile("predicts? .*worse|worse than")


@dataclass(frozen=True)
class Case:
    """A network to train, its rows, held-out rows, foreign inputs, and how it is trained."""

    name: str
    network: Callable[[], nn.Module]
    train: Pair
    test: Pair
    foreign: Tensor
    epochs: int
    step_size: float = 1e-3
    weight_decay: float = 0.0
    augment: Callable[[Tensor], Tensor] = lambda x: x


class Recurrent(nn.Module):
    """A GRU over the rows of an image, read out at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 1, 8, 8)."""
        return self.out(self.cells(x.squeeze(1))[0][:, -1])


class Attending(nn.Module):
    """A small transformer over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.places = nn.Linear(8, 32), nn.Parameter(0.02 * torch.randn(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 1, 8, 8)."""
        return self.out(self.layers(self.into(x.squeeze(1)) + self.places).mean(1))


def moons(count: int, seed: int) -> Pair:
    """Two half circles with noise."""
    from sklearn.datasets import make_moons

    x, y = make_moons(count, noise=0.2, random_state=seed)
    return torch.tensor(x).float(), torch.tensor(y)


def shifted(x: Tensor) -> Tensor:
    """Images moved by at most a pixel, with a little noise."""
    move = [int(value) for value in torch.randint(-1, 2, (2,))]
    return torch.roll(x, move, (2, 3)) + 0.05 * torch.randn_like(x)


def cases() -> list[Case]:
    """The eight networks with their rows."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16.0, torch.tensor(labels)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    digits, held_out, noise = (x[:1000], y[:1000]), (x[1000:], y[1000:]), torch.rand(400, 1, 8, 8)
    large, fashion = mnist(), mnist_test("fashion-mnist")
    rows = (large.train.inputs[:10_000], large.train.targets[:10_000])
    tests = (large.test.inputs[:4000], large.test.targets[:4000])
    foreign = fashion.inputs[:2000]
    ring = 4.0 * F.normalize(torch.randn(400, 2), dim=1) + 0.5

    def convolutions() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip

    def lenet() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)) if rows[0].dim() == 2 else nn.Identity(),
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip

    def mlp(*sizes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    few = (digits[0][:300], digits[1][:300])
    return [
        Case("digits CNN, batch norm, augmentation", convolutions, digits, held_out, noise, 60, 3e-3, 1e-4, shifted),
        Case("MNIST LeNet", lenet, rows, tests, foreign, 5),
        Case("MNIST MLP", lambda: mlp(784, 100, 10), rows, tests, foreign, 8),
        Case("two moons", lambda: mlp(2, 50, 50, 2), moons(300, 0), moons(2000, 1), ring, 150, 1e-2, 1e-3),
        Case("GRU on digits", Recurrent, digits, held_out, noise, 40, 3e-3),
        Case("transformer on digits", Attending, digits, held_out, noise, 40, 3e-3),
        Case("over-trained MLP", lambda: mlp(64, 100, 10), few, held_out, noise, 400, 1e-2),
        Case("under-trained MLP", lambda: mlp(64, 100, 10), digits, held_out, noise, 4),
    ]


def trained(case: Case) -> nn.Module:
    """The network after plain Adam on shuffled batches of 64 rows."""
    network, (x, y) = case.network(), case.train
    optimizer = torch.optim.Adam(network.parameters(), case.step_size, weight_decay=case.weight_decay)
    for _ in range(case.epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(case.augment(x[rows])), y[rows]).backward()
            optimizer.step()
    return network.eval()


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that a score is larger outside; ties count half."""
    low = inside.flatten().sort().values
    below, upto = (torch.searchsorted(low, outside.flatten(), right=right) for right in (False, True))
    return float((below + upto).double().mean()) / (2.0 * len(low))


def measured(case: Case, seed: int) -> dict[str, Any]:
    """The scores of the network alone and of the posterior at its defaults."""
    network = trained(case)
    x, y = case.test
    joint = po.Joint(network, Categorical(), po.priors.Normal(), len(case.train[0]))
    said = Heard()
    begin = time.perf_counter()
    with said:
        q, trace = po.infer(po.methods.Laplace(), joint, case.train, seed=seed)
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        alone, far = (from_outputs(Categorical(), network(each).unsqueeze(0)) for each in (x, case.foreign))
    predicted, foreign = q.predict(x), q.predict(case.foreign)
    difference = (alone.log_prob(y) - predicted.log_prob(y)).double()
    return {
        "network": case.name,
        "weights": joint.num_weights,
        "nll": [-float(alone.log_prob(y).mean()), -float(predicted.log_prob(y).mean())],
        "difference": [float(difference.mean()), float(difference.std()) / len(difference) ** 0.5],
        "ece": [float(expected_calibration_error(p, y)) for p in (alone, predicted)],
        "auroc": [
            out_of_distribution_auroc(alone, far),
            out_of_distribution_auroc(predicted, foreign),
            auroc(predicted.epistemic, foreign.epistemic),
        ],
        "output_deviation": [float(q.output_moments(i, marginal=True)[1].mean()) ** 0.5 for i in (x, case.foreign)],
        "prior_precision": float(trace["prior_scale"][-1].min()) ** -2,
        "said": said.lines,
        "seconds": seconds,
    }


def _sorted(said: list[str]) -> dict[str, list[str]]:
    """Warnings that predictions are worse, and others."""
    harm = [line for line in said if ABOUT_HARM.search(line)]
    return {"harm": harm, "other things": [line for line in said if line not in harm]}


class Heard:
    """A context that keeps the warnings of the library."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> "Heard":
        import logging

        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("posterity").addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        import logging

        logging.getLogger("posterity").removeHandler(self._handler)


def main() -> None:
    """Train and measure each network."""
    options = parser(__doc__ or "").parse_args()
    torch.manual_seed(options.seed)
    found, lines = [], []
    for case in cases():
        row = measured(case, options.seed)
        found.append(row)
        (nll, ours), (ece, our_ece), (roc, *ours_roc) = row["nll"], row["ece"], row["auroc"]
        no_harm = "no harm" if ours <= nll + 0.005 and our_ece <= ece + 0.005 else "HARM"
        lines.append(
            f"{row['network']} ({row['weights']:,} weights): {no_harm}; NLL {nll:.4f} -> {ours:.4f} (difference "
            f"{row['difference'][0]:+.4f}, standard error {row['difference'][1]:.4f}), ECE {ece:.4f} -> {our_ece:.4f}, "
            f"AUROC {roc:.3f} -> {ours_roc[0]:.3f}, {ours_roc[1]:.3f} by the epistemic part, "
            f"outputs deviate by {row['output_deviation'][0]:.3f}, foreign ones by {row['output_deviation'][1]:.3f}, "
            f"prior precision {row['prior_precision']:.3g}, {row['seconds']:.1f} s"
            + "".join(f"; said of {about}: {' '.join(said)}" for about, said in _sorted(row["said"]).items() if said)
        )
        print(lines[-1], file=sys.stderr, flush=True)
    write("posthoc", [], context(options), {"networks": found}, lines, options.results)


if __name__ == "__main__":
    main()
