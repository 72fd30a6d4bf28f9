"""Missing targets are left out of sums and counts of every metric."""

import math

import pytest
import torch
from torch import Tensor

from posterity import metrics
from posterity.errors import BadData
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from posterity.predictive import (
    ClassPredictive,
    ConformalSets,
    GaussianPredictive,
    Predictive,
    TemperatureScaling,
    from_outputs,
)
from posterity.predictive.affine import AffinePredictive
from posterity.predictive.exponential import ExponentialPredictive
from posterity.predictive.mixture import MixturePredictive
from posterity.predictive.normals import NormalsPredictive

N, SIZE = 7, 3
MISSING = -100


def normal(*shape: int, seed: int = 0) -> Tensor:
    own = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=own, device="cpu").to(torch.get_default_device())


GAPS = normal(N, SIZE, seed=5) > 0.3
GAPS[4] = True
Y = normal(N, SIZE, seed=1).masked_fill(GAPS, math.nan)
SEEN = ~GAPS
MEAN, SPREAD = normal(N, SIZE, seed=2), normal(N, SIZE, seed=3).square() + 0.1
ROOT = normal(N, SIZE, SIZE, seed=4)
COVARIANCE = ROOT @ ROOT.mT
DIAGONAL = COVARIANCE.diagonal(dim1=1, dim2=2)
TOKENS = ClassPredictive.of_log_probs(normal(5, N, 4, SIZE).log_softmax(2), torch.float64)
LABELS = (torch.arange(N * SIZE).view(N, SIZE) % 4).masked_fill(GAPS, MISSING)

independent = GaussianPredictive(MEAN, SPREAD, torch.tensor(0.3))
REGRESSION = {
    "gaussian": independent,
    "draws": from_outputs(Gaussian(0.5), normal(6, N, SIZE)),
    "affine": AffinePredictive(independent, 2.0, torch.tensor([1.0, 2.0, 3.0])),
    "mixture": MixturePredictive([independent, GaussianPredictive(-MEAN, SPREAD, torch.tensor(0.2))]),
    "normals": NormalsPredictive(normal(2, N, SIZE), SPREAD.expand(2, -1, -1), torch.tensor([0.4, 0.6]), 0.01 * SPREAD),
}


def alone(pred: Predictive, row: int, entry: int) -> Predictive:
    """The predictive of one entry."""
    if isinstance(pred, ClassPredictive):
        return ClassPredictive.of_log_probs(pred.draws[:, row : row + 1, :, entry].log(), torch.float64)
    if isinstance(pred, GaussianPredictive):
        cut = (t[row : row + 1, entry : entry + 1] for t in (pred.mean, pred.epistemic, pred.aleatoric))
        return GaussianPredictive(*cut)
    if isinstance(pred, AffinePredictive):
        return AffinePredictive(alone(pred.base, row, entry), float(pred.shift), float(pred.scale[entry]))
    if isinstance(pred, MixturePredictive):
        return MixturePredictive([alone(part, row, entry) for part in pred.parts], pred.weights)
    if isinstance(pred, NormalsPredictive):
        means, scales = (t[:, row : row + 1, entry : entry + 1] for t in (pred._means, pred._scales))
        return NormalsPredictive(means, scales, pred._weights, pred.epistemic[row : row + 1, entry : entry + 1])
    return from_outputs(pred.likelihood, pred.outputs[:, row : row + 1, entry : entry + 1])


def observed() -> list[tuple[int, int]]:
    return [(row, entry) for row in range(N) for entry in range(SIZE) if SEEN[row, entry]]


@pytest.mark.parametrize(
    "metric", [metrics.mean_absolute_error, metrics.crps, metrics.coverage, metrics.interval_width]
)
@pytest.mark.parametrize("name", list(REGRESSION))
def test_means_over_observed_numbers(name: str, metric) -> None:
    pred = REGRESSION[name]
    if metric is metrics.crps and pred.normals is None:
        pytest.skip("by samples")
    each = [metric(alone(pred, row, entry), Y[row, entry].view(1, 1)) for row, entry in observed()]
    assert metric(pred, Y) == pytest.approx(sum(each) / len(each), abs=1e-9)
    assert len(metric.rows(pred, Y)) == N - 1  # without the row that has no target


def test_root_mean_squared_error_and_r_squared() -> None:
    squares = (Y - MEAN)[SEEN].square()
    assert metrics.root_mean_squared_error(independent, Y) == pytest.approx(float(squares.mean().sqrt()))
    each = []
    for output in range(SIZE):
        seen = SEEN[:, output]
        y, m = Y[seen, output], MEAN[seen, output]
        each.append(1 - float((y - m).square().sum() / (y - y.mean()).square().sum()))
    assert metrics.r_squared(independent, Y) == pytest.approx(sum(each) / SIZE)


@pytest.mark.parametrize("name", ["gaussian", "affine", "normals"])
def test_log_densities_of_numbers(name: str) -> None:
    pred = REGRESSION[name]
    for function in ("log_prob", "expected_log_prob"):
        wanted = torch.zeros(N, dtype=torch.float64)
        for row, entry in observed():
            wanted[row] += getattr(alone(pred, row, entry), function)(Y[row, entry].view(1, 1))[0]
        torch.testing.assert_close(getattr(pred, function)(Y), wanted, rtol=0, atol=1e-12)
    assert metrics.negative_log_likelihood(pred, Y) == pytest.approx(-float(pred.log_prob(Y).sum()) / (N - 1))


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Poisson()])
def test_mixtures_of_draws_are_joint_over_what_is_observed(likelihood) -> None:
    outputs, y = normal(6, N, SIZE), Y if isinstance(likelihood, Gaussian) else Y.abs().floor()
    pred = from_outputs(likelihood, outputs)
    for row in range(N):
        seen = SEEN[row]
        wanted = 0.0
        if bool(seen.any()):
            cut = from_outputs(likelihood, outputs[:, row : row + 1, seen])
            wanted = float(cut.log_prob(y[row : row + 1, seen]))
        assert float(pred.log_prob(y)[row]) == pytest.approx(wanted, abs=1e-12)


def test_correlated_outputs_are_integrated_out() -> None:
    noise = torch.tensor(0.3, dtype=torch.float64)
    pred = GaussianPredictive(MEAN, DIAGONAL, noise, COVARIANCE)
    values = pred.log_prob(Y)
    for row in range(N):
        seen = SEEN[row]
        if not bool(seen.any()):
            assert float(values[row]) == 0.0
            continue
        cover = COVARIANCE[row][seen][:, seen] + 0.3 * torch.eye(int(seen.sum()), dtype=torch.float64)
        wanted = torch.distributions.MultivariateNormal(MEAN[row, seen], cover).log_prob(Y[row, seen])
        assert float(values[row]) == pytest.approx(float(wanted), abs=1e-12)
    joint = GaussianPredictive(MEAN, DIAGONAL, noise, COVARIANCE, torch.block_diag(*COVARIANCE))
    assert float(joint.joint_log_prob(Y)) == pytest.approx(float(values.sum()), abs=1e-10)


def test_a_broken_prediction_is_not_a_missing_target() -> None:
    pred = GaussianPredictive(MEAN.clone().fill_(math.nan), SPREAD, torch.tensor(0.3))
    assert bool(pred.log_prob(Y)[SEEN.any(1)].isnan().all())
    assert math.isnan(metrics.root_mean_squared_error(pred, Y))


def test_logarithms_are_left_out_with_their_slope() -> None:
    pred = ExponentialPredictive(independent, 0.5, 2.0)
    y = Y.exp()
    wanted = torch.zeros(N, dtype=torch.float64)
    for row, entry in observed():
        cut = ExponentialPredictive(alone(independent, row, entry), 0.5, 2.0)
        wanted[row] += cut.log_prob(y[row, entry].view(1, 1))[0]
    torch.testing.assert_close(pred.log_prob(y), wanted, rtol=0, atol=1e-12)


CLASS_METRICS = [
    metrics.accuracy,
    metrics.brier_score,
    metrics.confidence,
    metrics.gibbs_confidence,
    metrics.mean_cost,
    metrics.expected_calibration_error,
    metrics.maximum_calibration_error,
    metrics.adaptive_calibration_error,
    metrics.classwise_calibration_error,
    metrics.auroc,
    metrics.average_precision,
    metrics.balanced_accuracy,
]


def flat(pred: ClassPredictive, y: Tensor) -> tuple[ClassPredictive, Tensor]:
    """Each observed label as a row of its own."""
    draws = pred.draws.movedim(2, -1)[:, SEEN]  # (S, R, C)
    return ClassPredictive.of_log_probs(draws.log(), torch.float64), y[SEEN]


@pytest.mark.parametrize("metric", CLASS_METRICS)
def test_classes_at_positions(metric) -> None:
    pred, labels = flat(TOKENS, LABELS)
    assert metric(TOKENS, LABELS) == pytest.approx(metric(pred, labels), abs=1e-12)


def test_confusion_counts_observed_labels() -> None:
    table = metrics.confusion_matrix(TOKENS, LABELS)
    assert int(table.sum()) == int(SEEN.sum())
    assert torch.equal(table, metrics.confusion_matrix(*flat(TOKENS, LABELS)))


def test_log_densities_of_labels() -> None:
    for function in ("log_prob", "expected_log_prob"):
        wanted = torch.zeros(N, dtype=torch.float64)
        for row, entry in observed():
            wanted[row] += getattr(alone(TOKENS, row, entry), function)(LABELS[row, entry].view(1))[0]
        torch.testing.assert_close(getattr(TOKENS, function)(LABELS), wanted, rtol=0, atol=1e-12)
    together = (
        TOKENS.draws.log().movedim(2, -1)[:, SEEN].gather(2, LABELS[SEEN].expand(5, -1).unsqueeze(-1)).sum((1, 2))
    )
    wanted = together.logsumexp(0) - math.log(5)
    torch.testing.assert_close(TOKENS.joint_log_prob(LABELS), wanted, rtol=0, atol=1e-12)


def test_binary_labels_miss_as_nan_or_number() -> None:
    pred = from_outputs(Bernoulli(), normal(4, N, 1))
    y = (normal(N, seed=9) > 0).double()
    some = torch.arange(N) != 3
    gaps, numbers = y.masked_fill(~some, math.nan), y.long().masked_fill(~some, MISSING)
    wanted = metrics.negative_log_likelihood(pred.rows(some), y[some])
    for labels in (gaps, numbers, gaps.unsqueeze(1)):
        assert metrics.negative_log_likelihood(pred, labels) == pytest.approx(wanted, rel=1e-12)
    curve = metrics.risk_coverage(pred, gaps)
    assert torch.equal(curve.risk, metrics.risk_coverage(pred.rows(some), y[some]).risk)
    logits = normal(N, 3)
    labels = (torch.arange(N) % 3).masked_fill(~some, MISSING)
    fits = [TemperatureScaling.fit(logits[i], labels[i]).temperature for i in (slice(None), some)]
    assert fits[0] == fits[1]
    classes = from_outputs(Categorical(), normal(4, N, 3))
    sets = [ConformalSets.fit(own, given) for own, given in ((classes, labels), (classes.rows(some), labels[some]))]
    assert torch.equal(sets[0].scores, sets[1].scores)


def test_risk_of_numbers_is_of_observed_ones() -> None:
    curve = metrics.risk_coverage(independent, Y)
    losses = torch.stack([(Y - MEAN)[row, SEEN[row]].square().mean() for row in range(N) if bool(SEEN[row].any())])
    assert curve.at(1.0) == pytest.approx(float(losses.mean().sqrt()))


def test_bootstrap_counts_rows_with_targets() -> None:
    whole = metrics.bootstrap(metrics.negative_log_likelihood, independent, Y)
    rows = SEEN.any(1)
    assert whole == metrics.bootstrap(metrics.negative_log_likelihood, independent.rows(rows), Y[rows])


def test_nothing_to_score() -> None:
    with pytest.raises(BadData, match="21 that are all missing"):
        metrics.accuracy(TOKENS, torch.full_like(LABELS, MISSING))
    with pytest.raises(BadData, match="all missing"):
        metrics.root_mean_squared_error(independent, torch.full_like(Y, math.nan))
