"""Runs that leave the finite numbers stop, and say where."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from contracts.cases import numbers, regression
from torch import Tensor

import posterity as po
from posterity.errors import Diverged
from posterity.inference import Checkpoint, Method, Trace
from posterity.inference.run import check_loss
from posterity.likelihoods import Gaussian
from posterity.methods import MAP, FullRank, LowRankGaussian, MeanField
from posterity.optim import SGD
from posterity.posteriors import Point

FLOAT64 = torch.float64
WEIGHTS = {"0.weight", "0.bias", "2.weight", "2.bias"}


def joint():
    return dataclasses.replace(regression(FLOAT64), likelihood=Gaussian(0.3))


class WalkState(NamedTuple):
    theta: Tensor


@dataclasses.dataclass(frozen=True)
class Breaks(Method):
    """Goes along until theta breaks at the end of step `at`, in entry `entry`."""

    steps: int = 5
    at: int = 5
    entry: int = 13

    def batches(self, data, key):
        return data.minibatches(None, self.steps, key)

    def init(self, joint, theta, key):
        return WalkState(theta.clone())

    def step(self, joint, state, batch, key):
        loss = -joint.log_density(state.theta, batch).detach() / joint.num_data
        theta = state.theta + 1e-3
        seen = round(float((theta - joint.initial()).flatten()[0]) / 1e-3)
        if seen == self.at:
            theta[..., self.entry] = float("inf")
        return WalkState(theta), {"loss": loss}

    def keep(self, state):
        return state

    def posterior(self, joint, kept):
        return Point(joint.fitted(kept[-1].theta), kept[-1].theta)


@pytest.mark.parametrize("members", [None, 3])
def test_a_step_size_too_large_is_named_by_step_and_tensor(members):
    start = joint().initial() if members is None else joint().initial().expand(members, -1)
    method = MAP(steps=2000, optimizer=SGD(step_size=1e4, momentum=0.0))
    with pytest.raises(Diverged, match=r"not finite at step (\d+) \(first seen in .*smaller step size") as caught:
        po.infer(method, joint(), numbers(FLOAT64), start=start)
    error = caught.value
    assert 1 <= error.step < 2000
    assert f"step {error.step} " in str(error)
    assert error.tensor in WEIGHTS
    assert error.exit_code == 5


def test_one_bad_member_is_enough():
    start = joint().initial().repeat(3, 1)
    start[1] *= 1e200  # finite, but its log density is not
    with pytest.raises(Diverged, match=r"step 1 \(first seen in .* of member 1\)") as caught:
        po.infer(MAP(steps=5), joint(), numbers(FLOAT64), start=start)
    assert caught.value.step == 1


def test_a_loss_that_breaks_first_blames_the_batch():
    density = po.Density(lambda u: (u - u).sum() / 0.0, {"u": (2,)}, dtype=FLOAT64)
    method = MAP(steps=5, optimizer=SGD(step_size=1e-30, momentum=0.0))
    with pytest.raises(Diverged) as caught:
        po.infer(method, density, None)
    assert caught.value.step == 1


@pytest.mark.parametrize("members", [None, 2])
def test_the_last_update_may_break_what_no_loss_has_seen(members):
    start = joint().initial() if members is None else joint().initial().expand(members, -1)
    where = r"0\.bias" if members is None else r"0\.bias of member 0"
    with pytest.raises(Diverged, match=rf"not finite after step 5 \(first seen in {where}\)") as caught:
        po.infer(Breaks(), joint(), numbers(FLOAT64), start=start)
    assert (caught.value.step, caught.value.tensor) == (5, "0.bias")
    q, _ = po.infer(Breaks(at=6), joint(), numbers(FLOAT64), start=start)
    assert bool(torch.isfinite(q.point()).all())


def test_map_itself_may_break_in_its_last_update():
    method = MAP(steps=1, optimizer=SGD(step_size=1e308, momentum=0.0))
    q = None
    with pytest.raises(Diverged, match="after step 1 ") as caught:
        q, _ = po.infer(method, joint(), numbers(FLOAT64))
    assert q is None
    assert caught.value.tensor in WEIGHTS


def test_validation_never_sees_what_is_broken():
    """The update breaks theta in the same step in which the validation rows are looked at."""
    with pytest.raises(Diverged, match=r"not finite after step 2 "):
        po.infer(Breaks(at=2), joint(), numbers(FLOAT64), validation=numbers(FLOAT64))


def test_a_stored_run_that_diverged_diverges_again(tmp_path):
    for _ in range(2):
        with pytest.raises(Diverged, match=r"not finite after step 5 \(first seen in 0\.bias\)"):
            po.infer(Breaks(), joint(), numbers(FLOAT64), checkpoint=Checkpoint(tmp_path, steps=1))


def test_huge_losses_whose_sum_overflows_are_finite():
    trace = Trace()
    for step in range(1, 5):
        trace.record(step, {"loss": torch.full((3,), 3e38)})
    check_loss(joint(), trace, None, 4)
    trace.record(5, {"loss": torch.tensor([0.0, float("-inf"), 1.0])})
    with pytest.raises(Diverged, match="at step 5 ") as caught:
        check_loss(joint(), trace, None, 4)
    assert caught.value.tensor == "the log-likelihood of the batch"


def test_noise_in_theta_is_named_too():
    size = regression(FLOAT64).size
    with pytest.raises(Diverged, match=r"first seen in likelihood\.log_scale"):
        po.infer(Breaks(entry=size - 1), regression(FLOAT64), numbers(FLOAT64))


@pytest.mark.cpu
def test_on_a_device_where_looking_costs_the_first_bad_step_is_named(monkeypatch):
    """There the loss is looked at once in a while; the step named is that of the first bad loss all the same."""
    from importlib import import_module

    module = import_module("posterity.inference.infer")
    real, looks = module.check_loss, []

    def seldom(joint, trace, state, count, row):
        if trace.last_step("loss") % 4 == 0:
            looks.append(trace.last_step("loss"))
            real(joint, trace, state, 4, row)

    monkeypatch.setattr(module, "check_loss", seldom)
    with pytest.raises(Diverged) as caught:
        po.infer(Breaks(steps=9, at=2), joint(), numbers(FLOAT64))
    assert looks == [4]
    assert caught.value.step == 3  # step 2 broke theta, step 3 was the first to have a bad loss


def test_other_flat_vectors_are_named_with_the_weights_in_them():
    class Two(NamedTuple):
        theta: Tensor
        spread: Tensor

    class Spreads(Breaks):
        def keep(self, state):
            spread = torch.ones_like(state.theta)
            spread[2] = float("nan")
            return Two(state.theta, spread)

    with pytest.raises(Diverged, match=r"first seen in spread of 0\.weight"):
        po.infer(Spreads(at=99), joint(), numbers(FLOAT64))


@pytest.mark.parametrize(
    ("method", "entry", "name"),
    [
        (MeanField(optimizer=po.optim.Adam()), 2, "0.weight"),
        (MeanField(optimizer=po.optim.Adam()), 21 + 13, "the scale of 0.bias"),
        (LowRankGaussian(rank=2, optimizer=po.optim.Adam()), 2, "0.weight"),
        (LowRankGaussian(rank=2, optimizer=po.optim.Adam()), 21 + 13, "the scale of 0.bias"),
        (LowRankGaussian(rank=2, optimizer=po.optim.Adam()), 21 + 21, "the covariance"),
        (FullRank(optimizer=po.optim.Adam()), 2, "0.weight"),
        (FullRank(optimizer=po.optim.Adam()), 21 + 21, "the covariance"),
    ],
)
def test_means_and_scales_are_named_by_their_weights(method, entry, name):
    problem = joint()
    state = method.init(problem, problem.initial(), po.Key(0))
    state.parameters[entry] = float("nan")
    trace = Trace()
    trace.record(1, {"loss": float("nan")})
    with pytest.raises(Diverged, match=f"first seen in {name}\\)"):
        check_loss(problem, trace, state, 1)


def test_a_kl_that_is_not_finite_is_told_from_the_data():
    """Weights so large that their squares overflow, in a layer whose activations saturate."""
    problem = joint()
    start = problem.initial()
    start[:12] = 1e200
    with pytest.raises(Diverged, match=r"at step 1 .*The KL to the prior is not finite"):
        po.infer(MeanField(steps=3), problem, numbers(FLOAT64), start=start)
    with pytest.raises(Diverged, match=r"at step 1 ") as caught:
        po.infer(MeanField(steps=3), problem, numbers(FLOAT64), start=problem.initial() * 1e160)
    assert caught.value.step == 1
