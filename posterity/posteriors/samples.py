"""Draws of chains as a posterior; log-likelihoods of rows at draws; export to ArviZ."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from posterity.errors import BadData, PosterityError, positive_whole
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Inputs, num_rows
from posterity.model.data import Batch, Data, TensorData, as_data
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.posteriors.point import Point
from posterity.posteriors.posterior import Posterior, WeightPart

ROWS = 1024  # of data at a time: bounds the memory
TOGETHER = 1 << 14  # rows times draws that go through the network in one call

Blocks = Callable[[int], Iterable[tuple[Tensor, Buffers]]]  # draws (s, P) with their buffers, at most so many at a time


def batches(data: Data) -> Iterator[Batch]:
    """All rows once, some at a time."""
    for batch in data.passes(ROWS).from_step(0):
        assert isinstance(batch, Batch)
        yield batch


def pointwise_log_likelihoods(joint: Problem, blocks: Blocks, data: object) -> Tensor:
    """w_n log p(y_n | f(x_n)) of each row at each draw, untempered: (S, N) in float64 on the CPU."""
    rows = joint.checked(as_data(data).to(joint.device))
    with torch.no_grad():
        if isinstance(joint, Density):
            return torch.cat([joint.log_likelihoods(theta).double().cpu() for theta, _ in blocks(ROWS)])
        if isinstance(rows, TensorData) and rows.rows.per_member:
            raise BadData("log_likelihoods: pass the rows of one problem, and take its chain: q.chain(0).")
        parts, problem = [], joint.as_joint("log_likelihoods")
        for batch in batches(rows):
            step = max(1, TOGETHER // batch.size)
            parts.append(torch.cat([_at(problem, theta, batch, buffers).cpu() for theta, buffers in blocks(step)]))
        return torch.cat(parts, dim=1)


def outputs_at(joint: Joint, theta: Tensor, inputs: Inputs, buffers: Buffers) -> Tensor:
    """Network outputs (s, n, *event) at draws (s, P); a single one goes the way of one theta, which is quicker."""
    if len(theta) > 1:
        return joint.outputs(theta, inputs, buffers or None)
    own = {name: buffer[0] for name, buffer in buffers.items()}
    return joint.outputs(theta[0], inputs, own or None).unsqueeze(0)


def _at(joint: Joint, theta: Tensor, batch: Batch, buffers: Buffers) -> Tensor:
    """(s, n) in float64."""
    outputs = outputs_at(joint, theta, batch.inputs, buffers).double()
    likelihood = joint.likelihood.with_free(joint.split(theta)[1].double())
    each = likelihood.log_prob(outputs, batch.targets)
    return each if batch.weights is None else each * batch.weights


# What ArviZ calls the statistics that samplers keep; others go by their own names.
NAMES = {
    "log_density": "lp",
    "divergent": "diverging",
    "accept": "acceptance_rate",
    "leapfrogs": "n_steps",
    "depth": "tree_depth",
    "cut_off": "reached_max_treedepth",
}


def inference_data(values: dict[str, Tensor], statistics: dict[str, Tensor], log_likelihood: Tensor | None) -> Any:
    """An `arviz.InferenceData`, of ArviZ 1 a `DataTree`, from tensors that begin with axes of chains and draws.

    Its groups are `posterior`, `sample_stats` and, where it is given, `log_likelihood` with the variable "y".
    """
    try:
        import arviz
    except ImportError as error:
        raise PosterityError(
            "to_inference_data needs ArviZ. Install it with: pip install 'posterity[arviz]'."
        ) from error
    groups: dict[str, Any] = {"posterior": {name: _array(value) for name, value in values.items()}}
    if statistics:
        groups["sample_stats"] = {NAMES.get(name, name): _array(value) for name, value in statistics.items()}
    if log_likelihood is not None:
        groups["log_likelihood"] = {"y": _array(log_likelihood)}
    if int(arviz.__version__.partition(".")[0]) >= 1:
        return arviz.from_dict(groups)
    return arviz.from_dict(**groups)


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # numpy has no bfloat16


CUT_OFF = "cut_off"  # the statistic that marks trajectories which reached the sampler's limit
LARGE = 1 << 24  # numbers in the draws that are moved to the device at a time


@dataclass(frozen=True, eq=False)
class Samples(Posterior):
    """The draws of C Markov chains with D draws each, theta (C, D, P), all of equal weight.

    theta is what the sampler walked in: the network's weights, behind them the raw parameters that the likelihood
    learns (the log of its noise), or the unconstrained space of a `Density`. `statistics` are numbers of each draw,
    (C, D): "log_density", "energy", "divergent" and what else the sampler tells. `buffers` are those of each draw,
    (C, D, *shape), or none. All of it lies on the CPU, some of it perhaps on a disk; what is used moves to the
    model's device.

    **Math**: q = (1 / C D) sum_cd delta(theta - theta_cd). The predictive is the mean over draws of p(y | f_s(x)),
    each with its own observation noise where that was sampled, too.

    **Limit**: as good as the chains: look at their diagnostics before anything else. Draws of one chain are
    correlated; predictions take `draws` of them, spread evenly over chains and iterations.

    **Cost**: one forward pass for each draw, several at once for small networks; C D P numbers to keep.

    **References**: Robert and Casella (2004), Monte Carlo statistical methods, chapter 7.

    **Example**:

    >>> from posterity.likelihoods import Gaussian
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Gaussian(scale=1.0), Normal(), num_data=1)
    >>> q = Samples(joint, torch.tensor([[[-2.0], [2.0]]]))
    >>> q.num_chains, q.num_draws
    (1, 2)
    >>> pred = q.predict(torch.ones(1, 1))
    >>> pred.mean.item(), pred.aleatoric.item(), pred.epistemic.item()
    (0.0, 1.0, 4.0)
    """

    joint: Problem
    theta: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)
    buffers: Buffers = field(default_factory=dict)

    on_cpu: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shape, size = tuple(self.theta.shape), self.joint.size
        if len(shape) != 3 or not shape[0] * shape[1] or shape[2] != size:
            raise ValueError(f"Samples.theta must be (chains, draws, {size}), none of them 0. Got {shape}.")
        for name, table in (("statistics", self.statistics), ("buffers", self.buffers)):
            for key, value in table.items():
                if value.shape[:2] != shape[:2] or (name == "statistics" and value.dim() > 2):
                    raise ValueError(
                        f"Samples.{name}[{key!r}] must have one entry for each of {shape[:2]} chains and draws. "
                        f"Got {tuple(value.shape)}."
                    )
            object.__setattr__(self, name, {key: value.detach().cpu() for key, value in table.items()})
        object.__setattr__(self, "theta", self.theta.detach().cpu())
        if self.num_members not in (None, shape[0]):
            raise ValueError(
                f"Samples.theta must have a chain for each of the {self.num_members} problems of the joint. "
                f"Got {shape[0]}."
            )

    def __repr__(self) -> str:
        return f"Samples({self.num_chains} chains of {self.num_draws:,} draws of {self.theta.shape[2]:,} numbers)"

    @property
    def num_chains(self) -> int:
        """C."""
        return self.theta.shape[0]

    @property
    def num_draws(self) -> int:
        """D, the draws of each chain."""
        return self.theta.shape[1]

    @property
    def num_members(self) -> int | None:
        """C where each chain is that of another problem, as the joint's member axis says."""
        count: int | None = self.joint.num_members
        return count

    def member(self, index: int) -> "Samples":
        return self if self.num_members is None else self.chain(index)

    def chain(self, index: int) -> "Samples":
        """One chain, as samples of 1 chain."""
        joint = self.joint if self.num_members is None else self.joint.member(index)
        return self._cut(joint, lambda tensor: tensor[index].unsqueeze(0))

    def thinned(self, every: int) -> "Samples":
        """Every `every`-th draw: what the same run with `thin` as many times larger would have kept."""
        positive_whole("thinned: every", every)
        if every > self.num_draws:
            raise ValueError(f"thinned: every must be at most the {self.num_draws} draws of a chain. Got {every}.")
        thinned = self._cut(self.joint, lambda tensor: tensor[:, every - 1 :: every])
        if "divergent" not in self.statistics:
            return thinned
        divergent = self.statistics["divergent"][:, : thinned.num_draws * every]
        since = divergent.reshape(self.num_chains, thinned.num_draws, every).any(-1)
        return replace(thinned, statistics={**thinned.statistics, "divergent": since})

    def _cut(self, joint: Problem, part: Callable[[Tensor], Tensor]) -> "Samples":
        statistics = {name: part(value) for name, value in self.statistics.items()}
        return Samples(joint, part(self.theta), statistics, {name: part(b) for name, b in self.buffers.items()})

    def values(self) -> dict[str, Tensor]:
        """All draws by name, (C, D, *shape): constrained values of a density, or a network's weights and raw noise."""
        joint = self.joint
        return joint.constrained(self.theta) if isinstance(joint, Density) else joint.layout.unflatten(self.theta)

    def start(self) -> Point:
        """The draw of highest log density as a point, with its noise and buffers; one for each problem.

        Where no log density was kept, it is the last draw of the first chain.
        """
        chains, draws = self._best()
        theta = self.theta[chains, draws].to(self.joint.device)
        buffers = {name: b[chains, draws].to(self.joint.device) for name, b in self.buffers.items()}
        return Point(self.joint.fitted(theta), self.joint.split(theta)[0], buffers)

    def _best(self) -> tuple[Tensor, Tensor]:
        """Chain and draw, () each, or (C,) where each chain is that of another problem."""
        order = torch.arange(self.num_draws, device="cpu").expand(self.num_chains, -1)
        values = self.statistics.get("log_density", order)  # (C, D)
        draws = values.argmax(1)  # (C,)
        if self.num_members is not None:
            return torch.arange(self.num_chains, device="cpu"), draws
        chain = values.amax(1).argmax()
        return chain, draws[chain]

    def weight_parts(self) -> Iterator[WeightPart]:
        self._alone()
        every = self.theta.flatten(0, 1)  # (C D, P)
        for some in torch.split(every, max(1, LARGE // every.shape[1])):
            yield WeightPart(len(some) / len(every), some.to(self.joint.device, torch.float64))

    def point(self) -> Tensor:
        """The network's weights, or theta of a density, at the draw of highest log density: see `start`."""
        return self.start().theta

    def sample(self, draws: int, key: Key) -> Tensor:
        """Draws (draws, P) chosen at random, each once while there are enough; raw noise included."""
        self._alone()
        total = self.num_chains * self.num_draws
        if draws <= total:
            chosen = key.permutation(total, "cpu")[:draws]
        else:
            chosen = torch.randint(total, (draws,), generator=key.generator("cpu"), device="cpu")
        return self.theta[chosen // self.num_draws, chosen % self.num_draws].to(self.joint.device)

    def likelihood(self, draws: int, key: Key) -> Likelihood:
        """The joint's likelihood, with the noise of each draw that `outputs` gives where that was sampled."""
        assert isinstance(self.joint, Joint)
        if not self.joint.likelihood.num_free:
            return self.joint.likelihood
        raw = self.theta[..., self.joint.num_weights :][self._spread(draws)]  # (S, H)
        return self.joint.likelihood.fixed(raw.to(self.joint.device))

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """At `draws` draws spread evenly over chains and iterations, or at all where there are no more."""
        self._alone()
        assert isinstance(self.joint, Joint)
        step = max(1, TOGETHER // max(1, num_rows(inputs)))
        blocks = self._blocks(*self._spread(draws), step)
        return torch.cat([outputs_at(self.joint, theta, inputs, buffers) for theta, buffers in blocks])

    def log_likelihoods(self, data: object = None) -> Tensor:
        """log p(y_n | theta_cd) of each row at each draw, (C, D, N) in float64 on the CPU: what LOO is made of.

        Untempered, and with the draw's own noise; weights of rows multiply. A `Density` tells them by its `pointwise`.
        """
        self._alone()
        every = self._spread(self.num_chains * self.num_draws)
        rows = pointwise_log_likelihoods(self.joint, lambda step: self._blocks(*every, step), data)
        return rows.reshape(self.num_chains, self.num_draws, -1)

    def to_inference_data(self, data: object = None, *, log_likelihood: bool = False) -> Any:
        """The draws for ArviZ: an `InferenceData`, or the `DataTree` of ArviZ 1, with `posterior` and `sample_stats`.

        With `log_likelihood` there is that group, too, as `log_likelihoods(data)` gives it. Statistics have ArviZ's
        names: lp, diverging, energy, acceptance_rate, tree_depth,
        reached_max_treedepth, n_steps, step_size.
        """
        if data is not None and not log_likelihood:
            raise ValueError(
                "to_inference_data: data are for log-likelihoods. Add log_likelihood=True, or leave them out."
            )
        self._alone()
        return inference_data(self.values(), self.statistics, self.log_likelihoods(data) if log_likelihood else None)

    def _spread(self, draws: int) -> tuple[Tensor, Tensor]:
        """Chains and iterations (S,) of as many draws, none twice: each chain its share, at even distances in it."""
        total = min(draws, self.num_chains * self.num_draws)
        chains, places = [], []
        for chain in range(self.num_chains):
            share = (chain + 1) * total // self.num_chains - chain * total // self.num_chains
            at = torch.arange(share, device="cpu")
            chains.append(torch.full_like(at, chain))
            places.append((2 * at + 1) * self.num_draws // (2 * max(1, share)))
        return torch.cat(chains), torch.cat(places)

    def _blocks(self, chains: Tensor, draws: Tensor, step: int) -> Iterator[tuple[Tensor, Buffers]]:
        """theta (s, P) and buffers (s, *shape) of these draws on the model's device, at most `step` at a time."""
        step = max(1, min(step, LARGE // self.theta.shape[2]))
        for low in range(0, len(chains), step):
            here = chains[low : low + step], draws[low : low + step]
            buffers = {name: b[here].to(self.joint.device) for name, b in self.buffers.items()}
            yield self.theta[here].to(self.joint.device), buffers
