"""Structures over some of the weights, and derivatives formed a few rows at a time."""

import pytest
import torch
from curvature.test_rules import CASES
from curvature.test_structures import NETWORKS, inputs, kept, problem
from curvaturecases import FLOAT64, Truth, close, made, truth
from matrixcases import as_matrix
from torch import nn

import posterity as po
from posterity.curvature import (
    BlockDiagonal,
    CorrectedKronecker,
    Diagonal,
    Full,
    GaussNewton,
    Hessian,
    Hutchinson,
    Kronecker,
    LowRank,
)
from posterity.curvature.curvature import Rows
from posterity.curvature.kronecker import say_diagonal
from posterity.curvature.survey import survey
from posterity.likelihoods import Categorical
from posterity.numerics import Key

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
PATTERNS = ["*bias", "*weight", "0.*", ("0.bias", "5.weight"), "1.*"]
STRUCTURES = [Full(), Diagonal(), BlockDiagonal(), LowRank(30), Kronecker(), CorrectedKronecker()]


def images(random, rows: int = 6) -> Truth:
    return truth(made(NETWORKS["images"]), inputs("images", rows), Categorical(), random=random)


def blocks(case: Truth) -> torch.Tensor:
    """The dense matrix with zeros between layers."""
    wanted = torch.zeros_like(case.matrix)
    for place in survey(case.joint, case.batch.inputs).places:
        index = place.block.index
        wanted[index[:, None], index] = case.matrix[index[:, None], index]
    return wanted


@pytest.mark.parametrize("random", PATTERNS, ids=str)
def test_structures_of_some_tensors(random) -> None:
    case = images(random)
    eye = 0.5 * torch.eye(len(case.matrix), dtype=FLOAT64)
    close(as_matrix(kept(case, Full())), case.matrix + eye)
    close(as_matrix(kept(case, LowRank(30))), case.matrix + eye, 1e-8)
    close(as_matrix(kept(case, Diagonal())), torch.diag(case.matrix.diagonal()) + eye)
    close(as_matrix(kept(case, BlockDiagonal())), blocks(case) + eye)
    factored, corrected = as_matrix(kept(case, Kronecker())) - eye, as_matrix(kept(case, CorrectedKronecker())) - eye
    assert (corrected - blocks(case)).norm() <= (factored - blocks(case)).norm() + 1e-10
    close(corrected.trace().view(1), case.matrix.trace().view(1))


@pytest.mark.parametrize("random", ["*bias", "*weight", "0.*", "2.bias", "*"])
def test_kronecker_of_some_tensors_is_exact_for_one_row(random) -> None:
    case = truth(made(NETWORKS["mlp"]), inputs("mlp", 1), Categorical(), random=random)
    eye = 0.5 * torch.eye(len(case.matrix), dtype=FLOAT64)
    for structure in (Kronecker(), CorrectedKronecker()):
        close(as_matrix(kept(case, structure, batches=1)), blocks(case) + eye)


@pytest.mark.parametrize("structure", [Full(), Diagonal(), LowRank(12), Hutchinson(4)], ids=lambda s: type(s).__name__)
def test_structures_of_single_weights(structure) -> None:
    index = torch.tensor([0, 3, 4, 11, 19, 30, 41, 60])
    case, whole = images(index), images("*")
    close(case.matrix, whole.matrix[index[:, None], index])
    found = as_matrix(kept(case, structure)) - 0.5 * torch.eye(8, dtype=FLOAT64)
    if isinstance(structure, Hutchinson):
        assert (found.diagonal() >= 0).all()
        return
    close(found, torch.diag(case.matrix.diagonal()) if isinstance(structure, Diagonal) else case.matrix, 1e-8)


@pytest.mark.parametrize("random", PATTERNS, ids=str)
def test_the_hessian_of_some_tensors(random) -> None:
    case, whole = images(random), images("*")
    index = case.joint.random_indices
    dense = Hessian().matrix(whole.joint, whole.theta, whole.batch, None)[index[:, None], index]
    close(Hessian().matrix(case.joint, case.theta, case.batch, None), dense)
    prior = torch.full((len(dense),), 50.0, dtype=FLOAT64)
    found = as_matrix(kept(case, BlockDiagonal(), Hessian(), prior)) - torch.diag(prior)
    for place in survey(case.joint, case.batch.inputs).places:
        own = place.block.index
        close(found[own[:, None], own], dense[own[:, None], own])


CHUNKED = [
    "conv2d",
    "conv2d, groups",
    "conv1d, dilated",
    "linear at positions",
    "embedding",
    "tied embedding",
    "convolution used twice",
    "used twice",
    "lstm",
    "layer norm of axes",
]


@pytest.mark.parametrize("chunk", [1, 300, 5000])
@pytest.mark.parametrize("name", CHUNKED)
def test_derivatives_a_few_rows_at_a_time(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posterity.jacobians.jacobian.CHUNK", chunk)
    monkeypatch.setattr("posterity.jacobians.jacobian.DEVICE_SHARE", 1)
    build, x, _ = CASES[name]
    case = truth(made(build), x)
    close(GaussNewton().matrix(case.joint, case.theta, case.batch, None), case.matrix)
    close(GaussNewton().diagonal(case.joint, case.theta, case.batch, None), case.matrix.diagonal())


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("name", NETWORKS)
def test_structures_a_few_rows_at_a_time(name: str, structure, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.linspace(0.2, 2.0, 6, dtype=FLOAT64)
    whole = as_matrix(kept(problem(name, weights=weights), structure))
    monkeypatch.setattr("posterity.jacobians.jacobian.DEVICE_SHARE", 1)
    for chunk in (1, 300):
        monkeypatch.setattr("posterity.jacobians.jacobian.CHUNK", chunk)
        close(as_matrix(kept(problem(name, weights=weights), structure)), whole, 1e-8)


def test_layers_too_large_for_a_block_keep_their_diagonal_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """A layer tied to its transpose has no Kronecker factors; 576 of its weights are more than are kept whole."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(24, 24), nn.Linear(24, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.linear(self.layer(x).tanh(), self.layer.weight.T).tanh())

    say_diagonal.cache_clear()
    x = po.Key(1).normal((3, 24), FLOAT64)
    case = truth(made(Twice), x)
    for structure in (Kronecker(), CorrectedKronecker()):
        found = as_matrix(kept(case, structure))
        (weight,) = [p for p in survey(case.joint, x).places if p.block.names == ("layer.weight",)]
        (bias,) = [p for p in survey(case.joint, x).places if p.block.names == ("layer.bias",)]
        own, other = weight.block.index, bias.block.index
        close(found[own[:, None], own], torch.diag(case.matrix.diagonal()[own] + 0.5))
        close(found[other[:, None], other], case.matrix[other[:, None], other] + 0.5 * torch.eye(24, dtype=FLOAT64))
    (record,) = [r for r in caplog.records if "keep the diagonal" in r.getMessage()]
    assert record.getMessage().startswith("layer.weight: 576 weights without Kronecker factors")


@pytest.mark.parametrize("budget", [None, 3000])
@pytest.mark.parametrize("name", CASES)
def test_slopes_of_large_networks_come_with_the_jacobians(name: str, budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """They equal those of a pass of their own, and no such pass is taken where every weight has a rule."""
    build, x, _ = CASES[name]
    case = truth(made(build), x)
    weights = torch.linspace(0.5, 1.5, len(case.outputs), dtype=FLOAT64)
    given = GaussNewton(), case.joint, case.theta, case.batch._replace(weights=weights), None, Key(0), budget
    alone, together = Rows(*given), Rows(*given)
    wanted = alone.slope()
    known = survey(case.joint, case.batch.inputs)
    monkeypatch.setattr("posterity.curvature.curvature.WHOLE_SLOPE", 0)
    together.sloped = True
    for _ in together.jacobians():
        pass
    if not known.explicit and known.head is None and known.output is None:
        monkeypatch.setattr(together, "_negative", None)
    got = together.slope()
    if known.head is None:
        close(got, wanted)
    else:
        close(got, known.head.gather(wanted))
