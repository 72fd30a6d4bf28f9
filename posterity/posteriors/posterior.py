"""What every posterior can do: draw network outputs, predict, and be saved."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from posterity.errors import BadData, positive_whole, shown
from posterity.model.data import Batch, as_inputs
from posterity.model.density import Density
from posterity.model.inputs import Inputs, map_inputs, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.model.stream import in_order
from posterity.numerics.random import Key
from posterity.predictive import Integrator, Predictive, default_integrator, from_outputs
from posterity.storage import Part, RunFolder, encode


class Posterior(ABC):
    """A distribution over functions: whatever draws network outputs.

    Subclasses are frozen dataclasses whose first field is the fitted `joint`; every other field is made of
    numbers, tensors and posterity's own values, so that `save` needs no code of theirs.
    """

    joint: Joint | Density
    buffers: Buffers

    @property
    def num_members(self) -> int | None:
        """M when this holds M separate posteriors side by side, else None."""
        return None

    def member(self, index: int) -> "Posterior":
        """One of the side-by-side posteriors."""
        raise TypeError(f"{type(self).__name__} has no members. Use it as it is.")

    @abstractmethod
    def point(self) -> Tensor:
        """The weights (P,) or (M, P) that stand for the posterior when another run starts from it."""

    @abstractmethod
    def sample(self, draws: int, key: Key) -> Tensor:
        """Weights (draws, P)."""

    @abstractmethod
    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """Draws of the network outputs at all inputs jointly, (S, N, *event)."""

    def output_moments(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        """Mean (N, *event) and covariance (N, D, D) of the outputs where they have a closed form, else None."""
        return None

    def draws(self, draws: int, seed: int = 0) -> dict[str, Tensor]:
        """Named draws: of a density's own (constrained) parameters, or of a network's weights."""
        positive_whole("draws: draws", draws)
        theta = self.sample(draws, Key(seed))
        joint = self.joint
        return joint.constrained(theta) if isinstance(joint, Density) else joint.network.layout.unflatten(theta)

    @torch.no_grad()
    def predict(
        self,
        inputs: object,
        *,
        draws: int = 100,
        integrator: Integrator | None = None,
        seed: int = 0,
        batch_size: int = 1024,
    ) -> Predictive:
        """The predictive distribution at the inputs: a tensor, an array, a tuple, a dict or a `DataLoader`.

        A posterior with closed-form output moments turns them into probabilities by the `integrator` (by default
        the one that suits the likelihood) and has no use for `draws`; any other one averages over them. Rows go in
        chunks of `batch_size`; all chunks see the same draws of the weights.
        """
        self._alone()
        if not isinstance(self.joint, Joint):
            raise TypeError("A Density has no inputs to predict at. Use draws(n) for its parameters.")
        positive_whole("predict: draws", draws)
        positive_whole("predict: batch_size", batch_size)
        if integrator is not None and not isinstance(integrator, Integrator):
            raise TypeError(f"predict: integrator must be an Integrator, such as Probit(). Got {shown(integrator)}.")
        key, first, parts = Key(seed), 0, []
        for chunk in self._chunks(inputs, batch_size):
            parts.append(self._predict(chunk, draws, integrator, key, first))
            first += num_rows(chunk)
        if not parts:
            raise BadData("predict: the inputs have no rows. Pass at least one.")
        return parts[0] if len(parts) == 1 else type(parts[0]).concatenate(parts)

    def _chunks(self, inputs: object, batch_size: int) -> Iterator[Inputs]:
        assert isinstance(self.joint, Joint)
        if isinstance(inputs, DataLoader):
            whole: Iterator[object] = (
                item[0] if isinstance(item, (tuple, list)) else item for item in in_order(inputs)
            )
        else:
            whole = iter([inputs])
        for part in whole:
            tensors = map_inputs(lambda tensor: tensor.to(self.joint.device), as_inputs(part))
            self.joint.check_inputs(tensors)
            if num_rows(tensors):
                self.joint.example_output(Batch(tensors, torch.empty(num_rows(tensors))))  # refuse a wrong shape
            for low in range(0, num_rows(tensors), batch_size):
                yield map_inputs(lambda tensor, low=low: tensor[low : low + batch_size], tensors)  # type: ignore[misc]

    def _predict(self, inputs: Inputs, draws: int, integrator: Integrator | None, key: Key, first: int) -> Predictive:
        assert isinstance(self.joint, Joint)
        moments = self.output_moments(inputs)
        if moments is None:
            if integrator is not None:
                raise TypeError(
                    f"{type(self).__name__} has no closed-form output moments for {integrator} to integrate. "
                    "Leave integrator out (it averages over draws), or use a linearised posterior."
                )
            return from_outputs(self.joint.likelihood, self.outputs(inputs, draws, key))
        integrator = default_integrator(self.joint.likelihood, moments[0]) if integrator is None else integrator
        return integrator(self.joint.likelihood, *moments, key.fold(first))  # its rows are independent

    def _alone(self) -> None:
        if self.num_members is not None:
            raise TypeError(
                f"This holds {self.num_members} separate posteriors (one for each member). Choose one: q.member(0)."
            )

    def parts(self) -> dict[str, Part]:
        """The posterior as parts of a run folder."""
        tensors: dict[str, Tensor] = {}
        config: dict[str, Any] = {"posterior": _encode(self, tensors, "posterior")}
        if isinstance(self.joint, Joint):
            config["joint"] = self.joint.encode(tensors)
        else:
            config["density"] = self.joint.encode()
        return {"posterior": Part(config, tensors)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior into the run folder `path`, atomically; read it back with `posterity.load`."""
        RunFolder(path).commit(self.parts())


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
