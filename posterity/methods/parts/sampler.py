"""Base of all samplers over all rows, such as NUTS: warm-up, transitions, kept draws."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from posterity.errors import BadData, Diverged, fraction, positive, shown
from posterity.inference.acceleration import Potential, potential, rows_at_once
from posterity.inference.allocations import gradient_bytes
from posterity.inference.kept import kept_bytes, stacked
from posterity.inference.method import Effort, Footprint, Info, Traits
from posterity.inference.run import FAR
from posterity.kernels.adaptation import (
    CALM_SHARE,
    CALM_SHRINKAGE,
    SHRINKAGE,
    UPWARDS,
    DualAveraging,
    Mass,
    Moments,
    averaged,
    averaging_from,
    no_moments,
    windows,
    with_positions,
)
from posterity.kernels.hamiltonian import leapfrog, log_joint
from posterity.kernels.state import Move, Place, gathered, spread, whitened
from posterity.methods.parts.chains import Chains, warn_of_doubtful, warn_of_unmixed
from posterity.model import Joint, Problem
from posterity.model.data import Batch, Data, Feed, in_memory
from posterity.numerics.random import Key
from posterity.posteriors.samples import Samples


class KeptDraw(NamedTuple):
    """Draws theta (C, P) of all chains, with their log densities and statistics of the last transitions, (C,).

    `divergent`: whether any transition diverged since the draw kept before, or since the warm-up.
    """

    theta: Tensor
    log_density: Tensor
    accept: Tensor
    energy: Tensor
    divergent: Tensor
    leapfrogs: Tensor
    depth: Tensor
    step_size: Tensor


class Tuning(NamedTuple):
    """Settings of transitions: step sizes (C,) of chains, and scales (G, P) or (G, P, P) of groups of chains.

    Some samplers add the lengths of trajectories (C,), and velocities (C, P) that go on through transitions.
    """

    step_size: Tensor
    scale: Tensor
    length: Tensor | None = None
    velocity: Tensor | None = None

    def stored(self) -> dict[str, Tensor]:
        """Return the settings that there are, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


Adaptation: TypeAlias = dict[str, dict[str, Tensor]]
"""What a warm-up has learnt: the fields of `DualAveraging` as "search", of `Moments` as "moments", and more by name."""


@dataclass(frozen=True)
class Warmup:
    """The schedule of a warm-up of `steps` transitions: the step size all the time, the mass matrix in windows.

    `accept` is the wanted probability of acceptance, None where the step size is held. Chains that learn together reach
    it on average, or, where `cautious`, in the harmonic mean, which gives weight to chains that accept less than others
    (Hoffman and Sountsov, 2022). `mass` says what is learnt of the scales. Chains of one problem, a group, share what
    they learn, but for the step size until the last mass matrix is made: a chain that starts where the density is
    steep only gets away with small steps of its own, and would count for little among many. Where `calm`, the search
    for the step size after the last mass matrix is long and moves little, as single proposals need. Where `lockstep`,
    chains share the step size all the time, as trajectories of one number of steps need.
    """

    steps: int
    accept: float | None
    mass: Mass
    cautious: bool = False
    calm: bool = False
    lockstep: bool = False

    def begun(self, tuning: Tuning, step: int = 0) -> Adaptation:
        """Return the adaptation before transition `step`: the first, or one after a change of the scale."""
        groups = tuning.scale.shape[0]
        _, ends = self.windows(len(tuning.step_size) // groups)
        search = averaging_from(tuning.step_size, 1.0 if self._settles(step, ends) else UPWARDS)
        return {"search": search._asdict(), "moments": no_moments(tuning.scale)._asdict()}

    def windows(self, chains: int) -> tuple[int, tuple[int, ...]]:
        """Return the windows in which groups of so many chains learn their scales."""
        return windows(self.steps, chains, CALM_SHARE if self.calm else 0.0)

    def together(self, step: int, chains: int) -> bool:
        """Whether groups of so many chains share the step size at this transition."""
        _, ends = self.windows(chains)
        return self.lockstep or not ends or step >= ends[-1]

    def _settles(self, step: int, ends: tuple[int, ...]) -> bool:
        """Whether the search at this transition is a calm one."""
        return self.calm and bool(ends) and step >= ends[-1]

    def learnt(
        self, adaptation: Adaptation, tuning: Tuning, step: int, theta: Tensor, accept: Tensor
    ) -> tuple[Adaptation, Tuning, bool]:
        """Update from transition `step` (from 0), which led to theta (C, P); also returns whether the scale changed.

        Where it has changed, a step size must be found anew: see `begun`.
        """
        groups = tuning.scale.shape[0]
        first, ends = self.windows(len(theta) // groups)
        together = self.together(step, len(theta) // groups)
        search, moments = DualAveraging(**adaptation["search"]), Moments(**adaptation["moments"])
        if self.accept is not None:
            rate = accept
            if together and self.cautious and groups < len(accept):
                rate = 1.0 / shared(1.0 / accept.clamp(min=LEAST_ACCEPT), groups)
            elif together:
                rate = shared(accept, groups)
            search = averaged(search, rate, self.accept, CALM_SHRINKAGE if self._settles(step, ends) else SHRINKAGE)
            tuning = tuning._replace(step_size=search.log_step.exp())
        changed = step + 1 in ends
        if self.mass.learns and first <= step < (ends[-1] if ends else 0):
            moments = with_positions(moments, theta)
            if changed:
                tuning = tuning._replace(scale=self.mass.scale(moments))
        if step + 1 == self.steps and self.accept is not None:
            tuning = tuning._replace(step_size=search.average.exp())
        return {**adaptation, "search": search._asdict(), "moments": moments._asdict()}, tuning, changed


def shared(values: Tensor, groups: int) -> Tensor:
    """Mean of values (C,) over the group of each chain, (C,).

    >>> import torch
    >>> shared(torch.tensor([1.0, 3.0, 4.0, 6.0]), groups=2)
    tensor([2., 2., 5., 5.])
    """
    rows = values.reshape(groups, -1)
    return rows.mean(1, keepdim=True).expand_as(rows).reshape(-1)


logger = logging.getLogger("posterity")

LEAST_ACCEPT = 0.1  # a lower probability of acceptance counts as this, so that no single chain decides for all
SMALLEST = 2.0**-25  # least uniform number, of multiples of 2^-24: 0 would accept every proposal, however bad
LONG = 2000  # transitions that are worth a second, in which their operations are recorded
LOOK, SOME, MUCH = 100, 20_000, 70_000  # after LOOK transitions: leapfrogs expected that are worth it, or compilation
SURELY, MANY = 4, 16  # times as many for chains in step at first; chains whose work takes as long as a leapfrog's calls


class SamplerState(NamedTuple):
    """State of the chains after `step` transitions.

    `draw` has theta (C, P) with its statistics; `grad` (C, P) is the gradient there in whitened coordinates. The first
    step makes the `tuning`; `adaptation` is empty after the warm-up. `leapfrogs` counts those taken so far.
    """

    draw: KeptDraw
    grad: Tensor
    tuning: dict[str, Tensor]
    adaptation: Adaptation
    step: int
    leapfrogs: int

    @property
    def place(self) -> Place:
        """Where the chains are, with the gradient in whitened coordinates."""
        return Place(self.draw.theta, self.draw.log_density, self.grad)


class Sampler(Chains):
    """A Markov chain over all data: `warmup` transitions that adapt it, then every `thin`-th of `draws * thin` kept.

    Rows of theta are chains. One step of a run is one transition of all of them.
    """

    cautious: ClassVar[bool] = False
    """Whether chains that accept less than others count more, see `Warmup`: for trajectories of many leapfrogs."""

    calm: ClassVar[bool] = False
    """Whether the step size is searched calmly at the end of the warm-up, see `Warmup`: for single proposals."""

    lockstep: ClassVar[bool] = False
    """Whether chains share the step size all the time, see `Warmup`."""

    step_size: Any  # a number to hold, or None where the warm-up finds it
    target_accept: float
    mass: Mass

    def __post_init__(self) -> None:
        self._check_counts()
        name, mass = type(self).__name__, cast(object, self.mass)
        if self.step_size is not None:
            positive(f"{name}.step_size", self.step_size, "or None")
        fraction(f"{name}.target_accept", self.target_accept)
        if self.target_accept == 0.0:
            raise ValueError(f"{name}.target_accept must be above 0 and below 1. Got {self.target_accept}.")
        if not isinstance(mass, Mass):
            hint = f" Call it: {mass.__name__}()." if isinstance(mass, type) else ""
            raise TypeError(f"{name}.mass must be a Mass, such as DiagonalMass(). Got {shown(mass)}.{hint}")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, effort=self._effort, passes=("micro_batch",))

    def _effort(self, joint: Problem, state: SamplerState) -> Effort:
        """Record, or compile, where the work expected of the run is worth it."""
        transitions = self.warmup + self.draws * self.thin
        work = state.leapfrogs * (1.0 + self.chains / MANY)
        # As much again, at least: a run that has compiled hardly changes its mind.
        expected = work * max(2.0, transitions / max(1, state.step)) if state.step >= LOOK else 0.0
        early = self.lockstep and state.step < self.warmup // 2  # when trajectories are longer than those to come
        if expected >= (SURELY if early else 1) * MUCH:
            return "compiled"
        return "recorded" if transitions >= LONG or expected >= SOME or joint.device.type == "cuda" else "none"

    def _schedule(self) -> Warmup:
        """Schedule of the warm-up: it learns the step size, unless one is held, and the mass."""
        wanted = self.target_accept if self.step_size is None else None
        return Warmup(self.warmup, wanted, self.mass, self.cautious, self.calm, self.lockstep)

    def _first_step(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tensor:
        """Initial step sizes (C,) where none is held: those at which a leapfrog crosses the wanted acceptance.

        They are found by doubling or halving.
        """
        step, position = torch.full_like(place.value, 1.0), place.position
        log_wanted = torch.log(torch.full_like(step, self.target_accept))
        momentum = key.normal(tuple(position.shape), torch.float32, position.device).to(position.dtype)
        origin = Place(torch.zeros_like(position), place.value, place.grad)
        direction, busy = torch.zeros_like(step), torch.ones_like(step, dtype=torch.bool)
        for _ in range(60):
            end, last = leapfrog(whitened(target, position, scale), origin, momentum, step.unsqueeze(-1))
            log_ratio = log_joint(end.value, last) - log_joint(place.value, momentum)
            up = torch.where(torch.isfinite(log_ratio), log_ratio, -torch.inf) > log_wanted
            now = torch.where(up, 1.0, -1.0)
            direction = torch.where(direction == 0, now, direction)
            busy = busy & (now == direction)
            if not bool(busy.any()):
                break
            step = torch.where(busy, step * 2.0**direction, step)
        return step

    @abstractmethod
    def _transition(self, target: Potential, state: SamplerState, key: Key) -> tuple[Place, Move, SamplerState]:
        """Transition in whitened coordinates z from `state.place`; returns the end in z, and what it was like.

        The state comes back with whatever else the transition has changed in it, such as velocities.
        """

    def _whitened(
        self, kernel: Callable[..., tuple[Place, Move]], target: Potential, state: SamplerState, *noise: Tensor
    ) -> tuple[Place, Move]:
        """Transition of the kernel in whitened coordinates from z = 0, compiled or recorded where that is wanted."""
        tuning = Tuning(**state.tuning)
        settings = tuning.step_size, tuning.scale
        transition: tuple[Place, Move] = target.run(_from_origin, target, kernel, state.place, *settings, *noise)
        return target.lasting(transition)

    def prepared(self, joint: Problem, data: Data) -> Problem:
        """Check that the likelihood is a product over rows; warn of a flat prior of the noise."""
        if joint.network is not None and (joint.network.trains_statistics or joint.network.mixes_rows):
            raise ValueError(
                f"{type(self).__name__} needs a likelihood that is a product over rows, and batch norm ties the rows "
                "of a batch together. Use group or layer norm, freeze the layers of batch norm (joint.with_weights), "
                "or use SGHMC."
            )
        self._refuse_others(joint)
        likelihood = joint.likelihood if isinstance(joint, Joint) else None
        if likelihood is not None and likelihood.num_free and getattr(likelihood, "log_scale_prior", 0) is None:
            logger.warning(
                f"{type(self).__name__} samples a noise with a flat prior, under which a network that can fit every "
                "row has no posterior: give the likelihood log_scale_prior=(mean, standard deviation)."
            )
        return joint

    @property
    def vectors(self) -> int:
        """Vectors of theta's size that a chain holds at once: places, momenta, the terms of a leapfrog."""
        return 11

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        words = f"{self.chains} chains of {self.draws:,} draws over {joint.size:,} parameters"
        chains = self.vectors * self.chains * joint.size * joint.dtype.itemsize
        passes = gradient_bytes(joint, data, rows_at_once(joint, data, self.chains), self.chains)
        parts = {"chains": chains, **kept_bytes(joint, self.chains, self.draws), "activations": passes}
        return Footprint(f"{type(self).__name__} with {words}", parts)

    def batches(self, data: Data, key: Key) -> Feed:
        """All rows in every transition; rows of a loader are read once and held."""
        if data.augmentation is not None:
            raise BadData(
                f"{type(self).__name__} samples one density, and augmented rows make another in every step. Pass the "
                "data without augmentation, or use SGLD or SGHMC on mini-batches."
            )
        return in_memory(data).minibatches(None, self.warmup + self.draws * self.thin, key)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> SamplerState:
        theta = self.each_chain(joint, theta)
        none = torch.zeros_like(theta[:, 0])
        zeros = dict.fromkeys(KeptDraw._fields[1:], none) | {"divergent": none.bool()}
        draw = KeptDraw(theta, **zeros)
        return SamplerState(draw, torch.zeros_like(theta), {}, {}, 0, 0)

    def step(self, joint: Problem, state: SamplerState, batch: Batch, key: Key) -> tuple[SamplerState, Info]:
        target = potential(joint, batch, self.chains)
        with torch.no_grad():
            if not state.tuning:
                state = self._begun(joint, target, state, batch, key.fold("begin"))
            drawn, move, state = self._transition(target, state, key)
            tuning = Tuning(**state.tuning)
            theta = state.draw.theta + spread(tuning.scale, drawn.position)
            # A draw that is not kept hands its flag to the next.
            between = state.step > self.warmup and state.step not in self.kept_steps
            flagged = move._replace(divergent=move.divergent | state.draw.divergent) if between else move
            draw = KeptDraw(theta, drawn.value, *flagged, tuning.step_size)
            grad, adaptation = drawn.grad, state.adaptation
            if adaptation:
                grad, tuning, adaptation = self._learnt(target, state, draw, grad, tuning, key)
            near = theta.abs().amax(-1) < FAR
            loss = torch.where(near, -drawn.value / joint.num_data, torch.inf)
        info = {name: value for name, value in draw._asdict().items() if name not in ("theta", "log_density")}
        info |= {"loss": loss, "divergent": move.divergent}
        leapfrogs = state.leapfrogs + int(move.leapfrogs.amax())
        return SamplerState(draw, grad, tuning.stored(), adaptation, state.step + 1, leapfrogs), info

    def renewed(self, joint: Problem, state: SamplerState, batch: Batch) -> SamplerState:
        """Return the state with the log density and gradient of another problem over the same theta."""
        value, grad = potential(joint, batch, self.chains)(state.draw.theta)
        draw = state.draw._replace(log_density=value)
        return state._replace(draw=draw, grad=gathered(Tuning(**state.tuning).scale, grad))

    def _learnt(
        self, target: Potential, state: SamplerState, draw: KeptDraw, grad: Tensor, tuning: Tuning, key: Key
    ) -> tuple[Tensor, Tuning, Adaptation]:
        """Gradient, tuning and adaptation after a transition of the warm-up."""
        schedule = self._schedule()
        known, tuning, changed = schedule.learnt(state.adaptation, tuning, state.step, draw.theta, draw.accept)
        if changed:  # gradient and step size are in coordinates of the scale
            grad = gathered(tuning.scale, target(draw.theta)[1])
            place = Place(draw.theta, draw.log_density, grad)
            step_size = self._tuned(target, place, tuning.scale, key.fold("again")).step_size
            tuning = tuning._replace(step_size=step_size)
            known |= schedule.begun(tuning, state.step + 1)
        return grad, tuning, {} if state.step + 1 == self.warmup else known

    def _begun(self, joint: Problem, target: Potential, state: SamplerState, batch: Batch, key: Key) -> SamplerState:
        """Return the state with the log density at the start, and the first tuning."""
        theta = state.draw.theta
        value, grad = target(theta)
        refuse_bad_start(joint, value, grad)
        schedule = self._schedule()
        alone = joint.num_members is not None or (batch is not None and batch.per_member)
        scale = schedule.mass.initial(self.chains if alone else 1, theta)
        grad = gathered(scale, grad)
        tuning = self._tuned(target, Place(theta, value, grad), scale, key)
        if not self.warmup and schedule.accept is not None:
            logger.warning(
                f"{type(self).__name__} has no warm-up to learn its step size in: it stays at the first guess, "
                f"{float(tuning.step_size[0]):.3g}. Use warmup=1000, or give step_size=."
            )
        adaptation = schedule.begun(tuning) if self.warmup else {}
        draw = state.draw._replace(log_density=value)
        return SamplerState(draw, grad, tuning.stored(), adaptation, 0, 0)

    def _tuned(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tuning:
        """Return the scale with step sizes for it, which suit the chains of a group on average."""
        if self.step_size is not None:
            return Tuning(torch.full_like(place.value, self.step_size), scale)
        first = self._first_step(target, place, scale, key)
        return Tuning(shared(first.log(), len(scale)).exp(), scale)

    def _noise(self, like: Tensor, coins: int, key: Key) -> tuple[Tensor, Tensor]:
        """Standard normal numbers (C, P), and positive uniform numbers (coins, C); drawn in float32 for every dtype."""
        generator = key.generator(like.device)
        normal = torch.randn(like.shape, dtype=torch.float32, device=like.device, generator=generator)
        uniform = torch.rand(coins, len(like), dtype=torch.float32, device=like.device, generator=generator)
        return normal.to(like.dtype), uniform.clamp_(min=SMALLEST).to(like.dtype)

    def keep(self, state: SamplerState) -> KeptDraw:
        return state.draw

    def posterior(self, joint: Problem, kept: Sequence[KeptDraw]) -> Samples:
        draws: KeptDraw = stacked(kept)
        statistics = {name: value.transpose(0, 1) for name, value in draws._asdict().items()}
        theta = statistics.pop("theta")
        for name in ("leapfrogs", "depth"):
            statistics[name] = statistics[name].long()
        if len(kept) == self.draws:
            warn_of_doubtful(type(self).__name__, theta, statistics)
            if joint.num_members is None:
                warn_of_unmixed(type(self).__name__, theta)
        return Samples(joint, theta, statistics)


def refuse_bad_start(joint: Problem, value: Tensor, grad: Tensor) -> None:
    """Raise a `Diverged` that names chain and tensor if the log density or its gradient at a start is not finite."""
    good = torch.isfinite(value)
    if not bool(good.all()):
        chain = int((~good).nonzero()[0])
        number = float(value[chain])
        what = "zero density (log density -inf)" if number == -torch.inf else f"a log density of {number}"
        raise Diverged(
            f"Chain {chain} starts at {what}, at step 1. Give start= with a finite log density, or mend the density.",
            step=1,
            tensor="the log density",
        )
    fine = torch.isfinite(grad)
    if not bool(fine.all()):
        chain, index = (int(i) for i in (~fine).nonzero()[0])
        tensor = joint.layout.name_at(index)
        raise Diverged(
            f"The gradient of the log density in '{tensor}' is not finite where chain {chain} starts, at step 1. "
            "Give another start=, or mend the density.",
            step=1,
            tensor=tensor,
        )


def refuse_single(name: str, joint: Problem) -> None:
    """Raise a ValueError for a single parameter: velocities of fixed length need a second one to turn."""
    if joint.size < 2:
        raise ValueError(f"{name} needs two parameters or more. Got {joint.size}. Use NUTS.")


def _from_origin(
    target: Potential,
    kernel: Callable[..., tuple[Place, Move]],
    place: Place,
    step_size: Tensor,
    scale: Tensor,
    *noise: Tensor,
) -> tuple[Place, Move]:
    origin = Place(torch.zeros_like(place.position), place.value, place.grad)
    return kernel(whitened(target, place.position, scale), origin, *noise, step_size.unsqueeze(-1))
