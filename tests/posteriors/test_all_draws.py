"""Predictions of chains use all their draws, whatever fits into memory."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from posterity.numerics.random import Key
from posterity.posteriors import Mixture, Point, Posterior, Samples
from posterity.posteriors.posterior import DRAWS

CHAINS, EACH, ROWS = 3, 250, 20
X = Key(1).normal((ROWS, 2), torch.float64, torch.get_default_device())


def chains(likelihood: Likelihood, outputs: int, seed: int = 0) -> Samples:
    joint = po.Joint(nn.Linear(2, outputs).double(), likelihood, po.priors.Normal(), num_data=ROWS)
    theta = Key(seed).fold("theta").normal((CHAINS, EACH, joint.size), torch.float64, torch.get_default_device())
    if likelihood.num_free:
        theta[..., joint.num_weights :] *= 0.1
    return Samples(joint, theta + torch.linspace(-1.0, 1.0, EACH, dtype=torch.float64).reshape(1, -1, 1))


def functions(q: Samples) -> Tensor:
    """Outputs of all draws, (C D, N, outputs), without the library."""
    theta = q.theta.flatten(0, 1).to(X.device)
    width = q.joint.network.layout.size // 3
    weight, bias = theta[:, : 2 * width].reshape(-1, width, 2), theta[:, 2 * width : 3 * width]
    return torch.einsum("soi,ni->sno", weight, X) + bias.unsqueeze(1)


@pytest.mark.parametrize(("likelihood", "outputs"), [(Categorical(), 4), (Categorical(), 2), (Bernoulli(), 1)])
@pytest.mark.parametrize("budget", [None, 1])
def test_class_probabilities_average_over_all_draws(likelihood: Likelihood, outputs: int, budget: int | None) -> None:
    q = chains(likelihood, outputs)
    logits = functions(q)
    logits = torch.cat([torch.zeros_like(logits), logits], -1) if outputs == 1 else logits
    each = logits.softmax(-1)
    pred = q.predict(X, memory_budget=budget, batch_size=7)
    torch.testing.assert_close(pred.probs, each.mean(0), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(pred.aleatoric, torch.special.entr(each).sum(-1).mean(0), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(pred.aleatoric + pred.epistemic, pred.entropy)
    labels = torch.zeros(ROWS, dtype=torch.long)
    kept = CHAINS * EACH if budget is None else DRAWS
    assert pred.draws is not None
    assert len(pred.draws) == kept
    if budget is None:
        torch.testing.assert_close(pred.expected_log_prob(labels), each[..., 0].log().mean(0))
        torch.testing.assert_close(pred.joint_log_prob(labels), each[..., 0].log().sum(1).logsumexp(0) - 6.6200732065)
    else:  # evenly spaced over chains and iterations
        torch.testing.assert_close(pred.draws.mean(0), each.mean(0), rtol=0.0, atol=0.1)


def test_draws_of_regression_are_all_kept() -> None:
    q = chains(Gaussian(scale=0.4, learn=True), 1)
    outputs, noise = functions(q), q.theta.flatten(0, 1)[:, -1].exp().to(X.device)
    y = X[:, :1]
    pred = q.predict(X)
    torch.testing.assert_close(pred.mean, outputs.mean(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(pred.epistemic, outputs.var(0, correction=0))
    each = torch.distributions.Normal(outputs, noise.reshape(-1, 1, 1)).log_prob(y).squeeze(-1)
    torch.testing.assert_close(pred.log_prob(y), each.logsumexp(0) - torch.tensor(float(len(each))).double().log())
    loader = DataLoader(TensorDataset(X), batch_size=6)
    torch.testing.assert_close(q.predict(loader).log_prob(y), pred.log_prob(y))


def test_what_does_not_fit_is_thinned_and_said(caplog: pytest.LogCaptureFixture) -> None:
    q = chains(Gaussian(scale=0.4), 1)
    budget = 300 * ROWS * 8
    for inputs in (X, DataLoader(TensorDataset(X), batch_size=6)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "posterity"):
            pred = q.predict(inputs, memory_budget=budget, batch_size=8)
        assert "of 750 draws" in caplog.text
        assert caplog.text.count("300, evenly spaced") == 1
        wanted = functions(q).reshape(CHAINS, EACH, ROWS, 1)[:, (2 * torch.arange(100) + 1) * EACH // 200]
        torch.testing.assert_close(pred.outputs, wanted.flatten(0, 1))
    caplog.clear()
    assert len(q.predict(X, memory_budget=1, draws=700).outputs) == 700  # a number that is given is kept
    assert not caplog.text
    assert len(q.predict(X, memory_budget=1).outputs) == DRAWS


def test_mixtures_of_chains_use_all_draws() -> None:
    parts = [chains(Categorical(), 3, seed) for seed in (0, 1)]
    shares = torch.tensor([0.3, 0.7], dtype=torch.float64)
    wanted = sum(share * functions(q).softmax(-1).mean(0) for share, q in zip(shares, parts, strict=True))
    pred = Mixture(parts, shares).predict(X)
    torch.testing.assert_close(pred.probs, wanted, rtol=1e-13, atol=1e-15)
    thinned = Mixture(parts, shares).predict(X, memory_budget=1)
    torch.testing.assert_close(thinned.probs, wanted, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(thinned.aleatoric, pred.aleatoric)


def test_other_posteriors_keep_a_hundred_draws() -> None:
    joint = po.Joint(nn.Linear(2, 1).double(), Gaussian(scale=0.4), po.priors.Normal(), num_data=ROWS)
    gaussian, _ = po.infer(po.methods.MeanField(steps=2), joint, (X, X[:, :1]))
    assert len(gaussian.predict(X).outputs) == DRAWS == 100
    mixture = Mixture([gaussian, gaussian]).predict(X)
    assert [len(part.outputs) for part in mixture.parts] == [50, 50]
    assert len(gaussian.predict(X, memory_budget=1).outputs) == DRAWS
    assert "100" in (Posterior.predict.__doc__ or "")


def test_sampling_without_a_key_is_that_of_key_0() -> None:
    q = chains(Gaussian(scale=0.4), 1)
    gaussian, _ = po.infer(po.methods.MeanField(steps=2), q.joint, (X, X[:, :1]))
    laplace, _ = po.infer(po.methods.Laplace(tuning=None), q.joint, (X, X[:, :1]))
    point = Point(q.joint, gaussian.mean)
    for posterior in (q, gaussian, laplace, point, Mixture([gaussian, laplace])):
        assert torch.equal(posterior.sample(5), posterior.sample(5, Key(0)))
        assert posterior.sample(5).shape == (5, 3)
