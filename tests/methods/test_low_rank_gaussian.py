"""LowRankGaussian: its gradient against autograd, the entropy, subsets, members, doors."""

import math

import pytest
import torch
from drawn import normal
from torch import Tensor

import posterity as po
from posterity.likelihoods import Gaussian
from posterity.methods import LowRankGaussian, low_rank_gaussian
from posterity.methods.low_rank_gaussian import _add_entropy_grad, _eliminated, _inner, _inverse_root, _split
from posterity.model import Batch
from posterity.networks import MLP
from posterity.numerics import Key
from posterity.optim import Adam
from posterity.precisions import Dense
from posterity.priors import Correlated, GroupLasso, HalfCauchy, Hierarchical, Laplace, Layerwise, Normal, Prior

FLOAT64 = torch.float64
RANK, WEIGHTS = 2, 13


def network() -> MLP:
    net = MLP([2, 3, 1], activation="tanh").to(FLOAT64)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(0.5 * normal(Key(3).fold(name), *parameter.shape))
    return net


def rows() -> Batch:
    x = normal(Key(1), 12, 2)
    return Batch(x, x.sum(-1, keepdim=True).sin())


def problem(prior: Prior, random: str = "*") -> po.Joint:
    return po.Joint(
        network(), Gaussian(0.4, learn=True), prior, num_data=12, tempering=po.Tempering(0.7, 1.3), random=random
    )


def draws_of(key: Key, draw: int, mean: Tensor, log_scale: Tensor, factor: Tensor, places: Tensor) -> Tensor:
    """theta at the noise that the method draws."""
    noise = key.fold(draw).normal((len(log_scale) + RANK,), torch.float32).to(FLOAT64)
    eps, z = noise[: len(log_scale)], noise[len(log_scale) :]
    return mean.index_add(0, places, log_scale.exp() * eps + factor.T @ z)


PRIORS = {
    "normal": Normal(0.7, mean=0.2),
    "laplace": Laplace(0.5),
    "both": Layerwise({"*.weight": Laplace(0.4), "*": Normal(1.0)}),
    "group lasso": GroupLasso(1.5),
    "shared scale": Hierarchical(Normal(1.0), HalfCauchy(1.0)),
}


@pytest.mark.parametrize("random", ["*", "2.*"])
@pytest.mark.parametrize("name", PRIORS)
def test_gradient_is_that_of_a_plain_elbo_at_the_same_noise(name: str, random: str) -> None:
    joint, batch, key = problem(PRIORS[name], random), rows(), Key(4)
    method = LowRankGaussian(rank=RANK, draws=3, optimizer=Adam())
    parameters = method.init(joint, joint.initial(), Key(0)).parameters
    parameters = parameters + 0.2 * normal(Key(5), *parameters.shape)
    places = torch.arange(WEIGHTS) if joint.random_indices is None else joint.random_indices
    grad, terms, _ = method._ascent(joint, parameters, batch, {}, key)

    leaf = parameters.clone().requires_grad_()
    mean, log_scale, factor = _split(leaf, joint.size, len(places))
    covariance = torch.diag((2.0 * log_scale).exp()) + factor.T @ factor
    entropy = 0.5 * torch.logdet(2.0 * math.pi * math.e * covariance)
    thetas = [draws_of(key, draw, mean, log_scale, factor, places) for draw in range(3)]
    fit = torch.stack([joint.log_likelihood(theta, batch) for theta in thetas]).mean()
    if joint.bound_prior.factorises:
        spread = torch.full((WEIGHTS,), 1e-5, dtype=FLOAT64).index_copy(0, places, covariance.diagonal().sqrt())
        weights, raw = joint.split(mean)
        cross_entropy = joint.bound_prior.cross_entropy(weights, spread) - joint.likelihood.free_log_prior(raw)
    else:
        cross_entropy = -torch.stack([joint.log_prior(theta) for theta in thetas]).mean()
    bound = 0.7 * fit - 1.3 * cross_entropy + entropy
    (wanted,) = torch.autograd.grad(bound, leaf)
    torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(terms.bound, bound.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(terms.data_fit, fit.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(terms.kl, (cross_entropy - entropy).detach(), rtol=1e-10, atol=1e-10)


def test_priors_of_independent_weights_are_told_from_others() -> None:
    """Of the others a cross-entropy of the marginals would leave out how weights go together."""
    layout = problem(Normal()).network.layout
    told = {name: prior.bound(layout).factorises for name, prior in PRIORS.items()}
    assert told == {"normal": True, "laplace": True, "both": True, "group lasso": False, "shared scale": False}
    assert not Correlated(torch.zeros(2), Dense(torch.eye(2))).factorises
    assert not Layerwise({"*.weight": GroupLasso(), "*": Normal()}).bound(layout).factorises


def test_cross_entropy_of_a_correlated_prior_is_unbiased() -> None:
    """From draws, although it has one for factorised Gaussians: over many it is the trace of both matrices."""
    root = normal(Key(8), WEIGHTS, WEIGHTS)
    matrix = root @ root.T + torch.eye(WEIGHTS, dtype=FLOAT64)
    joint = po.Joint(network(), Gaussian(0.4), Correlated(torch.zeros(WEIGHTS, dtype=FLOAT64), Dense(matrix)), 12)
    method = LowRankGaussian(rank=RANK, draws=500, optimizer=Adam())
    parameters = method.init(joint, joint.initial(), Key(0)).parameters
    mean, log_scale, factor = _split(parameters, joint.size, WEIGHTS)
    covariance = torch.diag((2.0 * log_scale).exp()) + factor.T @ factor
    _, terms, _ = method._ascent(joint, parameters, rows(), {}, Key(4))
    entropy = 0.5 * torch.logdet(2.0 * math.pi * math.e * covariance)
    wanted = 0.5 * torch.trace(matrix @ covariance) - joint.log_prior(mean) - entropy
    slope = matrix @ mean  # variance of (w - m)^T Lambda (w - m) / 2 + slope^T (w - m)
    spread = 0.5 * torch.trace(matrix @ covariance @ matrix @ covariance) + slope @ covariance @ slope
    assert abs(float(terms.kl - wanted)) < 5.0 * float(spread / 500) ** 0.5


@pytest.mark.parametrize("chunk", [1 << 18, 12])
@pytest.mark.parametrize("ratio", [1e-4, 1.0, 1e4])
def test_entropy_where_own_and_shared_variances_differ_by_much(
    ratio: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights after the other, or all at once; against singular values, since the whole matrix has no digits."""
    monkeypatch.setattr(low_rank_gaussian, "chunk_size", lambda *_: chunk)
    factor = ratio * normal(Key(6), 2, 3, 5)
    scale = normal(Key(6).fold("s"), 2, 5).exp()
    covariance = torch.diag_embed(scale.square()) + factor.mT @ factor
    inner, marginal = _inner(scale, factor)
    torch.testing.assert_close(marginal, covariance.diagonal(dim1=-2, dim2=-1).sqrt())
    left, values, right = torch.linalg.svd(factor / scale.unsqueeze(-2), full_matrices=False)
    squares = values.square()
    torch.testing.assert_close(torch.logdet(inner), squares.log1p().sum(-1), rtol=1e-9, atol=1e-9)
    grads = torch.ones(2, 5, dtype=FLOAT64), torch.ones(2, 3, 5, dtype=FLOAT64)
    inverse, log_root = _inverse_root(inner)
    torch.testing.assert_close(log_root, 0.5 * squares.log1p().sum(-1), rtol=1e-9, atol=1e-9)
    for mine, known in zip(_eliminated(inner), (inverse, log_root), strict=True):
        torch.testing.assert_close(mine, known, rtol=1e-9, atol=1e-9)
    _add_entropy_grad(inverse, scale, factor, *grads)
    own = 1.0 - ((squares / (1.0 + squares)).unsqueeze(-1) * right.square()).sum(-2)  # scale^2 diag(covariance^-1)
    shared = left * (values / (1.0 + squares)).unsqueeze(-2) @ right / scale.unsqueeze(-2)  # factor covariance^-1
    torch.testing.assert_close(grads[0], 1.0 + own, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads[1], 1.0 + shared, rtol=1e-9, atol=1e-9)


def test_subsets_keep_the_other_weights_as_points() -> None:
    joint, batch = problem(Normal(), "2.*"), rows()
    q, _ = po.infer(LowRankGaussian(rank=2, steps=20), joint, (batch.inputs, batch.targets))
    assert q.precision.size == 4
    assert torch.equal(q.sample(3, Key(0))[:, :9], q.mean[:9].expand(3, -1))
    assert not torch.equal(q.mean[:9], joint.initial()[:9])
    assert q.joint.likelihood.num_free == 0


def test_samples_have_the_covariance_that_is_stated() -> None:
    joint, batch = problem(Normal()), rows()
    q, _ = po.infer(LowRankGaussian(rank=2, steps=30, optimizer=Adam(0.05)), joint, (batch.inputs, batch.targets))
    count = 20_000
    away = q.sample(count, Key(2)) - q.mean
    wanted = q.precision.covariance()
    variances = wanted.diagonal()
    error = ((variances.unsqueeze(0) * variances.unsqueeze(1) + wanted.square()) / count).sqrt()
    assert bool(((away.T @ away / count - wanted).abs() < 5.0 * error).all())
    assert float((wanted - torch.diag(variances)).abs().max()) > 1e-3


def test_memory_is_told_and_grows_with_the_rank() -> None:
    joint, batch = problem(Normal()), rows()
    data = po.as_data((batch.inputs, batch.targets))
    small, large = (LowRankGaussian(rank=rank, optimizer=Adam()).footprint(joint, data).parts for rank in (1, 5))
    assert large["means, scales and factor"] - small["means, scales and factor"] == 4 * WEIGHTS * 8
    assert large["optimiser"] - small["optimiser"] == 2 * 4 * WEIGHTS * 8
    assert "rank 5 over 13 weights" in LowRankGaussian(rank=5, optimizer=Adam()).footprint(joint, data).words


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"LowRankGaussian\.rank must be a positive whole number \(of rank 0 it is MeanField\)\. Got 0"),
        ({"rank": 2.0}, r"LowRankGaussian\.rank must be"),
        ({"steps": 0}, r"LowRankGaussian\.steps must be"),
        ({"draws": -1}, r"LowRankGaussian\.draws must be"),
        ({"batch_size": 0}, r"LowRankGaussian\.batch_size must be"),
        ({"optimizer": Adam}, r"LowRankGaussian\.optimizer must be of kind Optimizer"),
        ({"initial_scales": 0.1}, r"LowRankGaussian\.initial_scales must be of kind ScaleRule"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        LowRankGaussian(**settings)


def test_a_rank_above_the_number_of_random_weights_is_refused() -> None:
    batch = rows()
    with pytest.raises(ValueError, match=r"at most the number of random weights, 4\. Got 5\. Use a smaller rank"):
        po.infer(LowRankGaussian(rank=5), problem(Normal(), "2.*"), (batch.inputs, batch.targets))
