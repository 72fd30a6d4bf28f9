"""Tasks for tests of executors, and the comparison of their outcomes."""

import torch
from contracts.cases import classification, labels, numbers, regression
from contracts.test_methods import same_bits, same_tensors

import posterity as po
from posterity.inference import Outcome, Task
from posterity.methods import MAP, Conjugate, Laplace, MeanField
from posterity.numerics import Key
from posterity.optim import SGD

FLOAT64 = torch.float64
FIT = MAP(steps=7, batch_size=6)


def tasks(count=3, method=FIT):
    joint, rows = regression(FLOAT64), numbers(FLOAT64)
    start = joint.initial() + 0.1 * Key(0).normal((count, joint.size), FLOAT64)
    return [Task(f"fit {seed}", method, joint, rows, start[seed], seed=seed) for seed in range(count)]


def mixed_tasks():
    joint, rows = classification(FLOAT64), labels(FLOAT64)
    q, _ = po.infer(FIT, joint, rows)
    return [
        Task("map", FIT, joint, rows, validation=rows),
        Task("laplace", Laplace(tuning=None), joint, rows, q),
        Task("mean field", MeanField(steps=5, batch_size=6), joint, rows, q.theta, seed=3),
        Task("impossible", Conjugate(), joint, rows),
        Task("exploding", MAP(steps=50, optimizer=SGD(1e9)), joint, rows),
    ]


def assert_same(one: list[Outcome], two: list[Outcome]) -> None:
    assert [outcome.name for outcome in one] == [outcome.name for outcome in two]
    for first, second in zip(one, two, strict=True):
        assert first.error == second.error
        assert (first.posterior is None) == (second.posterior is None) == bool(first.error)
        if first.posterior is not None:
            assert same_bits(first.posterior, second.posterior)
            assert same_tensors(first.trace.tensors(), second.trace.tensors())
