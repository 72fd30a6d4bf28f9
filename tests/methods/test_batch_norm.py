"""Batch norm: training statistics while fitting, carried to the predictions."""

import copy

import pytest
import torch
from contracts.cases import inputs, numbers
from matrixcases import as_matrix
from torch import nn

import posterity as po
from posterity.inference import Checkpoint
from posterity.methods import MAP, Laplace
from posterity.numerics import Key
from posterity.optim import SGD

FLOAT64 = torch.float64


def network(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Tanh(), nn.Linear(4, 1)).double()


def joint(module=None):
    return po.Joint(module or network(), po.likelihoods.Gaussian(0.3), po.priors.Normal(1.0), num_data=20)


def test_map_carries_the_statistics_that_torch_training_would():
    module, (x, y) = network(), numbers(FLOAT64)
    q, _ = po.infer(MAP(steps=6, batch_size=None, optimizer=SGD(0.01)), joint(module), (x, y))
    by_hand = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.01, momentum=0.9, weight_decay=1 / 20)
    for _ in range(6):
        optimizer.zero_grad()
        ((by_hand(x) - y).square().mean() / (2 * 0.3**2)).backward()
        optimizer.step()
    assert q.buffers.keys() == dict(by_hand.named_buffers()).keys()
    for name, buffer in by_hand.named_buffers():
        torch.testing.assert_close(q.buffers[name], buffer, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(q.predict(x[:1]).mean, by_hand.eval()(x[:1]), rtol=1e-9, atol=1e-9)
    assert torch.equal(module[1].running_mean, torch.zeros(4, dtype=FLOAT64))


def test_laplace_runs_in_evaluation_mode_at_the_carried_statistics():
    q, _ = po.infer(MAP(steps=30, batch_size=None), joint(), numbers(FLOAT64))
    laplace, _ = po.infer(Laplace(tuning=None), joint(), numbers(FLOAT64), start=q)
    x = inputs(FLOAT64)
    assert all(torch.equal(laplace.buffers[name], q.buffers[name]) for name in q.buffers)
    torch.testing.assert_close(laplace.predict(x).mean, q.predict(x).mean, rtol=1e-12, atol=1e-12)
    # Rows do not see each other: one batch of all, or one row at a time.
    by_row, _ = po.infer(Laplace(tuning=None, batch_size=1), joint(), numbers(FLOAT64), start=q)
    torch.testing.assert_close(
        as_matrix(by_row.gaussian.precision), as_matrix(laplace.gaussian.precision), rtol=1e-12, atol=1e-12
    )
    without, _ = po.infer(Laplace(tuning=None), joint(), numbers(FLOAT64), start=q.point())
    assert not torch.allclose(as_matrix(without.gaussian.precision), as_matrix(laplace.gaussian.precision), rtol=1e-3)


@pytest.mark.parametrize("structure", [po.curvature.Full(), po.curvature.Diagonal()], ids=str)
def test_members_have_statistics_of_their_own(structure):
    start = joint().initial() + 0.3 * Key(5).normal((3, joint().size), FLOAT64)
    together, _ = po.infer(MAP(steps=5, batch_size=None), joint(), numbers(FLOAT64), start=start)
    laplace, _ = po.infer(Laplace(tuning=None, structure=structure), joint(), numbers(FLOAT64), start=together)
    assert together.buffers["1.running_mean"].shape == (3, 4)
    x = inputs(FLOAT64, 4)
    for index in range(3):
        alone, _ = po.infer(MAP(steps=5, batch_size=None), joint(), numbers(FLOAT64), start=start[index])
        for name, buffer in alone.buffers.items():
            torch.testing.assert_close(together.member(index).buffers[name], buffer, rtol=1e-10, atol=1e-10)
        its_laplace, _ = po.infer(Laplace(tuning=None, structure=structure), joint(), numbers(FLOAT64), start=alone)
        first, second = laplace.member(index).predict(x), its_laplace.predict(x)
        torch.testing.assert_close(first.variance, second.variance, rtol=1e-10, atol=1e-10)


def test_members_of_laplace_that_share_statistics():
    start = joint().initial().expand(2, -1)
    together, _ = po.infer(Laplace(tuning=None), joint(), numbers(FLOAT64), start=start)
    alone, _ = po.infer(Laplace(tuning=None), joint(), numbers(FLOAT64))
    x = inputs(FLOAT64, 4)
    assert torch.equal(together.member(1).buffers["1.running_var"], alone.buffers["1.running_var"])
    torch.testing.assert_close(together.member(1).predict(x).variance, alone.predict(x).variance, rtol=1e-10, atol=0.0)


def test_statistics_are_stored(tmp_path):
    q, _ = po.infer(
        MAP(steps=5, batch_size=7), joint(), numbers(FLOAT64), checkpoint=Checkpoint(tmp_path / "a", steps=2)
    )
    q.save(tmp_path / "b")
    loaded = po.load(tmp_path / "b", network())
    x = inputs(FLOAT64, 4)
    assert torch.equal(loaded.predict(x).mean, q.predict(x).mean)
    assert not torch.equal(loaded.buffers["1.running_mean"], torch.zeros(4, dtype=FLOAT64))
    again, _ = po.infer(MAP(steps=5, batch_size=7), joint(), numbers(FLOAT64), checkpoint=tmp_path / "a")
    assert all(torch.equal(again.buffers[name], q.buffers[name]) for name in q.buffers)


def test_laplace_refuses_rows_that_see_each_other():
    mixed = joint(network(track_running_stats=False))
    with pytest.raises(ValueError, match=r"factorises over rows.*track_running_stats=True"):
        po.infer(Laplace(tuning=None), mixed, numbers(FLOAT64))
