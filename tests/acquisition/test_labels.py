"""Information of labels, against sums over every configuration."""

from itertools import product

import drawn
import pytest
import torch
from torch import Tensor

from posterity.acquisition import batch_bald_of_probs, epig_of_probs, labels
from posterity.errors import BadData
from posterity.numerics.random import Key


def entropy(probs: Tensor) -> float:
    return float(torch.special.entr(probs).sum())


def joint_information(probs: Tensor, rows: list[int]) -> float:
    """I(y_rows; s) = H(y_rows) - E H(y_rows | s) by a sum over all labels of the rows."""
    configurations = [
        torch.stack([probs[:, row, label] for row, label in zip(rows, values, strict=True)]).prod(0)
        for values in product(range(probs.shape[2]), repeat=len(rows))
    ]
    table = torch.stack(configurations)  # (configurations, S)
    return entropy(table.mean(1)) - sum(entropy(column) for column in table.T) / len(probs)


def draws(*shape: int, key: Key | None = None, sharpness: float = 2.0) -> Tensor:
    return (sharpness * drawn.normal(key or Key(0), *shape)).softmax(-1)


@pytest.mark.parametrize(("classes", "size"), [(2, 5), (3, 4), (5, 3)])
def test_batch_bald_is_the_greedy_choice_by_joint_information(classes: int, size: int) -> None:
    probs = draws(6, 7, classes)
    chosen = batch_bald_of_probs(probs, size)
    rows: list[int] = []
    for step in range(size):
        values = [-1.0 if row in rows else joint_information(probs, [*rows, row]) for row in range(7)]
        rows.append(max(range(7), key=lambda row, values=values: values[row]))
        assert float(chosen.information[step]) == pytest.approx(max(values), abs=1e-10)
    assert chosen.rows.tolist() == rows


def test_tables_in_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    probs, targets = draws(5, 11, 3), draws(5, 9, 4, key=Key(1))
    whole, gain = batch_bald_of_probs(probs, 4), epig_of_probs(probs, targets)
    for entries in (1, 40, 100):
        monkeypatch.setattr(labels, "ENTRIES", entries)
        pieces = batch_bald_of_probs(probs, 4)
        assert pieces.rows.tolist() == whole.rows.tolist()
        assert torch.allclose(pieces.information, whole.information, rtol=0, atol=1e-12)
        assert torch.allclose(epig_of_probs(probs, targets), gain, rtol=0, atol=1e-12)


def test_drawn_configurations_come_near_to_all_of_them() -> None:
    probs = draws(8, 9, 3)
    exact = batch_bald_of_probs(probs, 6, configurations=3**6)
    near = batch_bald_of_probs(probs, 6, configurations=40)  # draws from the fourth row on
    assert near.rows[:4].tolist() == exact.rows[:4].tolist()
    assert torch.equal(near.information[:4], exact.information[:4])
    many = batch_bald_of_probs(probs, 6, configurations=700)  # the last step alone is drawn
    assert float((many.information - exact.information).abs().max()) < 0.02
    own = [joint_information(probs, many.rows.tolist()[: count + 1]) for count in range(6)]
    assert many.information.tolist() == pytest.approx(own, abs=0.02)
    again = batch_bald_of_probs(probs, 6, configurations=40)
    assert torch.equal(near.information, again.information)


def test_drawn_configurations_have_no_bias() -> None:
    probs = draws(7, 3, 2, sharpness=4.0)
    exact = batch_bald_of_probs(probs, 3)
    each = torch.stack([batch_bald_of_probs(probs, 3, key=Key(i), configurations=2).information for i in range(400)])
    error = each.std(0) / 20
    assert bool(((each.mean(0) - exact.information).abs() <= 5 * error + 1e-12).all())
    assert float(error[2]) > 0


def test_a_row_that_repeats_another_tells_what_is_left() -> None:
    sure = torch.eye(2).unsqueeze(1)  # two draws, each sure of another label
    chosen = batch_bald_of_probs(torch.cat([sure, sure, 0.9 * sure + 0.05], 1), 3)
    assert chosen.information.tolist() == pytest.approx([0.6931472] * 3, abs=1e-6)  # all is known after the first


def test_epig_against_a_loop_over_pairs() -> None:
    probs, targets = draws(6, 4, 3), draws(6, 5, 2, key=Key(1))
    expected = []
    for row in range(4):
        pairs = []
        for target in range(5):
            joint = torch.einsum("sc,sk->ck", probs[:, row], targets[:, target]) / 6
            independent = torch.outer(joint.sum(1), joint.sum(0))
            pairs.append(float((joint * (joint / independent).log()).sum()))
        expected.append(sum(pairs) / 5)
    assert epig_of_probs(probs, targets).tolist() == pytest.approx(expected, abs=1e-10)


def test_epig_is_at_most_the_information_about_the_function() -> None:
    probs = draws(6, 4, 3)
    single = [joint_information(probs, [row]) for row in range(4)]
    assert all(gain <= bound + 1e-12 for gain, bound in zip(epig_of_probs(probs, probs).tolist(), single, strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: batch_bald_of_probs(p, 8), "at most the 7 rows"),
        (lambda p: batch_bald_of_probs(p, 0), "size must be a positive whole number"),
        (lambda p: batch_bald_of_probs(p, 2, configurations=0), "configurations must be a positive whole number"),
        (lambda p: batch_bald_of_probs(p[0], 2), r"class probabilities \(S, N, C\)"),
        (lambda p: batch_bald_of_probs(p.log(), 2), "sum to 1"),
        (lambda p: epig_of_probs(p, p[:3]), "the same draws of the function"),
    ],
)
def test_what_cannot_be_chosen_is_refused(call: object, message: str) -> None:
    with pytest.raises((ValueError, BadData), match=message):
        call(draws(6, 7, 3))  # type: ignore[operator]
