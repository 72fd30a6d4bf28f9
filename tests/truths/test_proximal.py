"""MAP by proximal steps ends at the mode: closed forms for orthogonal rows, coordinate descent for others."""

import dataclasses
from typing import Any

import pytest
import torch
from sklearn.linear_model import Lasso
from torch import Tensor

import posterity as po
from posterity import Joint, Tempering, infer
from posterity.likelihoods import Gaussian
from posterity.methods import MAP
from posterity.networks import MLP
from posterity.numerics import Key
from posterity.optim import SGD, Adam, Cosine, Optimizer
from posterity.penalties import L1, SquaredL2, Sum
from posterity.priors import GroupLasso, Laplace, Layerwise, Normal, Prior

ROWS, COLUMNS = 60, 8
FITS = {
    "sgd": MAP(320, None, SGD(0.1), proximal=True),
    "sgd without momentum": MAP(200, None, SGD(0.4, momentum=0.0), proximal=True),
    "nesterov with schedule": MAP(320, None, SGD(0.1, nesterov=True), Cosine(), proximal=True),
    "adam": MAP(400, None, Adam(0.05, beta2=0.95), proximal=True),
    "adam with schedule": MAP(400, None, Adam(0.05, beta2=0.95), Cosine(), proximal=True),
}
every_fit = pytest.mark.parametrize("fit", FITS.values(), ids=FITS)


def normal(seed: int, *shape: int) -> Tensor:
    return Key(seed).normal(shape, torch.float64, "cpu").to(torch.get_default_device())


def linear(outputs: int = 1) -> torch.nn.Linear:
    net = torch.nn.Linear(COLUMNS, outputs, bias=False, dtype=torch.float64)
    net.weight.data.copy_(0.3 * normal(9, outputs, COLUMNS))
    return net


def network(seed: int, sizes: list[int], activation: str) -> MLP:
    """One that starts from the same weights on every device."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        net = MLP(sizes, activation=activation)
    return net.to(torch.get_default_device())


def rows() -> tuple[Tensor, Tensor]:
    x = normal(0, ROWS, COLUMNS)
    x[:, 1] += 0.6 * x[:, 0]
    weights = torch.tensor([1.5, 0.0, 0.0, -2.0, 0.0, 0.3, 0.0, 0.0], dtype=torch.float64)
    return x, (x @ weights + 0.3 * normal(1, ROWS)).unsqueeze(1)


def orthogonal_rows(outputs: int) -> tuple[Tensor, Tensor]:
    """x^T x / ROWS is the identity."""
    x = torch.linalg.qr(normal(2, ROWS, COLUMNS)).Q * ROWS**0.5
    weights = normal(3, COLUMNS, outputs) * torch.tensor([2.0, 0.1, 0.0, 1.0, 0.05, 0.0, 0.5, 0.3])[:, None]
    return x, x @ weights + 0.3 * normal(4, ROWS, outputs)


def fitted(fit: MAP, prior: Prior, data: tuple[Tensor, Tensor], **settings: Any) -> Tensor:
    joint = Joint(linear(data[1].shape[1]), Gaussian(1.0), prior, ROWS, **settings)
    return infer(fit, joint, data, progress=False)[0].point()


@every_fit
def test_lasso_is_that_of_coordinate_descent(fit: MAP) -> None:
    x, y = rows()
    rate = 12.0
    reference = Lasso(alpha=rate / ROWS, fit_intercept=False, tol=1e-14, max_iter=100_000)
    reference.fit(x.cpu().numpy(), y[:, 0].cpu().numpy())
    found = fitted(fit, Laplace(1.0 / rate), (x, y))
    expected = torch.from_numpy(reference.coef_).to(found)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)
    assert torch.equal(found == 0, expected == 0)
    assert 0 < int((found == 0).sum()) < COLUMNS


@every_fit
def test_lasso_of_orthogonal_rows_is_a_soft_threshold(fit: MAP) -> None:
    x, y = orthogonal_rows(1)
    rate = 15.0
    least_squares = (x.T @ y / ROWS)[:, 0]
    expected = least_squares.sign() * (least_squares.abs() - rate / ROWS).clamp_min(0.0)
    found = fitted(fit, Laplace(1.0 / rate), (x, y))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)
    assert torch.equal(found == 0, expected == 0)
    assert 0 < int((found == 0).sum()) < COLUMNS


@every_fit
def test_elastic_net_of_orthogonal_rows_shrinks_a_soft_threshold(fit: MAP) -> None:
    x, y = orthogonal_rows(1)
    rate, decay = 15.0, 20.0
    least_squares = (x.T @ y / ROWS)[:, 0]
    threshold = least_squares.sign() * (least_squares.abs() - rate / ROWS).clamp_min(0.0)
    found = fitted(fit, Sum((L1(), SquaredL2()), (rate, decay)).prior(), (x, y))
    torch.testing.assert_close(found, threshold / (1.0 + 2.0 * decay / ROWS), rtol=0.0, atol=1e-6)
    assert torch.equal(found == 0, threshold == 0)
    assert 0 < int((found == 0).sum()) < COLUMNS


@every_fit
def test_group_lasso_of_orthogonal_rows_shortens_groups(fit: MAP) -> None:
    x, y = orthogonal_rows(3)
    rate = 20.0
    least_squares = (x.T @ y / ROWS).T  # (3, COLUMNS)
    expected = least_squares * (1.0 - rate / ROWS / least_squares.norm(dim=0)).clamp_min(0.0)
    found = fitted(fit, GroupLasso(rate, "columns"), (x, y)).reshape(3, COLUMNS)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)
    assert torch.equal(found == 0, expected == 0)
    assert 0 < int((found == 0).all(0).sum()) < COLUMNS


@every_fit
def test_group_lasso_of_any_rows_is_stationary(fit: MAP) -> None:
    """The gradient of the data is rate w / ||w|| in a group that lives, and no longer than rate in another."""
    x, _ = rows()
    y = orthogonal_rows(3)[1]
    rate = 14.0
    found = fitted(fit, GroupLasso(rate, "columns"), (x, y)).reshape(3, COLUMNS)
    gradient = (y - x @ found.T).T @ x
    length = found.norm(dim=0)
    alive = length > 0
    assert 0 < int(alive.sum()) < COLUMNS
    torch.testing.assert_close(gradient[:, alive], (rate * found / length)[:, alive], rtol=0.0, atol=1e-4)
    assert bool((gradient.norm(dim=0)[~alive] <= rate).all())


def test_a_laplace_prior_about_a_mean_leaves_weights_at_it() -> None:
    x, y = rows()
    shifted = fitted(FITS["sgd"], Laplace(1.0 / 12.0, mean=0.25), (x, y + 0.25 * x.sum(1, keepdim=True)))
    plain = fitted(FITS["sgd"], Laplace(1.0 / 12.0), (x, y))
    torch.testing.assert_close(shifted, plain + 0.25, rtol=0.0, atol=1e-6)
    assert torch.equal(shifted == 0.25, plain == 0)


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.05)])
def test_a_power_of_the_prior_is_a_factor_of_its_rate(optimizer: Optimizer) -> None:
    data, fit = rows(), MAP(40, None, optimizer, proximal=True)
    powered = fitted(fit, Laplace(1.0 / 4.0), data, tempering=Tempering(1.0, 3.0))
    torch.testing.assert_close(powered, fitted(fit, Laplace(1.0 / 12.0), data), rtol=1e-12, atol=1e-14)
    assert not torch.equal(powered, fitted(fit, Laplace(1.0 / 4.0), data))


def test_powers_of_likelihood_and_prior_together_leave_the_mode_where_it_is() -> None:
    data = rows()
    cold = fitted(MAP(200, None, SGD(0.1), proximal=True), Laplace(1.0 / 12.0), data, tempering=Tempering(2.0, 2.0))
    torch.testing.assert_close(cold, fitted(FITS["sgd"], Laplace(1.0 / 12.0), data), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("optimizer", [SGD(0.05), SGD(0.05, nesterov=True), Adam(0.01)])
def test_without_kinks_nothing_changes(optimizer: Optimizer) -> None:
    data = rows()
    plain, proximal = (
        fitted(MAP(50, 10, optimizer, proximal=flag), Normal(0.4), data, tempering=Tempering(1.0, 2.0))
        for flag in (False, True)
    )
    torch.testing.assert_close(proximal, plain, rtol=1e-11, atol=1e-13)


def test_where_no_weight_meets_a_kink_momentum_goes_as_with_gradients() -> None:
    """There the penalty is a straight line, and its gradient all that a proximal step sees."""
    x, y = rows()
    joint = Joint(linear(), Gaussian(1.0), Laplace(0.5), ROWS)
    start = torch.full((COLUMNS,), 5.0, dtype=torch.float64)
    for optimizer in (SGD(0.01), SGD(0.01, nesterov=True)):
        plain, proximal = (
            infer(MAP(8, None, optimizer, proximal=flag), joint, (x, y), start=start, progress=False)[0].point()
            for flag in (False, True)
        )
        torch.testing.assert_close(proximal, plain, rtol=1e-12, atol=0.0)
        assert bool((proximal > 1.0).all())


MEMBERS = 3


@pytest.mark.parametrize("optimizer", [SGD(0.05), Adam(0.05)])
@pytest.mark.parametrize("batch_size", [None, 16])
def test_members_with_rates_and_powers_are_what_they_are_alone(optimizer: Optimizer, batch_size: int | None) -> None:
    x, y = rows()
    prior = Layerwise(
        {
            "0.weight": GroupLasso(torch.tensor([2.0, 6.0, 20.0])),
            "2.weight": Laplace(torch.tensor([1.0, 0.5, 0.1])),
            "*": Normal(torch.tensor([1.0, 2.0, 0.5])),
        }
    )
    tempering = Tempering(torch.tensor([1.0, 0.5, 2.0]), torch.tensor([1.0, 2.0, 1.5]))
    net = network(0, [COLUMNS, 6, 1], "tanh").double()
    joint = Joint(net, Gaussian(0.5, learn=True), prior, ROWS, tempering)
    fit = MAP(60, batch_size, optimizer, proximal=True)
    together, trace = infer(fit, joint, (x, y), progress=False)
    assert trace["zeros"].shape == (60, MEMBERS)
    assert float(trace["zeros"][-1, -1]) > 0
    for index in range(MEMBERS):
        alone, _ = infer(fit, joint.member(index), (x, y), progress=False)
        torch.testing.assert_close(together.point()[index], alone.point(), rtol=1e-10, atol=1e-10)
        assert torch.equal(together.point()[index] == 0, alone.point() == 0)


def test_mini_batches_find_the_zeros_of_all_rows() -> None:
    """Batches of the same rows again and again: the gradient is scaled, the penalty is not."""
    x, y = rows()
    again = (x.repeat(4, 1), y.repeat(4, 1))
    joint = Joint(linear(), Gaussian(1.0), Laplace(1.0 / 48.0), 4 * ROWS)
    fit = MAP(600, ROWS, SGD(0.05), Cosine(), proximal=True)
    found = infer(fit, joint, again, progress=False)[0].point()
    expected = fitted(FITS["sgd"], Laplace(1.0 / 12.0), (x, y))
    assert torch.equal(found == 0, expected == 0)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.02)


def test_the_trace_has_the_loss_with_the_prior_and_the_fraction_of_zeros() -> None:
    x, y = rows()
    joint = Joint(linear(), Gaussian(1.0), Laplace(1.0 / 12.0), ROWS)
    q, trace = infer(dataclasses.replace(FITS["sgd"], steps=321), joint, (x, y), progress=False)
    assert float(trace["zeros"][-1]) == float((q.point() == 0).double().mean())
    value = joint.log_density(q.point(), po.model.Batch(x, y)) / ROWS
    assert float(trace["loss"][-1]) == pytest.approx(-float(value), rel=1e-10)


class Climb(Optimizer):
    """Nothing but a gradient step."""

    step_size = 0.1

    def init(self, theta: Tensor) -> Any:
        return SGD().init(theta)

    def ascend(self, theta: Tensor, grad: Tensor, state: Any, step_size: float | Tensor, divisor: float) -> Any:
        theta.add_(grad * step_size / divisor)
        return state


def test_refusals_say_what_to_do() -> None:
    density = po.Density(lambda w: -w.square().sum(), {"w": (2,)})
    with pytest.raises(TypeError, match=r"MAP\(proximal=True\) needs a Joint.*Use MAP without proximal"):
        infer(MAP(5, None, proximal=True), density, None, progress=False)
    with pytest.raises(TypeError, match=r"Climb has no proximal steps\. Use Adam or SGD"):
        fitted(MAP(5, None, Climb(), proximal=True), Laplace(), rows())
    with pytest.raises(TypeError, match=r"MAP\.proximal must be of kind bool\. Got 'yes'"):
        MAP(proximal="yes")  # type: ignore[arg-type]


def test_a_network_loses_the_units_whose_groups_vanish() -> None:
    x = normal(5, 100, 2).float()
    y = torch.sin(2.0 * x[:, :1]) + 0.1 * normal(6, 100, 1).float()
    prior = Layerwise({"*.bias": Normal(1.0), "4.weight": Normal(1.0), "*": GroupLasso(40.0)})
    joint = Joint(network(1, [2, 20, 20, 1], "relu"), Gaussian(0.1), prior, 100)
    circling, exact = (
        infer(MAP(300, 25, Adam(0.02), Cosine(), proximal=flag), joint, (x, y), progress=False)[0]
        for flag in (False, True)
    )
    assert int((circling.point() == 0).sum()) == 0
    smaller = po.pruning.pruned(exact.module())
    for before, after in smaller.units.values():
        assert 0 < after < 0.75 * before
    assert smaller.weights[1] < 0.6 * smaller.weights[0]
    with torch.no_grad():
        torch.testing.assert_close(smaller.module(x), exact.predict(x).mean.float(), rtol=0.0, atol=1e-5)
    assert float((exact.predict(x).mean - y).square().mean().sqrt()) < 0.2  # noise of 0.1
