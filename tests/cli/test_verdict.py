"""Which method to take: the rule on made NLLs, its sentence, and the row order it relies on."""

import pytest
import torch

from posterity.cli.frame.verdict import Candidate, judge, within
from posterity.predictive import GaussianPredictive

pytestmark = pytest.mark.cpu
ROWS = 200
NOISE = 0.1 * torch.randn(ROWS, generator=torch.Generator().manual_seed(0), device="cpu")
NOISE -= NOISE.mean()


def verdict(**means):
    """Judge candidates of these mean NLLs, simplest first; each but the first differs from it by row."""
    labels = {"mean": "mean", "linear": "linear", "map": "MAP", "laplace": "Laplace"}
    candidates = [
        Candidate(word, labels[word], mean + order * NOISE, word in ("mean", "linear"))
        for order, (word, mean) in enumerate(means.items())
    ]
    zeros = torch.zeros(ROWS, 1)
    return judge(candidates, GaussianPredictive(zeros, zeros, torch.ones(1)), zeros)


def test_the_best_is_taken_where_it_is_surely_better_than_all_that_is_simpler():
    result = verdict(mean=3.0, linear=2.0, map=1.5, laplace=1.25)
    assert (result.take, result.against) == ("laplace", "map")
    assert result.difference == pytest.approx(0.25)
    assert 0 < result.lower < 0.25 < result.upper
    assert result.sentence.startswith("Take Laplace: NLL 1.250, better than MAP by 0.250 (95 % interval 0.2")
    assert result.sentence.endswith(f"{ROWS} test rows).")


def test_the_reference_is_the_best_of_the_simpler_ones():
    assert verdict(mean=3.0, linear=1.5, map=2.0, laplace=1.25).against == "linear"


def test_the_simpler_is_taken_where_the_interval_of_the_difference_has_zero():
    result = verdict(mean=3.0, linear=2.0, map=1.501, laplace=1.5)
    assert (result.take, result.against) == ("map", "laplace")
    assert result.lower < 0 < result.difference < result.upper
    assert result.sentence.startswith("None is surely better than MAP: take it (NLL 1.501). Laplace has 1.500, less by")


def test_a_small_sure_gain_counts_beside_a_large_unsure_one():
    zeros = torch.zeros(ROWS, 1)
    point = torch.ones(ROWS)
    candidates = [
        Candidate("map", "MAP", point),
        Candidate("laplace", "Laplace", point - 0.05 + 0.1 * NOISE),
        Candidate("swag", "SWAG", point - 0.06 + 20.0 * NOISE),
    ]
    result = judge(candidates, GaussianPredictive(zeros, zeros, torch.ones(1)), zeros)
    assert (result.take, result.against) == ("laplace", "swag")
    assert "None is surely better than Laplace" in result.sentence


def test_rows_that_two_exclude_are_no_difference():
    zeros, excluded = torch.zeros(ROWS, 1), torch.ones(ROWS)
    excluded[3] = torch.inf
    pair = [Candidate("map", "MAP", excluded), Candidate("laplace", "Laplace", excluded + 0.1 * NOISE)]
    result = judge(pair, GaussianPredictive(zeros, zeros, torch.ones(1)), zeros)
    assert result.take == "map"
    assert "nan" not in result.sentence


def test_a_baseline_that_is_best_is_taken_and_the_best_method_named():
    result = verdict(mean=3.0, linear=1.0, map=2.0, laplace=1.5)
    assert (result.take, result.against) == ("linear", "laplace")
    assert result.sentence.startswith("No method is better than linear: take it (NLL 1.000). Laplace has 1.500, more")
    assert "Worse than" not in result.sentence


def test_a_method_worse_than_the_mean_is_named():
    result = verdict(mean=3.0, linear=2.0, map=5.0, laplace=1.5)
    assert result.take == "laplace"
    assert result.sentence.endswith("Worse than predicting the mean: MAP.")


def test_nothing_better_than_the_mean_is_said():
    result = verdict(mean=1.0, linear=1.5, map=2.0)
    assert (result.take, result.against) == ("mean", "map")
    assert "There may be nothing to learn from these inputs, or too few rows to see it." in result.sentence


def test_equal_rows_are_no_reason_for_the_less_simple():
    zeros = torch.zeros(ROWS, 1)
    pair = [Candidate(word, word, NOISE) for word in ("map", "laplace")]
    result = judge(pair, GaussianPredictive(zeros, zeros, torch.ones(1)), zeros)
    assert (result.take, result.difference) == ("map", 0.0)


def test_a_single_candidate_has_nothing_to_be_compared_with():
    result = verdict(map=1.0)
    assert (result.take, result.against, result.lower) == ("map", None, None)


def test_a_point_estimate_is_named_where_another_row_was_compared_with():
    text = verdict(mean=3.0, linear=1.5, map=2.0, laplace=1.25).sentence
    assert "MAP, a point estimate, is worse by 0.750 (95 % interval 0.7" in text
    assert "a point estimate" not in verdict(mean=3.0, linear=2.0, map=1.5, laplace=1.25).sentence


@pytest.mark.parametrize(
    ("gain", "words"), [(0.5, "is better than MAP by"), (-0.5, "is worse than MAP by"), (0.0, "is not surely better")]
)
def test_rows_among_the_training_rows_are_judged_by_themselves(gain, words):
    zeros, inside = torch.zeros(ROWS, 1), torch.arange(ROWS) < ROWS // 2
    point = torch.where(inside, gain, 9.0)  # what lies outside must not count
    candidates = [Candidate("map", "MAP", point), Candidate("laplace", "Laplace", NOISE - NOISE[inside].mean())]
    predictive = GaussianPredictive(zeros, zeros, torch.ones(1))
    text = within("laplace", candidates, inside, predictive, zeros)
    assert f"the {ROWS // 2} rows among them, Laplace {words}" in text
    assert within("map", candidates, inside, predictive, zeros) == ""
    assert within("laplace", candidates, inside | True, predictive, zeros) == ""
