"""Integrals over Gaussian outputs against gold numbers and against each other."""

import math

import pytest
import torch
from counts import Counts
from goldcases import load
from torch import Tensor

from posterity.errors import NotPositiveDefinite
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from posterity.likelihoods import Probit as ProbitLink
from posterity.numerics.random import Key
from posterity.posteriors import default_integrator
from posterity.predictive import (
    DrawsPredictive,
    Exact,
    GaussianPredictive,
    Integrator,
    LaplaceBridge,
    MonteCarlo,
    Probit,
    ProbitPhi,
    probit_kappa,
    probit_phi,
    sigmoid_gaussian,
)

KEY = Key(0)


def moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    return mean.unsqueeze(-1), variance.reshape(-1, 1, 1)


def test_gold_probit_approximation() -> None:
    case = load("probit_approximation")
    mean, variance = case.inputs["grid"].unbind(-1)
    exact, phi, kappa = sigmoid_gaussian(mean, variance), probit_phi(mean, variance), probit_kappa(mean, variance)
    case.check("exact", exact)
    case.check("phi_form", phi)
    case.check("kappa_form", kappa)
    case.check("max_abs_err_phi_on_grid", (phi - exact).abs().max())
    case.check("max_abs_err_kappa_on_grid", (kappa - exact).abs().max())
    grid = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    case.check("sup_abs_phi_minus_sigmoid", (probit_phi(grid, torch.zeros(1)) - grid.sigmoid()).abs().max())


def test_gold_logistic_predictives() -> None:
    case = load("logistic_map_laplace")
    mean, covariance = moments(case.expected["logit_mean"], case.expected["logit_var"])
    case.check("predictive_laplace_exact", Exact()(Bernoulli(), mean, covariance, KEY).probs[:, 1])
    case.check("predictive_probit_phi", ProbitPhi()(Bernoulli(), mean, covariance, KEY).probs[:, 1])
    case.check("predictive_probit_kappa", Probit()(Bernoulli(), mean, covariance, KEY).probs[:, 1])
    for integrator in (Probit(), Exact()):
        case.check("predictive_plugin", integrator(Bernoulli(), mean, 0 * covariance, KEY).probs[:, 1])


def test_gold_limits_along_rays() -> None:
    case = load("logistic_map_laplace")
    far = 1e6
    mean, variance = far * case.expected["logit_mean"], far**2 * case.expected["logit_var"]
    case.check("ray_limit_exact", sigmoid_gaussian(mean, variance))
    case.check("ray_limit_phi", probit_phi(mean, variance))
    case.check("ray_limit_kappa", probit_kappa(mean, variance))


def test_gold_monte_carlo_divides_by_the_number_of_draws() -> None:
    case = load("logistic_map_laplace")
    mean, covariance = moments(case.expected["logit_mean"], case.expected["logit_var"])
    size = 20_000
    pred = MonteCarlo(size)(Bernoulli(), mean, covariance, KEY)
    standard_error = pred.draws[..., 1].std(0) / size**0.5
    error = (pred.probs[:, 1] - case.expected["predictive_laplace_exact"]).abs()
    assert bool((error <= 5.0 * standard_error).all())


def test_gold_multiclass_predictives() -> None:
    case = load("multiclass_map_laplace")
    for index, entry in enumerate(case.expected["predictive"]):
        mean, covariance = entry["logit_mean"].unsqueeze(0), entry["logit_cov"].unsqueeze(0)
        exact = Exact()(Categorical(), mean, covariance, KEY).probs[0]
        size = 20_000
        drawn = MonteCarlo(size)(Categorical(), mean, covariance, KEY)
        assert bool(((drawn.probs[0] - exact).abs() <= 5.0 * drawn.draws[:, 0].std(0) / size**0.5).all())
        plain = Exact()(Categorical(), mean, 0 * covariance, KEY).probs[0]
        case.check(f"predictive.{index}.plugin", plain)
        probs = Probit()(Categorical(), mean, covariance, KEY).probs[0]
        case.check(f"predictive.{index}.meanfield_probit", probs)
        plugin = Probit()(Categorical(), mean, 0 * covariance, KEY).probs[0]
        case.check(f"predictive.{index}.plugin", plugin)


def test_gold_softmax_integrals() -> None:
    case = load("softmax_gaussian_integral")
    mean = torch.stack([entry["mu"] for entry in case.inputs["cases"]])
    covariance = torch.stack([entry["S"] for entry in case.inputs["cases"]])
    probit = Probit()(Categorical(), mean, covariance, KEY)
    exact = Exact()(Categorical(), mean, covariance, KEY)
    bridge = LaplaceBridge()(Categorical(), mean, covariance, KEY)
    projected = LaplaceBridge(project=True)(Categorical(), mean, covariance, KEY)
    size = 20_000
    drawn = MonteCarlo(size)(Categorical(), mean, covariance, KEY)
    for index, entry in enumerate(case.expected["cases"]):
        case.check(f"cases.{index}.meanfield_probit", probit.probs[index])
        case.check(f"cases.{index}.exact", exact.probs[index])
        case.check(f"cases.{index}.laplace_bridge", bridge.probs[index])
        case.check(f"cases.{index}.laplace_bridge_projected", projected.probs[index])
        standard_error = drawn.draws[:, index].std(0) / size**0.5
        assert bool(((drawn.probs[index] - entry["exact"]).abs() <= 5.0 * standard_error + 1e-12).all())
    assert float((probit.probs[2] - case.expected["cases"][2]["exact"]).abs().max()) == pytest.approx(0.075, abs=5e-4)


def test_two_class_probit_is_not_the_binary_formula() -> None:
    mean = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    covariance = torch.tensor([[[1.0, -1.5], [-1.5, 4.0]]], dtype=torch.float64)
    gap, spread = mean[:, 1] - mean[:, 0], torch.tensor([1.0 + 4.0 + 2 * 1.5], dtype=torch.float64)
    classes = Probit()(Categorical(), mean, covariance, KEY).probs[:, 1]
    exact = sigmoid_gaussian(gap, spread)  # softmax of two logits is the sigmoid of their difference
    assert abs(float(probit_kappa(gap, spread) - exact)) < 2e-3
    assert abs(float(classes - exact)) > 0.02


@pytest.mark.parametrize("scale", [9.999999, 10.000001])
def test_the_two_grids_of_the_exact_integral_meet(scale: float) -> None:
    mean = torch.linspace(-30, 30, 13, dtype=torch.float64)
    here = sigmoid_gaussian(mean, torch.full_like(mean, scale**2))
    there = sigmoid_gaussian(mean, torch.full_like(mean, 100.0))
    torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-12)


def test_exact_integral_of_a_steep_sigmoid_against_a_fine_grid() -> None:
    scale = 60.0
    mean = torch.tensor([-100.0, -3.0, 0.0, 40.0], dtype=torch.float64)
    node = torch.linspace(-9.0, 9.0, 40_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * node**2)
    fine = torch.sigmoid(mean[:, None] + scale * node) @ (weight / weight.sum())
    torch.testing.assert_close(sigmoid_gaussian(mean, torch.full_like(mean, scale**2)), fine, rtol=1e-10, atol=0)


def test_exact_integral_broadcasts_and_splits_long_inputs() -> None:
    mean = torch.linspace(-4, 4, 5000).reshape(100, 50)
    value = sigmoid_gaussian(mean, torch.tensor(2.0))
    assert value.shape == mean.shape
    assert value.dtype == mean.dtype
    torch.testing.assert_close(value[99], sigmoid_gaussian(mean[99], torch.tensor(2.0)))
    torch.testing.assert_close(value + sigmoid_gaussian(-mean, torch.tensor(2.0)), torch.ones_like(value))
    assert sigmoid_gaussian(torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_exact_gaussian_keeps_the_output_covariance() -> None:
    mean, covariance = torch.zeros(3, 2), torch.tensor([[2.0, 1.0], [1.0, 3.0]]).expand(3, 2, 2)
    pred = Exact()(Gaussian(scale=(0.5, 1.0)), mean, covariance, KEY)
    assert isinstance(pred, GaussianPredictive)
    assert pred.variance[0].tolist() == [2.25, 4.0]
    assert pred.aleatoric[0].tolist() == [0.25, 1.0]
    assert torch.equal(pred.covariance, covariance)


def test_monte_carlo_draws_outputs_jointly() -> None:
    covariance = torch.tensor([[[4.0, 1.9], [1.9, 1.0]]], dtype=torch.float64)
    size = 20_000
    pred = MonteCarlo(size)(Counts(), torch.tensor([[1.0, -1.0]], dtype=torch.float64), covariance, KEY)
    assert isinstance(pred, DrawsPredictive)
    deviation = pred.outputs[:, 0] - torch.tensor([1.0, -1.0])
    for first, second in ((0, 0), (0, 1), (1, 1)):
        products = deviation[:, first] * deviation[:, second]
        error = abs(float(products.mean() - covariance[0, first, second]))
        assert error < 5.0 * float(products.std()) / size**0.5


def test_monte_carlo_of_singular_covariances() -> None:
    direction = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    covariance = torch.stack(
        [
            torch.zeros(3, 3, dtype=torch.float64),
            torch.diag(torch.tensor([0.0, 4.0, 0.0], dtype=torch.float64)),
            torch.outer(direction, direction),
            torch.eye(3, dtype=torch.float64),
        ]
    )
    pred = MonteCarlo(4000)(Gaussian(), torch.ones(4, 3, dtype=torch.float64), covariance, KEY)
    deviation = pred.outputs - 1.0  # (S, 4, 3)
    assert bool((deviation[:, 0] == 0).all())
    assert bool((deviation[:, 1, [0, 2]] == 0).all())
    torch.testing.assert_close(deviation[:, 2, 1], -2.0 * deviation[:, 2, 0])
    empirical = torch.einsum("sni,snj->nij", deviation, deviation) / len(deviation)
    assert bool(
        ((empirical - covariance).abs() <= 5.0 * math.sqrt(2.0) * covariance.amax((1, 2), True) / 4000**0.5).all()
    )


def test_monte_carlo_of_a_float32_covariance_of_low_rank() -> None:
    root = Key(1).normal((6, 5, 2), torch.float32, torch.get_default_device())
    pred = MonteCarlo(100)(Categorical(), torch.zeros(6, 5), root @ root.mT, KEY)
    assert pred.draws.dtype == torch.float32
    assert pred.probs.dtype == torch.float64
    assert bool(torch.isfinite(pred.probs).all())


def test_a_matrix_that_is_no_covariance_is_refused() -> None:
    mean = torch.zeros(1, 2)
    indefinite = torch.tensor([[[1.0, 2.0], [2.0, 1.0]]])
    with pytest.raises(NotPositiveDefinite, match="eigenvalue of -1"):
        MonteCarlo(10)(Categorical(), mean, indefinite, KEY)
    for bad in (-torch.eye(2), torch.full((2, 2), float("nan"))):
        for integrator in (Probit(), MonteCarlo(10), LaplaceBridge(project=True)):
            with pytest.raises(NotPositiveDefinite, match="float64"):
                integrator(Categorical(), mean, bad.unsqueeze(0), KEY)
        with pytest.raises(NotPositiveDefinite, match="float64"):
            Exact()(Gaussian(), mean, bad.unsqueeze(0), KEY)


def test_a_variance_rounded_below_zero_counts_as_zero() -> None:
    covariance = torch.tensor([[[-1e-9, 0.0], [0.0, 1.0]]])
    pred = Exact()(Gaussian(), torch.zeros(1, 2), covariance, KEY)
    assert pred.epistemic.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("integrator", [Probit(), MonteCarlo(5), Exact(), LaplaceBridge()])
def test_covariances_of_another_shape_are_refused(integrator: Integrator) -> None:
    likelihood = Gaussian() if isinstance(integrator, Exact) else Categorical()
    with pytest.raises(ValueError, match="one matrix for each row"):
        integrator(likelihood, torch.zeros(3, 2), torch.zeros(3, 2, 3), KEY)


LOGITS, SPREAD = torch.tensor([[0.4, -1.0, 0.2], [2.0, 0.1, 0.0]]), torch.tensor([[0.5, 2.0, 1.0], [0.1, 3.0, 0.2]])


@pytest.mark.parametrize(
    ("integrator", "likelihood", "outputs"),
    [
        (Probit(), Categorical(), 3),
        (Probit(), Bernoulli(), 1),
        (ProbitPhi(), Bernoulli(), 1),
        (LaplaceBridge(), Categorical(), 3),
        (LaplaceBridge(project=True), Categorical(), 3),
        (Exact(), Bernoulli(), 1),
        (Exact(), Bernoulli(), 3),
        (Exact(), ProbitLink(), 3),
        (Exact(), Gaussian(), 1),
        (Exact(), Gaussian(), 3),
        (Exact(), Categorical(), 3),
        (MonteCarlo(7), Categorical(), 3),
    ],
    ids=str,
)
def test_variances_stand_for_a_diagonal_covariance(
    integrator: Integrator, likelihood: Likelihood, outputs: int
) -> None:
    mean, variance = LOGITS[:, :outputs], SPREAD[:, :outputs]
    got = integrator(likelihood, mean, variance, KEY)
    wanted = integrator(likelihood, mean, torch.diag_embed(variance), KEY)
    torch.testing.assert_close(got.mean, wanted.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.variance, wanted.variance, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("integrator", "likelihood", "outputs", "marginal"),
    [
        (Probit(), Categorical(), 3, True),
        (ProbitPhi(), Bernoulli(), 1, True),
        (LaplaceBridge(), Categorical(), 3, True),
        (LaplaceBridge(project=True), Categorical(), 3, False),
        (Exact(), Bernoulli(), 1, True),
        (Exact(), ProbitLink(), 1, True),
        (Exact(), Gaussian(), 1, True),
        (Exact(), Gaussian(), 3, False),
        (Exact(), Categorical(), 2, False),
        (MonteCarlo(7), Categorical(), 3, False),
    ],
    ids=str,
)
def test_which_integrators_use_variances_alone(
    integrator: Integrator, likelihood: Likelihood, outputs: int, marginal: bool
) -> None:
    """Where they say so, correlations between outputs change nothing; elsewhere they do."""
    mean = LOGITS[:, :outputs]
    assert integrator.marginal(likelihood, mean) is marginal
    if outputs == 1 or isinstance(integrator, MonteCarlo):
        return
    root = torch.linspace(-1.0, 2.0, outputs * outputs).view(outputs, outputs)
    correlated = (root @ root.T + torch.eye(outputs)).expand(len(mean), outputs, outputs)
    apart = torch.diag_embed(correlated.diagonal(dim1=-2, dim2=-1))
    y = (
        torch.zeros(len(mean), outputs)
        if isinstance(likelihood, Gaussian)
        else torch.zeros(len(mean), dtype=torch.int64)
    )
    got, wanted = (integrator(likelihood, mean, spread, KEY).log_prob(y) for spread in (correlated, apart))
    assert torch.allclose(got, wanted, atol=1e-6) is marginal


@pytest.mark.parametrize(
    ("integrator", "likelihood", "remedy"),
    [
        (Probit(), Gaussian(), r"Exact\(\)"),
        (Probit(), Counts(), r"MonteCarlo\(\)"),
        (ProbitPhi(), Categorical(), r"Probit\(\)"),
        (ProbitPhi(), Gaussian(), r"Exact\(\)"),
        (Exact(), Categorical(), r"Probit\(\), LaplaceBridge\(\) or MonteCarlo\(\)"),
        (Exact(), Counts(), r"MonteCarlo\(\)"),
        (LaplaceBridge(), Bernoulli(), r"Probit\(\) or Exact\(\)"),
        (Probit(), ProbitLink(), r"Exact\(\)"),
        (LaplaceBridge(), Gaussian(), r"Exact\(\)"),
        (LaplaceBridge(), Counts(), r"MonteCarlo\(\)"),
    ],
)
def test_an_integrator_that_cannot_names_one_that_can(
    integrator: Integrator, likelihood: Categorical | Gaussian | Counts, remedy: str
) -> None:
    with pytest.raises(TypeError, match=f"Use {remedy}"):
        integrator(likelihood, torch.zeros(2, 1), torch.zeros(2, 1, 1), KEY)


def test_default_integrators() -> None:
    assert default_integrator(Gaussian(0.3), torch.zeros(4, 1)) == Exact()
    assert default_integrator(Bernoulli(), torch.zeros(4, 1)) == Exact()
    assert default_integrator(ProbitLink(), torch.zeros(4, 1)) == Exact()
    assert default_integrator(Categorical(), torch.zeros(4, 2)) == Exact()
    assert default_integrator(Categorical(), torch.zeros(4, 3)) == Probit()
    assert default_integrator(Categorical(positions=1), torch.zeros(4, 2, 5)) == Probit()
    assert default_integrator(Counts(), torch.zeros(4, 1)) == MonteCarlo(1000)


@pytest.mark.parametrize("draws", [0, -1, 2.5, True])
def test_monte_carlo_needs_draws(draws: int) -> None:
    with pytest.raises(ValueError, match=r"MonteCarlo\.draws must be a positive integer"):
        MonteCarlo(draws)


@pytest.mark.parametrize("integrator", [Probit(), Exact(), LaplaceBridge(), LaplaceBridge(project=True)])
def test_labels_at_positions_are_integrated_one_by_one(integrator: Integrator) -> None:
    mean = Key(0).normal((2, 3, 4), torch.float64, torch.get_default_device())  # (N, C, P)
    root = Key(1).normal((2, 12, 12), torch.float64, torch.get_default_device())
    covariance = root @ root.mT
    together = integrator(Categorical(positions=1), mean, covariance, KEY)
    blocks = covariance.reshape(2, 3, 4, 3, 4)
    for place in range(4):
        alone = integrator(Categorical(), mean[..., place], blocks[:, :, place, :, place], KEY)
        torch.testing.assert_close(together.probs[..., place], alone.probs)


@pytest.mark.parametrize("integrator", [Probit(), ProbitPhi(), Exact()])
def test_many_binary_labels_are_integrated_one_by_one(integrator: Integrator) -> None:
    mean = Key(0).normal((2, 3), torch.float64, torch.get_default_device())
    root = Key(1).normal((2, 3, 3), torch.float64, torch.get_default_device())
    covariance = root @ root.mT
    together = integrator(Bernoulli(), mean, covariance, KEY)
    for place in range(3):
        alone = integrator(Bernoulli(), mean[:, place], covariance[:, place, place].reshape(2, 1, 1), KEY)
        torch.testing.assert_close(together.probs[..., place], alone.probs)


def test_draws_of_monte_carlo_do_not_tie_rows_together() -> None:
    pred = MonteCarlo(5)(Gaussian(), torch.zeros(2, 1), torch.ones(2, 1, 1), KEY)
    with pytest.raises(ValueError, match="that all rows share"):
        pred.joint_log_prob(torch.zeros(2))
