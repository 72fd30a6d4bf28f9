"""What all Markov chain samplers over the whole data have in common."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import Diverged, fraction, positive, positive_whole
from posterity.inference.memory import activation_bytes, theta_bytes
from posterity.inference.method import Info, Method, Target
from posterity.inference.potential import Potential, potential
from posterity.kernels.leapfrog import leapfrog, log_joint
from posterity.kernels.mass import Mass
from posterity.kernels.metropolis import finite_ratio
from posterity.kernels.place import Move, Place
from posterity.kernels.whitening import gathered, spread, whitened
from posterity.methods.kept_draw import KeptDraw
from posterity.methods.warmup import Adaptation, Tuning, Warmup, shared
from posterity.model.data import Batch, Data, Feed
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.samples import Samples
from posterity.storage import clone

logger = logging.getLogger("posterity")

LONG = 1000  # transitions that are worth the ten seconds or so of a compiler
FAR = 1e15  # a position beyond this is on its way to infinity


class SamplerState(NamedTuple):
    """Positions theta (C, P); from the first step on the place there (log density, gradient in whitened coordinates),
    the tuning, and the last move; the adaptation until the warm-up is over; steps so far."""

    theta: Tensor
    place: dict[str, Tensor]
    tuning: dict[str, Tensor]
    move: dict[str, Tensor]
    adaptation: Adaptation | None
    step: int


class Sampler(Method):
    """A Markov chain over all data: `warmup` transitions that adapt it, then every `thin`-th of `draws * thin` kept.

    Rows of theta are chains. One step of a run is one transition of all of them.
    """

    draws: int
    warmup: int
    chains: int
    thin: int

    @property
    def takes_members(self) -> bool:
        """No: a row of theta is a chain."""
        return False

    def compiles(self, joint: Target) -> bool:
        """Recorded on a GPU; compiled for the CPU where so many transitions are to come that it pays."""
        return joint.device.type == "cuda" or self.warmup + self.draws * self.thin >= LONG

    @abstractmethod
    def _schedule(self) -> Warmup:
        """What the warm-up learns."""

    @abstractmethod
    def _first_step(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tensor:
        """The step sizes (C,) to begin with."""

    @abstractmethod
    def _transition(self, target: Potential, place: Place, tuning: Tuning, key: Key) -> tuple[Place, Move]:
        """A transition from a place whose gradient is in whitened coordinates z; its end in coordinates z."""

    def _check(self) -> None:
        name = type(self).__name__
        positive_whole(f"{name}.draws", self.draws)
        positive_whole(f"{name}.chains", self.chains)
        positive_whole(f"{name}.thin", self.thin)
        if self.warmup != 0:
            positive_whole(f"{name}.warmup", self.warmup, "or 0")

    def prepared(self, joint: Target, data: Data) -> Target:
        """The same, if its likelihood is a product over rows."""
        if isinstance(joint, Joint) and (joint.network.trains_statistics or joint.network.mixes_rows):
            raise ValueError(
                f"{type(self).__name__} needs a likelihood that is a product over rows, and batch norm ties the rows "
                "of a batch together. Use group or layer norm, freeze the layers of batch norm (joint.with_weights), "
                "or use SGHMC."
            )
        if joint.num_members not in (None, self.chains):
            raise ValueError(
                f"{type(self).__name__}.chains is {self.chains}, and the joint has {joint.num_members} members. Run "
                f"one chain for each: chains={joint.num_members}."
            )
        return joint

    def bytes(self, joint: Target, data: Data) -> dict[str, int]:
        """With the draws that are kept and the activations of a gradient."""
        one = theta_bytes(joint) // (joint.num_members or 1)
        return {
            "chains": 12 * self.chains * one,
            "draws": self.draws * self.chains * one,
            "activations": 2 * activation_bytes(joint, data, 1) * self.chains,
        }

    def describe(self, joint: Target, data: Data) -> str:
        """With chains and draws."""
        return f"{type(self).__name__} with {self.chains} chains of {self.draws:,} draws over {joint.size:,} parameters"

    def batches(self, data: Data, key: Key) -> Feed:
        """All rows, for every transition."""
        return data.minibatches(None, self.warmup + self.draws * self.thin, key)

    def initial(self, joint: Target, key: Key) -> Tensor:
        """Newly initialised weights for each chain, (C, P)."""
        return torch.stack([joint.fresh(key.fold(index)) for index in range(self.chains)])

    def init(self, joint: Target, theta: Tensor, key: Key) -> SamplerState:
        """The chains at the rows of theta, or all at one."""
        if theta.dim() == 1:
            theta = theta.expand(self.chains, -1)
        if len(theta) != self.chains:
            raise ValueError(
                f"{type(self).__name__}.chains is {self.chains}, so start must be (P,) or ({self.chains}, P), one row "
                f"for each chain. Got {len(theta)} rows. Use chains={len(theta)}."
            )
        return SamplerState(theta.clone(), {}, {}, {}, None, 0)

    def step(self, joint: Target, state: SamplerState, batch: Batch, key: Key) -> tuple[SamplerState, Info]:
        """One transition of every chain."""
        target = potential(joint, batch, self.chains)
        with torch.no_grad():
            if not state.place:
                state = self._begun(joint, target, state, batch, key.fold("begin"))
            tuning = Tuning(**state.tuning)
            place = Place(state.theta, **state.place)
            drawn, move = self._transition(target, place, tuning, key)
            theta = state.theta + spread(tuning.scale, drawn.position)
            grad, adaptation = drawn.grad, state.adaptation
            used = tuning.step_size
            if adaptation is not None:
                schedule = self._schedule()
                adaptation, tuning, changed = schedule.learnt(adaptation, tuning, state.step, theta, move.accept)
                if changed:  # gradient and step size are in coordinates of the scale
                    place = Place(theta, drawn.value, gathered(tuning.scale, target(theta)[1]))
                    grad, tuning = place.grad, self._tuned(target, place, tuning.scale, key.fold("again"))
                    adaptation = schedule.begun(tuning)
                if state.step + 1 == self.warmup:
                    adaptation = None
            far = theta.abs().amax(-1) < FAR
            loss = torch.where(far, -drawn.value / joint.num_data, torch.inf)
        known = {**move._asdict(), "step_size": used}
        after = {"value": drawn.value, "grad": grad}
        return SamplerState(theta, after, tuning._asdict(), known, adaptation, state.step + 1), {"loss": loss, **known}

    def _begun(self, joint: Target, target: Potential, state: SamplerState, batch: Batch, key: Key) -> SamplerState:
        """The state with the log density at its start, and the first tuning."""
        theta = state.theta
        value, grad = target(theta)
        refuse_bad_start(joint, value, grad)
        schedule = self._schedule()
        alone = joint.num_members is not None or (batch is not None and batch.per_member)
        groups = self.chains if alone else 1
        scale = schedule.mass.initial(groups, theta)
        grad = gathered(scale, grad)
        tuning = self._tuned(target, Place(theta, value, grad), scale, key)
        adaptation = schedule.begun(tuning) if self.warmup else None
        return state._replace(place={"value": value, "grad": grad}, tuning=tuning._asdict(), adaptation=adaptation)

    def _tuned(self, target: Potential, place: Place, scale: Tensor, key: Key) -> Tuning:
        """The scale, with step sizes for it that suit the chains of a group on average."""
        first = self._first_step(target, place, scale, key)
        return Tuning(shared(first.log(), len(scale)).exp(), scale)

    def _noise(self, place: Place, coins: int, key: Key) -> tuple[Tensor, Tensor]:
        """Standard normal numbers (C, P), and uniform ones (coins, C)."""
        like = place.position
        generator = key.generator(like.device)
        normal = torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
        uniform = torch.rand(coins, len(like), dtype=like.dtype, device=like.device, generator=generator)
        return normal, uniform

    def keeps(self, step: int) -> bool:
        """Every `thin`-th after the warm-up."""
        return step > self.warmup and (step - self.warmup) % self.thin == 0

    def keep(self, state: SamplerState) -> KeptDraw:
        """The draws and what is told of them."""
        return KeptDraw(theta=state.theta, log_density=state.place["value"], **state.move)

    def posterior(self, joint: Target, kept: Sequence[KeptDraw]) -> Samples:
        """All that was kept, as samples."""
        return samples(joint, kept)


def samples(joint: Target, kept: Sequence[Any]) -> Samples:
    """The posterior of kept draws: fields (C, ...) of each become (C, D, ...)."""
    stacked = {name: torch.stack([getattr(one, name) for one in kept], 1).cpu() for name in kept[0]._fields}
    return Samples(joint, stacked.pop("theta"), stacked, {})


def refuse_bad_start(joint: Target, value: Tensor, grad: Tensor) -> None:
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
    """The log ratio of acceptance (C,) of one leapfrog of these step sizes."""
    origin = Place(torch.zeros_like(place.position), place.value, place.grad)
    end, last = leapfrog(whitened(target, place.position, scale), origin, momentum, step.unsqueeze(-1))
    return finite_ratio(log_joint(end.value, last) - log_joint(place.value, momentum))


def wanted_step(target: Potential, place: Place, scale: Tensor, key: Key, wanted: float, accept: Any) -> Tensor:
    """Step sizes (C,) at which a transition crosses a probability of acceptance of `wanted`, by doubling or halving."""
    step = torch.full_like(place.value, 1.0)
    log_wanted = torch.log(torch.full_like(step, wanted))
    noise = key.normal(tuple(place.position.shape), place.position.dtype, place.position.device)
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
        raise TypeError(f"{name}.mass must be a Mass, such as DiagonalMass(). Got {mass!r}.")
