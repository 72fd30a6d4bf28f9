"""`po.laplace` in one line is the long way, bit for bit."""

import pytest
import torch
from contracts.cases import inputs, labels, numbers
from contracts.test_methods import assert_close, same_bits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.curvature import Diagonal, EmpiricalFisher, Full, Kronecker
from posterity.likelihoods import Bernoulli, Categorical, Gaussian
from posterity.methods import AllWeights, Laplace, LastLayer
from posterity.priors import Normal

FLOAT64 = torch.float64


def net(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def loader(rows, **options):
    generator = torch.Generator(torch.get_default_device()) if options.get("shuffle") else None
    return DataLoader(TensorDataset(*rows), batch_size=6, generator=generator, **options)


WAYS = {
    "laplace-torch's words": (
        {"subset": "last_layer", "structure": "kron", "prior": Normal(1.0), "tuning": None},
        Laplace(structure=Kronecker(), subset=LastLayer(), tuning=None),
    ),
    "defaults": ({}, Laplace()),
    "objects": (
        {"structure": Diagonal(), "subset": AllWeights(), "curvature": EmpiricalFisher(), "batch_size": 5},
        Laplace(EmpiricalFisher(), Diagonal(), AllWeights(), batch_size=5),
    ),
    "the evidence": (
        {"structure": "full", "subset": "all", "tuning": po.evidence.Evidence()},
        Laplace(structure=Full(), subset=AllWeights(), tuning=po.evidence.Evidence()),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_one_line_is_the_long_way(way, task):
    settings, method = way
    classes = task == "classification"
    rows, module = (labels if classes else numbers)(FLOAT64), net(3 if classes else 1)
    short = po.laplace(module, loader(rows, shuffle=True), task, seed=2, **settings)
    likelihood = Categorical() if classes else Gaussian()
    joint = po.Joint(module, likelihood, settings.get("prior", Normal()), num_data=len(rows[0]))
    long, _ = po.infer(method, joint, loader(rows, shuffle=True), seed=2)
    if torch.get_default_device().type == "cuda":  # where sums are rounded otherwise once in some thirty runs
        assert_close(short, long, 1e-9)
    else:
        assert same_bits(short, long)
        assert torch.equal(short.predict(inputs(FLOAT64)).mean, long.predict(inputs(FLOAT64)).mean)


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 8, dtype=FLOAT64)

    def forward(self, x):
        return self.layer(x).reshape(-1, 2, 4)


BINARY = (torch.arange(20) % 2, (torch.arange(20) % 2).double().unsqueeze(1))
TARGETS = {
    "classes": (net(3), torch.arange(20) % 3, Categorical()),
    "a logit": (net(1), BINARY[0], Bernoulli()),
    "a logit, floats": (net(1), BINARY[1], Bernoulli()),
    "many labels": (net(2), torch.stack([BINARY[0], BINARY[0]], 1), Bernoulli()),
    "positions": (Pixels(), torch.zeros(20, 4, dtype=torch.int64), Categorical(positions=1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", TARGETS.values(), ids=TARGETS.keys())
def test_the_likelihood_of_classes_follows_from_the_shapes(case):
    module, targets, likelihood = case
    q = po.laplace(module, (inputs(FLOAT64), targets), "classification", prior=Normal(1.0), tuning=None)
    assert q.joint.likelihood == likelihood
    assert q.joint.num_data == 20


def test_words_that_are_unknown_and_targets_that_are_unclear_are_refused():
    rows = labels(FLOAT64)
    with pytest.raises(ValueError, match=r"Unknown structure 'krom'. Did you mean 'kron'\?"):
        po.laplace(net(3), rows, "classification", structure="krom")
    with pytest.raises(ValueError, match=r"Unknown subset 'last'"):
        po.laplace(net(3), rows, "classification", subset="last")
    with pytest.raises(ValueError, match=r"Got 'classes'. Unknown task 'classes'"):
        po.laplace(net(3), rows, "classes")
    with pytest.raises(ValueError, match=r"Give classes as y.argmax\(1\), or likelihood=Bernoulli"):
        po.laplace(net(3), (rows[0], nn.functional.one_hot(rows[1], 3)), "classification")
    with pytest.raises(ValueError, match=r"num_data is 7 but the data have 20 rows"):
        po.laplace(net(3), rows, "classification", num_data=7)


def both(task, narrow, wide):
    """Yield the posteriors of two sets of rows, by leave-one-out and by validation."""
    torch.manual_seed(0)
    module, seeded = net(2 if task == "classification" else 1), {"seed": 1, "progress": False}
    for validation in (False, True):
        own = [{"validation": rows} if validation else {} for rows in (narrow, wide)]
        yield [po.laplace(module, rows, task, **each, **seeded) for rows, each in zip((narrow, wide), own, strict=True)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rows_of_weight_zero_choose_nothing(task):
    x, y = (labels if task == "classification" else numbers)(FLOAT64)
    x, weights = torch.cat([x, 1.0 - x]), torch.cat([torch.ones(len(x)), torch.zeros(len(x))]).double()
    wrong = 1 - y.clamp_max(1) if task == "classification" else y + 50.0
    kept = slice(len(y))
    for alone, weighted in both(task, (x[kept], y), (x, torch.cat([y, wrong]), weights)):
        assert alone.joint.prior.scale == pytest.approx(weighted.joint.prior.scale, rel=1e-9)
        if task == "regression":
            assert alone.joint.likelihood.scale == pytest.approx(weighted.joint.likelihood.scale, rel=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_single_targets_of_weight_zero_choose_nothing():
    x, y = numbers(FLOAT64)
    y = torch.cat([y, y.square()], 1)
    weights = (torch.arange(y.numel()).view(y.shape) % 3 > 0).double()
    torch.manual_seed(0)
    module = net(2)
    targets = {"missing": (y.where(weights > 0, torch.nan),), "of weight 0": (y.where(weights > 0, 50.0), weights)}
    missing, weighed = (po.laplace(module, (x, *rest), "regression", progress=False) for rest in targets.values())
    assert weighed.joint.prior.scale == pytest.approx(missing.joint.prior.scale, rel=1e-9)
    assert weighed.joint.likelihood.scale == pytest.approx(missing.joint.likelihood.scale, rel=1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("prior", [None, Normal(1.0)])
def test_one_output_may_be_a_number_a_row(task, prior):
    x, y = numbers(FLOAT64)
    y = (y > 0).long().squeeze(1) if task == "classification" else y.squeeze(1)
    torch.manual_seed(0)
    column = net(1)
    flat = nn.Sequential(*column, nn.Flatten(0))
    qs = [po.laplace(module, (x, y), task, prior=prior, structure="kron", progress=False) for module in (column, flat)]
    assert float(qs[0].log_evidence) == pytest.approx(float(qs[1].log_evidence), rel=1e-8)
    means = [q.predict(x).mean.flatten() for q in qs]
    torch.testing.assert_close(means[0], means[1], rtol=1e-8, atol=1e-8)
