"""Posteriors whose class probabilities are calibrated on held-out rows, and predictions beside their targets."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posterity.errors import BadData, shown
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Inputs
from posterity.model.data import as_data
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.posteriors.functions import Evaluation
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.posterior import Posterior, Prediction, WeightPart
from posterity.posteriors.samples import batches
from posterity.posteriors.standalone import ScaledProbabilities
from posterity.predictive import Integrator, Predictive, Scaling, TemperatureScaling
from posterity.storage import Part, encode

PREFIX = "calibration"  # of the names of stored tensors


def with_targets(
    posterior: Posterior, data: object, *, draws: int | None = None, integrator: Integrator | None = None, seed: int = 0
) -> tuple[Predictive, Tensor]:
    """Predict at the rows of data with targets, and return the predictive with the targets, row by row.

    Takes what `infer` takes as data: tensors, a `Dataset` or a `DataLoader`, which may shuffle; and `draws`,
    `integrator` and `seed` as `predict` does. Weights of rows are not used. It is for whatever compares the two:
    `metrics.accuracy(*with_targets(q, loader))`, `ConformalSets.fit(*with_targets(q, loader))`.

    >>> from posterity import Joint
    >>> from posterity.likelihoods import Bernoulli
    >>> from posterity.posteriors import Point
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Bernoulli(), Normal(), num_data=1)
    >>> pred, y = with_targets(Point(joint, torch.tensor([9.0])), (torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])))
    >>> pred.probs.argmax(1).tolist() == y.flatten().tolist()
    True
    """
    joint = posterior.joint.as_joint("with_targets")
    if data is None:
        raise BadData("with_targets needs rows with targets. Pass (inputs, targets), a Dataset or a DataLoader.")
    parts, targets = list[Predictive](), list[Tensor]()
    for rows in batches(as_data(data, labels=joint.network.labels).to(joint.device)):
        batch = joint.check(rows)
        parts.append(posterior.predict(batch.inputs, draws=draws, integrator=integrator, seed=seed))
        targets.append(batch.targets)
    return Predictive.concatenate(parts), torch.cat(targets)


@dataclass(frozen=True, eq=False, repr=False)
class Calibrated(Posterior):
    """A posterior over a classifier whose predictions go through a scaling, fitted on held-out rows.

    **Math**: probabilities are softmax(s(log p)), with p those of `posterior` and s the `scaling`: log p / temperature,
    or a scale and a bias for each class. Weights, outputs and functions are those of `posterior`.

    **Limit**: right on average for rows like the held-out ones; see `TemperatureScaling` and `VectorScaling`. The
    mutual information of label and weights stays that of `posterior`. Draws of probabilities are not scaled: the
    predictive has none.

    **Cost**: as `posterior`.

    **References**: Guo et al. (2017), On calibration of modern neural networks.

    **Example**:

    >>> import posterity as po
    >>> x, y = torch.tensor([[-1.0], [1.0], [1.0], [1.0]]), torch.tensor([0, 1, 1, 0])
    >>> joint = po.Joint(torch.nn.Linear(1, 1, bias=False), po.likelihoods.Bernoulli(), po.priors.Normal(), num_data=4)
    >>> sure = po.posteriors.Point(joint, torch.tensor([9.0]))
    >>> q = Calibrated.fit(sure, (x, y))
    >>> round(float(q.predict(torch.ones(1, 1)).probs[0, 1]), 2)  # three rows in four are right
    0.75
    """

    posterior: Posterior
    scaling: Scaling

    def __post_init__(self) -> None:
        given: object = self.scaling
        if not isinstance(given, Scaling):
            raise TypeError(
                f"Calibrated.scaling must be a Scaling, such as TemperatureScaling(2.0). Got {shown(given)}."
            )
        inner: object = self.posterior
        if not isinstance(inner, Posterior) or isinstance(inner, Calibrated):
            raise TypeError(
                f"Calibrated.posterior must be a posterior that is not calibrated. Got {type(inner).__name__}."
            )
        inner._alone()

    @classmethod
    def fit(
        cls,
        posterior: Posterior,
        data: object,
        scaling: type[Scaling] = TemperatureScaling,
        *,
        draws: int | None = None,
        integrator: Integrator | None = None,
        seed: int = 0,
    ) -> "Calibrated":
        """Fit the scaling to rows that the posterior was not fitted to: see `with_targets` for what is taken."""
        kind: object = scaling
        if not (isinstance(kind, type) and issubclass(kind, Scaling)):
            raise TypeError(f"Calibrated.fit: scaling must be a class, such as VectorScaling. Got {shown(kind)}.")
        pred, y = with_targets(posterior, data, draws=draws, integrator=integrator, seed=seed)
        return cls(posterior, scaling.fit(pred, y))

    @property
    def joint(self) -> Problem:  # type: ignore[override]  # never written: the class is frozen
        return self.posterior.joint

    @property
    def buffers(self) -> Buffers:  # type: ignore[override]
        return self.posterior.buffers

    @property
    def ties_rows(self) -> bool:
        return self.posterior.ties_rows

    def lines(self) -> list[str]:
        first, *others = repr(self.posterior).split("\n  ")
        return [f"posterior: {first}", *others, f"scaling: {shown(self.scaling)}"]

    def point(self) -> Tensor:
        return self.posterior.point()

    def start(self) -> Posterior:
        return self.posterior.start()

    def as_gaussian(self) -> Gaussian | None:
        return self.posterior.as_gaussian()

    def weight_parts(self) -> Iterator[WeightPart]:
        return self.posterior.weight_parts()

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        return self.posterior.sample(draws, key)

    def log_density(self, theta: Tensor) -> Tensor:
        return self.posterior.log_density(theta)

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        return self.posterior.outputs(inputs, draws, key)

    def output_blocks(self, inputs: Inputs, draws: int, key: Key) -> Iterator[Tensor]:
        return self.posterior.output_blocks(inputs, draws, key)

    def drawn_functions(self, draws: int, key: Key) -> Evaluation:
        return self.posterior.drawn_functions(draws, key)

    @property
    def by_draws(self) -> bool:
        return self.posterior.by_draws

    def standalone(self, draws: int | None, share: float, key: Key) -> nn.Module:
        return ScaledProbabilities(self.posterior.standalone(draws, share, key), self.scaling)

    def likelihood(self, draws: int, key: Key) -> Likelihood:
        return self.posterior.likelihood(draws, key)

    def output_moments(
        self, inputs: Inputs, *, marginal: bool = False, memory_budget: int | None = None
    ) -> tuple[Tensor, Tensor] | None:
        return self.posterior.output_moments(inputs, marginal=marginal, memory_budget=memory_budget)

    def joint_output_moments(self, inputs: Inputs, *, memory_budget: int | None = None) -> tuple[Tensor, Tensor] | None:
        return self.posterior.joint_output_moments(inputs, memory_budget=memory_budget)

    def prediction_draws(self, draws: int | None, share: float = 1.0) -> int:
        return self.posterior.prediction_draws(draws, share)

    def _predicted(self, inputs: object, wanted: Prediction) -> Predictive:
        return self.scaling.apply(self.posterior._predicted(inputs, wanted))

    def parts(self) -> dict[str, Part]:
        """Return the parts of the posterior beneath, with the scaling beside it."""
        part, tensors = self.posterior.parts()["posterior"], dict[str, Tensor]()
        config = {"scaling": encode(self.scaling, tensors, PREFIX), "of": dict(part.config)}
        return {"posterior": Part(config, {**part.tensors, **tensors})}
