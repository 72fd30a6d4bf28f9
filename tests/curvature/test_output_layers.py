"""Output layers with many classes or at positions, and drawn columns before them, against dense autodiff in float64."""

import logging

import pytest
import torch
from curvaturecases import FLOAT64, Truth, close, made, truth
from torch import Tensor, nn

import posterity as po
from posterity.curvature import BlockDiagonal, CorrectedKronecker, Diagonal, Full, GaussNewton, Kronecker
from posterity.curvature import curvature as engine
from posterity.curvature.curvature import Rows
from posterity.curvature.survey import survey
from posterity.jacobians.output_layer import OutputLayer
from posterity.likelihoods import Categorical
from posterity.methods import Laplace, LastLayer
from posterity.numerics import Key
from posterity.posteriors import linearized

ROWS, CLASSES = 4, 3


class Tokens(nn.Module):
    """Logits (N, C, T) of a linear layer whose own outputs are (N, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()).transpose(1, 2)


class Shuffled(Tokens):
    """The positions in another order than those of the layer: not taken for an output layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, CLASSES, 1))


def wide_pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, CLASSES, 3, padding=1, stride=2))


def many() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 7))


def normal(*shape: int) -> Tensor:
    return Key(1).normal((ROWS, *shape), FLOAT64)


CASES = {
    "pixels": (pixels, normal(1, 3, 2), Categorical(positions=2), "2.*"),
    "patches": (wide_pixels, normal(1, 4, 4), Categorical(positions=2), "2.*"),
    "tokens": (Tokens, normal(4, 2), Categorical(positions=1), "head.*"),
    "many classes": (many, normal(2), Categorical(), "2.*"),
}


@pytest.fixture(autouse=True)
def _seven_classes_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WIDE", 6)


def case(name: str, weighted: bool, last: bool) -> Truth:
    build, inputs, likelihood, head = CASES[name]
    weights = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=FLOAT64) if weighted else None
    return truth(made(build), inputs, likelihood, weights=weights, random=head if last else "*")


def rows(case: Truth, curvature: GaussNewton | None = None, seed: int = 0) -> Rows:
    return Rows(curvature or GaussNewton(), case.joint, case.theta, case.batch, None, Key(seed))


def sums(structure, rows: Rows) -> tuple[dict[str, Tensor], Tensor]:
    """The sums of all passes, and the dense matrix scale C + prior that they give."""
    prior = torch.full((rows.size,), 0.3, dtype=FLOAT64)
    held: dict[str, Tensor] = {}
    for number in range(structure.passes):
        held = structure.end(structure.add(held, rows, number), rows, number, prior)
    precision = structure.precision(held, rows.places, 1.0, prior)
    return held, precision.matvec(torch.eye(rows.size, dtype=FLOAT64)) - 0.3 * torch.eye(rows.size, dtype=FLOAT64)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_whole_matrix_diagonal_and_blocks_of_an_output_layer(name: str, weighted: bool) -> None:
    problem = case(name, weighted, last=True)
    assert any(isinstance(part, OutputLayer) for piece in rows(problem).jacobians() for part in piece.jacobian.parts)
    close(GaussNewton().matrix(problem.joint, problem.theta, problem.batch, None), problem.matrix)
    close(GaussNewton().diagonal(problem.joint, problem.theta, problem.batch, None), problem.matrix.diagonal())
    close(sums(Full(), rows(problem))[1], problem.matrix)
    close(sums(BlockDiagonal(), rows(problem))[1], problem.matrix)


@pytest.mark.parametrize("name", CASES)
def test_the_dual_form_of_few_rows(name: str) -> None:
    problem = case(name, False, last=True)
    factors = torch.cat([piece.jacobian.rows().flatten(0, 1) for piece in rows(problem).jacobians(between_layers=True)])
    close(factors.T @ factors, problem.matrix)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_layers_before_an_output_layer_keep_their_columns(name: str, weighted: bool) -> None:
    problem = case(name, weighted, last=False)
    close(GaussNewton().matrix(problem.joint, problem.theta, problem.batch, None), problem.matrix)
    close(GaussNewton().diagonal(problem.joint, problem.theta, problem.batch, None), problem.matrix.diagonal())
    blocks = sums(BlockDiagonal(), rows(problem))[1]
    for place in rows(problem).places:
        index = place.block.index
        close(blocks[index][:, index], problem.matrix[index][:, index])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_kronecker_factors_by_their_definition(name: str, weighted: bool) -> None:
    """Sum of F over labels, and the mean over rows and positions of a a^T."""
    problem = case(name, weighted, last=True)
    held, matrix = sums(Kronecker(), rows(problem))
    weights = torch.ones(ROWS, dtype=FLOAT64) if problem.batch.weights is None else problem.batch.weights
    outputs = problem.outputs.flatten(2) if problem.outputs.dim() > 2 else problem.outputs.unsqueeze(-1)
    p = outputs.softmax(1).transpose(1, 2)  # (N, T, C)
    fisher = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    outer = torch.einsum("n,ntab->ab", weights, fisher)
    (block,) = [place.block for place in rows(problem).places]
    # The derivative of the outputs of class 0 at a position in the first row of the weights are its features.
    features = problem.slopes.reshape(ROWS, p.shape[2], p.shape[1], -1)[:, 0][..., block.index[: block.width]]
    inner = torch.einsum("n,nti,ntj->ij", weights, features, features) / p.shape[1]
    close(held["0.outer"][0], outer)
    close(held["0.inner"][0], inner)
    whole = torch.kron(outer.contiguous(), inner.contiguous() / weights.sum())  # which wants rows side by side
    close(matrix, whole[_order(block)][:, _order(block)])


def _order(block) -> Tensor:
    """Positions among a block's entries of the weights in their own order."""
    return block.index.argsort()


@pytest.mark.parametrize("name", CASES)
def test_corrected_eigenvalues_are_the_curvature_along_the_eigenvectors(name: str) -> None:
    problem = case(name, False, last=True)
    held, _ = sums(CorrectedKronecker(), rows(problem))
    basis = torch.kron(held["0.outer_basis"][0], held["0.inner_basis"][0])
    (block,) = [place.block for place in rows(problem).places]
    exact = problem.matrix[block.index][:, block.index]
    close(held["0.values"].flatten(), (basis.T @ exact @ basis).diagonal())


def test_an_output_layer_with_positions_in_another_order_is_not_taken_for_one() -> None:
    problem = truth(made(Shuffled), normal(4, 2), Categorical(positions=1), random="head.*")
    assert survey(problem.joint, problem.batch.inputs).output is None
    close(GaussNewton().matrix(problem.joint, problem.theta, problem.batch, None), problem.matrix)


@pytest.mark.parametrize("name", CASES)
def test_predictions_of_a_last_layer_at_positions(name: str) -> None:
    problem = case(name, False, last=True)
    data = (problem.batch.inputs, problem.batch.targets)
    for structure in (Full(), Kronecker(), Diagonal()):
        q, _ = po.infer(Laplace(structure=structure, tuning=None), problem.joint, data, progress=False)
        slopes = problem.slopes.reshape(ROWS, -1, problem.slopes.shape[-1])
        wanted = slopes @ q.gaussian.precision.covariance() @ slopes.mT
        close(q.output_moments(problem.batch.inputs)[1], wanted)
        close(q.output_moments(problem.batch.inputs, marginal=True)[1], wanted.diagonal(dim1=-2, dim2=-1))
        drawn, deviations = q.outputs(problem.batch.inputs, 3, Key(2)), q.gaussian.deviations(3, Key(2), FLOAT64)
        close(drawn - problem.outputs, (slopes @ deviations.T).movedim(-1, 0).reshape(drawn.shape))


def test_variances_of_very_many_outputs_are_estimated_from_linear_functions(monkeypatch, caplog) -> None:
    problem = case("pixels", False, last=False)
    inputs = problem.batch.inputs
    vectors = Key(4).normal((3, problem.joint.num_weights), FLOAT64)
    pieces = list(engine.directional_derivatives(problem.joint, problem.theta, inputs, None, vectors))
    close(torch.cat([outputs for outputs, _ in pieces]), problem.outputs)
    close(torch.cat([shift for _, shift in pieces], 1), torch.einsum("...r,sr->s...", problem.slopes, vectors))
    data = (inputs, problem.batch.targets)
    q, _ = po.infer(Laplace(structure=Kronecker(), tuning=None), problem.joint, data, progress=False)
    exact, small = q.predict(inputs).probs, q.output_moments(inputs, marginal=True)[1]
    monkeypatch.setattr(linearized, "MOST_OUTPUTS", 5)
    estimates = torch.stack([q._moments_to_integrate(inputs, True, None, Key(s))[1] for s in range(20)])
    error = small * (2.0 / 2000.0) ** 0.5
    assert ((estimates.mean(0) - small).abs() <= 5.0 * error).all()
    with caplog.at_level(logging.WARNING, logger="posterity"):
        rough = q.predict(inputs).probs
    assert "100 draws of linear functions" in caplog.text
    assert 0.0 < (rough - exact).abs().max() < 0.1


@pytest.mark.parametrize("name", ["pixels", "tokens", "many classes"])
def test_drawn_columns_are_unbiased_and_the_output_layer_stays_exact(name: str, caplog, monkeypatch) -> None:
    monkeypatch.setattr(engine, "SURPLUS", 0)
    engine._say_drawn.cache_clear()
    problem = case(name, True, last=False)
    few = GaussNewton(column_limit=5)
    draws, total = 150, torch.zeros_like(problem.matrix)
    squares = torch.zeros_like(total)
    with caplog.at_level(logging.WARNING, logger="posterity"):
        for seed in range(draws):
            drawn = few.matrix(problem.joint, problem.theta, problem.batch, None, seed)
            total, squares = total + drawn / draws, squares + drawn.square() / draws
    error = ((squares - total.square()).clamp_min(0) / draws).sqrt()
    assert ((total - problem.matrix).abs() <= 5.0 * error + 1e-12).all()
    blocks = sums(BlockDiagonal(), rows(problem, few))[1]
    last = rows(problem).places[-1].block.index
    close(blocks[last][:, last], problem.matrix[last][:, last])
    said = [record.message for record in caplog.records if "column_limit=None" in record.message]
    assert said
    assert all("4 random columns" in message for message in said)
    vectors = Key(3).normal((2, problem.joint.num_weights), FLOAT64)
    close(rows(problem, few).products(vectors), vectors @ problem.matrix)


def test_drawn_columns_of_many_real_outputs(monkeypatch) -> None:
    monkeypatch.setattr(engine, "SURPLUS", 0)
    problem = truth(made(many), normal(2))
    few = GaussNewton(column_limit=5)
    draws = [few.matrix(problem.joint, problem.theta, problem.batch, None, seed) for seed in range(225)]
    error = torch.stack(draws).std(0) / 15.0
    assert ((torch.stack(draws).mean(0) - problem.matrix).abs() <= 5.0 * error + 1e-12).all()
    vectors = Key(3).normal((2, problem.joint.num_weights), FLOAT64)
    close(rows(problem, few).products(vectors), vectors @ problem.matrix)


def test_a_matrix_that_is_kept_whole_takes_columns_enough_for_its_inverse() -> None:
    """27 weights and 40 rows: ten columns for each weight are 7 a row; 4 rows would need more than all columns."""
    few = GaussNewton(column_limit=5)
    x = Key(1).normal((40, 1, 3, 2), FLOAT64)
    problem = truth(made(pixels), x, Categorical(positions=2))
    assert problem.joint.num_weights == 29
    assert rows(problem, few).num_columns(18, 29) == 8
    assert rows(problem, few).num_columns(18, 0) == 4
    draws = [few.matrix(problem.joint, problem.theta, problem.batch, None, seed) for seed in range(100)]
    error = torch.stack(draws).std(0) / 10.0
    assert ((torch.stack(draws).mean(0) - problem.matrix).abs() <= 5.0 * error + 1e-12).all()
    problem = case("pixels", False, last=False)
    close(few.matrix(problem.joint, problem.theta, problem.batch, None), problem.matrix)


@pytest.mark.parametrize("name", ["pixels", "tokens", "many classes"])
def test_weights_of_single_positions_multiply_their_blocks(name: str) -> None:
    """A weight of 0 leaves a label out, in closed form and in columns."""
    problem = case(name, False, last=False)
    positions = problem.outputs.shape[2:]
    weights = (Key(5).uniform((ROWS, *positions), FLOAT64) * 2.0).round()
    fisher = problem.joint.likelihood.output_fisher(problem.outputs)
    each = weights.reshape(ROWS, 1, -1).expand(-1, problem.outputs.shape[1], -1).flatten(1)
    slopes = problem.slopes.reshape(ROWS, each.shape[1], -1)
    wanted = torch.einsum("nda,nd,nde,neb->ab", slopes, each, fisher, slopes)
    sample = rows(problem._replace(batch=problem.batch._replace(weights=weights)))
    close(sample.matrix(), wanted)
    close(sample.diagonal(), wanted.diagonal())


def test_float32_probabilities_of_many_classes_leave_no_negative_eigenvalue() -> None:
    """The sum of p is 1 up to rounding of float32 only, which made -3.95e-08 of an eigenvalue that is 0."""
    logits = 4.0 * Key(0).normal((50, 300), torch.float32)
    outer = OutputLayer(torch.ones(50, 1), logits.softmax(1), bias=False).outer_gram()[0]
    assert outer.dtype == FLOAT64
    values = torch.linalg.eigvalsh(outer)
    assert values.min() > -1e-14 * values.max()
    joint = po.Joint(nn.Linear(4, 300), Categorical(), po.priors.Normal(100.0), 50)
    data = (Key(1).normal((50, 4)), torch.arange(50))
    for structure in (Kronecker(), CorrectedKronecker(), Diagonal()):
        q, _ = po.infer(Laplace(structure=structure, tuning=None), joint, data, progress=False)
        assert torch.isfinite(q.predict(data[0]).probs).all()


def test_scales_left_out_come_by_the_evidence_where_a_row_has_many_outputs(caplog) -> None:
    net = made(lambda: nn.Conv2d(1, 3, 1)).float()
    x = Key(1).normal((6, 1, 12, 12))
    y = (x[:, 0] > 0).long()
    joint = po.Joint(net, Categorical(positions=2), po.priors.Normal(), 6)
    with caplog.at_level(logging.WARNING, logger="posterity"):
        q, _ = po.infer(Laplace(subset=LastLayer()), joint, (x, y), progress=False)
    assert "432 outputs a row" in caplog.text
    assert "by the evidence" in caplog.text
    assert q.joint.bound_prior.chosen == "evidence"
    given = po.Joint(net, Categorical(positions=2), po.priors.Normal(2.0), 6)
    q, _ = po.infer(Laplace(subset=LastLayer()), given, (x, y), progress=False)
    assert float(q.joint.bound_prior.scale) == 2.0
