"""A posterior whose moments are known, ready to be sampled."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from posterity.kernels.adaptation import DenseMass, DiagonalMass
from posterity.methods.nuts import NUTS
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.numerics.random import Key

Values = dict[str, Tensor]
SPREAD = 2.0  # of starts, beside the standard errors: R-hat wants them wider than the posterior
DEPTH = 7  # of trees: enough with the mass matrix that is learnt, and without it the deeper ones would be far too many


@dataclass(frozen=True, eq=False)
class Model:
    """A problem with its rows (None for a density), and what the reference calls the parameters.

    `reported` makes these, (C, D) or (C, D, K) each, of the values that `Samples.values` gives. Strongly `correlated`
    ones are sampled with a dense mass matrix; `target_accept` is that of NUTS. `start` has centre and scale (P,) of
    normal numbers at which chains start, None for those of the problem.
    """

    name: str
    problem: Density | Joint
    rows: tuple[Tensor, Tensor] | None = None
    reported: Callable[[Values], Values] = dict
    correlated: bool = False
    target_accept: float = 0.8
    start: tuple[Tensor, Tensor] | None = None

    def sampler(self, draws: int, warmup: int, chains: int) -> NUTS:
        """NUTS as it suits the model."""
        mass = DenseMass() if self.correlated else DiagonalMass()
        return NUTS(draws, warmup, chains, target_accept=self.target_accept, max_depth=DEPTH, mass=mass)

    def starts(self, chains: int, key: Key) -> Tensor | None:
        """Where that many chains start, (C, P), or None."""
        if self.start is None:
            return None
        centre, scale = self.start
        return centre + SPREAD * scale * key.normal((chains, len(centre)), centre.dtype, centre.device)


def flat(values: Values) -> dict[str, Tensor]:
    """Each entry of each parameter by itself, (C, D), named as in a table: "beta[1]", "sigma".

    >>> import torch
    >>> list(flat({"beta": torch.zeros(4, 9, 2), "sigma": torch.ones(4, 9)}))
    ['beta[1]', 'beta[2]', 'sigma']
    """
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if value.dim() == 2:
            found[name] = value
        else:
            found.update({f"{name}[{index + 1}]": part for index, part in enumerate(value.unbind(-1))})
    return found
