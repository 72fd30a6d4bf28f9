"""Quantiles of beta distributions, against closed forms and scipy."""

import pytest
import torch
from scipy import stats

from posterity.special.functions import beta_quantile


@pytest.mark.parametrize("p", [0.001, 0.1586553, 0.5, 0.8413447, 0.999])
def test_against_scipy_over_seven_decades(p):
    sides = 1.0 + torch.logspace(-3, 6, 19, dtype=torch.float64)
    a, b = torch.meshgrid(sides, sides, indexing="ij")
    theirs = torch.from_numpy(stats.beta.ppf(p, a.cpu().numpy(), b.cpu().numpy())).to(a.device)
    torch.testing.assert_close(beta_quantile(p, a, b), theirs, rtol=1e-9, atol=0.0)


def test_powers_have_closed_forms_and_sides_mirror():
    a = torch.tensor([1.0, 2.0, 7.5, 1e4], dtype=torch.float64)
    torch.testing.assert_close(beta_quantile(0.3, a, torch.ones(())), 0.3 ** (1.0 / a), rtol=1e-11, atol=0.0)
    torch.testing.assert_close(beta_quantile(0.3, a, a + 1.0), 1.0 - beta_quantile(0.7, a + 1.0, a), rtol=1e-11, atol=0)


def test_shapes_and_pieces():
    a = 1.0 + torch.arange(20_000.0).reshape(2, -1)  # more rows than are held at once
    whole = beta_quantile(0.2, a, torch.tensor(3.0))
    assert whole.shape == a.shape
    assert whole.dtype == torch.float64
    torch.testing.assert_close(whole[1, 77], beta_quantile(0.2, a[1, 77], torch.tensor(3.0)))
