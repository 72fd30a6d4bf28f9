"""What Metropolis, MALA, Langevin, HMC and NUTS share: warm-up, steps, kept draws."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from posterity.errors import BadData, Diverged, fraction, positive, shown
from posterity.inference.acceleration import Potential, budget, potential
from posterity.inference.kept import kept_bytes, stacked
from posterity.inference.memory import activation_bytes
from posterity.inference.method import Effort, Footprint, Info, Traits
from posterity.inference.run import FAR
from posterity.kernels.adaptation import (
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
from posterity.methods.parts.chains import Chains, warn_of_doubtful
from posterity.model import Joint, Problem
from posterity.model.data import Batch, Data, Feed, in_memory
from posterity.numerics.random import Key
from posterity.posteriors.samples import Samples
from posterity.storage import clone


class KeptDraw(NamedTuple):
    """Draws theta (C, P) of all chains, with their log density and what the last transitions were like, (C,).

    `divergent` is whether any transition since the draw kept before, or since the warm-up, was.
    """

    theta: Tensor
    log_density: Tensor
    accept: Tensor
    energy: Tensor
    divergent: Tensor
    leapfrogs: Tensor
    depth: Tensor
    step_size: Tensor


LEAST = 0.1  # a probability of acceptance below this counts as this, lest one chain speak for all


class Tuning(NamedTuple):
    """What the transitions of chains are made with: step sizes (C,), and scales (G, P) or (G, P, P) of groups."""

    step_size: Tensor
    scale: Tensor


class Adaptation(NamedTuple):
    """What a warm-up has learnt so far."""

    search: DualAveraging
    moments: Moments

    def tables(self) -> dict[str, dict[str, Tensor]]:
        """As a state of a run holds it, which may do without."""
        return {"search": self.search._asdict(), "moments": self.moments._asdict()}

    @classmethod
    def of(cls, tables: dict[str, dict[str, Tensor]]) -> "Adaptation":
        """What `tables` gave."""
        return cls(DualAveraging(**tables["search"]), Moments(**tables["moments"]))


@dataclass(frozen=True)
class Warmup:
    """The schedule of a warm-up of `steps` transitions: the step size all the time, the mass matrix in windows.

    `accept` is the wanted probability of acceptance, None where the step size is held. Chains that learn together reach
    it on average, or, where `cautious`, in the harmonic mean, which hears those that accept less than others (Hoffman
    and Sountsov, 2022). `mass` says what is learnt of the scales. Chains of one problem, a group, learn together, but
    for the step size until the last mass matrix is made: a chain that starts where the density is steep gets away
    with small steps of its own only, and would not be heard among many.
    """

    steps: int
    accept: float | None
    mass: Mass
    cautious: bool = False

    def begun(self, tuning: Tuning) -> Adaptation:
        """Nothing learnt yet."""
        return Adaptation(averaging_from(tuning.step_size), no_moments(tuning.scale))

    def learnt(
        self, adaptation: Adaptation, tuning: Tuning, step: int, theta: Tensor, accept: Tensor
    ) -> tuple[Adaptation, Tuning, bool]:
        """What is known after transition `step` (from 0), which led to theta (C, P); and whether the scale changed.

        Where it has changed, the step size is to be found anew: see `begun`.
        """
        groups = tuning.scale.shape[0]
        first, ends = windows(self.steps, len(theta) // groups)
        together = step >= (ends[-1] if ends else 0)
        search, moments = adaptation
        if self.accept is not None:
            rate = accept
            if together and self.cautious and groups < len(accept):
                rate = 1.0 / shared(1.0 / accept.clamp(min=LEAST), groups)
            elif together:
                rate = shared(accept, groups)
            search = averaged(search, rate, self.accept)
            tuning = tuning._replace(step_size=search.log_step.exp())
        changed = step + 1 in ends
        if self.mass.learns and first <= step < (ends[-1] if ends else 0):
            moments = with_positions(moments, theta)
            if changed:
                tuning = tuning._replace(scale=self.mass.scale(moments))
        if step + 1 == self.steps and self.accept is not None:
            tuning = tuning._replace(step_size=search.average.exp())
        return Adaptation(search, moments), tuning, changed


def shared(values: Tensor, groups: int) -> Tensor:
    """For each chain the mean over its group of values (C,).

    >>> import torch
    >>> shared(torch.tensor([1.0, 3.0, 4.0, 6.0]), groups=2)
    tensor([2., 2., 5., 5.])
    """
    rows = values.reshape(groups, -1)
    return rows.mean(1, keepdim=True).expand_as(rows).reshape(-1)


logger = logging.getLogger("posterity")

SMALLEST = 2.0**-25  # for uniform numbers, which are multiples of 2^-24: 0 would take every proposal, however bad
LONG = 2000  # transitions that are worth the twenty seconds or so of a compiler
LOOK, MUCH = 20, 50_000  # after so many transitions: leapfrogs in all that are worth them, too


class SamplerState(NamedTuple):
    """Where the chains are after `step` transitions.

    `draw` has theta (C, P) with what is told of it; `grad` (C, P) is the gradient there in whitened coordinates. The
    `tuning` is made in the first step; `adaptation` is there while the warm-up lasts. `leapfrogs` were taken so far.
    """

    draw: KeptDraw
    grad: Tensor
    tuning: dict[str, Tensor]
    adaptation: dict[str, dict[str, Tensor]]
    step: int
    leapfrogs: int


class Sampler(Chains):
    """A Markov chain over all data: `warmup` transitions that adapt it, then every `thin`-th of `draws * thin` kept.

    Rows of theta are chains. One step of a run is one transition of all of them.
    """

    # Whether chains that accept less than others are heard more, see `Warmup`: for trajectories of many leapfrogs.
    cautious: ClassVar[bool] = False

    step_size: float | None
    target_accept: float
    mass: Mass

    @property
    def traits(self) -> Traits:
        return replace(super().traits, effort=self._effort)

    def _effort(self, joint: Problem, state: SamplerState) -> Effort:
        """Compiled where a run has so much work that it pays, by what there was so far; else recorded if it can be."""
        transitions = self.warmup + self.draws * self.thin
        expected = transitions * state.leapfrogs / max(1, state.step)
        if transitions >= LONG or (state.step >= LOOK and expected >= MUCH):
            return "compiled"
        return "recorded" if joint.device.type == "cuda" else "none"

    def _schedule(self) -> Warmup:
        """What the warm-up learns: the step size, unless one is held, and the mass."""
        wanted = self.target_accept if self.step_size is None else None
        return Warmup(self.warmup, wanted, self.mass, cautious=self.cautious)

    def _first_step(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tensor:
        """The step sizes (C,) to begin with, where none is held: by default those of leapfrogs."""
        return wanted_step(target, place, scale, key, self.target_accept, first_leapfrog)

    @abstractmethod
    def _transition(self, target: Potential, place: Place, tuning: Tuning, key: Key) -> tuple[Place, Move]:
        """A transition from a place whose gradient is in whitened coordinates z; its end in coordinates z."""

    def prepared(self, joint: Problem, data: Data) -> Problem:
        """The same, if its likelihood is a product over rows."""
        if joint.network is not None and (joint.network.trains_statistics or joint.network.mixes_rows):
            raise ValueError(
                f"{type(self).__name__} needs a likelihood that is a product over rows, and batch norm ties the rows "
                "of a batch together. Use group or layer norm, freeze the layers of batch norm (joint.with_weights), "
                "or use SGHMC."
            )
        self._refuse_others(joint)
        if (
            isinstance(joint, Joint)
            and joint.likelihood.num_free
            and getattr(joint.likelihood, "log_scale_prior", 0) is None
        ):
            logger.warning(
                "%s samples a noise with a flat prior, under which a network that can fit every row has no posterior: "
                "give the likelihood log_scale_prior=(mean, standard deviation).",
                type(self).__name__,
            )
        return joint

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        chains = f"{self.chains} chains of {self.draws:,} draws over {joint.size:,} parameters"
        activations = 2 * activation_bytes(joint, data, None) * self.chains
        parts = {
            "chains": 12 * self.chains * joint.size * joint.dtype.itemsize,
            **kept_bytes(joint, self.chains, self.draws),
            "activations": min(activations // (joint.num_members or 1), budget(joint)),
        }
        return Footprint(f"{type(self).__name__} with {chains}", parts)

    def batches(self, data: Data, key: Key) -> Feed:
        """All rows, for every transition; those of a loader are read once and held."""
        if data.augmentation is not None:
            raise BadData(
                f"{type(self).__name__} samples one density, and augmented rows make another in every step. Pass the "
                "data without augmentation, or use SGLD or SGHMC on mini-batches."
            )
        return in_memory(data).minibatches(None, self.warmup + self.draws * self.thin, key)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> SamplerState:
        theta = self.each_chain(joint, theta)
        none = torch.zeros_like(theta[:, 0])
        told = {name: none for name in KeptDraw._fields if name != "theta"}
        draw = KeptDraw(theta, **{**told, "divergent": none.bool()})
        return SamplerState(draw, torch.zeros_like(theta), {}, {}, 0, 0)

    def step(self, joint: Problem, state: SamplerState, batch: Batch, key: Key) -> tuple[SamplerState, Info]:
        target = potential(joint, batch, self.chains)
        with torch.no_grad():
            if not state.tuning:
                state = self._begun(joint, target, state, batch, key.fold("begin"))
            tuning, start = Tuning(**state.tuning), state.draw.theta
            drawn, move = self._transition(target, Place(start, state.draw.log_density, state.grad), tuning, key)
            theta = start + spread(tuning.scale, drawn.position)
            # Where the last draw was not kept, its flag goes on to the next.
            between = state.step > self.warmup and state.step not in self.kept_steps
            told = move._replace(divergent=move.divergent | state.draw.divergent) if between else move
            draw = KeptDraw(theta, drawn.value, *told, tuning.step_size)
            grad, adaptation = drawn.grad, state.adaptation
            if adaptation:
                grad, tuning, adaptation = self._learnt(target, state, draw, grad, tuning, key)
            near = theta.abs().amax(-1) < FAR
            loss = torch.where(near, -drawn.value / joint.num_data, torch.inf)
        info = {name: value for name, value in draw._asdict().items() if name not in ("theta", "log_density")}
        info |= {"loss": loss, "divergent": move.divergent}
        leapfrogs = state.leapfrogs + int(move.leapfrogs.amax())
        return SamplerState(draw, grad, tuning._asdict(), adaptation, state.step + 1, leapfrogs), info

    def renewed(self, joint: Problem, state: SamplerState, batch: Batch) -> SamplerState:
        """The state with log density and gradient of another problem over the same theta; tuned as it was."""
        value, grad = potential(joint, batch, self.chains)(state.draw.theta)
        draw = state.draw._replace(log_density=value)
        return state._replace(draw=draw, grad=gathered(Tuning(**state.tuning).scale, grad))

    def _learnt(
        self, target: Potential, state: SamplerState, draw: KeptDraw, grad: Tensor, tuning: Tuning, key: Key
    ) -> tuple[Tensor, Tuning, dict[str, dict[str, Tensor]]]:
        """Gradient, tuning and adaptation after a transition of the warm-up."""
        schedule = self._schedule()
        known = Adaptation.of(state.adaptation)
        known, tuning, changed = schedule.learnt(known, tuning, state.step, draw.theta, draw.accept)
        if changed:  # gradient and step size are in coordinates of the scale
            grad = gathered(tuning.scale, target(draw.theta)[1])
            tuning = self._tuned(target, Place(draw.theta, draw.log_density, grad), tuning.scale, key.fold("again"))
            known = schedule.begun(tuning)
        return grad, tuning, {} if state.step + 1 == self.warmup else known.tables()

    def _begun(self, joint: Problem, target: Potential, state: SamplerState, batch: Batch, key: Key) -> SamplerState:
        """The state with the log density at its start, and the first tuning."""
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
                "%s has no warm-up to learn its step size in: it stays at the first guess, %.3g. Use warmup=1000, or "
                "give step_size=.",
                type(self).__name__,
                float(tuning.step_size[0]),
            )
        adaptation = schedule.begun(tuning).tables() if self.warmup else {}
        draw = state.draw._replace(log_density=value)
        return SamplerState(draw, grad, tuning._asdict(), adaptation, 0, 0)

    def _tuned(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tuning:
        """The scale, with step sizes for it that suit the chains of a group on average."""
        if self.step_size is not None:
            return Tuning(torch.full_like(place.value, self.step_size), scale)
        first = self._first_step(target, place, scale, key)
        return Tuning(shared(first.log(), len(scale)).exp(), scale)

    def _noise(self, place: Place, coins: int, key: Key) -> tuple[Tensor, Tensor]:
        """Standard normal numbers (C, P), and uniform ones above 0 (coins, C); of float32 whatever the number type."""
        like = place.position
        generator = key.generator(like.device)
        normal = torch.randn(like.shape, dtype=torch.float32, device=like.device, generator=generator)
        uniform = torch.rand(coins, len(like), dtype=torch.float32, device=like.device, generator=generator)
        return normal.to(like.dtype), uniform.clamp_(min=SMALLEST).to(like.dtype)

    def keep(self, state: SamplerState) -> KeptDraw:
        return state.draw

    def posterior(self, joint: Problem, kept: Sequence[KeptDraw]) -> Samples:
        draws: KeptDraw = stacked(kept)
        told = {name: value.transpose(0, 1) for name, value in draws._asdict().items()}
        theta = told.pop("theta")
        for name in ("leapfrogs", "depth"):
            told[name] = told[name].long()
        if len(kept) == self.draws:
            warn_of_doubtful(type(self).__name__, theta, told)
        return Samples(joint, theta, told)


def refuse_bad_start(joint: Problem, value: Tensor, grad: Tensor) -> None:
    """A `Diverged` that names chain and tensor, where the log density or its gradient at a start is not finite."""
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


def in_whitened(
    kernel: Callable[..., tuple[Place, Move]],
    target: Potential,
    place: Place,
    scale: Tensor,
    noise: Tensor,
    *numbers: Any,
) -> tuple[Place, Move]:
    """The kernel's transition in whitened coordinates from z = 0, compiled where that is wanted.

    `numbers` are what the kernel takes after the noise; tensors among them (C,), the step sizes the last of these.
    """
    found: tuple[Place, Move] = target.run(_in_whitened, target, kernel, place, scale, noise, *numbers)
    return clone(found)  # what `run` gives may be good for one call only


def _in_whitened(
    target: Potential,
    kernel: Callable[..., tuple[Place, Move]],
    place: Place,
    scale: Tensor,
    noise: Tensor,
    *numbers: Any,
) -> tuple[Place, Move]:
    origin = Place(torch.zeros_like(place.position), place.value, place.grad)
    *coins, step_size = [number for number in numbers if isinstance(number, Tensor)]
    rest = [number for number in numbers if not isinstance(number, Tensor)]
    return kernel(whitened(target, place.position, scale), origin, noise, *coins, step_size.unsqueeze(-1), *rest)


def first_leapfrog(target: Potential, place: Place, scale: Tensor, momentum: Tensor, step: Tensor) -> Tensor:
    """The log ratio of acceptance (C,) of one leapfrog of these step sizes, minus infinity where it is not finite."""
    origin = Place(torch.zeros_like(place.position), place.value, place.grad)
    end, last = leapfrog(whitened(target, place.position, scale), origin, momentum, step.unsqueeze(-1))
    log_ratio = log_joint(end.value, last) - log_joint(place.value, momentum)
    return torch.where(torch.isfinite(log_ratio), log_ratio, -torch.inf)


def wanted_step(target: Potential, place: Place, scale: Tensor, key: Key, wanted: float, accept: Any) -> Tensor:
    """Step sizes (C,) at which a transition crosses a probability of acceptance of `wanted`, by doubling or halving."""
    step = torch.full_like(place.value, 1.0)
    log_wanted = torch.log(torch.full_like(step, wanted))
    noise = key.normal(tuple(place.position.shape), torch.float32, place.position.device).to(place.position.dtype)
    direction, busy = torch.zeros_like(step), torch.ones_like(step, dtype=torch.bool)
    for _ in range(60):
        log_ratio = accept(target, place, scale, noise, step)
        up = log_ratio > log_wanted
        now = torch.where(up, 1.0, -1.0)
        direction = torch.where(direction == 0, now, direction)
        busy = busy & (now == direction)
        if not bool(busy.any()):
            break
        step = torch.where(busy, step * 2.0**direction, step)
    return step


def check_tuning(name: str, step_size: float | None, target_accept: float, mass: object) -> None:
    """A one-line error for settings of the warm-up that cannot be."""
    if step_size is not None:
        positive(f"{name}.step_size", step_size, "or None")
    fraction(f"{name}.target_accept", target_accept)
    if target_accept == 0.0:
        raise ValueError(f"{name}.target_accept must be above 0 and below 1. Got {target_accept}.")
    if not isinstance(mass, Mass):
        hint = f" Call it: {mass.__name__}()." if isinstance(mass, type) else ""
        raise TypeError(f"{name}.mass must be a Mass, such as DiagonalMass(). Got {shown(mass)}.{hint}")
