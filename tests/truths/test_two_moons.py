"""A network on two moons: mean-field inference is unsure far from the data, where MAP is sure."""

import torch

import posterity as po
from posterity.datasets import two_moons

RADIUS = 10.0  # of the ring, about ten times the reach of the data


def test_entropy_far_away_exceeds_that_of_map_and_that_on_the_data():
    data = two_moons()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = po.networks.MLP((2, 50, 50, 2))
    tempering = po.Tempering.tempered(0.3)  # there are more weights than rows
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(), len(data.train), tempering)
    adam, cosine = po.numerics.Adam(0.01), po.numerics.Cosine()
    point, _ = po.infer(po.methods.MAP(600, 128, adam, cosine), joint, data.train.pair)
    method = po.methods.MeanField(2500, 128, adam, cosine, po.methods.WeightSampling(antithetic=True))
    q, _ = po.infer(method, joint, data.train.pair, start=point)
    angle = torch.linspace(0.0, 2 * torch.pi, 201)[:-1]
    ring = torch.tensor([0.5, 0.25]) + RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1)
    far, far_by_map = (float(posterior.predict(ring).entropy.mean()) for posterior in (q, point))
    on_data = float(q.predict(data.train.inputs).entropy.mean())
    assert far > 5 * far_by_map
    assert far > on_data
    predictive = q.predict(data.test.inputs)
    assert po.metrics.accuracy(predictive, data.test.targets) > 0.96
    assert po.metrics.negative_log_likelihood(predictive, data.test.targets) < 0.1
