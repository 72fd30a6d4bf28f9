"""The benchmark of VGG-19's step: all ways run, on a CPU too."""

import pytest
from benchmarkfiles import load

from posterity.model import backward
from posterity.model.network import Network

benchmark = load("penalised_vgg_cuda")


@pytest.mark.cpu
def test_all_ways_run_and_leave_the_library_as_it_was(capsys):
    before = backward.LANES, Network.one_by_one
    given = "--device cpu --width 1 --batches 4 --members 2 --steps 3 --penalties rows,l2 --precision float32"
    benchmark.main(given.split())
    _, *lines = capsys.readouterr().out.splitlines()
    for line, way in zip(lines, [*benchmark.WAYS, benchmark.USUAL], strict=True):
        assert f"  {way}" in line
        assert float(line.split("(")[0].split()[-1]) > 0.0
    assert (backward.LANES, Network.one_by_one) == before
