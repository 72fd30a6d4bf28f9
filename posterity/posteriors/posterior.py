"""What every posterior can do: draw network outputs, predict, and be saved."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from posterity.errors import BadData, positive_whole, shown
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Inputs, map_inputs, num_rows
from posterity.model.data import Batch, as_inputs
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.model.stream import in_order
from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.predictive import Exact, Integrator, MonteCarlo, Predictive, Probit, from_outputs, joint_gaussian
from posterity.storage import Part, RunFolder, encode

if TYPE_CHECKING:
    from posterity.posteriors.gaussian import Gaussian


class WeightPart(NamedTuple):
    """A part of a distribution over weights that has the probability `share`."""

    share: float
    weights: Tensor  # one vector (P,), or draws (S, P), in float64
    spread: Tensor | None = None  # standard deviations (P,) around it
    independent: bool = True  # whether the weights are so within the part


class Posterior(ABC):
    """A distribution over functions: whatever draws network outputs.

    Subclasses are frozen dataclasses whose first field is the fitted `joint`; every other field is made of
    numbers, tensors and posterity's own values, so that `save` needs no code of theirs.
    """

    joint: Problem
    buffers: Buffers

    # Whether its tensors stay on the CPU, wherever the model is: there may be more of them than a device holds.
    on_cpu: ClassVar[bool] = False

    @property
    def num_members(self) -> int | None:
        """M when this holds M separate posteriors side by side, else None."""
        return None

    def member(self, index: int) -> "Posterior":
        """One of the side-by-side posteriors."""
        raise TypeError(f"{type(self).__name__} has no members. Use it as it is.")

    @property
    def ties_rows(self) -> bool:
        """Whether a draw of outputs is one function at all rows, as `joint_log_prob` needs."""
        return True

    @abstractmethod
    def point(self) -> Tensor:
        """The weights (P,) or (M, P) that stand for the posterior when another run starts from it."""

    def start(self) -> "Posterior":
        """What another run starts from when it is given this one: itself, or a point that stands for it."""
        return self

    def as_gaussian(self) -> "Gaussian | None":
        """The Gaussian over weights that this is, or that its functions are linear in; None of other posteriors."""
        return None

    def weight_parts(self) -> Iterator[WeightPart]:
        """The parts that the distribution over weights is a mixture of; large sets of draws in several of them."""
        raise TypeError(
            "The posterior must be over weights: Gaussian, Linearized, Point, Samples or a Mixture of them. "
            f"Got {type(self).__name__}."
        )

    @abstractmethod
    def sample(self, draws: int, key: Key) -> Tensor:
        """Weights (draws, P)."""

    def log_density(self, theta: Tensor) -> Tensor:
        """Log density of this posterior at weights (S, P), (S,) in float64, normalised over the random weights.

        Weights that are points are not looked at. A TypeError where there is no density.
        """
        raise TypeError(
            f"{type(self).__name__} has no density over weights. Use a posterior that has one: that of Laplace or "
            "Conjugate, or another Gaussian."
        )

    @abstractmethod
    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """Draws of the network outputs at all inputs jointly, (S, N, *event)."""

    def likelihood(self, draws: int, key: Key) -> Likelihood:
        """The likelihood of as many draws of `outputs` under the key: by default the joint's for all of them."""
        assert isinstance(self.joint, Joint)
        return self.joint.likelihood

    def output_moments(
        self, inputs: Inputs, *, marginal: bool = False, memory_budget: int | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Mean (N, *event) and covariance (N, D, D) of the outputs where they have a closed form, else None.

        With `marginal` variances (N, D) come in place of the covariance. Rows go in chunks whose derivatives take
        about `memory_budget` bytes (None: as many as are quickest).
        """
        return None

    def joint_output_moments(self, inputs: Inputs, *, memory_budget: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Mean (N, *event) and covariance (N D, N D) of all outputs together where it has a closed form, else None."""
        return None

    def draws(self, draws: int, seed: int = 0) -> dict[str, Tensor]:
        """Named draws: of a density's own (constrained) parameters, or of a network's weights (and sampled noise)."""
        positive_whole("draws: draws", draws)
        theta = self.sample(draws, Key(seed))
        joint = self.joint
        if isinstance(joint, Density):
            return joint.constrained(theta)
        # Chains draw the noise as well, others have it fitted.
        whole = joint.network is None or theta.shape[-1] == joint.size
        layout: Layout = joint.layout if whole else joint.as_joint("draws").network.layout
        return layout.unflatten(theta)

    def predict(
        self,
        inputs: object,
        *,
        draws: int = 100,
        integrator: Integrator | None = None,
        seed: int = 0,
        batch_size: int = 1024,
        memory_budget: int | None = None,
        joint: bool = False,
    ) -> Predictive:
        """The predictive distribution at the inputs: a tensor, an array, a tuple, a dict or a `DataLoader`.

        A posterior with closed-form output moments turns them into probabilities by the `integrator` (by default
        the one that suits the likelihood) and has no use for `draws`; any other one averages over them. Rows go in
        chunks of `batch_size`; all chunks see the same draws of the weights. Derivatives in the weights, where they
        are needed, take about `memory_budget` bytes (None: what is quickest). With `joint` a Gaussian likelihood's
        predictive knows the covariance between rows, too. Where inputs require a gradient, so do the results.
        """
        self._alone()
        if not isinstance(self.joint, Joint):
            raise TypeError("A Density has no inputs to predict at. Use draws(n) for its parameters.")
        positive_whole("predict: draws", draws)
        positive_whole("predict: batch_size", batch_size)
        if integrator is not None and not isinstance(integrator, Integrator):
            raise TypeError(f"predict: integrator must be an Integrator, such as Probit(). Got {shown(integrator)}.")
        if memory_budget is not None:
            positive_whole("predict: memory_budget", memory_budget)
        if joint and isinstance(inputs, DataLoader):
            raise TypeError("predict: joint=True needs all rows at once. Got a DataLoader. Pass a tensor of the rows.")
        key, first, parts = Key(seed), 0, []
        wanted = torch.is_grad_enabled() and _requires_grad(inputs)
        # Derivatives in the weights need a graph, which there is none of in the caller's inference mode.
        with torch.inference_mode(False), torch.set_grad_enabled(wanted):
            for chunk, example in self._chunks(inputs, sys.maxsize if joint else batch_size):
                if joint:
                    parts.append(self._predict_jointly(chunk, memory_budget))
                else:
                    chosen = default_integrator(self.joint.likelihood, example) if integrator is None else integrator
                    marginal = chosen.marginal(self.joint.likelihood, example)
                    moments = self.output_moments(chunk, marginal=marginal, memory_budget=memory_budget)
                    if moments is not None:  # rows are independent
                        parts.append(chosen(self.joint.likelihood, *moments, key.fold(first)))
                    else:
                        self._refuse(integrator)
                        drawn = self.outputs(chunk, draws, key)
                        parts.append(from_outputs(self.likelihood(draws, key), drawn, shared=self.ties_rows))
                first += num_rows(chunk)
        if not parts:
            raise BadData("predict: the inputs have no rows. Pass at least one.")
        return parts[0] if len(parts) == 1 else type(parts[0]).concatenate(parts)

    def _refuse(self, integrator: Integrator | None) -> None:
        if integrator is not None:
            raise TypeError(
                f"{type(self).__name__} has no closed-form output moments for {integrator} to integrate. "
                "Leave integrator out (it averages over draws), or use a linearised posterior."
            )

    def _predict_jointly(self, inputs: Inputs, memory_budget: int | None) -> Predictive:
        assert isinstance(self.joint, Joint)
        likelihood = self.joint.likelihood
        if likelihood.link != "identity":
            raise TypeError(
                f"predict: joint=True needs a Gaussian likelihood. Got {type(likelihood).__name__}. Draw the outputs "
                "of all rows together: from_outputs(likelihood, q.outputs(inputs, draws, key))."
            )
        moments = self.joint_output_moments(inputs, memory_budget=memory_budget)
        if moments is None:
            raise TypeError(
                f"predict: joint=True needs closed-form output moments, which {type(self).__name__} has not. "
                "Leave it out: draws of the weights tie the rows together (joint_log_prob)."
            )
        mean, covariance = moments
        return joint_gaussian(likelihood, mean, covariance)

    def _chunks(self, inputs: object, batch_size: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Rows that go together, each with an example of an output row."""
        assert isinstance(self.joint, Joint)
        if isinstance(inputs, DataLoader):
            whole: Iterator[object] = (
                item[0] if isinstance(item, (tuple, list)) else item for item in in_order(inputs)
            )
        else:
            whole = iter([inputs])
        for part in whole:
            tensors = map_inputs(lambda tensor: tensor.to(self.joint.device), as_inputs(part, torch.is_grad_enabled()))
            tensors = map_inputs(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, tensors)
            self.joint.check_inputs(tensors)
            if not num_rows(tensors):
                continue
            example = self.joint.example_output(Batch(tensors, torch.empty(num_rows(tensors))))  # or a refusal
            if num_rows(tensors) <= batch_size:
                yield tensors, example
                continue
            for low in range(0, num_rows(tensors), batch_size):
                some = map_inputs(lambda tensor, low=low: tensor[low : low + batch_size], tensors)  # type: ignore[misc]
                yield some, example

    def _alone(self) -> None:
        if self.num_members is not None:
            raise TypeError(
                f"This holds {self.num_members} separate posteriors (one for each member). Choose one: q.member(0)."
            )

    def parts(self) -> dict[str, Part]:
        """The posterior as parts of a run folder."""
        tensors: dict[str, Tensor] = {}
        config: dict[str, Any] = {"posterior": _encode(self, tensors, "posterior")}
        config["joint" if isinstance(self.joint, Joint) else "density"] = self.joint.encode(tensors)
        return {"posterior": Part(config, tensors)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior into the run folder `path`, atomically; read it back with `posterity.load`."""
        RunFolder(path).commit(self.parts())


def _requires_grad(inputs: object) -> bool:
    """Whether any tensor in them does."""
    if isinstance(inputs, Tensor):
        return inputs.requires_grad
    values = inputs.values() if isinstance(inputs, dict) else inputs if isinstance(inputs, (tuple, list)) else ()
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _encode(posterior: Posterior, tensors: dict[str, Tensor], path: str) -> dict[str, Any]:
    """A posterior without its joint; posteriors inside it (a linearised one's Gaussian) share the joint."""
    values: dict[str, Any] = {}
    for field in fields(posterior):  # type: ignore[arg-type]
        if field.name == "joint":
            continue
        value = getattr(posterior, field.name)
        place = f"{path}.{field.name}"
        if isinstance(value, Posterior):
            values[field.name] = {"posterior": _encode(value, tensors, place)}
        else:
            values[field.name] = encode(value, tensors, place)
    return {"type": type(posterior).__name__, "fields": values}


def default_integrator(likelihood: Likelihood, mean: Tensor) -> Integrator:
    """The integrator for outputs of this mean (N, *event) where the caller names none.

    `Exact()` for Gaussian, Bernoulli and two classes, `Probit()` for more classes (for two it ignores that the logits
    are correlated, which costs more than all else), `MonteCarlo(1000)` for any other likelihood.

    >>> from posterity.likelihoods import Categorical
    >>> default_integrator(Categorical(), torch.zeros(5, 2)), default_integrator(Categorical(), torch.zeros(5, 10))
    (Exact(), Probit())
    """
    if likelihood.link is None:
        return MonteCarlo(1000)
    return Probit() if likelihood.link == "softmax" and mean.shape[1:] != (2,) else Exact()
