"""The mean-field benchmarks: limits, our contenders and tables, on problems that take no time."""

import copy
import math

import pytest
import torch
from benchmarkfiles import load
from torch import nn

import posterity as po

parts = load("mean_field_parts")
step = load("mean_field_step")
predict = load("mean_field_predict")


@pytest.mark.parametrize("net", list(parts.NETS))
def test_a_problem_depends_on_its_seed_alone(net):
    module, x, y = parts.problem(net, 20, seed=1)
    again, same, labels = parts.problem(net, 20, seed=1)
    assert module(x[:2]).shape == (2, 10)
    assert y.unique().numel() > 3
    assert torch.equal(x, same)
    assert torch.equal(y, labels)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    assert not torch.equal(x, parts.problem(net, 20, seed=2)[1])


def test_the_limit_is_adam_on_the_sum_over_passes():
    module, x, y = parts.problem("tiny", 6, seed=0)
    before = copy.deepcopy(module.state_dict())
    seen = []
    original = torch.optim.Adam.step

    def spy(self, *args):
        seen.append([p.grad.clone() for p in self.param_groups[0]["params"]])
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", spy)
        parts.deterministic_step(module, x, y, 3)()
    wanted = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), list(module.parameters()))
    for found, grad in zip(seen[0], wanted, strict=True):
        torch.testing.assert_close(found, 3 * grad)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_each_of_our_steps_has_noise_of_its_own():
    module, x, y = parts.problem("tiny", 8, seed=0)
    call = parts.our_step(step.our_method(po.methods.WeightSampling()), parts.our_joint(module), x, y)
    losses = [float(call()["data_fit"]) for _ in range(3)]
    assert len(set(losses)) == 3


def test_our_posterior_stands_at_the_weights():
    module, *_ = parts.problem("tiny", 8, seed=0)
    q = parts.our_posterior(module, 0.25)
    assert torch.equal(q.mean, nn.utils.parameters_to_vector(module.parameters()).detach())
    torch.testing.assert_close(q.variance, torch.full_like(q.variance, 0.0625))


def test_the_closed_form_kl_by_hand():
    found = parts.closed_form_kl(torch.tensor([3.0, 0.0]), torch.tensor([2.0, 1.0]), prior_scale=2.0)
    assert found == pytest.approx(9 / 8 + (math.log(2.0) + 1 / 8 - 0.5))


def test_ours_counts_the_kl_once():
    module, x, y = parts.problem("tiny", 16, seed=0)
    for estimator in (*step.estimators(1).values(), *step.estimators(8).values()):
        found = step.kl_weight(lambda scale, own=estimator: parts.our_objective(own, module, x, y, scale))
        assert found == pytest.approx(1.0, rel=0.01)


def test_a_table_has_our_rows_and_says_why_a_peer_is_missing(monkeypatch):
    def missing(problem):
        raise ModuleNotFoundError("No module named 'peer'")

    monkeypatch.setattr(step, "PEERS", {"peer": missing})
    comparison, loop = step.measure(step.Case("small", "tiny", 1, 2, 3, 1), rounds=5, seed=0)
    assert [timing.name for timing in comparison.timings] == [step.LIMIT, step.FUSED, step.ONE, step.PAIRED, step.RUN]
    assert comparison.rounds == 1
    assert comparison.skipped == {"peer": "ModuleNotFoundError: No module named 'peer'"}
    assert set(comparison.columns[step.KL_WEIGHT]) == {step.ONE, step.PAIRED}
    assert loop > 0.0


def test_several_draws_have_a_table_of_their_own(monkeypatch):
    monkeypatch.setattr(step, "PEERS", {})
    comparison, loop = step.measure(step.Case("small", "tiny", 2, 1, 0, 1), rounds=1, seed=0)
    assert [timing.name for timing in comparison.timings] == [step.LIMIT, step.FUSED, step.LOCAL, step.SAMPLED]
    assert loop is None


def test_an_objective_of_ours_that_is_off_stops_the_run(monkeypatch):
    monkeypatch.setattr(step, "kl_weight", lambda objectives: 0.5)
    with pytest.raises(ValueError, match=r"one draw counts the KL 0\.5 times"):
        step.measure(step.CASES["tiny"], rounds=1, seed=0)


def test_notes_name_every_number():
    notes = " ".join(step.notes({"tiny": 0.75}, {"loss": 1e-9}, {step.ONE: 1.5}))
    for part in ("2-50-50-10 0.750", "1.0e-09 (loss)", f"1.50 ({step.ONE})"):
        assert part in notes


def test_predictions_agree_where_there_is_no_spread():
    module, x, _ = parts.problem("tiny", 8, seed=0)
    plain = predict.forward_passes(module, x)()
    torch.testing.assert_close(plain, module(x).softmax(-1).detach())
    torch.testing.assert_close(predict.by_hand(module, x, scale=0.0)(), plain)


def test_the_checksum_tells_spread_from_none():
    assert predict.entropy(torch.full((3, 4), 0.25)) == pytest.approx(math.log(4.0))
    module, x, _ = parts.problem("tiny", 200, seed=0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(20.0)
    ours = predict.our_predict(module, x)()
    torch.testing.assert_close(ours.sum(-1), torch.ones(200, dtype=ours.dtype))
    sharp = predict.entropy(predict.forward_passes(module, x)())
    assert predict.entropy(predict.by_hand(module, x, scale=1.0)()) > sharp + 0.05
