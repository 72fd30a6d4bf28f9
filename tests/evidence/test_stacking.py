"""Stacking: against grids, closed forms, KKT conditions and another solver, with and without the guard."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from posterity.errors import BadData
from posterity.evidence import stacked
from posterity.evidence.stacking import TOLERANCE
from posterity.numerics.random import Key

pytestmark = pytest.mark.cpu  # where weights are computed, whatever the device of the densities


def problem(rows: int, components: int, seed: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Log densities (N, K) of normals, their means (N, K, 1) and the targets (N, 1)."""
    key = Key(seed).fold("stacking")
    y = key.fold("y").normal((rows, 1), torch.float64, "cpu")
    noise = key.fold("m").normal((rows, components, 1), torch.float64, "cpu")
    error = spread * (0.1 + key.fold("e").uniform((components, 1), torch.float64, "cpu"))
    means = (0.3 + 0.7 * key.fold("g").uniform((components, 1), torch.float64, "cpu")) * y[:, None] + error * noise
    scale = 0.2 + key.fold("s").uniform((components,), torch.float64, "cpu")
    return torch.distributions.Normal(means[..., 0], scale).log_prob(y), means, y


def value(log_densities: Tensor, weights: Tensor) -> float:
    return float((log_densities + weights.log()).logsumexp(1).mean())


def error(means: Tensor, y: Tensor, weights: Tensor) -> float:
    mixed = torch.einsum("k,nkd->nd", weights, means)
    return float(((y - mixed).square() / (y - y.mean(0)).square().mean(0)).mean())


@pytest.mark.parametrize("seed", range(5))
def test_no_point_of_a_fine_grid_is_better(seed: int) -> None:
    log_densities, means, y = problem(40, 3, seed)
    free, bound = (
        stacked(log_densities, least=0.0),
        stacked(log_densities, means=means, targets=y, standard_errors=0.0, least=0.0),
    )
    steps = 60
    best, best_guarded = -math.inf, -math.inf
    assert bound.limit is not None
    for i in range(steps + 1):
        for j in range(steps + 1 - i):
            weights = torch.tensor([i, j, steps - i - j], dtype=torch.float64) / steps
            best = max(best, reached := value(log_densities, weights))
            if error(means, y, weights) <= bound.limit:
                best_guarded = max(best_guarded, reached)
    assert best <= free.log_density + TOLERANCE
    assert best > free.log_density - 0.01
    assert best_guarded <= bound.log_density + TOLERANCE
    assert best_guarded > bound.log_density - 0.05


def test_two_components_in_closed_form() -> None:
    """a rows with densities (1, r), b rows with (r, 1): w = (a - b r) / ((a + b) (1 - r))."""
    r, a, b = 0.1, 7, 3
    rows = [[0.0, math.log(r)]] * a + [[math.log(r), 0.0]] * b
    result = stacked(torch.tensor(rows, dtype=torch.float64))
    assert float(result.weights[0]) == pytest.approx((a - b * r) / ((a + b) * (1 - r)), abs=1e-5)
    assert result.log_density == pytest.approx(value(torch.tensor(rows, dtype=torch.float64), result.weights))
    assert result.single.tolist() == pytest.approx([b * math.log(r) / 10, a * math.log(r) / 10])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 60),
    components=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    errors=st.sampled_from([None, 0.0, 1.0]),
)
def test_the_conditions_of_optimality_hold(
    rows: int, components: int, seed: int, spread: float, errors: float | None
) -> None:
    """The gap is proved anew: no other weights reach more than it says."""
    log_densities, means, y = problem(rows, components, seed, spread)
    guard = {} if errors is None else {"means": means, "targets": y, "standard_errors": errors}
    result = stacked(log_densities, least=0.0, **guard)  # type: ignore[arg-type]
    assert result.gap <= TOLERANCE
    assert float(result.weights.sum()) == pytest.approx(1.0, abs=1e-12)
    assert bool((result.weights >= 0).all())
    slope = (log_densities - (log_densities + result.weights.log()).logsumexp(1, keepdim=True)).exp().mean(0)
    if errors is None:
        assert float(slope.max()) <= 1.0 + 2 * TOLERANCE  # KKT: at most 1, and 1 where a weight is above 0
        assert bool(((slope - 1.0).abs() * result.weights < 1e-6).all())
        return
    assert result.limit is not None
    assert result.squared_error is not None
    assert result.squared_error <= result.limit * (1 + 1e-6)
    if rows > 1:  # one row has no variance
        assert result.squared_error == pytest.approx(error(means, y, result.weights), rel=1e-6)


@pytest.mark.parametrize(("seed", "errors"), [(1, 0.0), (2, 0.0), (3, 0.5), (4, 1.0)])
def test_the_guard_against_another_solver(seed: int, errors: float) -> None:
    log_densities, means, y = problem(80, 5, seed, spread=0.8)
    result = stacked(log_densities, means=means, targets=y, standard_errors=errors, least=0.0)
    assert result.limit is not None
    densities = log_densities.exp().numpy()
    other = minimize(
        lambda w: -np.log(densities @ w).mean(),
        np.full(5, 0.2),
        jac=lambda w: -(densities / (densities @ w)[:, None]).mean(0),
        method="SLSQP",
        bounds=[(1e-12, 1)] * 5,
        constraints=[
            {"type": "eq", "fun": lambda w: w.sum() - 1},
            {"type": "ineq", "fun": lambda w: result.limit - error(means, y, torch.tensor(w))},
        ],
        options={"ftol": 1e-13, "maxiter": 500},
    )
    assert result.log_density >= -other.fun - 1e-6
    assert float((result.weights - torch.tensor(other.x)).abs().max()) < 5e-3


def test_the_guard_keeps_the_mean_where_the_density_would_spoil_it() -> None:
    """One component has a good mean and a bad scale, the other the reverse, as heteroscedastic networks do."""
    y = Key(1).normal((400, 1), torch.float64, "cpu")
    noise = Key(2).normal((400, 2, 1), torch.float64, "cpu")
    means = y[:, None] + torch.tensor([0.3, 0.8])[:, None] * noise
    log_densities = torch.distributions.Normal(means[..., 0], torch.tensor([0.06, 0.8]).double()).log_prob(y)
    free, guarded = stacked(log_densities), stacked(log_densities, means=means, targets=y)
    best = error(means, y, torch.tensor([1.0, 0.0]).double())
    assert error(means, y, free.weights) > 1.5 * best
    assert guarded.squared_error is not None
    assert guarded.squared_error <= guarded.limit * (1 + 1e-6)  # type: ignore[operator]
    residuals = (y - means[:, 0]).square() / (y - y.mean()).square().mean()
    assert guarded.limit == pytest.approx(best + float(residuals.std()) / 20, rel=1e-2)
    assert free.log_density > guarded.log_density > float(free.single[0])


def test_row_weights_equal_repetition() -> None:
    log_densities, means, y = problem(12, 4, 7)
    times = torch.tensor([0, 1, 2, 3] * 3)
    index = torch.arange(12).repeat_interleave(times)
    for guard in (False, True):
        named = {"means": means, "targets": y, "standard_errors": 0.0} if guard else {}
        repeated = {"means": means[index], "targets": y[index], "standard_errors": 0.0} if guard else {}
        weighted = stacked(log_densities, row_weights=times, least=0.0, **named)  # type: ignore[arg-type]
        plain = stacked(log_densities[index], least=0.0, **repeated)  # type: ignore[arg-type]
        assert weighted.log_density == pytest.approx(plain.log_density, abs=2e-8)
        assert float((weighted.weights - plain.weights).abs().max()) < 1e-3


def test_small_weights_are_dropped_unless_a_row_needs_them() -> None:
    log_densities, _, _ = problem(300, 8, 3)
    full, short = stacked(log_densities, least=0.0), stacked(log_densities, least=0.05)
    assert bool((full.weights > 0).all())
    kept = short.weights[short.weights > 0]
    assert len(kept) < 8
    assert float(kept.min()) >= 0.05
    assert float(short.weights.sum()) == pytest.approx(1.0)
    assert full.log_density - 0.05 <= short.log_density <= full.log_density + TOLERANCE
    needed = torch.zeros(1000, 2, dtype=torch.float64)
    needed[:, 1] = -5.0
    needed[0] = torch.tensor([-math.inf, -1.0])
    weights = stacked(needed, least=0.01).weights
    assert 0 < float(weights[1]) < 0.01
    assert math.isfinite(stacked(needed).log_density)


def test_equal_components_share_and_one_component_takes_all() -> None:
    log_densities, _, _ = problem(50, 1, 0)
    assert stacked(log_densities).weights.tolist() == [1.0]
    assert stacked(log_densities.expand(-1, 4)).weights.tolist() == pytest.approx([0.25] * 4)


def test_densities_of_any_size_and_several_targets() -> None:
    log_densities, means, y = problem(50, 3, 5)
    shift = 1e4 * Key(0).normal((50, 1), torch.float64, "cpu")
    free, moved = stacked(log_densities), stacked(log_densities + shift)
    assert float((free.weights - moved.weights).abs().max()) < 1e-6
    assert moved.log_density == pytest.approx(free.log_density + float(shift.mean()))
    both = torch.cat([means, 1e6 * means], 2), torch.cat([y, 1e6 * y], 1)  # units of an output do not matter
    one = stacked(log_densities, means=means, targets=y, standard_errors=0.0)
    two = stacked(log_densities, means=both[0], targets=both[1], standard_errors=0.0)
    assert float((one.weights - two.weights).abs().max()) < 1e-5


def test_many_rows_are_quick() -> None:
    log_densities, means, y = problem(20_000, 20, 9)
    assert stacked(log_densities, means=means, targets=y).gap <= TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"log_densities": torch.zeros(3)}, BadData, "rows by components"),
        ({"log_densities": torch.tensor([[0.0, math.nan]])}, BadData, "NaN"),
        ({"log_densities": torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]])}, BadData, "row 1 has density 0"),
        ({"log_densities": torch.zeros(2, 2), "row_weights": torch.tensor([0.0, 0.0])}, BadData, "not all 0"),
        ({"log_densities": torch.zeros(2, 2), "means": torch.zeros(2, 2)}, ValueError, "both means and targets"),
        (
            {"log_densities": torch.zeros(2, 2), "means": torch.zeros(2, 3), "targets": torch.zeros(2)},
            BadData,
            "2 components",
        ),
        ({"log_densities": torch.zeros(2, 2), "least": 1.0}, ValueError, "least"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Tensor], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        stacked(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0.5, 3.0])
def test_pseudo_rows_are_a_dirichlet_prior(count: float) -> None:
    log_densities, means, y = problem(40, 3, 2)
    result = stacked(log_densities, pseudo_rows=count, least=0.0)

    def objective(weights: Tensor) -> float:
        return 40 * value(log_densities, weights) + count * float(weights.log().sum())

    reached = objective(result.weights)
    for toward in torch.eye(3, dtype=torch.float64):  # concave: no way leads up
        assert objective(0.999 * result.weights + 0.001 * toward) < reached
    assert math.isclose(result.log_density, value(log_densities, result.weights), rel_tol=1e-9)
    most = stacked(log_densities, pseudo_rows=1e6, least=0.0).weights
    torch.testing.assert_close(most, torch.full_like(most, 1 / 3), rtol=0, atol=1e-3)
    guarded = stacked(
        log_densities, means=means, targets=y, standard_errors=0.0, pseudo_rows=count, least=0.0
    )  # the prior does not break the guard
    assert guarded.squared_error is not None
    assert guarded.limit is not None
    assert guarded.squared_error <= guarded.limit * (1.0 + 1e-6)


def test_pseudo_rows_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="pseudo_rows must be a number from 0 up"):
        stacked(torch.zeros(2, 2), pseudo_rows=-1.0)
