"""The fit of a method to the encoded rows of a table: its network, and the stages before it."""

import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posterity.errors import shown
from posterity.inference import Method, infer
from posterity.likelihoods import Likelihood
from posterity.model import Joint, Tempering
from posterity.model.module import seeded
from posterity.networks import MLP
from posterity.posteriors import Posterior
from posterity.priors import Normal, Prior
from posterity.recipes.choice import sufficient
from posterity.recipes.methods import RECIPES
from posterity.recipes.settings import RATE, Settings
from posterity.recipes.stages import usual_kl_weight

HIDDEN = (50,)
LINEAR = ("conjugate", "ep")  # methods of linear models


class Rows(NamedTuple):
    """Rows to fit: inputs (N, D), targets (N, T) or labels (N,), and weights (N,)."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor

    def data(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the rows for `infer` in this dtype, without the weights if all are 1."""
        numbers = self.targets.is_floating_point()
        data = (self.inputs.to(dtype), self.targets.to(dtype) if numbers else self.targets)
        return data if bool((self.weights == 1).all()) else (*data, self.weights.to(dtype))


@dataclass(frozen=True, eq=False)
class Fit:
    """A method with its problem, to be fitted to rows."""

    method: str | Method
    network: Any
    likelihood: Likelihood
    prior: Prior | None
    outputs: int
    seed: int
    device: torch.device

    def __call__(self, rows: Rows, notes: list[str]) -> Posterior:
        """Run the stages of the method; add a note on the choice of the network."""
        method = self.method
        recipe = next(
            (row for row in RECIPES.values() if method == row.word or type(method).__name__ == row.label), None
        )
        word = recipe.word if recipe is not None else ""
        joint = self._joint(rows, word, notes)
        posterior: Posterior | None = None
        for stage in recipe.stages if recipe is not None else (word,):
            own = method if isinstance(method, Method) and stage == word else RECIPES[stage].make(Settings(), joint)
            classifies = not rows.targets.is_floating_point()
            eta = usual_kl_weight(joint, classifies=classifies) if stage == "mean-field" else 1.0
            staged = joint if eta == 1.0 else replace(joint, tempering=Tempering.tempered(eta))
            posterior, _ = infer(own, staged, rows.data(joint.dtype), start=posterior, seed=self.seed, progress=False)
        assert posterior is not None
        return posterior

    def _joint(self, rows: Rows, word: str, notes: list[str]) -> Joint:
        """Return the joint of the given network, or of one that suits the method and the rows."""
        inputs = rows.inputs.shape[1]

        def problem(module: nn.Module) -> Joint:
            prior = Normal() if self.prior is None else self.prior
            return Joint(module, self.likelihood, prior, num_data=len(rows.inputs))

        def joint_with(hidden: tuple[int, ...]) -> Joint:
            sizes = (inputs, *hidden, self.outputs)
            activation, rate = ("relu" if word == "pbp" else "tanh"), (RATE if word == "dropout" else 0.0)
            with seeded(self.seed):
                network = MLP(sizes, activation, dropout=rate)
            return problem(network.to(self.device))

        if self.network is not None:
            return problem(make_module(self.network, inputs, self.outputs, self.seed, self.device))
        if word in LINEAR:
            return joint_with(())
        if word == "dropout":
            return joint_with(HIDDEN)
        hidden, why = sufficient(joint_with, HIDDEN, rows.data(joint_with(()).dtype))
        notes.append(f"Network: {why}")
        return joint_with(hidden)


def make_module(network: Any, inputs: int, outputs: int, seed: int, device: torch.device) -> nn.Module:
    """Return the module, or the module that the function makes, on the device."""
    if isinstance(network, nn.Module):
        return network if all(p.device == device for p in network.parameters()) else copy.deepcopy(network).to(device)
    with seeded(seed):
        module = network(inputs, outputs)
    if not isinstance(module, nn.Module):
        raise TypeError(f"network(inputs, outputs) must return a module. Got {shown(module)}.")
    return module.to(device)
