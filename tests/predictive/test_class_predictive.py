"""Class probabilities: averaging, labels, entropies."""

import math

import pytest
import torch
from goldcases import load
from torch import Tensor

from posterity.errors import BadData
from posterity.likelihoods import Bernoulli, Categorical
from posterity.numerics.random import Key
from posterity.predictive import ClassPredictive, Predictive, from_outputs


def test_gold_entropies() -> None:
    case = load("metrics_table")
    draws = case.inputs["probs"]
    pred = ClassPredictive(draws.mean(0), draws)
    case.check("predictive_entropy_mean", pred.entropy.mean())
    case.check("mutual_information_mean", pred.epistemic.mean())
    case.check("mean_confidence", pred.probs.max(-1).values.mean())


def test_probabilities_are_averaged_not_logits() -> None:
    outputs = torch.tensor([[[3.0, 0.0]], [[-1.0, 0.0]]], dtype=torch.float64)
    pred = from_outputs(Categorical(), outputs)
    torch.testing.assert_close(pred.probs, outputs.softmax(-1).mean(0))
    assert not torch.allclose(pred.probs, outputs.mean(0).softmax(-1), atol=1e-2)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 1)])
def test_one_logit_gives_two_columns(shape: tuple[int, ...]) -> None:
    outputs = Key(0).normal(shape, torch.float64, torch.get_default_device())
    pred = from_outputs(Bernoulli(), outputs)
    ones = torch.sigmoid(outputs.reshape(4, 3)).mean(0)
    torch.testing.assert_close(pred.probs, torch.stack([1 - ones, ones], dim=-1))


def test_binary_equals_two_classes_with_a_zero_logit() -> None:
    outputs = Key(0).normal((4, 3, 1), torch.float64, torch.get_default_device())
    binary = from_outputs(Bernoulli(), outputs)
    classes = from_outputs(Categorical(), torch.cat([torch.zeros_like(outputs), outputs], dim=-1))
    torch.testing.assert_close(binary.probs, classes.probs)
    torch.testing.assert_close(binary.epistemic, classes.epistemic)


def test_several_logits_are_several_labels() -> None:
    outputs = Key(0).normal((4, 3, 2), torch.float64, torch.get_default_device())
    pred = from_outputs(Bernoulli(), outputs)
    ones = torch.sigmoid(outputs).mean(0)
    torch.testing.assert_close(pred.probs, torch.stack([1 - ones, ones], dim=1))
    y = torch.tensor([[0, 1], [1, 1], [0, 0]])
    torch.testing.assert_close(pred.log_prob(y.float()), torch.where(y > 0, ones, 1 - ones).log().sum(-1))


def test_labels_at_positions_must_be_declared() -> None:
    with pytest.raises(ValueError, match=r"0 axes of positions.*Got \(4, 3, 5, 2\)\. Say by Categorical\(positions="):
        from_outputs(Categorical(), torch.zeros(4, 3, 5, 2))
    assert from_outputs(Categorical(positions=1), torch.zeros(4, 3, 5, 2)).probs.shape == (3, 5, 2)


def test_joint_probability_is_that_of_shared_draws() -> None:
    draws = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])  # either all 0 or all 1
    pred = ClassPredictive(draws.mean(0), draws)
    assert float(pred.joint_log_prob(torch.tensor([1, 1]))) == pytest.approx(math.log(0.5))
    assert float(pred.joint_log_prob(torch.tensor([0, 1]))) == -math.inf
    assert float(pred.log_prob(torch.tensor([0, 1])).sum()) == pytest.approx(math.log(0.25))
    assert pred.expected_log_prob(torch.tensor([0, 1])).tolist() == [-math.inf, -math.inf]


def test_joint_probability_of_labels_at_positions_keeps_them_together() -> None:
    outputs = Key(0).normal((6, 3, 4, 2), torch.float64, torch.get_default_device())
    pred = from_outputs(Categorical(positions=1), outputs)
    y = torch.arange(6).reshape(3, 2) % 4
    each = Categorical(positions=1).log_prob(outputs, y)  # (S, N)
    torch.testing.assert_close(pred.joint_log_prob(y), each.sum(-1).exp().mean().log())
    torch.testing.assert_close(pred.expected_log_prob(y), each.mean(0))


def test_rows_drawn_apart_have_no_joint_probability() -> None:
    apart = from_outputs(Categorical(), torch.zeros(3, 2, 4), shared=False)
    for pred in (
        apart,
        apart.rows(slice(0, 1)),
        Predictive.concatenate([apart, from_outputs(Categorical(), torch.zeros(3, 2, 4))]),
    ):
        with pytest.raises(ValueError, match=r"draws of the weights that all rows share\. Got .* from_outputs"):
            pred.joint_log_prob(torch.zeros(len(pred), dtype=torch.long))


def test_a_draw_that_float32_rounds_to_zero_keeps_its_log() -> None:
    outputs = torch.tensor([[[200.0, 0.0]], [[0.0, 0.0]]])
    for likelihood, given in ((Categorical(), outputs), (Bernoulli(), -outputs[..., :1])):
        pred = from_outputs(likelihood, given)
        expected = -(200.0 + math.log(2.0)) / 2.0
        assert float(pred.expected_log_prob(torch.tensor([1]))) == pytest.approx(expected, rel=1e-6)
        assert pred.draws.dtype == torch.float32
        assert bool(torch.isfinite(pred.aleatoric).all())


@pytest.mark.parametrize("index", [torch.tensor(1), torch.tensor([[0, 1]])])
def test_rows_need_a_vector(index: Tensor) -> None:
    with pytest.raises(ValueError, match=r"index must be a slice or a vector.*rows\(slice\(n, n \+ 1\)\)"):
        ClassPredictive(torch.full((3, 2), 0.5)).rows(index)


def test_saturated_float32_logits_keep_a_finite_log_probability() -> None:
    binary = from_outputs(Bernoulli(), torch.tensor([[[200.0]]]))
    classes = from_outputs(Categorical(), torch.tensor([[[200.0, 0.0]]]))
    assert float(binary.log_prob(torch.tensor([0]))) == pytest.approx(-200.0, rel=1e-6)
    assert float(classes.log_prob(torch.tensor([1]))) == pytest.approx(-200.0, rel=1e-6)


def test_impossible_label_is_minus_infinity() -> None:
    pred = ClassPredictive(torch.tensor([[1.0, 0.0]]))
    assert float(pred.log_prob(torch.tensor([1]))) == -math.inf
    assert bool((pred.sample(1000, Key(0)) == 0).all())


def test_entropy_of_certain_and_uniform_rows() -> None:
    draws = torch.tensor([[[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]] * 2, dtype=torch.float64)
    pred = ClassPredictive(draws.mean(0), draws)
    assert pred.entropy.tolist() == pytest.approx([0.0, math.log(3)])
    assert pred.aleatoric.tolist() == pytest.approx([0.0, math.log(3)])
    assert pred.epistemic.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["aleatoric", "epistemic"])
def test_the_split_needs_draws(name: str) -> None:
    pred = ClassPredictive(torch.tensor([[0.5, 0.5]]))
    with pytest.raises(ValueError, match=r"averaged probabilities only\. Predict with MonteCarlo"):
        getattr(pred, name)


@pytest.mark.parametrize(
    "y", [torch.tensor([0, 1]), torch.tensor([[0], [1]]), torch.tensor([0.0, 1.0]), torch.tensor([False, True])]
)
def test_binary_targets_in_every_common_form(y: Tensor) -> None:
    pred = ClassPredictive(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    assert pred.check(y).tolist() == [0, 1]
    assert pred.log_prob(y).exp().tolist() == pytest.approx([0.9, 0.7])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([0, 3]), r"labels from 0 to 2\. Got 3"),
        (torch.tensor([0, -1]), r"Got -1"),
        (torch.tensor([0.0, 1.0]), "integer labels"),
        (torch.tensor([[0], [1]]), "shape"),
        (torch.eye(3)[:2].long(), "argmax"),
        (torch.tensor([0]), "one row"),
    ],
)
def test_bad_labels_say_what_to_do(y: Tensor, message: str) -> None:
    pred = ClassPredictive(torch.full((2, 3), 1 / 3))
    with pytest.raises(BadData, match=message):
        pred.log_prob(y)


@pytest.mark.parametrize("y", [torch.tensor([0.5]), torch.tensor([-1.0]), torch.tensor([-100.0])])
def test_binary_targets_other_than_zero_and_one_are_refused(y: Tensor) -> None:
    with pytest.raises(BadData, match="0 to 1"):
        ClassPredictive(torch.tensor([[0.5, 0.5]])).log_prob(y)


@pytest.mark.parametrize(
    ("probs", "draws", "message"),
    [
        (torch.tensor([0.5, 0.5]), None, r"\(N, C\)"),
        (torch.tensor([[1.0]]), None, "two columns"),
        (torch.tensor([[2.0, -1.0]]), None, "not logits"),
        (torch.tensor([[0.5, 0.6]]), None, "sum to 1"),
        (torch.tensor([[float("nan"), 0.5]]), None, "sum to 1"),
        (torch.tensor([[0.5, 0.5]]), torch.full((2, 3, 2), 0.5), r"\(S, N, C\)"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([[[0.9, 0.1]]]), "mean of draws"),
    ],
)
def test_what_is_not_probabilities_is_refused(probs: Tensor, draws: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassPredictive(probs, draws)


def test_chunks_with_different_draws_do_not_join() -> None:
    def chunk(draws: int | None) -> ClassPredictive:
        probs = torch.full((1, 2), 0.5)
        return ClassPredictive(probs, None if draws is None else probs.expand(draws, 1, 2))

    with pytest.raises(ValueError, match="1 of 2"):
        Predictive.concatenate([chunk(None), chunk(3)])
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        Predictive.concatenate([chunk(2), chunk(3)])
