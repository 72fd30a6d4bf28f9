"""Convergence of chains: what the draws show, and what to do about it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from textwrap import fill

import torch
from torch import Tensor

from posterity.diagnostics.effective_sample_size import bulk_ess, mcse_mean, tail_ess
from posterity.diagnostics.rhat import LEAST_DRAWS, e_bfmi, of_each, rhat
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


RHAT = 1.01  # at most, Vehtari et al. (2021)
ESS_A_CHAIN = 100  # at least, of each chain: same
ENERGY = 0.3  # E-BFMI, at least
DEPTH = 0.01  # share of trajectories at the limit, at most
ACCEPTANCE = 0.1  # of a chain, at least
FAR = 10.0  # runs that would have to be longer by more than this need another remedy
APART = math.sqrt(1.0 + FAR * (RHAT**2 - 1.0))  # R-hat from which on that is so: R-hat^2 - 1 falls as 1 / draws


def warnings_of(report: "Convergence") -> tuple[str, ...]:
    """What is wrong with the chains of a report and what to do, the gravest first."""
    return (*_broken(report), *_sampler(report), *_disagreeing(report), *_short(report), *_hint(report))


def _broken(report: "Convergence") -> Iterator[str]:
    """Draws that say nothing at all."""
    if report.num_draws < LEAST_DRAWS:
        yield f"{report.num_draws} draws a chain are too few to say anything: run longer (draws=1000)."
        return
    for quantity in report.quantities:
        if bool(quantity.scale.isnan().any()):
            yield (
                f"Draws of '{quantity.name}' are not finite: lower step_size, and look at the scale of prior and data."
            )
    still = [quantity.name for quantity in report.judged if not bool(quantity.moving.any())]
    if still and len(still) == len(report.judged):
        yield "No chain ever moved: lower step_size, or raise warmup so that it is found."
    elif still:
        yield f"{_names(still)} never moved: all draws are equal."
    if report.num_chains == 1:
        yield "One chain cannot disagree with others, so R-hat is not known: run at least chains=4."


def _sampler(report: "Convergence") -> Iterator[str]:
    """What the sampler says itself."""
    if count := report.num_divergences:
        yield (
            f"{count:,} {'divergence' if count == 1 else 'divergences'} ({report.share_divergent:.1%} of draws): part "
            "of the target was not reached. Raise target_accept to 0.95 (or 0.99), or reparametrise: narrow funnels "
            "of scales are the usual cause."
        )
    if report.e_bfmi is not None and (low := _below(report.e_bfmi, ENERGY)):
        yield (
            f"E-BFMI {float(report.e_bfmi[low].min()):.2g}, wanted {ENERGY}, in {_chains(low)}: momenta do not carry "
            "the chain through the tails. Reparametrise heavy tails and scales (non-centred), or raise warmup."
        )
    if report.acceptance is not None and (low := _below(report.acceptance, ACCEPTANCE)):
        yield (
            f"{_chains(low).capitalize()} accepted {float(report.acceptance[low].min()):.1%} of proposals: "
            "lower step_size, or raise warmup so that it is found."
        )
    if report.at_depth_limit is not None and report.at_depth_limit > DEPTH:
        yield (
            f"{report.at_depth_limit:.1%} of trajectories were cut off at depth {report.max_depth}: correct but slow. "
            f"Scale the parameters alike, or set max_depth={report.max_depth + 2}."
        )


def _disagreeing(report: "Convergence") -> Iterator[str]:
    rated = [quantity for quantity in report.judged if quantity.worst_rhat > RHAT]
    if not rated:
        return
    worst = max(rated, key=lambda quantity: quantity.worst_rhat)
    value = worst.worst_rhat
    if value > APART:
        remedy = f"chains are in different places. Run much longer (warmup={_rounded(report.num_draws * FAR)}), "
        remedy += "start chains elsewhere, or reparametrise."
    else:
        longer = (value**2 - 1.0) / (RHAT**2 - 1.0)
        more = _rounded(report.num_draws * max(2.0, longer))
        remedy = f"run longer (draws={more}, warmup={more}) or start chains elsewhere."
    yield f"R-hat {value:.3g} in {_where(rated, worst, [q.rhat > RHAT for q in rated])}: {remedy}"


def _short(report: "Convergence") -> Iterator[str]:
    """Too few effective draws of numbers on which chains nearly agree: where they do not, that is what is wrong."""
    wanted = ESS_A_CHAIN * report.num_chains
    for kind in ("bulk", "tail"):
        sizes = {q.name: (q.bulk_ess if kind == "bulk" else q.tail_ess) for q in report.judged}
        places = {q.name: (sizes[q.name] < wanted) & q.moving & ~(q.rhat > APART) for q in report.judged}
        low = [quantity for quantity in report.judged if bool(places[quantity.name].any())]
        if not low:
            continue
        least = {q.name: float(sizes[q.name][places[q.name]].min()) for q in low}
        worst = min(low, key=lambda quantity: least[quantity.name])
        longer = wanted / max(least[worst.name], 1.0)
        remedy = f"run longer (draws={_rounded(report.num_draws * longer)})"
        if longer > FAR:
            remedy += ", or let chains mix: longer warmup, a sampler with gradients (NUTS), other parameters"
        where = _where(low, worst, [places[quantity.name] for quantity in low])
        yield f"{kind.capitalize()} ESS {least[worst.name]:,.0f}, wanted {wanted:,}, in {where}: {remedy}."


def _hint(report: "Convergence") -> Iterator[str]:
    """Where weights of a network are judged and disagree."""
    if any(quantity.of_network and quantity.worst_rhat > RHAT for quantity in report.judged):
        yield "Weights of a network may swap places and change no output: look at its outputs, convergence(q, x)."


def _where(found: "list[Quantity]", worst: "Quantity", places: list[Tensor]) -> str:
    """The worst one by name, and how many numbers are like it."""
    count = sum(int(place.sum()) for place in places)
    total = sum(place.numel() for place in places)
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"'{worst.name}'{others}" + (f" ({count:,} of {total:,} numbers)" if total > 1 else "")


def _below(values: Tensor, least: float) -> list[int]:
    """The chains whose value is below `least`."""
    return [int(chain) for chain in torch.nonzero(values < least)[:, 0]]


def _chains(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"chain {numbers[0]}"
    if len(numbers) > 6:
        return f"{len(numbers)} chains"
    return f"chains {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _names(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _rounded(count: float) -> int:
    """Upwards to two digits."""
    step: int = 10 ** max(0, math.floor(math.log10(count)) - 1)
    return math.ceil(count / step) * step
