"""Convergence reports of chains, with advice."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from textwrap import fill

import torch
from torch import Tensor

from posterity.diagnostics.chains import LEAST_DRAWS, bulk_ess, e_bfmi, mcse_mean, of_each, rhat, tail_ess
from posterity.errors import positive_whole, shown
from posterity.model.batch import Inputs
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.samples import CUT_OFF, Samples

OUTPUTS = "outputs"  # the name of a network's outputs in a report
_LARGE = 1 << 24  # numbers moved to the device at once
RHAT = 1.01  # at most, Vehtari et al. (2021)
ESS_A_CHAIN = 100  # at least, of each chain: same
ENERGY = 0.3  # E-BFMI, at least
DEPTH = 0.01  # share of trajectories at the limit, at most
ACCEPTANCE = 0.1  # of a chain, at least
FAR = 10.0  # runs that would have to be longer by more than this need another remedy
APART = math.sqrt(1.0 + FAR * (RHAT**2 - 1.0))  # the R-hat at which this is so: R-hat^2 - 1 falls as 1 / draws


@dataclass(frozen=True, eq=False)
class Quantity:
    """Diagnostics of the draws of one named tensor: tensors of its shape, in float64.

    `mcse` is the standard error of the mean and `scale` the standard deviation. R-hat is NaN for constant numbers and
    for one chain. `of_network` marks a network's weights, which may be permuted without a change of outputs.
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
        """Mask of the numbers that are not constant (or not finite at some draw)."""
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
    trajectories that were cut off at `max_depth` doublings. Each is None where the sampler does not report it.
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
        """The quantities that the verdict is based on: all but a network's weights if its outputs are known."""
        outputs = any(quantity.name == OUTPUTS for quantity in self.quantities)
        return tuple(quantity for quantity in self.quantities if not (outputs and quantity.of_network))

    @property
    def rhat(self) -> float:
        """Largest R-hat of the judged quantities, NaN where none is known."""
        return max(_known(quantity.worst_rhat for quantity in self.judged), default=math.nan)

    @property
    def bulk_ess(self) -> float:
        """Smallest bulk effective sample size of the judged quantities, NaN where nothing moves."""
        return min(_known(quantity.least_bulk_ess for quantity in self.judged), default=math.nan)

    @property
    def tail_ess(self) -> float:
        """Smallest tail effective sample size of the judged quantities, NaN where nothing moves."""
        return min(_known(quantity.least_tail_ess for quantity in self.judged), default=math.nan)

    @property
    def num_divergences(self) -> int:
        """Number of divergent transitions of all chains."""
        return 0 if self.divergences is None else int(self.divergences.sum())

    @property
    def share_divergent(self) -> float:
        """Share of the draws whose transition diverged."""
        return self.num_divergences / (self.num_chains * self.num_draws)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems and their remedies, the gravest first; empty where there are none."""
        return (*_broken(self), *_of_sampler(self), *_disagreeing(self), *_short(self))

    @property
    def converged(self) -> bool:
        """Whether there are no warnings."""
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
        advice = [fill(text, 110, initial_indent="- ", subsequent_indent="  ") for text in self.warnings]
        return "\n".join([*lines, f"{', '.join(parts)}.", *(advice or ["Nothing speaks against these draws."])])


def convergence(q: Samples, x: Inputs | None = None, *, max_depth: int | None = None) -> Convergence:
    """Diagnose the draws of chains, by named tensor, and, given inputs x, of the network's outputs at x.

    **Math**: split rank-normalised R-hat (wanted: at most 1.01), effective sample sizes in bulk and tails (wanted: 100
    for each chain), standard errors of means, divergences, E-BFMI (wanted: at least 0.3), acceptance, and the share of
    trajectories that were cut off: see the functions of these names. `NUTS` marks these in its statistics; of draws
    with depths but no marks, trajectories of `max_depth` doublings count, by default 10.

    **Limit**: chains that all missed the same mode agree. Weights of a network are not identified (hidden units can be
    permuted and change sign), so chains that disagree on them may agree on all outputs: give x, and outputs and noise
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
            f"convergence: each of the {q.num_members} chains belongs to another problem. "
            "Choose one: convergence(q.member(0))."
        )
    if max_depth is not None:
        positive_whole("convergence: max_depth", max_depth)
    if x is not None and not isinstance(q.joint, Joint):
        raise TypeError("convergence: x is for networks; a Density has no outputs. Leave x out.")
    weights = set(q.joint.network.layout.names) if isinstance(q.joint, Joint) else set()
    points = weights - {part.name for part in q.joint.random_slices} if isinstance(q.joint, Joint) else set()
    device = q.joint.device
    quantities = [_quantity(name, draws, name in weights, device) for name, draws in q.values().items()]
    quantities = [quantity for quantity in quantities if quantity.name not in points or bool(quantity.moving.any())]
    if x is not None:
        outputs = q.outputs(x, q.num_chains * q.num_draws, Key(0))  # (C D, N, *event), chain by chain
        outputs = outputs.reshape(q.num_chains, q.num_draws, *outputs.shape[1:])
        quantities.append(_quantity(OUTPUTS, outputs, False, device))
    known = q.statistics
    energy = known.get("energy")
    if energy is not None and "log_density" in known and bool(torch.equal(energy, -known["log_density"])):
        energy = None
    depth, share, limit = known.get("depth"), None, 0
    if depth is not None and bool(depth.any()):
        marked = max_depth is None and CUT_OFF in known
        limit = int(depth.max()) if marked else max_depth or 10
        share = float((known[CUT_OFF] if marked else depth >= limit).double().mean())
    return Convergence(
        tuple(quantities),
        q.num_chains,
        q.num_draws,
        known["accept"].double().mean(1) if "accept" in known else None,
        known["divergent"].sum(1) if "divergent" in known else None,
        None if energy is None else e_bfmi(energy),
        share,
        limit,
    )


def _quantity(name: str, draws: Tensor, of_network: bool, device: torch.device) -> Quantity:
    """Diagnose draws (C, D, *shape), which may lie on a disk, in pieces on `device`."""
    chains, length, *shape = draws.shape
    rows = []
    for piece in torch.split(draws.detach().reshape(chains, length, -1), max(1, _LARGE // (chains * length)), dim=-1):
        part = piece.to(device)  # (C, D, K)
        # differences from one draw: exactly 0 where nothing moves
        scale = of_each("scale", part, lambda chunk: (chunk - chunk[:, :1, :1]).flatten(1).std(-1))
        values = (rhat(part), bulk_ess(part), tail_ess(part), mcse_mean(part), scale)
        rows.append([value.cpu() for value in values])
    ratio, bulk, tail, error, scale = (torch.cat(column).reshape(shape) for column in zip(*rows, strict=True))
    return Quantity(name, ratio, bulk, tail, error, scale, of_network)


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _cell(value: float, style: str, width: int) -> str:
    return f"{'-' if math.isnan(value) else format(value, style):>{width}}"


def _broken(report: Convergence) -> Iterator[str]:
    """Warn of draws that carry no information."""
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


def _of_sampler(report: Convergence) -> Iterator[str]:
    """Warn of problems that the sampler reports."""
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


def _disagreeing(report: Convergence) -> Iterator[str]:
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


def _short(report: Convergence) -> Iterator[str]:
    """Warn of too few effective draws of numbers on which chains nearly agree, and hint at outputs for weights."""
    wanted = ESS_A_CHAIN * report.num_chains
    for kind in ("bulk", "tail"):
        sizes = {q.name: (q.bulk_ess if kind == "bulk" else q.tail_ess) for q in report.judged}
        masks = {q.name: (sizes[q.name] < wanted) & q.moving & ~(q.rhat > APART) for q in report.judged}
        low = [quantity for quantity in report.judged if bool(masks[quantity.name].any())]
        if not low:
            continue
        least = {q.name: float(sizes[q.name][masks[q.name]].min()) for q in low}
        worst = min(low, key=lambda quantity: least[quantity.name])
        longer = wanted / max(least[worst.name], 1.0)
        remedy = f"run longer (draws={_rounded(report.num_draws * longer)})"
        if longer > FAR:
            remedy += ", or let chains mix: longer warmup, a sampler with gradients (NUTS), other parameters"
        where = _where(low, worst, [masks[quantity.name] for quantity in low])
        yield f"{kind.capitalize()} ESS {least[worst.name]:,.0f}, wanted {wanted:,}, in {where}: {remedy}."
    if any(quantity.of_network and quantity.worst_rhat > RHAT for quantity in report.judged):
        yield "Weights of a network may swap places and change no output: look at its outputs, convergence(q, x)."


def _where(quantities: list[Quantity], worst: Quantity, masks: list[Tensor]) -> str:
    """Name the worst quantity, and count the numbers that the masks select."""
    count, total = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
    others = f" and {len(quantities) - 1} more" if len(quantities) > 1 else ""
    return f"'{worst.name}'{others}" + (f" ({count:,} of {total:,} numbers)" if total > 1 else "")


def _below(values: Tensor, least: float) -> list[int]:
    """Return the indices of chains whose value is below `least`."""
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
    """Round upwards to two digits."""
    step: int = 10 ** max(0, math.floor(math.log10(count)) - 1)
    return math.ceil(count / step) * step
