"""Every likelihood under every integrator: aleatoric and epistemic parts against brute-force Monte Carlo."""

from functools import cache

import pytest
import torch
from torch import Tensor

import posterity as po
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Heteroscedastic, Likelihood, Poisson, StudentT
from posterity.likelihoods import Probit as ProbitLink
from posterity.numerics.random import Key
from posterity.posteriors import default_integrator
from posterity.predictive import Exact, Integrator, LaplaceBridge, MonteCarlo, Probit, ProbitPhi, label_information

ROWS, DRAWS = 4, 20_000


def moments(*event: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    size = int(torch.tensor(event).prod())
    mean, root = (Key(3).fold(str(event)).fold(name) for name in ("mean", "root"))
    factor = scale * root.normal((ROWS, size, size), torch.float64, torch.get_default_device()) / size**0.5
    return mean.normal((ROWS, *event), torch.float64, torch.get_default_device()), factor @ factor.mT


@cache
def brute_force(likelihood: Likelihood, event: tuple[int, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Aleatoric and epistemic parts, and a standard error of either, from independent draws of the outputs."""
    mean, covariance = moments(*event, scale=scale)
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(covariance.shape[-1], dtype=torch.float64))
    noise = Key(77).normal((DRAWS, *covariance.shape[:2]), torch.float64, torch.get_default_device())
    outputs = mean + torch.einsum("nij,snj->sni", root, noise).reshape(DRAWS, *mean.shape)
    if likelihood.link in ("sigmoid", "probit", "softmax"):
        logs = likelihood.class_log_probs(outputs)
        entropies = -(logs.exp() * logs).sum(2)
        total = torch.special.entr(logs.exp().mean(0)).sum(1)
        return entropies.mean(0), total - entropies.mean(0), entropies.std(0) / DRAWS**0.5
    means, variances = likelihood.mean(outputs), likelihood.variance(outputs)
    squares = (means - means.mean(0)).square()
    error = (variances.std(0) + squares.std(0)) / DRAWS**0.5
    return variances.mean(0), squares.mean(0), error


REGRESSION: list[tuple[Likelihood, tuple[int, ...]]] = [
    (Gaussian(scale=0.5), (1,)),
    (Gaussian(scale=(0.5, 2.0)), (2,)),
    (Heteroscedastic(), (2,)),
    (StudentT(5.0, scale=0.7), (1,)),
    (Poisson(), (1,)),
]
CLASSES: list[tuple[Likelihood, tuple[int, ...]]] = [
    (Bernoulli(), (1,)),
    (Bernoulli(), (3,)),
    (ProbitLink(), (1,)),
    (ProbitLink(), (3,)),
    (Categorical(), (2,)),
    (Categorical(), (3,)),
    (Categorical(), (10,)),
    (Categorical(positions=1), (2, 3)),
    (Categorical(positions=2), (4, 2, 2)),
]


@pytest.mark.parametrize(("likelihood", "event"), REGRESSION, ids=str)
def test_variances_under_the_default_integrator(likelihood: Likelihood, event: tuple[int, ...]) -> None:
    mean, covariance = moments(*event, scale=0.5)
    integrator = default_integrator(likelihood, mean)
    if isinstance(integrator, MonteCarlo):
        integrator = MonteCarlo(10_000)
    pred = integrator(likelihood, mean, covariance, Key(0))
    aleatoric, epistemic, error = brute_force(likelihood, event, 0.5)
    assert bool(((pred.aleatoric - aleatoric).abs() <= 10.0 * error + 1e-12).all())
    assert bool(((pred.epistemic - epistemic).abs() <= 10.0 * error + 1e-12).all())
    torch.testing.assert_close(pred.aleatoric + pred.epistemic, pred.variance)


def integrators(likelihood: Likelihood, event: tuple[int, ...]) -> list[Integrator]:
    if likelihood.link == "sigmoid":
        return [Exact(), Probit(), ProbitPhi(), MonteCarlo(10_000)]
    if likelihood.link == "probit":
        return [Exact(), MonteCarlo(10_000)]
    few: list[Integrator] = [Exact()] if event[0] <= 3 else []
    return [*few, Probit(), LaplaceBridge(), LaplaceBridge(project=True), MonteCarlo(10_000)]


EVERY = [(a, b, c) for a, b in CLASSES for c in integrators(a, b)]


@pytest.mark.parametrize(("likelihood", "event", "integrator"), EVERY, ids=str)
def test_entropies_under_every_integrator(
    likelihood: Likelihood, event: tuple[int, ...], integrator: Integrator
) -> None:
    mean, covariance = moments(*event, scale=1.5)
    pred = integrator(likelihood, mean, covariance, Key(0))
    aleatoric, epistemic, error = brute_force(likelihood, event, 1.5)
    assert pred.aleatoric.shape == pred.epistemic.shape == pred.entropy.shape == epistemic.shape
    assert bool((pred.aleatoric >= 0).all())
    assert bool((pred.epistemic >= 0).all())
    torch.testing.assert_close(pred.aleatoric + pred.epistemic, pred.entropy)
    there = torch.minimum(
        epistemic, pred.entropy
    )  # no more than the entropy, which an approximation may have too small
    assert bool(((pred.epistemic - there).abs() <= 0.02 * epistemic + 5.0 * error).all())
    if isinstance(integrator, (Exact, MonteCarlo)):  # whose probabilities are right, so the rest of the entropy is
        assert bool(((pred.aleatoric - aleatoric).abs() <= 0.02 * epistemic + 10.0 * error).all())


@pytest.mark.parametrize("scale", [1e-4, 0.1, 3.0, 9.9, 10.1, 1e3])
def test_information_of_one_quantile(scale: float) -> None:
    mean = torch.tensor([[0.0], [1.0], [-8.0], [30.0]], dtype=torch.float64)
    grid = torch.linspace(-12.0, 12.0, 400_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * grid**2)
    weight = weight / weight.sum()
    probs = torch.special.ndtr(torch.stack([-(mean + scale * grid), mean + scale * grid]))
    wanted = torch.special.entr(probs @ weight).sum(0) - torch.special.entr(probs).sum(0) @ weight
    values = label_information(ProbitLink(), mean, torch.full((4, 1), scale**2, dtype=torch.float64))
    torch.testing.assert_close(values, wanted, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-4, 0.1, 3.0, 9.9, 10.1, 1e3])
def test_information_of_one_logit(scale: float) -> None:
    mean = torch.tensor([[0.0], [1.0], [-8.0], [30.0]], dtype=torch.float64)
    grid = torch.linspace(-12.0, 12.0, 400_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * grid**2)
    weight = weight / weight.sum()
    logits = mean + scale * grid  # (4, G)
    probs = torch.sigmoid(torch.stack([-logits, logits]))
    entropies = torch.special.entr(probs).sum(0) @ weight
    wanted = torch.special.entr(probs @ weight).sum(0) - entropies
    values = label_information(Bernoulli(), mean, torch.full((4, 1), scale**2, dtype=torch.float64))
    torch.testing.assert_close(values, wanted, rtol=1e-6, atol=1e-13)
    pair = torch.cat([torch.zeros_like(mean), mean], dim=1)  # the same label as two classes
    spread = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=torch.float64).repeat(4, 1, 1)  # their common part is nothing
    spread[:, 1, 1] += scale**2
    torch.testing.assert_close(label_information(Categorical(), pair, spread), wanted, rtol=1e-5, atol=1e-11)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize(
    "method",
    [po.methods.Laplace(tuning=None), po.methods.MeanField(steps=20, optimizer=po.optim.Adam())],
    ids=["L", "M"],
)
def test_default_predictions_split_their_entropy(method: po.inference.Method, classes: int) -> None:
    x = Key(0).normal((30, 2), torch.float64, torch.get_default_device())
    y = (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long() * (classes > 2)
    joint = po.Joint(torch.nn.Linear(2, classes).double(), Categorical(), po.priors.Normal(2.0), num_data=30)
    start, _ = po.infer(po.methods.MAP(steps=300, optimizer=po.optim.Adam(0.05)), joint, (x, y))
    q, _ = po.infer(method, joint, (x, y), start=start)
    some = 3.0 * x[:6]
    drawn = po.predictive.from_outputs(Categorical(), q.outputs(some, 8000, Key(5)))
    pred = q.predict(some, batch_size=4)
    tolerance = 0.1 if isinstance(q, po.posteriors.Linearized) else 0.6  # the latter by 100 draws
    torch.testing.assert_close(pred.epistemic, drawn.epistemic, rtol=tolerance, atol=2e-3)
    torch.testing.assert_close(pred.aleatoric + pred.epistemic, pred.entropy)
    torch.testing.assert_close(pred.rows(slice(2, 5)).epistemic, pred.epistemic[2:5])
    mixture = po.posteriors.Mixture([q, start]).predict(some)
    torch.testing.assert_close(mixture.aleatoric + mixture.epistemic, mixture.entropy)
    if isinstance(q, po.posteriors.Linearized):
        wanted = 0.5 * (pred.aleatoric + start.predict(some).entropy)
        torch.testing.assert_close(mixture.aleatoric, wanted)
