"""What variational fits by gradients share: the rule for settings that were left out, a start at a mode, a verdict."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from posterity.errors import of_kinds
from posterity.inference.allocations import batch_bytes, gradient_bytes
from posterity.inference.memory import fit_bytes
from posterity.inference.method import Footprint, GradientFit, Info, Method, Traits, Work, theta_bytes
from posterity.inference.run import Trace
from posterity.methods.parts.gradient_runs import usual_steps
from posterity.methods.parts.gradients.drawn_weights import PairedSampling, WeightSampling
from posterity.methods.parts.gradients.estimator import Estimator
from posterity.methods.parts.mode_search import AtMode, Search, SearchState, first_damping, search_step
from posterity.methods.parts.width_cost import FEWEST_DRAWS, FEWEST_ROWS, SHARE, measured_width_cost
from posterity.methods.parts.work import gradient_work
from posterity.model import Batch, Data, Joint, Problem
from posterity.model.data import StreamData
from posterity.numerics.random import Key
from posterity.optim import Constant, Cosine, Optimizer, ScaledAdam
from posterity.posteriors.gaussian import LARGE
from posterity.priors.fan import FanIn, ScaleRule

ROWS = 1024
"""The largest number of rows that a step takes all together, where the batch size was left out."""
BATCH = 128
"""The batch size, where it was left out and there are more rows."""
SEARCHED = 4  # matrices of a search for a mode
WEIGHTS = 512
"""The largest number of random weights of a small problem: it begins at a mode and takes more draws a step."""
DRAWS = 8
SEARCH = 40
DIAGONAL = 0.5
"""Share of a run in which a covariance grows in its diagonal alone, where the optimiser was left out."""
PER_DRAW = 12
"""Vectors of the size of theta that a draw of the weights moves: noise, weights, and gradients in mean and scale."""

Fit = TypeVar("Fit", bound="VariationalFit")
Start = ScaleRule | AtMode


def all_rows(joint: Problem, data: Data, batch_size: int | None) -> bool:
    """Return whether a step takes all rows together, and these are few."""
    source = data.source if isinstance(data, StreamData) else None
    size = (source.batch_size or 1) if isinstance(source, DataLoader) else batch_size
    return joint.num_data <= ROWS and (size is None or size >= joint.num_data)


class VariationalFit(GradientFit):
    """A fit of q by gradients of the ELBO.

    Settings that were left out are chosen by `settled`:

    - batch_size: all rows, if there are at most 1,024 in memory, else 128.
    - steps: 3,000, or 100 passes over the rows if that is more, and 20,000 at most.
    - optimizer: `ScaledAdam`, of step size 0.1 where a step takes all rows and at most 512 weights are random, else
      0.01. With it go the schedule `Cosine` with a warm-up, and in that smaller kind of problem eight draws a step and
      a start at a mode, `AtMode`.
    - With another optimiser that is given, they are a constant schedule, one draw, and a start at the module's weights
      with the scales of FanIn(0.1).
    """

    initial_scales: Start | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_scales is not None and not isinstance(self.initial_scales, AtMode):
            of_kinds(self, initial_scales=ScaleRule)
        if self._optimizer_given:
            companions = {"schedule": Constant(), "initial_scales": FanIn(gain=0.1), **self._companions()}
            for name, value in companions.items():
                if getattr(self, name) is None or getattr(self, name) == "auto":
                    object.__setattr__(self, name, value)

    @property
    def _optimizer_given(self) -> bool:
        return self.optimizer is not None and not isinstance(self.optimizer, ScaledAdam)

    @abstractmethod
    def _companions(self) -> dict[str, Any]:
        """Return what goes with an optimiser that is given, beside schedule and start."""

    def settled(self: Fit, joint: Problem, data: Data) -> Fit:
        size = self.batch_size
        if size == "auto":
            size = None if joint.num_data <= ROWS and not isinstance(data, StreamData) else BATCH
        steps = usual_steps(joint.num_data, size) if self.steps is None else self.steps
        network = joint.network
        small = all_rows(joint, data, size) and joint.num_random <= WEIGHTS and (network is None or not network.buffers)
        search = min(SEARCH, steps // 10)
        start: Start = AtMode(search) if small and search else FanIn(gain=0.1)
        changes: dict[str, Any] = {
            "steps": steps,
            "optimizer": ScaledAdam(0.1 if small else 0.01) if self.optimizer is None else self.optimizer,
            "schedule": Cosine(warmup=0.05) if self.schedule is None else self.schedule,
            "initial_scales": start if self.initial_scales is None else self.initial_scales,
            **self._choices(joint, DRAWS if small else 1),
        }
        return replace(self, batch_size=size, **changes)  # type: ignore[type-var]

    def shortened(self, length: int) -> tuple[Method, str] | None:
        result = super().shortened(length)
        assert result is not None
        method, reason = result
        if not reason and self._waits:
            reason = "its covariance waits for a share of all steps"
        return method, reason

    @property
    def _waits(self) -> bool:
        """Whether some parameters rest in the first share of the run."""
        return False

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        from posterity.methods.parts.scales import by_m_steps  # which is made of such methods

        return by_m_steps(self, joint, data, start, key)

    @abstractmethod
    def _choices(self, joint: Problem, draws: int) -> dict[str, Any]:
        """Return further settings that were left out, for this number of draws a step."""

    @property
    def _rows(self) -> int | None:
        return None if self.batch_size == "auto" else self.batch_size

    def _sampled_work(self, joint: Problem, data: Data, vectors: int) -> Work | None:
        """The work where the estimator draws all weights, with so many vectors moved in a step beside its draws."""
        estimator = self.chosen("estimator")
        if not isinstance(estimator, (WeightSampling, PairedSampling)):
            return None
        summed = joint.size + joint.num_random
        kind, draws = type(self).__name__, estimator.draws
        vectors += PER_DRAW * draws
        own = gradient_work(kind, joint, data, self._rows, vectors=vectors, draws=draws, summed=summed)
        return own and replace(own, units=self.chosen("steps"))

    def _sampled_footprint(
        self, joint: Problem, data: Data, held: dict[str, int], optimised: int, prior: int, posterior: int
    ) -> Footprint:
        """The memory of a run that holds these parts, and what its estimator does.

        The optimiser moves so many numbers; `prior` and `posterior` are bytes that the terms of the prior, and the
        posterior at the end, take for themselves. Estimators that draw inside layers are bounded from above.
        """
        estimator = self.chosen("estimator")
        draws: int = getattr(estimator, "draws", 1)
        fit = fit_bytes(self.chosen("optimizer"), joint, data, self._rows, optimised)
        both = joint.size + joint.num_random
        if isinstance(estimator, PairedSampling) and joint.num_members is None:
            apart = draws * joint.dtype.itemsize * (2 * both + joint.num_random)
            fit["activations of a batch"] = batch_bytes(data, self._rows)
            fit["activations of a batch"] += gradient_bytes(joint, data, self._rows, draws)
        else:
            apart = theta_bytes(joint, both * (2 if draws > 1 else 1))
        if not isinstance(estimator, (WeightSampling, PairedSampling)):
            fit["activations of a batch"] *= 2
        held = {**held, "optimiser": fit["optimiser"], "draws": apart}
        if self.search:
            matrices = {"search for the mode": SEARCHED * 8 * joint.num_random**2 * (joint.num_members or 1)}
        else:
            matrices = {}
        activations = {"activations of a batch": fit["activations of a batch"]}
        phases = [activations, {"prior": prior}, matrices, {"posterior": posterior}]
        if SHARE * self.rows_seen(data) >= FEWEST_ROWS * FEWEST_DRAWS:  # the width's cost is measured, by draws
            members, count = joint.num_members or 1, joint.num_random
            drawn = (8 + joint.dtype.itemsize) * max(count, LARGE["cpu"])
            phases.append({"posterior": theta_bytes(joint) + 12 * members * count, "draws of the posterior": drawn})
        return Footprint.at_peak(self.words(joint), held, *phases)

    @property
    def traits(self) -> Traits:
        estimator: Estimator | None = getattr(self, "estimator", None)
        plain = not self.search and (estimator is None or estimator.of_batches)
        return Traits(passes=("bf16", "micro_batch") if plain else ())

    @property
    def search(self) -> int:
        """Number of steps that look for a mode."""
        return self.initial_scales.steps if isinstance(self.initial_scales, AtMode) else 0

    @property
    def scale_rule(self) -> ScaleRule:
        """The standard deviations before the first step."""
        return FanIn(gain=0.1) if isinstance(self.initial_scales, AtMode) else self.chosen("initial_scales")

    def _moments(self, theta: Tensor, parameters: Tensor) -> Any:
        """State of the optimiser before the first step, with that of the search if there is one."""
        optimizer: Optimizer = self.chosen("optimizer")
        moments = optimizer.init(parameters)
        return SearchState(first_damping(theta), moments) if self.search else moments

    def _searched(self, joint: Problem, theta: Tensor, batch: Batch, state: Any) -> tuple[Search, Any, Info]:
        """Take a step of the search; returns it, the optimiser's state and the values to record."""
        before, last = state.optimizer, state.step + 1 == self.search
        result = search_step(joint, theta, before.damping, batch, state.buffers, last)
        found = before._replace(damping=result.damping)
        return result, found, {"loss": -result.value / joint.num_data}

    def _ascended(
        self, joint: Problem, parameters: Tensor, grad: Tensor, state: Any, units: Tensor | None = None
    ) -> Any:
        """Move the parameters in place along the gradient, in `units` if the optimiser takes them."""
        held: Any = state.optimizer
        inner = state._replace(optimizer=held.moments) if isinstance(held, SearchState) else state
        if isinstance(self.optimizer, ScaledAdam) and units is not None:
            step_size = self._step_size(inner)
            moments = self.optimizer.ascend_in(units, parameters, grad, inner.optimizer, step_size)
        else:
            moments = super()._ascended(joint, parameters, grad, inner)
        return held._replace(moments=moments) if isinstance(held, SearchState) else moments

    def closing(self, joint: Problem, state: Any, data: Data) -> Info:
        """Record "width_cost", the nats a row by which the posterior predicts worse than its mean; warn if it harms."""
        posterior = partial(self.posterior, joint, [self.keep(state)])
        return measured_width_cost(type(self).__name__, joint, posterior, data, self.rows_seen(data))

    def rows_seen(self, data: Data) -> int:
        """Return the number of rows that all steps together take."""
        steps: int = self.chosen("steps")
        return steps * min(data.num_data, self._rows or data.num_data)

    def doubts(self, joint: Problem, trace: Trace) -> Sequence[str]:
        """Record "elbo_gap", an estimate in nats of what more steps would add to the ELBO, and warn if it is large.

        It is 0 where the trend of the ELBO is within four standard errors.
        """
        if "elbo" not in trace:
            return []
        estimate = elbo_gap(self, joint, trace)
        if estimate is None:
            return []
        gap, error = estimate
        gap = torch.where(gap > _ERRORS * error, gap, torch.zeros_like(gap))
        if isinstance(self.optimizer, ScaledAdam) and self.chosen("steps") < 0.5 * usual_steps(
            joint.num_data, self._rows
        ):
            half = trace["elbo"][len(trace["elbo"]) // 2 :] * joint.num_data  # too few for its steps to be trusted
            gap = torch.maximum(gap, half[len(half) // 2 :].mean(0) - half[: max(1, len(half) // 2)].mean(0))
        trace.record(trace.last_step("elbo"), {"elbo_gap": gap})
        elbo = trace["elbo"][-_LAST:].mean(0) * joint.num_data
        far = gap > (_RELATIVE * elbo.abs()).clamp_min(_NATS)
        if not bool(far.any()):
            return []
        return [
            f"{type(self).__name__} has not converged: its ELBO still rises, by some {float(gap.max()):.2g} nats if "
            f"its last steps came again. Take more steps than {self.steps}, or leave steps and optimizer out."
        ]


_LAST = 50  # steps whose mean ELBO is the present one
_ERRORS = 4.0  # standard errors from which a trend counts
_NATS, _RELATIVE = 0.1, 0.005  # gaps below the larger of these, the second relative to the ELBO, are small
_LATE = 0.25  # share of the run whose trend is estimated
_FEWEST = 40  # steps that a trend is estimated from


def elbo_gap(fit: VariationalFit, joint: Problem, trace: Trace) -> tuple[Tensor, Tensor] | None:
    """Estimate the nats that the ELBO would gain if its last steps came again, with a standard error.

    The ELBO (T,) or (T, M) of the last quarter of the run is regressed on the sum of step sizes so far and, since noise
    in q costs some of it, on the present step size. So a schedule that comes to rest does not look like convergence,
    nor the fall of the noise like a rise of the optimum. None where these are fewer than forty steps.
    """
    column, steps = trace["elbo"] * joint.num_data, trace.steps("elbo").to(trace["elbo"].device)
    late = steps > (1.0 - _LATE) * fit.chosen("steps")
    column, steps = column[late], steps[late]
    if len(steps) < _FEWEST:
        return None
    schedule, total = fit.chosen("schedule"), fit.chosen("steps")
    factor = column.new_tensor([float(schedule.factor(step - 1, total)) for step in steps.tolist()])
    travelled = factor.cumsum(0) / factor.sum()
    terms = [torch.ones_like(factor), travelled]
    if float(factor.max() - factor.min()) > 0.01 * float(factor.max()):
        terms.append(factor)
    design = torch.stack(terms, 1)
    inverse = torch.linalg.pinv(design.T @ design)
    values = column.reshape(len(steps), -1)
    weights = inverse @ design.T @ values  # (terms, M)
    noise = (values - design @ weights).square().sum(0) / (len(steps) - len(terms))
    error = (noise * inverse[1, 1]).sqrt()
    return weights[1].reshape(column.shape[1:]), error.reshape(column.shape[1:])


def sampling(draws: int) -> Estimator:
    """Return the estimator of factorised fits for this number of draws."""
    return PairedSampling(draws) if draws > 1 else WeightSampling()


def mean_units(scale: Tensor) -> Tensor:
    """Units of steps in means with these standard deviations: 1, and no more than a hundred of these.

    A fixed unit finds optima far away in networks, whose weights are of order one; the bound lets narrow q come to
    rest, whatever the units of the data.
    """
    return torch.minimum(100.0 * scale, scale.clamp_min(1.0))
