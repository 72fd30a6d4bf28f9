"""The Laplace approximation: a Gaussian at a mode, from the curvature there."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import NoneType
from typing import Final, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.curvature import (
    BlockDiagonal,
    CorrectedKronecker,
    Curvature,
    Diagonal,
    Full,
    GaussNewton,
    Hutchinson,
    Kronecker,
    LowRank,
    MonteCarloFisher,
    Structure,
)
from posterity.curvature.curvature import Rows
from posterity.curvature.kronecker import SMALL
from posterity.curvature.structure import Sums
from posterity.curvature.survey import PLAIN, Place, survey
from posterity.errors import check_batch_size
from posterity.evidence import PerTensor, PredictiveFit, Tuning
from posterity.evidence.cavities import LEAVE_ONE_OUT
from posterity.inference.memory import refuse_too_large
from posterity.inference.method import Footprint, Info, Method, Traits, Work, theta_bytes
from posterity.methods.parts.curvature_memory import end_bytes, formed_bytes, pass_bytes, predicted_bytes
from posterity.methods.parts.gaussian_at_mode import Fit, gaussian_at_mode, prior_precision, side_by_side, with_rows
from posterity.methods.parts.subset import AllWeights, KnownCurvature, LastLayer, Subset, largest
from posterity.methods.parts.width_cost import MOST_OUTPUTS, that_predicts
from posterity.methods.parts.work import curvature_work
from posterity.model import Buffers, Joint, Problem
from posterity.model.batch import Inputs
from posterity.model.data import Batch, Data, Feed, NoData
from posterity.model.scales import leaves_out
from posterity.numerics.random import Key
from posterity.posteriors import Linearized, Posterior
from posterity.priors import Correlated

logger = logging.getLogger("posterity")

_LAYERWISE = (Kronecker, CorrectedKronecker, BlockDiagonal)  # structures with sums for each layer

_HINTS = {
    "curvature": "Use one of posterity.curvature, such as GaussNewton().",
    "structure": "Use one of posterity.curvature, such as Kronecker(), or None.",
    "subset": "Use one of posterity.methods, such as LastLayer().",
    "tuning": 'Use "auto", Evidence(), MacKay() or None; ValidationGrid() goes to evidence.retuned after the fit.',
}

WHOLE = 3000  # weights up to which the default structure is the whole matrix
AUTO: Final = "auto"

# Rows for leave-one-out predictions, by the problem of the run that they are of.
_samples: "WeakKeyDictionary[Joint, Batch]" = WeakKeyDictionary()


class LaplaceState(NamedTuple):
    """theta, and for each member the sums over the rows seen so far, untempered, in float64.

    `data` (M, 3) has the log-likelihood, the squared residuals and their number, `slopes` gradients of the
    log-likelihood (see `Rows.slope`), `places` the positions of layers among the R weights. `chosen` (S,) are the
    single weights taken after a first pass, empty without one; `passes` are done, `rows` seen in the present one.
    """

    theta: Tensor
    sums: list[Sums]
    data: Tensor
    slopes: list[Tensor]
    places: list[Place]
    chosen: Tensor
    rows: int
    passes: int
    buffers: Buffers


@dataclass(frozen=True)
class Laplace(Method):
    """The Laplace approximation: N(theta*, Lambda^-1) with Lambda the curvature of the negative log posterior.

    **Math**: Lambda = lp C + pp diag(-d^2 log p / d theta^2), C the TOTAL curvature of the negative log-likelihood over
    all data, kept in a `structure` (None: the whole matrix up to 3,000 weights, Kronecker factors beyond).
    log evidence = log density at theta* + R/2 log 2 pi - 1/2 logdet Lambda, with the prior of the R weights (and of a
    learnt noise) alone: points are given. `subset` chooses the weights: all of them, if it is left out, or the last
    layer where a network has more than 3,000 and the factors of some are not known, or rough.

    **Scales**: given ones are known. Those that were left out come with the posterior that the run starts from, as its
    fit chose them, unless the Gaussian at them surely predicts worse than a narrower one. Then, and for a network that
    was trained elsewhere, `tuning="auto"` chooses the prior precision by how the posterior predicts
    (`evidence.PredictiveFit`): on the rows `infer(..., validation=...)`, or else by approximate leave-one-out. theta*
    stays where it is.
    `tuning=Evidence()` moves prior precision and noise, given or not, to the maximum of the log evidence at theta*,
    which stays where it is; None leaves them.

    **Limit**: exact for linear models with Gaussian noise; local: it sees nothing but the curvature at theta*, which
    must be a mode (start from MAP); the log names the distance where it is not. Where leave-one-out predictions are
    worse than those of theta* alone, the log says by how much.

    **Cost**: one pass over the data with `GaussNewton` and most structures, see those; `Full` holds R x R numbers and
    factors them once, R^3 / 3. `infer(..., precision="bf16")` runs the network in bf16 and sums in float32, but for
    `LowRank` and the exact Hessian.

    **References**: MacKay (1992); Ritter et al. (2018); Immer et al. (2021); Daxberger et al. (2021).

    **Example**:

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 10).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=10)
    >>> q, _ = po.infer(po.methods.MAP(steps=500, batch_size=None), joint, (x, 2 * x))
    >>> q, _ = po.infer(po.methods.Laplace(tuning=None), joint, (x, 2 * x), start=q)
    >>> bool(q.predict(torch.tensor([[10.0]])).std > q.predict(torch.tensor([[0.0]])).std)
    True
    """

    curvature: Curvature = field(default_factory=GaussNewton)
    structure: Structure | None = None
    subset: Subset = field(default_factory=KnownCurvature)
    tuning: Tuning | Literal["auto"] | None = AUTO
    batch_size: int | None = 1024

    def __post_init__(self) -> None:
        check_batch_size("Laplace.batch_size", self.batch_size)
        for name, kind, optional in (
            ("curvature", Curvature, False),
            ("structure", Structure, True),
            ("subset", Subset, False),
            ("tuning", Tuning, True),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (optional and value is None) and (name, value) != ("tuning", AUTO):
                hint = f"Call it: {value.__name__}()." if isinstance(value, type) else _HINTS[name]
                raise TypeError(f"Laplace.{name} must be of kind {kind.__name__}. Got {value!r}. {hint}")
        if self.structure is not None and self.structure.needs_columns and not self.curvature.factored:
            raise ValueError(
                f"Laplace: {self.structure} is made of the columns of a curvature, and {self.curvature} has none. "
                "Use GaussNewton(), MonteCarloFisher() or EmpiricalFisher(), or another structure."
            )
        if self.subset.count is not None and isinstance(self.structure, _LAYERWISE):
            raise ValueError(
                f"Laplace: {self.structure} is of whole tensors, and {self.subset} chooses single weights. "
                "Use the structure Full() or Diagonal()."
            )
        apart = isinstance(self.tuning, Tuning) and isinstance(self.tuning.groups, PerTensor)
        if apart and isinstance(self.structure, CorrectedKronecker):
            raise ValueError(
                "Laplace: corrected eigenvalues are for weight and bias in fixed proportions, and PerTensor() tunes "
                "them apart. Use PerLayer(), Shared() or the structure Kronecker()."
            )
        if isinstance(self.structure, LowRank) and isinstance(self.curvature, MonteCarloFisher):
            raise ValueError(
                f"Laplace: {self.structure} needs the same matrix in every pass, and {self.curvature} draws another in "
                "each. Use GaussNewton() or EmpiricalFisher(), or another structure."
            )

    def structure_for(self, joint: Problem) -> Structure:
        """The structure, chosen by the number of weights where none is given."""
        if self.structure is not None:
            return self.structure
        whole = joint.num_random <= WHOLE or not self.curvature.factored or isinstance(joint.random, Tensor)
        return Full() if whole else Kronecker()

    def settled(self, joint: Problem, data: Data) -> "Laplace":
        if not isinstance(self.subset, KnownCurvature):
            return self
        return replace(self, subset=self._usual_subset(joint, data))

    def _usual_subset(self, joint: Problem, data: Data) -> Subset:
        """The last layer where some weights have no Kronecker factors, or rough ones, else all weights."""
        chosen = isinstance(joint, Joint) and not isinstance(joint.random, Tensor) and not isinstance(data, NoData)
        if self.structure is not None or not chosen or not isinstance(self.structure_for(joint), Kronecker):
            return AllWeights()
        problem, inputs = joint.as_joint("Laplace"), data.first().member(0).inputs
        try:
            places = (place for place in survey(problem, inputs).places if place.block.size > SMALL)
            without = [place for place in places if place.kind == PLAIN or not place.direct]
            names = sorted({name for place in without for name in place.block.names})
            if not names:
                return AllWeights()
            LastLayer().of(problem, inputs)
        except (ValueError, TypeError, RuntimeError, NotImplementedError):  # `prepared` says what is wrong
            return AllWeights()
        logger.info("Laplace takes the last layer alone: %s have no or rough Kronecker factors.", ", ".join(names))
        return LastLayer()

    @property
    def traits(self) -> Traits:
        by_columns = self.curvature.factored and not isinstance(self.structure, (LowRank, Hutchinson))
        passes = ("bf16",) if by_columns else ()
        return Traits(self.subset.count is None, anytime=False, passes=passes, second_order=True)

    def prepared(self, joint: Problem, data: Data) -> Problem:
        """The joint over the subset; raises an error where the network or the memory does not allow the fit."""
        if isinstance(data, NoData):
            _check_for_density(self)
            return joint
        joint = joint.as_joint("Laplace")
        inputs = data.first().member(0).inputs
        if joint.network.mixes_rows:
            raise ValueError(
                "Laplace needs a likelihood that factorises over rows, but a batch norm layer uses batch statistics in "
                "evaluation mode. Make it with track_running_stats=True."
            )
        if joint.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"Laplace needs weights of float32 or float64: sums of squares of {joint.dtype} say little. "
                "Make the joint of module.float(), and give it inputs of float32."
            )
        joint = self.subset.of(joint, inputs)
        if isinstance(joint.bound_prior, Correlated) and (joint.random_indices is not None or self.subset.count):
            raise ValueError(
                "Laplace with a Correlated prior is over all of its weights. Got a subset of them. "
                "Use subset=AllWeights() and a joint with random='*'."
            )
        refuse_too_large(self, joint, data)
        if self.tuning == AUTO and self.curvature.factored and joint.num_members is None:
            rows = data.sample(PredictiveFit().rows, for_all=False)
            if not rows.per_member:
                _samples[joint] = rows
        return joint

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        weights = {"weights": 2 * theta_bytes(joint)}
        if joint.network is None:
            return Footprint(self._words(joint), {**weights, "curvature and precision": formed_bytes(joint.size)})
        given, inputs = joint.as_joint("Laplace"), data.first().member(0).inputs
        joint = self.subset.of(given, inputs)
        number = self.subset.count or 0
        chosen = torch.arange(min(number, joint.num_random))  # as many indices as single weights will be chosen
        structure, known = self.structure_for(joint.narrowed(chosen)), survey(joint, inputs)
        predictions = predicted_bytes(joint, known, structure)
        choosing = Diagonal().bytes(known, joint.num_data, 1) if number else 0  # after a pass for the variances of all
        known = replace(known, select=chosen) if number else known
        in_pass = pass_bytes(joint, known, self.curvature, structure, self.batch_size)
        tuned = isinstance(self.tuning, Tuning) or (self.tuning == AUTO and leaves_out(joint))
        judged = self.tuning == AUTO and self.curvature.factored and prod(known.event) <= MOST_OUTPUTS
        rows = min(joint.num_data, PredictiveFit().rows) if judged and joint.num_members is None else 0
        ends = end_bytes(joint, known, self.curvature, structure, tuned=tuned, rows=rows)
        for parts in (in_pass, *ends):
            parts["curvature and precision"] = max(parts["curvature and precision"], choosing)
        found = Footprint.at_peak(self._words(joint.narrowed(chosen)), weights, in_pass, *ends)
        return replace(found, predictions=predictions, alternatives=lambda: self._alternatives(given, inputs))

    def work(self, joint: Problem, data: Data) -> Work | None:
        if joint.network is None or not isinstance(self.subset, AllWeights):
            return None
        given, structure = joint.as_joint("Laplace"), self.structure_for(joint)
        known = survey(given, data.first().member(0).inputs)
        moved = 2 * sum(pass_bytes(given, known, self.curvature, structure, self.batch_size).values())
        return curvature_work(given, data, self.batch_size, self.curvature, structure, moved)

    def _words(self, joint: Problem) -> str:
        """Name of the method with the settings that decide its size."""
        structure = _name(self.structure_for(joint))
        return f"Laplace with {self.curvature} and {structure} over {joint.num_random:,} weights"

    def _alternatives(self, joint: Joint, inputs: Inputs) -> dict[str, Method]:
        """Other structures, and the last layer alone, best first."""
        single = isinstance(joint.random, Tensor) or self.subset.count is not None
        structures = (Full(), Diagonal()) if single else (Full(), CorrectedKronecker(), Kronecker(), Diagonal())
        others: dict[str, Method] = {}
        for structure in structures:
            if self.curvature.factored or isinstance(structure, Full):
                others[f"structure={_name(structure)}"] = replace(self, structure=structure)
            else:
                other = replace(self, structure=structure, curvature=GaussNewton())
                others[f"structure={_name(structure)}, curvature=GaussNewton()"] = other
        if isinstance(self.subset, (AllWeights, KnownCurvature)) and not isinstance(joint.random, Tensor):
            try:
                LastLayer().of(joint, inputs)
                others["subset=LastLayer()"] = replace(self, subset=LastLayer(), structure=None)
            except ValueError:  # the network has none, or it is not among the random weights
                pass
        return others

    @property
    def passes(self) -> int:
        """Number of passes over all rows: by the structure, and one more to choose single weights."""
        return (self.subset.count is not None) + (1 if self.structure is None else self.structure.passes)

    def batches(self, data: Data, key: Key) -> Feed:
        return data.passes(self.batch_size, self.passes)

    def init(self, joint: Problem, theta: Tensor, key: Key) -> LaplaceState:
        members = 1 if theta.dim() == 1 else theta.shape[0]
        if self.subset.count is not None and theta.dim() > 1:
            raise ValueError(f"{self.subset} chooses weights for one theta at a time. Use joint.member(i) for each.")
        data, chosen = theta.new_zeros(members, 3, dtype=torch.float64), theta.new_zeros(0, dtype=torch.int64)
        return LaplaceState(theta.clone(), [], data, [], [], chosen, 0, 0, joint.starting_buffers(theta))

    def step(self, joint: Problem, state: LaplaceState, batch: Batch, key: Key) -> tuple[LaplaceState, Info]:
        """Add the curvature and the log-likelihood of these rows; at the end of a pass let the structure end it."""
        state = _placed(state)
        choosing = self.subset.count is not None and state.passes == 0
        number = state.passes if self.subset.count is None else max(0, state.passes - 1)
        members = [self._rows(joint, state, batch, key, index) for index in range(len(state.data))]
        structure = Diagonal() if choosing else self.structure_for(members[0].joint)
        places = state.places if batch is None else _places(members[0])
        if isinstance(structure, _LAYERWISE) and state.places and _order(places) != _order(state.places):
            raise ValueError(
                f"Laplace with {structure} needs layers that run alike for all rows, and those of this network change "
                "with the shape of the inputs. Pad the inputs to one shape, or use the structure Full() or Diagonal()."
            )
        if not state.sums and batch is not None:
            for rows in members:
                structure.check_prior(_places(rows), prior_precision(rows.joint, rows.theta))
        before: list[Sums] = state.sums or [{} for _ in members]
        sums, data, slopes = list[Sums](), state.data, state.slopes
        terms, added = list[Tensor](), list[Tensor]()
        for held, rows in zip(before, members, strict=True):
            own, further = with_rows(structure, held, rows, number, first=state.passes == 0)
            sums.append(own)
            terms, added = [*terms, *further[:1]], [*added, *further[1:]]
        if state.passes == 0:
            data = data + torch.stack(terms)
            slopes = [old + new for old, new in zip(slopes, added, strict=True)] if slopes else added
        seen = state.rows + (1 if batch is None else batch.size)
        ended = batch is None or seen == joint.num_data
        after = state._replace(
            sums=sums, data=data, slopes=slopes, places=places, rows=0 if ended else seen, passes=state.passes + ended
        )
        info = {"log_likelihood": data[:, 0] if state.theta.dim() > 1 else data[0, 0]}
        if not ended:
            return after, info
        ends = [
            structure.end(held, rows, number, prior_precision(rows.joint, rows.theta))
            for held, rows in zip(sums, members, strict=True)
        ]
        after = after._replace(sums=ends)
        return (self._choose(joint, after) if choosing else after), info

    def _choose(self, joint: Problem, state: LaplaceState) -> LaplaceState:
        """The state for the second pass, over the weights of largest variance under the first."""
        joint = joint.as_joint("Laplace")
        assert self.subset.count is not None
        likelihood_power, prior_power = float(joint.tempering.likelihood_power), float(joint.tempering.prior_power)
        prior = prior_power * prior_precision(joint, state.theta)
        variance = Diagonal().precision(state.sums[0], state.places, likelihood_power, prior).variance()
        best, slope = largest(joint, variance, self.subset.count), state.slopes[0]
        if slope.numel() == variance.numel():
            slope = slope[best if joint.random_indices is None else torch.isin(joint.random_indices, best)]
        else:
            slope = slope[:0]
        return state._replace(sums=[], slopes=[slope], places=[], chosen=best)

    def _rows(self, joint: Problem, state: LaplaceState, batch: Batch, key: Key, index: int) -> Rows:
        """These rows for a member."""
        buffers = state.buffers or None
        if state.theta.dim() == 1:
            return Rows(self.curvature, joint.narrowed(state.chosen), state.theta, batch, buffers, key)
        own = None if buffers is None else {name: b[index] for name, b in buffers.items()}
        rows = None if batch is None else batch.member(index)
        return Rows(self.curvature, joint.member(index), state.theta[index], rows, own, key)

    def keep(self, state: LaplaceState) -> LaplaceState:
        return state

    def posterior(self, joint: Problem, kept: Sequence[LaplaceState]) -> Posterior:
        """The Gaussian, seen through the network's linearisation where there is a network."""
        state = _placed(kept[-1])
        problem = joint.narrowed(state.chosen)
        structure, scales_with_noise = self.structure_for(problem), self.curvature.scales_with_noise
        each = []
        for index, (sums, data, slope) in enumerate(zip(state.sums, state.data, state.slopes, strict=True)):
            own, theta, buffers = problem, state.theta, state.buffers
            if theta.dim() > 1:
                own, theta = problem.member(index), theta[index]
                buffers = {name: b[index] for name, b in buffers.items()}
            fit = Fit(theta, sums, data, slope, state.places, buffers)
            tuning = self.tuning if isinstance(self.tuning, Tuning) else None
            each.append(gaussian_at_mode(own, fit, structure, tuning, scales_with_noise))
        gaussian = side_by_side(problem, each, state.buffers) if state.theta.dim() > 1 else each[0]
        if joint.network is None:
            return gaussian
        return self.predictive(Linearized(gaussian.joint, gaussian), joint.as_joint("Laplace"))

    def predictive(self, posterior: Linearized, joint: Joint) -> Linearized:
        """The posterior with the scales chosen that were left out, for the problem of a run with `tuning="auto"`."""
        rows = _samples.get(joint) if self.tuning == AUTO else None  # of an earlier run of this problem, perhaps
        return posterior if rows is None or posterior.num_members is not None else that_predicts(posterior, rows)

    def refined(self, posterior: Posterior, rows: Batch) -> Posterior:
        """The posterior at the prior precision that suits held-out rows, where leave-one-out chose it."""
        assert isinstance(posterior.joint, Joint)
        if not isinstance(posterior, Linearized) or posterior.joint.bound_prior.chosen != LEAVE_ONE_OUT:
            return posterior
        return PredictiveFit().chosen_on(posterior, rows)


def _name(structure: Structure) -> str:
    """The structure as it is written in code, without settings at their defaults."""
    return f"{type(structure).__name__}()" if structure == type(structure)() else str(structure)


def _check_for_density(method: Laplace) -> None:
    """Raise an error for settings that need a network."""
    if method.curvature.factored:
        kind = type(method.curvature).__name__
        raise TypeError(f"A Density has no network outputs, so no {kind} matrix. Use the curvature Hessian().")
    for name, kinds in {"structure": (NoneType, Full, Diagonal, Hutchinson), "subset": (AllWeights,)}.items():
        if not isinstance(getattr(method, name), kinds):
            raise ValueError(
                f"Laplace of a Density, which has no layers, takes structure Full(), Diagonal() or Hutchinson() and "
                f"subset AllWeights(). Got {name} {getattr(method, name)}."
            )


def _places(rows: Rows) -> list[Place]:
    assert rows.batch is not None
    return list(survey(rows.joint.as_joint("Laplace"), rows.batch.inputs).places)


def _order(layers: Sequence[Place]) -> list[tuple[object, ...]]:
    """Properties of the layers that must agree in all batches whose sums are added layer by layer."""
    return [(layer.block, layer.kind, layer.groups) for layer in layers]


def _placed(state: LaplaceState) -> LaplaceState:
    """The state with all sums on the device of theta: a resumed run reads them from disk."""
    device = state.theta.device
    sums = [{name: value.to(device) for name, value in each.items()} for each in state.sums]
    slopes = [slope.to(device) for slope in state.slopes]
    return state._replace(sums=sums, slopes=slopes, chosen=state.chosen.to(device))
