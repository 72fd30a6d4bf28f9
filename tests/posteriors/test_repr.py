"""The repr of a posterior is a few lines without tensors."""

import pytest
import torch
from torch import nn

import posterity as po
from posterity.likelihoods import Gaussian
from posterity.numerics.brief import brief, brief_module
from posterity.posteriors import Mixture, Point, Posterior, Samples
from posterity.priors import Layerwise, Normal

X = torch.linspace(-1.0, 1.0, 60).reshape(30, 2)


def posteriors() -> dict[str, Posterior]:
    network = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Dropout(0.1), nn.Linear(50, 1))
    joint = po.Joint(network, Gaussian(scale=0.25), Normal(0.75), num_data=30)
    point = Point(joint, joint.initial())
    laplace, _ = po.infer(po.methods.Laplace(tuning=None), joint, (X, X[:, :1]), start=point)
    mean_field, _ = po.infer(po.methods.MeanField(steps=1), joint, (X, X[:, :1]))
    dropout, _ = po.infer(po.methods.MCDropout(steps=1), joint, (X, X[:, :1]))
    many = Point(joint, joint.initial().repeat(3, 1))
    samples = Samples(joint, laplace.sample(6).reshape(2, 3, -1))
    density = po.Density(lambda a: -0.5 * a.square().sum(), {"a": (3,)})
    return {
        "point": point,
        "laplace": laplace,
        "mean_field": mean_field,
        "dropout": dropout,
        "members": many,
        "samples": samples,
        "mixture": Mixture([point, laplace, laplace]),
        "density": Samples(density, torch.zeros(1, 2, 3)),
    }


def test_it_says_what_the_posterior_is() -> None:
    every = posteriors()
    for name, q in every.items():
        text = repr(q)
        assert text.startswith(type(q).__name__)
        assert "tensor(" not in text
        assert len(text.splitlines()) <= 8
        assert max(map(len, text.splitlines())) <= 175
        if name != "density":
            assert "Sequential of Linear(2, 50), Tanh, Dropout, Linear(50, 1)" in text
            assert "weights: 201" in text
            assert "prior: Normal(scale=0.75, mean=0)" in text
            assert "likelihood: Gaussian(scale=0.25)" in text
    assert f"log evidence: {float(every['laplace'].log_evidence):.4g}" in repr(every["laplace"])
    assert "precision: " in repr(every["laplace"])
    assert "precision: Diagonal of size 201" in repr(every["mean_field"])
    assert "2 chains of 3 draws" in repr(every["samples"])
    assert "members: 3" in repr(every["members"])
    assert "1 Point, 2 Linearized, of weight 0.3333" in repr(every["mixture"])
    assert "density of 3 numbers: a" in repr(every["density"])


def test_long_values_are_cut() -> None:
    joint = po.Joint(nn.Linear(2, 1), Gaussian(scale=0.25), Normal(torch.tensor([[0.5, 1.0, 2.0]])), num_data=30)
    q, _ = po.infer(po.methods.Conjugate(), joint, (X, X[:, :1]))
    assert "prior: Normal(scale=0.5 .. 2 of shape (1, 3), mean=0)" in repr(q)
    again = po.continued(joint, q)
    assert "tensor(" not in repr(again)
    assert "\n" not in repr(again)
    assert "Correlated(mean=" in repr(again)
    assert "Tempering(likelihood_power=2, prior_power=2)" in repr(
        Point(po.Joint(nn.Linear(2, 1), Gaussian(scale=1.0), Normal(), 3, po.Tempering.cold(0.5)), torch.zeros(3))
    )
    noise = Gaussian(scale=1.0, learn=True).fixed(torch.zeros(500, 1) + torch.arange(500.0).unsqueeze(1))
    assert len(repr(po.predictive.from_outputs(noise, torch.zeros(500, 30, 1)))) < 250
    deep = nn.Sequential(*(nn.Linear(3, 3) for _ in range(40)))
    assert brief_module(deep) == "Sequential of " + "Linear(3, 3), " * 4 + "35 more, Linear(3, 3)"
    assert len(brief({f"layer{number}": "x" * 100 for number in range(50)})) == 160
    assert brief(Layerwise({"*": Normal(0.5)})).startswith("Layerwise(")


@pytest.mark.parametrize(("value", "text"), [(0.123456, "0.1235"), (3, "3"), ([1.0, 2.5], "(1, 2.5)"), ("a", "'a'")])
def test_plain_values(value: object, text: str) -> None:
    assert brief(value) == text
