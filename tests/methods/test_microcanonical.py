"""Microcanonical dynamics and learnt lengths against derivatives, reversals and known targets."""

import dataclasses

import pytest
import torch
from torch import Tensor

import posterity as po
from posterity.kernels import AutoMass, DiagonalMass, UnitMass
from posterity.kernels.lengths import chees_slopes, lengthened, searching_from, van_der_corput
from posterity.kernels.microcanonical import (
    isokinetic,
    kicked,
    microcanonical,
    no_energies,
    refreshed,
    unit,
    with_energies,
)
from posterity.kernels.state import place_at, spread, unspread
from posterity.methods import MAMS, MCLMC, ChEES
from posterity.numerics.random import Key

FLOAT64 = torch.float64
SCALES = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.7], dtype=FLOAT64)


def bent(position: Tensor) -> Tensor:
    """A log density (C,) that is not normal."""
    first, *others = (position / SCALES).unbind(-1)
    rest = torch.stack(others, -1)
    return -0.5 * first.square() - 0.5 * (rest - 0.3 * first.square().unsqueeze(-1)).square().sum(-1)


def target(position: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        position = position.detach().requires_grad_()
        value = bent(position)
        (grad,) = torch.autograd.grad(value.sum(), position)
    return value.detach(), grad


def normal(*shape: int, seed: int = 0) -> Tensor:
    return Key(seed).normal(shape, dtype=FLOAT64)


def test_kicks_solve_their_equation():
    velocity, grad, time, pieces = unit(normal(6, 5)), 3.0 * normal(6, 5, seed=1), 0.7, 20_000
    found, _ = kicked(velocity, grad, time)
    now = velocity
    for _ in range(pieces):  # the midpoint rule
        half = now + 0.5 * time / pieces * (grad - now * (now * grad).sum(-1, keepdim=True)) / 4
        now = now + time / pieces * (grad - half * (half * grad).sum(-1, keepdim=True)) / 4
    torch.testing.assert_close(found, now, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.square().sum(-1), torch.ones(6, dtype=FLOAT64))


def test_kicks_change_areas_by_their_jacobian():
    """The determinant of the map between the planes that touch the sphere."""
    velocity, grad = unit(normal(5)), 3.0 * normal(5, seed=1)
    after, log_volume = kicked(velocity.unsqueeze(0), grad.unsqueeze(0), 0.7)

    def moved(vector: Tensor) -> Tensor:
        return kicked(unit(vector.unsqueeze(0)), grad.unsqueeze(0), 0.7)[0][0]

    jacobian = torch.autograd.functional.jacobian(moved, velocity)
    before, behind = (torch.linalg.svd(each.reshape(1, -1))[2][1:] for each in (velocity, after))
    wanted = torch.linalg.slogdet(behind @ jacobian @ before.T)[1]
    torch.testing.assert_close(log_volume[0], wanted)


def test_huge_gradients_turn_velocities_without_overflow():
    grad = torch.full((1, 5), 1e10, dtype=torch.float32)
    velocity, log_volume = kicked(unit(-grad + torch.eye(5)[:1] * 1e9), grad, 1.0)
    torch.testing.assert_close(velocity, unit(grad))
    assert bool(torch.isfinite(log_volume).all())


def test_isokinetic_steps_can_be_taken_back():
    start, velocity = place_at(target, 0.5 * normal(7, 5)), unit(normal(7, 5, seed=1))
    end, last, there = isokinetic(target, start, velocity, 0.2, 5)
    back, first, again = isokinetic(target, end, -last, 0.2, 5)
    torch.testing.assert_close(back.position, start.position)
    torch.testing.assert_close(first, -velocity)
    torch.testing.assert_close(again, -there)


def test_the_energy_is_kept_to_second_order():
    start, velocity = place_at(target, normal(50, 5)), unit(normal(50, 5, seed=1))
    errors = []
    for steps in (32, 64):
        end, _, log_volume = isokinetic(target, start, velocity, 1.6 / steps, steps)
        errors.append((end.value - start.value + log_volume).abs().median())
    assert 3.5 < float(errors[0] / errors[1]) < 4.5


def test_refreshed_velocities_forget_over_the_length():
    """After a distance L, in small steps, the mean of u.u0 is exp(-1) up to O(1 / P)."""
    velocity = start = unit(normal(400, 50))
    for index in range(100):
        velocity = refreshed(velocity, normal(400, 50, seed=index + 1), 0.02, 2.0)
    assert float((velocity * start).sum(-1).mean()) == pytest.approx(torch.tensor(-1.0).exp().item(), abs=0.02)
    torch.testing.assert_close(velocity.square().sum(-1), torch.ones(400, dtype=FLOAT64))


def test_many_chains_stay_at_the_target_without_bias_as_steps_shrink():
    """Chains that begin at the target stay there, but for the error of the steps, which small ones do not have."""
    off = {}
    for size in (0.1, 1.6):
        first = normal(40_000, 5, seed=3)
        position = first + torch.nn.functional.pad(0.3 * first[:, :1].square().expand(-1, 4), (1, 0))
        place, velocity = place_at(target, position * SCALES), unit(normal(40_000, 5, seed=4))
        noise = normal(int(8 / size), 40_000, 5, seed=5)
        end, _, _ = microcanonical(target, place, velocity, noise, size, 2.0)
        moments = (end.position[:, 0] / SCALES[0]).square()
        off[size] = abs(float(moments.mean()) - 1.0)
        error = float(moments.std()) / 200
    assert off[0.1] < 4 * error < off[1.6]


def test_the_search_finds_the_step_size_of_the_wanted_variance():
    """Where the variance is 3 e^6, with noise, the wanted variance 1 is at e = 3^(-1/6)."""
    step_size = torch.tensor([0.1, 5.0], dtype=FLOAT64)
    search = no_energies(step_size)
    for index in range(300):
        noise = normal(2, 10, seed=index).square().mean(-1)
        search = with_energies(search, 3.0 * step_size**6 * noise, step_size)
        step_size = search.step_size
    torch.testing.assert_close(step_size, torch.full_like(step_size, 3.0 ** (-1 / 6)), rtol=0.02, atol=0)


def test_slopes_are_derivatives_of_the_criterion():
    away, velocity, move = normal(6, 5), normal(6, 5, seed=1), normal(6, 5, seed=2)

    def criterion(time: Tensor) -> Tensor:
        after = away + move + time * velocity
        return (after.square().sum(-1) - away.square().sum(-1)).square().sum() / 4

    time = torch.zeros(6, 1, dtype=FLOAT64)
    wanted = torch.autograd.functional.jacobian(criterion, time).squeeze(-1)
    torch.testing.assert_close(chees_slopes(away, move, velocity), wanted)


def test_the_search_for_a_length_goes_up_the_slope_within_bounds():
    search = searching_from(torch.ones(2, dtype=FLOAT64), normal(2, 5), 1)
    least, most = torch.full((2,), 0.5, dtype=FLOAT64), torch.full((2,), 3.0, dtype=FLOAT64)
    for _ in range(300):
        search = lengthened(search, torch.tensor([1e6, -1e-6], dtype=FLOAT64), normal(2, 5), least, most)
    torch.testing.assert_close(search.log_length.exp(), torch.tensor([3.0, 0.5], dtype=FLOAT64))


def test_shares_fill_the_interval_evenly():
    shares = sorted(van_der_corput(index) for index in range(1, 64))
    assert shares == [index / 64 for index in range(1, 64)]


@pytest.mark.parametrize("dense", [False, True])
def test_unspread_undoes_spread(dense):
    scale = torch.tril(normal(3, 4, 4)) + 3 * torch.eye(4) if dense else normal(3, 4).exp()
    vectors = normal(3, 4, seed=1)
    torch.testing.assert_close(unspread(scale, spread(scale, vectors)), vectors)


def _density(**options: object) -> po.Density:
    return po.Density(lambda x: bent(x), {"x": (5,)}, batched=True, dtype=FLOAT64, **options)


def _run(method, **options):
    return po.infer(method, _density(), None, seed=2, progress=False, accelerate="off", **options)


@pytest.mark.parametrize("method", [ChEES(200, 200, 16), MAMS(200, 200, 16)])
def test_lengths_are_learnt(method):
    """Draws are worth more than those of a single step, and no chain depends on luck with the length."""
    q, _ = _run(method)
    short, _ = _run(dataclasses.replace(method, length=1e-6))
    values, less = (each.theta[..., 0] for each in (q, short))
    assert float(po.diagnostics.bulk_ess(values)) > 3 * float(po.diagnostics.bulk_ess(less))
    assert 0.5 * method.target_accept < float(q.statistics["accept"].mean()) < 1.0
    assert float(q.statistics["leapfrogs"].double().mean()) > 2


def test_unadjusted_draws_are_near_the_target_at_the_default():
    q, trace = _run(MCLMC(300, 300, 32))
    first = q.theta[..., 0] / float(SCALES[0])
    assert abs(float(first.square().mean()) - 1.0) < 0.05
    assert not bool(q.statistics["divergent"].any())
    coarse, _ = _run(MCLMC(300, 300, 32, energy_variance=1.0))
    assert abs(float((coarse.theta[..., 0] / float(SCALES[0])).square().mean()) - 1.0) > 0.1
    assert float(trace["step_size"][-1].mean()) < float(coarse.statistics["step_size"].mean())


@pytest.mark.parametrize("method", [ChEES(200, 400, 8, mass=AutoMass()), MAMS(200, 400, 8, mass=AutoMass())])
def test_correlations_are_learnt_with_the_mass(method):
    """Of correlations of 0.99, whose long axis takes ten times the steps of the short one."""
    precision = torch.linalg.inv(0.01 * torch.eye(5, dtype=FLOAT64) + 0.99)
    density = po.Density(lambda x: -0.5 * ((x @ precision) * x).sum(-1), {"x": (5,)}, batched=True, dtype=FLOAT64)
    counts = []
    for mass in (AutoMass(), DiagonalMass()):
        tried = dataclasses.replace(method, mass=mass)
        q, _ = po.infer(tried, density, None, seed=3, progress=False, accelerate="off")
        counts.append(float(q.statistics["leapfrogs"].double().mean()))
        error = q.theta.std() / po.diagnostics.bulk_ess(q.theta).min().sqrt()
        assert abs(float(q.theta[..., 0].mean())) < 5 * float(error)
    assert 2 * counts[0] < counts[1]


def test_chains_of_unit_mass_find_their_own_step_sizes():
    """Where the target is narrower, steps are smaller."""
    centres = torch.tensor([0.0, 50.0], dtype=FLOAT64)

    def log_density(x: Tensor) -> Tensor:
        away = x.unsqueeze(-2) - centres.unsqueeze(-1)
        heights = -0.5 * (away / torch.tensor([[1.0], [0.1]], dtype=FLOAT64)).square().sum(-1)
        return heights.logsumexp(-1)

    density = po.Density(log_density, {"x": (5,)}, batched=True, dtype=FLOAT64)
    start = torch.cat([torch.zeros(2, 5), torch.full((2, 5), 50.0)]).to(FLOAT64)
    method = MCLMC(50, 200, 4, mass=UnitMass())
    q, _ = po.infer(method, density, None, start=start, seed=3, progress=False, accelerate="off")
    wide, narrow = q.statistics["step_size"][:2, -1], q.statistics["step_size"][2:, -1]
    assert float(wide.min()) > 4 * float(narrow.max())


@pytest.mark.parametrize("method", [MAMS(4, 4, 2), MCLMC(4, 4, 2)])
def test_a_single_parameter_is_refused(method):
    density = po.Density(lambda x: -0.5 * x.square().sum(), {"x": (1,)})
    with pytest.raises(ValueError, match=r"needs two parameters or more. Got 1. Use NUTS."):
        po.infer(method, density, None, progress=False)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ChEES, {"length": 0.0}, "ChEES.length"),
        (MAMS, {"max_steps": 0}, "MAMS.max_steps"),
        (MCLMC, {"steps": 0}, "MCLMC.steps"),
        (MCLMC, {"energy_variance": -1.0}, "MCLMC.energy_variance"),
        (MCLMC, {"length": -1.0}, "MCLMC.length"),
    ],
)
def test_bad_settings_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize(("number", "value"), [("LONG", 1), ("MUCH", 0)])
@pytest.mark.parametrize("method", [ChEES(5, chains=4), MAMS(5, chains=4, max_steps=2), MCLMC(5, chains=4, steps=2)])
def test_compiled_runs_equal_plain_ones(method, monkeypatch, number, value):
    """Up to rounding, which the dynamics let grow: few transitions of small steps."""
    from posterity.methods.parts import sampler

    monkeypatch.setattr(sampler, number, value)
    method = dataclasses.replace(method, step_size=0.2, warmup=0, length=1.0)
    start = normal(4, 5)
    compiled, _ = po.infer(method, _density(), None, seed=2, progress=False, start=start)
    plain, _ = _run(method, start=start)
    torch.testing.assert_close(compiled.theta, plain.theta, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [ChEES, MAMS])
def test_no_step_is_longer_than_a_trajectory_of_given_length(kind):
    """Every step of such a length is accepted with more than the wanted probability."""
    q, trace = po.infer(kind(20, warmup=200, chains=4, length=0.2), _density(), None, seed=1, progress=False)
    assert bool((q.statistics["step_size"] <= 0.2).all())
    assert float(torch.as_tensor(trace["step_size"])[1:].max()) <= 0.2
