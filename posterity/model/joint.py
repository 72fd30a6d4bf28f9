"""The problem: network, likelihood, prior, number of data and tempering as one log density."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from posterity.errors import BadData, positive_whole, shown, unknown
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.backward import LeavesCache, batch_log_likelihood, batch_total, write_gradients
from posterity.model.batch import Inputs, named_tensors
from posterity.model.data import Batch, Data, OwnOrders, Reordered, StreamData, TensorData
from posterity.model.data_term import add_data_grad
from posterity.model.network import Buffers, Network
from posterity.model.problem import (
    check_inputs,
    checked_patterns,
    example_output,
    like_saved,
    prepared,
    say_copied,
    say_missing,
)
from posterity.model.tempering import Tempering
from posterity.numerics.layout import Layout, Slice
from posterity.numerics.random import Key
from posterity.priors.prior import Prior
from posterity.storage import decode, described, encode, recalled

_BAYES = Tempering.bayes()


@dataclass(frozen=True, eq=False)
class Joint:
    """The tempered log density of all data and weights, in nats, as a function of flat theta.

    **Math**: log_density(theta) = likelihood_power * sum_n w_n log p(y_n | f_theta(x_n)) + prior_power * log p(theta).
    On a batch B the sum over data is estimated by (num_data / |B|) sum_{n in B}; nothing else is scaled. `num_data`
    and |B| count rows, not tokens or pixels, whatever is missing in them: log p of a row sums what is observed (no
    label -100, no NaN), and is 0 where nothing is.
    theta is the network's weights (P,), followed by the likelihood's learnt raw parameters if it has any; a
    leading member axis (M, P) gives M densities at once.

    **Limit**: exact on the full data; on batches an unbiased estimate of the value and of its gradient. Batch
    norm in training mode makes the likelihood of a row depend on its batch.

    **Cost**: `value_and_grad` is one forward and one backward pass.

    **References**: theory of mini-batch scaling: Graves (2011), Practical variational inference, eq. 1-8.

    **Example**:

    >>> from posterity.likelihoods import Gaussian
    >>> from posterity.priors import Normal
    >>> joint = Joint(nn.Linear(1, 1, bias=False), Gaussian(scale=1.0), Normal(scale=1.0), num_data=2)
    >>> batch = Batch(torch.ones(1, 1), torch.ones(1, 1))
    >>> value, grad, _ = joint.value_and_grad(torch.zeros(1), batch)
    >>> round(float(value), 4), float(grad)  # twice the row's log-likelihood, plus the prior
    (-3.7568, 2.0)
    """

    network: Network
    likelihood: Likelihood
    prior: Prior
    num_data: int
    tempering: Tempering = _BAYES
    random: str | tuple[str, ...] | Tensor = "*"

    if TYPE_CHECKING:  # a module becomes a Network

        def __init__(
            self,
            network: Network | nn.Module,
            likelihood: Likelihood,
            prior: Prior,
            num_data: int,
            tempering: Tempering = _BAYES,
            random: str | tuple[str, ...] | Tensor = "*",
        ) -> None:
            """Take a module or a `Network`."""

    def __post_init__(self) -> None:
        given: Any = self.network
        if not isinstance(given, Network):
            object.__setattr__(self, "network", Network(given))
        for name, kind in (("likelihood", Likelihood), ("prior", Prior), ("tempering", Tempering)):
            if not isinstance(getattr(self, name), kind):
                got = getattr(self, name)
                hint = f" Call it: {got.__name__}()." if isinstance(got, type) else ""
                raise TypeError(f"Joint.{name} must be a {kind.__name__}. Got {got!r}.{hint}")
        positive_whole("Joint.num_data", self.num_data, "of rows")
        object.__setattr__(self, "num_data", int(self.num_data))
        if not isinstance(self.random, Tensor):
            object.__setattr__(self, "random", checked_patterns(self.random))
        self.random_slices  # noqa: B018  refuse unknown patterns and positions now
        self.bound_prior  # noqa: B018  refuse a prior that does not fit the weights now, not in the first step
        self.num_members  # noqa: B018  refuse unequal member counts now

    @cached_property
    def bound_prior(self) -> Prior:
        """The prior resolved for the network's named weights."""
        return self.prior.bound(self.network.layout)

    @cached_property
    def layout(self) -> Layout:
        """Names and shapes of theta: the weights, then the likelihood's learnt raw parameters."""
        shapes: dict[str, tuple[int, ...]] = {part.name: part.shape for part in self.network.layout}
        shapes.update({f"likelihood.{name}": shape for name, shape in self.likelihood.free_names().items()})
        return Layout.of(shapes)

    @property
    def num_weights(self) -> int:
        """Number P of network weights."""
        return self.network.layout.size

    @property
    def num_random(self) -> int:
        """Number R of weights that have a distribution."""
        return self.num_weights if self.random_indices is None else self.random_indices.numel()

    @property
    def size(self) -> int:
        """Length of theta: the weights and the likelihood's learnt parameters."""
        return self.num_weights + self.likelihood.num_free

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of theta."""
        return self.network.dtype

    @property
    def device(self) -> torch.device:
        """Device of theta."""
        return self.network.device

    @cached_property
    def num_members(self) -> int | None:
        """M when tempering, prior or likelihood differ by member, else None."""
        parts = (self.tempering, self.bound_prior, self.likelihood)
        counts = {part.num_members for part in parts if part.num_members is not None}
        if len(counts) > 1:
            raise ValueError(
                f"Joint: tempering, prior and likelihood must agree on the number of members. Got {sorted(counts)}."
            )
        return counts.pop() if counts else None

    def with_members(self, count: int) -> "Joint":
        """The joint of so many members that are alike; itself if it has members."""
        if self.num_members is not None:
            return self
        power = torch.full((count,), float(self.tempering.likelihood_power), dtype=torch.float64)
        return dataclasses.replace(self, tempering=dataclasses.replace(self.tempering, likelihood_power=power))

    @cached_property
    def random_slices(self) -> tuple[Slice, ...]:
        """The slices of theta that contain random weights, in order."""
        if isinstance(self.random, Tensor):
            index = self.random
            if index.dim() != 1 or index.dtype != torch.int64 or not index.numel():
                raise ValueError(f"Joint.random must be patterns or places in theta, int64 (R,). Got {shown(index)}.")
            if int(index[0]) < 0 or int(index[-1]) >= self.num_weights or not bool((index.diff() > 0).all()):
                raise ValueError(
                    f"Joint.random: places must rise within 0..{self.num_weights - 1}. Got {shown(index)}."
                )
            offsets = torch.tensor([part.offset for part in self.network.layout], device=index.device)
            touched = set((torch.searchsorted(offsets, index, right=True) - 1).tolist())
            return tuple(part for number, part in enumerate(self.network.layout) if number in touched)
        names: set[str] = set()
        for pattern in (self.random,) if isinstance(self.random, str) else self.random:
            matching = {part.name for part in self.network.matching(pattern)}
            if not matching:
                raise ValueError(f"Joint.random: {unknown('parameter', pattern, self.network.layout.names)}")
            names |= matching
        return tuple(part for part in self.network.layout if part.name in names)

    @cached_property
    def random_indices(self) -> Tensor | None:
        """Positions (R,) of the random weights in theta; None where all network weights are random."""
        if isinstance(self.random, Tensor):
            return self.random.to(self.device)
        parts = self.random_slices
        if len(parts) == len(self.network.layout.slices):
            return None
        return torch.cat([torch.arange(p.offset, p.offset + p.size) for p in parts]).to(self.device)

    def as_joint(self, user: str, instead: str = "") -> "Joint":
        """Itself; see `Density.as_joint`."""
        return self

    def member(self, index: int) -> "Joint":
        """The joint of one member, made once."""
        if index not in self._members:
            self._members[index] = dataclasses.replace(
                self,
                network=self.network.member(index),
                likelihood=self.likelihood.member(index),
                prior=self.prior.member(index),
                tempering=self.tempering.member(index),
            )
        return self._members[index]

    @cached_property
    def _members(self) -> dict[int, "Joint"]:
        return {}

    def with_weights(self, *patterns: str, random: str | tuple[str, ...] | None = None) -> "Joint":
        """The joint over part of the weights.

        Weights that match a pattern stay in theta; the rest is frozen. Those that match `random` have a distribution;
        the others are trained as points under their prior.
        """
        network = self.network.with_weights(*patterns) if patterns else self.network
        return dataclasses.replace(self, network=network, random=self.random if random is None else random)

    def narrowed(self, places: Tensor) -> "Joint":
        """The joint over the single weights at these positions of theta; itself if there are none."""
        return dataclasses.replace(self, random=places) if places.numel() else self

    def with_buffers(self, buffers: Buffers) -> "Joint":
        """The joint whose network has these batch-norm statistics; itself if there are none."""
        return dataclasses.replace(self, network=self.network.replace(buffers=buffers)) if buffers else self

    def starting_buffers(self, theta: Tensor) -> Buffers:
        """Copies of the running statistics of batch norm, one for each member of theta (M, P)."""
        plain = self.network.member(0).buffers
        return {
            name: (b if b.dim() > plain[name].dim() else b.expand((*theta.shape[:-1], *b.shape))).clone()
            for name, b in self.network.buffers.items()
            if name in self.network.running
        }

    def initial(self) -> Tensor:
        """Starting theta: the module's own weights and the likelihood's starting parameters."""
        return torch.cat([self.network.initial, self.likelihood.free(self.network.initial)])

    def fresh(self, key: Key) -> Tensor:
        """Newly initialised weights (see `Network.fresh`) and the likelihood's starting parameters, as theta (P,)."""
        return torch.cat([self.network.fresh(key), self.likelihood.free(self.network.initial)])

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """theta as (weights (..., P), raw likelihood parameters (..., H))."""
        return theta[..., : self.num_weights], theta[..., self.num_weights :]

    def fitted(self, theta: Tensor) -> "Joint":
        """The joint whose likelihood is fixed at the learnt parameters of theta."""
        if not self.likelihood.num_free:
            return self
        return dataclasses.replace(self, likelihood=self.likelihood.fixed(self.split(theta)[1].detach()))

    def outputs(self, theta: Tensor, inputs: Inputs, buffers: Buffers | None = None) -> Tensor:
        """Network outputs in evaluation mode, (N, *event) or (M, N, *event)."""
        return self.network.outputs(theta[..., : self.num_weights], inputs, buffers)

    def log_likelihood(self, theta: Tensor, batch: Batch, buffers: Buffers | None = None) -> Tensor:
        """sum_n w_n log p(y_n | f(x_n)) over all data, estimated from the batch; untempered."""
        weights, raw = self.split(theta)
        outputs = self.network.outputs(weights, batch.inputs, buffers, per_member=batch.per_member)
        return batch_log_likelihood(self.likelihood, raw, outputs, batch) * (self.num_data / batch.size)

    def log_prior(self, theta: Tensor) -> Tensor:
        """log p(theta), untempered, with the declared prior of the likelihood's parameters."""
        weights, raw = self.split(theta)
        return self.bound_prior.log_prob(weights) + self.likelihood.free_log_prior(raw)

    def log_density(self, theta: Tensor, batch: Batch, buffers: Buffers | None = None) -> Tensor:
        """The tempered log density, differentiable in theta: (P,) -> (), (M, P) -> (M,)."""
        likelihood_power, prior_power = self.powers
        return likelihood_power * self.log_likelihood(theta, batch, buffers) + prior_power * self.log_prior(theta)

    @cached_property
    def powers(self) -> tuple[float | Tensor, float | Tensor]:
        """(likelihood_power, prior_power), in theta's dtype where they differ by member, (M,)."""
        powers = self.tempering.likelihood_power, self.tempering.prior_power
        likelihood, prior = (p.to(self.network.initial) if isinstance(p, Tensor) else p for p in powers)
        return likelihood, prior

    def value_and_grad(
        self,
        theta: Tensor,
        batch: Batch,
        buffers: Buffers | None = None,
        *,
        train: bool = True,
        smooth: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Buffers]:
        """Value, gradient and buffers of the log density at theta, batch norm in training mode: the hot path.

        The prior's gradient (`smooth`: without kinks) is written first; backward adds the data's to it, through views.
        Steps that keep theta at one address give `out`, memory for the data's part: the views are then made once.
        """
        weights, raw = self.split(theta.detach())
        value, grad = self._prior_value_and_grad(weights, raw, smooth)
        prior_power = self.powers[1]
        if isinstance(prior_power, Tensor):
            value, grad = prior_power * value, grad.mul_(prior_power.unsqueeze(-1))
        elif prior_power != 1.0:
            value, grad = prior_power * value, grad.mul_(prior_power)
        if theta.dim() == 1 and out is not None and self.network.passes.micro_batch is None and not self._shared:
            data_value, buffers = self._write_data_grad(theta, batch, buffers, out, train)
            grad.add_(out)
        else:
            data_value, buffers = add_data_grad(self, theta, batch, buffers, grad, train)
        return value + data_value, grad, buffers

    def data_value_and_grad(
        self, theta: Tensor, batch: Batch, buffers: Buffers | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Buffers]:
        """As `value_and_grad`, for likelihood_power * log p(D | theta) alone, with the gradient in `out` if given."""
        grad = torch.empty_like(theta, memory_format=torch.contiguous_format) if out is None else out
        if theta.dim() == 1 and out is not None and not self._shared:
            value, buffers = self._write_data_grad(theta, batch, buffers, grad, True)
        else:
            value, buffers = add_data_grad(self, theta, batch, buffers, grad.zero_(), True)
        return value, grad, buffers

    @cached_property
    def alone(self) -> "Joint":
        """The joint whose passes are shared with no other process."""
        passes = dataclasses.replace(self.network.passes, processes=None)
        return dataclasses.replace(self, network=self.network.replace(passes=passes))

    @cached_property
    def _leaves(self) -> LeavesCache:
        return LeavesCache()

    @property
    def _shared(self) -> bool:
        return self.network.sharing is not None

    def _write_data_grad(
        self, theta: Tensor, batch: Batch, buffers: Buffers | None, out: Tensor, train: bool
    ) -> tuple[Tensor, Buffers]:
        """As `add_data_grad` for one theta, in place of what `out` holds."""
        leaves, factor = self._leaves.at(self.network, theta, out), self.powers[0] * (self.num_data / batch.size)
        return write_gradients(self.network, self.likelihood, leaves, out, batch, buffers, factor, train)

    def data_value(
        self, weights: Sequence[Tensor], raw: Tensor, batch: Batch, buffers: Buffers | None, *, members: bool = False
    ) -> tuple[Tensor, Buffers]:
        """The tempered log-likelihood with its graph, from a tensor for each parameter, with batch norm training."""
        run = partial(batch_total, self.network, self.likelihood, weights, raw, members=members, train=True)
        with torch.enable_grad():
            total, after = self.network.passes.over(batch, lambda rows: run(rows, buffers))
            return total * (self.powers[0] * (self.num_data / batch.size)), after

    def _prior_value_and_grad(self, weights: Tensor, raw: Tensor, smooth: bool) -> tuple[Tensor, Tensor]:
        """Untempered log prior and its gradient, a new contiguous tensor."""
        prior = self.bound_prior
        value, grad = prior.smooth_value_and_grad(weights) if smooth else prior.value_and_grad(weights)
        if not raw.shape[-1]:
            return value, grad.contiguous()
        extra, raw_grad = self.likelihood.free_value_and_grad(raw)
        return value + extra, torch.cat([grad, raw_grad], dim=-1)

    def check_inputs(self, inputs: Inputs, *, per_member: bool = False) -> None:
        """Raise BadData unless the inputs are finite and have the model's dtype."""
        check_inputs(inputs, self.dtype, per_member)

    def example_output(self, batch: Batch) -> Tensor:
        """Outputs (1, *event) of the batch's first row; raises BadData where the model does not accept it."""
        return example_output(self.network, batch)

    def check(self, batch: Batch) -> Batch:
        """The batch with targets shaped for the likelihood; raises BadData where it does not fit the model."""
        return self.preparing()(batch)

    def preparing(self) -> Callable[[Batch], Batch]:
        """`check` for many batches, whose inputs may differ in shape: the network is asked once for each shape."""
        likelihood = self.likelihood.fixed(self.likelihood.free(self.network.initial)).member(0)
        examples: dict[object, Tensor] = {}

        def prepare(batch: Batch) -> Batch:
            shapes = tuple(tensor.shape[batch.rows_axis + 1 :] for tensor in named_tensors(batch.inputs).values())
            if shapes not in examples:
                examples[shapes] = self.example_output(batch)
            return prepared(likelihood, batch, examples[shapes], self.dtype)

        return prepare

    def check_rows(self, data: Data) -> None:
        """Raise BadData unless the network takes such rows and there are `num_data` of them."""
        self._check_number(data)
        self.example_output(data.first())

    def _check_number(self, data: Data) -> None:
        if data.num_data != self.num_data:
            raise BadData(
                f"Joint.num_data is {self.num_data} but the data have {data.num_data} rows, so the likelihood would be "
                f"scaled wrongly. Make the Joint with num_data={data.num_data}."
            )

    def checked(self, data: Data) -> Data:
        """The data with targets shaped for the likelihood; raises BadData where they do not fit the model."""
        batch = self.check(data.first())
        say_missing(self.likelihood, batch, isinstance(data, TensorData))
        say_copied(self.likelihood, batch)
        self._check_number(data)
        if isinstance(data, TensorData):
            return dataclasses.replace(data, rows=batch)
        if isinstance(data, (OwnOrders, Reordered)):
            return dataclasses.replace(data, data=dataclasses.replace(data.data, rows=batch))
        assert isinstance(data, StreamData)
        return data.prepared(self.preparing())

    def encode(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Everything but the module's code, as JSON and tensors."""
        for kind, table in (("frozen", self.network.frozen), ("buffer", self.network.buffers)):
            tensors.update({f"joint.{kind}.{name}": value for name, value in table.items()})
        return {
            "likelihood": described(self.likelihood, tensors, "joint.likelihood"),
            "prior": described(self.prior, tensors, "joint.prior"),
            "tempering": encode(self.tempering, tensors, "joint.tempering"),
            "num_data": self.num_data,
            "random": encode(self.random, tensors, "joint.random"),
            "dtype": str(self.dtype),
            "weights": [[part.name, list(part.shape)] for part in self.network.layout],
            "frozen": [[name, list(value.shape)] for name, value in self.network.frozen.items()],
            "module": self.network.description.splitlines(),
            **({} if self.network.adapter is None else {"adapted": True}),
        }

    @classmethod
    def decode(cls, network: Network, config: dict[str, Any], tensors: dict[str, Tensor], **given: Any) -> "Joint":
        """The joint that `encode` described, with the architecture of `network`, and what is `given` (`recalled`)."""
        network = like_saved(network, config, tensors)
        tensors = {name: tensor.to(network.device) for name, tensor in tensors.items() if name.startswith("joint.")}
        frozen = {name: tensors[f"joint.frozen.{name}"] for name in network.frozen}
        buffers = {name: tensors[f"joint.buffer.{name}"] for name in network.buffers}
        return cls(
            network.replace(frozen=frozen, buffers=buffers),
            cast(Likelihood, recalled("likelihood", config, tensors, given)),
            cast(Prior, recalled("prior", config, tensors, given)),
            config["num_data"],
            cast(Tempering, decode(config["tempering"], tensors)),
            cast(Any, decode(config["random"], tensors)),
        )
