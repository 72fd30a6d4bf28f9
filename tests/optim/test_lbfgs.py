"""L-BFGS against closed forms, scipy and itself."""

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import posterity as po
from posterity.likelihoods import Gaussian
from posterity.optim import LBFGS
from posterity.priors import Normal

FLOAT64 = torch.float64


def climbed(function, start: Tensor, most: int = 2000, **settings) -> tuple[Tensor, int]:
    """The mode from `start` (..., P), and the number of evaluations; `function` gives a value for each row."""
    optimizer, theta = LBFGS(**settings), start.clone()
    state, count = optimizer.init(theta), 0
    while not bool(state.converged.all()) and count < most:
        leaf = state.trial.detach().requires_grad_()
        value = function(leaf)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        state, count = optimizer.climb(theta, value.detach(), grad, state), count + 1
    return theta, count


def rosenbrock(x: Tensor) -> Tensor:
    return -((1 - x[..., :-1]) ** 2 + 100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2).sum(-1)


@pytest.mark.parametrize("spread", [1.0, 1e4, 1e8])
def test_quadratics_of_bad_scaling_have_their_closed_form(spread):
    key = po.Key(0)
    basis = torch.linalg.qr(key.normal((6, 6), FLOAT64))[0]
    matrix = basis @ torch.diag(torch.logspace(0, torch.tensor(spread).log10().item(), 6, dtype=FLOAT64)) @ basis.mT
    mode = key.fold(1).normal((6,), FLOAT64)
    found, count = climbed(lambda x: -0.5 * ((x - mode) @ matrix * (x - mode)).sum(-1), torch.zeros(6, dtype=FLOAT64))
    assert (found - mode).abs().max() < 1e-8
    assert count < 200


def test_it_agrees_with_scipy_and_is_as_quick():
    start = torch.linspace(-1.0, 1.0, 10, dtype=FLOAT64)
    found, count = climbed(rosenbrock, start)

    def negative(x):
        leaf = torch.tensor(x, requires_grad=True)
        value = -rosenbrock(leaf)
        value.backward()
        return float(value.detach()), leaf.grad.cpu().numpy()

    other = minimize(negative, start.cpu().numpy(), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "maxcor": 30})
    assert (found - torch.tensor(other.x)).abs().max() < 1e-4
    assert (found - 1.0).abs().max() < 1e-8
    assert count < 2 * other.nfev


def test_members_are_what_each_is_alone():
    starts = po.Key(3).normal((4, 5), FLOAT64)
    together, _ = climbed(rosenbrock, starts)
    for start, row in zip(starts, together, strict=True):
        assert torch.allclose(climbed(rosenbrock, start)[0], row, rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("function", [lambda x: 1e6 - 0.5 * (3.0 * (x - 2.0)).square().sum(-1), rosenbrock])
def test_float32_ends_at_its_own_digits(function):
    found, count = climbed(function, torch.zeros(4))
    exact, _ = climbed(function, torch.zeros(4, dtype=FLOAT64))
    assert count < 500
    assert (found.double() - exact).abs().max() < 2e-3


def test_trials_where_there_is_no_value_are_taken_back():
    """log x has none below zero, and exp overflows far out."""
    found, _ = climbed(lambda x: (3.0 * x.log() - x).sum(-1), torch.tensor([0.01, 500.0], dtype=FLOAT64))
    assert torch.allclose(found, torch.tensor([3.0, 3.0], dtype=FLOAT64), rtol=1e-8)
    found, _ = climbed(lambda x: (x - x.exp()).sum(-1), torch.full((2,), 8.0))
    assert found.abs().max() < 1e-3


def test_flat_directions_and_heavy_tails_end():
    def flat(x: Tensor) -> Tensor:
        return -((x[..., 0] * x[..., 1] - 1.0) ** 2)  # a valley of modes

    found, count = climbed(flat, torch.tensor([3.0, 0.1, 7.0], dtype=FLOAT64))
    assert abs(float(found[0] * found[1]) - 1.0) < 1e-6
    assert float(found[2]) == 7.0
    assert count < 100
    found, count = climbed(lambda x: -torch.log1p(x.square()).sum(-1), torch.tensor([30.0, -2.0], dtype=FLOAT64))
    assert found.abs().max() < 1e-8
    assert count < 100


def test_a_start_at_the_mode_is_left_as_it_is():
    found, count = climbed(lambda x: -x.square().sum(-1), torch.zeros(3))
    assert count == 1
    assert torch.equal(found, torch.zeros(3))


def test_steps_of_other_methods_are_refused():
    joint = po.Joint(nn.Linear(1, 1), Gaussian(scale=1.0), Normal(scale=1.0), num_data=3)
    x = torch.ones(3, 1)
    with pytest.raises(TypeError, match="LBFGS needs the value"):
        po.infer(po.methods.MeanField(3, optimizer=LBFGS()), joint, (x, x), progress=False)
    with pytest.raises(ValueError, match="not mini-batches"):
        po.methods.MAP(batch_size=2, optimizer=LBFGS())
    with pytest.raises(ValueError, match="not proximal steps"):
        po.methods.MAP(optimizer=LBFGS(), proximal=True)
