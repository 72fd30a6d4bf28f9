"""Laplace in function space: where rows are fewer than weights, `Full` works by the Gram matrix of the Jacobians."""

import math
from dataclasses import replace

import drawn
import pytest
import torch
from torch import Tensor, nn

import posterity as po
from posterity.curvature import Full, GaussNewton
from posterity.methods import AllWeights, Laplace, LastLayer
from posterity.model import Batch, Joint
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Linearized, Point
from posterity.precisions import Dense, LowRank, low_rank

FLOAT64 = torch.float64


class Words(nn.Module):
    """A mean of embeddings, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x).mean(1)))


def plain(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))


def vectors(count: int) -> Tensor:
    return drawn.normal(Key(count), count, 4)


def pictures(count: int) -> Tensor:
    return drawn.normal(Key(count), count, 1, 4, 4)


def tokens(count: int) -> Tensor:
    return (9 * drawn.uniform(Key(count), count, 6)).long()


NETWORKS = {"plain": (plain, vectors), "images": (images, pictures), "words": (Words, tokens)}
PRIORS = {
    "one scale": po.priors.Normal(scale=0.7),
    "by layer": po.priors.Layerwise({"*weight": po.priors.Normal(0.4), "*": po.priors.Normal(1.3)}),
}


def fitted(name: str, likelihood: object, prior: object, dtype: torch.dtype = FLOAT64, rows: int = 8) -> Linearized:
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    x = inputs(rows)
    x = x.to(dtype) if x.is_floating_point() else x
    y = drawn.normal(Key(1), rows, 3).to(dtype)
    y = y.argmax(1) if isinstance(likelihood, po.likelihoods.Categorical) else y
    joint = Joint(make().to(dtype), likelihood, prior, num_data=rows)
    method = Laplace(structure=Full(), subset=AllWeights(), tuning=None, batch_size=3)
    q, _ = po.infer(method, joint, (x, y))
    assert isinstance(q, Linearized)
    assert isinstance(q.gaussian.precision, LowRank)
    return q


def in_weights(q: Linearized, rows: Tensor) -> Linearized:
    """The same posterior from the whole matrix of all weights."""
    assert isinstance(q.joint, Joint)
    mean = q.gaussian.mean
    fake = (
        torch.zeros(len(rows), dtype=torch.int64)
        if q.joint.likelihood.link == "softmax"
        else mean.new_zeros(len(rows), 3)
    )
    matrix = GaussNewton().matrix(q.joint, mean, Batch(rows, fake), None)
    prior = q.joint.bound_prior.precision(mean.double())
    return Linearized(q.joint, Gaussian(q.joint, mean, Dense(matrix, prior)))


@pytest.mark.parametrize("large", [0, 1 << 30], ids=["in factors", "formed"])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    "likelihood", [po.likelihoods.Categorical(), po.likelihoods.Gaussian(scale=0.3)], ids=["labels", "numbers"]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_posterior_of_all_weights(
    name: str, likelihood: object, prior: str, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "LARGE", large)
    q = fitted(name, likelihood, PRIORS[prior])
    inputs = NETWORKS[name][1]
    other, x = in_weights(q, inputs(8)), inputs(5)
    near = {"rtol": 1e-9, "atol": 1e-10}
    for marginal in (False, True):
        for mine, theirs in zip(
            q.output_moments(x, marginal=marginal), other.output_moments(x, marginal=marginal), strict=True
        ):
            assert torch.allclose(mine, theirs, **near)
    assert torch.allclose(q.joint_output_moments(x)[1], other.joint_output_moments(x)[1], **near)
    assert torch.allclose(q.gaussian.variance, other.gaussian.variance, **near)
    mine, theirs = q.gaussian.precision, other.gaussian.precision
    assert float(mine.logdet) == pytest.approx(float(theirs.logdet), abs=1e-8)
    assert q.log_evidence is not None
    assert q.gaussian.data_terms is not None
    log_joint = float(q.gaussian.data_terms[0] + q.joint.log_prior(q.gaussian.mean))
    expected = log_joint + 0.5 * mine.size * math.log(2 * math.pi) - 0.5 * float(theirs.logdet)
    assert float(q.log_evidence) == pytest.approx(expected, abs=1e-8)
    assert torch.allclose(q.predict(x).mean, other.predict(x).mean, **near)
    assert torch.allclose(q.predict(x).epistemic, other.predict(x).epistemic, **near)


def test_a_linear_network_is_a_gaussian_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "LARGE", 0)
    x, new, y = vectors(3), vectors(6), drawn.normal(Key(2), 3, 1)
    joint = Joint(nn.Linear(4, 1).double(), po.likelihoods.Gaussian(scale=0.2), po.priors.Normal(scale=1.5), num_data=3)
    kernel = lambda a, b: 1.5**2 * (a @ b.T + 1.0)  # noqa: E731
    noisy = kernel(x, x) + 0.2**2 * torch.eye(3, dtype=FLOAT64)
    across = torch.linalg.solve(noisy, kernel(x, new))
    mode = 1.5**2 * torch.cat([x, torch.ones(3, 1)], 1).T @ torch.linalg.solve(noisy, y)
    start = Point(joint, mode.squeeze(1))
    q, _ = po.infer(Laplace(structure=Full(), tuning=None), joint, (x, y), start=start)
    mean, covariance = q.joint_output_moments(new)
    assert torch.allclose(mean, across.T @ y, atol=1e-9)
    assert torch.allclose(covariance, kernel(new, new) - kernel(new, x) @ across, atol=1e-9)
    density = torch.distributions.MultivariateNormal(torch.zeros(3, dtype=FLOAT64), noisy).log_prob(y.squeeze(1))
    assert float(q.log_evidence) == pytest.approx(float(density), abs=1e-8)


@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
def test_digits_that_cancel_are_found_by_the_formed_jacobian(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood = po.likelihoods.Gaussian(scale=scale)
    formed = fitted("plain", likelihood, PRIORS["one scale"])
    x = torch.cat([vectors(8), vectors(4)])  # the rows of the fit, whose variance is that of the noise
    expected = formed.output_moments(x)[1]
    monkeypatch.setattr(low_rank, "LARGE", 0)
    covariance, marginal = formed.output_moments(x)[1], formed.output_moments(x, marginal=True)[1]
    assert torch.allclose(covariance, expected, rtol=1e-7, atol=0)
    assert torch.allclose(marginal, expected.diagonal(dim1=1, dim2=2), rtol=1e-7, atol=0)
    assert bool((marginal > 0).all())


def test_float32_networks_keep_the_digits_of_their_jacobians(monkeypatch: pytest.MonkeyPatch) -> None:
    q = fitted("plain", po.likelihoods.Gaussian(scale=0.03), PRIORS["one scale"], torch.float32)
    x = vectors(8).float()  # the rows of the fit: some 0.01 % of the prior's variance is left
    expected = q.output_moments(x)[1]
    monkeypatch.setattr(low_rank, "LARGE", 0)
    assert torch.allclose(q.output_moments(x)[1], expected, rtol=1e-6, atol=1e-9)
    gradient = vectors(2).float().requires_grad_()
    assert q.predict(gradient).variance.requires_grad


def test_it_is_saved_tuned_and_continued(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "LARGE", 0)
    rows = vectors(8), drawn.normal(Key(1), 8, 3)
    joint = Joint(plain().double(), po.likelihoods.Gaussian(scale=0.3), po.priors.Normal(scale=0.7), num_data=8)
    method = Laplace(structure=Full(), subset=AllWeights(), tuning=po.evidence.Evidence())
    q, _ = po.infer(method, joint, rows)
    assert isinstance(q.gaussian.precision, LowRank)
    q.save(tmp_path)
    loaded = po.load(tmp_path, plain().double())
    x = vectors(5)
    assert torch.equal(loaded.predict(x).variance, q.predict(x).variance)
    fixed, _ = po.infer(replace(method, tuning=None), q.joint, rows, start=q)  # at the scales that were tuned
    assert float(fixed.log_evidence) == pytest.approx(float(q.log_evidence), abs=1e-8)
    assert torch.allclose(fixed.predict(x).variance, q.predict(x).variance, rtol=1e-9)


def test_the_last_layer_alone_has_a_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "LARGE", 0)
    joint = Joint(plain().double(), po.likelihoods.Categorical(), po.priors.Normal(), num_data=3)
    labels = torch.tensor([0, 1, 2])
    q, _ = po.infer(Laplace(structure=Full(), subset=LastLayer(), tuning=None), joint, (vectors(3), labels))
    assert isinstance(q.gaussian.precision, LowRank)
    x = vectors(5)
    expected = Linearized(
        q.joint, replace(q.gaussian, precision=Dense(q.gaussian.precision._excess(), q.gaussian.precision.prior))
    )
    for mine, theirs in zip(q.output_moments(x), expected.output_moments(x), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)
