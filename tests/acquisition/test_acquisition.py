"""Acquisition by posteriors: Gaussian forms against dense matrices, labels against the draws of the function."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import drawn
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.acquisition import (
    acquisition,
    bald,
    batch_bald,
    batch_bald_of_probs,
    epig,
    epig_of_probs,
    numbers,
    variance_reduction,
)
from posterity.numerics.random import Key
from posterity.posteriors import Dropout, Linearized, Mixture, Point, Posterior, Samples
from posterity.precisions import Dense


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def linearized(outputs: int, scale: float | tuple[float, ...] = 0.5) -> Linearized:
    noise = po.likelihoods.Gaussian(scale=scale)
    joint = po.Joint(network(2, 3, outputs), noise, po.priors.Normal(), num_data=10)
    theta = drawn.normal(Key(3), joint.num_weights)
    half = drawn.normal(Key(4), joint.num_weights, joint.num_weights)
    precision = Dense(half @ half.T + torch.eye(joint.num_weights, dtype=torch.float64))
    return Linearized(joint, po.posteriors.Gaussian(joint, theta, precision))


def classifier(likelihood: object = None, classes: int = 3) -> Samples:
    joint = po.Joint(network(2, classes), likelihood or po.likelihoods.Categorical(), po.priors.Normal(), num_data=10)
    return Samples(joint, 2.0 * drawn.normal(Key(5), 2, 4, joint.num_weights))


POOL, AIMS = drawn.normal(Key(6), 9, 2), drawn.normal(Key(7), 5, 2)


def half_logdet(covariance: Tensor, noise: Tensor) -> float:
    whole = covariance + torch.diag(noise)
    return 0.5 * float(torch.logdet(whole) - noise.log().sum())


def block(outputs: int, *rows: int) -> Tensor:
    return torch.cat([torch.arange(outputs) + outputs * row for row in rows])


@pytest.mark.parametrize(("outputs", "scale"), [(1, 0.5), (2, (0.5, 0.1))])
def test_numbers_in_closed_form_against_dense_matrices(outputs: int, scale: float | tuple[float, ...]) -> None:
    q = linearized(outputs, scale)
    covariance = q.joint_output_moments(torch.cat([POOL, AIMS]))[1]
    noise = torch.as_tensor(scale, dtype=torch.float64).expand(outputs).square()

    def of(*rows: int) -> tuple[Tensor, Tensor]:
        index = block(outputs, *rows)
        return covariance[index][:, index], noise.repeat(len(rows))

    single = [half_logdet(*of(row)) for row in range(9)]
    assert bald(q, POOL).tolist() == pytest.approx(single, abs=1e-10)
    chosen, rows = batch_bald(q, POOL, 9), list[int]()
    for step in range(9):
        values = [-1.0 if row in rows else half_logdet(*of(*rows, row)) for row in range(9)]
        rows.append(max(range(9), key=lambda row, values=values: values[row]))
        assert float(chosen.information[step]) == pytest.approx(max(values), abs=1e-9)
    assert chosen.rows.tolist() == rows
    gains, reductions = [], []
    for row in range(9):
        pairs = [half_logdet(*of(row)) + half_logdet(*of(aim)) - half_logdet(*of(row, aim)) for aim in range(9, 14)]
        gains.append(sum(pairs) / 5)
        lost = []
        for aim in range(9, 14):
            across = covariance[block(outputs, aim)][:, block(outputs, row)]
            own, spread = of(row)
            lost.append(float((across @ torch.linalg.inv(own + torch.diag(spread)) @ across.T).trace()))
        reductions.append(sum(lost) / 5)
    assert epig(q, POOL, AIMS).tolist() == pytest.approx(gains, abs=1e-10)
    assert variance_reduction(q, POOL, AIMS).tolist() == pytest.approx(reductions, abs=1e-10)


def test_pieces_of_the_pool_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, samples = linearized(2), linearized(2).gaussian
    calls: list[Callable[[], Tensor]] = [
        lambda: epig(q, POOL, AIMS),
        lambda: variance_reduction(q, POOL, AIMS),
        lambda: epig(samples, POOL, AIMS, draws=20),
        lambda: epig(classifier(), POOL, AIMS, batch_size=4),
    ]
    whole = [call() for call in calls]
    monkeypatch.setattr(acquisition, "TOGETHER", 4)
    monkeypatch.setattr(numbers, "ENTRIES", 3)
    for call, expected in zip(calls, whole, strict=True):
        assert torch.allclose(call(), expected, rtol=0, atol=1e-10)


def test_draws_of_functions_come_near_to_the_closed_form() -> None:
    q, draws = linearized(2), 20_000
    near = {"rtol": 0.1, "atol": 0.02}
    assert torch.allclose(epig(q, POOL, AIMS, draws=draws), epig(q, POOL, AIMS), **near)
    assert torch.allclose(variance_reduction(q, POOL, AIMS, draws=draws), variance_reduction(q, POOL, AIMS), **near)
    by_draws, exact = batch_bald(q, POOL, 3, draws=draws), batch_bald(q, POOL, 3)
    assert by_draws.rows.tolist() == exact.rows.tolist()
    assert torch.allclose(by_draws.information, exact.information, **near)


def test_labels_are_those_of_the_draws() -> None:
    q = classifier()
    probs, aims = (q.outputs(x, 8, Key(0)).softmax(2) for x in (POOL, AIMS))
    assert torch.allclose(epig(q, POOL, AIMS), epig_of_probs(probs, aims), rtol=0, atol=1e-12)
    chosen, expected = batch_bald(q, POOL, 4), batch_bald_of_probs(probs, 4)
    assert chosen.rows.tolist() == expected.rows.tolist()
    assert torch.allclose(chosen.information, expected.information, rtol=0, atol=1e-12)
    assert torch.allclose(bald(q, POOL), q.predict(POOL).epistemic, rtol=0, atol=1e-12)
    assert float(bald(q, POOL).max()) == pytest.approx(float(chosen.information[0]), abs=1e-10)


def test_one_logit_is_a_label_of_two_classes() -> None:
    q = classifier(po.likelihoods.Bernoulli(), 1)
    positive = q.outputs(POOL, 8, Key(0)).sigmoid()
    probs = torch.cat([1 - positive, positive], 2)
    assert torch.allclose(batch_bald(q, POOL, 2).information, batch_bald_of_probs(probs, 2).information)


def test_an_ensemble_counts_each_member_once() -> None:
    joint = po.Joint(network(2, 3), po.likelihoods.Categorical(), po.priors.Normal(), num_data=10)
    thetas = drawn.normal(Key(8), 5, joint.num_weights)
    q = Mixture([Point(joint, theta) for theta in thetas])
    probs = torch.stack([joint.outputs(theta, POOL).softmax(1) for theta in thetas])
    assert torch.allclose(batch_bald(q, POOL, 3).information, batch_bald_of_probs(probs, 3).information)
    numbers = po.Joint(network(2, 1), po.likelihoods.Gaussian(scale=0.3), po.priors.Normal(), num_data=10)
    other = replace(numbers, likelihood=po.likelihoods.Gaussian(scale=0.1))
    weights = drawn.normal(Key(9), 2, numbers.num_weights)
    mixed = Mixture([Point(numbers, weights[0]), Point(other, weights[1])])  # of different noise
    outputs = torch.stack([numbers.outputs(theta, POOL).squeeze(1) for theta in weights])
    noise = torch.full((9,), (0.3**2 + 0.1**2) / 2, dtype=torch.float64)
    expected = half_logdet(outputs.var(0).max().reshape(1, 1), noise[:1])
    assert float(batch_bald(mixed, POOL, 1).information) == pytest.approx(expected, abs=1e-10)


def test_loaders_and_named_inputs_are_pools() -> None:
    q = linearized(1)
    loader = DataLoader(TensorDataset(POOL), batch_size=4)
    assert torch.allclose(epig(q, loader, AIMS), epig(q, POOL, AIMS))
    assert batch_bald(q, loader, 2).rows.tolist() == batch_bald(q, POOL, 2).rows.tolist()
    assert torch.allclose(bald(q, loader), bald(q, POOL))
    assert batch_bald(classifier(), loader, 3).rows.tolist() == batch_bald(classifier(), POOL, 3).rows.tolist()


def test_labels_at_positions_are_summed_by_bald_and_refused_by_the_others() -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 3 * 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).reshape(-1, 3, 4)

    joint = po.Joint(Pixels(), po.likelihoods.Categorical(positions=1), po.priors.Normal(), num_data=10)
    q = Samples(joint, drawn.normal(Key(1), 1, 5, joint.num_weights))
    assert torch.allclose(bald(q, POOL), q.predict(POOL).epistemic.sum(1))
    with pytest.raises(po.errors.BadData, match="one label a row"):
        batch_bald(q, POOL, 2)


def test_heteroscedastic_noise_by_draws() -> None:
    joint = po.Joint(network(2, 2), po.likelihoods.Heteroscedastic(), po.priors.Normal(), num_data=10)
    q = Samples(joint, drawn.normal(Key(1), 1, 30, joint.num_weights))
    outputs = q.outputs(POOL, 30, Key(0))
    noise = (2 * outputs[..., 1]).exp().mean(0)
    expected = 0.5 * (1 + outputs[..., 0].var(0) / noise).log()
    assert torch.allclose(bald(q, POOL), expected)
    assert float(batch_bald(q, POOL, 1).information) == pytest.approx(float(expected.max()))


def _dropout(one_mask_a_draw: bool) -> Dropout:
    net = nn.Sequential(nn.Linear(2, 8, dtype=torch.float64), nn.Dropout(0.5), nn.Linear(8, 3, dtype=torch.float64))
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(), num_data=10)
    return Dropout(joint, drawn.normal(Key(2), joint.num_weights), one_mask_a_draw=one_mask_a_draw)


def test_dropout_needs_one_mask_for_all_rows() -> None:
    q = _dropout(one_mask_a_draw=True)
    probs = q.outputs(POOL, 100, Key(0)).softmax(2)
    assert batch_bald(q, POOL, 2, batch_size=4).rows.tolist() == batch_bald_of_probs(probs, 2).rows.tolist()
    with pytest.raises(ValueError, match="one_mask_a_draw=True"):
        batch_bald(_dropout(one_mask_a_draw=False), POOL, 2)


@pytest.mark.parametrize(
    "call", [bald, lambda q, x, **s: batch_bald(q, x, 1, **s), lambda q, x, **s: epig(q, x, x, **s)]
)
def test_what_has_no_information_is_refused(call: Callable[..., object]) -> None:
    q = classifier()
    point = Point(q.joint, q.theta[0, 0])
    for posterior, settings in ((point, {}), (q, {"draws": 1})):
        with pytest.raises(ValueError, match="two or more functions"):
            call(posterior, POOL, **settings)
    counts = po.Joint(network(2, 1), po.likelihoods.Poisson(), po.priors.Normal(), num_data=10)
    with pytest.raises(TypeError, match=r"normal noise\. Got Poisson"):
        call(Samples(counts, torch.zeros(1, 5, counts.num_weights, dtype=torch.float64)), POOL)
    with pytest.raises(TypeError, match=r"posterior of a network\. Got Tensor"):
        call(POOL, POOL)
    with pytest.raises(TypeError, match="is for numbers"):
        variance_reduction(q, POOL, AIMS)
    for posterior in (q, linearized(1)):
        with pytest.raises(po.errors.BadData, match="inputs have no rows"):
            call(posterior, POOL[:0])


def test_a_pool_may_require_gradients_and_posteriors_stay_as_they_are() -> None:
    q: Posterior = linearized(1)
    pool = POOL.clone().requires_grad_()
    assert torch.allclose(epig(q, pool, AIMS), epig(q, POOL, AIMS))
    assert pool.grad is None
