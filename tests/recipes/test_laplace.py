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
