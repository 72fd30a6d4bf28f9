"""The interface of posteriors: draw weights and outputs, predict, save."""

import logging
import os
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sized
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from posterity.datasets.shards import Shards
from posterity.errors import BadData, positive_whole, shown
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Inputs, map_inputs, num_rows, without_labels
from posterity.model.data import Batch, as_inputs
from posterity.model.density import Density
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.problem import Problem
from posterity.model.stream import input_parts
from posterity.model.tempering import Tempering
from posterity.numerics.brief import brief, brief_module
from posterity.numerics.layout import Layout
from posterity.numerics.random import Key
from posterity.posteriors.deployable import Deployable
from posterity.posteriors.functions import Evaluation, Functions
from posterity.predictive import (
    ClassPredictive,
    Integrator,
    MonteCarlo,
    Predictive,
    from_blocks,
    joint_gaussian,
    label_information,
)
from posterity.predictive.probit import default_integrator
from posterity.storage import Part, RunFolder, encode

if TYPE_CHECKING:
    from posterity.posteriors.gaussian import Gaussian


logger = logging.getLogger("posterity")

DRAWS = 100
"""Monte Carlo draws of a prediction by default, where a posterior has no draws of its own."""
KEPT_BYTES = 1 << 30
"""Bytes of the draws of outputs that a prediction keeps by default."""
MOST_CORRELATED = 128  # classes of which the covariance of the logits is used for their mutual information


class WeightPart(NamedTuple):
    """A component of a distribution over weights, of probability `share`."""

    share: float
    weights: Tensor  # one vector (P,), or draws (S, P), in float64
    spread: Tensor | None = None  # standard deviations (P,) around it
    independent: bool = True  # whether the weights are independent within the part


class Prediction(NamedTuple):
    """What `predict` was asked for; `share` is that of a component of a mixture."""

    draws: int | None
    share: float
    integrator: Integrator | None
    key: Key
    batch_size: int
    memory_budget: int | None
    kept_bytes: int  # for the draws of outputs
    joint: bool


class Posterior(Deployable):
    """A distribution over functions, from which network outputs can be drawn.

    Subclasses are frozen dataclasses whose first field is the fitted `joint`; all other fields hold numbers, tensors
    and posterity's own values, so that `save` works without code in the subclass.
    """

    joint: Problem
    buffers: Buffers

    on_cpu: ClassVar[bool] = False
    """Whether tensors stay on the CPU, wherever the model is, since they may not fit on a device."""

    tensor_shapes: ClassVar[dict[str, str]] = {}
    """Shapes of the fields of tensors, the weights first, for checks of stored ones: P is the length of theta, m may
    be a member axis, C and D are chains and draws, and * is anything. Buffers have the axes before P."""

    @property
    def num_members(self) -> int | None:
        """M when this holds M separate posteriors side by side, else None."""
        return None

    def member(self, index: int) -> "Posterior":
        """Return one of the side-by-side posteriors."""
        raise TypeError(f"{type(self).__name__} has no members. Use it as it is.")

    @property
    def ties_rows(self) -> bool:
        """Whether a draw of outputs is one function at all rows, as `joint_log_prob` needs."""
        return True

    @abstractmethod
    def point(self) -> Tensor:
        """Weights (P,) or (M, P) from which another run starts."""

    def start(self) -> "Posterior":
        """The posterior from which another run starts: this one, or a point in its place."""
        return self

    def as_gaussian(self) -> "Gaussian | None":
        """The Gaussian over weights, of this posterior or of its linearisation; None where there is none."""
        return None

    def weight_parts(self) -> Iterator[WeightPart]:
        """Yield the components of the distribution over weights; large sets of draws in several blocks."""
        raise TypeError(
            "The posterior must be over weights: Gaussian, Linearized, Point, Samples or a Mixture of them. "
            f"Got {type(self).__name__}."
        )

    @abstractmethod
    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        """Draws of the weights, (draws, P). Without a key it is `Key(0)`: the same draws each time."""

    def log_density(self, theta: Tensor) -> Tensor:
        """Log density of this posterior at weights (S, P), (S,) in float64, normalised over the random weights.

        Weights that are points are ignored. A TypeError where there is no density.
        """
        raise TypeError(
            f"{type(self).__name__} has no density over weights. Use a posterior that has one: that of Laplace or "
            "Conjugate, or another Gaussian."
        )

    @abstractmethod
    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """Draws of the network outputs at all inputs jointly, (S, N, *event)."""

    def output_blocks(self, inputs: Inputs, draws: int, key: Key) -> Iterator[Tensor]:
        """Yield the draws of `outputs` in blocks (s, N, *event); by default all in one."""
        yield self.outputs(inputs, draws, key)

    def functions(self, draws: int, key: Key | None = None) -> Functions:
        """Draw whole functions, each with its own weights (or dropout mask) at all inputs and in all calls.

        Thompson sampling maximises one of them: `f = q.functions(1, key)[0]`, then `x[f(x).argmax()]`. The weights of
        all draws are kept. Without a key it is `Key(0)`: the same functions each time.
        """
        positive_whole("functions: draws", draws)
        self._alone()
        if not isinstance(self.joint, Joint):
            raise TypeError("functions: a Density has no inputs. Use draws(n) for its parameters.")
        evaluation = self.drawn_functions(draws, key or Key(0))

        def evaluate(inputs: object, numbers: Tensor, batch_size: int) -> Tensor:
            enabled = torch.is_grad_enabled() and _requires_grad(inputs)
            with torch.inference_mode(False), torch.set_grad_enabled(enabled):
                return torch.cat([evaluation(part, numbers) for part, _, _ in self._chunks(inputs, batch_size)], 1)

        return Functions(evaluate, torch.arange(draws, device="cpu"))

    def drawn_functions(self, draws: int, key: Key) -> Evaluation:
        """The function that evaluates the draws of `functions`; by default those of `outputs` under the key."""
        if not self.ties_rows:
            raise TypeError(f"functions: {type(self).__name__} draws outputs row by row, not functions of all rows.")
        return lambda inputs, numbers: self.outputs(inputs, draws, key)[numbers.to(self.joint.device)]

    def likelihood(self, draws: int, key: Key) -> Likelihood:
        """The likelihood of `draws` draws of `outputs` under the key: by default the joint's for all of them."""
        assert isinstance(self.joint, Joint)
        return self.joint.likelihood

    def output_moments(
        self, inputs: Inputs, *, marginal: bool = False, memory_budget: int | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Mean (N, *event) and covariance (N, D, D) of the outputs where they have a closed form, else None.

        With `marginal` variances (N, D) replace the covariance. Rows go in chunks whose derivatives take about
        `memory_budget` bytes (None: the fastest size).
        """
        return None

    def row_outputs(self, inputs: Inputs, draws: int, key: Key) -> Iterator[Tensor] | None:
        """Blocks (s, N, *event) of draws of each row's outputs by itself, without their covariances, else None."""
        return None

    def joint_output_moments(self, inputs: Inputs, *, memory_budget: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Mean (N, *event) and covariance (N D, N D) within and across rows in closed form, else None."""
        return None

    def draws(self, draws: int, seed: int = 0) -> dict[str, Tensor]:
        """Draws by name: constrained parameters of a density, or a network's weights (and sampled noise)."""
        positive_whole("draws: draws", draws)
        theta, joint = self.sample(draws, Key(seed)), self.joint
        if isinstance(joint, Density):
            return joint.constrained(theta)
        # Chains sample the noise, other methods fit it.
        with_noise = joint.network is None or theta.shape[-1] == joint.size
        layout: Layout = joint.layout if with_noise else joint.as_joint("draws").network.layout
        return layout.unflatten(theta)

    def predict(
        self,
        inputs: object,
        *,
        draws: int | None = None,
        integrator: Integrator | None = None,
        seed: int = 0,
        batch_size: int = 1024,
        memory_budget: int | None = None,
        joint: bool = False,
    ) -> Predictive:
        """Predict at the inputs: a tensor, an array, a tuple, a mapping, a `DataLoader` or `Shards` of files.

        Targets of a loader's batches and of files, and the labels of a mapping, are not looked at.

        A posterior with closed-form output moments integrates the likelihood over them by the `integrator` (by default
        `default_integrator`) and ignores `draws`; any other averages over draws: by default all draws of chains
        (`Samples`), and 100 Monte Carlo draws of any other posterior. Rows go in chunks of `batch_size`; all chunks
        share the draws of the weights. Derivatives in the weights, where needed, take about `memory_budget` bytes
        (None: the fastest). So do the draws of outputs that are kept where `draws` is left out (None: 1 GiB); at least
        100 are kept. With `joint` the predictive of a Gaussian likelihood has the covariance between rows. Where inputs
        require a gradient, so do the results.
        """
        if draws is not None:
            positive_whole("predict: draws", draws)
        positive_whole("predict: batch_size", batch_size)
        if integrator is not None and not isinstance(integrator, Integrator):
            raise TypeError(f"predict: integrator must be an Integrator, such as Probit(). Got {shown(integrator)}.")
        if memory_budget is not None:
            positive_whole("predict: memory_budget", memory_budget)
        if joint and isinstance(inputs, (DataLoader, Shards)):
            raise TypeError(f"predict: joint=True needs all rows at once. Got a {type(inputs).__name__}. Pass tensors.")
        kept_bytes = KEPT_BYTES if memory_budget is None else memory_budget
        wanted = Prediction(draws, 1.0, integrator, Key(seed), batch_size, memory_budget, kept_bytes, joint)
        enabled = torch.is_grad_enabled() and _requires_grad(inputs)
        # Derivatives in the weights need a graph, which inference mode would not record.
        with torch.inference_mode(False), torch.set_grad_enabled(enabled):
            return self._predicted(inputs, wanted)

    def _predicted(self, inputs: object, wanted: "Prediction") -> Predictive:
        """Predict at the inputs, chunk by chunk of their rows."""
        self._alone()
        if not isinstance(self.joint, Joint):
            raise TypeError("A Density has no inputs to predict at. Use draws(n) for its parameters.")
        first, parts, numbers = 0, list[Predictive](), None
        for chunk, example, rows in self._chunks(inputs, sys.maxsize if wanted.joint else wanted.batch_size):
            if wanted.joint:
                parts.append(self._predict_jointly(chunk, wanted.memory_budget))
                continue
            integrated = self._integrated(chunk, example, wanted, wanted.key.fold(first))
            if integrated is None:
                numbers = self._num_draws(example, rows, wanted) if numbers is None else numbers
                count, kept = numbers
                likelihood, blocks = self.likelihood(count, wanted.key), self.output_blocks(chunk, count, wanted.key)
                integrated = from_blocks(likelihood, blocks, count, kept=kept, shared=self.ties_rows)
            parts.append(integrated)
            first += num_rows(chunk)
        return parts[0] if len(parts) == 1 else type(parts[0]).concatenate(parts)

    def _integrated(self, inputs: Inputs, example: Tensor, wanted: "Prediction", key: Key) -> Predictive | None:
        """Integrate the likelihood over Gaussian outputs, rows being independent; None without output moments."""
        assert isinstance(self.joint, Joint)
        likelihood, budget = self.joint.likelihood, wanted.memory_budget
        chosen = wanted.integrator or default_integrator(likelihood, example)
        marginal = chosen.marginal(likelihood, example)
        if isinstance(chosen, MonteCarlo) and example[0].numel() > MOST_CORRELATED:
            blocks = self.row_outputs(inputs, chosen.draws, key)
            if blocks is not None:
                kept = max(
                    1, wanted.kept_bytes // max(1, num_rows(inputs) * example[0].numel() * example.element_size())
                )
                return from_blocks(likelihood, blocks, chosen.draws, kept=min(kept, chosen.draws), shared=False)
        moments = self._moments_to_integrate(inputs, marginal, budget, key)
        if moments is None and wanted.integrator is not None:
            raise TypeError(
                f"{type(self).__name__} has no closed-form output moments for {wanted.integrator} to integrate. "
                "Leave integrator out (it averages over draws), or use a linearised posterior."
            )
        if moments is None:
            return None
        pred = chosen(likelihood, *moments, key)
        if not (marginal and isinstance(pred, ClassPredictive) and likelihood.link == "softmax"):
            return pred
        if example.dim() > 2 or example.shape[1] > MOST_CORRELATED:  # logits count as independent
            return pred

        def information() -> Tensor:  # with the covariances that the probabilities do without
            with torch.inference_mode(False), torch.no_grad():
                full = self.output_moments(inputs, memory_budget=budget)
                assert full is not None
                return label_information(likelihood, *full)

        return pred.with_information(information)

    def _moments_to_integrate(
        self, inputs: Inputs, marginal: bool, memory_budget: int | None, key: Key
    ) -> tuple[Tensor, Tensor] | None:
        """`output_moments` for a prediction."""
        return self.output_moments(inputs, marginal=marginal, memory_budget=memory_budget)

    def prediction_draws(self, draws: int | None, share: float = 1.0) -> int:
        """Number of draws of a prediction: `draws` (by default 100), times the share of a component of a mixture."""
        return max(1, round((DRAWS if draws is None else draws) * share))

    def _num_draws(self, example: Tensor, rows: int, wanted: "Prediction") -> tuple[int, int]:
        """Number of draws that are averaged, and of those that are kept for as many rows as there are."""
        assert isinstance(self.joint, Joint)
        count = self.prediction_draws(wanted.draws, wanted.share)
        fitting = max(DRAWS, wanted.kept_bytes // max(1, rows * example[0].numel() * example.element_size()))
        if wanted.draws is not None or count <= fitting:
            return count, count
        classes = self.joint.likelihood.class_log_probs(example.unsqueeze(0)) is not None
        use = "class probabilities use all, densities of single draws use" if classes else "used are"
        logger.warning(
            f"predict: of {count:,} draws of the outputs at {rows:,} rows {fitting:,} fit into {wanted.kept_bytes:,} "
            f"bytes; {use} {fitting:,}, evenly spaced. Give draws=..., fewer rows or a larger memory_budget."
        )
        return (count if classes else fitting), fitting

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
        return joint_gaussian(likelihood, *moments)

    def _chunks(self, inputs: object, batch_size: int) -> Iterator[tuple[Inputs, Tensor, int]]:
        """Yield chunks of rows, each with an example of an output row and the number of all rows, as far as known."""
        assert isinstance(self.joint, Joint)
        total = 0
        for part in input_parts(inputs):
            if isinstance(part, Mapping):
                part = without_labels(part, self.joint.network.labels)
            tensors = map_inputs(lambda tensor: tensor.to(self.joint.device), as_inputs(part, torch.is_grad_enabled()))
            tensors = map_inputs(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, tensors)
            self.joint.check_inputs(tensors)
            if not num_rows(tensors):
                continue
            no_targets = torch.empty(num_rows(tensors), device=self.joint.device)
            example = self.joint.example_output(Batch(tensors, no_targets))  # raises if they misfit
            total = max(num_rows(tensors), _loader_rows(inputs))
            if num_rows(tensors) <= batch_size:
                yield tensors, example, total
                continue
            for low in range(0, num_rows(tensors), batch_size):
                cut = map_inputs(lambda tensor, low=low: tensor[low : low + batch_size], tensors)  # type: ignore[misc]
                yield cut, example, total
        if not total:
            raise BadData("The inputs have no rows. Pass at least one.")

    def lines(self) -> list[str]:
        """The lines of the repr after the first: the problem, then what is special to the kind of posterior."""
        joint = self.joint
        if isinstance(joint, Joint):
            lines = [f"network: {brief_module(joint.network.module)}", f"weights: {_weights(joint)}"]
            lines += [f"prior: {brief(joint.prior)}", f"likelihood: {brief(joint.likelihood)}"]
        else:
            lines = [f"density of {joint.size:,} numbers: {', '.join(part.name for part in joint.layout)}"]
        if joint.tempering != Tempering.bayes():
            lines.append(f"tempering: {brief(joint.tempering)}")
        return lines if self.num_members is None else [*lines, f"members: {self.num_members}"]

    def __repr__(self) -> str:
        return "\n  ".join([type(self).__name__, *self.lines()])

    def _alone(self) -> None:
        if self.num_members is not None:
            raise TypeError(
                f"This holds {self.num_members} separate posteriors (one for each member). Choose one: q.member(0)."
            )

    def parts(self) -> dict[str, Part]:
        """Return the posterior as parts of a run folder."""
        tensors: dict[str, Tensor] = {}
        config: dict[str, Any] = {"posterior": _encode(self, tensors, "posterior")}
        config["joint" if isinstance(self.joint, Joint) else "density"] = self.joint.encode(tensors)
        return {"posterior": Part(config, tensors)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior into the run folder `path`, atomically; read it back with `posterity.load`.

        The folder may hold a checkpoint of its run, or another posterior, which is replaced. A folder with a run of the
        command line, a task of an executor or an estimator is refused.
        """
        folder = RunFolder(path)
        folder.refuse()
        folder.commit(self.parts())


def _weights(joint: Joint) -> str:
    """Number of weights, and of those with a distribution where others are points."""
    count = f"{joint.num_weights:,}"
    return count if joint.random_indices is None else f"{count}, of which {joint.num_random:,} are random"


def _loader_rows(inputs: object) -> int:
    """Number of rows of a loader's data set or of files, 0 where it is not known."""
    dataset = inputs.dataset if isinstance(inputs, DataLoader) else inputs if isinstance(inputs, Shards) else None
    return len(dataset) if isinstance(dataset, Sized) else 0


def _requires_grad(inputs: object) -> bool:
    """Whether any tensor of the inputs requires a gradient."""
    if isinstance(inputs, (Mapping, tuple, list)):
        return any(map(_requires_grad, inputs.values() if isinstance(inputs, Mapping) else inputs))
    return isinstance(inputs, Tensor) and inputs.requires_grad


def _encode(posterior: Posterior, tensors: dict[str, Tensor], path: str) -> dict[str, Any]:
    """Encode a posterior without its joint, which posteriors inside it (the Gaussian of `Linearized`) share."""
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(posterior) if field.name != "joint"):  # type: ignore[arg-type]
        value, own = getattr(posterior, name), f"{path}.{name}"
        nested = isinstance(value, Posterior)
        values[name] = {"posterior": _encode(value, tensors, own)} if nested else encode(value, tensors, own)
    return {"type": type(posterior).__name__, "fields": values}
