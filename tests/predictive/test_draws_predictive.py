"""Mixture of draws against gold numbers and formulas written out."""

import math

import pytest
import torch
from counts import Counts
from goldcases import load
from hyperbolic import hyperbolic, log_density
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from posterity.errors import BadData
from posterity.likelihoods import Categorical, Custom, Gaussian, Poisson, StudentT
from posterity.numerics.random import Key
from posterity.predictive import ClassPredictive, DrawsPredictive, Predictive, from_outputs
from posterity.predictive.predictive import quantiles_of_normals


def every_mask(inputs: dict[str, Tensor], scaled: bool) -> Tensor:
    """Outputs (S, N, 2) of the gold network under each mask, repeated in proportion to its probability."""
    keep = torch.tensor([1 - inputs["p1"]] * 2 + [1 - inputs["p2"]] * 3, dtype=torch.float64)
    outputs = []
    for number in range(32):
        mask = torch.tensor([float(number >> bit & 1) for bit in range(5)], dtype=torch.float64)
        copies = round(float(torch.where(mask > 0, keep, 1 - keep).prod()) * 200)  # 200 makes every share whole
        mask = mask / keep if scaled else mask
        hidden = torch.relu((inputs["X"] * mask[:2]) @ inputs["M1"] + inputs["b"])
        outputs += [(hidden * mask[2:]) @ inputs["M2"]] * copies
    assert len(outputs) == 200
    return torch.stack(outputs)


@pytest.mark.parametrize("variant", ["deck_no_scaling", "inverted_scaling"])
def test_gold_dropout_enumeration(variant: str) -> None:
    case = load("mc_dropout_enumeration")
    outputs = every_mask(case.inputs, scaled=variant == "inverted_scaling")
    pred = from_outputs(Gaussian(scale=case.inputs["tau"] ** -0.5), outputs)
    assert isinstance(pred, DrawsPredictive)
    log_density = pred.log_prob(case.inputs["Y"])
    classes = from_outputs(Categorical(), outputs)
    for row, entry in enumerate(case.expected[variant]):
        case.check(f"{variant}.{row}.mean", pred.mean[row])
        case.check(f"{variant}.{row}.log_pred_density", log_density[row])
        case.check(f"{variant}.{row}.softmax_mean", classes.probs[row])
        torch.testing.assert_close(pred.variance[row], entry["pred_cov"].diagonal(), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(pred.epistemic[row], entry["func_cov"].diagonal(), rtol=1e-9, atol=1e-10)
        printed = entry["expected_if_deck_formula_printed"].diagonal()
        assert not torch.allclose(pred.variance[row], printed, rtol=1e-3)


def test_identical_draws_are_one_draw() -> None:
    outputs = torch.tensor([[[0.3], [1.2]]], dtype=torch.float64)
    one, many = (DrawsPredictive(Gaussian(0.5), outputs.expand(draws, 2, 1)) for draws in (1, 50))
    y = torch.tensor([0.0, 1.0])
    torch.testing.assert_close(one.log_prob(y), many.log_prob(y))  # a lost 1/S would add log 50
    torch.testing.assert_close(many.epistemic, torch.zeros(2, 1).double())
    torch.testing.assert_close(one.quantile(0.7), many.quantile(0.7))


@settings(max_examples=30, deadline=None)
@given(
    means=st.lists(st.floats(-5, 5), min_size=1, max_size=5),
    scale=st.floats(0.1, 3.0),
    y=st.floats(-8, 8),
    p=st.floats(0.01, 0.99),
)
def test_mixture_formulas_written_out(means: list[float], scale: float, y: float, p: float) -> None:
    outputs = torch.tensor(means, dtype=torch.float64).reshape(-1, 1, 1)
    pred = DrawsPredictive(Gaussian(scale), outputs)
    density = sum(
        math.exp(-0.5 * ((y - mean) / scale) ** 2) / (scale * math.sqrt(2 * math.pi)) for mean in means
    ) / len(means)
    if density > 1e-250:
        assert float(pred.log_prob(torch.tensor([y], dtype=torch.float64))) == pytest.approx(
            math.log(density), abs=1e-9
        )
    centre = sum(means) / len(means)
    assert float(pred.mean) == pytest.approx(centre, abs=1e-12)
    spread = sum((mean - centre) ** 2 for mean in means) / len(means)
    assert float(pred.variance) == pytest.approx(spread + scale**2, rel=1e-9)
    quantile = float(pred.quantile(p))
    below = sum(0.5 * math.erfc((mean - quantile) / (scale * math.sqrt(2))) for mean in means) / len(means)
    assert below == pytest.approx(p, abs=1e-9)


def test_far_target_keeps_a_finite_log_density() -> None:
    pred = DrawsPredictive(Gaussian(0.1), torch.zeros(4, 1, 1))
    assert float(pred.log_prob(torch.tensor([50.0]))) == pytest.approx(-125000 - math.log(0.1) - 0.9189385, rel=1e-6)


def test_quantile_of_well_separated_draws_lies_in_the_right_one() -> None:
    pred = DrawsPredictive(Gaussian(1e-3), torch.tensor([-100.0, 0.0, 100.0]).double().reshape(3, 1, 1))
    assert float(pred.quantile(1 / 6)) == pytest.approx(-100.0, abs=1e-9)
    assert float(pred.quantile(0.5)) == pytest.approx(0.0, abs=1e-9)
    assert float(pred.quantile(5 / 6)) == pytest.approx(100.0, abs=1e-9)


def test_each_draw_keeps_its_own_noise() -> None:
    scales = torch.tensor([0.5, 2.0], dtype=torch.float64)
    pred = DrawsPredictive(Gaussian(scales.reshape(2, 1, 1)), torch.zeros(2, 3, 1).double())
    torch.testing.assert_close(pred.aleatoric, torch.full((3, 1), float((scales**2).mean())).double())
    each = torch.distributions.Normal(torch.zeros(2).double(), scales).log_prob(torch.tensor(1.0))
    expected = each.exp().mean().log().expand(3)
    torch.testing.assert_close(pred.log_prob(torch.ones(3)), expected)


def test_sample_mixes_components_row_by_row() -> None:
    pred = DrawsPredictive(Gaussian(1e-3), torch.tensor([-1.0, 1.0]).reshape(2, 1, 1).expand(2, 40, 1))
    signs = pred.sample(1, Key(0)).sign().reshape(-1)
    assert 0 < int((signs > 0).sum()) < 40  # one component for all rows would give 0 or 40


def test_a_likelihood_without_cdf_has_no_quantile_but_all_else() -> None:
    pred = DrawsPredictive(Counts(), torch.zeros(3, 2, 1))
    with pytest.raises(TypeError, match=r"sample\(draws, key\)"):
        pred.quantile(0.5)
    assert pred.variance.tolist() == [[1.0], [1.0]]
    with pytest.raises(BadData, match="counts"):
        pred.log_prob(torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("outputs", [torch.zeros(3), torch.zeros(0, 2, 1)])
def test_outputs_without_draws_are_refused(outputs: Tensor) -> None:
    with pytest.raises(ValueError, match=r"\(S, N, \*event\)"):
        DrawsPredictive(Gaussian(), outputs)
    with pytest.raises(ValueError, match=r"\(S, N, \*event\)"):
        from_outputs(Categorical(), outputs)


def test_chunks_of_different_draws_or_noise_do_not_join() -> None:
    pred = DrawsPredictive(Gaussian(), torch.zeros(3, 2, 1))
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        Predictive.concatenate([pred, DrawsPredictive(Gaussian(), torch.zeros(2, 2, 1))])
    with pytest.raises(ValueError, match="same likelihood"):
        Predictive.concatenate([pred, DrawsPredictive(Gaussian(2.0), torch.zeros(3, 2, 1))])


def test_from_outputs_chooses_by_likelihood() -> None:
    outputs = torch.zeros(3, 2, 2)
    assert isinstance(from_outputs(Gaussian(), outputs), DrawsPredictive)
    assert isinstance(from_outputs(Counts(), outputs), DrawsPredictive)
    assert isinstance(from_outputs(Categorical(), outputs), ClassPredictive)


@settings(max_examples=60, deadline=None)
@given(log_rates=st.lists(st.floats(-12, 6), min_size=1, max_size=5), p=st.floats(0.001, 0.999))
def test_quantile_of_counts_is_the_smallest_that_is_enough(log_rates: list[float], p: float) -> None:
    pred = DrawsPredictive(Poisson(), torch.tensor(log_rates, dtype=torch.float64).reshape(-1, 1, 1))
    quantile = float(pred.quantile(p))

    def below(count: float) -> float:
        return float(sum(stats.poisson(math.exp(f)).cdf(count) for f in log_rates) / len(log_rates))

    assert quantile == int(quantile) >= 0
    assert below(quantile) >= p - 1e-9  # torch's distribution function has errors of 1e-9
    assert below(quantile - 1) < p + 1e-9


@pytest.mark.parametrize("degrees", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("p", [1e-4, 0.3, 0.999])
def test_quantile_of_long_tails(degrees: float, p: float) -> None:
    means = torch.tensor([-1.0, 0.5, 40.0], dtype=torch.float64)
    pred = DrawsPredictive(StudentT(degrees, 2.0), means.reshape(3, 1, 1))
    quantile = float(pred.quantile(p))
    below = sum(stats.t(degrees, mean, 2.0).cdf(quantile) for mean in means.tolist()) / 3
    assert below == pytest.approx(p, rel=1e-9)


def test_one_draw_of_long_tails_has_the_quantiles_of_scipy() -> None:
    pred = DrawsPredictive(StudentT(3.0, 0.7), torch.full((1, 2, 1), 5.0, dtype=torch.float64))
    lower, upper = pred.interval(0.9)
    wanted = stats.t(3.0, 5.0, 0.7).interval(0.9)
    assert lower[0].item() == pytest.approx(wanted[0], rel=1e-12)
    assert upper[1].item() == pytest.approx(wanted[1], rel=1e-12)


def test_quantile_of_nan_is_nan() -> None:
    outputs = torch.tensor([[[0.0], [torch.nan]]])
    quantile = DrawsPredictive(Gaussian(), outputs).quantile(0.5)
    assert quantile[0].item() == pytest.approx(0.0, abs=1e-6)
    assert quantile[1].isnan()


@pytest.mark.parametrize("likelihood", [Gaussian(0.7), StudentT(5.0), Poisson()], ids=lambda item: type(item).__name__)
def test_joint_density_is_that_of_shared_draws(likelihood: Gaussian) -> None:
    outputs = Key(0).normal((5, 4, 2), torch.float64, torch.get_default_device())
    y = likelihood.sample(outputs[0], Key(1))
    each = likelihood.log_prob(outputs, y)  # (S, N)
    pred = DrawsPredictive(likelihood, outputs)
    torch.testing.assert_close(pred.joint_log_prob(y), each.sum(-1).exp().mean().log())
    torch.testing.assert_close(pred.expected_log_prob(y), each.mean(0))
    apart = DrawsPredictive(likelihood, outputs, shared=False)
    for unshared in (apart, apart.rows(slice(0, 2)), Predictive.concatenate([apart, pred])):
        with pytest.raises(ValueError, match=r"that all rows share\. Got"):
            unshared.joint_log_prob(y)


def test_joint_density_tends_to_that_of_the_gaussian_process() -> None:
    size = 200_000
    root = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [-0.3, 0.2, 0.5]], dtype=torch.float64)
    outputs = (Key(0).normal((size, 3), torch.float64, torch.get_default_device()) @ root.T).unsqueeze(-1)
    y = torch.tensor([0.5, 0.2, -1.0], dtype=torch.float64)
    covariance = root @ root.T + 0.25 * torch.eye(3, dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(torch.zeros(3).double(), covariance).log_prob(y)
    each = Gaussian(0.5).log_prob(outputs, y.unsqueeze(-1)).sum(-1).exp()
    pred = DrawsPredictive(Gaussian(0.5), outputs)
    error = float(each.std() / each.mean()) / size**0.5
    assert abs(float(pred.joint_log_prob(y) - exact)) < 5.0 * error


def test_a_density_alone_gives_log_scores() -> None:
    outputs, y = Key(0).normal((5, 4, 1), torch.float64, torch.get_default_device()), torch.zeros(4, 1).double()
    pred = DrawsPredictive(Custom(log_density), outputs)
    torch.testing.assert_close(pred.log_prob(y), DrawsPredictive(hyperbolic(1), outputs).log_prob(y))
    assert len(pred) == 4
    assert "Custom" in repr(pred)
    assert pred.joint_log_prob(y).shape == ()
    with pytest.raises(TypeError, match=r"Custom\.mean needs mean_function"):
        _ = pred.mean
    with pytest.raises(TypeError, match="no quantiles"):
        pred.quantile(0.5)
    with pytest.raises(BadData, match="one row for each of the 4 predictions"):
        pred.log_prob(y[:3])


def test_quantiles_of_many_rows_take_as_few_steps_as_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    means, scales = Key(5).normal((30, 2000), torch.float64), Key(6).uniform((30, 2000), torch.float64) + 0.05
    mean, std = means.mean(0), (scales.square().mean(0) + means.var(0, correction=0)).sqrt()
    calls, cdf, erfc = list[int](), torch.special.ndtr, torch.special.erfc
    monkeypatch.setattr(torch.special, "erfc", lambda x: calls.append(1) or erfc(x))
    found = quantiles_of_normals(means, scales, mean, std, [0.025, 0.5, 0.975])
    assert 2 < len(calls) < 20
    for quantiles, p in zip(found, (0.025, 0.5, 0.975), strict=True):
        torch.testing.assert_close(
            cdf((quantiles - means) / scales).mean(0), torch.full_like(quantiles, p), rtol=0, atol=1e-14
        )


def test_quantiles_of_draws_that_differ_little_take_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes them for each row: the draws of a posterior are mostly closer than their noise is wide."""
    means, scales = 0.3 * Key(5).normal((50, 1), torch.float64), torch.full((50, 1), 0.9, dtype=torch.float64)
    pred = DrawsPredictive(Gaussian(0.9), means.unsqueeze(-1))
    calls, erfc = list[int](), torch.special.erfc
    monkeypatch.setattr(torch.special, "erfc", lambda x: calls.append(1) or erfc(x))
    for end, p in zip(pred.interval(0.95), (0.025, 0.975), strict=True):
        assert abs(float(torch.special.ndtr((end - means) / scales).mean()) - p) < 1e-15
    assert len(calls) == 2
