"""What posteriors become outside the library: plain modules, exported programs, folders for other people."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from posterity.errors import positive_whole
from posterity.model.data import as_inputs
from posterity.model.joint import Joint
from posterity.model.problem import Problem
from posterity.numerics.random import Key
from posterity.posteriors.standalone import PredictiveModule

if TYPE_CHECKING:
    from posterity.posteriors.posterior import Posterior


class Deployable(ABC):
    """The base of posteriors, whose predictions are deployed as modules, as programs and as folders."""

    joint: Problem

    @abstractmethod
    def _alone(self) -> None:
        """Raise a TypeError where this holds several posteriors side by side."""

    @property
    def by_draws(self) -> bool:
        """Whether `predict` averages over draws, which a server can make once and keep."""
        return True

    def module(self, draws: int | None = None, *, seed: int = 0) -> nn.Module:
        """Return the predictions as a plain module, of draws that are fixed: for deployment, and for `torch.export`.

        It takes inputs as `predict` does and returns a dict: "mean" and "std" of regression, or "probs", "entropy" and
        "mutual_information" of classes. They are those of `predict(inputs, draws=draws, seed=seed)`, to rounding. A
        Laplace posterior over the last layer, or over a plain chain of linear layers and activations, has moments in
        closed form, and probabilities by its default integrator. The mutual information comes from its draws. So do
        all outputs under a likelihood without a closed form, such as counts, where `predict` draws each row by itself.
        A traced program holds a network that is no such chain once for each draw, so that 20 to 50 draws suit it (the
        layers before a last-layer posterior, and members of an ensemble, are there once). Batches may be of any size,
        if the network's own code has `x.shape[0]` and not `len(x)`. `export` writes such a program.
        """
        return self.predictor(draws, seed=seed)

    def predictor(self, draws: int | None = None, *, seed: int = 0) -> PredictiveModule:
        """Return `module`, of a point too, whose `module` is the plain network."""
        if draws is not None:
            positive_whole("module: draws", draws)
        if not isinstance(self.joint, Joint):
            raise TypeError("module needs the posterior of a Joint: a Density has no module.")
        self._alone()
        return PredictiveModule(self.standalone(draws, 1.0, Key(seed)))

    def standalone(self, draws: int | None, share: float, key: Key) -> nn.Module:
        """Return the part of `module` that predicts a `Summary`, with this share of the draws."""
        raise TypeError(f"module: {type(self).__name__} has no draws of weights to fix. Use predict.")

    def export(
        self, path: str | os.PathLike[str], inputs: object = None, *, draws: int | None = None, seed: int = 0
    ) -> None:
        """Write the predictions as a program that runs without posterity: `model.pt2` (torch alone) or `model.onnx`.

        Takes and gives what `module(draws, seed=seed)` does, for batches of any size. `inputs` are a few rows, by which
        the network is traced; a network that begins with a linear layer needs none. The program is run on them before
        it is written, and must agree with the module to 1e-5 (an ONNX file, where onnxruntime is installed). ONNX needs
        `pip install 'posterity[onnx]'`. The path must end in .pt2 or .onnx.

        >>> import posterity as po, tempfile
        >>> q = po.posteriors.Point.of(torch.nn.Linear(2, 1), po.likelihoods.Gaussian(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     q.export(f"{folder}/model.pt2")
        ...     program = torch.export.load(f"{folder}/model.pt2").module()
        >>> sorted(program(torch.zeros(5, 2)))
        ['mean', 'std']
        """
        from posterity.posteriors.programs import check_program_path, write_program

        check_program_path(path)
        module = self.predictor(draws, seed=seed)
        joint = self.joint.as_joint("export")
        facts = {
            "posterior": type(self).__name__,
            "likelihood": type(joint.likelihood).__name__,
            "draws": "default" if draws is None else draws,
            "seed": seed,
        }
        rows = example_rows(joint) if inputs is None else as_inputs(inputs)
        joint.check_inputs(rows)
        write_program(module, path, rows, facts)

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        *,
        scores: Mapping[str, float] | None = None,
        data: str = "",
        intended_use: str = "",
        limits: str = "",
    ) -> None:
        """Write the folder of a hub: config.json, model.safetensors and a model card, README.md.

        `from_pretrained(path, net)` reads it with the same bits as `save` and `load`. The card says what is stored:
        method, problem, number of rows, and the `scores`, the description of the `data`, the `intended_use` and
        further `limits` that are given; what is not given, it says is not stated.
        """
        from posterity.posteriors.pretrained import write_pretrained

        posterior: Posterior = self  # type: ignore[assignment]  # the only subclass
        write_pretrained(posterior, path, scores=scores or {}, data=data, intended_use=intended_use, limits=limits)


def example_rows(joint: Joint) -> Tensor:
    """Return two rows of zeros for a network whose first layer is linear; a TypeError for another."""
    first = next((module for module in joint.network.module.modules() if not list(module.children())), None)
    if not isinstance(first, nn.Linear):
        raise TypeError(
            f"export: the network begins with {type(first).__name__}, so the shape of its inputs is not known. Give a "
            "few rows, as in q.export('model.onnx', x[:2])."
        )
    return torch.zeros(2, first.in_features, dtype=joint.network.dtype, device=joint.device)
