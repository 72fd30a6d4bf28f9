"""Times of runs: the counted work of a method at rates that were measured on one machine.

A unit of work takes a seconds for each multiply-add, b for each byte and c in itself; multiply-adds at the end take d
each. (a, b, c, d) are fitted by `python -m benchmarks.costs`, which writes `posterity/inference/rates.py`.
"""

from dataclasses import dataclass

from posterity.inference.method import Work
from posterity.inference.rates import ORIGIN, RATES

NETWORK = 12.5e9
"""Bytes a second that each device sends, of a network of 100 Gbit/s."""

ROUGH = (4e-13, 2.5e-13, 1e-4, 4e-13)
"""Rates of any method on CUDA, within a factor of ten: those of an H200, from recorded steps in float32 with TF32.

ResNet-20 at 128 rows (16 G multiply-adds) takes 4.8 ms, the 784-1200-1200-10 MLP 0.2 ms (mean_field_cuda); memory
moves 4 TB/s. A leapfrog of 64 chains of a small network is six times as fast as they say (hmc_gradients_cuda).
"""


def features(work: Work, units: int) -> tuple[float, float, float, float]:
    """Return what the four rates are multiplied with, for a run of so many units."""
    return float(units * work.multiply_adds), float(units * work.moved), float(units), float(work.once)


@dataclass(frozen=True)
class Time:
    """Seconds of a run, an estimate: `unit_seconds` each of `units` (None: not known before), `once` at the end.

    `origin` says which machine the rates are of. Where `world_size` devices share the rows, `summed` numbers are added
    up after each unit, or at the end if `summed_once`; each device sends `sent` bytes for it.
    """

    unit: str
    unit_seconds: float
    units: int | None
    once: float
    origin: str
    summed: int
    sent: int
    summed_once: bool
    world_size: int

    @property
    def total(self) -> float | None:
        """Seconds of the whole run, without its start; None where the number of units is not known."""
        return None if self.units is None else self.units * self.unit_seconds + self.once

    def lines(self) -> list[str]:
        """Return the time in words, a line each."""
        known = "the run decides how many" if self.units is None else f"{self.units:,} in the run"
        found = [f"time, an estimate at rates of {self.origin}"]
        found.append(f"  a {self.unit} {seconds(self.unit_seconds)}, {known}")
        if self.total is not None:
            found.append(f"  the run {seconds(self.total)}, without start, checks and tuning")
        if self.world_size > 1:
            when = "once" if self.summed_once else f"a {self.unit}"
            sent = f"each device sends {self.sent / 1e6:,.3g} MB, at {NETWORK / 1e9:g} GB/s"
            found.append(f"  sums over the devices, {when}: {self.summed:,} numbers; {sent}")
        return found


def seconds(value: float) -> str:
    """Format seconds for people.

    >>> seconds(0.0000312), seconds(0.0123), seconds(95.0), seconds(8000.0)
    ('31 us', '12 ms', '95 s', '2.2 h')
    """
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (1.0, "s"), (1e-3, "ms")):
        if value >= size * (2.0 if unit in ("days", "h") else 1.0):
            return f"{value / size:.2g} {unit}" if value < 100.0 * size else f"{value / size:,.0f} {unit}"
    return f"{value * 1e6:.2g} us" if value < 1e-4 else f"{value * 1e6:.0f} us"


def estimate(work: Work | None, device: str, world_size: int = 1) -> Time | None:
    """Return the time of this work on each of `world_size` devices of a type, "cpu" or "cuda"; None if not modelled.

    To add up vectors each device sends 2 (k - 1) / k times their bytes, in a ring or in slices, while nobody computes.
    """
    if work is None or device not in ("cpu", "cuda"):
        return None
    rates = RATES.get(work.kind) if device == "cpu" else ROUGH
    if rates is None:
        return None
    origin = ORIGIN if device == "cpu" else "one H200, rough, within a factor of ten"
    unit = sum(rate * count for rate, count in zip(rates[:3], features(work, 1), strict=False))
    sent = 2 * (world_size - 1) * work.summed * work.itemsize // world_size
    talk = sent / NETWORK
    once = rates[3] * work.once + (talk if work.summed_once else 0.0)
    unit += 0.0 if work.summed_once else talk
    return Time(work.unit, unit, work.units, once, origin, work.summed, sent, work.summed_once, world_size)
