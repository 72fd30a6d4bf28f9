"""A stored run goes on for more steps, bit for bit, where the steps do not depend on its length."""

import pytest
import torch
from contracts.cases import classification, labels, numbers, regression
from contracts.test_methods import same_bits
from killedruns import KillAfter, KilledError
from torch import nn

import posterity as po
from posterity.errors import BadFolder
from posterity.inference import Checkpoint, EarlyStopping, Validation
from posterity.methods import MAP, SGHMC, SGLD, Ensemble, FullRank, Laplace, MCDropout, MeanField, NaturalGradient
from posterity.optim import LBFGS, SGD, Adam, Constant, Cosine, Cycles, Cyclic, Steps

FLOAT64 = torch.float64


def dropping(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 1)).to(dtype)
    return po.Joint(module, po.likelihoods.Gaussian(0.3), po.priors.Normal(1.0), num_data=20)


def chains(kind, draws, **options):
    return kind(draws=draws, warmup=4, thin=2, chains=2, batch_size=6, step_size=1e-3, **options)


GRADIENTS = {"batch_size": 6, "optimizer": Adam(0.01), "schedule": Constant()}
LONGER = {
    "map": (lambda n: MAP(steps=n, **GRADIENTS), regression),
    "map in cycles": (lambda n: MAP(steps=n, batch_size=6, optimizer=SGD(0.01), schedule=Cyclic(5)), regression),
    "l-bfgs": (lambda n: MAP(steps=n, optimizer=LBFGS()), regression),
    "ensemble": (lambda n: Ensemble(MAP(steps=n, **GRADIENTS), 3), regression),
    "mean field": (lambda n: MeanField(steps=n, **GRADIENTS), regression),
    "natural gradient": (lambda n: NaturalGradient(steps=n, batch_size=6, step_size=0.01), regression),
    "full rank": (lambda n: FullRank(steps=n, **GRADIENTS), regression),
    "dropout": (lambda n: MCDropout(steps=n, **GRADIENTS), dropping),
    "sgld": (lambda n: chains(SGLD, n), regression),
    "sghmc in cycles": (lambda n: chains(SGHMC, n, schedule=Cycles(6, explore=0.5)), regression),
}


def columns(trace):
    return {name: (trace.steps(name).tolist(), trace[name]) for name in trace}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LONGER.values(), ids=LONGER.keys())
@pytest.mark.parametrize("killed", [False, True], ids=["finished", "interrupted"])
def test_more_steps_give_the_longer_run(case, killed, tmp_path):
    method, problem = case
    whole, trace = po.infer(method(15), problem(FLOAT64), numbers(FLOAT64), seed=3)
    checkpoint = Checkpoint(tmp_path, steps=6)
    if killed:
        with pytest.raises(KilledError):
            po.infer(
                method(9), problem(FLOAT64), numbers(FLOAT64), seed=3, checkpoint=checkpoint, callbacks=[KillAfter(7)]
            )
    else:
        po.infer(method(9), problem(FLOAT64), numbers(FLOAT64), seed=3, checkpoint=checkpoint)
    longer, longer_trace = po.infer(method(15), problem(FLOAT64), numbers(FLOAT64), seed=3, checkpoint=checkpoint)
    assert same_bits(longer, whole)
    one, two = columns(trace), columns(longer_trace)
    assert one.keys() == two.keys()
    for name, (steps, values) in one.items():
        assert steps == two[name][0], name
        assert torch.equal(values, two[name][1]), name
    again, _ = po.infer(method(15), problem(FLOAT64), numbers(FLOAT64), seed=3, checkpoint=checkpoint)
    assert same_bits(again, whole)  # the folder is now that of the longer run
    if method is not LONGER["l-bfgs"][0]:
        with pytest.raises(BadFolder, match="its method differs"):
            po.infer(method(9), problem(FLOAT64), numbers(FLOAT64), seed=3, checkpoint=checkpoint)


@pytest.mark.parametrize("schedule", [Cosine(), Cosine(warmup=0.1), Steps()], ids=str)
def test_a_schedule_over_the_whole_run_is_no_beginning_of_a_longer_one(schedule, tmp_path):
    def fit(steps):
        method = MAP(steps=steps, optimizer=Adam(0.01), schedule=schedule, batch_size=6)
        return po.infer(method, regression(FLOAT64), numbers(FLOAT64), checkpoint=tmp_path)

    fit(5)
    with pytest.raises(BadFolder, match=r"run of steps=5.*its schedule .* is spread over all steps.*start=q\)"):
        fit(8)
    fit(5)  # the folder is as it was


def test_other_runs_are_refused_as_before(tmp_path):
    def fit(method, **options):
        return po.infer(method, classification(FLOAT64), labels(FLOAT64), checkpoint=tmp_path, **options)

    fit(MAP(steps=5, **GRADIENTS))
    with pytest.raises(BadFolder, match="its method differs"):
        fit(MAP(steps=8, batch_size=6, optimizer=Adam(0.02), schedule=Constant()))
    with pytest.raises(BadFolder, match="its seed differs"):
        fit(MAP(steps=8, **GRADIENTS), seed=1)
    with pytest.raises(BadFolder, match="its method differs"):
        fit(Laplace())


def test_early_stopping_looks_at_other_steps_of_a_longer_run(tmp_path):
    def fit(steps, *callbacks):
        options = {"validation": labels(FLOAT64), "checkpoint": tmp_path, "callbacks": callbacks}
        return po.infer(MAP(steps=steps, **GRADIENTS), classification(FLOAT64), labels(FLOAT64), **options)

    fit(6, Validation(3), EarlyStopping(5))
    with pytest.raises(BadFolder, match=r"EarlyStopping-0 looks at other steps of a longer run"):
        fit(9, Validation(3), EarlyStopping(5))


def test_default_schedules_of_variational_fits_are_refused(tmp_path):
    options = {"joint": regression(FLOAT64), "data": numbers(FLOAT64), "checkpoint": tmp_path}
    po.infer(FullRank(steps=6, schedule=Constant()), **options)
    with pytest.raises(BadFolder, match="its covariance waits for a share of all steps"):
        po.infer(FullRank(steps=9, schedule=Constant()), **options)
