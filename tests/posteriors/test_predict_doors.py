"""What `predict` takes from loaders and callers, and what it gives by default."""

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import posterity as po
from posterity.errors import BadData
from posterity.predictive import Exact, MonteCarlo


def two_classes():
    """Two logits that move together under the posterior: the case in which treating them apart is wrong."""
    x = po.Key(0).normal((30, 2), torch.float64)
    y = (x.sum(1) + 0.5 * po.Key(1).normal((30,), torch.float64) > 0).long()
    net = nn.Linear(2, 2).double()
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(scale=3.0), num_data=30)
    return po.infer(po.methods.Laplace(tuning=None), joint, (x, y))[0], x


def test_the_default_for_two_classes_is_the_integral():
    q, x = two_classes()
    far = 4 * x
    sampled = q.predict(far, integrator=MonteCarlo(draws=40_000)).probs[:, 1]
    torch.testing.assert_close(q.predict(far).probs[:, 1], sampled, rtol=0, atol=5 * 0.5 / 200)
    assert torch.equal(q.predict(far).probs, q.predict(far, integrator=Exact()).probs)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": SubsetRandomSampler(range(30))},
        {"sampler": WeightedRandomSampler([1.0] * 30, 30)},
        {"sampler": DistributedSampler(range(30), 1, 0)},
        {"drop_last": True},
    ],
    ids=["shuffle", "subset", "weighted", "distributed", "drop last"],
)
def test_a_loader_that_does_not_line_up_is_refused(options):
    q, x = two_classes()
    with pytest.raises(BadData, match="line up"):
        q.predict(DataLoader(TensorDataset(x), batch_size=7, **options))
    rows = TensorDataset(x)
    sampler = options.get("sampler", RandomSampler(rows) if "shuffle" in options else SequentialSampler(rows))
    with pytest.raises(BadData, match="line up"):
        q.predict(DataLoader(rows, batch_sampler=BatchSampler(sampler, 7, "drop_last" in options)))


@pytest.mark.cpu
def test_a_loader_does_not_move_the_global_generator():
    q, x = two_classes()
    before = torch.get_rng_state()
    q.predict(DataLoader(TensorDataset(x), batch_size=7))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_integrator_must_be_one():
    q, x = two_classes()
    with pytest.raises(TypeError, match=r"such as Probit\(\). Got 'probit'"):
        q.predict(x, integrator="probit")
