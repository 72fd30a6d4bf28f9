"""MAP at its defaults reaches the mode, and says how far it is where it does not."""

import logging

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.evidence import PriorScale
from posterity.inference import Callback
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from posterity.methods import MAP, SWAG, Ensemble, Laplace, OnlineLaplace, VariationalEM
from posterity.model.data import as_data
from posterity.networks import MLP
from posterity.optim import LBFGS, SGD, Adam, Constant, Cosine
from posterity.priors import Laplace as LaplacePrior
from posterity.priors import Normal, StudentT

FLOAT64 = torch.float64


def rows(count: int, columns: int, scale: float = 1.0, dtype: torch.dtype = FLOAT64) -> tuple[Tensor, Tensor]:
    x = scale * po.Key(count).normal((count, columns), FLOAT64)
    y = x @ po.Key(1).normal((columns, 1), FLOAT64) / scale + 0.3 * po.Key(2).normal((count, 1), FLOAT64)
    return x.to(dtype), y.to(dtype)


def linear(columns: int, num_data: int, noise: float = 0.3, prior: float = 1.0, dtype: torch.dtype = FLOAT64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Linear(columns, 1).to(dtype)
    return po.Joint(module, Gaussian(scale=noise), Normal(scale=prior), num_data=num_data)


def mlp(sizes, likelihood, num_data, dtype=FLOAT64, activation="tanh", prior=None):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = MLP(sizes, activation=activation).to(dtype)
    return po.Joint(network, likelihood, prior or Normal(scale=1.0), num_data=num_data)


def run(method, joint, data, **options):
    return po.infer(method, joint, data, progress=False, **options)


def exact(x: Tensor, y: Tensor, noise: float, prior: float) -> tuple[Tensor, Tensor]:
    """Mode and precision of the linear model."""
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1).double()
    precision = design.T @ design / noise**2 + torch.eye(design.shape[1], dtype=FLOAT64) / prior**2
    return torch.linalg.solve(precision, design.T @ y.double() / noise**2)[:, 0], precision


@pytest.mark.parametrize(
    ("noise", "prior", "scale"), [(0.05, 5.0, 10.0), (5.0, 0.05, 0.1), (0.3, 1.0, 1.0), (0.05, 0.05, 10)]
)
def test_conjugate_regressions_are_solved(noise, prior, scale):
    x, y = rows(37, 4, scale)
    mode, precision = exact(x, y, noise, prior)
    q, trace = run(MAP(), linear(4, 37, noise, prior), (x, y))
    assert (q.point() - mode).abs().max() < 1e-8
    assert float(trace["mode_distance"]) < 1e-6
    data = x.float(), y.float()
    single, _ = run(MAP(), linear(4, 37, noise, prior, torch.float32), data)
    away = (single.point().double() - mode) / torch.linalg.inv(precision).diagonal().sqrt()
    assert away.abs().max() < 0.05


def newton(joint, data) -> Tensor:
    """The mode of a concave log density by Newton's method on its autodiff Hessian."""
    batch, theta = po.model.Batch(*data), joint.initial()
    for _ in range(15):
        grad = joint.value_and_grad(theta, batch)[1]
        hessian = torch.autograd.functional.hessian(lambda t: joint.log_density(t, batch), theta)
        theta = theta - torch.linalg.solve(hessian, grad)
    return theta


@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()])
@pytest.mark.parametrize("prior", [Normal(scale=2.0), StudentT(4.0, scale=1.0)])
def test_logistic_and_poisson_regressions_are_solved(likelihood, prior):
    x, y = rows(60, 3)
    y = (y > 0).double() if isinstance(likelihood, Bernoulli) else y.exp().round().clamp_max(30.0)
    joint = po.Joint(nn.Linear(3, 1).double(), likelihood, prior, num_data=60)
    q, trace = run(MAP(), joint, (x, y), start=torch.zeros(4, dtype=FLOAT64))
    assert (q.point() - newton(joint, (x, y))).abs().max() < 1e-8
    assert float(trace["mode_distance"]) < 1e-6


def test_learnt_noise_is_that_of_the_residuals():
    x, y = rows(50, 2)
    joint = po.Joint(nn.Linear(2, 1).double(), Gaussian(scale=3.0, learn=True), Normal(scale=1.0), num_data=50)
    q, trace = run(MAP(), joint, (x, y))
    scale = float(q.joint.likelihood.scale)
    mode, _ = exact(x, y, scale, 1.0)
    assert (q.point() - mode).abs().max() < 1e-7
    residuals = y - q.outputs(x, 1, po.Key(0))[0]
    assert scale == pytest.approx(float(residuals.square().mean().sqrt()), rel=1e-7)
    assert float(trace["mode_distance"]) < 1e-6


def test_a_network_comes_as_far_as_by_scipy():
    x, y = rows(40, 1)
    joint, batch = mlp([1, 12, 1], Gaussian(scale=0.3), 40), po.model.Batch(x, torch.sin(3.0 * y))
    q, trace = run(MAP(), joint, (batch.inputs, batch.targets))

    def negative(theta):
        value, grad, _ = joint.value_and_grad(torch.tensor(theta), batch)
        return -float(value), -grad.cpu().numpy()

    options = {"maxcor": 30, "maxfun": 3000, "maxiter": 3000, "ftol": 1e-12}
    other = minimize(negative, joint.initial().cpu().numpy(), jac=True, method="L-BFGS-B", options=options)
    assert -40 * float(trace["loss"][-1]) > -other.fun - 2.0  # modes differ by little
    assert float(trace["mode_distance"]) < 0.01
    assert len(trace["loss"]) < 2 * other.nfev + 100
    assert bool((trace["loss"].diff() <= 1e-9).all())
    value = float(joint.log_density(q.point(), batch))
    assert -40 * float(trace["loss"][-1]) == pytest.approx(value, rel=1e-9)


class _Kill(Callback):
    def after_step(self, run) -> None:
        if run.step == 9:
            raise RuntimeError("killed")


@pytest.mark.parametrize(
    "method", [MAP(25, optimizer=LBFGS()), Ensemble(MAP(25, optimizer=LBFGS()), 3)], ids=["alone", "members"]
)
def test_a_search_resumes_to_the_bit(method, tmp_path):
    x, y = rows(30, 2)
    joint, checkpoint = mlp([2, 5, 1], Gaussian(scale=0.3), 30), po.inference.Checkpoint(tmp_path, steps=4)
    whole, trace = run(method, joint, (x, y))
    with pytest.raises(RuntimeError, match="killed"):
        run(method, joint, (x, y), checkpoint=checkpoint, callbacks=[_Kill()])
    resumed, again = run(method, joint, (x, y), checkpoint=checkpoint)
    assert torch.equal(whole.point(), resumed.point())
    assert torch.equal(trace["loss"], again["loss"])
    assert torch.equal(trace["mode_distance"], again["mode_distance"])


def test_members_are_what_each_is_alone():
    x, y = rows(30, 2)
    joint = linear(2, 30)
    starts = po.Key(5).normal((3, 3), FLOAT64)
    q, trace = run(Ensemble(MAP(), 3), joint, (x, y), start=starts)
    for index, start in enumerate(starts):
        alone, own = run(MAP(), joint, (x, y), start=start)
        assert torch.allclose(q.posteriors[index].point(), alone.point(), atol=1e-9, rtol=0.0)
        assert float(trace["loss"][-1, index]) == pytest.approx(float(own["loss"][-1]), rel=1e-12)
    assert trace["mode_distance"].shape == (1, 3)
    assert float(trace["mode_distance"].max()) < 1e-6


def chosen(method, joint, data):
    return method.settled(joint, as_data(data))


def test_what_is_left_out_is_chosen_by_the_rule():
    x, y = rows(40, 2)
    joint = linear(2, 40)
    assert chosen(MAP(), joint, (x, y)) == MAP(3000, None, LBFGS(), Constant())
    assert chosen(MAP(steps=300), joint, (x, y)) == MAP(300, None, Adam(0.01), Cosine(0.1))
    assert chosen(MAP(300, 8, SGD(0.1)), joint, (x, y)) == MAP(300, 8, SGD(0.1), Constant())
    assert chosen(MAP(proximal=True), joint, (x, y)) == MAP(3000, None, Adam(0.01), Cosine(0.1), proximal=True)
    assert chosen(MAP(batch_size=8), joint, (x, y)) == MAP(3000, 8, Adam(0.01), Cosine(0.1))
    explicit = MAP(5, 8, Adam(), Cosine())
    assert chosen(explicit, joint, (x, y)) == explicit
    kinked = po.Joint(nn.Linear(2, 1).double(), Gaussian(scale=1.0), LaplacePrior(scale=1.0), num_data=40)
    normed = po.Joint(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)), Gaussian(scale=1.0), Normal(scale=1.0), 40)
    for other, data in ((kinked, (x, y)), (normed, (x, y)), (joint, DataLoader(TensorDataset(x, y), batch_size=10))):
        assert isinstance(chosen(MAP(), other, data).optimizer, Adam)
    many = torch.zeros(40_000, 1)
    large = po.Joint(MLP([1, 100, 100, 1]), Gaussian(scale=1.0), Normal(scale=1.0), num_data=40_000)
    assert chosen(MAP(), large, (many, many)) == MAP(20_000, 128, Adam(0.01 * (1e4 / 10401) ** 0.25), Cosine(0.1))


def test_a_density_is_searched():
    density = po.Density(lambda u: 7.0 * u - 2.0 * u.exp(), {"u": ()}, dtype=FLOAT64)
    q, trace = run(MAP(), density, None)
    assert float(q.point()) == pytest.approx(float(torch.tensor(3.5).log()), abs=1e-7)
    assert float(trace["mode_distance"]) < 1e-6


@pytest.mark.parametrize("batch_size", [None, 10])
def test_the_distance_is_the_true_one_for_a_linear_model(batch_size, caplog):
    x, y = rows(37, 4)
    mode, precision = exact(x, y, 0.3, 1.0)
    with caplog.at_level(logging.WARNING, logger="posterity"):
        q, trace = run(MAP(30, batch_size, Adam()), linear(4, 37), (x, y))
    away = q.point() - mode
    assert float(trace["mode_distance"]) == pytest.approx(float((away @ precision @ away / 5).sqrt()), rel=1e-8)
    assert trace.steps("mode_distance").tolist() == [30]
    assert len(trace["loss"]) == 30
    assert "MAP has not reached a mode" in caplog.text
    assert "more steps, such as 120" in caplog.text


def test_near_runs_are_silent(caplog):
    x, y = rows(37, 4)
    with caplog.at_level(logging.WARNING, logger="posterity"):
        run(MAP(), linear(4, 37), (x, y))
        run(MAP(500, None, Adam(0.05), Cosine()), linear(4, 37), (x, y))
    assert not caplog.records


def test_a_sample_of_rows_tells_near_from_far(caplog):
    """Few steps on many rows: the noise of the sample is not taken for a distance."""
    x, y = rows(6000, 3)
    mode, _ = exact(x, y, 0.3, 1.0)
    joint = linear(3, 6000)
    still = MAP(5, 100, SGD(1e-12))
    with caplog.at_level(logging.WARNING, logger="posterity"):
        _, near = run(still, joint, (x, y), start=mode)
    assert not caplog.records
    _, far = run(still, joint, (x, y), start=mode + 1.0)
    assert float(near["mode_distance"]) < 1.0
    assert float(far["mode_distance"]) > 100.0


def test_where_there_is_no_distance_the_log_says_why(caplog):
    x, y = rows(20, 2)
    joint = po.Joint(nn.Linear(2, 1).double(), Gaussian(scale=1.0), LaplacePrior(scale=1.0), num_data=20)
    with caplog.at_level(logging.INFO, logger="posterity"):
        _, trace = run(MAP(5), joint, (x, y))
    assert "mode_distance" not in trace
    assert "the distance to the mode is not known: the prior has kinks" in caplog.text


def test_many_classes_and_members_have_a_distance():
    x = po.Key(0).normal((60, 3), FLOAT64)
    joint = mlp([3, 16, 12], Categorical(), 60)
    q, trace = run(Ensemble(MAP(), 2), joint, (x, torch.arange(60) % 12))
    assert float(trace["mode_distance"].max()) < 0.01
    assert len(q.posteriors) == 2


@pytest.mark.parametrize(
    "method",
    [
        SWAG(MAP(optimizer=SGD(1e-4)), every=50, rank=2),
        OnlineLaplace(MAP(), rounds=2),
        VariationalEM(MAP(), PriorScale(), rounds=2),
        VariationalEM(Laplace(tuning=None), PriorScale(), rounds=2, fit=MAP()),
    ],
    ids=["swag", "online laplace", "em", "em of laplace"],
)
def test_methods_that_hold_a_fit_settle_it(method):
    x, y = rows(20, 1)
    settled = chosen(method, linear(1, 20), (x, y))
    fit = settled.expectation if isinstance(getattr(settled, "expectation", None), MAP) else settled.fit
    if isinstance(method, OnlineLaplace):  # rounds of a search
        assert isinstance(fit.optimizer, LBFGS)
        assert fit.steps == 100 * (method.rounds + 1)
        return
    assert (fit.steps, fit.batch_size) == (3000, None)
    assert isinstance(fit.optimizer, (Adam, SGD))


def test_a_fit_that_is_a_part_is_measured_once():
    x, y = rows(20, 1)
    _, trace = run(OnlineLaplace(MAP(steps=20), rounds=2), linear(1, 20), (x, y))
    assert len(trace["mode_distance"]) == 1  # once, at the last hyper-parameters
    assert len(trace["loss"]) == 20


def test_fits_between_rounds_are_not_searched():
    x, y = rows(20, 1)
    for method in (SWAG(MAP(optimizer=LBFGS())), OnlineLaplace(MAP(optimizer=LBFGS()))):
        with pytest.raises(ValueError, match="needs a fit by single steps"):
            run(method, linear(1, 20), (x, y))
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    with pytest.raises(po.errors.BadData, match="LBFGS needs the same rows"):
        run(MAP(optimizer=LBFGS()), linear(1, 20), loader)
