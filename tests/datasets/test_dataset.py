"""Data sets and splits of them."""

import pytest
import torch

from posterity.datasets import DataSet, LabelledData
from posterity.errors import BadData


def numbered(count: int) -> DataSet:
    rows = LabelledData(torch.arange(count)[:, None].float(), torch.arange(count))
    return DataSet("numbered", "classification", rows, rows, tuple(map(str, range(count))))


@pytest.mark.parametrize(("fraction", "held"), [(0.1, 5), (0.5, 25), (0.98, 49), (1 / 3, 17)])
def test_validation_split_parts_the_training_rows(fraction, held):
    data = numbered(50)
    rest, held_out = data.validation_split(fraction, seed=3)
    together = torch.cat((rest.train.targets, held_out.targets))
    assert len(held_out) == held
    assert torch.equal(together.sort().values, torch.arange(50))
    assert rest.test is data.test
    assert rest.classes == data.classes


def test_validation_split_keeps_inputs_with_targets_and_their_order():
    rest, held_out = numbered(40).validation_split(0.25, seed=1)
    for part in (rest.train, held_out):
        assert torch.equal(part.inputs[:, 0].long(), part.targets)
        assert bool((part.targets.diff() > 0).all())


def test_validation_split_follows_the_seed():
    first, again, other = (numbered(100).validation_split(0.3, seed=seed)[1].targets for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, 0.01, 0.99, float("nan"), "half"])
def test_validation_split_refuses_a_fraction_that_leaves_one_side_empty(fraction):
    with pytest.raises(ValueError, match=r"fraction must be between 0 and 1 and leave rows .* of 10 rows\.$"):
        numbered(10).validation_split(fraction)


@pytest.mark.parametrize(("inputs", "targets"), [((3, 2), (4,)), ((), (1,)), ((1,), ())])
def test_labelled_data_need_as_many_targets_as_inputs(inputs, targets):
    with pytest.raises(BadData, match="must have the same number of rows"):
        LabelledData(torch.zeros(inputs), torch.zeros(targets))


def test_labelled_data_give_their_pair_and_length():
    rows = LabelledData(torch.zeros(4, 2), torch.ones(4))
    assert len(rows) == 4
    assert rows.pair[0] is rows.inputs
    assert rows.pair[1] is rows.targets
