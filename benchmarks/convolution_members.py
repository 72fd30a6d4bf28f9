"""Value and gradient of convolutional members on a processor: one member after the other, against grouped convolutions.

A network's `one_by_one` decides between the two; here it is told. Each member has its own batch of 64 images. Nothing
is needed but torch, numpy, safetensors and this repository.
"""

from collections.abc import Callable

import torch

import posterity as po
from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from posterity.model import Batch
from posterity.model.network import Network

BATCH = 64
NETS: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "LeNet": (po.networks.LeNet, 1),
    "ConvNet of width 8": (lambda: po.networks.ConvNet(in_channels=1, width=8), 1),
}
TURN, TOGETHER = "one after the other", "grouped convolutions"


def measured(name: str, members: int, rounds: int, seed: int) -> Comparison:
    """The comparison for one network and so many members."""
    torch.manual_seed(seed)
    make, channels = NETS[name]
    joint = po.Joint(make(), po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=BATCH)
    theta = joint.initial().expand(members, -1).clone()
    images = po.Key(seed).normal((members, BATCH, channels, 28, 28))
    batch = Batch(images, torch.zeros(members, BATCH, dtype=torch.int64), per_member=True)

    def call(one_by_one: bool) -> Callable[[], float]:
        def run() -> float:
            Network.one_by_one = one_by_one  # type: ignore[assignment,method-assign]
            return float(joint.value_and_grad(theta, batch)[0].mean())

        return run

    contenders = [
        Contender(label, lambda way=way: call(way), 1, lambda value: value)  # type: ignore[misc]
        for label, way in ((TURN, True), (TOGETHER, False))
    ]
    title = f"{members} members of {name}, batch {BATCH} each"
    return compare(title, contenders, limit=TURN, unit="value and gradient of all members", rounds=rounds)


def main() -> None:
    """Run all and write `convolution_members.json` and `convolution_members.md`."""
    given = parser(__doc__ or "").parse_args()
    torch.set_num_threads(given.threads)
    found = [measured(name, members, given.rounds, given.seed) for name in NETS for members in (4, 16)]
    write("convolution_members", found, context(given), {}, [], given.results)


if __name__ == "__main__":
    main()
