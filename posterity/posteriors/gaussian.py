"""Gaussian posteriors over weights: sampled, or as the prior of new data."""

import dataclasses
import glob
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from posterity.model.batch import Inputs, named_tensors, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Buffers, Network
from posterity.model.problem import Problem
from posterity.numerics.brief import brief
from posterity.numerics.modules import uncompiled
from posterity.numerics.random import Key
from posterity.posteriors.functions import Evaluation
from posterity.posteriors.posterior import Posterior, WeightPart
from posterity.posteriors.standalone import Draws
from posterity.precisions.diagonal import Diagonal
from posterity.precisions.precision import Precision
from posterity.priors.correlated import Correlated

# Numbers drawn at a time: few enough to stay in a CPU's cache until they are used.
LARGE = {"cpu": 1 << 19, "cuda": 1 << 26}
# Rows times draws of one pass: one draw keeps a CPU busy, and a GPU has memory for the activations of several.
AT_ONCE = {"cpu": 1, "cuda": 1 << 16}
# Numbers of these rows: activations grow with the size of a row (images).
NUMBERS_AT_ONCE = 1 << 25


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Posterior):
    """N(mean, precision^-1) over the random weights; the other weights stay at the mean.

    **Math**: w = mean + L^-T eps with precision = L L^T, eps ~ N(0, I); predictions average p(y | f_w(x)) over draws.

    **Limit**: exact for linear models with Gaussian noise; otherwise as good as a Gaussian in weight space is.
    Draws of a network's weights from a Laplace posterior often underfit: see `Linearized`.

    **Cost**: one forward pass for each draw.

    **References**: MacKay (1992); Ritter et al. (2018), section 3.

    **Example**:

    >>> from posterity.likelihoods import Bernoulli
    >>> from posterity.precisions import Dense
    >>> from posterity.numerics import Key
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Bernoulli(), Normal(), num_data=1)
    >>> q = Gaussian(joint, torch.zeros(1), Dense(torch.tensor([[4.0]])))
    >>> bool((q.sample(10_000, Key(0)).std() - 0.5).abs() < 0.02)
    True
    """

    joint: Problem
    mean: Tensor
    precision: Precision
    buffers: Buffers = field(default_factory=dict)
    log_evidence: Tensor | None = None
    data_terms: Tensor | None = None  # log-likelihood at the mean; for Gaussian noise squared residuals, their number

    tensor_shapes: ClassVar[dict[str, str]] = {"mean": "mP", "log_evidence": "m", "data_terms": "m*"}

    def __post_init__(self) -> None:
        joint, shape, size = self.joint, tuple(self.mean.shape), self.precision.size
        if not shape or shape[-1] not in (joint.num_weights, joint.size) or size != joint.num_random:
            raise ValueError(
                f"Gaussian: mean must be ({joint.num_weights},), the weights of the joint, and precision of "
                f"{joint.num_random}, those that are random. Got {shape} and {size}."
            )

    @property
    def num_members(self) -> int | None:
        return self.mean.shape[0] if self.mean.dim() > 1 else None

    def member(self, index: int) -> "Gaussian":
        if self.num_members is None:
            return self
        return Gaussian(
            self.joint.member(index),
            self.mean[index],
            self.precision.member(index),
            {name: b[index] for name, b in self.buffers.items()},
            None if self.log_evidence is None else self.log_evidence[index],
            None if self.data_terms is None else self.data_terms[index],
        )

    @property
    def variance(self) -> Tensor:
        """Variance of each random weight, (R,), in float64."""
        return self.precision.variance()

    def point(self) -> Tensor:
        return self.mean

    def as_gaussian(self) -> "Gaussian":
        return self

    def with_gaussian(self, gaussian: "Gaussian") -> "Gaussian":
        """Return `gaussian`, as `Linearized.with_gaussian` returns its linearisation."""
        return gaussian

    def weight_parts(self) -> Iterator[WeightPart]:
        self._alone()
        mean, index = self.mean.to(torch.float64), self.joint.random_indices
        spread = self.variance.to(mean).sqrt()
        spread = spread if index is None else torch.zeros_like(mean).index_copy(0, index, spread)
        yield WeightPart(1.0, mean, spread, self.precision.is_diagonal)

    def lines(self) -> list[str]:
        lines = [*super().lines(), f"precision: {type(self.precision).__name__} of size {self.precision.size:,}"]
        return lines if self.log_evidence is None else [*lines, f"log evidence: {brief(self.log_evidence)}"]

    def deviations(self, draws: int, key: Key, dtype: torch.dtype = torch.float64) -> Tensor:
        """Draws of w - mean for the random weights, (draws, R)."""
        self._alone()
        return torch.cat(list(self._blocks(draws, key, self.mean.to(dtype))))

    def _blocks(self, draws: int, key: Key, like: Tensor, *, reuse: bool = False) -> Iterator[Tensor]:
        """Yield the deviations in the dtype of `like`, in blocks of at most `LARGE` numbers.

        With `reuse` a block may be overwritten by the next one, which saves allocations.
        """
        size = self.precision.size
        step = max(1, LARGE.get(like.device.type, LARGE["cpu"]) // max(1, size))
        space = torch.empty((min(step, draws), size), dtype=torch.float32, device=like.device) if reuse else None
        for low in range(0, draws, step):
            count = min(step, draws - low)
            own = None if space is None else space[:count]
            yield self.precision.draws(count, key.fold(low) if low else key, like, own)

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        self._alone()
        blocks = self._blocks(draws, key or Key(0), self.mean)
        return torch.cat([self._moved(deviations) for deviations in blocks])

    def log_density(self, theta: Tensor) -> Tensor:
        """-(w - mean)^T precision (w - mean) / 2 + logdet / 2 - R/2 log 2 pi."""
        self._alone()
        away = theta.to(torch.float64) - self.mean.to(torch.float64)  # (S, P)
        if self.joint.random_indices is not None:
            away = away[..., self.joint.random_indices]
        quadratic = (away * self.precision.matvec(away)).sum(-1)
        return 0.5 * (self.precision.logdet - self.precision.size * math.log(2.0 * math.pi) - quadratic)

    @property
    def entropy(self) -> Tensor:
        """R/2 log(2 pi e) - logdet / 2, in nats."""
        return 0.5 * (self.precision.size * math.log(2.0 * math.pi * math.e) - self.precision.logdet)

    def drawn_functions(self, draws: int, key: Key) -> Evaluation:
        weights = self.sample(draws, key)
        return lambda inputs, numbers: self._outputs_at(weights[numbers.to(weights.device)], inputs)

    def _moved(self, deviations: Tensor) -> Tensor:
        """Weights (s, P) from deviations (s, R), which may be overwritten."""
        index = self.joint.random_indices
        if index is None:
            return deviations.add_(self.mean)
        return self.mean.expand(len(deviations), -1).clone().index_add_(1, index, deviations)

    def standalone(self, draws: int | None, share: float, key: Key) -> nn.Module:
        joint, theta = self.joint.as_joint("module"), self.sample(self.prediction_draws(draws, share), key)
        return Draws(joint.network, joint.likelihood, theta, self.buffers)

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """One forward pass per draw; on a GPU, which a small pass leaves idle, one pass for several draws."""
        self._alone()
        blocks = self._blocks(draws, key, self.mean, reuse=not torch.is_grad_enabled())  # a graph keeps them
        return torch.cat([self._outputs_at(self._moved(deviations), inputs) for deviations in blocks])

    def _outputs_at(self, weights: Tensor, inputs: Inputs) -> Tensor:
        """Outputs (s, N, *event) at weights (s, P)."""
        assert isinstance(self.joint, Joint)
        joint, buffers = self.joint, self.buffers or None
        numbers = sum(value.numel() for value in named_tensors(inputs).values())
        rows = AT_ONCE.get(joint.device.type, 1) // max(1, num_rows(inputs))
        together = max(1, min(rows, NUMBERS_AT_ONCE // max(1, numbers)))
        if together == 1:
            return torch.stack([joint.outputs(theta, inputs, buffers) for theta in weights])
        members = torch.split(weights, together)
        return torch.cat([joint.outputs(theta, inputs, buffers).clone() for theta in members])  # may alias the weights


def gaussian(joint: Joint, module: nn.Module, precisions: Mapping[Tensor, Tensor]) -> Gaussian:
    """N(module's weights, 1 / precisions) over the joint's random weights, matched by name; buffers of the module.

    `precisions` has a tensor for each parameter of the optimiser.
    """
    module = uncompiled(module)
    named = dict(module.named_parameters())
    layout = joint.network.layout
    for part in layout:
        if part.name not in named or named[part.name].shape != part.shape:
            raise ValueError(
                "IVON.posterior: the module must be that of the joint. "
                f"It has no parameter '{part.name}' of shape {tuple(part.shape)}."
            )
    missing = [part.name for part in joint.random_slices if named[part.name] not in precisions]
    if missing:
        raise ValueError(
            f"IVON.posterior: the optimiser has no parameter '{missing[0]}', which is random in the joint. "
            "Pass the optimiser all of them, or name its own in Joint(..., random=...)."
        )
    mean = layout.flatten({part.name: named[part.name].detach() for part in layout})
    point = mean.new_ones((), dtype=torch.float64)  # placeholder of weights that are not random
    precision = torch.cat([precisions.get(named[p.name], point.expand(p.shape)).reshape(-1) for p in layout])
    precision = precision if joint.random_indices is None else precision[joint.random_indices]
    buffers = dict(module.named_buffers())
    kept = {name: buffers[name].detach().clone() for name in joint.network.buffers}
    return Gaussian(joint, mean.clone(), Diagonal(precision), kept)


class OfGaussian(Posterior):
    """The base of posteriors that have a Gaussian over weights and their own way to its outputs.

    Subclasses are frozen dataclasses of the two fields `joint` and `gaussian`.
    """

    gaussian: Gaussian

    @abstractmethod
    def __init__(self, joint: Problem, gaussian: Gaussian) -> None: ...

    @property
    def num_members(self) -> int | None:
        return self.gaussian.num_members

    def member(self, index: int) -> Self:
        return self.with_gaussian(self.gaussian.member(index))

    def as_gaussian(self) -> Gaussian:
        return self.gaussian

    def lines(self) -> list[str]:
        return self.gaussian.lines()

    def with_gaussian(self, gaussian: Gaussian) -> Self:
        """Return the same kind of posterior with another Gaussian over weights."""
        return type(self)(gaussian.joint, gaussian)

    def weight_parts(self) -> Iterator[WeightPart]:
        return self.gaussian.weight_parts()

    @property
    def buffers(self) -> Buffers:  # type: ignore[override]  # never written: the class is frozen
        return self.gaussian.buffers

    @property
    def log_evidence(self) -> Tensor | None:
        """Log evidence of the model, where the method computed it."""
        return self.gaussian.log_evidence

    def point(self) -> Tensor:
        return self.gaussian.mean

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        return self.gaussian.sample(draws, key)

    def log_density(self, theta: Tensor) -> Tensor:
        return self.gaussian.log_density(theta)


def continued(joint: Joint, posterior: Posterior) -> Joint:
    """Return the problem `joint` of new data with the posterior of earlier data as its prior.

    - `joint`: the network, likelihood and number of rows of the new data; its prior is replaced.
    - `posterior`: a Gaussian over weights of the same network, from `Laplace` or `Conjugate`. Tensors that are points
      in it (all but the last layer, perhaps) are frozen where it has them.

    Start the next run there, too: `infer(MAP(...), joint, data, start=posterior)`. A tempered posterior is not
    changed; the tempering of `joint` acts on it as on any prior.

    >>> import torch, posterity as po
    >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
    >>> noise = po.likelihoods.Gaussian(scale=0.5)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), noise, po.priors.Normal(), num_data=4)
    >>> q, _ = po.infer(po.methods.Laplace(tuning=None), joint, (x[:4], x[:4]))
    >>> type(po.continued(joint, q).prior).__name__
    'Correlated'
    """
    if not isinstance(joint, Joint):
        raise TypeError(f"continued: the problem must be a Joint. Got {type(joint).__name__}.")
    gaussian = posterior.as_gaussian()
    if gaussian is None:
        raise TypeError(
            f"continued: the posterior must be a Gaussian over weights. Got {type(posterior).__name__}, which says "
            "nothing about how far they may go. Use the posterior of Laplace or Conjugate."
        )
    if not isinstance(gaussian.joint, Joint):
        raise TypeError("continued: the posterior of a Density is not one over a network's weights.")
    index, names = gaussian.joint.random_indices, set(gaussian.joint.network.layout.names)
    if index is None and not names < set(joint.network.layout.names):
        return dataclasses.replace(joint, prior=Correlated(gaussian.mean, gaussian.precision))
    mean = gaussian.mean if index is None else gaussian.mean[..., index]
    network, prior = _part(joint.network, gaussian), Correlated(mean, gaussian.precision)
    return dataclasses.replace(joint, network=network, prior=prior, random="*")


def _part(network: Network, gaussian: Gaussian) -> Network:
    """The network over the tensors that are random in the posterior, with the others frozen at its mean."""
    joint = gaussian.joint.as_joint("continued")
    gaussian._alone()
    names = [part.name for part in joint.random_slices]
    if sum(part.size for part in joint.random_slices) != joint.num_random:
        raise ValueError(
            f"continued: the posterior must be over whole tensors. Got one over {joint.num_random} single weights. Use "
            "Laplace with subset=AllWeights(), LastLayer() or Matching('...')."
        )
    known = {**joint.network.frozen, **joint.network.layout.unflatten(gaussian.mean)}
    part = network.with_weights(*map(glob.escape, names))
    frozen = {name: known[name].to(part.device) for name in part.frozen}
    buffers = {name: b.to(part.device) for name, b in {**joint.network.buffers, **gaussian.buffers}.items()}
    return part.replace(frozen=frozen, buffers=buffers)
