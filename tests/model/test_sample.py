"""Some rows that stand for all: at equal distances, or those that can be joined."""

import pytest
import torch
from torch.utils.data import DataLoader

from posterity.model.data import as_data

X = torch.arange(20.0).unsqueeze(1)


def test_rows_at_equal_distances_weigh_as_much_as_all():
    for source in ((X, X), DataLoader(list(zip(X, X, strict=True)), batch_size=3)):
        rows = as_data(source).sample(7)
        assert rows.targets.flatten().tolist() == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0]
        assert float(rows.weights.sum()) == pytest.approx(20.0)


def test_own_weights_and_members_are_kept():
    rows = as_data((X, X, 1.0 + X.flatten())).sample(10)
    torch.testing.assert_close(rows.weights, 2.0 * (1.0 + rows.targets.flatten()))
    both = as_data((X.expand(2, 20, 1), X.expand(2, 20, 1)), per_member=True).sample(5)
    assert both.targets.shape == (2, 5, 1)
    assert both.weights.sum(1).tolist() == [20.0, 20.0]


def test_where_rows_are_dropped_the_first_batch_is_taken():
    rows = as_data(DataLoader(list(zip(X, X, strict=True)), batch_size=8, drop_last=True)).sample(4)
    assert rows.targets.flatten().tolist() == [0.0, 2.0, 4.0, 6.0]
    assert rows.weights.tolist() == [5.0] * 4


def test_where_shapes_differ_the_most_frequent_is_taken(caplog):
    loader = DataLoader([(torch.ones(3 if i < 4 or i >= 16 else 5, 2), X[i]) for i in range(20)], batch_size=4)
    rows = as_data(loader).sample(10)
    assert rows.targets.flatten().tolist() == [4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    assert float(rows.weights.sum()) == pytest.approx(20.0)
    assert "chosen by 6 rows of one shape, out of 10" in caplog.text
