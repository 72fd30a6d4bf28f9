"""A network on two moons: mean-field inference and SGHMC are unsure far from the data, where MAP is sure."""

import dataclasses

import pytest
import torch

import posterity as po
from posterity.datasets import DataSet, LabelledData, two_moons

RADIUS = 10.0  # of the ring, about ten times the reach of the data


def around(radius: float) -> torch.Tensor:
    angle = torch.linspace(0.0, 2 * torch.pi, 201)[:-1]
    return torch.tensor([0.5, 0.25]) + radius * torch.stack([angle.cos(), angle.sin()], dim=1)


def moons() -> tuple[DataSet, po.networks.MLP]:
    """The data and a network, the same on every device."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        data, net = two_moons(), po.networks.MLP((2, 50, 50, 2))
    device = torch.get_default_device()
    train, test = (LabelledData(part.inputs.to(device), part.targets.to(device)) for part in (data.train, data.test))
    return dataclasses.replace(data, train=train, test=test), net.to(device)


def test_entropy_far_away_exceeds_that_of_map_and_that_on_the_data():
    data, net = moons()
    tempering = po.Tempering.tempered(0.3)  # there are more weights than rows
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), len(data.train), tempering)
    adam, cosine = po.optim.Adam(0.01), po.optim.Cosine()
    point, _ = po.infer(po.methods.MAP(600, 128, adam, cosine), joint, data.train.pair)
    method = po.methods.MeanField(2500, 128, adam, cosine, po.methods.WeightSampling(antithetic=True))
    q, _ = po.infer(method, joint, data.train.pair, start=point)
    ring = around(RADIUS)
    far, far_by_map = (float(posterior.predict(ring).entropy.mean()) for posterior in (q, point))
    on_data = float(q.predict(data.train.inputs).entropy.mean())
    assert far > 5 * far_by_map
    assert far > on_data
    predictive = q.predict(data.test.inputs)
    assert po.metrics.accuracy(predictive, data.test.targets) > 0.96
    assert po.metrics.negative_log_likelihood(predictive, data.test.targets) < 0.1


def test_sghmc_on_batches_runs_at_its_temperature_and_predicts_as_the_posterior_does():
    """Bounds that MAP (far away) and mean field on the same joint (NLL) do not meet.

    They lie at least five standard deviations off the mean over the seeds 0 to 7: the NLL was 0.0777 with 0.0017 (mean
    field: from 0.091), the log of the entropy -1.50 with 0.25 (MAP: -4.1), the temperatures 1.005 with 0.002 and 1.021
    with 0.013.
    """
    data, net = moons()
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), len(data.train))
    method = po.methods.SGHMC(draws=50, warmup=1000, chains=2, preconditioner=po.methods.RMSprop())
    q, trace = po.infer(method, joint, data.train.pair)
    assert float(trace["kinetic_temperature"][1000:].mean()) == pytest.approx(1.0, abs=0.02)
    assert float(trace["configurational_temperature"][1000:].mean()) == pytest.approx(1.0, abs=0.1)
    assert po.metrics.negative_log_likelihood(q.predict(data.test.inputs), data.test.targets) < 0.088
    assert float(q.predict(around(4.0)).entropy.mean()) > 0.06
