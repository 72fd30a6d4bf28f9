"""Laplace on ResNet-20 with batch norm, on a CUDA device: time and memory of the fit and of the predictive.

10,000 CIFAR-10 test images, or random ones of their shape where the data set is not there, which the results say;
float32. The limit of a fit is one epoch of forward and backward passes over the same images in the same batches, batch
norm in evaluation mode, as the curvature is of the function that predicts. Nothing is needed but torch, numpy,
safetensors and this repository; without a CUDA device the benchmark says so and ends. `--network own` (the default) is
a module of a user's own, of which the library knows nothing; `--network library` is `posterity.networks.ResNet`.
"""

import copy
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import floor
from benchmarks.harness import Comparison, Contender, compare, context, parser, write
from benchmarks.laplace_parts import CLASSES, Batches, epoch, our_evidence, our_fit, our_method
from benchmarks.memory import MEBIBYTE
from posterity.datasets import cifar10_test
from posterity.errors import BadData
from posterity.networks import ResNet
from posterity.numerics.random import Key

NUM_DATA, PREDICTED, BATCH = 10_000, 1_000, 1_000
LAST_LAYER = "posterity, exact KFAC of the last layer"
WARM_UP_EPOCHS = 2  # of training, so that the running statistics and the probabilities are not those of the start
LIMIT = "forward and backward, one epoch"
FORWARD = "one forward pass"
FITS = {
    "posterity, KFAC of one sample": ("sampled", "kron", functools.partial(floor.kronecker, columns=1)),
    "posterity, exact KFAC": ("ggn", "kron", functools.partial(floor.kronecker, columns=CLASSES - 1)),
    "posterity, exact diagonal": ("ggn", "diag", functools.partial(floor.diagonal, columns=CLASSES - 1)),
}


def images(seed: int, device: torch.device) -> tuple[Tensor, Tensor, str]:
    """Images (N, 3, 32, 32) with mean 0 and variance 1, labels (N,), and what they are."""
    try:
        data = cifar10_test()
        x, y, what = data.inputs[:NUM_DATA], data.targets[:NUM_DATA], "CIFAR-10 test images"
        x = (x - x.mean(dim=(0, 2, 3), keepdim=True)) / x.std(dim=(0, 2, 3), keepdim=True)
    except BadData:
        key = Key(seed).fold("images")
        x, what = key.fold("inputs").normal((NUM_DATA, 3, 32, 32)), "random images (CIFAR-10 was not found)"
        y = (key.fold("labels").uniform((NUM_DATA,)) * CLASSES).long()
    return x.to(device), y.to(device), what


class OwnBlock(nn.Module):
    """Two convolutions with batch norm and a shortcut of option A, as users write them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.missing = after - before

    def forward(self, x: Tensor) -> Tensor:
        """relu(x + f(x)) of images."""
        change = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.missing:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.missing // 2, self.missing - self.missing // 2))
        return functional.relu(change + x)


class OwnResNet(nn.Module):
    """ResNet-20 for images of 32 x 32 pixels, in a `forward` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        sizes = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
        self.blocks = nn.Sequential(*(OwnBlock(*size) for size in sizes))
        self.linear = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C) of images (N, 3, 32, 32)."""
        x = self.blocks(functional.relu(self.bn(self.conv(x))))
        out: Tensor = self.linear(functional.avg_pool2d(x, x.shape[-1]).view(len(x), -1))
        return out


def network(x: Tensor, y: Tensor, seed: int, own: bool) -> nn.Module:
    """ResNet-20 after a little training, in evaluation mode."""
    torch.manual_seed(seed)
    module = (OwnResNet() if own else ResNet(20, CLASSES)).to(x.device)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for _ in range(WARM_UP_EPOCHS):
        for rows, labels in Batches(x, y, BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(rows), labels).backward()
            optimizer.step()
    return module.eval()


Columns = dict[str, dict[str, float]]


def columns() -> Columns:
    """Further columns of a comparison, which `measured` fills in."""
    return {"peak MiB": {}, "first call, s": {}}


def measured(call: Callable[[], Any], noted: Columns, name: str) -> Callable[[], Any]:
    """The call, ending when the device has; its peak of allocated memory and its first time are noted once."""

    def finished() -> Any:
        result = call()
        torch.cuda.synchronize()
        return result

    torch.cuda.synchronize()
    begin = time.perf_counter()
    finished()  # libraries take their workspaces in a first call, and the network is surveyed
    noted["first call, s"][name] = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    finished()
    noted["peak MiB"][name] = torch.cuda.max_memory_allocated() / MEBIBYTE
    return finished


def fits(module: nn.Module, x: Tensor, y: Tensor, rounds: int) -> Comparison:
    """The three fits against an epoch."""
    batches, noted = Batches(x, y, BATCH), columns()
    contenders = [
        Contender(LIMIT, lambda: measured(epoch(module, batches), noted, LIMIT)),
        Contender(
            f"{LIMIT}, batch norm training",
            lambda: measured(epoch(copy.deepcopy(module).train(), batches), noted, f"{LIMIT}, batch norm training"),
        ),
        *(
            Contender(
                name,
                lambda name=name, curvature=curvature, structure=structure: measured(
                    our_fit(module, x, y, our_method(curvature, structure, batch_size=BATCH)), noted, name
                ),
                checksum=our_evidence,
            )
            for name, (curvature, structure, _) in FITS.items()
        ),
    ]
    comparison = compare(
        f"Laplace fit, all weights of ResNet-20 with batch norm: {NUM_DATA:,} images, batch {BATCH:,}",
        contenders,
        limit=LIMIT,
        unit="fit",
        rounds=rounds,
    )
    layers = floor.shapes(module, x[:1])
    floors = {name: count(layers) / floor.epoch(layers) for name, (_, _, count) in FITS.items()}
    return dataclasses.replace(comparison, columns={"floor, x limit": {LIMIT: 1.0, **floors}, **noted})


def predictions(module: nn.Module, x: Tensor, y: Tensor, rounds: int) -> Comparison:
    """The linearised predictive of 1,000 images by each posterior against a forward pass."""
    rows, noted = x[:PREDICTED], columns()

    @torch.no_grad()
    def forward() -> Tensor:
        return module(rows).softmax(dim=-1)

    def ours(curvature: str, structure: str, name: str, last_layer: bool = False) -> Callable[[], Tensor]:
        q = our_fit(module, x, y, our_method(curvature, structure, last_layer=last_layer, batch_size=BATCH))()
        return measured(lambda: q.predict(rows).probs, noted, name)

    def entropy(probs: Tensor) -> float:
        return float(torch.special.entr(probs).sum(dim=-1).mean())

    contenders = [
        Contender(FORWARD, lambda: measured(forward, noted, FORWARD)),
        *(
            Contender(name, functools.partial(ours, curvature, structure, name), checksum=entropy)
            for name, (curvature, structure, _) in FITS.items()
            if curvature == "ggn"
        ),
        Contender(LAST_LAYER, functools.partial(ours, "ggn", "kron", LAST_LAYER, True), checksum=entropy),
    ]
    comparison = compare(
        f"Linearised predictive of {PREDICTED:,} images, all weights of ResNet-20",
        contenders,
        limit=FORWARD,
        unit="call",
        rounds=rounds,
    )
    return dataclasses.replace(comparison, columns=noted)


def main() -> None:
    """Run both comparisons and write `laplace_resnet_own.json` and `.md`, or `laplace_resnet` for the library's."""
    found = parser(__doc__ or "")
    found.set_defaults(rounds=5)
    found.add_argument("--network", choices=("own", "library"), default="own")
    chosen = found.parse_args()
    if not torch.cuda.is_available():
        sys.exit("laplace_resnet needs a CUDA device, and torch sees none.")
    torch.set_num_threads(chosen.threads)
    device = torch.device("cuda")
    x, y, what = images(chosen.seed, device)
    module = network(x, y, chosen.seed, chosen.network == "own")
    comparisons = [fits(module, x, y, chosen.rounds), predictions(module, x, y, chosen.rounds)]
    about = context(chosen)
    about["machine"]["gpu"] = torch.cuda.get_device_name(device)
    tf32 = {"convolutions": torch.backends.cudnn.allow_tf32, "matrix products": torch.backends.cuda.matmul.allow_tf32}
    notes = [
        f"On one {about['machine']['gpu']}, CUDA {torch.version.cuda}; {what}; float32, TF32 "
        + ", ".join(f"{'on' if on else 'off'} in {where}" for where, on in tf32.items())
        + f"; network trained for {WARM_UP_EPOCHS} epochs first.",
        "Peak MiB: most memory that torch had allocated on the device during one call, images and network included "
        f"({x.numel() * x.element_size() / MEBIBYTE:.0f} MiB of images).",
        "Times leave out the first call of each contender, in which kernels are loaded and the network is surveyed: it "
        "is a column.",
        "Checksum: of a fit the log evidence, of a predictive the mean entropy.",
    ]
    topic = "laplace_resnet_own" if chosen.network == "own" else "laplace_resnet"
    write(topic, comparisons, about, {"images": what, "tf32": tf32}, notes, chosen.results)


if __name__ == "__main__":
    main()
