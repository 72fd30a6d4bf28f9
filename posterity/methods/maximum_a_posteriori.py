"""Maximum a posteriori, with proximal steps for priors that have kinks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from posterity.errors import BadData, check_batch_size, of_kinds, positive_whole
from posterity.inference.memory import fit_bytes
from posterity.inference.method import Footprint, GradientFit, Info, Traits, Work, theta_bytes
from posterity.methods.parts.gradient_runs import usual_steps
from posterity.methods.parts.mode_distance import distance_bytes, measured_distance
from posterity.methods.parts.width_cost import plug_in_excess
from posterity.methods.parts.work import gradient_work
from posterity.model import Batch, Buffers, Data, Joint, Problem
from posterity.model.batch import named_tensors
from posterity.model.data import NoData, StreamData
from posterity.numerics.random import Key
from posterity.numerics.workspace import workspace
from posterity.optim.lbfgs import LBFGS
from posterity.optim.optimizer import Adam, Optimizer, Proximal
from posterity.optim.schedules import Constant, Cosine, Schedule
from posterity.posteriors.point import Point

TOGETHER = 10_000_000  # rows times weights up to which all rows go into each step
EVALUATIONS = 3000  # the most steps of L-BFGS
BATCH = 128  # rows of a step of Adam where all would be too many
WHOLE_BATCH = 512  # rows up to which all go into a step of Adam
STEP_SIZE, WIDE = 0.01, 10_000  # of Adam, for up to this many weights; for more it falls as their fourth root
WARM_UP = 0.1  # share of the steps of Adam


def proximal_of(joint: Joint) -> Proximal:
    """The proximal operator of -prior_power / num_data times the part of the log prior with kinks.

    The likelihood's own parameters, at the end of theta, are left as they are.
    """
    power = joint.powers[1]
    factor = (power.unsqueeze(-1) if isinstance(power, Tensor) else power) / joint.num_data

    def proximal(theta: Tensor, step: float | Tensor) -> Tensor:
        weights, raw = joint.split(theta)
        if isinstance(step, Tensor) and step.dim():
            step = step[..., : joint.num_weights]
        reached = joint.bound_prior.proximal(weights, step * factor)
        return torch.cat([reached, raw], dim=-1) if raw.shape[-1] else reached

    return proximal


class MAPState(NamedTuple):
    """theta (P,) or (M, P), the optimiser's moments, batch-norm statistics and the number of steps done."""

    theta: Tensor
    optimizer: Any
    buffers: Buffers
    step: int


@dataclass(frozen=True)
class MAP(GradientFit):
    """Maximum a posteriori: the mode of the tempered log density, by L-BFGS on all rows or by Adam.

    **Math**: theta* = argmax lp log p(D | theta) + pp log p(theta). The trace's "loss" is minus the (batch estimate of
    the) log density in nats per datum. With a N(0, s^2) prior it is training with weight decay 1 / s^2 on the summed
    loss; the likelihood's learnt noise is fitted along with the weights.

    **Settings that are left out** are chosen once the problem is known:

    - With none of `steps`, `optimizer` and `schedule` given, and all rows in a step, `LBFGS` runs to convergence, for
      3,000 evaluations at most. All rows go into a step if `batch_size` is None, or if it is left out, the rows are
      in memory, and rows x (weights + inputs of a row) is at most 10^7. Priors with kinks, batch norm and augmented
      images go the other way.
    - Else `steps` of `Adam` along grad / num_data: 100 passes over the rows, at least 3,000 and at most 20,000 steps;
      `batch_size` 128, or all rows up to 512 of them; step size 0.01, times (10^4 / weights)^1/4 for more weights than
      10^4. The schedule rises over a tenth of the steps and falls to zero along a cosine; it is constant where an
      optimizer is given.

    The trace has "mode_distance" at the end: (g H^-1 g / P)^1/2, the distance to the mode in posterior standard
    deviations, root mean square over the weights, with the gradient g and the Gauss-Newton matrix H with the prior's
    precision (its diagonal for more than 300 weights). Above 1 there is a warning. It is left out for priors with
    kinks, batch norm and augmented images, and where the curvature refuses the network, as the log says. A linear model
    with many weights whose noise the evidence chose has "plug_in_excess" too: the nats a row that its plug-in loses.

    Under `Laplace` and `GroupLasso` priors, and tables with a kink, such as an elastic net (also as parts of
    `Layerwise`), the mode has weights that are exactly zero, which gradient steps only circle. With `proximal` each
    step goes along the gradient of all that is smooth, to z, and then to theta = argmin over w of sum of d_i (w_i -
    z_i)^2 / 2 - (pp / num_data) log p_k(w), p_k the part of the prior with kinks and 1 / d the optimiser's step size
    (`Adam`: by weight, step_size / (sqrt(v^) + epsilon)). For `Laplace` that is z moved towards the mean by (pp /
    num_data) / (scale d_i), and no further. For a group of `GroupLasso`, with k = rate pp / num_data, it is zero if ||d
    z|| <= k, else w_i = d_i z_i / (d_i + k / ||w||). Steps rest at stationary points of the log density and nowhere
    else. The trace has the fraction of "zeros" among weights, and `model.pruned` the smaller network.

    **Limit**: a local mode; `Adam` reaches it only with a schedule that goes to zero, on mini-batches nearly. Priors
    without kinks change nothing under `proximal`. A weight that no row has moved yet has the longest step by weight in
    `Adam`, step_size / epsilon, and is zero at once. A group vanishes only in a run that is long enough to bring it
    there, step size by step size. Where batch norm follows a layer, the mode has hardly any length: its weights, all
    shorter, compute the same (but for the norm's epsilon) under a higher prior density, so that the result depends on
    step size and length of the run.

    **Cost**: one forward and one backward pass a step; two moments of the size of theta for `Adam`, 65 vectors for
    `LBFGS`. A proximal step adds a few passes over theta, or some tens for `GroupLasso` with `Adam`. The distance costs
    a gradient over all rows, or over a tenth of the rows that the steps have seen, and the curvature of 512 rows.

    **References**: Bishop (2006), section 5.2; Kingma and Ba (2015); Parikh and Boyd (2014), Proximal algorithms,
    sections 4.2 and 6.5; Yun, Lozano and Yang (2021), Adaptive proximal gradient methods for structured networks.

    **Example**:

    >>> import torch, posterity as po
    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> joint = po.Joint(po.networks.MLP([2, 8, 2]), po.likelihoods.Categorical(), po.priors.Normal(), num_data=50)
    >>> q, trace = po.infer(po.methods.MAP(steps=300, batch_size=None), joint, (x, y))
    >>> po.metrics.accuracy(q.predict(x), y) > 0.9
    True
    """

    # None and "auto" stand for what is left out: `settled` replaces them, and no other function sees them.
    steps: int = None  # type: ignore[assignment]
    batch_size: int | None = "auto"  # type: ignore[assignment]
    optimizer: Optimizer = None  # type: ignore[assignment]
    schedule: Schedule = None  # type: ignore[assignment]
    proximal: bool = False

    def __post_init__(self) -> None:
        given: Any = self
        if given.steps is not None:
            positive_whole("MAP.steps", given.steps)
        if given.batch_size != "auto":
            check_batch_size("MAP.batch_size", given.batch_size)
        kinds = {"optimizer": Optimizer, "schedule": Schedule}
        of_kinds(self, proximal=bool, **{name: k for name, k in kinds.items() if getattr(self, name) is not None})
        if self._searches and (self.proximal or given.batch_size not in (None, "auto")):
            what = "proximal steps" if self.proximal else "mini-batches"
            raise ValueError(f"MAP: LBFGS takes all rows and plain gradients, not {what}. Use Adam, or leave them out.")

    @property
    def _searches(self) -> bool:
        return isinstance(self.optimizer, LBFGS)

    def settled(self, joint: Problem, data: Data) -> "MAP":
        given: Any = self
        if not self._searches:
            all_rows = _fits(joint, data) if given.batch_size == "auto" else given.batch_size is None
            free = given.steps is None and given.optimizer is None and given.schedule is None and not self.proximal
            if not (free and all_rows and _repeats(joint, data) and _smooth(joint)):
                return self.stepped(joint, data)
        if not _repeats(joint, data):
            raise BadData(
                "MAP: LBFGS needs the same rows in every step, and no batch norm. Pass tensors without an "
                "augmentation, or use Adam."
            )
        optimizer, schedule = given.optimizer or LBFGS(), given.schedule or Constant()
        return replace(self, steps=given.steps or EVALUATIONS, batch_size=None, optimizer=optimizer, schedule=schedule)

    def stepped(self, joint: Problem, data: Data) -> "MAP":
        """Return the fit by a fixed number of steps, for methods that act in between: never by `LBFGS`."""
        if self._searches:
            raise ValueError("LBFGS runs until it converges, and this method needs a fit by single steps. Use Adam.")
        given: Any = self
        size = given.batch_size
        if size == "auto":
            size = None if data.num_data <= WHOLE_BATCH and _fits(joint, data) else BATCH
        own = data.source.batch_size if isinstance(data, StreamData) and isinstance(data.source, DataLoader) else size
        return replace(
            self,
            steps=given.steps or usual_steps(data.num_data, own),
            batch_size=size,
            optimizer=given.optimizer or Adam(STEP_SIZE * min(1.0, WIDE / joint.size) ** 0.25),
            schedule=given.schedule or (Cosine(WARM_UP) if given.optimizer is None else Constant()),
        )

    @property
    def traits(self) -> Traits:
        passes = ("micro_batch",) if self._searches else ("bf16", "micro_batch")
        return Traits(recordable=not self._searches, passes=passes)  # a solver of triangles cannot be recorded

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        from posterity.methods.parts.scales import by_evidence  # which is made of this method

        return by_evidence(joint, data, start, key)

    def prepared(self, joint: Problem, data: Data) -> Problem:
        return joint.as_joint("MAP(proximal=True)", "Use MAP without proximal.") if self.proximal else joint

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        theta, fit = theta_bytes(joint), fit_bytes(self.optimizer, joint, data, self.batch_size)
        activations = {"activations of a batch": fit.pop("activations of a batch")}
        held, gradient = {"weights": theta, **fit}, {"gradient": 2 * theta}  # of data and prior
        if isinstance(self.optimizer, LBFGS):  # it makes new pairs of vectors from the old ones
            pairs, double = 2 * self.optimizer.memory * theta, 8 // joint.dtype.itemsize
            products = double * pairs * (1 if double == 1 else 2)  # in float64
            phases = [{**gradient, **activations}, {"line search": pairs + products + 10 * theta}]
        else:
            proximal = {"proximal step": 6 * theta} if self.proximal else {}
            phases = [{**gradient, **activations, **proximal}]
        closing = distance_bytes(joint, data, self._seen(self.steps, data), self.batch_size)
        return Footprint.at_peak(self.words(joint), held, *phases, *({"gradient": theta, **each} for each in closing))

    def work(self, joint: Problem, data: Data) -> Work | None:
        if self.proximal or not isinstance(self.optimizer, Adam):
            return None
        own = gradient_work("MAP", joint, data, self.batch_size, vectors=14)
        return own and replace(own, units=self.chosen("steps"))

    def init(self, joint: Problem, theta: Tensor, key: Key) -> MAPState:
        theta = theta.clone()
        return MAPState(theta, self.optimizer.init(theta), joint.starting_buffers(theta), 0)

    def step(self, joint: Problem, state: MAPState, batch: Batch, key: Key) -> tuple[MAPState, Info]:
        theta = state.theta
        if isinstance(self.optimizer, LBFGS):
            search = state.optimizer
            value, grad, buffers = joint.value_and_grad(search.trial, batch, state.buffers)
            search = self.optimizer.climb(theta, value, grad, search)
            return MAPState(theta, search, buffers, state.step + 1), {"loss": search.value / joint.num_data}
        if not self.proximal:
            value, grad, buffers = joint.value_and_grad(
                theta, batch, state.buffers, out=workspace(joint, "grad", theta)
            )
            moments = self._ascended(joint, theta, grad, state)
            return MAPState(theta, moments, buffers, state.step + 1), {"loss": -value / joint.num_data}
        joint = joint.as_joint("MAP(proximal=True)")
        value, grad, buffers = joint.value_and_grad(theta, batch, state.buffers, smooth=True)
        moments = self.optimizer.ascend_proximal(
            theta, grad, state.optimizer, self._step_size(state), joint.num_data, proximal_of(joint)
        )
        others = torch.linalg.vector_norm(theta[..., : joint.num_weights], ord=0, dim=-1)
        zeros = 1.0 - others / joint.num_weights
        info = {"loss": -value / joint.num_data, "zeros": zeros}
        return MAPState(theta, moments, buffers, state.step + 1), info

    def finished(self, state: MAPState) -> str:
        return "L-BFGS has converged" if self._searches and bool(state.optimizer.converged.all()) else ""

    def closing(self, joint: Problem, state: MAPState, data: Data) -> Info:
        seen = self._seen(state.step, data)
        if self._searches:
            remedy = f"Use more steps: MAP(steps={4 * self.steps}, optimizer=LBFGS())."
        else:
            remedy = (
                f"Use more steps, such as {4 * self.steps}, and a schedule that falls to zero; or leave steps, "
                "optimizer and schedule out."
            )
        distance = measured_distance(joint, state.theta, state.buffers, data, seen, self.batch_size, remedy)
        return {**distance, **plug_in_excess(joint, state.theta, state.buffers, data)}

    def _seen(self, steps: int, data: Data) -> int:
        """Rows that pass the network in so many steps."""
        return steps * min(data.num_data, self.batch_size or data.num_data)

    def posterior(self, joint: Problem, kept: Sequence[MAPState]) -> Point:
        last = kept[-1]
        theta = last.theta.detach().clone()
        return Point(joint.fitted(theta), theta[..., : joint.num_weights], last.buffers)


def _fits(joint: Problem, data: Data) -> bool:
    """Whether all rows fit into a step."""
    if isinstance(data, (NoData, StreamData)):
        return isinstance(data, NoData)
    rows = data.first()
    inputs = sum(tensor.numel() for tensor in named_tensors(rows.inputs).values())
    return data.num_data * joint.size + inputs <= TOGETHER


def _repeats(joint: Problem, data: Data) -> bool:
    """Whether the log density over all rows is the same in every step."""
    loads = isinstance(data, StreamData) and isinstance(data.source, DataLoader)
    return not loads and data.augmentation is None and (joint.network is None or not joint.network.trains_statistics)


def _smooth(joint: Problem) -> bool:
    return not isinstance(joint, Joint) or not joint.bound_prior.nonsmooth
