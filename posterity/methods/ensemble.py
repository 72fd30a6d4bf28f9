"""Deep ensembles of any method; members that diverge are left out."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.errors import positive_whole, shown
from posterity.inference.infer import Start, starting_point, with_scales
from posterity.inference.method import Footprint, Info, Method, Traits, Work
from posterity.inference.run import Trace
from posterity.inference.task import Task
from posterity.model.data import Batch, Data, Feed, OwnOrders, Reordered, TensorData
from posterity.model.joint import Joint
from posterity.model.problem import Problem, data_of
from posterity.numerics.finite import all_finite
from posterity.numerics.random import Key
from posterity.posteriors import Mixture
from posterity.storage import flatten


def finite_members(state: Any, size: int) -> Tensor:
    """Whether all numbers of each member of a state are finite, (M,) on the CPU.

    Members are the rows of tensors of length M and the entries of lists of length M.

    >>> finite_members((torch.tensor([[1.0], [torch.nan]]), [{"sum": torch.zeros(3)}] * 2), 2)
    tensor([ True, False])
    """
    own = _own_rows(state, size)
    if own is not None:
        return own
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (tuple, list)) else ()
    finite = [finite_members(part, size) for part in parts]
    return torch.stack(finite).all(0) if finite else torch.ones(size, dtype=torch.bool, device="cpu")


def repaired(state: Any, alive: Tensor, size: int) -> Any:
    """Replace the members of a state that are not alive by the first that is.

    >>> repaired((torch.tensor([1.0, torch.nan]), 7), torch.tensor([True, False]), 2)
    (tensor([1., 1.]), 7)
    """
    if _own_rows(state, size) is not None:
        chosen = torch.where(alive, torch.arange(size, device=alive.device), alive.int().argmax())
        if isinstance(state, Tensor):
            return state.index_select(0, chosen.to(state.device))
        return [state[index] for index in chosen.tolist()]
    if isinstance(state, dict):
        return {name: repaired(part, alive, size) for name, part in state.items()}
    if isinstance(state, (tuple, list)):
        parts = [repaired(part, alive, size) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state


def _own_rows(value: Any, size: int) -> Tensor | None:
    """Whether each member of a tensor or list is finite; None where the value has no members."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim() and len(value) == size:
        return torch.isfinite(value).reshape(size, -1).all(1).cpu()
    if isinstance(value, list) and len(value) == size:
        entries = [[t for t in flatten([entry]).tensors.values() if t.is_floating_point()] for entry in value]
        good = [all(bool(all_finite(tensor)) for tensor in entry) for entry in entries]
        return torch.tensor(good, device="cpu") if any(entries) else None
    return None


logger = logging.getLogger("posterity")

# Members that were logged as diverged, so that a score on validation data does not log them again.
_LOGGED: "WeakKeyDictionary[Problem, set[int]]" = WeakKeyDictionary()


class EnsembleState(NamedTuple):
    """The method's state of all members, or a tuple of states; last finite losses (M,); which are finite, (M,)."""

    members: Any
    loss: Tensor
    alive: Tensor


@dataclass(frozen=True)
class Ensemble(Method):
    """`size` runs of `method` from fresh weights, as an equal mixture: a deep ensemble for MAP.

    **Math**: q(w) = (1/M) sum_m q_m(w), with q_m what `method` makes of member m. Members begin at weights that the
    layers draw anew under a key for each, and each shuffles rows in memory by its own key. All other randomness is
    shared: member m is what `method` alone would give with the same seed, start and
    order of rows, to rounding. `start` (P,) lets all begin alike, (M, P) or an ensemble's posterior each at its own.
    For bare parameters without `reset_parameters` (class tokens, positional embeddings) `start` is a function that
    returns a new module: member m begins at the weights of a module made under the key of m.

    **Limit**: as each member, around as many modes. Methods that draw noise draw the same for all members. Rows from a
    loader come in one order for all. A member whose loss is no longer finite is left out of the posterior, and named
    in the log; its loss in the trace stays at the last finite one (0 without any). The run stops when none is left.

    **Cost**: M times the memory of one member. Members step together over a leading axis of theta, which for small
    networks takes little longer than one; a method that takes one theta steps them in turn (see `Traits`).

    **References**: Lakshminarayanan et al. (2017), Simple and scalable predictive uncertainty estimation using deep
    ensembles, Algorithm 1 (without adversarial training); Wilson and Izmailov (2020), section 4.

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> noise = po.likelihoods.Gaussian(scale=0.1)
    >>> joint = po.Joint(po.networks.MLP([1, 20, 1]), noise, po.priors.Normal(), num_data=20)
    >>> q, trace = po.infer(po.methods.Ensemble(po.methods.MAP(steps=300), size=5), joint, (x, x.sin()))
    >>> trace["loss"].shape, len(q.posteriors)
    (torch.Size([300, 5]), 5)
    >>> bool(q.predict(4 * x).epistemic[0] > q.predict(x).epistemic.mean())
    True
    """

    method: Method
    size: int = 5

    def __post_init__(self) -> None:
        given: object = self.method
        if not isinstance(given, Method):
            hint = f" Call it: {given.__name__}()." if isinstance(given, type) else ""
            raise TypeError(f"Ensemble.method must be a Method. Got {shown(given)}.{hint}")
        if isinstance(self.method, Ensemble):
            raise TypeError("Ensemble.method must be another method. Got an Ensemble. Give one with more members.")
        if self.method.traits.row == "chain":  # members draw the same noise, so that their chains would meet
            raise TypeError(
                f"Ensemble.method must be one that fits. Got {type(self.method).__name__}, whose chains are draws of "
                "their own. Give the sampler more chains."
            )
        positive_whole("Ensemble.size", self.size, "of members")

    @property
    def traits(self) -> Traits:
        own = self.method.traits
        return Traits(
            takes_members=False,
            recordable=own.recordable and own.takes_members,
            anytime=own.anytime,
            kept_steps=own.kept_steps,
            passes=own.passes,
            second_order=own.second_order,
            accountable=lambda state: self._repaired(state, state.members),  # the others have been given up
        )

    @cached_property
    def _together(self) -> bool:
        """Whether members step as rows of one theta, not in turn."""
        return self.method.traits.takes_members

    def doubts(self, joint: Problem, trace: Trace) -> Sequence[str]:
        return self.method.doubts(joint, trace)

    def settled(self, joint: Problem, data: Data) -> "Ensemble":
        return replace(self, method=self.method.settled(joint, data))

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        return self.method.with_scales(joint, data, start, key)

    def prepared(self, joint: Problem, data: Data) -> Problem:
        return self.method.prepared(joint, data)

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        times = self.size if joint.num_members is None else 1  # else the method counts the members of the joint
        if self._together and isinstance(joint, Joint):
            joint, times = joint.with_members(self.size), 1
            data = OwnOrders(data, self.order_keys) if isinstance(data, TensorData) else data
        own = self.method.footprint(joint, data)
        return Footprint(
            f"Ensemble of {self.size}, each {own.words}",
            {name: count * times for name, count in own.parts.items()},
            own.predictions,
            lambda: {name: replace(self, method=other) for name, other in own.alternatives().items()},
        )

    def work(self, joint: Problem, data: Data) -> Work | None:
        own = self.method.work(joint, data)
        return own and own.times(self.size if joint.num_members is None else 1)

    def batches(self, data: Data, key: Key) -> Feed:
        """The batches of the method, with rows in memory in another order for each member."""
        if isinstance(data, TensorData):
            data = OwnOrders(data, self.order_keys)
        return self.method.batches(data, key)

    def order_keys(self, key: Key) -> list[Key]:
        """The keys by which the members shuffle their rows, from the key of the run."""
        return [key.fold(f"member {index}") for index in range(self.size)]

    def tasks(self, joint: Problem, data: object, *, start: Start = None, seed: int = 0) -> list[Task]:
        """The members as separate fits for an executor: each may have its own process and folder.

        `Mixture([outcome.posterior for outcome in executor.run(tasks)])` is the posterior of `infer`, to rounding.
        """
        rows, key = data_of(joint, data), Key(seed)
        joint = with_scales(self, joint, rows, start, key)
        joint, theta = starting_point(self, joint, start, rows, key.fold("start"))
        tasks = []
        for index, own in enumerate(self._each(theta)):
            label, data = f"member {index}", rows
            if isinstance(rows, TensorData):
                data = Reordered(replace(rows, rows=rows.rows.member(index)), label)
            tasks.append(Task(label, self.method, _member(joint, index), data, own.clone(), seed=seed))
        return tasks

    def initial(self, joint: Problem, key: Key) -> Tensor:
        return torch.stack([joint.fresh(key.fold(index)) for index in range(self.size)])

    def init(self, joint: Problem, theta: Tensor, key: Key) -> EnsembleState:
        theta = self._each(theta)
        if self._together:
            members = self.method.init(joint, theta, key)
        else:
            members = tuple(self.method.init(_member(joint, index), own, key) for index, own in enumerate(theta))
        alive = torch.ones(self.size, dtype=torch.bool, device=theta.device)
        return EnsembleState(members, theta.new_zeros(self.size), alive)

    def _each(self, theta: Tensor) -> Tensor:
        """theta with a row for each member, (M, P)."""
        if theta.dim() == 1:
            return theta.expand(self.size, -1).contiguous()
        if len(theta) != self.size:
            raise ValueError(
                f"Ensemble.size is {self.size}, so start must be (P,) or ({self.size}, P), one row for each member. "
                f"Got {len(theta)} rows. Use size={len(theta)}."
            )
        return theta

    def step(self, joint: Problem, state: EnsembleState, batch: Batch, key: Key) -> tuple[EnsembleState, Info]:
        if self._together:
            members, info = self.method.step(joint, state.members, batch, key)
        else:
            stepped = []
            for index, own in enumerate(state.members):
                rows = batch if batch is None else batch.member(index)
                stepped.append(self.method.step(_member(joint, index), own, rows, key))
            members, infos = zip(*stepped, strict=True)
            info = {name: torch.stack([torch.as_tensor(own[name]) for own in infos]) for name in infos[0]}
        return self._noted(state, members, info)

    def recordable(self, state: EnsembleState) -> Callable[[Problem, Any, Batch, Key], tuple[Any, Info]] | None:
        work = self.method.recordable(state.members) if self._together else None
        if work is None:
            return None

        def step(joint: Problem, state: EnsembleState, batch: Batch, key: Key) -> tuple[EnsembleState, Info]:
            return self._noted(state, *work(joint, state.members, batch, key))

        step.__name__ = work.__name__
        return step

    def _noted(self, state: EnsembleState, members: Any, info: Info) -> tuple[EnsembleState, Info]:
        """The state after a step, in which members whose loss is not finite are left out."""
        if "loss" not in info:
            return state._replace(members=members), info
        loss = torch.as_tensor(info["loss"])
        alive = state.alive & torch.isfinite(loss)
        held = torch.where(alive, loss, state.loss)
        # Where no member is left the loss is not finite, and the run stops.
        return EnsembleState(members, held, alive), {**info, "loss": torch.where(alive.any(), held, loss)}

    def shortened(self, length: int) -> tuple[Method, str] | None:
        inner = self.method.shortened(length)
        return None if inner is None else (replace(self, method=inner[0]), inner[1])

    def finished(self, state: EnsembleState) -> str:
        """Why all members that are still finite may stop."""
        if self._together:
            return self.method.finished(state.members)
        reasons = [self.method.finished(own) for own in state.members]
        return reasons[0] if all(reasons) else ""

    def closing(self, joint: Problem, state: EnsembleState, data: Data) -> Info:
        return self.method.closing(joint, self._repaired(state, state.members).members, data) if self._together else {}

    def keep(self, state: EnsembleState) -> EnsembleState:
        if self._together:
            return self._repaired(state, self.method.keep(state.members))
        return self._repaired(state, tuple(self.method.keep(own) for own in state.members))

    def _repaired(self, state: EnsembleState, members: Any) -> EnsembleState:
        """The state with these members; those that are not finite become copies of one that is, if there is any."""
        each = members if self._together else list(members)
        alive = state.alive & finite_members(each, self.size).to(state.alive.device)
        if bool(alive.any()) and not bool(alive.all()):
            each = repaired(each, alive, self.size)
        return EnsembleState(each if self._together else tuple(each), state.loss, alive)

    def posterior(self, joint: Problem, kept: Sequence[EnsembleState]) -> Mixture:
        alive = torch.stack([each.alive for each in kept]).all(0).tolist()
        lost = {index for index, good in enumerate(alive) if not good}
        if lost - _LOGGED.setdefault(joint, set()):
            _LOGGED[joint] |= lost
            logger.warning(
                f"Ensemble: of {self.size} members, these diverged and are left out: "
                f"{', '.join(map(str, sorted(lost)))} (counted from 0). "
                "Use a smaller step size, or look for extreme rows."
            )
        living = [index for index, good in enumerate(alive) if good]
        if self._together:
            together = self.method.posterior(joint, [each.members for each in kept])
            return Mixture([together.member(index) for index in living])
        return Mixture(
            [self.method.posterior(_member(joint, index), [each.members[index] for each in kept]) for index in living]
        )


def _member(joint: Problem, index: int) -> Problem:
    """The problem of a member: the same object where members do not differ, so that its caches serve all."""
    if joint.num_members is None and joint.network is not None and joint.network.member(index) is joint.network:
        return joint
    return joint.member(index)
