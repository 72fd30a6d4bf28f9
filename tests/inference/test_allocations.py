"""The memory of a gradient, counted on few rows, against what many rows allocate."""

import pytest
import torch
from torch import nn

import posterity as po
from posterity.inference.allocations import _Allocations, allocated, batch_bytes, gradient_bytes

pytestmark = pytest.mark.cpu


def images(rows: int) -> tuple[po.Joint, tuple[torch.Tensor, torch.Tensor]]:
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(27, 5), nn.Tanh(), nn.Linear(5, 3)
    )
    joint = po.Joint(module, po.likelihoods.Categorical(), po.priors.Normal(), num_data=rows)
    return joint, (torch.zeros(rows, 1, 8, 8), torch.zeros(rows, dtype=torch.int64))


def tables(rows: int) -> tuple[po.Joint, tuple[torch.Tensor, torch.Tensor]]:
    joint = po.Joint(po.networks.MLP([4, 9, 7, 3]), po.likelihoods.Categorical(), po.priors.Normal(), num_data=rows)
    return joint, (torch.zeros(rows, 4), torch.zeros(rows, dtype=torch.int64))


@pytest.mark.parametrize("problem", [tables, images])
@pytest.mark.parametrize("members", [None, 3])
def test_few_rows_tell_what_many_take(problem, members) -> None:
    joint, rows = problem(500)
    counted = gradient_bytes(joint, po.as_data(rows), None, members)
    batch = joint.check(po.as_data(rows).first())
    theta = joint.initial() if members is None else joint.initial().expand(members, -1)
    grad = torch.zeros_like(theta, memory_format=torch.contiguous_format)
    with _Allocations() as run:
        joint.data_value_and_grad(theta, batch, joint.starting_buffers(theta), out=grad)
    assert counted == pytest.approx(max(run.levels), rel=1e-4)  # a value for each member aside


def test_freed_memory_does_not_count_and_memory_from_outside_never_did() -> None:
    outside = torch.zeros(1000)

    def call(rows: int) -> torch.Tensor:
        first = torch.zeros(rows, 10) + 1.0  # two tensors at once
        del first
        return outside.view(10, 100)[:, :rows] + 1.0

    assert allocated(call, 100) == 2 * 100 * 10 * 4


def test_counting_leaves_nothing_with_the_joint() -> None:
    joint, rows = tables(20)
    gradient_bytes(joint, po.as_data(rows), None)
    assert not joint._leaves._kept
    assert not joint.alone._leaves._kept


def test_a_batch_of_all_rows_takes_nothing_and_members_have_their_own_rows() -> None:
    _, rows = tables(20)
    data, row = po.as_data(rows), 4 * 4 + 8
    assert batch_bytes(data, None) == batch_bytes(data, 20) == 0
    assert batch_bytes(data, 5) == 5 * row + 20 * 8
    ensemble = po.methods.Ensemble(po.methods.MAP(), size=3)
    orders = po.model.data.OwnOrders(data, ensemble.order_keys)
    assert batch_bytes(orders, 5) == 3 * (5 * row + 20 * 8)
