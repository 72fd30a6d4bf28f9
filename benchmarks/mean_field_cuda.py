"""A step of mean-field VI on a CUDA device, against the deterministic step recorded as a CUDA graph, and called.

ResNet-20 with batch norm on images of CIFAR-10's shape, at batch 128 and 1024, and the MLP 784-1200-1200-10 at batch
128, float32. All contenders take the same batches in turn, which lie on the device; a unit is a step, and a call makes
many of them and waits for the device. IVON runs in a loop of its own, recorded by hand. Nothing is needed but torch,
numpy, safetensors and this repository; bayesian-torch is compared where it is installed. Without a CUDA device the
benchmark says so and ends.
"""

import copy
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Comparison, Contender, compare, context, parser, recorded, write
from posterity import Joint, infer
from posterity.inference import Callback, Method, Run
from posterity.inference.acceleration import Acceleration, Stepper
from posterity.likelihoods import Categorical
from posterity.methods import MAP, MeanField, NaturalGradient
from posterity.model import Batch
from posterity.networks import MLP, ResNet
from posterity.numerics.random import Key
from posterity.optim import IVON, Adam, Constant
from posterity.priors import Normal

CLASSES, STEPS, NUM_BATCHES = 10, 50, 8
CASES = (("ResNet-20", 128), ("ResNet-20", 1024), ("MLP 784-1200-1200-10", 128))
LIMIT, CALLED = "deterministic, recorded", "deterministic, called"
FIELD, GRADIENT = "posterity MeanField, recorded", "posterity NaturalGradient, recorded"
OPTIMISER = "posterity.optim.IVON, recorded"
BOUNDS = {  # the most that each may take, x limit
    **{("ResNet-20", 128, name): 1.15 for name in (GRADIENT, OPTIMISER)},
    **{("MLP 784-1200-1200-10", 128, name): 2.6 for name in (GRADIENT, OPTIMISER)},
    ("ResNet-20", 1024, FIELD): 0.62,
}
LOOP_STEPS = 1_000  # of a whole run of `infer`, of which the second half is timed


@dataclasses.dataclass(frozen=True)
class Problem:
    """A network with batches for it, on the device."""

    name: str
    size: int
    module: nn.Module
    batches: list[Batch]

    @property
    def num_data(self) -> int:
        """Rows in all batches."""
        return NUM_BATCHES * self.size

    @property
    def joint(self) -> Joint:
        """With a standard normal prior."""
        return Joint(copy.deepcopy(self.module), Categorical(), Normal(scale=1.0), num_data=self.num_data)


def problem(name: str, size: int, seed: int) -> Problem:
    """Batches of `size` random rows: what they show makes no difference to the time."""
    torch.manual_seed(seed)
    module, shape = (ResNet(20, CLASSES), (3, 32, 32)) if name == "ResNet-20" else (MLP([784, 1200, 1200, 10]), (784,))
    key = Key(seed).fold(name)
    batches = [
        Batch(
            key.fold(f"inputs {index}").normal((size, *shape), device="cuda"),
            (key.fold(f"labels {index}").uniform((size,), device="cuda") * CLASSES).long(),
        )
        for index in range(NUM_BATCHES)
    ]
    return Problem(name, size, module.cuda(), batches)


def steps(step: Callable[[Batch], Any], batches: list[Batch]) -> Callable[[], None]:
    """Many steps in a row, on the batches in turn, until the device has done them."""
    turns: Iterator[Batch] = cycle(batches)

    def call() -> None:
        for _ in range(STEPS):
            step(next(turns))
        torch.cuda.synchronize()

    return call


def deterministic(given: Problem, *, recorded: bool) -> Callable[[], None]:
    """Fused Adam on the cross-entropy, kernel by kernel or as one graph."""
    module = copy.deepcopy(given.module).train()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, fused=True, capturable=recorded)

    def step(batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=not recorded)
        nn.functional.cross_entropy(module(batch.inputs), batch.targets).backward()
        optimizer.step()

    return steps(replayed(step, given.batches[0]) if recorded else step, given.batches)


def ivon(given: Problem) -> Callable[[], None]:
    """IVON in a loop of its own on the cross-entropy, as one graph."""
    module = copy.deepcopy(given.module).train()
    rate = torch.tensor(1e-3, device=given.batches[0].targets.device)
    optimizer = IVON(module.parameters(), rate, given.num_data, weight_decay=1 / given.num_data, capturable=True)

    def step(batch: Batch) -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(batch.inputs), batch.targets).backward()
        optimizer.step()

    return steps(replayed(step, given.batches[0], lambda: optimizer.generators), given.batches)


def replayed(
    step: Callable[[Batch], None], example: Batch, generators: Callable[[], Sequence[torch.Generator]] = tuple
) -> Callable[[Batch], None]:
    """The step as one graph, for batches of the example's shape."""
    place = Batch(example.inputs.clone(), example.targets.clone())  # type: ignore[union-attr]
    replay = recorded(lambda: step(place), generators)

    def play(batch: Batch, kept: object = step) -> None:  # the graph knows the memory of its tensors, not them
        place.inputs.copy_(batch.inputs)  # type: ignore[union-attr]
        place.targets.copy_(batch.targets)
        replay()

    return play


def ours(given: Problem, method: Method, accelerate: Acceleration) -> Callable[[], None]:
    """Our step, as `infer` makes it."""
    joint, key, count = given.joint, Key(0), 0
    make = Stepper(method, joint, accelerate)
    state = method.init(joint, joint.initial(), key)

    def step(batch: Batch) -> None:
        nonlocal state, count
        state, _ = make(state, batch, key.fold(count))
        count += 1

    return steps(step, [joint.check(batch) for batch in given.batches])  # no step waits to look at labels


def bayesian_torch(given: Problem) -> Callable[[], None]:
    """Its reparameterised layers put in by its own converter, KL over the number of data, fused Adam."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss  # type: ignore[import-not-found]

    module = copy.deepcopy(given.module).cpu()
    settings = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    dnn_to_bnn(module, {**settings, "type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5})
    module = module.cuda().train()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, fused=True)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss: Tensor = (
            nn.functional.cross_entropy(module(batch.inputs), batch.targets) + get_kl_loss(module) / given.num_data
        )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return steps(step, given.batches)


class _HalfTime(Callback):
    """Seconds a step of the second half of a run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def after_step(self, run: Run) -> None:
        if run.step in (run.steps // 2, run.steps):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds = (now - self.seconds) / (run.steps // 2) if run.step == run.steps else now


def in_the_loop(given: Problem, method: Method) -> float:
    """Milliseconds a step inside `infer`, with its batches, trace and checks."""
    x, y = (torch.cat(parts) for parts in zip(*((b.inputs, b.targets) for b in given.batches), strict=True))
    timer = _HalfTime()
    infer(method, given.joint, (x, y), callbacks=[timer])
    return 1e3 * timer.seconds


def comparison(given: Problem, rounds: int) -> Comparison:
    """Everybody on one problem."""
    field = MeanField(10**6, given.size, Adam(), Constant())
    names: dict[str, Method] = {
        FIELD: field,
        "posterity MAP, recorded": MAP(10**6, given.size, Adam(), Constant()),
        GRADIENT: NaturalGradient(10**6, given.size, step_size=0.01, optimizer=Adam()),
    }
    contenders = [
        Contender(LIMIT, functools.partial(deterministic, given, recorded=True), STEPS),
        Contender(CALLED, functools.partial(deterministic, given, recorded=False), STEPS),
        *(Contender(name, functools.partial(ours, given, method, "auto"), STEPS) for name, method in names.items()),
        Contender(OPTIMISER, functools.partial(ivon, given), STEPS),
        Contender("posterity MeanField, called", functools.partial(ours, given, field, "off"), STEPS),
        Contender("bayesian-torch, called", functools.partial(bayesian_torch, given), STEPS, peer=True),
    ]
    found = compare(f"{given.name}, batch {given.size}", contenders, limit=LIMIT, unit="step", rounds=rounds)
    loop = {
        name: in_the_loop(given, dataclasses.replace(method, steps=LOOP_STEPS))  # type: ignore[type-var]
        for name, method in names.items()
    }
    return dataclasses.replace(found, columns={"in infer, ms": loop})


def verdicts(name: str, size: int, found: Comparison) -> list[str]:
    """Whether each contender with a bound on this problem keeps to it, as a sentence."""
    sentences = []
    for (network, batch, contender), bound in BOUNDS.items():
        if (network, batch) == (name, size):
            ratio = found.median_of_ratios(contender)
            word = "within" if ratio <= bound else "above"
            sentences.append(f"{name}, batch {size}: {contender} takes {ratio:.3f} x the limit, {word} {bound:g} x.")
    return sentences


def main() -> None:
    """Run all comparisons and write `mean_field_cuda.json` and `mean_field_cuda.md`."""
    chosen = parser(__doc__ or "").parse_args()
    if not torch.cuda.is_available():
        sys.exit("mean_field_cuda needs a CUDA device, and torch sees none.")
    torch.set_num_threads(chosen.threads)
    torch.set_float32_matmul_precision("high")
    about = context(chosen, ["bayesian-torch"])
    about["machine"]["gpu"] = torch.cuda.get_device_name(0)
    comparisons = [comparison(problem(name, size, chosen.seed), chosen.rounds) for name, size in CASES]
    notes = [
        *(line for case, found in zip(CASES, comparisons, strict=True) for line in verdicts(*case, found)),
        f"On one {about['machine']['gpu']}, CUDA {torch.version.cuda}; float32, TF32 on in products and convolutions.",
        f'A call is {STEPS} steps and then waits for the device; "in infer" is the second half of a run of '
        f"{LOOP_STEPS:,} steps, with batches taken from the rows by index, trace and checks.",
    ]
    write("mean_field_cuda", comparisons, about, {}, notes, chosen.results)


if __name__ == "__main__":
    main()
