"""A temperature chosen on validation rows."""

import dataclasses
import logging
from importlib import import_module

import pytest
import torch
from torch import nn

import posterity as po
from posterity.errors import Diverged
from posterity.inference import choose_tempering, memory
from posterity.methods import MAP, NUTS, Conjugate, Laplace, MeanField
from posterity.optim import SGD, Adam

FLOAT64 = torch.float64
ETAS = torch.tensor([0.01, 0.3, 10.0], dtype=FLOAT64)


def rows(count, seed):
    inputs = po.Key(seed).fold("x").normal((count, 3), FLOAT64)
    noise = 0.3 * po.Key(seed).fold("noise").normal((count, 1), FLOAT64)
    return inputs, inputs @ torch.tensor([[1.0], [-1.0], [0.5]], dtype=FLOAT64) + noise


TRAIN, VALIDATION = rows(24, 1), rows(40, 2)


def linear(**choices):
    net = nn.Linear(3, 1, dtype=FLOAT64)
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
    settings = {"likelihood": po.likelihoods.Gaussian(0.3), "prior": po.priors.Normal(1.0), "num_data": 24, **choices}
    return po.Joint(net, **settings)


def alone(stages, joint, tempering, seed=0):
    q = None
    for stage in stages:
        problem = dataclasses.replace(joint, tempering=tempering)
        q, _ = po.infer(stage, problem, TRAIN, start=q, seed=seed, progress=False)
    return q


def nll(q):
    return po.metrics.negative_log_likelihood(q.predict(VALIDATION[0]), VALIDATION[1])


STAGES = {
    "mean-field": (MeanField(60, batch_size=8, optimizer=Adam(0.05)),),
    "map, mean-field": (MAP(30, batch_size=8), MeanField(30, batch_size=8, optimizer=Adam(0.05))),
    "map, laplace": (MAP(200, batch_size=None, optimizer=SGD(1e-4)), Laplace(tuning=None)),
    "conjugate": (Conjugate(),),
    "nuts": (NUTS(draws=30, warmup=40, chains=2),),
}


@pytest.mark.parametrize("name", STAGES)
def test_each_temperature_is_fitted_as_it_would_be_alone(name):
    stages, joint, grid = STAGES[name], linear(), po.Tempering.tempered(ETAS)
    found = choose_tempering(stages, joint, TRAIN, grid, VALIDATION, seed=3)
    each = [alone(stages, joint, grid.member(place), seed=3) for place in range(3)]
    losses = torch.tensor([nll(q) for q in each], dtype=FLOAT64)
    torch.testing.assert_close(found.losses, losses, rtol=1e-8, atol=1e-8)
    assert found.index == int(losses.argmin())
    assert found.tempering.eta == pytest.approx(float(ETAS[found.index]))
    assert found.posterior.joint.tempering == found.tempering
    assert float(nll(found.posterior)) == pytest.approx(float(found.losses.min()), abs=1e-8)


def test_members_run_together_in_one_run(monkeypatch):
    module = import_module("posterity.inference.choose_tempering")  # the function has its name in the package
    runs = []
    plain = module.infer
    monkeypatch.setattr(module, "infer", lambda *given, **named: runs.append(given[1]) or plain(*given, **named))
    choose_tempering(STAGES["map, mean-field"], linear(), TRAIN, po.Tempering.tempered(ETAS), VALIDATION)
    assert [problem.num_members for problem in runs] == [3, 3]


def test_more_temperatures_than_memory_are_split_and_it_is_said(monkeypatch, caplog):
    method, joint = MeanField(20, batch_size=8), linear()
    grid = po.Tempering.tempered(torch.logspace(-2, 1, 5, dtype=FLOAT64))
    whole = choose_tempering(method, joint, TRAIN, grid, VALIDATION)
    two = dataclasses.replace(joint, tempering=po.Tempering.tempered(ETAS))
    room = po.plan(method, two, TRAIN).total  # for three
    monkeypatch.setattr(memory, "device_memory", lambda device: room)
    with caplog.at_level(logging.INFO, logger="posterity"):
        split = choose_tempering(method, joint, TRAIN, grid, VALIDATION)
    assert "5 fits run in groups of 3: memory has no room for more at once" in caplog.messages
    torch.testing.assert_close(split.losses, whole.losses, rtol=1e-10, atol=1e-10)


def test_a_temperature_that_fails_is_passed_over(caplog):
    steep = MAP(200, batch_size=None, optimizer=SGD(1e-3))  # too large a step for the coldest one alone
    grid = po.Tempering.tempered(torch.tensor([1e-4, 0.5, 1.0], dtype=FLOAT64))
    with caplog.at_level(logging.INFO, logger="posterity"):
        found = choose_tempering(steep, linear(), TRAIN, grid, VALIDATION)
    assert torch.isinf(found.losses).tolist() == [True, False, False]
    assert found.index > 0
    assert any("3 fits go in halves" in message for message in caplog.messages)
    assert any("failed" in message and "10000" in message for message in caplog.messages)
    with pytest.raises(Diverged):
        choose_tempering(steep, linear(), TRAIN, po.Tempering.tempered(ETAS * 1e-5), VALIDATION)


def test_the_end_of_the_grid_is_told(caplog):
    grid = po.Tempering.tempered(torch.tensor([100.0, 1000.0, 10_000.0], dtype=FLOAT64))
    found = choose_tempering(Conjugate(), linear(), TRAIN, grid, VALIDATION)
    assert found.index == 0
    assert any("is at the end of the grid: widen it." in message for message in caplog.messages)


def test_other_families_of_temperatures():
    joint = linear(tempering=po.Tempering.cold(7.0))  # which is put aside
    cold = choose_tempering(Conjugate(), joint, TRAIN, po.Tempering.cold(ETAS), VALIDATION)
    assert cold.tempering == po.Tempering.cold(float(ETAS[cold.index]))
    units = po.model.parameters(joint)
    taus = po.Tempering.balanced(ETAS, 24, units)
    assert choose_tempering(Conjugate(), joint, TRAIN, taus, VALIDATION).temperings.eta.tolist() == pytest.approx(
        (ETAS * 24 / units).tolist()
    )


def test_the_table_marks_what_was_chosen():
    found = choose_tempering(Conjugate(), linear(), TRAIN, po.Tempering.tempered(ETAS), VALIDATION)
    lines = str(found).splitlines()
    assert len(lines) == 4
    assert [line.endswith("chosen") for line in lines[1:]] == [place == found.index for place in range(3)]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"method": MAP}, TypeError, "the first argument must be a Method, or a list of them"),
        ({"method": ()}, TypeError, "the first argument must be a Method, or a list of them"),
        ({"joint": nn.Linear(3, 1)}, TypeError, "the problem must be a Joint"),
        ({"temperings": 0.1}, TypeError, "temperings must be a Tempering with one value for each"),
        (
            {"temperings": po.Tempering.tempered(0.1)},
            TypeError,
            "temperings must be a Tempering with one value for each",
        ),
        ({"joint": linear(prior=po.priors.Normal(torch.ones(3)))}, ValueError, r"must not have members\. Got 3\."),
    ],
    ids=["class", "nothing", "module", "number", "one", "members"],
)
def test_bad_arguments(change, error, message):
    given = {"method": Conjugate(), "joint": linear(), "temperings": po.Tempering.tempered(ETAS), **change}
    with pytest.raises(error, match=message):
        choose_tempering(data=TRAIN, validation=VALIDATION, **given)
