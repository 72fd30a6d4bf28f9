"""SGLD and SGHMC, preconditioned or not, against the exact laws of their steps on Gaussians."""

import math

import numpy as np
import pytest
import torch
from goldcases import load
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor, nn

import posterity as po
from posterity.likelihoods import Bernoulli, Gaussian
from posterity.methods import SGHMC, SGLD, RMSprop
from posterity.methods.sghmc import SGHMCState
from posterity.methods.sgld import SGLDState
from posterity.model import Batch
from posterity.priors import Normal

FLOAT64 = torch.float64
CURVATURES = load("mcmc_steps").inputs["h"]
CHAINS = 3000


def bowl(curvatures: Tensor = CURVATURES) -> po.Density:
    return po.Density(
        lambda x: -0.5 * (curvatures * x.square()).sum(-1),
        {"x": (len(curvatures),)},
        batched=True,
        dtype=FLOAT64,
        device=curvatures.device,
    )


def linear(scale: float, prior_scale: float, rows: int, columns: int, **options: object) -> po.Joint:
    net = nn.Linear(columns, 1, bias=False).double()
    return po.Joint(net, Gaussian(scale), Normal(prior_scale), num_data=rows, **options)


def gold_regression(**options: object) -> tuple[po.Joint, tuple[Tensor, Tensor]]:
    case = load("linear_regression")
    alpha, beta = case.inputs["alpha"], case.inputs["beta"]
    data = case.inputs["X"], case.inputs["y"].unsqueeze(1)
    return linear(beta**-0.5, alpha**-0.5, len(data[0]), 2, **options), data


def assert_law(draws: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Independent draws (n, d) have these moments of a normal, within five standard errors."""
    count, variances = len(draws), covariance.diagonal()
    assert bool(((draws.mean(0) - mean).abs() < 5 * (variances / count).sqrt()).all())
    error = ((torch.outer(variances, variances) + covariance.square()) / count).sqrt()
    centred = draws - mean
    assert bool(((centred.T @ centred / count - covariance).abs() < 5 * error).all())


def last(q: po.posteriors.Samples) -> Tensor:
    return q.theta[:, -1].to(q.joint.device)


def test_one_step_on_all_rows_is_the_gold_step_of_unadjusted_langevin() -> None:
    case = load("mcmc_steps")
    net = nn.Linear(2, 1, bias=False).double()
    joint = po.Joint(net, Bernoulli(), Normal(case.inputs["prior_std"]), num_data=10)
    batch = joint.check(Batch(case.inputs["X"], case.inputs["t"]))
    method, key = SGLD(1, 0, 1, step_size=case.inputs["gamma"], thin=1), po.Key(3)
    state, info = method.step(joint, method.init(joint, case.inputs["w"], key), batch, key)
    drawn = key.normal((1, 2), torch.float32).to(FLOAT64)
    case.check("ula_next", state.theta[0] + math.sqrt(2 * case.inputs["gamma"]) * (case.inputs["eps"] - drawn)[0])
    along = (case.inputs["w"] * case.expected["grad_V"]).sum() / 2
    torch.testing.assert_close(info["configurational_temperature"][0], along)


def test_sgld_has_the_gold_bias_of_unadjusted_langevin() -> None:
    case = load("mcmc_steps")
    gamma = case.inputs["gamma"]
    method = SGLD(draws=1, warmup=0, chains=CHAINS, step_size=gamma, thin=80)
    q, trace = po.infer(method, bowl(), None)
    wanted = case.expected["ula_stationary_var"]
    assert_law(last(q), torch.zeros(3, dtype=FLOAT64), wanted.diag())
    # The virial h x^2, averaged over the weights, is what the configurational temperature must show.
    shown = trace["configurational_temperature"][-1]
    at = (CURVATURES.cpu() * wanted.cpu()).mean()
    assert abs(float(shown.mean() - at)) < 5 * float(shown.std()) / math.sqrt(CHAINS)
    assert abs(float(shown.mean()) - 1.0) > 10 * float(shown.std()) / math.sqrt(CHAINS)


def test_sgld_on_all_rows_of_the_gold_regression() -> None:
    case = load("linear_regression")
    joint, data = gold_regression()
    precision, step = case.expected["posterior_precision"], 0.015
    method = SGLD(draws=1, warmup=0, chains=CHAINS, step_size=step, batch_size=None, thin=60)
    q, _ = po.infer(method, joint, data)
    wanted = torch.linalg.inv(precision - 0.5 * step * precision @ precision)
    assert_law(last(q), case.expected["posterior_mean"], wanted)


def sghmc_map(step: float, momentum: float, curvature: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, and what noise of the velocity and of the gradient do: (theta, v) -> A (theta, v) + b eps + c noise."""
    kick = np.array([[1.0, 0.0], [-step * curvature, 1.0]])
    drift = np.array([[1.0, step / 2], [0.0, 1.0]])
    fade = np.diag([1.0, momentum])
    noise = drift @ np.array([[0.0], [math.sqrt(1.0 - momentum**2)]])
    return drift @ fade @ drift @ kick, noise, drift @ fade @ drift @ np.array([[0.0], [step]])


@pytest.mark.parametrize(("step", "momentum"), [(0.1, 0.9), (0.6, 0.5), (0.85, 0.0), (0.85, 0.95)])
def test_sghmc_has_the_law_of_its_discrete_lyapunov_equation(step: float, momentum: float) -> None:
    """Of which the variances are those of the target for every step size; theta and v are not independent."""
    density, method = bowl(), SGHMC(1, 0, CHAINS, step_size=step, thin=1, momentum=momentum)
    state = method.init(density, density.initial(), po.Key(0))
    count = 60 if momentum < 0.9 else 250
    for index in range(count):
        state, info = method.step(density, state, None, po.Key(1).fold(index))
    for place, curvature in enumerate(CURVATURES.tolist()):
        matrix, noise, _ = sghmc_map(step, momentum, curvature)
        law = solve_discrete_lyapunov(matrix, noise @ noise.T)
        np.testing.assert_allclose(np.diag(law), [1.0 / curvature, 1.0], rtol=1e-9)
        drawn = torch.stack([state.theta[:, place], state.velocity[:, place]], dim=1)
        assert_law(drawn, torch.zeros(2, dtype=FLOAT64), torch.from_numpy(law).to(drawn))
    for name in ("kinetic_temperature", "configurational_temperature"):
        shown = info[name]
        assert abs(float(shown.mean()) - 1.0) < 5 * float(shown.std()) / math.sqrt(CHAINS), name


def test_a_step_beyond_the_bound_has_no_law() -> None:
    for curvature in CURVATURES.tolist():
        radius = [
            max(abs(np.linalg.eigvals(sghmc_map(f * 2 / curvature**0.5, 0.5, curvature)[0]))) for f in (0.99, 1.01)
        ]
        assert radius[0] < 1.0 < radius[1]


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_sghmc_samples_the_gold_regression_at_any_temperature(temperature: float) -> None:
    case = load("linear_regression")
    joint, data = gold_regression(tempering=po.Tempering.cold(temperature))
    size = 0.15 * temperature**0.5
    method = SGHMC(draws=1, warmup=0, chains=CHAINS, step_size=size, momentum=0.5, batch_size=None, thin=80)
    q, trace = po.infer(method, joint, data)
    assert_law(last(q), case.expected["posterior_mean"], temperature * case.expected["posterior_cov"])
    for name in ("kinetic_temperature", "configurational_temperature"):  # of the tempered density: 1 is right
        shown = trace[name][-1]
        assert abs(float(shown.mean()) - 1.0) < 5 * float(shown.std()) / math.sqrt(CHAINS), name


def test_chains_with_problems_of_their_own_sample_each_its_own() -> None:
    """Half of them cold: a tempering for each chain, and step sizes by a learning rate that follow it."""
    case = load("linear_regression")
    half = CHAINS // 2
    temperatures = torch.cat([torch.ones(half), torch.full((half,), 0.25)]).double()
    joint, data = gold_regression(tempering=po.Tempering.cold(temperatures))
    sizes = SGLD.step_size_for(0.03, joint)
    torch.testing.assert_close(sizes, 0.03 * temperatures / 7)
    method = SGLD(draws=1, warmup=0, chains=CHAINS, batch_size=None, thin=100)  # which takes this rate by itself
    q, trace = po.infer(method, joint, data)
    torch.testing.assert_close(trace["step_size"][0], sizes.cpu())
    step, precision = 0.03 / 7, case.expected["posterior_precision"]
    wanted = torch.linalg.inv(precision - 0.5 * step * precision @ precision)
    assert_law(last(q)[:half], case.expected["posterior_mean"], wanted)
    assert_law(last(q)[half:], case.expected["posterior_mean"], 0.25 * wanted)


ROOTS = torch.tensor([0.1, 1.5, 3.0], dtype=FLOAT64)  # the sizes of gradients, as if the warm-up had found them


def rested(method: SGLD | SGHMC, count: int) -> SGLDState | SGHMCState:
    """Chains after `count` steps on the bowl with a preconditioner that has learnt the sizes ROOTS."""
    density = bowl()
    squares = (ROOTS.square() * (1 - 0.9**5)).expand(CHAINS, -1).clone()
    state = method.init(density, density.initial(), po.Key(0))._replace(known=squares.clone(), step=5)
    for index in range(count):
        state, _ = method.step(density, state, None, po.Key(1).fold(index))
    assert torch.equal(state.known, squares)
    return state


def test_preconditioned_sgld_has_its_law_at_a_preconditioner_that_rests() -> None:
    step, rule = 0.1, RMSprop(decay=0.9, damping=0.5)
    state = rested(SGLD(1, 5, CHAINS, step_size=step, thin=1, preconditioner=rule), 120)
    wanted = 1.0 / (CURVATURES * (1.0 - 0.5 * step * CURVATURES / (ROOTS + 0.5)))
    assert_law(state.theta, torch.zeros(3, dtype=FLOAT64), wanted.diag())


def test_preconditioned_sghmc_has_the_law_of_its_lyapunov_equation() -> None:
    step, rule = 0.6, RMSprop(decay=0.9, damping=0.5)
    state = rested(SGHMC(1, 5, CHAINS, step_size=step, thin=1, preconditioner=rule, momentum=0.5), 80)
    for place, curvature in enumerate(CURVATURES.tolist()):
        inverse_mass = 1.0 / (float(ROOTS[place]) + 0.5)
        matrix, noise, _ = sghmc_map(step, 0.5, curvature * inverse_mass)  # of theta / sqrt(G)
        law = torch.from_numpy(solve_discrete_lyapunov(matrix, noise @ noise.T)).to(state.theta)
        drawn = torch.stack([state.theta[:, place] / inverse_mass**0.5, state.velocity[:, place]], dim=1)
        assert_law(drawn, torch.zeros(2, dtype=FLOAT64), law)


ROWS, EACH = 24, 6


def mean_problem() -> tuple[po.Joint, tuple[Tensor, Tensor], float, float, float]:
    """A Gaussian mean: joint, data, curvature, mean, and the variance of the gradient of a batch."""
    y = 1.0 + 2.0 * po.Key(5).normal((ROWS, 1), FLOAT64, "cpu")
    scale, prior = 2.0, 3.0
    joint = linear(scale, prior, ROWS, 1)
    curvature = ROWS / scale**2 + 1 / prior**2
    # The mean of EACH of the ROWS without replacement, times ROWS / scale^2.
    variance = (ROWS / scale**2) ** 2 * float(y.var()) / EACH * (1 - EACH / ROWS)
    rows = torch.ones(ROWS, 1, dtype=FLOAT64, device=joint.device), y.to(joint.device)
    return joint, rows, curvature, float(y.sum()) / scale**2 / curvature, variance


def law_after_passes(matrix: np.ndarray, noise: np.ndarray, kick: np.ndarray, variance: float) -> np.ndarray:
    """The stationary covariance at the ends of passes, whose gradient noises add up to zero."""
    count = ROWS // EACH
    powers = [np.linalg.matrix_power(matrix, count - 1 - index) for index in range(count)]
    fresh = sum(power @ noise @ noise.T @ power.T for power in powers)
    kicks = [power @ kick for power in powers]
    total = sum(kicks)
    heat = variance * (count * sum(k @ k.T for k in kicks) - total @ total.T) / (count - 1)
    return solve_discrete_lyapunov(np.linalg.matrix_power(matrix, count), fresh + heat)


@pytest.mark.parametrize("kind", ["sgld", "sghmc"])
def test_gradient_noise_of_batches_widens_the_law_as_predicted(kind: str) -> None:
    joint, rows, curvature, mean, variance = mean_problem()
    if kind == "sgld":
        size, passes = 0.12, 15
        method = SGLD(draws=1, warmup=0, chains=CHAINS, step_size=size, batch_size=EACH, thin=passes * ROWS // EACH)
        parts = np.array([[1 - size * curvature]]), np.array([[math.sqrt(2 * size)]]), np.array([[size]])
    else:
        size, passes = 0.3, 15
        method = SGHMC(
            draws=1, warmup=0, chains=CHAINS, step_size=size, batch_size=EACH, thin=passes * ROWS // EACH, momentum=0.6
        )
        parts = sghmc_map(size, 0.6, curvature)
    wide, exact = (float(law_after_passes(*parts, noise)[0, 0]) for noise in (variance, 0.0))
    q, _ = po.infer(method, joint, rows)
    at = torch.tensor([mean], dtype=FLOAT64)
    assert_law(last(q), at, torch.tensor([[wide]], dtype=FLOAT64))
    assert wide > 1.2 * exact  # so that the noise is seen


def test_independent_gradient_noise_widens_as_the_docstrings_say() -> None:
    step, curvature, variance = 0.1, 3.0, 40.0
    matrix, noise = np.array([[1 - step * curvature]]), np.array([[math.sqrt(2 * step)]])
    law = float(solve_discrete_lyapunov(matrix, noise @ noise.T + step**2 * variance)[0, 0])
    bowl_alone = 1 / (curvature * (1 - step * curvature / 2))
    assert law == pytest.approx(bowl_alone + step * variance / (2 * curvature * (1 - step * curvature / 2)))
    small, friction = 1e-3, 2.0
    matrix, noise, kick = sghmc_map(small, math.exp(-friction * small), curvature)
    law = solve_discrete_lyapunov(matrix, noise @ noise.T + variance * kick @ kick.T)
    assert law[1, 1] == pytest.approx(1 + small * variance / (2 * friction), rel=1e-3)
    assert law[0, 0] * curvature == pytest.approx(1 + small * variance / (2 * friction), rel=1e-3)


def two_modes() -> po.Density:
    """Two cusps at -2 and 2 with a barrier of 16 nats between them, and slopes that are bounded."""

    def log_density(x: Tensor) -> Tensor:
        left, right = (-8.0 * (0.01 + (x[:, 0] - at).square()).sqrt() for at in (-2.0, 2.0))
        return torch.logaddexp(left, right)

    return po.Density(log_density, {"x": (1,)}, batched=True, dtype=FLOAT64)


def test_cycles_visit_both_modes_where_constant_steps_stay_in_one() -> None:
    start = torch.full((20, 1), 2.0, dtype=FLOAT64)
    steady = SGLD(draws=100, warmup=0, chains=20, step_size=0.01, thin=20)
    q, _ = po.infer(steady, two_modes(), None, start=start)
    assert bool((q.theta > 0).all())
    cycles = po.optim.Cycles(length=200, explore=0.9)
    q, _ = po.infer(SGLD(draws=50, warmup=0, chains=20, step_size=0.8, thin=4, schedule=cycles), two_modes(), None)
    right = (q.theta > 0).double().mean((1, 2))
    assert q.theta.shape == (20, 50, 1)
    assert 0.2 < float(right.mean()) < 0.8
    assert float(((q.theta.abs() - 2.0).abs() < 1.0).double().mean()) > 0.99
    crossed = ((q.theta[:, 1:] > 0) != (q.theta[:, :-1] > 0)).any(1)
    assert float(crossed.double().mean()) > 0.5  # single chains do, not only all of them together
