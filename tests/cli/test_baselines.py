"""The baselines: against closed forms, and where they are likely to break."""

import math

import pytest
import torch

from posterity.cli.frame.baselines import constant, frequencies, linear, logistic
from posterity.datasets import LabelledData
from posterity.metrics import negative_log_likelihood

pytestmark = pytest.mark.cpu


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def regression(rows, columns, signal, noise=0.5, seed=0):
    """Training rows and 2000 test rows of a linear function."""
    x = normal(rows + 2000, columns, seed=seed)
    weights = signal * normal(columns, 1, seed=seed + 1) / math.sqrt(columns)
    y = 3.0 + x @ weights + noise * normal(len(x), 1, seed=seed + 2)
    return LabelledData(x[:rows], y[:rows]), LabelledData(x[rows:], y[rows:])


def test_the_mean_is_the_normal_of_the_targets():
    targets = torch.tensor([[1.0], [2.0], [6.0]])
    pred = constant(LabelledData(torch.zeros(3, 2), targets))(torch.zeros(4, 2))
    assert pred.mean.flatten().tolist() == [3.0] * 4
    torch.testing.assert_close(pred.variance.flatten(), torch.full((4,), 14 / 3, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(30, 3), (30, 40)])
def test_linear_predicts_as_the_gaussian_process_of_its_scales(shape):
    train, test = regression(*shape, signal=1.0, noise=1.0)
    inputs = test.inputs[:5]
    pred = linear(train)(inputs)
    noise = float(pred.aleatoric[0, 0])
    assert noise > 0.1  # else the mean would not tell the prior's variance
    x, y = train.inputs.double(), train.targets.double()

    def conditional(weight_variance):
        """Mean and variance of f given y, under the same prior and a wide one for the intercept."""
        ones = 1e7

        def kernel(a, b):
            return weight_variance * (a @ b.T) + ones

        gain = torch.linalg.solve(kernel(x, x) + noise * torch.eye(len(x)), kernel(x, inputs.double()))
        return gain.T @ y, (kernel(inputs.double(), inputs.double()) - gain.T @ kernel(x, inputs.double())).diagonal()

    # The prior's variance is not told; the mean of one row gives it by bisection.
    low, high = 1e-6, 1e3
    start = float(pred.mean[0, 0])
    rising = float(conditional(high)[0][0, 0]) > float(conditional(low)[0][0, 0])
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (float(conditional(middle)[0][0, 0]) < start) == rising else (low, middle)
    mean, variance = conditional(middle)
    torch.testing.assert_close(pred.mean, mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pred.epistemic.flatten(), variance, rtol=1e-2, atol=1e-3)


def test_linear_has_the_scales_of_the_largest_evidence():
    train, _ = regression(40, 4, signal=1.0)
    x, y = train.inputs.double(), train.targets.double()
    pred = linear(train)(train.inputs)
    noise = float(pred.aleatoric[0, 0])

    def evidence(weight_variance, noise_variance):
        """The density of the targets' contrasts, in which a flat intercept has no part."""
        contrasts = torch.linalg.svd(torch.ones(1, 40, dtype=torch.float64)).Vh[1:]  # (39, 40)
        covariance = contrasts @ (weight_variance * x @ x.T + noise_variance * torch.eye(40)) @ contrasts.T
        mean = torch.zeros(39, dtype=torch.float64)
        return float(torch.distributions.MultivariateNormal(mean, covariance).log_prob((contrasts @ y)[:, 0]))

    scales = torch.logspace(-3, 2, 200).tolist()
    best = max(scales, key=lambda scale: evidence(scale, noise))
    values = [evidence(best, noise * factor) for factor in (0.97, 1.0, 1.03)]
    assert values[1] == max(values)


def test_linear_finds_the_noise_and_holds_for_more_columns_than_rows():
    train, test = regression(400, 5, signal=1.0)
    pred = linear(train)(test.inputs)
    assert float(pred.aleatoric[0, 0]) == pytest.approx(0.25, rel=0.25)
    expected = 0.5 * math.log(2 * math.pi * math.e * 0.25)
    assert negative_log_likelihood(pred, test.targets) == pytest.approx(expected, abs=0.05)
    wide, held_out = regression(100, 300, signal=1.0)
    by_mean = negative_log_likelihood(constant(wide)(held_out.inputs), held_out.targets)
    assert negative_log_likelihood(linear(wide)(held_out.inputs), held_out.targets) < by_mean - 0.03


def test_linear_without_a_signal_is_no_worse_than_the_mean():
    train, test = regression(60, 30, signal=0.0)
    by_mean = negative_log_likelihood(constant(train)(test.inputs), test.targets)
    assert negative_log_likelihood(linear(train)(test.inputs), test.targets) < by_mean + 0.02


@pytest.mark.parametrize(
    "inputs",
    [torch.arange(20.0)[:, None], torch.arange(20.0)[:, None].expand(20, 3), torch.ones(20, 1)],
    ids=["exact", "collinear", "constant"],
)
def test_linear_is_finite_on_degenerate_inputs(inputs):
    targets = 2.0 * torch.arange(20.0)[:, None]
    pred = linear(LabelledData(inputs.contiguous(), targets))(inputs)
    assert math.isfinite(negative_log_likelihood(pred, targets))


def test_frequencies_are_smoothed():
    pred = frequencies(LabelledData(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1])), 3)(torch.zeros(2, 1))
    torch.testing.assert_close(pred.probs, torch.tensor([[4.0, 2.0, 1.0]] * 2, dtype=torch.float64) / 7)


def classes(rows, columns, count, signal, seed=0):
    x = normal(rows + 1000, columns, seed=seed)
    logits = signal * x @ normal(columns, count, seed=seed + 1) / math.sqrt(columns)
    draws = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(seed + 2))[:, 0]
    true = float(torch.nn.functional.cross_entropy(logits[rows:], draws[rows:]))
    return LabelledData(x[:rows], draws[:rows]), LabelledData(x[rows:], draws[rows:]), true


@pytest.mark.parametrize(("count", "signal"), [(2, 2.0), (4, 3.0)])
def test_logistic_comes_near_the_truth_with_many_rows(count, signal):
    train, test, true = classes(3000, 5, count, signal)
    assert negative_log_likelihood(logistic(train, count)(test.inputs), test.targets) == pytest.approx(true, abs=0.02)


@pytest.mark.parametrize(("rows", "columns", "signal"), [(60, 30, 0.0), (60, 100, 3.0), (120, 2, 0.5)])
def test_logistic_is_not_sure_without_reason(rows, columns, signal):
    train, test, _ = classes(rows, columns, 3, signal)
    by_frequency = negative_log_likelihood(frequencies(train, 3)(test.inputs), test.targets)
    assert negative_log_likelihood(logistic(train, 3)(test.inputs), test.targets) < by_frequency + 0.03


def test_logistic_is_at_the_mode_of_its_best_prior_scale():
    train, _, _ = classes(80, 3, 3, 2.0)
    x, labels = train.inputs.double(), train.targets
    logits = logistic(train, 3)(train.inputs).probs.log()
    design = torch.cat([torch.ones(80, 1, dtype=torch.float64), x], 1)
    weights = torch.linalg.lstsq(design, logits - logits.mean(1, keepdim=True)).solution  # (4, 3)
    torch.testing.assert_close((design @ weights).softmax(-1).log(), logits, rtol=1e-6, atol=1e-6)
    slope = design.T @ (torch.nn.functional.one_hot(labels, 3) - logits.exp())
    torch.testing.assert_close(slope[0], torch.zeros(3, dtype=torch.float64), rtol=0, atol=0.01)
    precision = float((slope[1:] * weights[1:]).sum() / weights[1:].square().sum())
    torch.testing.assert_close(slope[1:], precision * weights[1:], rtol=0, atol=0.01)

    def evidence(scale):
        """Laplace's, with the whole Hessian, at a mode found by plain gradient steps."""
        at = weights.clone()
        for _ in range(3000):
            gradient = design.T @ (torch.nn.functional.one_hot(labels, 3) - (design @ at).softmax(-1))
            gradient[1:] -= at[1:] / scale**2
            at += 0.01 * gradient

        def loss(flat):
            w = flat.reshape(4, 3)
            data = torch.nn.functional.cross_entropy(design @ w, labels, reduction="sum")
            return data + 0.5 * w[1:].square().sum() / scale**2

        hessian = torch.autograd.functional.hessian(loss, at.flatten())[3:, 3:]
        return -float(loss(at.flatten())) - 9 * math.log(scale) - 0.5 * float(torch.logdet(hessian))

    chosen = precision**-0.5
    values = [evidence(chosen * factor) for factor in (0.25, 1.0, 4.0)]
    assert values[1] == max(values)


def test_logistic_of_separable_classes_is_finite_and_right():
    x = torch.cat([normal(50, 2) - 8.0, normal(50, 2, seed=1) + 8.0])
    y = torch.arange(100) // 50
    pred = logistic(LabelledData(x, y), 2)(x)
    assert 0.0 < negative_log_likelihood(pred, y) < 0.01
