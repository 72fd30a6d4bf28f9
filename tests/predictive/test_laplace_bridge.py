"""The Laplace bridge against gold numbers and its limits."""

import pytest
import torch
from goldcases import load
from hypothesis import given, settings
from hypothesis import strategies as st

from posterity.likelihoods import Categorical
from posterity.numerics.random import Key
from posterity.predictive import Exact, LaplaceBridge, Probit, laplace_bridge
from posterity.predictive.probit import projected

KEY = Key(0)


@pytest.mark.parametrize("structure", ["full_ggn", "diag_ggn", "kfac"])
def test_gold_network(structure: str) -> None:
    case = load("kfac_softmax_network")
    for index, entry in enumerate(case.expected["predictive"]):
        mean, covariance = entry["logit_mean"].unsqueeze(0), entry[structure]["logit_cov"].unsqueeze(0)
        path = f"predictive.{index}.{structure}"
        alpha = laplace_bridge(mean, covariance.diagonal(dim1=-2, dim2=-1))[0]
        case.check(f"{path}.laplace_bridge_alpha", alpha)
        for name, integrator in {
            "exact": Exact(),
            "meanfield_probit": Probit(),
            "laplace_bridge": LaplaceBridge(),
            "laplace_bridge_projected": LaplaceBridge(project=True),
        }.items():
            case.check(f"{path}.{name}", integrator(Categorical(), mean, covariance, KEY).probs[0])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.05, 50.0), min_size=2, max_size=6))
def test_it_inverts_the_laplace_approximation_of_a_dirichlet(alpha: list[float]) -> None:
    wanted = torch.tensor([alpha], dtype=torch.float64)
    classes = len(alpha)
    mode = wanted.log()  # up to a constant, which the bridge does not see

    def negative_log_density(logits: torch.Tensor) -> torch.Tensor:  # of the Dirichlet in the softmax basis
        return -(wanted[0] * logits.log_softmax(-1)).sum()

    curvature = torch.autograd.functional.hessian(negative_log_density, mode[0])
    variance = torch.linalg.pinv(curvature, hermitian=True, rtol=1e-12).diagonal()
    written = (1.0 - 2.0 / classes) / wanted + (1.0 / wanted).sum() / classes**2
    torch.testing.assert_close(variance, written[0], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(laplace_bridge(mode, written), wanted, rtol=1e-10, atol=0.0)


def test_it_does_not_tend_to_the_plug_in() -> None:
    mean = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
    tiny = 1e-12 * torch.eye(3, dtype=torch.float64).unsqueeze(0)
    bridge = LaplaceBridge()(Categorical(), mean, tiny, KEY).probs
    assert float((bridge - mean.softmax(-1)).abs().max()) > 0.1
    torch.testing.assert_close(LaplaceBridge()(Categorical(), mean, 0 * tiny, KEY).probs, bridge)


@settings(max_examples=50, deadline=None)
@given(mean=st.lists(st.floats(-2000, 2000), min_size=2, max_size=6), scale=st.floats(1e-3, 1e3), project=st.booleans())
def test_probabilities_stay_probabilities(mean: list[float], scale: float, project: bool) -> None:
    covariance = scale * torch.eye(len(mean), dtype=torch.float64).unsqueeze(0)
    given_mean = torch.tensor([mean], dtype=torch.float64)
    probs = LaplaceBridge(project)(Categorical(), given_mean, covariance, KEY).probs
    assert bool(torch.isfinite(probs).all())
    assert float(probs.sum()) == pytest.approx(1.0)
    order = given_mean[0].argsort()
    assert bool((probs[0][order].diff() >= -1e-12).all())  # equal variances: the order of the means


def test_projection_conditions_on_the_sum() -> None:
    root = Key(0).normal((3, 4, 4), torch.float64, torch.get_default_device())
    covariance, mean = root @ root.mT, Key(1).normal((3, 4), torch.float64, torch.get_default_device())
    centre, spread = projected(mean, covariance)
    torch.testing.assert_close(centre.sum(-1), torch.zeros(3).double())
    torch.testing.assert_close(spread.sum(-1), torch.zeros(3, 4).double())
    again = projected(centre, spread)  # the sum is known now
    torch.testing.assert_close(again[0], centre)
    torch.testing.assert_close(again[1], spread)


def test_projection_does_not_see_what_the_softmax_does_not_see() -> None:
    root = Key(0).normal((3, 4, 4), torch.float64, torch.get_default_device())
    covariance, mean = root @ root.mT, Key(1).normal((3, 4), torch.float64, torch.get_default_device())
    same = projected(mean + 5.0 * covariance.sum(-1), covariance)[0]  # a shift along S 1 is what is conditioned away
    torch.testing.assert_close(same, projected(mean, covariance)[0])
