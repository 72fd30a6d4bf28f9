"""Draws of Markov chains as a posterior, with log-likelihoods of rows and export to ArviZ."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posterity.errors import BadData, PosterityError, positive_whole, shown
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Inputs, num_rows
from posterity.model.data import Batch, Data, TensorData
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem, data_of
from posterity.model.weights import weighted_log_prob
from posterity.numerics.random import Key
from posterity.posteriors.functions import Evaluation
from posterity.posteriors.point import Point
from posterity.posteriors.posterior import Posterior, WeightPart
from posterity.posteriors.standalone import Draws

ROWS = 1024  # rows of data at a time: bounds the memory
TOGETHER = 1 << 14  # rows times draws in one call of the network
LARGE = 1 << 24  # numbers in the draws moved to the device at a time
CUT_OFF = "cut_off"  # the statistic that marks trajectories which reached the sampler's limit

# ArviZ's names of sampler statistics; others keep their own.
_ARVIZ_NAMES = {
    "log_density": "lp",
    "divergent": "diverging",
    "accept": "acceptance_rate",
    "leapfrogs": "n_steps",
    "depth": "tree_depth",
    "cut_off": "reached_max_treedepth",
}


def batches(data: Data) -> Iterator[Batch]:
    """Yield all rows once, `ROWS` at a time."""
    for batch in data.passes(ROWS).from_step(0):
        assert isinstance(batch, Batch)
        yield batch


@dataclass(frozen=True, eq=False, repr=False)
class Samples(Posterior):
    """The draws of C Markov chains with D draws each, theta (C, D, P), all of equal weight.

    theta is the sampler's state: the network's weights followed by raw parameters of the likelihood (the log of its
    noise), or the unconstrained parameters of a `Density`. `statistics` hold a number per draw, (C, D):
    "log_density", "energy", "divergent" and others of the sampler. `buffers` (C, D, *shape) hold each draw's, if any.
    All tensors are on the CPU, perhaps memory-mapped; the draws in use move to the model's device.

    **Math**: q = (1 / C D) sum_cd delta(theta - theta_cd). The predictive is the mean over draws of p(y | f_s(x)),
    each with its own observation noise where the noise was sampled.

    **Limit**: as good as the chains: look at their diagnostics first. Draws of one chain are correlated. Predictions
    average over all draws, or over `draws` of them spread evenly over chains and iterations. Draws of regression
    outputs are kept, for densities and quantiles: where all exceed the `memory_budget` of `predict` (1 GiB by
    default), as many as fit, and the log says so. Class probabilities are averaged over all draws in any case.

    **Cost**: one forward pass for each draw, several at once for small networks; C D P numbers in memory.

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
    tensor_shapes: ClassVar[dict[str, str]] = {"theta": "CDP", "statistics": "CD"}

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

    def lines(self) -> list[str]:
        return [*super().lines(), f"draws: {self.num_chains} chains of {self.num_draws:,} draws"]

    @property
    def num_chains(self) -> int:
        """Number of chains C."""
        return self.theta.shape[0]

    @property
    def num_draws(self) -> int:
        """Number of draws D of each chain."""
        return self.theta.shape[1]

    @property
    def num_members(self) -> int | None:
        """C where the joint has a member axis, so that each chain belongs to another problem; else None."""
        count: int | None = self.joint.num_members
        return count

    def member(self, index: int) -> "Samples":
        return self if self.num_members is None else self.chain(index)

    def chain(self, index: int) -> "Samples":
        """Samples of one chain."""
        joint = self.joint if self.num_members is None else self.joint.member(index)
        return self._cut(joint, lambda tensor: tensor[index].unsqueeze(0))

    @classmethod
    def joined(cls, runs: Iterable["Samples"]) -> "Samples":
        """Join the chains of several runs on one problem, in their order, as tasks of an executor give them.

        The runs must have draws of equal number. Statistics that some of them lack are left out.
        """
        runs = list(runs)
        if not runs or not all(isinstance(run, Samples) and run.num_members is None for run in runs):
            raise ValueError(f"Samples.joined needs Samples of one problem each. Got {shown(runs)}.")
        problems = [(repr(run.joint), run.num_draws) for run in runs]
        if other := [problem for problem in problems if problem != problems[0]]:
            raise ValueError(
                "Samples.joined needs runs on one problem with as many draws each. Got "
                f"{problems[0][1]} draws of {problems[0][0]}, and {other[0][1]} of {other[0][0]}."
            )

        def joined(tables: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            return {
                name: torch.cat([table[name] for table in tables])
                for name in tables[0]
                if all(name in table for table in tables)
            }

        theta = torch.cat([run.theta for run in runs])
        statistics, buffers = joined([run.statistics for run in runs]), joined([run.buffers for run in runs])
        return cls(runs[0].joint, theta, statistics, buffers)

    def thinned(self, every: int) -> "Samples":
        """Keep every `every`-th draw, as a run with `thin` multiplied by `every` does."""
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
        """All draws by name, (C, D, *shape): constrained parameters of a density, or weights and raw noise."""
        joint = self.joint
        return joint.constrained(self.theta) if isinstance(joint, Density) else joint.layout.unflatten(self.theta)

    def start(self) -> Point:
        """The draw of highest log density as a point, with its noise and buffers; one for each problem.

        Without a recorded log density it is the last draw of the first chain.
        """
        order = torch.arange(self.num_draws, device="cpu").expand(self.num_chains, -1)
        values = self.statistics.get("log_density", order)  # (C, D)
        chains = torch.arange(self.num_chains, device="cpu") if self.num_members else values.amax(1).argmax()
        draws = values.argmax(1)[chains]
        theta = self.theta[chains, draws].to(self.joint.device)
        buffers = {name: b[chains, draws].to(self.joint.device) for name, b in self.buffers.items()}
        return Point(self.joint.fitted(theta), self.joint.split(theta)[0], buffers)

    def weight_parts(self) -> Iterator[WeightPart]:
        self._alone()
        draws = self.theta.flatten(0, 1)  # (C D, P)
        for block in torch.split(draws, max(1, LARGE // draws.shape[1])):
            yield WeightPart(len(block) / len(draws), block.to(self.joint.device, torch.float64))

    def point(self) -> Tensor:
        """The network's weights, or theta of a density, at the draw of highest log density: see `start`."""
        return self.start().theta

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        """Draws (draws, P) chosen at random, without replacement where there are enough; raw noise included."""
        self._alone()
        return self.theta[self._random(draws, key or Key(0))].to(self.joint.device)

    def drawn_functions(self, draws: int, key: Key) -> Evaluation:
        """Functions at the draws that `sample` chooses, each with its own buffers."""
        chains, iterations = self._random(draws, key)

        def evaluate(inputs: Inputs, numbers: Tensor) -> Tensor:
            assert isinstance(self.joint, Joint)
            blocks = self._blocks(chains[numbers], iterations[numbers], max(1, TOGETHER // max(1, num_rows(inputs))))
            return torch.cat([_outputs(self.joint, theta, inputs, buffers) for theta, buffers in blocks])

        return evaluate

    def _random(self, draws: int, key: Key) -> tuple[Tensor, Tensor]:
        """Chains and iterations (S,) of draws at random."""
        total = self.num_chains * self.num_draws
        if draws <= total:
            chosen = key.permutation(total, "cpu")[:draws]
        else:
            chosen = torch.randint(total, (draws,), generator=key.generator("cpu"), device="cpu")
        return chosen // self.num_draws, chosen % self.num_draws

    def likelihood(self, draws: int, key: Key) -> Likelihood:
        """The joint's likelihood; where the noise was sampled, with the noise of each draw of `outputs`."""
        assert isinstance(self.joint, Joint)
        if not self.joint.likelihood.num_free:
            return self.joint.likelihood
        raw = self.theta[..., self.joint.num_weights :][self._spread(draws)]  # (S, H)
        return self.joint.likelihood.fixed(raw.to(self.joint.device))

    def standalone(self, draws: int | None, share: float, key: Key) -> nn.Module:
        count = self.prediction_draws(draws, share)
        chains, iterations = self._spread(count)
        device, joint = self.joint.device, self.joint.as_joint("module")
        each = {name: b[chains, iterations].to(device) for name, b in self.buffers.items()}
        return Draws(joint.network, self.likelihood(count, key), self.theta[chains, iterations].to(device), {}, each)

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """Outputs at `draws` draws spread evenly over chains and iterations, or at all where there are fewer."""
        return torch.cat(list(self.output_blocks(inputs, draws, key)))

    def output_blocks(self, inputs: Inputs, draws: int, key: Key) -> Iterator[Tensor]:
        self._alone()
        assert isinstance(self.joint, Joint)
        step = max(1, TOGETHER // max(1, num_rows(inputs)))
        for theta, buffers in self._blocks(*self._spread(draws), step):
            yield _outputs(self.joint, theta, inputs, buffers)

    def prediction_draws(self, draws: int | None, share: float = 1.0) -> int:
        total = self.num_chains * self.num_draws
        return total if draws is None else min(total, super().prediction_draws(draws, share))

    def log_likelihoods(self, data: object = None) -> Tensor:
        """log p(y_n | theta_cd) of each row at each draw, (C, D, N) in float64 on the CPU, as LOO needs.

        Untempered, with the draw's own noise, times the weights of rows. For a `Density` by its `pointwise`.
        """
        self._alone()
        chosen = self._spread(self.num_chains * self.num_draws)
        rows = self.joint.checked(data_of(self.joint, data).to(self.joint.device))
        with torch.no_grad():
            if isinstance(self.joint, Density):
                blocks = self._blocks(*chosen, ROWS)
                values = torch.cat([self.joint.log_likelihoods(theta).double().cpu() for theta, _ in blocks])
                return values.reshape(self.num_chains, self.num_draws, -1)
            if isinstance(rows, TensorData) and rows.rows.per_member:
                raise BadData("log_likelihoods: pass the rows of one problem, and take its chain: q.chain(0).")
            columns, joint = [], self.joint.as_joint("log_likelihoods")
            for batch in batches(rows):
                blocks = self._blocks(*chosen, max(1, TOGETHER // batch.size))
                columns.append(torch.cat([_log_prob(joint, theta, batch, buffers).cpu() for theta, buffers in blocks]))
        return torch.cat(columns, dim=1).reshape(self.num_chains, self.num_draws, -1)

    def to_inference_data(self, data: object = None, *, log_likelihood: bool = False) -> Any:
        """The draws for ArviZ: an `InferenceData`, or the `DataTree` of ArviZ 1, with `posterior` and `sample_stats`.

        With `log_likelihood` also that group, with the variable "y" of `log_likelihoods(data)`. Statistics have ArviZ's
        names: lp, diverging, energy, acceptance_rate, tree_depth, reached_max_treedepth, n_steps, step_size.
        """
        if data is not None and not log_likelihood:
            raise ValueError(
                "to_inference_data: data are for log-likelihoods. Add log_likelihood=True, or leave them out."
            )
        self._alone()
        groups = {"posterior": self.values()}
        if self.statistics:
            groups["sample_stats"] = {_ARVIZ_NAMES.get(name, name): value for name, value in self.statistics.items()}
        if log_likelihood:
            groups["log_likelihood"] = {"y": self.log_likelihoods(data)}
        try:
            import arviz
        except ImportError as error:
            raise PosterityError(
                "to_inference_data needs ArviZ. Install it with: pip install 'posterity[arviz]'."
            ) from error
        arrays: dict[str, Any] = {
            group: {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}
            for group, tensors in groups.items()  # numpy has no bfloat16
        }
        return arviz.from_dict(arrays) if int(arviz.__version__.partition(".")[0]) >= 1 else arviz.from_dict(**arrays)

    def _spread(self, draws: int) -> tuple[Tensor, Tensor]:
        """Chains and iterations (S,) of `draws` distinct draws: equal shares of the chains, evenly spaced in each."""
        total = min(draws, self.num_chains * self.num_draws)
        chains, iterations = [], []
        for chain in range(self.num_chains):
            share = (chain + 1) * total // self.num_chains - chain * total // self.num_chains
            order = torch.arange(share, device="cpu")
            chains.append(torch.full_like(order, chain))
            iterations.append((2 * order + 1) * self.num_draws // (2 * max(1, share)))
        return torch.cat(chains), torch.cat(iterations)

    def _blocks(self, chains: Tensor, draws: Tensor, step: int) -> Iterator[tuple[Tensor, Buffers]]:
        """Yield theta (s, P) and buffers (s, *shape) of these draws on the model's device, at most `step` at a time."""
        step = max(1, min(step, LARGE // self.theta.shape[2]))
        for low in range(0, len(chains), step):
            here = chains[low : low + step], draws[low : low + step]
            buffers = {name: b[here].to(self.joint.device) for name, b in self.buffers.items()}
            yield self.theta[here].to(self.joint.device), buffers


def _outputs(joint: Joint, theta: Tensor, inputs: Inputs, buffers: Buffers) -> Tensor:
    """Network outputs (s, n, *event) at draws (s, P); a single draw runs without a member axis, which is faster."""
    if len(theta) > 1:
        return joint.outputs(theta, inputs, buffers or None)
    own = {name: buffer[0] for name, buffer in buffers.items()}
    return joint.outputs(theta[0], inputs, own or None).unsqueeze(0)


def _log_prob(joint: Joint, theta: Tensor, batch: Batch, buffers: Buffers) -> Tensor:
    """Weighted log-likelihood of each row at each draw, (s, n) in float64."""
    outputs = _outputs(joint, theta, batch.inputs, buffers).double()
    likelihood = joint.likelihood.with_free(joint.split(theta)[1].double())
    return weighted_log_prob(likelihood, outputs, batch.targets, batch.weights)
