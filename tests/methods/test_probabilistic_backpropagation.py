"""What probabilistic backpropagation takes and refuses, and how its posterior is used."""

import dataclasses

import pytest
import torch
from contracts.cases import COLUMNS, inputs, network, numbers, unscaled_regression
from torch import nn

import posterity as po
from posterity.evidence import Gamma
from posterity.likelihoods import Gaussian, StudentT
from posterity.methods import Ensemble, ProbabilisticBackpropagation
from posterity.numerics import Key
from posterity.priors import Laplace, Normal

FLOAT64 = torch.float64
SHORT = ProbabilisticBackpropagation(passes=1)


def tied() -> nn.Module:
    layer = nn.Linear(COLUMNS, COLUMNS)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(COLUMNS, 1)).double()


def frozen() -> nn.Module:
    net = network([COLUMNS, 4, 1], FLOAT64, activation="relu")
    net[0].weight.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": network([COLUMNS, 4, 1], FLOAT64)}, "linear layers with ReLUs between them.*Got Linear, Tanh"),
        ({"network": nn.Sequential(nn.Linear(COLUMNS, 1), nn.ReLU()).double()}, "a linear one at the end"),
        ({"network": nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Flatten(), nn.Linear(3, 1)).double()}, "Sequential"),
        ({"network": tied()}, "'0.weight' is frozen or shared"),
        ({"network": frozen()}, "'0.weight' is frozen or shared"),
        ({"likelihood": StudentT(4.0)}, "needs one output with Gaussian noise"),
        ({"likelihood": Gaussian(0.3, learn=True)}, "known or left out"),
        ({"prior": Laplace(1.0)}, "needs a Normal prior"),
        ({"random": "0.*"}, "needs all weights random"),
    ],
)
def test_other_problems_are_refused(changes: dict[str, object], message: str) -> None:
    joint = unscaled_regression(FLOAT64)
    parts = {field.name: getattr(joint, field.name) for field in dataclasses.fields(joint)}
    with pytest.raises(ValueError, match=message):
        po.infer(SHORT, po.Joint(**{**parts, **changes}), numbers(FLOAT64))


def test_two_outputs_are_refused() -> None:
    joint = po.Joint(network([COLUMNS, 2], FLOAT64), Gaussian(), Normal(), num_data=20)
    with pytest.raises(ValueError, match="and 2 outputs"):
        po.infer(SHORT, joint, (inputs(FLOAT64), inputs(FLOAT64)[:, :2]))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"passes must be a positive whole number\. Got 0"):
        ProbabilisticBackpropagation(passes=0)
    with pytest.raises(ValueError, match=r"noise_precision must have a shape above 1.* Got 1\.0"):
        ProbabilisticBackpropagation(noise_precision=Gamma(1.0, 1.0))


def test_each_pass_sees_every_row_in_a_new_order_of_the_seed() -> None:
    data = po.as_data(numbers(FLOAT64))
    seen = [
        torch.cat([batch.targets for batch in ProbabilisticBackpropagation(2).batches(data, Key(seed)).from_step(0)])
        for seed in (0, 0, 1)
    ]
    first, second = seen[0].chunk(2)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(first, second)
    assert not torch.equal(seen[0], seen[2])
    assert torch.equal(first.sort(0).values, second.sort(0).values)
    assert torch.equal(first.sort(0).values, data.first().targets.sort(0).values)


def test_more_passes_fit_better_and_the_trace_says_so() -> None:
    x = 2 * Key(0).normal((60, 1), FLOAT64)
    net = network([1, 10, 1], FLOAT64, activation="relu")
    joint = po.Joint(net, Gaussian(), Normal(), num_data=60)
    q, trace = po.infer(ProbabilisticBackpropagation(passes=12), joint, (x, x.abs()))
    assert trace["loss"][-60:].mean() < trace["loss"][60:120].mean() < trace["loss"][:60].mean()
    assert q.predict(x).mean.sub(x.abs()).square().mean().sqrt() < 0.3
    inside, outside = (q.predict(torch.tensor([[value]], dtype=FLOAT64)).epistemic for value in (0.5, 20.0))
    assert outside > inside


def test_members_of_an_ensemble_differ_and_mix() -> None:
    q, _ = po.infer(Ensemble(SHORT, size=2), unscaled_regression(FLOAT64), numbers(FLOAT64))
    assert not torch.equal(*[part.point() for part in q.posteriors])
    assert torch.isfinite(q.predict(inputs(FLOAT64)).mean).all()


def test_predictions_are_differentiable_in_the_inputs_and_may_be_drawn() -> None:
    q, _ = po.infer(SHORT, unscaled_regression(FLOAT64), numbers(FLOAT64))
    x = inputs(FLOAT64, 3).requires_grad_()
    q.predict(x).mean.sum().backward()
    assert x.grad.abs().sum() > 0
    drawn, moments = q.gaussian.predict(x.detach(), draws=4000), q.predict(x.detach())
    error = 5 * (moments.epistemic / 4000).sqrt()
    assert ((drawn.mean - moments.mean).abs() < error).all()
