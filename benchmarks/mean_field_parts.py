"""What the mean-field benchmarks share: problems, deterministic steps as the limit, and our own contenders."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from posterity.model.data import Batch
from posterity.networks import MLP, LeNet, ResNet
from posterity.numerics.random import Key
from posterity.priors.fan import ScaleRule

BATCH, CLASSES = 128, 10
NUM_DATA = 60_000  # what one KL is shared by
STEP_SIZE = 1e-3
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP((784, 400, 400, CLASSES)), (784,)),
    "lenet": (lambda: LeNet(CLASSES), (1, 28, 28)),
    "resnet20": (lambda: ResNet(20, CLASSES), (3, 32, 32)),
    "tiny": (lambda: MLP((2, 50, 50, CLASSES)), (2,)),
}


@dataclass(frozen=True)
class SameScale(ScaleRule):
    """`gain` itself as the standard deviation of every weight, so that all contenders start alike."""

    def variance(self, fan_in: int, fan_out: int) -> float:
        """gain^2."""
        return self.gain**2


def problem(net: str, rows: int, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A fresh network and rows of its shape, labelled at random: time does not depend on what they say."""
    torch.manual_seed(seed)
    build, shape = NETS[net]
    key = Key(seed).fold("mean field")
    return build(), key.fold("inputs").normal((rows, *shape)), (key.fold("labels").uniform((rows,)) * CLASSES).long()


def deterministic_step(module: nn.Module, x: Tensor, y: Tensor, passes: int = 1, **adam: Any) -> Callable[[], None]:
    """Forward and backward `passes` times, then a step of `torch.optim.Adam`: the limit."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.Adam(module.parameters(), lr=STEP_SIZE, **adam)

    def call() -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return call


def our_joint(module: nn.Module, num_data: int = NUM_DATA) -> po.Joint:
    """The network with N(0, 1) weights."""
    return po.Joint(module, po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=num_data)


def our_step(method: Any, joint: po.Joint, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """A step of the method on one batch, with the key of each step folded as `infer` does; gives the step's info."""
    batch = joint.check(Batch(x, y))
    state, key, step = method.init(joint, joint.initial(), Key(0).fold("init")), Key(0).fold("steps"), 0

    def call() -> Any:
        nonlocal state, step
        state, info = method.step(joint, state, batch, key.fold(step))
        step += 1
        return info

    return call


def our_run(method: Any, joint: po.Joint, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """A whole run of `infer`; gives its trace."""

    def call() -> Any:
        return po.infer(method, joint, (x, y), progress=False)[1]

    return call


def our_objective(estimator: Any, module: nn.Module, x: Tensor, y: Tensor, scale: float) -> tuple[float, float]:
    """The loss for each datum of a first step at the module's weights with this scale, and the exact KL there."""
    method = po.methods.MeanField(1, None, po.optim.Adam(), estimator=estimator, initial_scales=SameScale(scale))
    means = torch.cat([p.detach().flatten() for p in module.parameters()])
    info = our_step(method, our_joint(module), x, y)()
    return float(info["loss"]), closed_form_kl(means, torch.full_like(means, scale))


def our_posterior(module: nn.Module, scale: float) -> Any:
    """The posterior of no steps: the module's weights, each with this standard deviation."""
    joint, start = our_joint(module), SameScale(scale)
    method = po.methods.MeanField(1, None, po.optim.Adam(), initial_scales=start)
    return method.posterior(joint, [method.keep(method.init(joint, joint.initial(), Key(0)))])


def closed_form_kl(means: Tensor, scales: Tensor, prior_scale: float = 1.0) -> float:
    """KL(q || N(0, prior_scale^2)) of all weights, in nats, in float64."""
    q = torch.distributions.Normal(means.double(), scales.double())
    p = torch.distributions.Normal(torch.zeros_like(q.loc), torch.full_like(q.loc, prior_scale))
    return float(torch.distributions.kl_divergence(q, p).sum())
