"""What the Laplace benchmarks share: problems, one epoch as the limit, our fit and the peer's."""

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import posterity as po
from posterity.networks import MLP, LeNet
from posterity.numerics.random import Key

BATCH = 250
CLASSES = 10
PEER_PACKAGES = ("laplace-torch", "curvlinops-for-pytorch", "backpack-for-pytorch", "asdfghjkl")
PEER_MODULES = {"BackPack": "backpack", "Asdl": "asdl", "Curvlinops": "curvlinops"}


class Batches:
    """Slices of the rows in order; has what laplace-torch asks of a loader, and none of a loader's own cost."""

    def __init__(self, x: Tensor, y: Tensor, size: int = BATCH) -> None:
        self.dataset = y  # laplace-torch takes its length
        self._pairs = list(zip(x.split(size), y.split(size), strict=True))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


def problem(net: str, num_data: int, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A fresh network `mlp` or `lenet`, and rows labelled by a random linear map."""
    torch.manual_seed(seed)
    module: nn.Module = MLP((784, 400, 400, CLASSES)) if net == "mlp" else LeNet(CLASSES)
    key = Key(seed).fold("laplace")
    x = key.fold("inputs").normal((num_data, 784))
    y = (x @ key.fold("teacher").normal((784, CLASSES))).argmax(dim=1)
    return module, x if net == "mlp" else x.reshape(-1, 1, 28, 28), y


def without_biases(module: nn.Module) -> nn.Module:
    """A copy whose linear and convolution layers have no bias."""
    bare = copy.deepcopy(module)
    for layer in bare.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.bias = None
    return bare


def prior_outside(module: nn.Module) -> float:
    """Log N(0, 1) density of the weights that are not in the last layer: our evidence has it, the peer's does not."""
    *rest, _, _ = module.parameters()
    weights = torch.cat([weight.detach().flatten() for weight in rest])
    return float(torch.distributions.Normal(0.0, 1.0).log_prob(weights).sum())


def epoch(module: nn.Module, batches: Batches) -> Callable[[], None]:
    """Forward and backward over all batches: the limit of a fit."""
    module = copy.deepcopy(module)

    def call() -> None:
        for x, y in batches:
            module.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]

    return call


def our_method(
    curvature: str, structure: str, *, last_layer: bool = False, tuned: bool = False, batch_size: int = BATCH
) -> Any:
    """`po.methods.Laplace` by words: `ggn`, `sampled` or `empirical`; `kron`, `diag` or `full`."""
    curvatures = {
        "ggn": po.curvature.GaussNewton,
        "sampled": lambda: po.curvature.MonteCarloFisher(samples=1),
        "empirical": po.curvature.EmpiricalFisher,
    }
    structures = {"kron": po.curvature.Kronecker, "diag": po.curvature.Diagonal, "full": po.curvature.Full}
    return po.methods.Laplace(
        curvature=curvatures[curvature](),
        structure=structures[structure](),
        subset=po.methods.LastLayer() if last_layer else po.methods.AllWeights(),
        batch_size=batch_size,
        tuning=po.evidence.Evidence() if tuned else None,
    )


def our_fit(module: nn.Module, x: Tensor, y: Tensor, method: Any) -> Callable[[], Any]:
    """The posterior at the module's own weights under a N(0, 1) prior."""
    joint = po.Joint(module, po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=len(y))

    def call() -> Any:
        return po.infer(method, joint, (x, y), progress=False)[0]

    return call


def our_evidence(q: Any) -> float:
    """log p(data) as the Laplace approximation has it."""
    return float(q.gaussian.log_evidence)


def peer_fit(
    backend: str, module: nn.Module, batches: Batches, structure: str, *, last_layer: bool = False, **options: Any
) -> Callable[[], Any]:
    """laplace-torch's posterior at the same weights under the same prior, ready to predict.

    Its decomposition is made at once, as ours is; `options` go to the backend.
    """
    from laplace import Laplace  # type: ignore[import-not-found]

    prefix = next(name for name in PEER_MODULES if backend.startswith(name))
    kind = getattr(importlib.import_module(f"laplace.curvature.{PEER_MODULES[prefix]}"), backend)
    module = copy.deepcopy(module)  # BackPACK writes into it

    def call() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = Laplace(
                module,
                "classification",
                subset_of_weights="last_layer" if last_layer else "all",
                hessian_structure=structure,
                prior_precision=1.0,
                backend=kind,
                backend_kwargs=options,
            )
            fitted.fit(batches)
            _ = fitted.posterior_scale if structure == "full" else fitted.log_det_posterior_precision
        return fitted

    return call


def peer_evidence(fitted: Any) -> float:
    """log p(data) of laplace-torch, whose prior leaves out the constant that it shares with the determinant."""
    return float(fitted.log_marginal_likelihood())
