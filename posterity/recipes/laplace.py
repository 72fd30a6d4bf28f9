"""The Laplace approximation of a trained network in one line."""

import os
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar, cast

from torch import nn

from posterity.curvature import Curvature, Diagonal, Full, GaussNewton, Kronecker, LowRank, Structure
from posterity.errors import BadData, unknown
from posterity.evidence import Tuning
from posterity.inference import Checkpoint, infer
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from posterity.methods import AllWeights, KnownCurvature, Laplace, LastLayer, Subset
from posterity.model import Data, Joint, Network, as_data
from posterity.model.problem import example_output
from posterity.posteriors import Posterior
from posterity.priors import Normal, Prior

Task: TypeAlias = Literal["classification", "regression"]
_STRUCTURES: Mapping[str, type[Structure]] = {"full": Full, "kron": Kronecker, "diag": Diagonal, "lowrank": LowRank}
_SUBSETS: Mapping[str, type[Subset]] = {"all": AllWeights, "last_layer": LastLayer}

T = TypeVar("T")


def laplace(
    module: nn.Module | Network,
    data: object,
    likelihood: Likelihood | Task,
    *,
    structure: Structure | Literal["full", "kron", "diag", "lowrank"] | None = None,
    subset: Subset | Literal["all", "last_layer"] | None = None,
    prior: Prior | None = None,
    num_data: int | None = None,
    curvature: Curvature | None = None,
    tuning: Tuning | Literal["auto"] | None = "auto",
    batch_size: int | None = 1024,
    validation: object = None,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Posterior:
    """Return the Laplace approximation at the weights of a trained module, from one pass over its training rows.

    It is `infer(Laplace(structure, subset, ...), Joint(module, likelihood, prior, num_data), data)`, bit for bit
    on a CPU.

    - `module`: the trained network; `Network(module, outputs=...)` where its output needs a word.
    - `data`: the training rows, each once, without augmentation: a loader, a `Dataset` or (inputs, targets).
    - `likelihood`: a likelihood, or a word. "classification" is `Categorical` for logits (N, C), labels at positions
      included, and `Bernoulli` where there is a logit for each 0/1 target. "regression" is `Gaussian`, whose noise is
      chosen by the rows.
    - `structure`, `subset`: as in `methods.Laplace`, or laplace-torch's words, such as "kron" and "last_layer". None:
      the whole matrix of all weights up to 3,000 of them, Kronecker factors beyond.
    - `prior`: None is `Normal()`, whose scale is chosen by how the posterior predicts (on `validation` rows, or by
      leave-one-out); `Normal(scale)` is known, with weight decay 1 / (scale^2 num_data) on the mean loss.
    - `num_data`: the number of rows; None: as the data say.

    >>> import torch, posterity as po
    >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    >>> rows = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    >>> loader = torch.utils.data.DataLoader(rows, batch_size=20)
    >>> prior = po.priors.Normal(1.0)
    >>> q = po.laplace(net, loader, "classification", subset="last_layer", structure="kron", prior=prior)
    >>> q.predict(x).probs.shape
    torch.Size([60, 2])
    """
    method = Laplace(
        GaussNewton() if curvature is None else curvature,
        _by_word("structure", structure, _STRUCTURES),
        _by_word("subset", subset, _SUBSETS) or KnownCurvature(),
        tuning,
        batch_size,
    )
    network = module if isinstance(module, Network) else Network(module)
    rows = as_data(data, labels=network.labels, num_data=num_data)
    noise = likelihood if isinstance(likelihood, Likelihood) else _likelihood_of(likelihood, network, rows)
    joint = Joint(network, noise, prior or Normal(), rows.num_data if num_data is None else num_data)
    posterior, _ = infer(
        method, joint, rows, validation=validation, seed=seed, checkpoint=checkpoint, progress=progress
    )
    return posterior


def _by_word(name: str, given: Any, words: Mapping[str, type[T]]) -> T | None:
    """Return the value that a word names; other values unchanged, since `methods.Laplace` checks them."""
    if not isinstance(given, str):
        return cast("T | None", given)
    if given not in words:
        raise ValueError(f"laplace: {unknown(name, given, words)}")
    return words[given]()


def _likelihood_of(task: Any, network: Network, data: Data) -> Likelihood:
    """Return the likelihood of a task, by the shapes of outputs and targets."""
    if task == "regression":
        return Gaussian()
    if task != "classification":
        hint = unknown("task", task, ("classification", "regression")) if isinstance(task, str) else ""
        raise ValueError(
            f"laplace: likelihood must be a Likelihood, 'classification' or 'regression'. Got {task!r}. {hint}"
        )
    batch = data.first().member(0)
    outputs, targets = example_output(network, batch), batch.targets
    if outputs.shape[1:] == targets.shape[1:] or outputs.shape[1:] == (1,):
        one_hot = outputs.dim() > 1 and outputs.shape[1] > 1 and bool((targets.sum(1) == 1).all())
        if one_hot:
            raise BadData(
                "laplace: targets with a single 1 in each row may be one class of several, or labels of their own. "
                "Give classes as y.argmax(1), or likelihood=Bernoulli() for labels."
            )
        return Bernoulli()
    return Categorical(positions=max(0, outputs.dim() - 2))
