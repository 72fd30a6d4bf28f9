"""Where the model is right, no temperature predicts better than T = 1, on average over data sets."""

import pytest
import torch
from torch import nn

import posterity as po

FLOAT64 = torch.float64
DIMENSIONS, ROWS, TESTS = 4, 8, 40
DESIGNS, EACH = 60, 20  # an output of the network is a data set of its own: they share the design
PRIOR_PRECISION, NOISE_PRECISION = 0.8, 4.0
TEMPERATURES = (0.2, 0.5, 2.0, 5.0)
FAMILIES = {"tempered": po.Tempering.tempered, "cold": po.Tempering.cold}


def problem(tempering):
    net = nn.Linear(DIMENSIONS, EACH, bias=False, dtype=FLOAT64)
    noise, prior = po.likelihoods.Gaussian(NOISE_PRECISION**-0.5), po.priors.Normal(PRIOR_PRECISION**-0.5)
    return po.Joint(net, noise, prior, num_data=ROWS, tempering=tempering)


def design(number):
    key = po.Key(11).fold(number)
    return key.fold("train").normal((ROWS, DIMENSIONS), FLOAT64), key.fold("test").normal((TESTS, DIMENSIONS), FLOAT64)


def targets(number, inputs, tests, noise_scale):
    """For each data set weights from the prior, and targets of training and test rows."""
    key = po.Key(12).fold(number)
    weights = key.fold("weights").normal((DIMENSIONS, EACH), FLOAT64) * PRIOR_PRECISION**-0.5
    noise = [noise_scale * key.fold(name).normal((len(x), EACH), FLOAT64) for name, x in (("y", inputs), ("t", tests))]
    return inputs @ weights + noise[0], tests @ weights + noise[1]


def log_densities(family, temperature, noise_scale):
    """Mean log predictive density of the test rows of each data set, (DESIGNS * EACH,)."""
    found = []
    for number in range(DESIGNS):
        inputs, tests = design(number)
        y, y_test = targets(number, inputs, tests, noise_scale)
        q, _ = po.infer(po.methods.Conjugate(), problem(family(temperature)), (inputs, y), progress=False)
        pred = q.predict(tests)
        found.append(torch.distributions.Normal(pred.mean, pred.variance.sqrt()).log_prob(y_test).mean(0))
    return torch.cat(found)


def expected(tempering):
    """The mean over weights and noise of both, in closed form: given the design everything is Gaussian.

    w - E_q w = (I - G X) w - G e with G = lp beta A^-1 X^T, A = lp beta X^T X + pp alpha I, so that I - G X is
    pp alpha A^-1.
    """
    lp, pp = tempering.likelihood_power, tempering.prior_power
    values = []
    for number in range(DESIGNS):
        inputs, tests = design(number)
        gram = NOISE_PRECISION * inputs.T @ inputs
        inverse = torch.linalg.inv(lp * gram + pp * PRIOR_PRECISION * torch.eye(DIMENSIONS, dtype=FLOAT64))
        error = inverse @ (pp**2 * PRIOR_PRECISION * torch.eye(DIMENSIONS, dtype=FLOAT64) + lp**2 * gram) @ inverse
        variance, square = ((tests @ m * tests).sum(1) + 1 / NOISE_PRECISION for m in (inverse, error))
        values.append((-0.5 * (2 * torch.pi * variance).log() - 0.5 * square / variance).mean())
    return float(torch.stack(values).mean())


def standard_error(values):
    """Of the mean over data sets; their designs are fixed, so the spread within a design counts."""
    return float((values.reshape(DESIGNS, EACH).var(1).mean() / values.numel()) ** 0.5)


@pytest.fixture(scope="module")
def curves():
    scale = NOISE_PRECISION**-0.5
    plain = log_densities(po.Tempering.tempered, 1.0, scale)  # that of both families
    return {
        name: {1.0: plain, **{t: log_densities(family, t, scale) for t in TEMPERATURES}}
        for name, family in FAMILIES.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_curve_is_the_closed_form_within_five_standard_errors(curves, family):
    for temperature, values in curves[family].items():
        difference = float(values.mean()) - expected(FAMILIES[family](temperature))
        assert abs(difference) < 5 * standard_error(values)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_is_best_by_more_than_five_standard_errors(curves, family):
    for temperature in TEMPERATURES:
        gain = curves[family][1.0] - curves[family][temperature]  # paired by data set
        assert float(gain.mean()) > 5 * standard_error(gain)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_is_the_maximum_of_the_closed_form(family):
    fine = torch.logspace(-0.5, 0.5, 41, dtype=FLOAT64)  # the middle one is 1
    curve = torch.tensor([expected(FAMILIES[family](float(t))) for t in fine])
    assert int(curve.argmax()) == 20


@pytest.mark.parametrize(("noise_factor", "better"), [(0.3, 0.3), (3.0, 10.0)], ids=["less noise", "more noise"])
def test_where_the_noise_is_wrong_another_temperature_is_better(noise_factor, better):
    """The control can fail: it speaks of data from the model alone."""
    scale = noise_factor * NOISE_PRECISION**-0.5
    plain, other = (log_densities(po.Tempering.tempered, t, scale) for t in (1.0, better))
    gain = other - plain
    assert float(gain.mean()) > 5 * standard_error(gain)
