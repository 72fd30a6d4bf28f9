"""The generalised Pareto distribution, against scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from posterity.evidence.importance import GeneralizedPareto


@pytest.mark.parametrize("shape", [-0.4, 0.0, 0.3, 0.7, 1.5])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_fit_finds_the_shape_and_scale_of_draws(shape, scale):
    count = 4000
    draws = stats.genpareto(shape, scale=scale).rvs(count, random_state=np.random.default_rng(7))
    fitted = GeneralizedPareto.fit(torch.from_numpy(draws))
    # Standard errors of maximum likelihood, of which the estimate has about the variance.
    assert abs(fitted.shape - shape) < 5 * (1 + shape) / math.sqrt(count)
    assert abs(fitted.scale / scale - 1) < 5 * math.sqrt(2 * (1 + shape) / count)


def test_fit_does_not_depend_on_the_order_and_scales_with_the_data():
    draws = torch.from_numpy(stats.genpareto(0.5).rvs(60, random_state=np.random.default_rng(3)))
    fitted = GeneralizedPareto.fit(draws)
    assert GeneralizedPareto.fit(draws.flip(0)) == fitted
    larger = GeneralizedPareto.fit(1000.0 * draws)
    assert larger == pytest.approx((fitted.shape, 1000.0 * fitted.scale), rel=1e-9)


@pytest.mark.parametrize("shape", [-0.5, 0.0, 1e-9, 0.8])
def test_quantiles(shape):
    probability = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    ours = GeneralizedPareto(shape, 2.0).quantile(probability)
    theirs = stats.genpareto(shape, scale=2.0).ppf(probability.cpu().numpy())
    torch.testing.assert_close(ours.cpu(), torch.from_numpy(theirs), rtol=1e-6, atol=1e-12)
