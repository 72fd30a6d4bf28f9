"""Labels from normal quantiles, against scipy."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from posterity.likelihoods import Probit

QUANTILES = [-1e8, -1e5, -1e3, -40.0, -20.001, -19.999, -5.0, -1.001, -0.999, 0.0, 3.0, 9.0, 1e6]


def test_log_prob_is_that_of_scipy_at_any_output() -> None:
    outputs = torch.tensor(QUANTILES, dtype=torch.float64)
    for label, sign in ((1.0, 1.0), (0.0, -1.0)):
        value = Probit().log_prob(outputs, torch.full_like(outputs, label))
        wanted = stats.norm.logcdf(sign * outputs.cpu().numpy())
        np.testing.assert_allclose(value.cpu(), wanted, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-4), (torch.float64, 2e-8)], ids=str)
def test_slopes_keep_their_digits_where_the_label_contradicts(dtype: torch.dtype, tolerance: float) -> None:
    outputs = torch.tensor(QUANTILES, dtype=dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(Probit().log_prob(outputs, torch.ones_like(outputs)).sum(), outputs)
    z = outputs.detach().double().cpu().numpy()
    wanted = np.exp(stats.norm.logpdf(z) - stats.norm.logcdf(z))
    wanted[z < -1e4] = -z[z < -1e4]  # the difference of the logs has lost its digits there
    np.testing.assert_allclose(slope.double().cpu(), wanted, rtol=tolerance)


def test_curvature_lies_between_zero_and_one() -> None:
    outputs = torch.tensor(QUANTILES, dtype=torch.float64)
    hessian = Probit().output_hessian(outputs, torch.ones_like(outputs)).reshape(-1)
    assert bool(((hessian >= 0.0) & (hessian <= 1.0)).all())
    assert float(hessian[1]) == pytest.approx(1.0 - 1e-10, abs=1e-15)  # 1 - 1 / z^2
    assert float(hessian[9]) == pytest.approx(2.0 / np.pi, rel=1e-14)  # rho(0)^2


@pytest.mark.parametrize(("mean", "variance"), [(0.3, 1.7), (-3.0, 0.2), (-40.0, 1.0), (5.0, 400.0)])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_tilted_moments_are_those_of_quadrature(mean: float, variance: float, label: float) -> None:
    inputs = [torch.tensor([value], dtype=torch.float64) for value in (mean, variance, label)]
    log_normaliser, centre, spread = (float(value) for value in Probit().tilted_moments(*inputs))
    sign, width = 2.0 * label - 1.0, 12.0 * np.sqrt(spread)

    def density(f: float) -> float:
        log = stats.norm.logcdf(sign * f) + stats.norm.logpdf(f, mean, np.sqrt(variance))
        return float(np.exp(log - log_normaliser))

    ends = {
        "points": [centre, 0.0] if abs(centre) < width else [centre],
        "epsabs": 1e-11,
        "epsrel": 1e-11,
        "limit": 500,
    }
    moments = [
        integrate.quad(
            lambda f, power=power: density(f) * (f - centre) ** power, centre - width, centre + width, **ends
        )[0]
        for power in range(3)
    ]
    assert moments[0] == pytest.approx(1.0, abs=1e-10)
    assert moments[1] == pytest.approx(0.0, abs=1e-10 * np.sqrt(spread))
    assert moments[2] == pytest.approx(spread, rel=1e-9)
