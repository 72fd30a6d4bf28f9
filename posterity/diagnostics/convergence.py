"""Whether the draws of Markov chains can be relied on, and what to do where they cannot."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import fill

import torch
from torch import Tensor

from posterity.diagnostics.advice import warnings_of
from posterity.diagnostics.effective_sample_size import bulk_ess, mcse_mean, tail_ess
from posterity.diagnostics.rhat import e_bfmi, of_each, rhat
from posterity.errors import positive_whole, shown
from posterity.model.batch import Inputs
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.samples import CUT_OFF, Samples

OUTPUTS = "outputs"  # the name under which a network's outputs stand in a report
_LARGE = 1 << 24  # numbers in the draws that are moved to the device at a time


@dataclass(frozen=True, eq=False)
class Quantity:
    """What the draws of one named tensor are worth, number by number: tensors of its shape, in float64.

    `mcse` is the standard error of the mean and `scale` the standard deviation. R-hat is NaN for numbers that never
    moved and for one chain. `of_network` marks a network's weights, which may swap places and change no output.
    """

    name: str
    rhat: Tensor
    bulk_ess: Tensor
    tail_ess: Tensor
    mcse: Tensor
    scale: Tensor
    of_network: bool

    @property
    def moving(self) -> Tensor:
        """Which numbers are not the same at all draws (or not finite at some)."""
        return self.scale != 0

    @property
    def worst_rhat(self) -> float:
        """Largest R-hat, NaN where none is known."""
        known = self.rhat[~self.rhat.isnan()]
        return float(known.max()) if known.numel() else math.nan

    @property
    def least_bulk_ess(self) -> float:
        """Smallest bulk effective sample size of the numbers that move, NaN where none does."""
        return self._least(self.bulk_ess)

    @property
    def least_tail_ess(self) -> float:
        """Smallest tail effective sample size of the numbers that move, NaN where none does."""
        return self._least(self.tail_ess)

    @property
    def worst_error(self) -> float:
        """Largest standard error of a mean, in standard deviations, NaN where no number moves."""
        ratio = (self.mcse / self.scale)[self.moving & ~self.mcse.isnan()]
        return float(ratio.max()) if ratio.numel() else math.nan

    def _least(self, sizes: Tensor) -> float:
        sizes = sizes[self.moving & ~sizes.isnan()]
        return float(sizes.min()) if sizes.numel() else math.nan


@dataclass(frozen=True, eq=False)
class Convergence:
    """Diagnostics of C chains of D draws: `report["weight"]` is one `Quantity`; printed, a table with advice.

    `acceptance`, `divergences` (counts) and `e_bfmi` are (C,), one for each chain; `at_depth_limit` is the share of
    trajectories that were cut off at `max_depth` doublings. Each is None where the sampler tells nothing of the kind.
    """

    quantities: tuple[Quantity, ...]
    num_chains: int
    num_draws: int
    acceptance: Tensor | None
    divergences: Tensor | None
    e_bfmi: Tensor | None
    at_depth_limit: float | None
    max_depth: int

    def __getitem__(self, name: str) -> Quantity:
        for quantity in self.quantities:
            if quantity.name == name:
                return quantity
        known = ", ".join(quantity.name for quantity in self.quantities)
        raise KeyError(f"Convergence: nothing is called {name!r}. There are: {known}.")

    @property
    def judged(self) -> tuple[Quantity, ...]:
        """The quantities that count in the verdict: not the weights of a network whose outputs are there."""
        outputs = any(quantity.name == OUTPUTS for quantity in self.quantities)
        return tuple(quantity for quantity in self.quantities if not (outputs and quantity.of_network))

    @property
    def rhat(self) -> float:
        """Largest R-hat of what is judged, NaN where none is known."""
        return max(_known(quantity.worst_rhat for quantity in self.judged), default=math.nan)

    @property
    def bulk_ess(self) -> float:
        """Smallest bulk effective sample size of what is judged, NaN where nothing moves."""
        return min(_known(quantity.least_bulk_ess for quantity in self.judged), default=math.nan)

    @property
    def tail_ess(self) -> float:
        """Smallest tail effective sample size of what is judged, NaN where nothing moves."""
        return min(_known(quantity.least_tail_ess for quantity in self.judged), default=math.nan)

    @property
    def num_divergences(self) -> int:
        """Divergent transitions of all chains."""
        return 0 if self.divergences is None else int(self.divergences.sum())

    @property
    def share_divergent(self) -> float:
        """Share of the draws whose transition diverged."""
        return self.num_divergences / (self.num_chains * self.num_draws)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong and what to do about it, the gravest first; empty where nothing was found."""
        return warnings_of(self)

    @property
    def converged(self) -> bool:
        """Whether nothing was found that is wrong."""
        return not self.warnings

    def __str__(self) -> str:
        width = max(len(quantity.name) for quantity in self.quantities)
        lines = [f"{'':<{width}}  {'numbers':>9}  {'R-hat':>6}  {'bulk ESS':>8}  {'tail ESS':>8}  {'MCSE/sd':>7}"]
        lines += [
            f"{q.name:<{width}}  {q.rhat.numel():>9,}  {_cell(q.worst_rhat, '.3f', 6)}  "
            f"{_cell(q.least_bulk_ess, ',.0f', 8)}  {_cell(q.least_tail_ess, ',.0f', 8)}  "
            f"{_cell(q.worst_error, '.3f', 7)}"
            for q in self.quantities
        ]
        advice = [fill(text, 110, initial_indent="- ", subsequent_indent="  ") for text in self.warnings]
        return "\n".join([*lines, self._sampler(), *(advice or ["Nothing speaks against these draws."])])

    def _sampler(self) -> str:
        """What the sampler tells, on one line."""
        chains = "1 chain" if self.num_chains == 1 else f"{self.num_chains} chains"
        parts = [f"{chains} of {self.num_draws:,} draws"]
        if self.acceptance is not None:
            parts.append(f"acceptance {float(self.acceptance.mean()):.2f}")
        if self.divergences is not None:
            parts.append(f"{self.num_divergences:,} divergences ({self.share_divergent:.1%})")
        if self.e_bfmi is not None:
            parts.append(f"E-BFMI from {float(self.e_bfmi.min()):.2f}")
        if self.at_depth_limit is not None:
            parts.append(f"{self.at_depth_limit:.1%} of trajectories cut off")
        return ", ".join(parts) + "."


def convergence(q: Samples, x: Inputs | None = None, *, max_depth: int | None = None) -> Convergence:
    """Diagnose the draws of chains, by named tensor; given inputs x, those of the network's outputs there, too.

    **Math**: split rank-normalised R-hat (wanted: at most 1.01), effective sample sizes in bulk and tails (wanted: 100
    for each chain), standard errors of means, divergences, E-BFMI (wanted: at least 0.3), acceptance, and the share of
    trajectories that were cut off: see the functions of these names. `NUTS` marks the latter among its statistics;
    of draws with depths and without marks those of `max_depth` doublings count, by default 10.

    **Limit**: chains that all missed the same mode agree. Weights of a network are not identified (hidden units swap
    places and signs), so that chains which disagree on them may agree on all outputs: give x, and outputs and noise
    are judged instead. E-BFMI is left out where the energy is minus the log density, that is without momentum.

    **Cost**: three sorts and four fast Fourier transforms of the C D draws of each number, on the model's device; given
    x, a forward pass for each draw, whose C D N outputs are held.

    **References**: Vehtari, Gelman, Simpson, Carpenter, Bürkner (2021), Rank-normalization, folding, and localization;
    Betancourt (2017), A conceptual introduction to Hamiltonian Monte Carlo.

    **Example**:

    >>> import posterity as po
    >>> joint = po.Joint(torch.nn.Linear(2, 1), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=5)
    >>> theta = po.Key(0).normal((4, 500, 3))
    >>> theta[0, :, 2] += 2.0  # one chain has another bias
    >>> print(convergence(po.posteriors.Samples(joint, theta)))
              numbers   R-hat  bulk ESS  tail ESS  MCSE/sd
    weight          2   1.003     1,965     1,845    0.023
    bias            1   1.329        10        41    0.340
    4 chains of 500 draws.
    - R-hat 1.33 in 'bias': chains are in different places. Run much longer (warmup=5000), start chains elsewhere,
      or reparametrise.
    - Weights of a network may swap places and change no output: look at its outputs, convergence(q, x).
    """
    if not isinstance(q, Samples):
        raise TypeError(f"convergence: q must be Samples, the posterior of a sampler. Got {shown(type(q).__name__)}.")
    if q.num_members is not None:
        raise TypeError(
            f"convergence: each of the {q.num_members} chains is that of another problem. "
            "Choose one: convergence(q.member(0))."
        )
    if max_depth is not None:
        positive_whole("convergence: max_depth", max_depth)
    if x is not None and not isinstance(q.joint, Joint):
        raise TypeError("convergence: x is for networks; a Density has no outputs. Leave x out.")
    weights = set(q.joint.network.layout.names) if isinstance(q.joint, Joint) else set()
    points = weights - {part.name for part in q.joint.random_slices} if isinstance(q.joint, Joint) else set()
    found = [_quantity(name, draws, name in weights, q.joint.device) for name, draws in q.values().items()]
    named = [quantity for quantity in found if quantity.name not in points or bool(quantity.moving.any())]
    if x is not None:
        outputs = q.outputs(x, q.num_chains * q.num_draws, Key(0))  # (C D, N, *event), chain by chain
        named.append(
            _quantity(OUTPUTS, outputs.reshape(q.num_chains, q.num_draws, *outputs.shape[1:]), False, q.joint.device)
        )
    known = q.statistics
    energy = known.get("energy")
    if energy is not None and "log_density" in known and bool(torch.equal(energy, -known["log_density"])):
        energy = None
    depth = known.get("depth")
    cut, limit = (None, 0) if depth is None or not bool(depth.any()) else _cut_off(known, max_depth)
    return Convergence(
        tuple(named),
        q.num_chains,
        q.num_draws,
        known["accept"].double().mean(1) if "accept" in known else None,
        known["divergent"].sum(1) if "divergent" in known else None,
        None if energy is None else e_bfmi(energy),
        cut,
        limit,
    )


def _cut_off(known: dict[str, Tensor], max_depth: int | None) -> tuple[float, int]:
    """The share of trajectories that were cut off, and at which depth."""
    limit = max_depth or 10
    if max_depth is None and CUT_OFF in known:
        cut, limit = known[CUT_OFF], int(known["depth"].max())
    else:
        cut = known["depth"] >= limit
    return float(cut.double().mean()), limit


def _quantity(name: str, draws: Tensor, of_network: bool, device: torch.device) -> Quantity:
    """The diagnostics of draws (C, D, *shape), which may lie on a disk: made on `device`, some numbers at a time."""
    chains, length, *shape = draws.shape
    step = max(1, _LARGE // (chains * length))
    pieces = torch.split(draws.detach().reshape(chains, length, -1), step, dim=-1)
    columns = zip(*(_diagnosed(piece.to(device)) for piece in pieces), strict=True)
    ratio, bulk, tail, error, scale = (torch.cat(column).reshape(shape) for column in columns)
    return Quantity(name, ratio, bulk, tail, error, scale, of_network)


def _diagnosed(draws: Tensor) -> tuple[Tensor, ...]:
    """R-hat, both effective sample sizes, error of the mean and standard deviation of draws (C, D, K), (K,) each."""
    scale = of_each("scale", draws, lambda part: (part - part[:, :1, :1]).flatten(1).std(-1))  # 0 where nothing moves
    return tuple(part.cpu() for part in (rhat(draws), bulk_ess(draws), tail_ess(draws), mcse_mean(draws), scale))


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _cell(value: float, style: str, width: int) -> str:
    return f"{'-' if math.isnan(value) else format(value, style):>{width}}"
