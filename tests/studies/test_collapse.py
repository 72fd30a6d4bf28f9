"""The study of collapse: slopes and constants of theory, the bound below its limit, optima that forget the width."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch.autograd.functional import hessian

from posterity.numerics import Key
from posterity.theory import Neurons, OutputLaw, Rectified, sampled_excess
from posterity_studies.collapse import flow, functions, optima
from posterity_studies.collapse.figures import draw
from posterity_studies.collapse.optima import averaged, gaps
from posterity_studies.collapse.study import run
from posterity_studies.options import Settings

pytestmark = pytest.mark.cpu
FIGURES = ["kl.png", "gap.png", "balanced.png", "confidence.png", "flow.png", "functions.png"]
WIDTHS = (12, 120, 1200, 12_000, 120_000)
CLOSE = 0.05


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optima, "WIDTHS", WIDTHS)
        patch.setattr(optima, "TAUS", (0.01, 0.1))
        patch.setattr(optima, "ROWS", 20)
        patch.setattr(optima, "CLASS_ROWS", 60)
        patch.setattr(flow, "SIDES", (2, 4))
        result = run(Settings(seed=1))
        result.document()  # with these settings in it
        yield result


@pytest.mark.parametrize(("which", "exponent"), [("rectified", -1), ("odd", -3), ("classes", -1)])
def test_the_posterior_collapses_by_the_law(study, which, exponent):
    single = getattr(study, which)
    assert single.law.exponent == exponent
    assert abs(single.slope - exponent) < CLOSE
    assert float(single.ratio[-1]) == pytest.approx(1.0, abs=2e-3)
    errors = (single.ratio[2:] - 1.0).abs()
    assert errors[2] < 0.2 * errors[1] + 1e-4  # the next order is 1/N
    assert errors[1] < 0.2 * errors[0] + 1e-4
    assert float(single.optima.gradient.max()) < 1e-9


def test_the_constant_of_rectifiers_is_the_one_of_theory(study):
    problem = study.rectified.case.problem
    c = math.sqrt(0.2 / (2.0 * math.pi)) * problem.inputs.norm(dim=-1)
    expected = 2.0 * 0.2 * float((problem.targets * c).sum()) ** 2
    assert study.rectified.law.constant == pytest.approx(expected, rel=1e-10)
    widest = float(study.rectified.network_kl[-1]) * WIDTHS[-1]
    assert widest == pytest.approx(expected, rel=2e-3)


def test_after_the_collapse_nothing_is_left_of_the_data(study):
    """The data term goes to that of f = 0, and for an odd activation only the scales have moved."""
    problem = study.rectified.case.problem
    assert float(study.rectified.optima.data_term[-1]) == pytest.approx(float(problem.targets.square().sum()), rel=0.01)
    assert float(study.classes.optima.data_term[-1]) == pytest.approx(60 * math.log(3.0), rel=0.01)
    widest = Neurons.from_theta(study.odd.optima.neurons.theta[-1])
    assert float(widest.outer_mean.abs().max()) < 1e-12
    assert bool((widest.outer_scale < problem.prior.outer_scale).all())


def test_the_bound_is_below_its_limit_by_one_over_the_width(study):
    assert study.highest_above < 1e-13
    assert len(study.gaps) == 3 + 3 + 2 * 2
    for gap in study.gaps:
        assert abs(gap.slope + 1.0) < CLOSE, gap.name
        assert bool((gap.gap > 0.0).all())
        assert bool((gap.gap <= gap.bound * (1.0 + 1e-9)).all()), gap.name
        size = float(gap.difference.abs().max()) + 100.0
        torch.testing.assert_close(gap.difference, gap.gap, rtol=0.0, atol=1e-13 * size)
    square, logistic, softmax = study.gaps[:3]
    assert square.slope == pytest.approx(-1.0, abs=1e-9)
    torch.testing.assert_close(square.gap, square.bound, rtol=1e-12, atol=0.0)
    for gap in (logistic, softmax):
        assert 0.05 < gap.of_bound < 1.0


def test_a_gap_of_another_order_is_seen(study, monkeypatch):
    monkeypatch.setattr(type(study.rectified.case.problem), "gap", lambda self, nu, at: self.gap_bound(nu, at) / at)
    monkeypatch.setattr(optima, "WIDTHS", WIDTHS)
    result = gaps(study.rectified.case, study.classes.case, [], [], Key(1))
    assert all(abs(item.slope + 2.0) < CLOSE for item in result)


@pytest.mark.parametrize("which", ["balanced", "balanced_classes"])
def test_balanced_optima_do_not_depend_on_the_width(study, which):
    single = getattr(study, which)
    assert float(single.optima.gradient.max()) < 1e-9
    assert all(abs(slope + 1.0) < CLOSE for slope in single.slopes)
    scaled = single.distance * single.widths  # the rate is 1/N
    torch.testing.assert_close(scaled[:, -1], scaled[:, -2], rtol=0.01, atol=0.0)
    off = (single.optima.kl / single.limit.kl.unsqueeze(-1) - 1.0).abs()
    assert float(off[:, -1].max()) < 1e-3
    assert float(single.moved[:, -1].max()) < 1e-3
    assert float(single.outputs[1].abs().amax((-1, -2)).min()) > 0.5  # and they do predict something
    torch.testing.assert_close(  # E phi does not contain it
        single.limit.neurons.outer_scale,
        torch.full_like(single.limit.neurons.outer_scale, 0.2**0.5),
        rtol=1e-9,
        atol=0.0,
    )


def test_untempered_optima_are_balanced_ones_at_another_tau(study):
    """At eta = 1 tau is N/p: the same bound by the other door."""
    single, problem = study.rectified, study.rectified.case.problem
    torch.testing.assert_close(
        single.optima.elbo, problem.elbo(single.optima.neurons, single.widths), rtol=1e-12, atol=0.0
    )


def test_confidence_goes_to_chance_at_eta_one_and_stays_where_it_is_balanced(study):
    result = study.confidence
    assert bool((result.untempered.confidence.diff() < 0.0).all())
    assert float(result.untempered.confidence[-1]) == pytest.approx(1.0 / 3.0, abs=1e-3)
    assert float(result.untempered.nll[-1]) == pytest.approx(math.log(3.0), abs=1e-3)
    assert float(result.limit.confidence[0]) > 0.8
    assert float(result.limit.accuracy[0]) > 0.8
    torch.testing.assert_close(result.balanced.confidence[:, -1], result.limit.confidence, rtol=0.0, atol=1e-3)
    assert bool((result.limit.confidence.diff() < 0.0).all())  # warmer is less sure


def test_the_averaged_prediction_is_the_second_order_expansion():
    neurons = optima.fixed_neurons(Key(3), 3)
    inputs = Key(4).normal((5, 2), torch.float64, "cpu")
    law = OutputLaw(neurons, Rectified(), inputs, torch.tensor(40.0, dtype=torch.float64))
    curvature = torch.stack(
        [torch.stack([hessian(lambda f, c=c: torch.softmax(f, -1)[c], row) for c in range(3)]) for row in law.mean]
    )  # (P, C, C, C)
    expected = torch.softmax(law.mean, -1) + 0.5 * torch.einsum("pcde,pde->pc", curvature, law.covariance)
    result = averaged(law)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(result.sum(-1), torch.ones(5, dtype=torch.float64))


def test_second_order_is_enough_for_softmax(study):
    """Against networks that are drawn, at the least width."""
    case, neurons = study.classes.case, study.classes.optima.neurons
    law = case.problem.law(Neurons.from_theta(neurons.theta[0], 3), 12.0)
    exact = sampled_excess(case.problem.loss, law, case.problem.targets, 2000, Key(5))
    off = (case.problem.loss.second_order(law) - exact.value).abs()
    assert bool((off <= 5.0 * exact.standard_error + 0.1 * exact.value).all())


def test_a_search_from_the_prior_alone_would_miss_optima(study, monkeypatch):
    """Equal neurons stay equal in it, and the narrowest network wants a kind for each class."""
    monkeypatch.setattr(optima, "WIDTHS", WIDTHS)
    case, both = study.classes.case, study.classes.optima
    alone = optima.untempered(replace(case, starts=case.starts[:1])).optima
    assert float(both.elbo[0] - alone.elbo[0]) > 0.1
    torch.testing.assert_close(both.neurons.theta[-1], alone.neurons.theta[-1], rtol=0.0, atol=1e-9)


def test_the_seed_fixes_the_rows():
    rows = [optima.classes(Key(seed)).problem.inputs for seed in (3, 3, 4)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_fitted_slopes():
    at = torch.tensor([10.0, 1000.0, 10_000.0, 100_000.0], dtype=torch.float64)
    values = 3.0 * at**-1.5
    values[0] = 17.0  # below the width from which slopes are fitted
    assert optima.fitted_slope(at, values) == pytest.approx(-1.5)


def test_the_flow_reaches_the_optimum(study):
    particles = study.particles
    assert list(particles.flows) == [4, 16]
    assert all(particles.claims().values())
    for count, own in particles.flows.items():
        assert float(particles.below(count)[0]) > 0.5
        assert float(particles.below(count)[-1]) == pytest.approx(0.0, abs=1e-6)
        assert particles.problem.balanced(own.neurons, 0.05).tolist() == pytest.approx(own.values.tolist())
    early = {count: own._replace(values=own.values[:5]) for count, own in particles.flows.items()}
    claims = replace(particles, flows=early, certificate=0.1).claims()
    assert list(claims.values()) == [True, False, False, True]


def test_matched_scales_are_nearer_to_the_process(study):
    result = study.functions
    assert all(result.claims().values())
    worse = replace(result, distances=dict.fromkeys(result.distances, 0.3), narrow_error=6.0)
    assert not any(worse.claims().values())
    assert result.distances[functions.PROCESS] == pytest.approx(0.0, abs=1e-4)
    assert {draws.shape for draws in result.draws.values()} == {(functions.DRAWS, functions.POINTS)}


def test_document_and_figures(study, tmp_path):
    document = study.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["widths"] == list(WIDTHS)
    for row in (
        *document["untempered"],
        *document["gaps"],
        *(tau for item in document["balanced"] for tau in item["taus"]),
    ):
        assert abs(row["slope_off"]) < CLOSE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(study, tmp_path / "new") == FIGURES
    assert all((tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG") for name in FIGURES)
