"""Mean-field variational inference against optima and gradients in closed form or by quadrature."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from divergences import divergence_of
from goldcases import load
from torch import Tensor, nn

import posterity as po
from posterity.likelihoods import Bernoulli, Gaussian
from posterity.methods import (
    MAP,
    Flipout,
    LocalReparameterisation,
    MeanField,
    ScoreFunction,
    StickTheLanding,
    WeightSampling,
)
from posterity.methods.parts.gradients import Estimator, Factorised
from posterity.methods.parts.gradients.drawn_weights import score_gradients
from posterity.model import Batch
from posterity.numerics import Key
from posterity.optim import SGD, Adam, Cosine
from posterity.priors import FanIn, Normal

FLOAT64 = torch.float64


def linear(columns: int, outputs: int = 1) -> nn.Linear:
    net = nn.Linear(columns, outputs, bias=False).to(FLOAT64)
    nn.init.zeros_(net.weight)
    return net


class Tanh(nn.Module):
    """f(x) = w2 tanh(w1 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.zeros(1, dtype=FLOAT64))
        self.outer = nn.Parameter(torch.zeros(1, dtype=FLOAT64))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer * torch.tanh(self.inner * x)


def layers() -> nn.Module:
    """The same function, by layers that can be replaced."""
    return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False)).to(FLOAT64)


class Twice(nn.Module):
    """f(x) = w (w x): one weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False).to(FLOAT64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class Positions(nn.Module):
    """f(x) = w x_1 + w x_2 + ..., a convolution with several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 1, 1, bias=False).to(FLOAT64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unsqueeze(1)).sum(-1)


def averages(
    estimator: Estimator, joint: po.Joint, q: Factorised, batch: Batch, count: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Means of value, gradient in the mean and gradient in the scale of the ELBO, with their standard errors."""
    prior = divergence_of(joint, q, Key(0))
    found: list[list[Tensor]] = [[], [], []]
    memory: dict[str, Tensor] = {}
    for index in range(count):
        term = estimator.data_term(joint, q, batch, {}, memory, Key(1).fold(index))
        memory = term.memory
        found[0].append(term.value - prior.kl)
        pulls = term.divergence_grads or (prior.grad_mean, prior.grad_scale - 1.0 / q.scale)
        found[1].append(term.grad_mean - pulls[0])
        found[2].append(term.grad_scale - pulls[1])
    stacked = [torch.stack(each) for each in found]
    return [each.mean(0) for each in stacked], [each.std(0) / count**0.5 for each in stacked]


def within(found: Tensor, expected: object, error: Tensor) -> bool:
    return bool(((found - torch.as_tensor(expected, dtype=FLOAT64)).abs() <= 5.0 * error).all())


ESTIMATORS = [
    WeightSampling(),
    WeightSampling(draws=2, antithetic=True),
    LocalReparameterisation(draws=2),
    Flipout(draws=2),
    StickTheLanding(),
    ScoreFunction(draws=4),
]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)


@every_estimator
@pytest.mark.parametrize("network", [Tanh, layers], ids=["products", "layers"])
def test_value_and_gradients_of_the_tiny_network(estimator: Estimator, network: Callable[[], nn.Module]) -> None:
    case = load("tiny_bnn_elbo")
    given = case.inputs
    joint = po.Joint(network(), Gaussian(given["beta"] ** -0.5), Normal(given["alpha"] ** -0.5), num_data=4)
    batch = Batch(given["x"].unsqueeze(1), given["y"].unsqueeze(1))
    q = Factorised(given["q_mean"], given["q_std"], None)
    case.check("kl", divergence_of(joint, q, Key(0)).kl)
    means, errors = averages(estimator, joint, q, batch, 800)
    assert within(means[0], case.at("elbo"), errors[0])
    assert within(means[1], case.at("grad_mean"), errors[1])
    assert within(means[2], case.at("grad_std"), errors[2])


@every_estimator
def test_value_and_gradients_of_logistic_regression(estimator: Estimator) -> None:
    case = load("logistic_variational")
    given = case.inputs
    joint = po.Joint(linear(2), Bernoulli(), Normal(given["prior_std"]), num_data=10)
    batch = joint.check(Batch(given["X"], given["t"]))
    q = Factorised(given["probe_mean"], given["probe_std"], None)
    case.check("probe.kl", divergence_of(joint, q, Key(0)).kl)
    means, errors = averages(estimator, joint, q, batch, 800)
    for index, name in enumerate(("elbo", "grad_mean", "grad_std")):
        assert within(means[index], case.at(f"probe.{name}"), errors[index])


def expected_fit(first: float, second: float, target: float) -> float:
    """E log N(y; f, 1) from E f and E f^2."""
    return -0.5 * (target**2 - 2.0 * target * first + second) - 0.5 * math.log(2.0 * math.pi)


def data_fits(estimator: Estimator, net: nn.Module, x: Tensor, target: float, m: float, s: float) -> Tensor:
    """1,000 estimates of E log p, one row each, for one weight ~ N(m, s^2)."""
    joint = po.Joint(net, Gaussian(1.0), Normal(), num_data=1)
    batch = Batch(x.to(FLOAT64).expand(1, -1), torch.full((1, 1), target, dtype=FLOAT64))
    q = Factorised(torch.tensor([m], dtype=FLOAT64), torch.tensor([s], dtype=FLOAT64), None)
    return torch.stack([estimator.data_term(joint, q, batch, {}, {}, Key(2).fold(i)).value for i in range(1000)])


@pytest.mark.parametrize("estimator", [WeightSampling(), LocalReparameterisation(), Flipout()], ids=repr)
def test_a_weight_used_twice_is_drawn_once(estimator: Estimator) -> None:
    """Noise of its own in each use would give other moments, and is not what is done."""
    m, s, x, y = 0.8, 0.5, 1.3, 0.4
    fits = data_fits(estimator, Twice(), torch.tensor([x]), y, m, s)
    error = fits.std() / len(fits) ** 0.5
    fourth = m**4 + 6 * m**2 * s**2 + 3 * s**4
    assert within(fits.mean(), expected_fit((m**2 + s**2) * x, fourth * x**2, y), error)
    assert not within(fits.mean(), expected_fit(m**2 * x, (m**2 + s**2) ** 2 * x**2, y), error)


@pytest.mark.parametrize(
    ("estimator", "exact"),
    [
        (WeightSampling(), True),
        (LocalReparameterisation(), True),
        (LocalReparameterisation(approximate=True), False),
        (Flipout(), True),
    ],
    ids=repr,
)
def test_a_convolution_at_several_positions(estimator: Estimator, exact: bool) -> None:
    m, s, y = 0.2, 0.5, 0.4
    fits = data_fits(estimator, Positions(), torch.ones(8), y, m, s)
    error = fits.std() / len(fits) ** 0.5
    truth = expected_fit(m * 8.0, (m**2 + s**2) * 64.0, y)
    independent = expected_fit(m * 8.0, m**2 * 64.0 + s**2 * 8.0, y)
    assert within(fits.mean(), truth if exact else independent, error)
    assert not within(fits.mean(), independent if exact else truth, error)


def test_rows_with_noise_of_their_own_vary_less() -> None:
    joint = po.Joint(linear(1), Gaussian(1.0), Normal(), num_data=64)
    batch = Batch(torch.ones(64, 1, dtype=FLOAT64), torch.ones(64, 1, dtype=FLOAT64))
    q = Factorised(torch.zeros(1, dtype=FLOAT64), torch.ones(1, dtype=FLOAT64), None)
    spread = {}
    for estimator in (WeightSampling(), LocalReparameterisation(), Flipout()):
        terms = [estimator.data_term(joint, q, batch, {}, {}, Key(4).fold(i)).grad_mean.clone() for i in range(300)]
        spread[type(estimator).__name__] = float(torch.stack(terms).var())
    assert abs(spread["WeightSampling"] / 64**2 - 1.0) < 0.5  # the noise of one weight, 64 times
    assert abs(spread["LocalReparameterisation"] / 64 - 1.0) < 0.5  # 64 independent noises
    assert abs(spread["Flipout"] / 64 - 1.0) < 0.5  # of signs, times a square that is 1 on average


@pytest.mark.parametrize("row", [0, 1, 2])
def test_optimum_of_linear_regression(row: int) -> None:
    case = load("linear_meanfield_vi")
    given, wanted = case.inputs, case.expected["rows"][row]
    tempering = po.Tempering.tempered(wanted["eta"])
    noise, prior = Gaussian(given["beta"] ** -0.5), Normal(given["alpha"] ** -0.5)
    joint = po.Joint(linear(2), noise, prior, num_data=7, tempering=tempering)
    # With so many draws the noise of the last steps leaves means and scales within half a hundredth of a scale.
    method = MeanField(
        steps=800,
        batch_size=None,
        optimizer=Adam(0.05),
        schedule=Cosine(),
        estimator=LocalReparameterisation(128),
        initial_scales=FanIn(0.3),
    )
    q, trace = po.infer(method, joint, (given["X"], given["y"].unsqueeze(1)))
    assert float(((q.mean - wanted["mean"]) / wanted["std"]).abs().max()) < 0.03
    torch.testing.assert_close(q.variance.sqrt(), wanted["std"], rtol=0.03, atol=0.0)
    assert abs(float(trace["kl"][-1]) * 7 - wanted["kl_to_prior"]) < 0.05
    fit = trace["data_fit"][-300:] * 7
    assert abs(float(fit.mean()) - wanted["expected_log_lik"]) < 5.0 * float(fit.std()) / 300**0.5 + 0.02
    torch.testing.assert_close(trace["elbo"], trace["data_fit"] - trace["kl"])
    tempered = trace["kl"] - trace["data_fit"] / wanted["eta"]  # the loss, which is E log p / eta - KL
    torch.testing.assert_close(trace["loss"], tempered)


@pytest.mark.parametrize("name", ["eta_1", "eta_0.3"])
def test_optimum_of_logistic_regression(name: str) -> None:
    case = load("logistic_variational")
    given, wanted = case.inputs, case.expected["meanfield"][name]
    tempering = po.Tempering.tempered(wanted["eta"])
    joint = po.Joint(linear(2), Bernoulli(), Normal(given["prior_std"]), num_data=10, tempering=tempering)
    method = MeanField(
        steps=800, batch_size=None, optimizer=Adam(0.05), schedule=Cosine(), estimator=LocalReparameterisation(128)
    )
    q, trace = po.infer(method, joint, (given["X"], given["t"]))
    assert float(((q.mean - wanted["mean"]) / wanted["std"]).abs().max()) < 0.03
    torch.testing.assert_close(q.variance.sqrt(), wanted["std"], rtol=0.03, atol=0.0)
    assert abs(float(trace["kl"][-1]) * 10 - wanted["kl"]) < 0.06


def test_batches_are_scaled_to_all_data() -> None:
    case = load("minibatch_scaling")
    targets = (-2.0 * case.inputs["expected_log_lik_per_point"]).sqrt()  # log p = -y^2 / 2 at f = 0, but for a constant
    constant = -0.5 * torch.log(torch.tensor(2.0 * torch.pi, dtype=FLOAT64))
    joint = po.Joint(linear(1), Gaussian(1.0), Normal(), num_data=5)
    q = Factorised(torch.zeros(1, dtype=FLOAT64), torch.full((1,), 1e-12, dtype=FLOAT64), None)
    for row in case.expected["rows"]:
        values = []
        for chosen in itertools.combinations(range(5), int(row["M"])):
            batch = Batch(torch.ones(len(chosen), 1, dtype=FLOAT64), targets[list(chosen)].unsqueeze(1))
            term = WeightSampling().data_term(joint, q, batch, {}, {}, Key(0))
            values.append(term.value - 5 * constant - case.inputs["kl"])
        stacked = torch.stack(values)
        torch.testing.assert_close(float(stacked.mean()), row["mean_scaled"], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(float(stacked.var(unbiased=False)), row["var_scaled"], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["quadratic_w2", "log_sigmoid"])
def test_variance_of_pathwise_gradients(name: str) -> None:
    case = load("gradient_estimators")
    functions = {"quadratic_w2": torch.square, "log_sigmoid": nn.functional.logsigmoid}
    count = 200_000  # as so many independent weights: one call gives every single-sample gradient
    density = po.Density(lambda w: functions[name](w).sum(), {"w": (count,)}, dtype=FLOAT64)
    mean, scale = (torch.full((count,), case.inputs[key], dtype=FLOAT64) for key in ("mu", "sigma"))
    term = WeightSampling().data_term(density, Factorised(mean, scale, None), None, {}, {}, Key(3))  # type: ignore[arg-type]
    for grads, letter in ((term.grad_mean, "mu"), (term.grad_scale, "sigma")):
        assert within(grads.mean(), case.at(f"{name}.grad_{letter}"), grads.std() / count**0.5)
        assert abs(float(grads.var()) / case.at(f"{name}.var_pathwise_{letter}") - 1.0) < 0.03


@pytest.mark.parametrize("name", ["quadratic_w2", "log_sigmoid"])
def test_variance_of_score_function_gradients(name: str) -> None:
    case = load("gradient_estimators")
    functions = {"quadratic_w2": torch.square, "log_sigmoid": nn.functional.logsigmoid}
    mu, sigma = case.inputs["mu"], case.inputs["sigma"]
    noise = Key(3).normal((400_000, 1), FLOAT64)
    values = functions[name](mu + sigma * noise).squeeze(-1)
    for scores, letter in ((noise, "mu"), (noise.square() - 1.0, "sigma")):
        grads = score_gradients(values, scores, baseline=False) / sigma
        assert within(grads.mean(), case.at(f"{name}.grad_{letter}"), grads.std() / len(grads) ** 0.5)
        assert abs(float(grads.var()) / case.at(f"{name}.var_score_{letter}") - 1.0) < 0.03
    grads = score_gradients(values, noise, baseline=True) / sigma
    assert within(grads.mean(), case.at(f"{name}.grad_mu"), grads.std() / len(grads) ** 0.5)
    assert abs(float(grads.var()) / case.at(f"{name}.var_score_mu_optimal_baseline") - 1.0) < 0.03


def test_sticking_the_landing_has_no_noise_at_the_posterior() -> None:
    """Of rows that share no weight the posterior factorises; at it every draw gives a gradient of zero."""
    joint = po.Joint(linear(2), Gaussian(0.5), Normal(2.0), num_data=2, tempering=po.Tempering(0.7, 0.9))
    batch = Batch(torch.eye(2, dtype=FLOAT64), torch.tensor([[1.0], [-2.0]], dtype=FLOAT64))
    precision = 0.7 * 4.0 + 0.9 * 0.25
    mean = torch.tensor([1.0, -2.0], dtype=FLOAT64) * 0.7 * 4.0 / precision
    q = Factorised(mean, torch.full((2,), precision**-0.5, dtype=FLOAT64), None)
    for seed in range(3):
        term = StickTheLanding(draws=2).data_term(joint, q, batch, {}, {}, Key(seed))
        assert term.divergence_grads is not None
        torch.testing.assert_close(term.grad_mean, term.divergence_grads[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(term.grad_scale, term.divergence_grads[1], rtol=1e-10, atol=1e-12)
        assert float(term.grad_mean.abs().max()) > 0.01


def test_without_data_the_prior_is_the_optimum() -> None:
    """With rows of weight zero there is nothing but the KL, whose gradient is zero at the prior."""
    joint = po.Joint(linear(3), Gaussian(1.0), Normal(0.5), num_data=4)
    rows = torch.ones(4, 3, dtype=FLOAT64), torch.ones(4, 1, dtype=FLOAT64), torch.zeros(4, dtype=FLOAT64)
    method = MeanField(steps=20, batch_size=None, optimizer=SGD(0.1), initial_scales=FanIn(0.5 * 3**0.5))
    q, trace = po.infer(method, joint, rows)
    torch.testing.assert_close(q.mean, torch.zeros(3, dtype=FLOAT64), rtol=0.0, atol=0.0)
    torch.testing.assert_close(q.variance, torch.full((3,), 0.25, dtype=FLOAT64), rtol=1e-14, atol=0.0)
    assert float(trace["kl"].abs().max()) < 1e-12
    moved, _ = po.infer(MeanField(steps=600, batch_size=None, optimizer=Adam(0.02), schedule=Cosine()), joint, rows)
    torch.testing.assert_close(moved.variance.sqrt(), torch.full((3,), 0.5, dtype=FLOAT64), rtol=1e-3, atol=0.0)


def test_without_noise_it_is_map() -> None:
    """A cold posterior has no width: the means go where MAP goes."""
    x = Key(4).normal((30, 2), FLOAT64)
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=FLOAT64) + 0.1 * Key(5).normal((30, 1), FLOAT64)
    net = po.networks.MLP([2, 3, 1], activation="tanh").to(FLOAT64)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(0.5 * Key(6).fold(name).normal(tuple(parameter.shape), FLOAT64))
    joint = po.Joint(net, Gaussian(0.5), Normal(0.8), num_data=30, tempering=po.Tempering.cold(1e-12))
    settings = {"steps": 200, "batch_size": 10, "optimizer": Adam(0.01)}
    mode, _ = po.infer(MAP(**settings), joint, (x, y))
    q, _ = po.infer(MeanField(**settings, initial_scales=FanIn(1e-9)), joint, (x, y))
    torch.testing.assert_close(q.mean, mode.point(), rtol=1e-5, atol=1e-6)
