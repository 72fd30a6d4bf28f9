"""Libraries whose mean-field networks are made of Bayesian layers, each as its own documentation has it."""

import copy
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.mean_field_parts import NUM_DATA, STEP_SIZE, closed_form_kl

TORCHBNN_KL = 0.01  # what its examples multiply the mean KL by


@dataclass(frozen=True)
class Problem:
    """Where a peer starts: a network of its own, one batch, draws for each step, and the scale of all weights."""

    module: nn.Module
    x: Tensor
    y: Tensor
    draws: int = 1
    scale: float = 1e-4


@dataclass(frozen=True)
class Peer:
    """One step, predictive probabilities of rows, the objective for each datum at the start, and the exact KL there."""

    step: Callable[[], Any]
    predict: Callable[[Tensor, int], Tensor]
    objective: Callable[[], float]
    kl: float


@dataclass(frozen=True)
class Layers:
    """How a library with Bayesian layers names the parameters of a layer, and the prior that they have."""

    mean: str
    spread: str
    positive: Callable[[Tensor], Tensor]
    inverse: Callable[[float], float]
    prior_scale: float

    def pairs(self, layer: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Means with what their scales are made of: weight, bias."""
        named = dict(layer.named_parameters(recurse=False))
        return [(p, named[name.replace(self.mean, self.spread)]) for name, p in named.items() if self.mean in name]

    def start(self, layer: nn.Module, plain: nn.Module, scale: float) -> None:
        """The plain layer's weights, all with this scale."""
        with torch.no_grad():
            for (mean, spread), weight in zip(self.pairs(layer), (plain.weight, plain.bias), strict=False):
                mean.copy_(torch.zeros_like(mean) if weight is None else weight)  # type: ignore[arg-type]
                spread.fill_(self.inverse(scale))


def softplus_inverse(value: float) -> float:
    """log(exp(value) - 1)."""
    return math.log(math.expm1(value))


MU_RHO = Layers("mu_", "rho_", F.softplus, softplus_inverse, 1.0)
TORCHBNN = Layers("_mu", "_log_sigma", torch.exp, math.log, 0.1)
BLITZ = Layers("_mu", "_rho", F.softplus, softplus_inverse, 0.1)
UNCERTAINTY = Layers("_mu", "_sigma", F.softplus, softplus_inverse, 0.1)


def layers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(owner, name, layer) of each linear and convolution layer."""
    for owner in list(module.modules()):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                yield owner, name, layer


def trained(problem: Problem, module: nn.Module, names: Layers, loss: Callable[[], Tensor]) -> Peer:
    """A network of Bayesian layers under `torch.optim.Adam`."""
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=STEP_SIZE)
    pairs = [pair for layer in module.modules() for pair in names.pairs(layer)]
    means, spreads = (torch.cat([p.detach().flatten() for p in part]) for part in zip(*pairs, strict=True))

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    @torch.no_grad()
    def predict(rows: Tensor, draws: int) -> Tensor:
        module.eval()
        probs = sum(module(rows).softmax(-1) for _ in range(draws)) / draws
        module.train()
        return probs

    kl = closed_form_kl(means, names.positive(spreads.double()), names.prior_scale)
    return Peer(step, predict, lambda: float(loss().detach()), kl)


def bayesian_torch(problem: Problem, kind: str) -> Peer:
    """Its README: the outputs of all draws are averaged, and `get_kl_loss` over the batch size is added."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss  # type: ignore[import-not-found]

    module = copy.deepcopy(problem.module)
    settings = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
    places = list(layers_of(module))
    dnn_to_bnn(module, {**settings, "type": kind, "moped_enable": False, "moped_delta": 0.5})
    for owner, name, layer in places:
        MU_RHO.start(getattr(owner, name), layer, problem.scale)

    def loss() -> Tensor:
        outputs = [module(problem.x) for _ in range(problem.draws)]
        output = outputs[0] if problem.draws == 1 else torch.stack(outputs).mean(0)
        return F.cross_entropy(output, problem.y) + get_kl_loss(module) / len(problem.y)

    return trained(problem, module, MU_RHO, loss)


def replaced(
    problem: Problem, names: Layers, linear: Callable[[nn.Linear], nn.Module], conv: Callable[[nn.Conv2d], nn.Module]
) -> nn.Module:
    """A copy of the network with other layers, at its weights."""
    module = copy.deepcopy(problem.module)
    for owner, name, layer in layers_of(module):
        new = linear(layer) if isinstance(layer, nn.Linear) else conv(layer)  # type: ignore[arg-type]
        names.start(new, layer, problem.scale)
        setattr(owner, name, new)
    return module


def torchbnn(problem: Problem) -> Peer:
    """Its examples: cross-entropy plus 0.01 times `BKLLoss` with its default reduction, the mean over weights."""
    import torchbnn as bnn  # type: ignore[import-not-found]

    prior = (0, TORCHBNN.prior_scale)
    module = replaced(
        problem,
        TORCHBNN,
        lambda old: bnn.BayesLinear(*prior, old.in_features, old.out_features, old.bias is not None),
        lambda old: bnn.BayesConv2d(
            *prior,
            *(old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding),
            bias=old.bias is not None,
        ),
    )
    kl = bnn.BKLLoss()

    def loss() -> Tensor:
        fit = sum(F.cross_entropy(module(problem.x), problem.y) for _ in range(problem.draws)) / problem.draws
        return fit + TORCHBNN_KL * kl(module)  # type: ignore[no-any-return]

    return trained(problem, module, TORCHBNN, loss)


def blitz(problem: Problem) -> Peer:
    """Its README: `sample_elbo` with the default weight of the complexity cost, 1, beside a mean loss."""
    from blitz.modules import BayesianConv2d, BayesianLinear  # type: ignore[import-not-found]
    from blitz.utils import variational_estimator  # type: ignore[import-not-found]

    module: Any = replaced(
        problem,
        BLITZ,
        lambda old: BayesianLinear(old.in_features, old.out_features, bias=old.bias is not None),
        lambda old: BayesianConv2d(
            *(old.in_channels, old.out_channels, old.kernel_size),
            stride=old.stride,
            padding=old.padding,
            bias=old.bias is not None,
        ),
    )
    module.__class__ = variational_estimator(type("Estimator", (type(module),), {}))
    loss = functools.partial(module.sample_elbo, problem.x, problem.y, F.cross_entropy, problem.draws)
    return trained(problem, module, BLITZ, loss)


def without_init(name: str) -> None:
    """Let the files of a package be imported without its `__init__`, which needs torchvision."""
    if name not in sys.modules and not importlib.util.find_spec("torchvision"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named '{name}'")
        sys.modules[name] = importlib.util.module_from_spec(spec)


def torch_uncertainty(problem: Problem) -> Peer:
    """Its documentation: `ELBOLoss` with a KL weight of 1 / num_data."""
    without_init("torch_uncertainty")
    from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear, bayesian_modules  # type: ignore[import-not-found]

    module = replaced(
        problem,
        UNCERTAINTY,
        lambda old: BayesLinear(old.in_features, old.out_features, bias=old.bias is not None),
        lambda old: BayesConv2d(
            *(old.in_channels, old.out_channels, old.kernel_size[0]),
            stride=old.stride[0],
            padding=old.padding[0],
            bias=old.bias is not None,
        ),
    )
    layers = [layer for layer in module.modules() if isinstance(layer, bayesian_modules)]

    def loss() -> Tensor:  # as its ELBOLoss, whose own file needs torchvision, with the mean over layers of its KLDiv
        total = torch.zeros(())
        for _ in range(problem.draws):
            total = total + F.cross_entropy(module(problem.x), problem.y)
            kl = sum(layer.log_variational_posterior - layer.log_prior for layer in layers) / len(layers)
            total = total + kl / NUM_DATA
        return total / problem.draws

    return trained(problem, module, UNCERTAINTY, loss)
