"""The evidence lower bound: against exact evidences, gold numbers and estimates by other routes."""

import dataclasses
import math
from importlib import import_module

import pytest
import torch
from contracts.cases import classification, labels, linear_regression, network, numbers
from goldcases import load
from torch import nn

import posterity as po
from posterity.curvature import Diagonal as DiagonalStructure
from posterity.curvature import Full, Kronecker
from posterity.errors import BadData
from posterity.evidence import Elbo, elbo
from posterity.likelihoods import Categorical, Gaussian
from posterity.methods import MAP, Conjugate, Laplace
from posterity.numerics import Key
from posterity.posteriors import Gaussian as Normally
from posterity.posteriors import Linearized
from posterity.posteriors import samples as pointwise
from posterity.precisions import Dense, Diagonal
from posterity.priors import Correlated, GroupLasso, HalfCauchy, Hierarchical, Layerwise, Normal, StudentT
from posterity.priors import Laplace as LaplacePrior

FLOAT64 = torch.float64


pieces = import_module("posterity.evidence.elbo")  # the function has its name in the package


def linear(case, tempering=None):
    joint = po.Joint(
        nn.Linear(2, 1, bias=False, dtype=FLOAT64),
        Gaussian(case.inputs["beta"] ** -0.5),
        Normal(case.inputs["alpha"] ** -0.5),
        7,
        tempering or po.Tempering.bayes(),
    )
    return joint, (case.inputs["X"], case.inputs["y"].unsqueeze(1))


class Tiny(nn.Module):
    """f(x) = w2 tanh(w1 x)."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2, dtype=FLOAT64))

    def forward(self, x):
        return self.weights[1] * torch.tanh(self.weights[0] * x)


def tiny(prior=None):
    case = load("tiny_bnn_elbo")
    joint = po.Joint(Tiny(), Gaussian(case.inputs["beta"] ** -0.5), prior or Normal(case.inputs["alpha"] ** -0.5), 4)
    q = Normally(joint, case.inputs["q_mean"], Diagonal(case.inputs["q_std"] ** -2))
    return case, q, (case.inputs["x"].unsqueeze(1), case.inputs["y"].unsqueeze(1))


def close(value, expected, standard_error):
    assert standard_error > 0
    assert abs(value - expected) < 5 * standard_error


def test_the_exact_posterior_has_the_log_evidence_for_its_bound():
    case = load("linear_regression")
    joint, rows = linear(case)
    of = elbo(po.infer(Conjugate(), joint, rows)[0], rows)
    case.check("log_evidence", of.elbo)
    assert (of.bound, of.tempered) == pytest.approx((of.elbo, of.elbo), abs=1e-12)
    assert of.standard_error == of.data_fit_standard_error == of.kl_standard_error == 0.0


@pytest.mark.parametrize("row", range(3))
def test_gold_mean_field_of_a_linear_model(row):
    case = load("linear_meanfield_vi")
    at = f"rows.{row}."
    joint, rows = linear(case, po.Tempering.tempered(case.at(at + "eta")))
    q = Normally(joint, case.at(at + "mean"), Diagonal(case.at(at + "std") ** -2))
    of = elbo(q, rows)
    case.check(at + "expected_log_lik", of.data_fit)
    case.check(at + "kl_to_prior", of.kl)
    case.check(at + "elbo_eta", of.tempered)
    assert of.elbo < load("linear_regression").at("log_evidence")


@pytest.mark.parametrize("tempering", [po.Tempering.bayes(), po.Tempering.tempered(0.3), po.Tempering.cold(0.3)])
@pytest.mark.parametrize("random", ["*", "*.weight"])
def test_the_bound_is_tight_at_the_exact_tempered_posterior(tempering, random):
    """With points, too, whose log prior density neither of them has."""
    joint = dataclasses.replace(linear_regression(FLOAT64), tempering=tempering, random=random)
    q, _ = po.infer(Conjugate(), joint, numbers(FLOAT64))
    of = elbo(q, numbers(FLOAT64))
    assert of.bound == pytest.approx(float(q.log_evidence), abs=1e-8)
    # Every other Gaussian is below, by its divergence from the posterior.
    narrow = Normally(joint, q.gaussian.mean, Dense(4.0 * torch.linalg.inv(q.gaussian.precision.covariance())))
    gap = 0.5 * narrow.precision.size * (0.25 - 1 + math.log(4))
    assert elbo(narrow, numbers(FLOAT64)).bound == pytest.approx(float(q.log_evidence) - gap, abs=1e-8)


class Products(nn.Module):
    """The same linear model through operations that nobody knows to be linear in the weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=FLOAT64))

    def forward(self, x):
        return (x * self.weight).sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", range(5))
def test_no_gaussian_is_above_the_log_evidence(seed):
    case = load("linear_regression")
    joint, rows = linear(case)
    root = Key(seed).normal((2, 2), FLOAT64) * 3.0
    mean = case.at("posterior_mean") + 0.3 * Key(seed).fold("mean").normal((2,), FLOAT64)
    q = Normally(joint, mean, Dense(root @ root.T + torch.eye(2)))
    of = elbo(q, rows)
    assert of.standard_error == 0.0
    exact = torch.distributions.MultivariateNormal(case.at("posterior_mean"), case.at("posterior_cov"))
    gap = torch.distributions.kl_divergence(
        torch.distributions.MultivariateNormal(mean, q.precision.covariance()), exact
    )
    assert of.elbo == pytest.approx(case.at("log_evidence") - float(gap), abs=1e-8)
    drawn = elbo(dataclasses.replace(q, joint=dataclasses.replace(joint, network=Products())), rows, draws=4000)
    close(drawn.data_fit, of.data_fit, drawn.data_fit_standard_error)
    assert drawn.kl == pytest.approx(of.kl, abs=1e-10)
    assert drawn.elbo < case.at("log_evidence") + 5 * drawn.standard_error


def test_rows_with_weights_count_as_often():
    joint, (x, y) = linear_regression(FLOAT64), numbers(FLOAT64)
    weights = torch.arange(len(x)).remainder(3).to(FLOAT64)
    q, _ = po.infer(Conjugate(), joint, (x, y, weights))
    assert elbo(q, (x, y, weights)).elbo == pytest.approx(float(q.log_evidence), abs=1e-8)
    repeated = [tensor.repeat_interleave(weights.long(), 0) for tensor in (x, y)]
    again = Normally(dataclasses.replace(joint, num_data=len(repeated[0])), q.point(), q.gaussian.precision)
    assert elbo(again, tuple(repeated)).elbo == pytest.approx(float(q.log_evidence), abs=1e-8)


def test_gold_tiny_network():
    case, q, rows = tiny()
    of = elbo(q, rows, draws=20_000)
    case.check("kl", of.kl)
    assert of.kl_standard_error == 0.0
    close(of.data_fit, case.at("expected_log_lik"), of.data_fit_standard_error)
    close(of.elbo, case.at("elbo"), of.standard_error)
    assert of.elbo < case.at("log_evidence")


def test_the_standard_error_is_that_of_many_estimates():
    _, q, rows = tiny(Correlated(torch.zeros(2, dtype=FLOAT64), Dense(torch.eye(2))))
    q = dataclasses.replace(q, precision=Dense(torch.tensor([[12.0, 3.0], [3.0, 25.0]])))  # the KL varies, too
    many = [elbo(q, rows, draws=50, seed=seed) for seed in range(200)]
    errors = {"elbo": "standard_error", "data_fit": "data_fit_standard_error", "kl": "kl_standard_error"}
    for value, error in errors.items():
        stated = sum(getattr(of, error) for of in many) / 200
        seen = torch.tensor([getattr(of, value) for of in many]).std()
        assert stated == pytest.approx(float(seen), rel=5 / math.sqrt(400))


@pytest.mark.parametrize(
    "prior",
    [
        Normal(0.7, 0.1),
        LaplacePrior(0.5),
        StudentT(4.0, 0.5),
        GroupLasso(2.0),
        Layerwise({"*.weight": StudentT(4.0, 0.5), "*": Normal(0.3)}),
        Hierarchical(Normal(), HalfCauchy(0.5)),
    ],
    ids=lambda prior: type(prior).__name__,
)
@pytest.mark.parametrize("dense", [False, True])
def test_kl_against_draws(prior, dense):
    joint = po.Joint(network([3, 2], FLOAT64), Categorical(), prior, 20)
    root = torch.eye(8, dtype=FLOAT64) * 3.0 + (0.5 * Key(5).normal((8, 8), FLOAT64) if dense else 0.0)
    precision = Dense(root @ root.T) if dense else Diagonal((root @ root.T).diagonal())
    q = Normally(joint, joint.initial(), precision)
    of = elbo(q, labels(FLOAT64), draws=500)
    drawn = q.sample(4000, Key(9))
    ratios = q.log_density(drawn) - joint.log_prior(drawn)
    spread = math.hypot(float(ratios.std()) / math.sqrt(4000), of.kl_standard_error)
    close(of.kl, float(ratios.mean()), spread)
    known = (
        isinstance(prior, (Normal, LaplacePrior, StudentT, Layerwise)) if dense else not isinstance(prior, Hierarchical)
    )
    assert (of.kl_standard_error == 0.0) == known


@pytest.mark.parametrize("structure", [Full(), DiagonalStructure(), Kronecker()])
@pytest.mark.parametrize("dtype", [FLOAT64, torch.float32])
def test_any_laplace_posterior(structure, dtype):
    joint = classification(dtype)
    q, _ = po.infer(MAP(steps=300, batch_size=None), joint, labels(dtype))
    q, _ = po.infer(Laplace(structure=structure, tuning=None), joint, labels(dtype), start=q)
    of = elbo(q, labels(dtype), draws=200)
    joint = q.joint
    # Every draw by itself, and the KL from dense matrices.
    x, y = labels(dtype)
    thetas = q.sample(400, Key(77))
    fits = torch.stack([joint.likelihood.log_prob(joint.outputs(theta, x), y).sum() for theta in thetas]).double()
    close(of.data_fit, float(fits.mean()), math.hypot(of.data_fit_standard_error, float(fits.std()) / 20))
    covariance, mean = q.gaussian.precision.covariance(), q.point().double()
    ours = torch.distributions.MultivariateNormal(mean, covariance)
    prior = torch.distributions.MultivariateNormal(torch.zeros_like(mean), joint.prior.scale**2 * torch.eye(len(mean)))
    assert of.kl == pytest.approx(float(torch.distributions.kl_divergence(ours, prior)), rel=1e-6)
    assert isinstance(q, Linearized)
    assert elbo(q.gaussian, labels(dtype), draws=200) == of


def test_learnt_noise_is_the_fitted_one():
    x, y = numbers(FLOAT64)
    module = network([3, 4, 1], FLOAT64)
    joint = po.Joint(module, Gaussian(0.3, learn=True), Normal(0.7), 20)
    q, _ = po.infer(MAP(steps=300, batch_size=None), joint, (x, y))
    q, _ = po.infer(Laplace(tuning=None), joint, (x, y), start=q)
    of = elbo(q, (x, y), draws=300)
    likelihood = q.joint.likelihood
    fits = torch.stack([likelihood.log_prob(q.joint.outputs(w, x), y).sum() for w in q.sample(300, Key(5))])
    close(of.data_fit, float(fits.mean()), math.hypot(of.data_fit_standard_error, float(fits.std()) / 300**0.5))


def test_chunks_loaders_and_seeds():
    joint, rows = classification(FLOAT64), labels(FLOAT64)
    q = Normally(joint, joint.initial(), Diagonal(torch.full((joint.size,), 9.0)))
    of = elbo(q, rows, seed=3)
    assert elbo(q, rows, seed=3) == of
    assert elbo(q, rows, seed=4).data_fit != of.data_fit
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=6)
    chunked = elbo(q, loader, seed=3)
    assert chunked.data_fit == pytest.approx(of.data_fit, rel=1e-12)
    assert chunked.kl == of.kl


@pytest.mark.parametrize("together", [1, 15, 40])
def test_rows_and_draws_may_go_in_any_pieces(together, monkeypatch):
    joint, rows = classification(FLOAT64), labels(FLOAT64)
    q = Normally(joint, joint.initial(), Diagonal(torch.full((joint.size,), 9.0)))
    at_once = elbo(q, rows)
    monkeypatch.setattr(pointwise, "ROWS", 7)
    monkeypatch.setattr(pieces, "TOGETHER", together)
    in_pieces = elbo(q, rows)
    assert in_pieces.data_fit == pytest.approx(at_once.data_fit, rel=1e-12)
    assert in_pieces.standard_error == pytest.approx(at_once.standard_error, rel=1e-9)


def test_draws_that_do_not_fit_together_differ(monkeypatch):
    _, q, rows = tiny()
    monkeypatch.setattr(pieces, "LARGE", 20)  # ten draws at a time
    of = elbo(q, rows, draws=4000)
    close(of.data_fit, load("tiny_bnn_elbo").at("expected_log_lik"), of.data_fit_standard_error)


def test_buffers_of_the_posterior_are_used():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    joint = po.Joint(module, Categorical(), Normal(), 20)
    carried = {**joint.network.buffers, "1.running_mean": torch.tensor([3.0, -2.0], dtype=FLOAT64)}
    q = Normally(joint, joint.initial(), Diagonal(torch.full((joint.size,), 1e12)), carried)
    x, y = labels(FLOAT64)
    expected = joint.likelihood.log_prob(joint.outputs(q.mean, x, carried), y).sum()
    other = joint.likelihood.log_prob(joint.outputs(q.mean, x), y).sum()
    assert elbo(q, (x, y)).data_fit == pytest.approx(float(expected), abs=1e-3)
    assert abs(float(expected - other)) > 1.0


def test_a_density():
    density = po.Density(lambda w: -0.5 * w.square().sum() - math.log(2 * math.pi), {"w": (2,)}, dtype=FLOAT64)
    q = Normally(density, torch.tensor([0.5, 0.0], dtype=FLOAT64), Diagonal(torch.tensor([4.0, 1.0])))
    of = elbo(q, None, draws=4000)
    exact = -0.5 * (0.25 + 0.25 - 1 + math.log(4))  # minus KL(q || N(0, I))
    close(of.elbo, exact, of.standard_error)


def test_per_datum_and_tempered_standard_errors():
    of = Elbo(-20.0, 8.0, 3.0, 4, po.Tempering.tempered(0.5), (4.0, 1.0, 0.5))
    one = of.per_datum
    assert (one.elbo, one.data_fit, one.kl, one.tempered) == (-7.0, -5.0, 2.0, -6.0)
    assert one.standard_error == pytest.approx(of.standard_error / 4)
    assert of.standard_error == pytest.approx(math.sqrt(4 + 1 - 1))
    assert of.tempered_standard_error == pytest.approx(math.sqrt(4 + 0.25 - 0.5))
    assert of.bound == -40 - 8  # 2 data_fit - kl - entropy + entropy
    assert of.bound_standard_error == pytest.approx(math.sqrt(16 + 1 - 2))


def test_doors():
    joint, rows = classification(FLOAT64), labels(FLOAT64)
    q = Normally(joint, joint.initial(), Diagonal(torch.ones(joint.size)))
    with pytest.raises(ValueError, match="at least 2"):
        elbo(q, rows, draws=1)
    with pytest.raises(BadData, match="num_data is 20 but the data have 5 rows"):
        elbo(q, tuple(tensor[:5] for tensor in rows))
    with pytest.raises(BadData, match="without a member axis"):
        elbo(q, po.as_data(tuple(tensor.expand(2, *tensor.shape) for tensor in rows), per_member=True))
    point, _ = po.infer(MAP(steps=1), joint, rows)
    with pytest.raises(TypeError, match=r"Got 'Point'\. Use that of Laplace.*mixture's"):
        elbo(point, rows)
    with pytest.raises(TypeError, match="Point has no density"):
        point.log_density(torch.zeros(1, joint.size))
    both = Normally(joint, joint.initial().expand(2, -1), Diagonal(torch.ones(2, joint.size)))
    with pytest.raises(TypeError, match="2 separate posteriors"):
        elbo(both, rows)
