"""What priors with a homogeneous -log p share: their degree, a factor on their scales, and their parts by tensor."""

import math

import pytest
import torch

from posterity.numerics import Key, Layout
from posterity.priors import (
    Cauchy,
    FanIn,
    GroupLasso,
    Hierarchical,
    Laplace,
    Layerwise,
    Logistic,
    LogNormal,
    Normal,
    Prior,
    StudentT,
)

LAYOUT = Layout.of({"0.weight": (3, 2), "0.bias": (3,), "2.weight": (1, 3)})
P = LAYOUT.size
FAMILIES: dict[str, Prior] = {
    "normal": Normal(0.7),
    "normal around": Normal(0.7, torch.linspace(-1.0, 1.0, P)),
    "normal by weight": Normal(torch.linspace(0.3, 2.0, P).unsqueeze(0)),
    "laplace": Laplace(0.4, 0.3),
    "rows": GroupLasso(2.0),
    "channels": GroupLasso(torch.tensor(2.0), "channels"),
    "fans": Layerwise({"*.weight": FanIn(), "*": Normal(0.3, 0.1)}),
    "many": Layerwise({"0.*": Laplace(0.4), "*": GroupLasso(3.0)}),
    "nested": Layerwise({"0.*": Layerwise.of(Laplace(0.4)), "*": Normal(0.5)}),
}


def weights(*shape: int) -> torch.Tensor:
    return Key(1).normal((*shape, P), torch.float64)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_prior_is_the_sum_of_its_parts_by_tensor(kind: str) -> None:
    theta, prior = weights(5), FAMILIES[kind]
    alone = [
        own.bound(Layout.of({part.name: part.shape})).log_prob(theta[:, part.offset : part.offset + part.size])
        for own, part in zip(prior.by_tensor(LAYOUT), LAYOUT, strict=True)
    ]
    torch.testing.assert_close(torch.stack(alone).sum(0), prior.bound(LAYOUT).log_prob(theta), rtol=1e-12, atol=1e-12)


def test_parts_by_tensor_of_members() -> None:
    theta = weights(2)
    scale, mean = torch.linspace(0.3, 2.0, 2 * P).reshape(2, P), weights(2)
    for prior in (Normal(scale, mean), Normal(torch.tensor([0.5, 2.0]), mean[0])):
        alone = [
            own.log_prob(theta[:, part.offset : part.offset + part.size])
            for own, part in zip(prior.by_tensor(LAYOUT), LAYOUT, strict=True)
        ]
        torch.testing.assert_close(torch.stack(alone).sum(0), prior.log_prob(theta), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", FAMILIES)
def test_multiplied_scales_stretch_the_density_about_its_mode(kind: str) -> None:
    prior, factor = FAMILIES[kind], 1.7
    modes = torch.cat(
        [
            torch.as_tensor(own.centred()[1], dtype=torch.float64).expand(part.size)
            for own, part in zip(prior.by_tensor(LAYOUT), LAYOUT, strict=True)
        ]
    )
    away = weights(4)
    stretched = prior.rescaled(factor).bound(LAYOUT).log_prob(modes + factor * away)
    expected = prior.bound(LAYOUT).log_prob(modes + away) - P * math.log(factor)
    torch.testing.assert_close(stretched, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("prior", "power"), [(Normal(0.7), 2), (Laplace(0.4), 1), (GroupLasso(2.0), 1)])
def test_the_penalty_is_homogeneous_and_its_mean_is_that_over_draws(prior: Prior, power: int) -> None:
    assert prior.degree == power
    bound, theta = prior.bound(LAYOUT), weights(3)
    at_zero, value = bound.penalty(theta)
    torch.testing.assert_close(at_zero - value, bound.log_prob(theta), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bound.penalty(1e-8 * theta)[1], 1e-8**power * value, rtol=1e-12, atol=0.0)
    spread = torch.linspace(0.1, 1.0, P, dtype=torch.float64)
    draws = theta[0] + spread * Key(2).normal((20_000, P), torch.float64)
    each = bound.penalty(draws)[1]
    expected = bound.penalty(theta[0], spread)[1]
    assert abs(float(each.mean() - expected)) < 5.0 * float(each.std()) / math.sqrt(len(each))
    tau = torch.exp(-power * prior.log_scale)
    unit = prior.rescaled(float(tau) ** (1.0 / power)).bound(LAYOUT)  # of tau = 1
    torch.testing.assert_close(value, tau * unit.penalty(theta)[1], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("prior", [StudentT(3.0), Cauchy(), Logistic(), Hierarchical(Normal(), LogNormal(1.0, 0.5))])
def test_other_priors_have_no_degree(prior: Prior) -> None:
    assert prior.degree is None


def test_a_hierarchical_prior_takes_scales_of_single_weights() -> None:
    inner = Normal(torch.linspace(0.3, 2.0, P).unsqueeze(0))
    whole = Hierarchical(inner, LogNormal(1.0, 0.5)).bound(LAYOUT)
    theta, total = weights(), 0.0
    for own, part in zip(inner.by_tensor(LAYOUT), LAYOUT, strict=True):
        alone = Hierarchical(own, LogNormal(1.0, 0.5)).bound(Layout.of({part.name: part.shape}))
        total += float(alone.log_prob(theta[part.offset : part.offset + part.size]))
    assert float(whole.log_prob(theta)) == pytest.approx(total, rel=1e-9)
