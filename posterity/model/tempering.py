"""Powers of likelihood and prior, and the temperatures that papers have used."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole, shown


@dataclass(frozen=True, eq=False)
class Tempering:
    """Target density L(theta)^likelihood_power * P0(theta)^prior_power.

    **Math**: log target = likelihood_power * log p(D | theta) + prior_power * log p(theta). Both powers are
    positive floats, or (M,) tensors when each member has its own.

    - `bayes()` = (1, 1).
    - `tempered(eta)` = (1/eta, 1): the posterior L^(1/eta) P0, whose bound is E log p - eta KL.
    - `cold(T)` = (1/T, 1/T): Wenzel et al. For a N(0, s^2) prior it equals `tempered(T)` with prior
      variance T s^2.
    - `balanced(tau, num_data, units)` = tempered(tau * num_data / units).

    `kl_weight` and `weight_decay` convert the temperature to the terms of other libraries.

    **Limit**: an evidence under `tempered(eta)` is not comparable across eta; never tune eta by it.

    **Cost**: none; two numbers.

    **References**: Wenzel et al. (2020), How good is the Bayes posterior in deep neural networks really?

    **Example**:

    >>> Tempering.cold(0.5)
    Tempering(likelihood_power=2.0, prior_power=2.0)
    >>> Tempering.tempered(4.0).eta
    4.0
    """

    likelihood_power: float | Tensor = 1.0
    prior_power: float | Tensor = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            positive(f"Tempering.{field.name}", value, "or one for each member, (M,)")
            if isinstance(value, Tensor) and value.dim() == 0:
                object.__setattr__(self, field.name, float(value))
            if isinstance(value, Tensor) and value.dim() > 1:
                raise ValueError(
                    f"Tempering.{field.name} must be a number or one for each member, (M,). Got {shown(value)}."
                )
        self.num_members  # noqa: B018  both powers must agree on M

    def _content(self) -> tuple[object, ...]:
        powers = [torch.as_tensor(getattr(self, f.name), dtype=torch.float64, device="cpu") for f in fields(self)]
        return tuple((tuple(power.shape), *power.reshape(-1).tolist()) for power in powers)

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Tempering) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    @classmethod
    def bayes(cls) -> "Tempering":
        """The posterior itself."""
        return cls(1.0, 1.0)

    @classmethod
    def tempered(cls, eta: float | Tensor) -> "Tempering":
        """The posterior proportional to L^(1/eta) P0."""
        positive("Tempering.tempered: eta", eta, "or one for each member, (M,)")
        return cls(1.0 / eta, 1.0)

    @classmethod
    def cold(cls, temperature: float | Tensor) -> "Tempering":
        """The posterior proportional to (L P0)^(1/temperature)."""
        positive("Tempering.cold: temperature", temperature, "or one for each member, (M,)")
        return cls(1.0 / temperature, 1.0 / temperature)

    @classmethod
    def balanced(cls, tau: float | Tensor, num_data: int, units: int) -> "Tempering":
        """`tempered(tau * num_data / units)`, with which the optimum of a wide network does not depend on its width.

        `units` is a count of neurons, as in the theorem for one hidden layer, or of parameters, which serves deep
        networks, too: `model.neurons(net)` and `model.parameters(net)` find it. The two differ by the number d of
        weights for each neuron, hence tau for parameters is d times tau for neurons. tau itself depends on prior and
        data, not on the width: choose it on validation rows (`inference.choose_tempering`), from 1 downwards.
        """
        positive("Tempering.balanced: tau", tau, "or one for each member, (M,)")
        positive("Tempering.balanced: num_data", num_data)
        positive("Tempering.balanced: units", units)
        return cls.tempered(tau * num_data / units)

    @property
    def eta(self) -> float | Tensor:
        """The factor of the KL in the bound E log p - eta KL of this target: prior_power / likelihood_power.

        Under `tempered(eta)` it is eta; under `cold` it is 1, and the powers sharpen the bound's optimum instead.
        """
        return self.prior_power / self.likelihood_power

    def kl_weight(self, num_data: int, rows: int = 1) -> float | Tensor:
        """The factor of KL(q || prior), summed over all weights, that other libraries want beside their data loss.

        That loss is the mean of -log p over the rows of a batch, or with `rows` its sum over that many: eta rows /
        num_data. `rows=num_data` is the bound over all data, E log p - eta KL. A KL that a library has already averaged
        over the weights or divided by something needs that factor as well. A power of the prior other than 1 is no
        factor of a KL: a ValueError.

        >>> Tempering.tempered(0.5).kl_weight(num_data=100)
        0.005
        """
        weight = self._per_row("kl_weight", num_data, rows)
        prior_power = self.prior_power
        if not bool((prior_power == 1.0).all() if isinstance(prior_power, Tensor) else prior_power == 1.0):
            raise ValueError(
                "Tempering.kl_weight needs prior_power = 1: no factor of the KL gives a prior of another power. "
                f"Got {shown(prior_power)}. For a normal prior use tempered(T), and a prior scale times sqrt(T) for "
                "what cold(T) means."
            )
        return weight

    def weight_decay(self, prior_scale: float | Tensor, num_data: int, rows: int = 1) -> float | Tensor:
        """The `weight_decay` d of torch's SGD and Adam, with gradient d w, that is a prior N(0, prior_scale^2).

        It goes with a data loss that is the mean of -log p over the rows of a batch, or with `rows` its sum over that
        many: eta rows / (num_data prior_scale^2). `AdamW` decays otherwise: its fixed point is not a mode of this
        density.

        >>> Tempering.bayes().weight_decay(prior_scale=0.5, num_data=100)
        0.04
        """
        positive("Tempering.weight_decay: prior_scale", prior_scale)
        return self._per_row("weight_decay", num_data, rows) / prior_scale**2

    def prior_scale(self, weight_decay: float | Tensor, num_data: int, rows: int = 1) -> float | Tensor:
        """The scale of the prior N(0, scale^2) of a `weight_decay` of torch's SGD and Adam: the inverse of it.

        >>> Tempering.bayes().prior_scale(weight_decay=0.04, num_data=100)
        0.5
        """
        positive("Tempering.prior_scale: weight_decay", weight_decay)
        scale: float | Tensor = (self._per_row("prior_scale", num_data, rows) / weight_decay) ** 0.5
        return scale

    def _per_row(self, user: str, num_data: int, rows: int) -> float | Tensor:
        positive(f"Tempering.{user}: num_data", num_data)
        positive(f"Tempering.{user}: rows", rows)
        return self.eta * (rows / num_data)

    @property
    def num_members(self) -> int | None:
        """M when a power differs by member, else None."""
        powers = (self.likelihood_power, self.prior_power)
        sizes = {power.numel() for power in powers if isinstance(power, Tensor) and power.dim()}
        if len(sizes) > 1:
            raise ValueError(
                f"Tempering: both powers must have one value for each member. Got {sorted(sizes)} values. "
                "Give both the same length, or one of them as a plain number."
            )
        return sizes.pop() if sizes else None

    def member(self, index: int) -> "Tempering":
        """The tempering of one member."""
        powers = (self.likelihood_power, self.prior_power)
        return Tempering(*(float(p[index]) if isinstance(p, Tensor) and p.dim() else p for p in powers))


@dataclass(frozen=True)
class Reported:
    """A temperature from the literature: `paper`, the `lowest` and `highest` value, and its `meaning` in one line.

    `tempering` makes it a `Tempering`: `Tempering.tempered` where the value is the factor eta of the KL, which leaves
    the prior as it is, `Tempering.cold` where it is a T that is the power of likelihood and prior alike. Both ends are
    None where a direction was reported and no number.

    >>> LITERATURE["osawa-2019"].ends
    (Tempering(likelihood_power=5.0, prior_power=1.0), Tempering(likelihood_power=10.0, prior_power=1.0))
    """

    paper: str
    tempering: Callable[[float | Tensor], Tempering]
    meaning: str
    lowest: float | None = None
    highest: float | None = None

    @property
    def ends(self) -> tuple[Tempering, Tempering]:
        """The temperings of the highest and of the lowest value."""
        lowest, highest = self._range()
        return self.tempering(highest), self.tempering(lowest)

    def grid(self, count: int) -> Tempering:
        """`count` values from lowest to highest, log-spaced, as members: for `choose_tempering`.

        >>> LITERATURE["ashukha-2020"].grid(3).eta
        tensor([1.0000e-05, 1.0000e-04, 1.0000e-03], dtype=torch.float64)
        """
        positive_whole("Reported.grid: count", count)
        lowest, highest = (math.log(value) for value in self._range())
        return self.tempering(torch.linspace(lowest, highest, count, dtype=torch.float64).exp())

    def _range(self) -> tuple[float, float]:
        if self.lowest is None or self.highest is None:
            raise ValueError(
                f"{self.paper} reported no range: {self.meaning} Choose values of your own, on validation rows."
            )
        return self.lowest, self.highest


LITERATURE: dict[str, Reported] = {
    "zhang-2018": Reported(
        "Zhang et al. (2018), Noisy natural gradient as variational inference",
        Tempering.tempered,
        "the KL to the prior is weighed by eta, a half to a tenth.",
        1 / 10,
        1 / 2,
    ),
    "osawa-2019": Reported(
        "Osawa et al. (2019), Practical deep learning with Bayesian principles",
        Tempering.tempered,
        "the KL to the prior is weighed by eta, a fifth to a tenth.",
        1 / 10,
        1 / 5,
    ),
    "ashukha-2020": Reported(
        "Ashukha et al. (2020), Pitfalls of in-domain uncertainty estimation and ensembling in deep learning",
        Tempering.tempered,
        "the KL to the prior is weighed by eta, which is nearly nothing: close to a maximum of the likelihood.",
        1e-5,
        1e-3,
    ),
    "wenzel-2020": Reported(
        "Wenzel et al. (2020), How good is the Bayes posterior in deep neural networks really?",
        Tempering.cold,
        "likelihood and prior have the power 1/T, and test scores improve for T far below 1.",
    ),
}
"""Temperatures that papers report, by paper and year.

The ranges come from a table in the literature that reads each paper's own symbol as the factor eta of the KL. They hold
for the networks and data of these papers: values to start from, no more.
"""
