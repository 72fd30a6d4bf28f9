"""E-steps that are windows of Markov chains."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.inference.method import Info
from posterity.methods.expectations.expectation_run import ExpectationRun
from posterity.methods.sampler import Sampler
from posterity.model.data import Batch, Data, Feed
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior
from posterity.storage import leaves, mapped


class WindowState(NamedTuple):
    """The state of the chains, and what they kept since the last M-step: `kept` draws in tensors (W, ...)."""

    chains: Any
    window: dict[str, Tensor]
    kept: int


@dataclass(frozen=True)
class ContinuedChains(ExpectationRun):
    """Chains that go on while the problem changes; a posterior is what they have kept since it last did.

    Half of the draws belong to the rounds, in equal parts; the others are those of the last problem. The warm-up of
    samplers goes on through the rounds, so that their step size and mass are for the last problem, too.
    """

    method: Any  # a `Chains`
    rounds: int

    @cached_property
    def _kept_steps(self) -> list[int]:
        return list(islice((step for step in count(1) if self.method.keeps(step)), self.method.draws))

    @cached_property
    def stops(self) -> tuple[int, ...]:  # type: ignore[override]
        """After as many draws as belong to a round, and after the last one."""
        kept, half = self._kept_steps, len(self._kept_steps) // 2
        ends = {half * (k + 1) // self.rounds for k in range(self.rounds)} - {0}
        return tuple(kept[end - 1] for end in sorted(ends | {len(kept)}))

    @cached_property
    def _chains(self) -> Any:
        """The method whose warm-up ends with the last round."""
        method, half = self.method, len(self._kept_steps) // 2
        if not isinstance(method, Sampler) or not method.warmup or not half:
            return method
        changed: Any = method
        return dataclasses.replace(changed, warmup=method.warmup + half * method.thin, draws=method.draws - half)

    @cached_property
    def _room(self) -> int:
        """The most draws between two stops."""
        return len(self._kept_steps) - len(self._kept_steps) // 2

    def steps(self, data: Data, key: Key) -> Feed:
        """Those of the method, until the last draw."""
        return Feed(self.stops[-1], self._chains.batches(data, key).from_step)

    def init(self, joint: Joint, theta: Tensor, key: Key) -> WindowState:
        """With an empty window."""
        return WindowState(self._chains.init(joint, theta, key), {}, 0)

    def step(self, joint: Joint, state: WindowState, done: int, batch: Batch, key: Key) -> tuple[WindowState, Info]:
        """A step of all chains; the first after a stop begins with the density of the new problem."""
        chains, method = state.chains, self._chains
        if isinstance(method, Sampler) and done in self.stops:
            with torch.no_grad():
                chains = method.renewed(joint, chains, batch)
        chains, info = method.step(joint, chains, batch, key)
        state = state._replace(chains=chains)
        return (self._kept(state) if self.method.keeps(done + 1) else state), info

    def _kept(self, state: WindowState) -> WindowState:
        draw = leaves(self.method.keep(state.chains))
        window = state.window or {
            path: torch.zeros((self._room, *tensor.shape), dtype=tensor.dtype, device="cpu")
            for path, tensor in draw.items()
        }
        for path, tensor in draw.items():
            window[path][state.kept].copy_(tensor.detach())
        return state._replace(window=window, kept=state.kept + 1)

    def after_stop(self, state: WindowState) -> WindowState:
        """With an empty window."""
        return state._replace(kept=0)

    def posterior(self, joint: Joint, state: WindowState) -> Posterior:
        """Of the window, or of where the chains are while that is empty."""
        return _of_window(self.method, joint, state)

    def last_posterior(self, joint: Joint, state: WindowState) -> Posterior:
        """As that of a run with as many draws, so that bad chains are told of once the window is full."""
        return _of_window(dataclasses.replace(self.method, draws=self._room), joint, state)


def _of_window(method: Any, joint: Joint, state: WindowState) -> Posterior:
    now = method.keep(state.chains)
    rows = [_state(now, state.window, row) for row in range(state.kept)]
    found: Posterior = method.posterior(joint, rows or [now])
    return found


def _state(like: Any, window: dict[str, Tensor], row: int) -> Any:
    values = iter([window[path][row] for path in leaves(like)])
    return mapped(lambda _: next(values), like)
