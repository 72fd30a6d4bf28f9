"""Expectation maximisation with steps in closed form."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import BoundFell, Diverged, positive, positive_whole, shown
from posterity.inference.method import Footprint, Info, Method, Traits, theta_bytes
from posterity.methods.coordinate_ascent import Latent, Values, fell
from posterity.model import Batch, Data, Density, Feed, Problem
from posterity.numerics.random import Key
from posterity.posteriors.point import Point

logger = logging.getLogger("posterity")


class ExpectationMaximizationState(NamedTuple):
    """theta (R, P) of the restarts, and q of the hidden variables and the bounds (R,) of the last round.

    `touching` is the bound after the E-step and `bound` after the M-step. Rows that are `done` have converged or
    failed; rows not `alive` came to numbers that are not finite or violate the constraints of the `Density`, and hold
    the last good ones.
    """

    theta: Tensor
    latent: dict[str, Tensor]
    touching: Tensor
    bound: Tensor
    done: Tensor
    alive: Tensor
    round: int


@dataclass(frozen=True)
class ExpectationMaximization(Method):
    """EM for a model with hidden variables z, whose two steps are known: a bound that never falls.

    **Math**: F(q, theta) = E_q log p(y, z | theta) - E_q log q <= log p(y | theta). Each step of the run is an E-step,
    q <- `expectation(values, latent)`, and an M-step, theta <- `maximisation(values, latent)`; `bound(values, latent)`
    is F. The problem is a `Density` that names the parameters ("values", a dict of tensors); `latent` is a dict of
    tensors that holds all that the M-step needs of q (responsibilities, or expected statistics). The first E-step gets
    {}, a later one the result of the round before, for E-steps that improve a q step by step (`CoordinateAscent`). The
    trace has "bound" after each E-step, where it touches log p(y | theta) if that is exact, and "bound_after_m"; both
    are -inf for a restart that has failed. A run ends when the bound of each restart has changed by at most `tolerance`
    of itself, or `absolute` nats, or after `rounds`.

    `restarts` runs from `initial_values(key)` (a dict of values; None: standard normal theta) go together, or one from
    each row of `start`; the best is the posterior. With `batched` the functions take tensors with a leading axis of
    restarts, and `bound` gives (R,); restarts that have converged are left out.

    **Limit**: a local maximum, or a saddle, of log p(y | theta) or of a bound on it. If the steps are `exact`, neither
    may lower the bound by more than rounding, 1e-10 of it (in float64): an error names the step that does.

    **Cost**: the cost of the functions.

    **References**: Dempster, Laird and Rubin (1977); Neal and Hinton (1998), A view of the EM algorithm, theorem 2.

    **Example**: a mixture of two Poisson counts of known equal weights.

    >>> import posterity as po
    >>> from posterity.evidence import jensen
    >>> y = torch.tensor([[0.0], [1.0], [1.0], [2.0], [9.0], [11.0], [12.0]])
    >>> def log_joint(values):
    ...     return torch.xlogy(y, values["rates"]) - values["rates"] - torch.lgamma(y + 1) - 0.6931472
    >>> em = po.methods.ExpectationMaximization(
    ...     expectation=lambda values, latent: {"q": jensen.posterior(log_joint(values))},
    ...     maximisation=lambda values, latent: {"rates": (latent["q"] * y).sum(0) / latent["q"].sum(0)},
    ...     bound=lambda values, latent: jensen.jensen_bound(log_joint(values), latent["q"]).sum(),
    ... )
    >>> density = po.Density(lambda rates: jensen.log_likelihood(log_joint({"rates": rates})).sum(), {"rates": (2,)})
    >>> q, trace = po.infer(em, density, None, start=torch.tensor([1.0, 5.0]))
    >>> [round(rate, 1) for rate in q.theta.tolist()]
    [1.0, 10.6]
    """

    expectation: Callable[[Values, Latent], Latent] = field(repr=False)
    maximisation: Callable[[Values, Latent], Values] = field(repr=False)
    bound: Callable[[Values, Latent], Tensor] = field(repr=False)
    rounds: int = 1000
    tolerance: float = 1e-8
    absolute: float = 0.0
    exact: bool = True
    batched: bool = False
    restarts: int = 1
    initial_values: Callable[[Key], Values] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("expectation", "maximisation", "bound"):
            if not callable(getattr(self, name)):
                raise TypeError(
                    f"ExpectationMaximization.{name} must be a function of (values, latent). "
                    f"Got {shown(getattr(self, name))}."
                )
        initial: object = self.initial_values
        if not (initial is None or callable(initial)):
            raise TypeError(
                f"ExpectationMaximization.initial_values must be a function of a Key, or None. Got {shown(initial)}."
            )
        positive_whole("ExpectationMaximization.rounds", self.rounds)
        positive_whole("ExpectationMaximization.restarts", self.restarts)
        for name in ("tolerance", "absolute"):
            if getattr(self, name) != 0.0:
                positive(f"ExpectationMaximization.{name}", getattr(self, name), "or 0")

    @property
    def traits(self) -> Traits:
        return Traits(takes_members=False, row="restart")

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        words = f"EM over {joint.size:,} numbers, {self.restarts} restart{'s' if self.restarts > 1 else ''}"
        return Footprint(words, {"values": 3 * self.restarts * theta_bytes(joint)})

    def batches(self, data: Data, key: Key) -> Feed:
        return data.minibatches(None, self.rounds, key)

    def initial(self, joint: Problem, key: Key) -> Tensor:
        keys = [key.fold(index) for index in range(self.restarts)]
        if self.initial_values is None:
            return torch.stack([joint.fresh(own) for own in keys])
        return torch.stack([_density(joint).unconstrained(self.initial_values(own)) for own in keys]).to(joint.dtype)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> ExpectationMaximizationState:
        _density(joint)
        rows = theta.reshape(-1, theta.shape[-1]).clone()
        zeros = rows.new_zeros(len(rows), dtype=torch.float64)
        return ExpectationMaximizationState(rows, {}, zeros, zeros.clone(), zeros.bool(), ~zeros.bool(), 0)

    def step(
        self, joint: Problem, state: ExpectationMaximizationState, batch: Batch, key: Key
    ) -> tuple[ExpectationMaximizationState, Info]:
        """Run one round: an E-step and an M-step of the restarts that are not done."""
        density, first = _density(joint), state.round == 0
        rows = (~state.done).nonzero().squeeze(-1)
        values = density.constrained(state.theta[rows])
        latent = self._called("expectation", values, {name: each[rows] for name, each in state.latent.items()})
        touching = self._bounds(values, latent)
        before, at_start = state.bound[rows].to(touching), state.touching[rows].to(touching)
        if self.exact and not first:
            self._refuse_fall("E", state, rows, before, touching)
        moved = self._moved(values, latent)
        raised = self._bounds(moved, latent)
        if self.exact:
            self._refuse_fall("M", state, rows, touching, raised)
        good = torch.isfinite(touching) & torch.isfinite(raised) & _inside(density, moved)
        if not bool(good.any()) and not bool(state.alive[state.done].any()):
            which = "of every restart " if len(state.theta) > 1 else ""
            raise Diverged(
                f"ExpectationMaximization: in step {state.round + 1} the bound or the values {which}are not finite, or "
                "lie on the edge of the Density's constraints or outside. Begin elsewhere, or look at what the "
                "functions give.",
                step=state.round + 1,
                tensor="the bound or the values",
            )
        for name, value in moved.items():
            moved[name] = torch.where(good.reshape(-1, *(1,) * (value.dim() - 1)), value, values[name])
        near = (touching - at_start).abs() <= (self.tolerance * touching.abs()).clamp(min=self.absolute)
        stopped = ~good if first else ~good | near
        if len(rows) < len(state.theta):
            latent = {name: state.latent[name].index_copy(0, rows, value) for name, value in latent.items()}
        state = ExpectationMaximizationState(
            state.theta.index_copy(0, rows, density.unconstrained(moved)),
            latent,
            state.touching.index_copy(0, rows, torch.where(good, touching, at_start).to(torch.float64)),
            state.bound.index_copy(0, rows, torch.where(good, raised, before).to(torch.float64)),
            state.done.index_copy(0, rows, stopped),
            state.alive.index_copy(0, rows, good),
            state.round + 1,
        )
        touching, bound = (torch.where(state.alive, each, -torch.inf) for each in (state.touching, state.bound))
        return state, {"bound": touching, "bound_after_m": bound, "loss": -bound.max()}

    def finished(self, state: ExpectationMaximizationState) -> str:
        return f"the bound stands still after {state.round} rounds" if bool(state.done.all()) else ""

    def keep(self, state: ExpectationMaximizationState) -> ExpectationMaximizationState:
        return state._replace(latent={})

    def posterior(self, joint: Problem, kept: Sequence[ExpectationMaximizationState]) -> Point:
        last = kept[-1]
        if not bool(last.alive.all()):
            failed = ", ".join(map(str, (~last.alive).nonzero().flatten().tolist()))
            logger.warning(
                f"ExpectationMaximization: of {len(last.alive)} restarts, these came to values or bounds that are not "
                f"finite, or outside the constraints, and are left out: {failed} (counted from 0). Look at where they "
                "began."
            )
        best = int(torch.where(last.alive, last.bound, -torch.inf).argmax())
        return Point(joint, last.theta[best])

    def _called(self, name: str, values: Values, latent: Latent) -> dict[str, Tensor]:
        """Call a function for each restart; returns tensors with a leading axis of restarts."""
        function, count = getattr(self, name), len(next(iter(values.values())))
        if not self.batched:
            each = [_tensors(name, function(_row(values, index), _row(latent, index))) for index in range(count)]
            return {key: torch.stack([tensors[key] for tensors in each]) for key in each[0]}
        result = _tensors(name, function(values, latent))
        for key, tensor in result.items():
            if tensor.shape[:1] != (count,):
                raise ValueError(
                    f"ExpectationMaximization.{name} must give '{key}' with a leading axis of {count} restarts, since "
                    f"it is batched. Got shape {tuple(tensor.shape)}."
                )
        return result

    def _moved(self, values: Values, latent: Latent) -> dict[str, Tensor]:
        """The values after the M-step, checked against the names, shapes and dtypes of the Density."""
        moved = self._called("maximisation", values, latent)
        for name, value in values.items():
            if name not in moved or moved[name].shape != value.shape:
                got = f"shape {tuple(moved[name].shape[1:])}" if name in moved else ", ".join(sorted(moved))
                raise ValueError(
                    f"ExpectationMaximization.maximisation must give '{name}' of shape {tuple(value.shape[1:])}, as "
                    f"the Density names it. Got {got}."
                )
            if moved[name].dtype != value.dtype:
                raise TypeError(
                    f"ExpectationMaximization.maximisation must give '{name}' as {value.dtype}, which is that of the "
                    f"Density. Got {moved[name].dtype}. Make the Density with dtype= as the data have."
                )
        return {name: moved[name].detach() for name in values}

    def _bounds(self, values: Values, latent: Latent) -> Tensor:
        """The bound of each restart, (R,)."""
        count = len(next(iter(values.values())))
        rows = [(values, latent)] if self.batched else [(_row(values, k), _row(latent, k)) for k in range(count)]
        each = [self.bound(*row) for row in rows]
        for bound in each:
            if not isinstance(bound, Tensor) or not bound.is_floating_point():
                raise TypeError(f"ExpectationMaximization.bound must be a tensor of real numbers. Got {shown(bound)}.")
        bounds = each[0] if self.batched else torch.stack(each)
        if bounds.shape != (count,):
            wanted = "one number for each restart" if self.batched else "one number"
            raise ValueError(
                f"ExpectationMaximization.bound must be {wanted}, summed over the data. "
                f"Got shape {tuple(bounds.shape if self.batched else bounds.shape[1:])}."
            )
        return bounds.detach()

    def _refuse_fall(
        self, step: str, state: ExpectationMaximizationState, rows: Tensor, before: Tensor, after: Tensor
    ) -> None:
        """Raise `BoundFell` if the bound of a restart is lower than it was."""
        lower = fell(before, after)
        if not bool(lower.any()):
            return
        index = int(lower.nonzero()[0, 0])
        which = f" of restart {int(rows[index])}" if len(state.theta) > 1 else ""
        name = {"E": "expectation", "M": "maximisation"}[step]
        raise BoundFell(
            f"The {step}-step of round {state.round + 1}{which} lowered the bound from {float(before[index]):.12g} to "
            f"{float(after[index]):.12g}, which an exact one cannot. Mend `{name}` or `bound`, or say exact=False."
        )


def _density(joint: Problem) -> Density:
    if not isinstance(joint, Density):
        raise TypeError(
            "ExpectationMaximization needs a Density, which names the parameters of the model. "
            f"Got a {type(joint).__name__}. For the hyper-parameters of a network use VariationalEM."
        )
    return joint


def _tensors(name: str, result: object) -> dict[str, Tensor]:
    """The result of a function, checked to be a dict of tensors."""
    if not isinstance(result, Mapping) or not all(isinstance(each, Tensor) for each in result.values()):
        raise TypeError(f"ExpectationMaximization.{name} must give a dict of tensors. Got {shown(result)}.")
    return dict(result)


def _inside(density: Density, values: Values) -> Tensor:
    """Whether the values of each restart are finite and inside the constraints, (R,)."""
    good = torch.stack([torch.isfinite(value).reshape(len(value), -1).all(1) for value in values.values()]).all(0)
    for name, constraint in density.constraints.items():
        value, theta = values[name].reshape(len(good), -1), constraint.inverse(values[name])
        away = (constraint.forward(theta)[0].reshape(value.shape) - value).abs().amax(1)
        allowed = torch.finfo(value.dtype).eps ** 0.5 * value.abs().amax(1)
        good &= torch.isfinite(theta).reshape(len(good), -1).all(1) & (away <= allowed)
    return good


def _row(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    return {name: tensor[index] for name, tensor in tensors.items()}
