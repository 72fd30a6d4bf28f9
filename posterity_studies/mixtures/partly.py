"""Partly labelled points: how the error of the means falls with the share of points whose component is known."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.evidence import jensen
from posterity.inference import infer
from posterity.inference.callbacks import Callback
from posterity.inference.run import Run
from posterity.methods import ExpectationMaximization
from posterity.model import Density
from posterity.numerics.random import Key
from posterity_studies.mixtures.example import SHAPES, UNKNOWN, Sample, Values, log_joint, maximised, sample, values

TRUTH = values(0.4, (1.2, -0.8), (0.64, 1.0))  # closer than in the other figures, so that labels matter
SHARES = (0.0, 0.05, 0.2, 1.0)
REPLICATES = 200
COUNT = 100
ROUNDS, TOLERANCE = 1000, 1e-9


@dataclass(frozen=True)
class Share:
    """The error of the means for a share of labels: root mean square over both means, averaged over data sets."""

    share: float
    error: float
    standard_error: float


def partly_labelled(key: Key) -> list[Share]:
    """Run EM from the true values, so that only the data cause errors, on the same data sets for every share.

    All data sets run in one batch: the number of its data set is one of a restart's values, which no step changes.
    """
    samples = [sample(COUNT, TRUTH, key.fold(index)) for index in range(REPLICATES)]
    points = torch.stack([sample.points for sample in samples])  # (M, N)
    labels = torch.stack([sample.labels for sample in samples])
    order = torch.stack([key.fold(index).fold("order").permutation(COUNT, "cpu") for index in range(REPLICATES)])
    known = torch.stack([order < round(share * COUNT) for share in SHARES])  # (shares, M, N)
    every = Sample(points.repeat(len(SHARES), 1), torch.where(known, labels, UNKNOWN).flatten(0, 1))
    means = _fitted(every).reshape(*known.shape[:2], 2)
    errors = (means - TRUTH["means"]).square().mean(-1).sqrt()  # (shares, M)
    return [
        Share(share, float(distances.mean()), float(distances.std()) / math.sqrt(REPLICATES))
        for share, distances in zip(SHARES, errors, strict=True)
    ]


class _Last(Callback):
    """Keeps theta of all restarts; the posterior has only the best."""

    theta: Tensor

    def after_step(self, run: Run) -> None:
        self.theta = run.state.theta


def _fitted(data: Sample) -> Tensor:
    """Return the means (R, 2) that EM fits to each of R rows of points (R, N)."""

    def own(at: Values) -> Sample:
        rows = at["row"][..., 0].long()
        return Sample(data.points[rows], data.labels[rows])

    method = ExpectationMaximization(
        expectation=lambda at, latent: {"q": jensen.posterior(log_joint(own(at), at))},
        maximisation=lambda at, latent: {**maximised(own(at), latent["q"]), "row": at["row"]},
        bound=lambda at, latent: jensen.jensen_bound(log_joint(own(at), at), latent["q"]).sum(-1),
        rounds=ROUNDS,
        tolerance=TOLERANCE,
        batched=True,
    )
    density = Density(
        lambda row, **at: jensen.log_likelihood(log_joint(own({"row": row}), at)).sum(-1),
        {**SHAPES, "row": (1,)},
        batched=True,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    count = len(data.points)
    first = {name: value.expand(count, 2) for name, value in TRUTH.items()}
    start = density.unconstrained({**first, "row": torch.arange(count, dtype=torch.float64).unsqueeze(-1)})
    last = _Last()
    infer(method, density, None, start=start, callbacks=[last], progress=False)
    return density.constrained(last.theta)["means"]
