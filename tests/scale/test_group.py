"""Sums in a fixed order, groups of one process, and what is refused."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import posterity as po
from benchmarks.distributed_cases import CASES
from posterity import curvature, scale
from posterity.estimators import automatic
from posterity.inference.validator import Validator
from posterity.model.passes import Passes
from posterity.processes import active, done_by_first, using, writes
from posterity.scale import group as groups
from posterity.scale.sums import bounds, branch_sum, branches


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with scale.processes() as own:
            yield own
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("blocks", [1, 2, 8, 64])
@pytest.mark.parametrize("rows", [0, 1, 5, 64, 1003])
def test_blocks_hold_each_row_once(blocks, rows):
    each = [bounds(rows, blocks, block) for block in range(blocks)]
    assert [row for low, high in each for row in range(low, high)] == list(range(rows))
    assert max(high - low for low, high in each) - min(high - low for low, high in each) <= 1


@pytest.mark.parametrize("blocks", [8, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
def test_sums_of_branches_have_the_bits_of_the_whole_tree(blocks, size):
    numbers = torch.randn(blocks, 3, generator=torch.Generator("cpu").manual_seed(0), device="cpu")

    def leaf(node):
        return [numbers[node[0]].clone()] if node[1] - node[0] == 1 else None

    known = {}
    for rank in range(size):
        known.update((node, list(branch_sum(node, leaf))) for node in branches(rank, size, blocks))
    covered = sorted(block for low, high in known for block in range(low, high))
    assert covered == list(range(blocks))
    assert torch.equal(branch_sum((0, blocks), known.get)[0], branch_sum((0, blocks), leaf)[0])


def test_total_sums_tensors_of_different_dtypes(group):
    numbers = torch.arange(13.0, device="cpu")
    sums = group.total(lambda low, high: [numbers[low:high].sum(), torch.tensor([high - low])], 13)
    assert float(sums[0]) == 78.0
    assert sums[1].tolist() == [13]


def test_fewer_rows_than_blocks(group):
    assert group.total(lambda low, high: [torch.ones(high - low).sum()], 3)[0].item() == 3.0


@pytest.mark.parametrize("rows", [3, 8, 21])
def test_each_block_is_computed_once_and_in_order(group, rows):
    seen = []

    def part(low, high):
        seen.extend(range(low, high))
        return [torch.ones(high - low).sum()]

    group.total(part, rows)
    assert seen == list(range(rows))


class Counted(Dataset):
    """Forty rows, and which of them were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.read.append(index)
        return torch.full((1,), index / 40), torch.zeros(1)


@pytest.mark.parametrize(
    "method",
    [
        po.methods.Laplace(batch_size=16, structure=curvature.CorrectedKronecker()),
        po.methods.SWAG(po.methods.MAP(steps=20, batch_size=16), every=1),
        po.methods.VariationalEM(po.methods.MeanField(20, 16), (po.evidence.PriorScale(),)),
        po.methods.Conjugate(batch_size=16),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_shared_fit_reads_a_stream_as_often_as_one_process(group, method):
    joint = po.Joint(nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(scale=1.0), num_data=40)
    shared, alone = Counted(), Counted()
    po.infer(method, joint, DataLoader(shared, batch_size=16), progress=False)
    with using(None):
        po.infer(method, joint, DataLoader(alone, batch_size=16), progress=False)
    # Processes also compare the first batch.
    assert [row for row in shared.read if row >= 16] == [row for row in alone.read if row >= 16]


@pytest.mark.parametrize("batch_size", [2, 16])
def test_validation_reads_a_stream_once(group, batch_size):
    rows = Counted()
    joint = po.Joint(nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(scale=1.0), num_data=40)
    q, _ = po.infer(po.methods.MAP(steps=1), joint, (torch.ones(40, 1), torch.ones(40, 1)), progress=False)
    score = Validator(joint, DataLoader(rows, batch_size=batch_size))
    rows.read.clear()
    score(q)
    assert rows.read == list(range(40))


def test_a_group_is_active_inside_the_context_only(group):
    assert active() is group
    assert writes()
    with using(None):
        assert active() is None
    done = []
    done_by_first(lambda: done.append(active()))  # what one process does alone asks the others for nothing
    assert done == [None]


def test_infer_shares_its_steps_and_the_posterior_does_not(group):
    x = torch.linspace(-1, 1, 20).unsqueeze(1)
    joint = po.Joint(nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(scale=1.0), num_data=20)
    seen = []

    class Spy(po.inference.Callback):
        def after_step(self, run):
            seen.append(run.joint.network.passes.processes)

    q, _ = po.infer(po.methods.MAP(steps=5), joint, (x, 2 * x), callbacks=[Spy()], progress=False)
    assert seen == [None] * 5
    assert q.joint.network.passes.processes is None


@pytest.mark.parametrize("name", ["conjugate", "conjugate wide"])
def test_conjugate_shares_the_rows_of_each_batch(group, monkeypatch, name):
    seen, total = [], group.total

    def spy(part, rows):
        seen.append(rows)
        return total(part, rows)

    monkeypatch.setattr(group, "total", spy)
    CASES[name]()
    assert seen == {"conjugate": [64, 64, 64, 11], "conjugate wide": [203]}[name]


def test_what_goes_by_the_clock_is_not_shared(group, monkeypatch):
    seen = []

    def folds(*_, **__):
        seen.append(active())
        raise InterruptedError

    monkeypatch.setattr(automatic, "folds_of", folds)
    with pytest.raises(InterruptedError):
        automatic.fit_automatic(torch.randn(20, 2), torch.randn(20, 1), "regression")
    assert seen == [None]


def test_modules_of_data_parallel_are_unwrapped(group):
    module = nn.Linear(2, 1)
    wrapped = nn.parallel.DistributedDataParallel(module)
    assert po.Network(wrapped).layout.names == ("weight", "bias")
    assert torch.equal(po.Network(wrapped).initial, po.Network(module).initial)


def test_modules_of_fsdp_are_refused():
    class FSDPModule:
        pass

    class Sharded(FSDPModule, nn.Linear):
        pass

    with pytest.raises(TypeError, match=r"Got a module of FSDP.*Pass the module as it was before"):
        po.Network(nn.Sequential(Sharded(1, 1)))


def test_batch_norm_is_refused(group):
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    joint = po.Joint(net, po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(scale=1.0), num_data=4)
    with pytest.raises(ValueError, match="Use group or layer norm, run one process, or freeze batch norm"):
        po.infer(po.methods.MAP(steps=2, batch_size=2), joint, (torch.ones(4, 1), torch.ones(4, 1)))


def test_dropout_keeps_its_masks_for_all_rows(group):
    net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    x = torch.linspace(-1, 1, 20).unsqueeze(1)
    joint = po.Joint(net, po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(scale=1.0), num_data=20)
    method = po.methods.MCDropout(steps=10, batch_size=10)
    shared = po.infer(method, joint, (x, x), progress=False)[1]["loss"]
    with using(None):
        alone = po.infer(method, joint, (x, x), progress=False)[1]["loss"]
    assert torch.equal(shared, alone)


def test_join_outside_of_torchrun_says_what_to_do(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"RANK is not set\. Start the program by torchrun"), scale.join():
        pass


def test_each_join_has_a_store_of_its_own(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    agent, start, stores = dist.HashStore(), dist.init_process_group, []
    monkeypatch.setattr(groups, "rendezvous", lambda *_, **__: iter([(agent, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: stores.append(k["store"]) or start(*a, **k))
    for _ in range(2):
        with scale.join():
            pass
        stores[0].set("address", "of the first")
    assert not stores[1].check(["address"])


def test_processes_without_a_group_say_what_to_do():
    with pytest.raises(RuntimeError, match="init_process_group"), scale.processes():
        pass


def test_gathered_outside_of_a_group_says_what_to_do():
    with pytest.raises(RuntimeError, match="Call it inside"):
        scale.gathered((torch.ones(2, 1), torch.ones(2)))


def test_a_lost_process_is_no_error_that_others_swallow():
    assert not issubclass(scale.LostProcess, po.errors.PosterityError)
    assert scale.LostProcess.exit_code == 1


def test_members_of_a_convolutional_network_have_the_gradients_of_all_rows(group):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).double()
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(scale=1.0), num_data=60)
    network = joint.network.replace(passes=Passes(processes=group))
    assert network.one_by_one or network.device.type == "cuda"  # narrow kernels run together there
    x = torch.randn(21, 1, 4, 4, dtype=torch.float64)
    batch = po.model.Batch(x, (x[:, 0, 0, 0] > 0).long())
    theta = joint.initial() * torch.linspace(0.5, 1.5, 3, dtype=torch.float64)[:, None]
    alone, shared = (own.value_and_grad(theta, batch) for own in (joint, replace(joint, network=network)))
    torch.testing.assert_close(shared[:2], alone[:2], rtol=1e-12, atol=1e-12)
