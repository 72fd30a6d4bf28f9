"""Events of several axes, and what tells them from rows and draws."""

import pytest
import torch

from posterity.curvature import GaussNewton, Hessian
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson, StudentT
from posterity.model import Joint
from posterity.model.batch import Batch
from posterity.numerics.random import Key
from posterity.priors import Normal

ENTRYWISE = [Gaussian(0.5), StudentT(5.0, 0.5), Bernoulli(), Poisson()]


def test_labels_at_positions_are_those_of_torch() -> None:
    outputs = Key(0).normal((2, 5, 4, 3, 2), torch.float64, torch.get_default_device())  # (S, N, C, *positions)
    targets = torch.arange(30).reshape(5, 3, 2) % 4
    value = Categorical(positions=2).log_prob(outputs, targets)
    for draw in range(2):
        loss = torch.nn.functional.cross_entropy(outputs[draw], targets, reduction="none").sum((1, 2))
        torch.testing.assert_close(value[draw], -loss)


def test_fisher_at_positions_is_that_of_each_position() -> None:
    outputs = Key(0).normal((5, 4, 3), torch.float64, torch.get_default_device())
    fisher = Categorical(positions=1).output_fisher(outputs).reshape(5, 4, 3, 4, 3)
    for first in range(3):
        for second in range(3):
            block = fisher[:, :, first, :, second]
            wanted = Categorical().output_fisher(outputs[..., first]) if first == second else torch.zeros_like(block)
            torch.testing.assert_close(block, wanted)


@pytest.mark.parametrize("shape", [(6, 12), (6,)])
def test_flattened_positions_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"Categorical\(positions=1\).*2 event axes.*as the network gave them"):
        Categorical(positions=1).output_fisher(torch.zeros(shape))
    with pytest.raises(ValueError, match="event_dims 1"):
        Categorical(positions=1).output_fisher(torch.zeros(6, 4, 3), 1)


@pytest.mark.parametrize("positions", [-1, 1.0, True, None, 10**30])
def test_positions_are_counted(positions: object) -> None:
    with pytest.raises(ValueError, match=r"Categorical\.positions must be the number of axes"):
        Categorical(positions=positions)


@pytest.mark.parametrize("likelihood", ENTRYWISE, ids=lambda likelihood: type(likelihood).__name__)
def test_flattening_an_event_changes_nothing(likelihood: Likelihood) -> None:
    outputs = Key(0).normal((5, 3, 2), torch.float64, torch.get_default_device())
    targets = likelihood.sample(outputs, Key(1))
    flat = outputs.flatten(1)
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), likelihood.log_prob(flat, targets.flatten(1)))
    torch.testing.assert_close(likelihood.output_fisher(outputs, 2), likelihood.output_fisher(flat))


@pytest.mark.parametrize("likelihood", ENTRYWISE, ids=lambda likelihood: type(likelihood).__name__)
def test_fisher_never_guesses_the_event(likelihood: Likelihood) -> None:
    outputs = Key(0).normal((4, 1), torch.float64, torch.get_default_device())
    assert likelihood.output_fisher(outputs).shape == (4, 1, 1)
    assert likelihood.output_fisher(outputs, 0).shape == (4, 1, 1, 1)  # four draws of one row
    assert likelihood.output_fisher(outputs.squeeze(1), 0).shape == (4, 1, 1)
    with pytest.raises(ValueError, match=r"1 event axes\. Got outputs of shape \(4,\)\. Say how many"):
        likelihood.output_fisher(outputs.squeeze(1))


@pytest.mark.parametrize("event", [(), (3,), (3, 2)])
def test_a_scale_for_each_draw_with_any_event(event: tuple[int, ...]) -> None:
    outputs = Key(0).normal((4, 5, *event), torch.float64, torch.get_default_device())
    raw, targets = torch.linspace(-1, 1, 4, dtype=torch.float64).unsqueeze(-1), outputs[0]
    for likelihood in (Gaussian(learn=True), StudentT(6.0, learn=True)):
        held = likelihood.fixed(raw)
        for function in (lambda one, f: one.variance(f), lambda one, f: one.log_prob(f, targets)):
            looped = torch.stack([function(held.member(draw), outputs[draw]) for draw in range(4)])
            torch.testing.assert_close(function(held, outputs), looped)
        fisher = torch.stack([held.member(draw).output_fisher(outputs[draw], len(event)) for draw in range(4)])
        torch.testing.assert_close(held.output_fisher(outputs, len(event)), fisher)


def test_gauss_newton_of_labels_at_positions_is_the_hessian_of_a_linear_network() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Unflatten(1, (3, 2))).double()
    joint = Joint(network, Categorical(positions=1), Normal(), num_data=5)
    inputs = Key(0).normal((5, 2), torch.float64, torch.get_default_device())
    batch = Batch(inputs, torch.arange(10).reshape(5, 2) % 3)
    theta = Key(1).normal((18,), torch.float64, torch.get_default_device())
    exact = Hessian().matrix(joint, theta, batch, None)
    torch.testing.assert_close(GaussNewton().matrix(joint, theta, batch, None), exact)
