"""Counts against scipy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from posterity.likelihoods import Poisson


@settings(deadline=None, max_examples=60)
@given(log_rate=st.floats(-20.0, 8.0), count=st.integers(0, 5000))
def test_log_prob_and_cdf_are_those_of_scipy(log_rate: float, count: int) -> None:
    outputs = torch.tensor([log_rate], dtype=torch.float64)
    targets = torch.tensor([float(count)], dtype=torch.float64)
    rate = float(outputs.exp())
    assert float(Poisson().log_prob(outputs, targets)) == pytest.approx(stats.poisson(rate).logpmf(count), rel=1e-9)
    assert float(Poisson().cdf(outputs, targets)) == pytest.approx(stats.poisson(rate).cdf(count), abs=1e-9)  # torch's


def test_cdf_is_a_staircase() -> None:
    outputs = torch.zeros(5, dtype=torch.float64)
    value = Poisson().cdf(outputs, torch.tensor([-0.5, 0.0, 0.999, 1.0, 1.5], dtype=torch.float64))
    e = 1.0 / torch.e
    assert value.tolist() == pytest.approx([0.0, e, e, 2 * e, 2 * e])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64, torch.bool])
def test_counts_of_any_dtype_become_that_of_the_outputs(dtype: torch.dtype) -> None:
    checked = Poisson().check(torch.zeros(2, 1), torch.tensor([0, 1]).to(dtype))
    assert checked.dtype == torch.float32
    assert checked.tolist() == [[0.0], [1.0]]
