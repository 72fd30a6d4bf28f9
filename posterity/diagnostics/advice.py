"""What to do about chains that cannot be relied on, in sentences."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.diagnostics.rhat import LEAST_DRAWS

if TYPE_CHECKING:
    from posterity.diagnostics.convergence import Convergence, Quantity

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
