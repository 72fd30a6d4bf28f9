"""What fits where: the memory of each method on one device, for networks of several sizes, and on how many devices.

It asks `posterity.plan`, and runs nothing: the numbers do not depend on this machine. Devices share the work on
a batch; each holds all rows, weights, moments and curvature, so that only what grows with a batch is divided.
"""

import sys
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import posterity as po
from benchmarks.harness import context, parser, write
from posterity.inference.memory import human

GIB = 2**30
MACHINES = {"laptop, 16 GiB": (16 * GIB, 1), "one H200, 139 GiB": (139 * GIB, 1), "8 x 80 GiB": (80 * GIB, 8)}
MACHINES["64 x 80 GiB"] = (80 * GIB, 64)
m, c = po.methods, po.curvature
METHODS: dict[str, Any] = {
    "MAP": m.MAP(steps=1, batch_size=1024),
    "MeanField": m.MeanField(steps=1, batch_size=1024),
    "SWAG, rank 20": m.SWAG(fit=m.MAP(steps=100, batch_size=1024), every=1, warmup=10, rank=20),
    "ensemble of 10": m.Ensemble(m.MAP(steps=1, batch_size=1024), size=10),
    "Laplace, diagonal": m.Laplace(structure=c.Diagonal(), tuning=None),
    "Laplace, Kronecker": m.Laplace(structure=c.Kronecker(), tuning=None),
    "Laplace, full": m.Laplace(structure=c.Full(), tuning=None),
    "Laplace, last layer": m.Laplace(subset=m.LastLayer(), tuning=None),
    "NUTS, 4 chains": m.NUTS(chains=4, warmup=1, draws=1),
}
SIZES = {"8-50-1": (8, 50, 1), "784-400-400-10": (784, 400, 400, 10), "4096-4096-4096-1000": (4096, 4096, 4096, 1000)}
ROWS = 1_000_000


def needed(sizes: tuple[int, ...], method: Any, world_size: int) -> int:
    """Bytes on each device."""
    with torch.device("meta"):
        layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    parts = [part for layer in layers for part in (layer, nn.ReLU())][:-1]
    network = nn.Sequential(*parts).to_empty(device="cpu")
    for weight in network.parameters():
        nn.init.zeros_(weight)
    classes = sizes[-1] > 1
    likelihood = po.likelihoods.Categorical() if classes else po.likelihoods.Gaussian(scale=1.0)
    joint = po.Joint(network, likelihood, po.priors.Normal(1.0), num_data=ROWS)
    targets = torch.zeros(1, dtype=torch.int64).expand(ROWS) if classes else torch.zeros(1, 1).expand(ROWS, 1)
    rows = torch.zeros(1, sizes[0]).expand(ROWS, sizes[0]), targets
    return po.plan(method, joint, rows, world_size=world_size).total


def main() -> int:
    """Print and write the table."""
    given = parser(__doc__ or "").parse_args()
    table = [["network", "method", "1 device", "each of 8", "each of 64", *(f"fits: {name}" for name in MACHINES)]]
    facts: dict[str, Any] = {}
    for size, layers in SIZES.items():
        for name, method in METHODS.items():
            bytes_of = {devices: needed(layers, method, devices) for devices in (1, 8, 64)}
            fits = ["yes" if bytes_of[count] <= room else "no" for room, count in MACHINES.values()]
            table.append([size, name, *(human(each) for each in bytes_of.values()), *fits])
            facts[f"{size}: {name}"] = bytes_of
    notes = [f"{ROWS:,} float32 rows in memory; batches of 1,024, all rows for NUTS."]
    write("fits", [], context(given), facts, notes, given.results, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
