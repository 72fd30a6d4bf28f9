"""NUTS against the references of posteriordb, German credit and nes_logit: as densities, and as joints that fit."""

import os
from pathlib import Path

import pytest
import torch

from posterity.datasets import POSTERIORS
from posterity.model import Joint
from posterity_studies.posteriors.densities import GERMAN_CREDIT, JOINTS, density, joint
from posterity_studies.posteriors.study import FORMS, compared, reference

pytestmark = pytest.mark.cpu  # files are read into the memory of the CPU
CHAINS, WARMUP = 16, 200
# A joint that is a density up to a constant is not sampled again: `posterity study posteriors` has both.
SAMPLED = [(name, form) for name, form in FORMS if form == "Density" or name not in POSTERIORS]


@pytest.fixture(autouse=True)
def real():
    root = os.environ.get("POSTERITY_DATA", "")
    if not root:
        pytest.skip("POSTERITY_DATA is not set: posteriordb is not here")
    for name in ("posteriordb", "uci-classification"):
        if not (Path(root) / name).is_dir():
            pytest.skip(f"POSTERITY_DATA has no folder '{name}'")


def test_every_posterior_is_sampled():
    assert {name for name, _ in FORMS} == {*POSTERIORS, GERMAN_CREDIT}
    assert len(POSTERIORS) == 11
    assert [name for name, form in FORMS if form == "Joint"] == list(JOINTS)


@pytest.mark.parametrize(("name", "form"), SAMPLED, ids=lambda value: value.split("-")[-1])
def test_nuts_draws_what_the_reference_has(name: str, form: str) -> None:
    draws = 500 if name.startswith("eight_schools") else 300
    found = compared(name, form, seed=1, chains=CHAINS, warmup=WARMUP, draws=draws, accelerate="off")
    assert found.mean_errors <= 4.0
    assert found.sd_errors <= 5.0
    assert found.rhat <= 1.01
    assert found.ess >= 1000.0
    assert found.divergent <= 0.001


@pytest.mark.parametrize("name", [name for name in JOINTS if name in POSTERIORS])
def test_a_joint_is_the_density_up_to_a_constant(name: str) -> None:
    one, other = density(name), joint(name)
    assert isinstance(other.problem, Joint)
    torch.manual_seed(3)
    theta = 0.5 * torch.randn(6, other.problem.size, dtype=torch.float64)
    values = other.reported({key: value for key, value in other.problem.layout.unflatten(theta.unsqueeze(0)).items()})
    same = one.problem.unconstrained({key: value[0] for key, value in values.items()})
    whole = torch.stack([other.problem.value_and_grad(row, _batch(other.rows))[0] for row in theta])
    gap = one.problem.log_density(same) - whole
    torch.testing.assert_close(gap, gap[:1].expand(6), rtol=0.0, atol=1e-6)


def _batch(rows):
    from posterity.model.batch import Batch

    return Batch(*rows)


@pytest.mark.parametrize("name", POSTERIORS)
def test_at_the_reference_the_gradients_of_a_density_average_to_zero(name: str) -> None:
    """E grad log p = 0 in unconstrained space: what the models say, with no sampler in between."""
    from posterity.datasets import posteriordb_draws

    model, draws = density(name), posteriordb_draws(name)
    if name.startswith("eight_schools"):  # the reference has theta, the model its standardised effects
        theta, mu, tau = (draws[key] for key in ("theta", "mu", "tau"))
        draws = {"effect": (theta - mu.unsqueeze(-1)) / tau.unsqueeze(-1), "mu": mu, "tau": tau}
    points = model.problem.unconstrained({key: value.flatten(0, 1)[::5] for key, value in draws.items()})
    grads = torch.cat([model.problem.value_and_grad(part)[1] for part in points.split(100)])  # (2000, P)
    error = grads.std(0) / len(grads) ** 0.5
    assert float((grads.mean(0).abs() / error).max()) < 5.0
    assert reference(name).mean.shape == reference(name).sd_error.shape
