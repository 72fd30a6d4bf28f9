"""The benchmark of mean-field steps on a GPU, as far as it runs without one."""

import torch
from benchmarkfiles import load
from recordable import NothingRead

from posterity.model import Batch
from posterity.networks import MLP
from posterity.numerics.random import Key

benchmark, harness = load("mean_field_cuda"), load("harness")


def test_the_loop_of_ivon_may_be_recorded(monkeypatch):
    """Its steps, called in place of a graph, read nothing once the first is taken, and its noise has generators."""
    asked = []

    def replayed(step, example, generators):
        step(example)
        asked.extend(generators())

        def play(batch):
            with NothingRead():
                step(batch)

        return play

    monkeypatch.setattr(benchmark, "replayed", replayed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows = [Batch(Key(0).fold(index).normal((4, 3)), torch.arange(4) % 2) for index in range(2)]
    benchmark.ivon(benchmark.Problem("small", 4, MLP([3, 5, 2]), rows))()
    assert len(asked) == 1


def test_the_verdict_compares_with_the_bound():
    name, size = "ResNet-20", 1024
    limit = harness.Timing(benchmark.LIMIT, (1.0, 1.0), None, False)
    for seconds, word in ((0.6, "within"), (0.7, "above")):
        ours = harness.Timing(benchmark.FIELD, (seconds, seconds), None, False)
        found = harness.Comparison("", "", benchmark.LIMIT, 2, 1, (limit, ours), {})
        (sentence,) = benchmark.verdicts(name, size, found)
        assert word in sentence
    assert {(name, size) for name, size, _ in benchmark.BOUNDS} == {*benchmark.CASES}
