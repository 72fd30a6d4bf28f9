"""The protocol of a problem, and checks of rows and stored networks against a model."""

import logging
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from posterity.errors import BadData, BadFolder, shown
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.backward import checked_targets
from posterity.model.batch import LABELS, Inputs, named_tensors
from posterity.model.data import Batch, Data, as_data
from posterity.model.module import OutputError, RowsError
from posterity.model.network import Buffers, Network
from posterity.model.side_effects import RandomDraws
from posterity.model.tempering import Tempering
from posterity.numerics.random import Key

if TYPE_CHECKING:
    from posterity.model.joint import Joint

logger = logging.getLogger("posterity")


class Problem(Protocol):
    """A log density of flat theta (P,) or (M, P), in nats: the common interface of `Joint` and `Density`.

    Methods are written against it; a method that needs a prior, a likelihood or layers calls `as_joint`. Cached
    properties of `Joint` are Any here, because type checkers do not match a cached property with a property.
    """

    @property
    def network(self) -> Network | None:
        """The network; None for a `Density`."""
        ...

    @property
    def layout(self) -> Any:
        """The `Layout` of theta: names and shapes."""
        ...

    @property
    def size(self) -> int:
        """Length of theta."""
        ...

    @property
    def num_weights(self) -> int:
        """Length of theta without the likelihood's learnt parameters."""
        ...

    @property
    def num_random(self) -> int:
        """Number R of weights that have a distribution."""
        ...

    @property
    def random(self) -> str | tuple[str, ...] | Tensor:
        """The weights that have a distribution: patterns, or positions in theta."""
        ...

    @property
    def random_indices(self) -> Any:
        """Positions (R,) of the random weights in theta; None where all weights are random."""
        ...

    @property
    def num_data(self) -> int:
        """Number of rows; 1 for a `Density`."""
        ...

    @property
    def num_members(self) -> Any:
        """M where the problem differs by member, else None."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of theta."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of theta."""
        ...

    @property
    def tempering(self) -> Tempering:
        """Powers of likelihood and prior."""
        ...

    @property
    def powers(self) -> Any:
        """(likelihood_power, prior_power), tensors (M,) where they differ by member."""
        ...

    def as_joint(self, user: str, instead: str = "") -> "Joint":
        """The problem itself if it is a `Joint`; else a TypeError that names the user and what to use instead."""
        ...

    def initial(self) -> Tensor:
        """Starting theta (P,)."""
        ...

    def fresh(self, key: Key) -> Tensor:
        """A random starting theta (P,)."""
        ...

    def member(self, index: int) -> "Problem":
        """The problem of one member."""
        ...

    def narrowed(self, places: Tensor) -> "Problem":
        """The problem over the single weights at these positions of theta; itself if there are none."""
        ...

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """theta as (weights (..., P), raw likelihood parameters (..., H)); a `Density` has H = 0."""
        ...

    def fitted(self, theta: Tensor) -> "Problem":
        """The problem with its likelihood fixed at the learnt parameters of theta."""
        ...

    def starting_buffers(self, theta: Tensor) -> Buffers:
        """Copies of the statistics of batch norm, one for each member of theta (M, P); none without a network."""
        ...

    def check_rows(self, data: Data) -> None:
        """BadData unless the network takes such rows and there are as many as the problem says."""
        ...

    def checked(self, data: Data) -> Data:
        """The data, checked against the problem, with targets shaped for the likelihood; BadData if they do not fit."""
        ...

    def log_likelihood(self, theta: Tensor, batch: Batch, buffers: Buffers | None = None) -> Tensor:
        """Untempered log-likelihood of all data, estimated from the batch."""
        ...

    def log_prior(self, theta: Tensor) -> Tensor:
        """Untempered log prior."""
        ...

    def log_density(self, theta: Tensor, batch: Batch, buffers: Buffers | None = None) -> Tensor:
        """Tempered log density, differentiable in theta."""
        ...

    def value_and_grad(
        self,
        theta: Tensor,
        batch: Batch,
        buffers: Buffers | None = None,
        *,
        train: bool = True,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Buffers]:
        """Value, gradient and buffers of the tempered log density; `out` is memory for a part of the gradient."""
        ...

    def data_value_and_grad(
        self, theta: Tensor, batch: Batch, buffers: Buffers | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Buffers]:
        """Value, gradient and buffers of the tempered log-likelihood alone; the gradient is in `out` if given."""
        ...

    def encode(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Describe the problem as JSON and tensors."""
        ...


def data_of(problem: Problem, data: object) -> Data:
    """The data of a problem, whose network names the labels of mappings, and which knows the number of rows."""
    return as_data(data, labels=labels_of(problem), num_data=problem.num_data)


def labels_of(problem: Problem) -> str:
    """The entry of a batch that holds the targets, where it is a mapping."""
    return LABELS if problem.network is None else problem.network.labels


def check_inputs(inputs: Inputs, dtype: torch.dtype, per_member: bool) -> None:
    """Raise BadData unless the inputs are finite and have the model's dtype."""
    for name, tensor in named_tensors(inputs).items():
        if tensor.is_floating_point():
            if tensor.dtype != dtype:
                wanted, got = str(dtype).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")
                raise BadData(
                    f"{name} must have the model's dtype {wanted}. Got {got}. "
                    f"Convert one of them: inputs.to({dtype}) or model.to({tensor.dtype})."
                )
            check_finite(name, tensor, per_member)


def checked_patterns(random: object) -> str | tuple[str, ...]:
    """Return a name pattern, or a non-empty tuple of patterns; raise a ValueError for anything else."""
    if isinstance(random, str):
        return random
    if not isinstance(random, (list, tuple)) or not random or not all(isinstance(pattern, str) for pattern in random):
        raise ValueError(
            f"Joint.random must be patterns such as 'head.*', or places in theta, int64 (R,). Got {shown(random)}."
        )
    return tuple(random)


def example_output(network: Network, batch: Batch) -> Tensor:
    """Outputs (1, *event) of the batch's first row; raises BadData where the model does not accept it."""
    network = network.member(0)
    axis, count = 1 if batch.per_member else 0, min(batch.size, 2)
    few = batch.map(lambda tensor: tensor.narrow(axis, 0, count).to(network.device)).member(0)
    check_inputs(few.inputs, network.dtype, per_member=False)
    try:
        with torch.no_grad(), network.without_dropout(few.inputs):
            outputs = network.outputs(network.initial, few.inputs)
    except (OutputError, RandomDraws, RowsError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        kinds = (f"{name} {tuple(t.shape)} of {t.dtype}" for name, t in named_tensors(batch.inputs).items())
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise BadData(
            f"The model does not accept these inputs ({', '.join(kinds)}): {reason}. "
            "Pass inputs of the shape and dtype the model was made for."
        ) from error
    return outputs[:1]


def check_finite(name: str, tensor: Tensor, per_member: bool, *, may_miss: bool = False) -> None:
    """Raise BadData that names the first row with NaN (unless values `may_miss`) or infinity."""
    # A sum is thirty times as fast as a test of every entry, which follows only where the sum is not finite.
    if bool(torch.isfinite(tensor.sum())):
        return
    bad = torch.isinf(tensor) if may_miss else ~torch.isfinite(tensor)
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        where = f"row {first[1]} of member {first[0]}" if per_member else f"row {first[0]}"
        raise BadData(
            f"{name} must be finite{', or NaN where missing' if may_miss else ''}. Got {int(bad.sum())} "
            f"{'' if may_miss else 'NaN or '}infinite values, the first in {where}. Remove or fill those rows."
        )


def prepared(likelihood: Likelihood, batch: Batch, example: Tensor, dtype: torch.dtype) -> Batch:
    """The batch with targets shaped for the likelihood, given an output row (1, *event); raises BadData for bad rows.

    Weights of single entries come out as weights of rows where a row has one entry.
    """
    check_inputs(batch.inputs, dtype, batch.per_member)
    known = likelihood.observed(batch.targets)
    if batch.targets.is_floating_point():
        check_finite("targets", batch.targets, batch.per_member, may_miss=known is not None)
    targets = checked_targets(likelihood, example.expand(batch.size, *example.shape[1:]), batch)
    observed = likelihood.observed(targets)
    weights = None if batch.weights is None else batch.weights.to(dtype)
    rows = targets.shape[: batch.rows_axis + 1]
    if weights is not None and weights.shape != rows:
        if known is None:
            raise BadData(
                f"weights must be one for each row: {type(likelihood).__name__} has no log density for each entry of "
                f"a target. Got weights {tuple(weights.shape)}. Give weights {tuple(rows)}."
            )
        weights = weights.reshape(rows if weights.numel() == prod(rows) else targets.shape)
    complete = observed is None or bool(observed.all())
    return batch._replace(targets=targets, weights=weights, checked=True, complete=complete)


def say_missing(likelihood: Likelihood, batch: Batch, whole: bool) -> None:
    """Log how many targets of a checked batch are missing; raise BadData where the `whole` data have none."""
    observed = None if batch.complete else likelihood.observed(batch.targets)
    if observed is None:
        return
    count, missing = observed.numel(), int((~observed).sum())
    if whole and missing == count:
        raise BadData(
            f"The data must have at least one target. Got {count:,} that are all missing (NaN, or label -100)."
        )
    logger.info("%d of %d targets%s are missing and left out", missing, count, "" if whole else " of the first batch")


def say_copied(likelihood: Likelihood, batch: Batch) -> None:
    """Warn where the labels of a checked batch are its tokens: a model of the next token would learn to copy."""
    labels = batch.targets
    if labels.is_floating_point() or labels.dim() < batch.rows_axis + 2:
        return
    observed = likelihood.observed(labels)
    for name, tokens in named_tensors(batch.inputs).items():
        if tokens.shape == labels.shape and not tokens.is_floating_point():
            same = tokens == labels
            if bool(same.all() if observed is None else (same | ~observed).all()):
                logger.warning(
                    "the labels are equal to %s at every position. A model of the next token needs the token that "
                    "follows: shift labels to the left, with -100 at the end",
                    name,
                )


def like_saved(network: Network, config: dict[str, Any], tensors: dict[str, Tensor]) -> Network:
    """The network with the saved choice of weights; raises BadFolder for another model than the saved one."""
    remedy = "Pass the network this folder was fitted with."
    wanted = dict([*config["weights"], *config["frozen"]])
    here = {part.name: list(part.shape) for part in network.layout}
    here.update({name: list(value.shape) for name, value in network.frozen.items()})
    for name in sorted(wanted.keys() | here.keys()):
        if wanted.get(name) != here.get(name):
            was, is_ = (f"shape {tuple(t[name])}" if name in t else "absent" for t in (wanted, here))
            raise BadFolder(
                f"The folder belongs to another network: '{name}' was saved with {was} and here is {is_}. {remedy}"
            )
    if config["dtype"] != str(network.dtype):
        raise BadFolder(
            f"The folder was saved from a {config['dtype']} model and this one is {network.dtype}. "
            f"Convert it with model.to({config['dtype']})."
        )
    for saved, line in zip_longest(config["module"], network.description.splitlines(), fillvalue="nothing"):
        if saved != line:
            raise BadFolder(
                f"The folder belongs to another network: it was saved with '{saved.strip()}' where this one has "
                f"'{line.strip()}'. {remedy}"
            )
    adapted = network.adapter is not None
    if config.get("adapted", False) != adapted:
        was, is_ = ("without", "with") if adapted else ("with", "without")
        raise BadFolder(
            f"The folder was saved from a network {was} an adapter, Network(module, outputs=...), and this one is "
            f"{is_} one. {remedy}"
        )
    buffers = {name.removeprefix("joint.buffer.") for name in tensors if name.startswith("joint.buffer.")}
    for name in sorted(buffers ^ network.buffers.keys()):
        where = "only in the folder" if name in buffers else "only here"
        raise BadFolder(f"The folder belongs to another network: the buffer '{name}' is {where}. {remedy}")
    chosen = [name for name, _ in config["weights"]]
    for name in chosen:
        if name in network.frozen:
            raise BadFolder(f"'{name}' has a posterior in this folder but requires_grad=False here. {remedy}")
    network = network.with_weights(*chosen)
    if list(network.layout.names) != chosen:
        raise BadFolder(f"The folder belongs to another network: its weights come in another order. {remedy}")
    return network
