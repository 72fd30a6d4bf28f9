"""The benchmark of IVON's step: its contenders do the same work."""

import copy

import torch
from benchmarkfiles import load
from torch import nn

from posterity.optim import IVON

ivon_step = load("ivon_step")


def test_a_problem_depends_on_its_seed_alone():
    for case in ivon_step.CASES.values():
        net, batches = ivon_step.problem(case, 1)
        again, same = ivon_step.problem(case, 1)
        assert [len(y) for _, y in batches] == [128] * 4
        assert net(batches[0][0][:2]).shape == (2, 10)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, same, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_loops_train_copies_and_go_on():
    case = ivon_step.CASES["lenet"]
    net, batches = ivon_step.problem(case, 0)
    small = [(x[:16], y[:16]) for x, y in batches[:1]]
    before = copy.deepcopy(net.state_dict())
    for call in (ivon_step.adam(net, small, 8), ivon_step.ivon(IVON, net, small, 8)):
        losses = []
        for _ in range(3):
            trained = call()
            losses.append(nn.functional.cross_entropy(trained(small[0][0]), small[0][1]).item())
        assert losses[2] < losses[0]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_verdict_compares_with_the_bound():
    harness = load("harness")
    limit = harness.Timing(ivon_step.LIMIT, (1.0, 1.0), None, False)
    for seconds, word in ((1.4, "within"), (1.6, "above")):
        ours = harness.Timing(ivon_step.OURS, (seconds, seconds), None, False)
        comparison = harness.Comparison("", "", ivon_step.LIMIT, 2, 1, (limit, ours), {})
        assert word in ivon_step.verdict(ivon_step.CASES["mlp"], comparison)
