"""IVON under DistributedDataParallel: two processes with half of the rows each are one with all."""

import subprocess
import sys

import pytest
import torch

TRAIN = """
import sys, torch
from torch import nn
from posterity.optim import IVON
from posterity.numerics import Key

rank, world, meeting, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
model = net
if world > 1:
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(net)
torch.manual_seed(rank)  # processes often differ in torch's own seed
x = Key(1).normal((16, 3), torch.float64)
y = (x.sum(-1) > 0).long()
rows = slice(rank * 16 // world, (rank + 1) * 16 // world)
opt = IVON(model.parameters(), lr=0.1, ess=100.0, beta2=0.95)
for step in range(6):
    for _ in range(1 + step % 2):
        with opt.sampled_params(train=True):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    opt.step()
curvature = [opt.state[p]["curvature"] for p in net.parameters()]
torch.save([*(p.detach() for p in net.parameters()), *curvature], out)
if world > 1:
    torch.distributed.destroy_process_group()
"""


@pytest.mark.cpu
def test_two_processes_are_one(tmp_path):
    def start(rank, world, out):
        command = [sys.executable, "-c", TRAIN, str(rank), str(world), str(tmp_path / "meeting"), str(out)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    outs = [tmp_path / f"{name}.pt" for name in ("one", "first", "second")]
    running = [start(0, 1, outs[0]), start(0, 2, outs[1]), start(1, 2, outs[2])]
    for process in running:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    one, first, second = (torch.load(out, weights_only=True) for out in outs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for alone, together in zip(one, first, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)
