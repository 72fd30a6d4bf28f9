"""Folds: every row scored once, no group or future in training, the same bits for the same seed."""

from datetime import UTC, date, datetime, timedelta

import numpy as np
import pytest
import torch

from posterity.errors import BadData
from posterity.inference import folds
from posterity.numerics.random import Key


def partition(parts, count):
    """Whether the test rows are a partition, and training rows the rest of it."""
    assert torch.cat([part.test for part in parts]).sort().values.tolist() == list(range(count))
    for part in parts:
        assert torch.cat([part.train, part.test]).sort().values.tolist() == list(range(count))
        assert (part.train.diff() > 0).all()
        assert (part.test.diff() > 0).all()


@pytest.mark.parametrize(("count", "num"), [(10, 5), (11, 3), (7, 7), (103, 10)])
def test_random_folds_are_a_balanced_partition(count, num):
    parts = folds(count, num, seed=1)
    partition(parts, count)
    sizes = [len(part.test) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_the_seed_fixes_the_folds_and_the_global_generator_stays():
    state = torch.get_rng_state()
    first, again, other = (folds(50, 5, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, [part.test for part in first], [part.test for part in again]))
    assert any(not torch.equal(a.test, b.test) for a, b in zip(first, other, strict=True))
    assert [part.test.tolist() for part in folds(12, 3, seed=0)] == PINNED


PINNED = [[6, 7, 8, 11], [0, 4, 5, 9], [1, 2, 3, 10]]
"""What Python 3.12 and torch 2.13 gave: other machines must give the same."""


def test_random_folds_are_uniform():
    """Each row is in fold 0 as often as in any other, within five standard errors."""
    hits = torch.zeros(9)
    for seed in range(900):
        hits[folds(9, 3, seed=seed)[0].test] += 1
    assert (hits / 900 - 1 / 3).abs().max() < 5 * (2 / 9 / 900) ** 0.5


@pytest.mark.parametrize("labels", [torch.tensor([0] * 30 + [1] * 7 + [2] * 3), np.array(["a"] * 30 + ["b"] * 10)])
def test_stratified_folds_have_equal_shares_of_each_class(labels):
    parts = folds(40, 5, labels=labels, seed=2)
    partition(parts, 40)
    values = np.asarray(labels.cpu() if isinstance(labels, torch.Tensor) else labels)
    for label in np.unique(values):
        counts = [int((values[part.test.numpy()] == label).sum()) for part in parts]
        assert max(counts) - min(counts) <= 1
    assert {len(part.test) for part in parts} == {8}


def test_no_group_is_in_two_folds():
    groups = [f"g{number}" for number in Key(5).uniform((200,), device="cpu").mul(23).long().tolist()]
    parts = folds(200, 4, groups=groups, seed=1)
    partition(parts, 200)
    names = np.array(groups)
    for part in parts:
        assert not set(names[part.train.numpy()]) & set(names[part.test.numpy()])
    sizes = [len(part.test) for part in parts]
    assert max(sizes) - min(sizes) <= 4


def test_groups_balance_classes_too():
    """Ten groups of one class and ten of another: each of five folds gets two of either."""
    groups = torch.arange(20).repeat_interleave(3)
    labels = (groups < 10).long()
    for part in folds(60, 5, groups=groups, labels=labels):
        assert int(labels[part.test].sum()) == 6
        assert len(part.test) == 12


def test_every_fold_has_a_group_even_where_one_is_huge():
    groups = torch.tensor([0] * 50 + [1, 2])
    assert sorted(len(part.test) for part in folds(52, 3, groups=groups)) == [1, 1, 50]


@pytest.mark.parametrize("kind", ["float", "datetime"])
def test_time_order_trains_on_the_past_only(kind):
    times = Key(2).uniform((41,), device="cpu").mul(30).floor()  # with ties
    given = times if kind == "float" else times.numpy().astype("int64").astype("datetime64[D]")
    parts = folds(41, 4, times=given)
    assert len(parts) == 4
    seen = parts[0].train
    for part in parts:
        assert torch.equal(part.train, seen)
        assert times[part.train].max() < times[part.test].min()
        seen = torch.cat([seen, part.test]).sort().values
        assert 5 <= len(part.test) <= 12
    assert len(seen) == 41


def test_time_order_with_many_ties_leaves_no_fold_empty():
    times = [0] * 30 + [1, 2, 3]
    assert [len(part.test) for part in folds(33, 3, times=times)] == [1, 1, 1]
    assert [len(part.test) for part in folds(33, 3, times=[3 - time for time in times])] == [1, 1, 30]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"count": 3, "num_folds": 5}, BadData, "at least 5 rows. Got 3"),
        ({"count": 3, "num_folds": 1}, ValueError, "from 2 up"),
        ({"count": 3, "num_folds": 2, "groups": [0, 0, 0]}, BadData, "at least 2 groups. Got 1"),
        ({"count": 3, "num_folds": 2, "groups": ["a", None, "b"]}, BadData, "Got none in row 1"),
        ({"count": 3, "num_folds": 2, "labels": [0, 1]}, BadData, "each of the 3 rows"),
        ({"count": 3, "num_folds": 2, "times": [0.0, float("nan"), 1.0]}, BadData, "row 1"),
        ({"count": 3, "num_folds": 2, "times": ["9", "10", "11"]}, BadData, "numbers or datetimes"),
        ({"count": 3, "num_folds": 2, "times": [1, 1, 2]}, BadData, "at least 3 times. Got 2"),
        ({"count": 3, "num_folds": 2, "times": [1, 2, 3], "groups": [1, 2, 3]}, ValueError, "together"),
    ],
)
def test_what_cannot_be_split_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        folds(**arguments)


@pytest.mark.parametrize(
    "times",
    [
        [date(2024, 1, 1) + timedelta(days=day) for day in range(12)],
        [datetime(2024, 1, 1, tzinfo=UTC) + timedelta(hours=hour) for hour in range(12)],
    ],
    ids=["dates", "with a zone"],
)
def test_dates_of_python_are_times(times: list[date]) -> None:
    for fold in folds(12, 3, times=times):
        assert int(fold.train.max()) < int(fold.test.min())
