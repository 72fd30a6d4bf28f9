"""The candidates of `fit_automatic`: linear model, Gaussian processes, ensemble of networks.

Each is fitted to the training rows of each fold. Regression gives `Moments` of standardised targets, classification
draws of logits (S, N, C), which a calibration by held-out rows turns into probabilities.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from posterity.errors import BadFolder
from posterity.estimators.class_process import ClassProcess
from posterity.estimators.gaussian_process import (
    WIDEST,
    GaussianProcess,
    Moments,
    principal_directions,
    projected,
    random_rows,
    selected_columns,
)
from posterity.inference import infer
from posterity.inference.callbacks import tracked
from posterity.inference.folds import Fold
from posterity.likelihoods import Categorical, Gaussian
from posterity.likelihoods.likelihood import Likelihood
from posterity.methods import MAP, Ensemble, Laplace
from posterity.methods.parts.scales import by_evidence, without_warnings
from posterity.model import Joint
from posterity.model.data import as_data
from posterity.model.module import seeded
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.optim import Adam, Cosine
from posterity.posteriors import Mixture, Posterior
from posterity.posteriors.load import posterior_of
from posterity.priors import Normal
from posterity.storage import Part, decode, encode

DRAWS = 32  # of the logits of a posterior that is not a set of points
SKEWED, HEAVY = 0.75, 10.0  # skewness and kurtosis from which a target is warped
NETWORKS = 20.0  # seconds for training networks out of a budget of 60
STEP, SPEED = 1e-3, 2e10  # seconds of a step without its matrix products, and operations per second of these
EVIDENCE = "evidence"  # label of the key that draws the rows by which hyper-parameters are chosen
FEW = 2000  # rows below which each fold chooses its own hyper-parameters; beyond, rows that chose them are not scored
MOST_ODDS = 1200  # largest product of rows and the cube root of classes for Gaussian processes of log odds
ODDS_CLASSES = 5
COSTLIER = 4.0  # cost of an evaluation of the evidence for a class, relative to one for a number
MOST = 50_000  # most rows of a Gaussian process
FURTHEST_LOG, WIDEST_LOG = (100.0, 5.0)  # limits of mean and scale of a warped target


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows of a table: inputs (N, D), targets (N, T) in float64 or labels (N,), weights (N,).

    `classes` is 0 for regression.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    classes: int

    def on(self, rows: Tensor) -> "TableRows":
        """Return some of the rows."""
        return TableRows(self.inputs[rows], self.targets[rows], self.weights[rows], self.classes)

    @property
    def outputs(self) -> int:
        """Number of targets or classes."""
        return self.classes or self.targets.shape[1]

    @property
    def data(self) -> tuple[Tensor, Tensor, Tensor]:
        """The data for `infer`: inputs, targets and weights."""
        return self.inputs, self.targets if self.classes else self.targets.to(self.inputs.dtype), self.weights

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of a network; its noise is left to the fit."""
        return Categorical() if self.classes else Gaussian()

    @property
    def one_hot(self) -> Tensor:
        """Labels in one-hot coding (N, C); for two classes only the column of class 1, (N, 1)."""
        each = nn.functional.one_hot(self.targets, self.classes).double()
        return each[:, 1:] if self.classes == 2 else each


@dataclass(frozen=True)
class Plan:
    """The work for a budget: folds, scored rows, rows and evaluations of the evidence, and training of networks.

    Up to 2,000 rows, and always for dependent rows, each fold chooses the hyper-parameters by its own rows. `steps` is
    0 if networks are left out.
    """

    folds: int
    scored: int
    evidence_rows: int
    evaluations: int
    settled_by_fold: bool
    hidden: tuple[int, ...]
    members: int
    steps: int
    batch_size: int
    processes: int


@dataclass(frozen=True)
class Warp:
    """A monotone function of a standardised target; `mean` and `spread` standardise its values.

    **Math**: z = log(y + shift), or asinh((y - shift) / scale). For z ~ N(m, v) y has the moments of a
    log-normal, or E y = shift + scale e^(v/2) sinh m and Var y = scale^2 (e^v - 1) (e^v cosh 2m + 1) / 2.

    **Limit**: exact up to |m| = 100 and v = 25, where both are cut off.
    """

    positive: bool
    shift: float
    scale: float
    mean: float
    spread: float

    def of(self, targets: Tensor) -> Tensor:
        """Return the standardised warped targets."""
        moved = (targets + self.shift).log() if self.positive else torch.asinh((targets - self.shift) / self.scale)
        return (moved - self.mean) / self.spread

    def moments(self, warped: Moments) -> Moments:
        """Return moments of targets whose warped values are normal: of a log-normal, or of the sinh of a normal."""
        m = (self.mean + self.spread * warped.mean).clamp(-FURTHEST_LOG, FURTHEST_LOG)
        v = (self.spread**2 * warped.variance).clamp_max(WIDEST_LOG**2)
        if self.positive:
            mean, variance = (m + 0.5 * v).exp() - self.shift, v.expm1() * (2.0 * m + v).exp()
        else:
            mean = self.shift + self.scale * (0.5 * v).exp() * torch.sinh(m)
            variance = 0.5 * self.scale**2 * v.expm1() * (v.exp() * torch.cosh(2.0 * m) + 1.0)
        return Moments(mean, variance, variance * (warped.epistemic / warped.variance))


class Fitted(ABC):
    """A candidate fitted to rows."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of its inputs."""

    @abstractmethod
    def moments(self, inputs: Tensor) -> Moments:
        """Return moments of the standardised targets."""

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor:
        """Return draws of logits before calibration, (S, N, C)."""

    @abstractmethod
    def part(self) -> Part:
        """Return the fit as a part of a run folder; see `load_fit`."""


@dataclass(frozen=True, eq=False)
class Network(Fitted):
    """A posterior of a linear layer (`hidden` empty) or a network."""

    hidden: tuple[int, ...]
    posterior: Posterior

    @property
    def device(self) -> torch.device:
        return self.posterior.joint.device

    def moments(self, inputs: Tensor) -> Moments:
        pred = self.posterior.predict(inputs)
        return Moments(pred.mean.double(), pred.variance.double(), pred.epistemic.double())

    def logits(self, inputs: Tensor) -> Tensor:
        draws = len(self.posterior.posteriors) if isinstance(self.posterior, Mixture) else DRAWS
        with torch.no_grad():
            return self.posterior.outputs(inputs, draws, Key(0)).double()

    def part(self) -> Part:
        part = self.posterior.parts()["posterior"]
        return Part({"hidden": [*self.hidden], "posterior": dict(part.config)}, part.tensors)


@dataclass(frozen=True, eq=False)
class Process(Fitted):
    """A Gaussian process of targets, of warped targets, of labels +-1, or of log odds."""

    process: GaussianProcess
    warp: Warp | None = None
    basis: Tensor | None = None  # (D, components)

    @property
    def device(self) -> torch.device:
        return self.process.inputs.device

    def on(self, rows: Tensor) -> "Process":
        """Return the process conditioned on some of its rows."""
        return replace(self, process=self.process.on(rows))

    def moments(self, inputs: Tensor) -> Moments:
        moments = self.process.predict(projected(inputs, self.basis))
        return moments if self.warp is None else self.warp.moments(moments)

    def logits(self, inputs: Tensor) -> Tensor:
        mean, _, epistemic = self.process.predict(projected(inputs, self.basis))
        noise = Key(0).normal((DRAWS, 1, mean.shape[1]), torch.float64, "cpu").to(mean)
        draws = mean + epistemic.sqrt() * (noise - noise.mean(0))
        return torch.cat([torch.zeros_like(draws), draws], -1) if mean.shape[1] == 1 else draws

    def part(self) -> Part:
        tensors: dict[str, Tensor] = {}
        values = {"process": self.process, "warp": self.warp, "basis": self.basis}
        return Part({name: encode(value, tensors, name) for name, value in values.items()}, tensors)


def load_fit(part: Part, columns: int, outputs: int, where: str, name: str, device: torch.device) -> Fitted:
    """Load a fit from its part; `where` names the run folder in messages."""
    match dict(part.config):
        case {"hidden": list(hidden), "posterior": dict(config), **others} if not others:
            sizes = tuple(int(size) for size in hidden if isinstance(size, int))
            module = network(columns, sizes, outputs).to(device)
            return Network(sizes, posterior_of(Part(config, part.tensors, part.older), module, where, name))
        case {"process": _, "warp": _, "basis": _, **others} if not others:
            tensors = {key: tensor.to(device) for key, tensor in part.tensors.items()}
            process, warp, basis = (decode(part.config[key], tensors) for key in ("process", "warp", "basis"))
            if isinstance(process, GaussianProcess) and isinstance(warp, Warp | None):
                return Process(process, warp, basis if isinstance(basis, Tensor) else None)
    raise BadFolder(f"Run folder {where}: part {name!r} holds no fit of a candidate. Save it again.")


Fits = tuple[list[Fitted], Callable[[], Fitted]]
"""A candidate fitted to the training rows of each fold, and a function that makes the final fit."""


@dataclass(frozen=True)
class Candidate(ABC):
    """A kind of model to compare; `name` stands in the sentence on the choice."""

    name: ClassVar[str]
    seconds = 5.0  # of its fits to all folds, roughly: only for the progress bar

    @abstractmethod
    def fits(self, rows: TableRows, folds: Sequence[Fold], plan: Plan, key: Key) -> Fits:
        """Fit the training rows of each fold; return these fits, and a function for the final fit."""


@dataclass(frozen=True)
class Linear(Candidate):
    """A linear model; the scales of its prior and noise maximise the evidence of all rows, scored ones included."""

    name = "linear model"
    seconds = 1.0

    def fits(self, rows: TableRows, folds: Sequence[Fold], plan: Plan, key: Key) -> Fits:
        joint = scaled(rows, (), key)
        fits: list[Fitted] = [self._fit(rows.on(fold.train), joint) for fold in folds]
        return fits, partial(self._fit, rows, joint)

    def _fit(self, rows: TableRows, joint: Joint) -> Network:
        problem = replace(joint, num_data=len(rows.inputs))
        with without_warnings():
            mode, _ = infer(MAP(), problem, rows.data, progress=False)
            posterior, _ = infer(Laplace(tuning=None), problem, rows.data, start=mode, progress=False)
        return Network((), posterior)


@dataclass(frozen=True)
class Networks(Candidate):
    """An ensemble of networks, fitted to the training rows of each fold and scored by its test rows.

    Only the few scales of prior and noise are chosen by the evidence of all rows.
    """

    name = "networks"
    seconds = 20.0

    def fits(self, rows: TableRows, folds: Sequence[Fold], plan: Plan, key: Key) -> Fits:
        joint = scaled(rows, plan.hidden, key)
        method = Ensemble(
            MAP(plan.steps, min(plan.batch_size, len(rows.inputs) // 2), Adam(0.01), Cosine()), plan.members
        )
        fit = partial(_ensemble, method, joint, key)
        shown = enumerate(tracked(folds, self.name, self.seconds))
        posteriors = [fit(rows.on(fold.train), number) for number, fold in shown]
        left = torch.ones_like(rows.weights, dtype=torch.bool)
        for fold in folds:
            left[fold.train] = False
        # The final fit joins the members of all folds, unless some rows were in no training set, as in time order.
        final = partial(fit, rows, len(folds)) if bool(left.any()) else partial(Mixture, posteriors)
        return [Network(plan.hidden, posterior) for posterior in posteriors], partial(_network, plan.hidden, final)


def _ensemble(method: Ensemble, joint: Joint, key: Key, part: TableRows, number: int) -> Posterior:
    problem = replace(joint, num_data=len(part.inputs))
    with without_warnings():
        return infer(method, problem, part.data, seed=key.fold(number).seed, progress=False)[0]


def _network(hidden: tuple[int, ...], fit: Callable[[], Posterior]) -> Network:
    return Network(hidden, fit())


@dataclass(frozen=True)
class Processes(Candidate):
    """A Gaussian process, smooth or rough, of at most 50,000 rows.

    Targets may be warped. Classes are targets of +-1, which few wrong labels move little, or have `odds`: a likelihood.
    Where columns are many, inputs are their principal components, or few that are `selected` by the training rows.
    """

    rough: bool
    warp: Warp | None = None
    odds: bool = False
    selected: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        of = " of a warped target" if self.warp is not None else " of log odds" if self.odds else ""
        return f"{'rough' if self.rough else 'smooth'} Gaussian process{of}{' by few columns' if self.selected else ''}"

    @staticmethod
    def have_many_columns(rows: TableRows) -> bool:
        """Return whether there are too many columns for a length scale each."""
        return rows.inputs.shape[1] > WIDEST

    @staticmethod
    def have_odds(rows: TableRows) -> bool:
        """Return whether rows and classes are few enough for a process of log odds."""
        few = 2 <= rows.classes <= ODDS_CLASSES  # with more, the rows of the evidence have too few of each
        return few and len(rows.inputs) * rows.one_hot.shape[1] ** (1 / 3) <= MOST_ODDS

    def fits(self, rows: TableRows, folds: Sequence[Fold], plan: Plan, key: Key) -> Fits:
        kind, most = GaussianProcess, plan.evidence_rows
        targets = 2.0 * rows.one_hot - 1.0 if rows.classes else rows.targets
        if self.warp is not None:
            targets = self.warp.of(targets)
        if self.odds:
            kind, targets = ClassProcess, rows.one_hot
            most = int(most / (COSTLIER * targets.shape[1]) ** (1 / 3))  # costs go as the cube of rows
        components = None if self.selected else principal_directions(rows.inputs)

        settled = partial(self._settled, rows, targets, kind, components, (most, plan.evaluations), key)
        kept = torch.zeros_like(rows.weights, dtype=torch.bool)
        kept[random_rows(len(targets), MOST, key.fold("kept")).to(kept.device)] = True
        trains = [fold.train[kept[fold.train]] for fold in folds]
        everything = torch.ones_like(kept).nonzero().squeeze(1)
        if plan.settled_by_fold or self.selected:
            return [*map(settled, tracked(trains, self.name, self.seconds))], partial(settled, everything, kept)
        process = settled(everything)
        return [process.on(train) for train in trains], partial(process.on, kept)

    def _settled(
        self,
        rows: TableRows,
        targets: Tensor,
        kind: type[GaussianProcess],
        components: Tensor | None,
        effort: tuple[int, int],
        key: Key,
        part: Tensor,
        kept: Tensor | None = None,
    ) -> Process:
        """Choose hyper-parameters, and columns if selected, by the rows `part`; condition on them or on `kept`."""
        inputs, own, weights = rows.inputs[part], targets[part], rows.weights[part]
        basis = selected_columns(inputs, own, weights) if self.selected else components
        process = kind.of(self.rough, projected(inputs, basis), own, weights)
        settled = Process(process.settled(*effort, key.fold(EVIDENCE)), self.warp, basis)
        return settled if kept is None else settled.on(kept)


def network(inputs: int, hidden: Sequence[int], outputs: int, key: Key | None = None) -> nn.Module:
    """Make the module of a candidate, with first weights from the key; torch's generator is not used."""
    with seeded(0 if key is None else key.seed % (1 << 63)):
        return MLP((inputs, *hidden, outputs), activation="silu") if hidden else nn.Linear(inputs, outputs)


def scaled(rows: TableRows, hidden: Sequence[int], key: Key) -> Joint:
    """Return the joint of a network, with the scales of prior and noise that maximise the evidence of all rows."""
    module = network(rows.inputs.shape[1], hidden, rows.outputs, key).to(rows.inputs.device)
    joint = Joint(module, rows.likelihood, Normal(), num_data=len(rows.inputs))
    return by_evidence(joint, as_data(rows.data), None, key)


def warp_of(targets: Tensor, mean: Sequence[float], scale: Sequence[float]) -> Warp | None:
    """Return a warp that makes a single target less skewed or less heavy-tailed; None if it needs none.

    The original targets are `mean` + `scale` times the standardised ones (N, T), and may be positive.
    """
    if targets.shape[1] > 1:
        return None
    skew, kurtosis = _shape(targets)
    shift, least = mean[0] / scale[0], float(targets.min())
    if least + shift > 0 and skew > SKEWED:
        moved = (targets + shift).log()
        if abs(_shape(moved)[0]) < 0.5 * skew:
            return Warp(True, shift, 1.0, float(moved.mean()), float(moved.std()))
    if abs(skew) > SKEWED or kurtosis > HEAVY:
        centre = float(targets.median())
        spread = 1.4826 * float((targets - centre).abs().median())
        if spread > 0:
            moved = torch.asinh((targets - centre) / spread)
            return Warp(False, centre, spread, float(moved.mean()), float(moved.std()))
    return None


def _shape(values: Tensor) -> tuple[float, float]:
    """Return skewness and kurtosis."""
    away = values - values.mean()
    variance = float(away.square().mean())
    if not variance > 0:
        return 0.0, 0.0
    return float(away.pow(3).mean()) / variance**1.5, float(away.pow(4).mean()) / variance**2


def make_plan(rows: int, columns: int, outputs: int, seconds: float, dependent: bool = False) -> Plan:
    """Return the plan for a budget in seconds; it depends on nothing but these arguments.

    For `dependent` rows, in groups or in time order, each fold chooses its own hyper-parameters.
    """
    by_fold = rows < FEW or dependent
    share = max(0.05, min(4.0, seconds / 60.0))
    folds, members, hidden, batch = 10 if rows < 300 else 5, 2, (64, 64), 256
    weights = (columns + 1) * hidden[0] + (hidden[0] + 1) * hidden[1] + (hidden[1] + 1) * outputs
    step = STEP + 6.0 * members * batch * weights / SPEED
    enough = 1500 if rows < 2000 else 2000 if rows < 20_000 else 4000
    steps = int(min(enough * max(1.0, share), NETWORKS * share / (folds * step)))
    effort = max(0.3, min(1.5, share**0.5))
    return Plan(
        folds=min(folds, max(2, rows)),
        scored=int(3000 * max(0.2, min(1.0, share))),
        evidence_rows=int((400 if by_fold else 600) * effort),
        evaluations=max(30, int(40 * effort)),
        settled_by_fold=by_fold,
        hidden=hidden,
        members=members,
        steps=steps if steps >= 300 and rows >= 50 else 0,
        batch_size=batch,
        processes=3 if share >= 0.2 else 1,
    )
