import pytest
import torch

from posterity.model.data import Batch, OwnOrders, Reordered, TensorData
from posterity.numerics.random import Key

pytestmark = pytest.mark.cpu
ROWS, MEMBERS = 11, 3


def keys(key):
    return [key.fold(f"member {index}") for index in range(MEMBERS)]


def data(per_member):
    x = torch.arange(float(ROWS)).unsqueeze(1)
    batch = Batch(x, x[:, 0].long(), x[:, 0] + 1.0)
    if per_member:
        stacked = [torch.stack([100.0 * m + t for m in range(MEMBERS)]) for t in (x, x[:, 0], x[:, 0])]
        batch = Batch(*stacked, per_member=True)
    return TensorData(batch)


@pytest.mark.parametrize("start", [0, 2, 3, 7])
@pytest.mark.parametrize("per_member", [False, True], ids=["shared rows", "rows of their own"])
def test_a_member_sees_the_batches_of_its_key(per_member, start):
    rows = data(per_member)
    together = list(OwnOrders(rows, keys).minibatches(3, 8, Key(5)).from_step(start))
    assert len(together) == 8 - start
    for index in range(MEMBERS):
        own = Reordered(TensorData(rows.rows.member(index)), f"member {index}")
        for batch, alone in zip(together, own.minibatches(3, 8, Key(5)).from_step(start), strict=True):
            assert batch.per_member
            for name, tensor in batch.member(index).tensors.items():
                assert torch.equal(tensor, alone.tensors[name])


@pytest.mark.parametrize("size", [None, ROWS])
def test_batches_of_all_rows_are_shared(size):
    rows = data(False)
    (batch,) = OwnOrders(rows, keys).minibatches(size, 1, Key(0)).from_step(0)
    assert batch is rows.rows


def test_passes_and_fingerprints_are_those_of_the_data():
    rows = data(False)
    orders, one = OwnOrders(rows, keys), Reordered(rows, "member 1")
    for other in (orders, one, orders.to(torch.device("cpu")), one.to(torch.device("cpu"))):
        assert other.num_data == ROWS
        assert torch.equal(other.first().targets, rows.first().targets)
        pairs = zip(other.passes(4, 2).from_step(1), rows.passes(4, 2).from_step(1), strict=True)
        assert all(torch.equal(a.inputs, b.inputs) for a, b in pairs)
    assert one.fingerprint() != Reordered(rows, "member 2").fingerprint()
    assert orders.fingerprint() == rows.fingerprint()
