"""Gaussian predictive against closed forms and gold numbers."""

import pytest
import torch
from goldcases import load
from torch import Tensor

from posterity.errors import BadData
from posterity.likelihoods import Gaussian
from posterity.numerics.random import Key
from posterity.predictive import Exact, GaussianPredictive, Predictive


def test_gold_linear_regression() -> None:
    case = load("linear_regression")
    design, covariance = case.inputs["X_test"], case.expected["posterior_cov"]
    mean = (design @ case.expected["posterior_mean"]).unsqueeze(1)
    spread = torch.einsum("ni,ij,nj->n", design, covariance, design).reshape(-1, 1, 1)
    pred = Exact()(Gaussian(scale=case.inputs["beta"] ** -0.5), mean, spread, Key(0))
    case.check("pred_mean", pred.mean.squeeze(1))
    case.check("pred_func_var", pred.epistemic.squeeze(1))
    case.check("pred_total_var", pred.variance.squeeze(1))
    case.check("pred_log_density", pred.log_prob(case.inputs["y_test"]))


@pytest.mark.parametrize("variant", ["deck_no_scaling", "inverted_scaling"])
def test_gold_joint_density_of_two_outputs(variant: str) -> None:
    case = load("mc_dropout_enumeration")
    for row, entry in enumerate(case.expected[variant]):
        pred = Exact()(
            Gaussian(scale=case.inputs["tau"] ** -0.5),
            entry["mean"].unsqueeze(0),
            entry["func_cov"].unsqueeze(0),
            Key(0),
        )
        target = case.inputs["Y"][row].unsqueeze(0)
        case.check(f"{variant}.{row}.moment_matched_log_density", pred.log_prob(target).squeeze(0))
        assert pred.variance[0].tolist() == pytest.approx(entry["pred_cov"].diagonal().tolist(), rel=1e-9)


def correlated(correlation: float) -> GaussianPredictive:
    covariance = torch.tensor([[[1.0, correlation], [correlation, 1.0]]], dtype=torch.float64)
    return GaussianPredictive(
        torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2), torch.tensor(0.25, dtype=torch.float64), covariance
    )


def test_covariance_matters_for_the_joint_density_only() -> None:
    independent = GaussianPredictive(torch.zeros(1, 2).double(), torch.ones(1, 2), torch.tensor(0.25))
    together = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(correlated(0.0).log_prob(together), independent.log_prob(together))
    assert (
        float(correlated(0.9).log_prob(together))
        > float(independent.log_prob(together))
        > float(correlated(0.9).log_prob(together * torch.tensor([1.0, -1.0])))
    )
    torch.testing.assert_close(correlated(0.9).quantile(0.9), independent.quantile(0.9))


def test_joint_samples_have_the_joint_covariance() -> None:
    size = 20_000
    drawn = correlated(0.9).sample(size, Key(0))[:, 0]  # (size, 2)
    products = drawn[:, 0] * drawn[:, 1]
    assert abs(float(products.mean()) - 0.9) < 5.0 * float(products.std()) / size**0.5


def test_thin_covariance_in_float32_still_has_a_density() -> None:
    covariance = torch.ones(1, 3, 3)
    pred = GaussianPredictive(torch.zeros(1, 3), torch.ones(1, 3), torch.tensor(1e-9), covariance)
    log_density = pred.log_prob(torch.ones(1, 3))
    exact = torch.distributions.MultivariateNormal(
        torch.zeros(3).double(), covariance[0].double() + 1e-9 * torch.eye(3).double()
    ).log_prob(torch.ones(3).double())
    assert log_density.dtype == torch.float32
    assert float(log_density) == pytest.approx(float(exact), rel=1e-5)


def test_interval_is_central() -> None:
    pred = GaussianPredictive(torch.tensor([[1.0]]), torch.tensor([[3.0]]), torch.tensor(1.0))
    lower, upper = pred.interval(0.95)
    assert float(lower) == pytest.approx(1.0 - 2.0 * 1.959964, rel=1e-5)
    assert float(upper) == pytest.approx(1.0 + 2.0 * 1.959964, rel=1e-5)


@pytest.mark.parametrize(
    ("mean", "function_variance", "noise_variance", "covariance", "message"),
    [
        (torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0), None, "one row"),
        (torch.zeros(2, 1), torch.ones(2), torch.ones(1), None, "shape"),
        (torch.zeros(2, 1), -torch.ones(2, 1), torch.ones(1), None, "function_variance must hold no number below 0"),
        (torch.zeros(2, 1), torch.ones(2, 1), torch.tensor(float("nan")), None, "noise_variance"),
        (torch.zeros(2, 2), torch.ones(2, 2), torch.ones(1), torch.ones(2, 3, 3), "one matrix"),
        (torch.zeros(2, 2), torch.ones(2, 2), torch.ones(1), 2 * torch.eye(2).expand(2, 2, 2), "diagonal"),
    ],
)
def test_moments_that_do_not_fit_are_refused(
    mean: Tensor, function_variance: Tensor, noise_variance: Tensor, covariance: Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GaussianPredictive(mean, function_variance, noise_variance, covariance)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([1.0, float("inf")]), "finite"),
        (torch.zeros(2, dtype=torch.complex64), "real"),
        (torch.zeros(1, 2), "one row"),
        (torch.zeros(2, 2), "shape"),
    ],
)
def test_bad_targets_say_what_to_do(y: Tensor, message: str) -> None:
    pred = GaussianPredictive(torch.zeros(2, 1), torch.ones(2, 1), torch.ones(1))
    with pytest.raises(BadData, match=message):
        pred.log_prob(y)


def test_integer_targets_are_numbers() -> None:
    pred = GaussianPredictive(torch.zeros(2, 1), torch.ones(2, 1), torch.ones(1))
    assert torch.equal(pred.log_prob(torch.tensor([0, 3])), pred.log_prob(torch.tensor([0.0, 3.0])))


def test_chunks_with_and_without_covariance_do_not_join() -> None:
    plain = GaussianPredictive(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1))
    with pytest.raises(ValueError, match="1 of 2"):
        Predictive.concatenate([plain, correlated(0.5)])


def test_targets_with_other_event_axes_are_not_reshaped() -> None:
    pred = GaussianPredictive(torch.zeros(2, 2, 3), torch.ones(2, 2, 3), torch.ones(1))
    assert pred.log_prob(torch.zeros(2, 2, 3)).shape == (2,)
    for y in (torch.zeros(2, 3, 2), torch.zeros(2, 6)):
        with pytest.raises(BadData, match="shape"):
            pred.log_prob(y)


def across_rows(rows: int, size: int) -> tuple[GaussianPredictive, Tensor, Tensor, Tensor]:
    """A predictive that knows the covariance across rows, its flat mean and covariance of targets, and targets."""
    root = Key(0).normal((rows * size, rows * size + 1), torch.float64, torch.get_default_device())
    joint = root @ root.T / (rows * size)
    mean = Key(1).normal((rows, size), torch.float64, torch.get_default_device())
    noise = torch.linspace(0.1, 0.5, size, dtype=torch.float64)
    pred = GaussianPredictive(mean, joint.diagonal().reshape(rows, size), noise, joint_covariance=joint)
    total = joint + torch.diag(noise.repeat(rows))
    return pred, mean.reshape(-1), total, Key(2).normal((rows, size), torch.float64, torch.get_default_device())


@pytest.mark.parametrize("size", [1, 3])
def test_joint_density_of_all_rows(size: int) -> None:
    pred, mean, total, y = across_rows(4, size)
    exact = torch.distributions.MultivariateNormal(mean, total).log_prob(y.reshape(-1))
    torch.testing.assert_close(pred.joint_log_prob(y), exact)
    assert pred.joint_covariance.shape == (4 * size, 4 * size)
    some = torch.tensor([2, 0])
    flat = torch.arange(4 * size).reshape(4, size)[some].reshape(-1)
    part = torch.distributions.MultivariateNormal(mean[flat], total[flat][:, flat]).log_prob(y[some].reshape(-1))
    torch.testing.assert_close(pred.rows(some).joint_log_prob(y[some]), part)


def test_joint_covariance_must_fit() -> None:
    mean, variance = torch.zeros(2, 1), torch.ones(2, 1)
    with pytest.raises(
        ValueError, match=r"joint_covariance must be one matrix for all rows, \(2, 2\)\. Got \(2, 1, 1\)"
    ):
        GaussianPredictive(mean, variance, torch.ones(1), joint_covariance=torch.ones(2, 1, 1))
    with pytest.raises(ValueError, match="must be the diagonal of joint_covariance"):
        GaussianPredictive(mean, variance, torch.ones(1), joint_covariance=2.0 * torch.eye(2))


def test_chunks_forget_what_they_do_not_share() -> None:
    pred, _, _, y = across_rows(4, 1)
    joined = Predictive.concatenate([pred.rows(slice(0, 2)), pred.rows(slice(2, 4))])
    torch.testing.assert_close(joined.log_prob(y), pred.log_prob(y))
    with pytest.raises(ValueError, match="covariance of the outputs across rows"):
        joined.joint_log_prob(y)


def test_expected_log_density_against_quadrature() -> None:
    mean, spread, noise, y = 0.3, 1.7, 0.4, 1.1
    moments = torch.tensor([[mean, spread, noise]], dtype=torch.float64)
    pred = GaussianPredictive(*moments.split(1, dim=1))
    node = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    weight = torch.exp(-0.5 * node**2)
    log_density = torch.distributions.Normal(mean + spread**0.5 * node, noise**0.5).log_prob(
        torch.tensor(y, dtype=torch.float64)
    )
    exact = float(weight @ log_density / weight.sum())
    assert float(pred.expected_log_prob(torch.tensor([y], dtype=torch.float64))) == pytest.approx(exact, rel=1e-10)
