"""Output layers of many classes: factors, predictions and plans without a matrix over classes."""

import logging
from types import SimpleNamespace

import pytest
import torch
from matrixcases import as_matrix
from torch import nn

import posterity as po
from posterity.curvature import CorrectedKronecker, Diagonal, Full, GaussNewton, Kronecker, MonteCarloFisher
from posterity.curvature import kronecker as structures
from posterity.curvature.derivatives import DEVICE, derivative_bytes, derivatives
from posterity.curvature.survey import survey
from posterity.methods import Laplace, LastLayer
from posterity.model import Batch
from posterity.numerics import Key
from posterity.posteriors import posterior as posteriors
from posterity.predictive import MonteCarlo, information

FLOAT64 = torch.float64
CLASSES, ROWS, WIDTH = 70, 9, 3


class Sequences(nn.Module):
    """Logits at each position, with classes in the second axis."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).movedim(-1, 1)


def problem(positions=0, rows=ROWS):
    layer = nn.Linear(WIDTH, CLASSES).double()
    x = Key(1).normal((rows, *[4] * positions, WIDTH), FLOAT64)
    y = Key(2).normal((rows, *[4] * positions, CLASSES), FLOAT64).argmax(-1)
    prior = po.priors.Layerwise({"*weight": po.priors.Normal(0.5), "*": po.priors.Normal(2.0)})
    likelihood = po.likelihoods.Categorical(positions=positions)
    joint = po.Joint(Sequences(layer) if positions else layer, likelihood, prior, num_data=rows)
    return joint, joint.initial() + 0.4 * Key(3).normal((joint.size,), FLOAT64), (x, y)


@pytest.fixture
def few(monkeypatch):
    """Take 70 classes for many."""
    monkeypatch.setattr(structures, "WIDEST", 20)
    monkeypatch.setattr(posteriors, "MOST_CORRELATED", 20)


def factors(joint, theta, x):
    """(Probabilities (M, C), features with a 1 for the bias (M, I), number of positions)."""
    outputs = joint.outputs(theta, x)
    probs = outputs.softmax(1).movedim(1, -1).reshape(-1, CLASSES)
    features = x.reshape(-1, WIDTH)
    return probs, torch.cat([features, torch.ones(len(features), 1).double()], -1), len(probs) // len(x)


def blocks_of(matrix):
    """A matrix over (W, b) as (C, I, C, I), with the bias as last column."""
    order = torch.cat(
        [torch.arange(CLASSES * WIDTH).view(CLASSES, WIDTH), CLASSES * WIDTH + torch.arange(CLASSES)[:, None]], 1
    )
    return matrix[order.flatten()][:, order.flatten()].view(CLASSES, WIDTH + 1, CLASSES, WIDTH + 1)


@pytest.mark.parametrize("positions", [0, 1])
@pytest.mark.parametrize("curvature", [GaussNewton(), MonteCarloFisher(500)], ids=["exact", "drawn"])
def test_the_outer_factor_is_its_diagonal(few, positions, curvature, caplog):
    joint, theta, (x, y) = problem(positions)
    structures._say_wide.cache_clear()
    method = Laplace(curvature, Kronecker(), tuning=None)
    q, _ = po.infer(method, joint, (x, y), start=theta)
    assert "the Kronecker factor of 70 classes is kept as its diagonal" in caplog.text
    probs, features, count = factors(joint, theta, x)
    outer, inner = (probs * (1 - probs)).sum(0), features.T @ features / (count * ROWS)
    prior = torch.diag(torch.tensor([4.0] * WIDTH + [0.25], dtype=FLOAT64))
    blocks, eye = blocks_of(as_matrix(q.gaussian.precision)), torch.eye(CLASSES, dtype=FLOAT64)
    expected = torch.einsum("c,ij->cij", outer, inner) + prior
    tight = isinstance(curvature, GaussNewton)
    rtol, atol = (1e-10, 1e-10) if tight else (0.3, 0.05)
    own = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    torch.testing.assert_close(own, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(blocks, torch.einsum("cij,cd->cidj", own, eye), rtol=0.0, atol=1e-10)


def test_corrected_values_are_exact_along_the_basis(few):
    joint, theta, (x, y) = problem()
    q, _ = po.infer(Laplace(structure=CorrectedKronecker(), tuning=None), joint, (x, y), start=theta)
    probs, features, _ = factors(joint, theta, x)
    prior = torch.tensor([4.0] * WIDTH + [0.25], dtype=FLOAT64)
    whiten = prior.rsqrt().diag()
    basis = whiten @ torch.linalg.eigh(whiten @ (features.T @ features) @ whiten)[1]  # B^T P B = 1
    values = torch.einsum("nc,ni->ci", probs * (1 - probs), (features @ basis).square())  # along e_c (x) b_i
    lift = torch.linalg.inv(basis)
    expected = torch.einsum("ci,ij,ik->cjk", values + 1.0, lift, lift)
    own = blocks_of(as_matrix(q.gaussian.precision)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", [Kronecker(), CorrectedKronecker(), Diagonal(), Full()], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_moments_and_draws_are_those_of_the_dense_matrix(monkeypatch, structure, wide):
    monkeypatch.setattr(structures, "WIDEST", 20 if wide else 4096)
    joint, theta, (x, y) = problem()
    q, _ = po.infer(Laplace(structure=structure, tuning=None), joint, (x, y), start=theta)
    covariance = torch.linalg.inv(as_matrix(q.gaussian.precision))
    jacobian = torch.func.jacrev(lambda t: joint.outputs(t, x))(theta)
    expected = jacobian @ covariance @ jacobian.mT  # (N, C, C)
    torch.testing.assert_close(q.output_moments(x)[1], expected, rtol=1e-8, atol=1e-8)
    variance = q.output_moments(x, marginal=True)[1]
    torch.testing.assert_close(variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-8, atol=1e-8)
    (piece,) = derivatives(joint, theta, x, whole=True)
    noise = torch.eye(CLASSES, dtype=FLOAT64).unsqueeze(1).expand(-1, ROWS, -1)  # draws are linear in it
    roots = q.gaussian.precision.row_draws(piece.jacobian, noise)
    if isinstance(structure, Full):
        assert roots is None
    else:
        torch.testing.assert_close(torch.einsum("snc,snd->ncd", roots, roots), expected, rtol=1e-8, atol=1e-8)


def test_full_matrices_of_many_classes_are_exact():
    joint, theta, (x, y) = problem(rows=2)  # fewer rows times classes than weights
    q, _ = po.infer(Laplace(structure=Full(), tuning=None), joint, (x, y), start=theta)
    dense = GaussNewton().matrix(joint, theta, Batch(x, y), None) + joint.bound_prior.precision(theta).diag()
    torch.testing.assert_close(as_matrix(q.gaussian.precision), dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", [Kronecker(), Diagonal()], ids=str)
def test_monte_carlo_integrates_without_covariances(few, monkeypatch, structure):
    joint, theta, (x, y) = problem()
    q, _ = po.infer(Laplace(structure=structure, tuning=None), joint, (x, y), start=theta)
    mean, covariance = q.output_moments(x)
    exact = MonteCarlo(4_000)(joint.likelihood, mean, covariance, Key(9)).probs
    monkeypatch.setattr(type(q), "output_moments", None)  # which are not to be used
    pred = q.predict(x, integrator=MonteCarlo(4_000), memory_budget=8 * ROWS * CLASSES * 10)
    torch.testing.assert_close(pred.probs, exact, rtol=0.0, atol=0.015)  # five standard errors
    assert bool((pred.epistemic > 0.0).all())
    again = q.predict(x, integrator=MonteCarlo(4_000), memory_budget=8 * ROWS * CLASSES * 10)
    assert torch.equal(pred.probs, again.probs)


def test_functions_are_drawn_in_blocks(monkeypatch):
    joint, theta, (x, y) = problem()
    q, _ = po.infer(Laplace(structure=Kronecker(), tuning=None), joint, (x, y), start=theta)
    monkeypatch.setattr("posterity.posteriors.gaussian.LARGE", {"cpu": 3 * joint.size})
    deviations = q.gaussian.deviations(7, Key(4))
    expected = torch.stack([joint.outputs(theta + away, x) for away in deviations])  # linear in the weights
    torch.testing.assert_close(q.outputs(x, 7, Key(4)), expected, rtol=1e-9, atol=1e-9)


def test_information_of_independent_logits_needs_no_matrix(monkeypatch):
    mean, variance = Key(0).normal((5, 40), FLOAT64), Key(1).normal((5, 40), FLOAT64).square()
    likelihood = po.likelihoods.Categorical()
    dense = information.label_information(likelihood, mean, torch.diag_embed(variance))
    assert torch.equal(information.label_information(likelihood, mean, variance), dense)
    monkeypatch.setattr(information, "_MOST_SOBOL", 8)
    torch.testing.assert_close(information.label_information(likelihood, mean, variance), dense, rtol=0.2, atol=0.0)


def test_the_plan_of_a_vocabulary_is_bounded_on_every_device():
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 50_000))
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=200)
    x, y = torch.zeros(200, 4), torch.zeros(200, dtype=torch.int64)
    most = 4e9 if x.device.type == "cpu" else 2 * DEVICE  # what a GPU may take at a time, twice
    for structure in (Kronecker(), CorrectedKronecker(), Diagonal()):
        found = po.plan(Laplace(structure=structure, subset=LastLayer()), joint, (x, y))
        assert found.total < 1.2e9
        assert found.predictions < most
    known = survey(LastLayer().of(joint, x), x)
    device = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    for rows in (200, 1024):  # all at once on a GPU, with probabilities and products of them in float64
        assert rows * 4 * 8 * 50_000 < derivative_bytes(device, known, rows, 0) < rows * 6 * 8 * 50_000
    assert derivative_bytes(device, known, 10**6, 0) < 6 * DEVICE


def test_the_word_is_said_once(few, caplog):
    joint, theta, data = problem()
    structures._say_wide.cache_clear()
    with caplog.at_level(logging.WARNING, "posterity"):
        for _ in range(2):
            po.infer(Laplace(structure=Kronecker(), tuning=None, batch_size=4), joint, data, start=theta)
    assert sum("kept as its diagonal" in record.message for record in caplog.records) == 1
