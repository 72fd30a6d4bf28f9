"""Flat optimisers are torch's, step by step."""

import pytest
import torch

from posterity.numerics import Key
from posterity.optim import SGD, Adam

DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])


def follow(optimizer, reference, theta, divisor=1.0, steps=25):
    """The largest difference from torch's own optimiser over a run on a noisy quadratic."""
    mine, theirs = theta.clone(), theta.clone().requires_grad_()
    state, other = optimizer.init(mine), reference(theirs)
    worst = 0.0
    for step in range(steps):
        noise = Key(step).normal(tuple(theta.shape), theta.dtype, theta.device)
        factor = 1.0 / (1 + step)  # a schedule: the step size is an argument
        grad = -(mine - 0.5) + 0.3 * noise
        theirs.grad = -(theirs.detach() - 0.5) + 0.3 * noise
        state = optimizer.ascend(mine, grad * divisor, state, optimizer.step_size * factor, divisor)
        other.param_groups[0]["lr"] = optimizer.step_size * factor
        other.step()
        worst = max(worst, float((mine - theirs.detach()).abs().max()))
    assert float((mine - theta).abs().max()) > 0.01
    return worst


@DTYPES
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
@pytest.mark.parametrize("divisor", [1.0, 1000.0])
def test_adam_is_torch_adam(dtype, tolerance, shape, divisor):
    theta = Key(0).normal(shape, dtype, torch.get_default_device())
    mine = Adam(step_size=0.05, beta1=0.8, beta2=0.95, epsilon=1e-3)
    worst = follow(
        mine, lambda p: torch.optim.Adam([p], lr=0.05, betas=(0.8, 0.95), eps=1e-3, maximize=True), theta, divisor
    )
    assert worst < tolerance


@DTYPES
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("divisor", [1.0, 1000.0])
def test_sgd_is_torch_sgd(dtype, tolerance, momentum, nesterov, divisor):
    theta = Key(0).normal((3, 5), dtype, torch.get_default_device())
    worst = follow(
        SGD(step_size=0.1, momentum=momentum, nesterov=nesterov),
        lambda p: torch.optim.SGD([p], lr=0.1, momentum=momentum, nesterov=nesterov, maximize=True),
        theta,
        divisor,
    )
    assert worst < tolerance


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("divisor", [1.0, 1000.0])
def test_fused_sgd_is_torch_sgd(nesterov, divisor):
    class Fused(SGD):
        ascend = SGD.fused

    theta = Key(0).normal((3, 5), torch.float32, torch.get_default_device())
    worst = follow(
        Fused(0.1, 0.9, nesterov),
        lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=nesterov, maximize=True),
        theta,
        divisor,
    )
    assert worst < 1e-6


@pytest.mark.parametrize("optimizer", [Adam(), SGD()])
def test_the_state_belongs_to_the_run_and_not_to_the_optimizer(optimizer):
    theta = torch.zeros(3)
    first, second = optimizer.init(theta), optimizer.init(theta)
    optimizer.ascend(theta, torch.ones(3), first, 0.1, 1.0)
    assert all(bool((part == 0).all()) for part in second)
    assert optimizer == type(optimizer)()
    assert theta.tolist() == pytest.approx([0.1] * 3)


def test_adam_takes_a_gradient_of_any_strides_but_theta_in_order():
    grad = torch.arange(6.0).reshape(3, 2) - 2.5
    theta, swapped = torch.zeros(2, 3), torch.zeros(2, 3)
    Adam().ascend(theta, grad.T.contiguous(), Adam().init(theta), 0.1, 1.0)
    Adam().ascend(swapped, grad.T, Adam().init(swapped), 0.1, 1.0)
    assert torch.equal(theta, swapped)
    with pytest.raises(ValueError, match="must be contiguous"):
        Adam().init(theta.T)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adam(step_size=0.0), r"Adam\.step_size must be a positive number\. Got 0\.0"),
        (lambda: Adam(epsilon=-1.0), r"Adam\.epsilon"),
        (lambda: Adam(beta1=1.0), r"Adam\.beta1 must be at least 0 and below 1\. Got 1\.0"),
        (lambda: Adam(beta2=-0.1), r"Adam\.beta2"),
        (lambda: SGD(step_size=float("nan")), r"SGD\.step_size"),
        (lambda: SGD(momentum=1.0), r"SGD\.momentum"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
