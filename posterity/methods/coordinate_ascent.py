"""Coordinate ascent for a factorised q: each factor in turn is updated to the optimum given the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posterity.errors import BoundFell, positive, positive_whole, shown
from posterity.evidence.jensen import jensen_bound, posterior

Values = Mapping[str, Tensor]
Latent = Mapping[str, Tensor]


def fell(before: Tensor, after: Tensor) -> Tensor:
    """Whether a bound fell by more than rounding: 1e-10 of it, or 1,000 times the precision of its dtype.

    >>> fell(torch.tensor(-2.0, dtype=torch.float64), torch.tensor(-2.1, dtype=torch.float64))
    tensor(True)
    """
    slack = max(1e-10, 1e3 * torch.finfo(after.dtype).eps)
    return after < before - slack * before.abs().clamp(min=1.0)


@dataclass(frozen=True)
class CoordinateAscent:
    """An E-step for `ExpectationMaximization`: q(z) = prod_j q_j(z_j), one factor after another, until nothing changes.

    **Math**: q_j is proportional to exp E_{q_-j} log p(y, z | theta), which is the best q_j for the other factors, so
    that no update lowers the bound E_q log p(y, z | theta) - E_q log q. `updates` has one function
    (values, factors) -> new factor for each name, `bound` is (values, factors) -> (), and `start` gives the factors to
    begin with, where there are none of the round before. It stops when a sweep over all factors changes the bound by no
    more than `tolerance` of itself, or after `sweeps` of them. `discrete` makes all of these for hidden variables with
    finitely many values.

    **Limit**: a local optimum of the bound in q, which depends on the start. With one factor for everything it is the
    exact posterior, and variational EM is EM. An update that lowers the bound is an error that names its factor. Where
    the other factors leave no value of a variable possible (log p(y, z) of -inf), its factor is NaN: begin elsewhere.

    **Cost**: one update of each factor and as many bounds in every sweep.

    **References**: Bishop (2006), section 10.1.1; Beal (2003), Variational algorithms for approximate Bayesian
    inference, theorem 2.1.

    **Example**: two coins of which only the sum is known.

    >>> table = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]).log()  # p(y = 1 | z1, z2) for one point, up to a factor
    >>> steps = CoordinateAscent.discrete(lambda values: table, {"all": (0, 1)})
    >>> steps({}, {})["all"]
    tensor([[[0.0000, 0.5000],
             [0.5000, 0.0000]]])
    """

    updates: Mapping[str, Callable[[Values, Latent], Tensor]] = field(repr=False)
    bound: Callable[[Values, Latent], Tensor] = field(repr=False)
    start: Callable[[Values], Latent] = field(repr=False)
    sweeps: int = 1000
    tolerance: float = 1e-12

    def __post_init__(self) -> None:
        if not isinstance(self.updates, Mapping) or not self.updates:
            raise TypeError(
                f"CoordinateAscent.updates must have one function for each factor. Got {shown(self.updates)}."
            )
        positive_whole("CoordinateAscent.sweeps", self.sweeps)
        positive("CoordinateAscent.tolerance", self.tolerance)

    @classmethod
    def discrete(
        cls,
        log_joint: Callable[[Values], Tensor],
        factors: Mapping[str, tuple[int, ...]],
        sweeps: int = 1000,
        tolerance: float = 1e-12,
    ) -> "CoordinateAscent":
        """For hidden variables z_1 .. z_J of finitely many values, from log p(y_n, z | values), (N, K1, ..., KJ).

        `factors` names the factors of q, each with the hidden variables that it is a distribution of, numbered from 0:
        {"q": (0, 1)} is unrestricted, {"first": (0,), "second": (1,)} is the mean-field one. A factor is (N, K, ...) in
        the order of its variables. All begin uniform: give `start` in the class itself for another beginning.
        """
        given = [axes if isinstance(axes, (tuple, list)) else () for axes in factors.values()]
        every = sorted(axis for axes in given for axis in axes)
        if not every or not all(given) or every != list(range(len(every))):
            raise ValueError(
                "CoordinateAscent.discrete: factors must be tuples with each hidden variable once, from 0 on. "
                f"Got {shown(dict(factors))}."
            )
        hidden = len(every)

        def spread(name: str, factor: Tensor) -> Tensor:
            """Return the factor with an axis for each hidden variable, of length 1 for variables of other factors."""
            axes = factors[name]
            order = [1 + axes.index(axis) for axis in sorted(axes)]
            shape = [factor.shape[1 + axes.index(axis)] if axis in axes else 1 for axis in range(hidden)]
            return factor.permute(0, *order).reshape(len(factor), *shape)

        def whole(latent: Latent) -> Tensor:
            product = torch.ones(())
            for name, factor in latent.items():
                spreading = spread(name, factor)
                product = spreading * product.to(spreading)
            return product

        def update(name: str, values: Values, latent: Latent) -> Tensor:
            table, axes, present = log_joint(values), factors[name], list(range(hidden))
            others = {other: factor for other, factor in latent.items() if other != name}
            if others:
                rest, present = whole(others), sorted(axes)
                dims = tuple(1 + axis for axis in range(hidden) if axis not in axes)
                table = torch.where(rest == 0, 0.0, rest * table).sum(dims)
            table = table.permute(0, *(1 + present.index(axis) for axis in axes))
            return posterior(table, len(axes))

        def bound(values: Values, latent: Latent) -> Tensor:
            return jensen_bound(log_joint(values), whole(latent), hidden).sum()

        def uniform(values: Values) -> dict[str, Tensor]:
            table = log_joint(values)
            if table.dim() != 1 + hidden:
                raise ValueError(
                    f"CoordinateAscent.discrete: log_joint must be (N, K1, ..., K{hidden}), one axis for each hidden "
                    f"variable of the factors. Got shape {tuple(table.shape)}."
                )
            sizes = {name: [table.shape[1 + axis] for axis in axes] for name, axes in factors.items()}
            return {
                name: table.new_full((len(table), *size), 1.0 / torch.Size(size).numel())
                for name, size in sizes.items()
            }

        updates = {name: (lambda values, latent, name=name: update(name, values, latent)) for name in factors}
        return cls(updates, bound, uniform, sweeps, tolerance)

    def __call__(self, values: Values, latent: Latent) -> dict[str, Tensor]:
        """Return the factors after the last sweep, starting from `latent`, or from `start` where it is empty."""
        factors = dict(latent) if latent else dict(self.start(values))
        before = self.bound(values, factors)
        for sweep in range(self.sweeps):
            first = before
            for name, update in self.updates.items():
                factors[name] = update(values, factors)
                after = self.bound(values, factors)
                if bool(fell(before, after)):
                    raise BoundFell(
                        f"CoordinateAscent: the update of the factor '{name}' in sweep {sweep + 1} lowered the bound "
                        f"from {float(before):.10g} to {float(after):.10g}. "
                        "It must be exp E log p(y, z) over the other factors."
                    )
                before = after
            small = self.tolerance * max(1.0, abs(float(before)))
            if not bool(torch.isfinite(before)) or float(before - first) <= small:
                break
        return factors
