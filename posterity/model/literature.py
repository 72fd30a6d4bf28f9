"""Temperatures that were reported to work, and what they are here."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive_whole
from posterity.model.tempering import Tempering


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
        """So many values from lowest to highest, evenly in their logarithms, as members: for `choose_tempering`.

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


# Ranges at second hand: a table of temperatures from the literature, read as the factor eta of the KL, for which papers
# have symbols of their own. They hold for the networks and data of these papers: a place to start from, no more.
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
