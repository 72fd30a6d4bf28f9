"""The work of methods against products counted by hand, and by the floor of the benchmarks."""

from dataclasses import replace

import pytest
import torch
from benchmarkfiles import load
from torch import nn

import posterity as po
from posterity.curvature import Diagonal, Full, Kronecker
from posterity.inference import Method
from posterity.inference.costs import NETWORK, estimate
from posterity.inference.method import Work
from posterity.inference.rates import RATES
from posterity.methods import HMC, MAP, NUTS, SGHMC, Conjugate, Ensemble, Laplace, MeanField, NaturalGradient
from posterity.methods.parts.gradients.drawn_weights import WeightSampling
from posterity.methods.parts.work import row_products

pytestmark = pytest.mark.cpu
floor = load("floor")
SIZES = (7, 5, 4, 3)
WEIGHTS = 7 * 5 + 5 + 5 * 4 + 4 + 4 * 3 + 3


def problem(module: nn.Module | None = None, rows: int = 40) -> tuple[po.Joint, tuple[torch.Tensor, torch.Tensor]]:
    joint = po.Joint(module or po.networks.MLP(SIZES), po.likelihoods.Categorical(), po.priors.Normal(), num_data=rows)
    return joint, (torch.zeros(rows, 7), torch.arange(rows) % 3)


def work_of(method: Method, joint: po.Joint, rows: object) -> Work | None:
    data = po.as_data(rows)
    return method.settled(joint, data).work(joint, data)


def test_products_of_linear_layers_are_those_of_their_shapes() -> None:
    joint, rows = problem()
    forward = 7 * 5 + 5 * 4 + 4 * 3
    assert row_products(joint, po.as_data(rows)) == (forward, forward + 5 * 4 + 4 * 3)


def test_products_of_convolutions_are_those_of_loops() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 2, stride=2), nn.Flatten())
    module.append(nn.Linear(4 * 3 * 3, 5))
    joint = po.Joint(module, po.likelihoods.Categorical(), po.priors.Normal(), num_data=8)
    first = sum(1 for _ in range(6 * 6) for _ in range(3) for _ in range(2 * 3 * 3))  # pixels, channels, patch
    second = sum(1 for _ in range(3 * 3) for _ in range(4) for _ in range(3 * 2 * 2))
    last = 4 * 3 * 3 * 5
    data = po.as_data((torch.zeros(8, 2, 6, 6), torch.arange(8) % 5))
    assert row_products(joint, data) == (first + second + last, first + 2 * (second + last))


def test_gradients_are_counted_by_rows_draws_and_members() -> None:
    joint, rows = problem()
    a_row = sum(row_products(joint, po.as_data(rows)))
    adam = po.optim.Adam()
    of_map = work_of(MAP(steps=9, batch_size=16, optimizer=adam), joint, rows)
    assert of_map is not None
    assert (of_map.multiply_adds, of_map.summed, of_map.units) == (16 * a_row, WEIGHTS, 9)
    for kind in (MeanField, NaturalGradient):
        drawn = work_of(kind(steps=9, batch_size=16, optimizer=adam, estimator=WeightSampling(3)), joint, rows)
        assert drawn is not None
        assert (drawn.kind, drawn.multiply_adds, drawn.summed) == (kind.__name__, 3 * 16 * a_row, 2 * WEIGHTS)
    many = work_of(Ensemble(MAP(steps=9, batch_size=16, optimizer=adam), size=4), joint, rows)
    assert many == of_map.times(4)
    chains = work_of(SGHMC(chains=2, warmup=5, draws=3, thin=2, batch_size=16), joint, rows)
    assert chains is not None
    assert (chains.multiply_adds, chains.units, chains.summed) == (2 * 16 * a_row, 11, 2 * WEIGHTS)
    leapfrogs = work_of(HMC(chains=2, warmup=5, draws=3, steps=4), joint, rows)
    assert leapfrogs is not None
    assert (leapfrogs.multiply_adds, leapfrogs.units, leapfrogs.unit) == (2 * 40 * a_row, 32, "leapfrog")
    trajectories = work_of(NUTS(chains=2, warmup=5, draws=3), joint, rows)
    assert trajectories == replace(leapfrogs, units=None)


def test_members_of_a_joint_count_once_each() -> None:
    joint, rows = problem()
    scales = torch.tensor([0.5, 1.0, 2.0])
    several = po.Joint(po.networks.MLP(SIZES), po.likelihoods.Categorical(), po.priors.Normal(scales), num_data=40)
    method = MAP(steps=9, batch_size=16, optimizer=po.optim.Adam())
    one, three = work_of(method, joint, rows), work_of(method, several, rows)
    assert one is not None
    assert three == one.times(3)


def test_curvature_takes_the_products_of_the_floor() -> None:
    joint, rows = problem()
    layers = floor.shapes(po.networks.MLP(SIZES), torch.zeros(1, 7))
    columns = 3  # of three classes
    diagonal = work_of(Laplace(structure=Diagonal(), tuning=None, batch_size=10), joint, rows)
    kronecker = work_of(Laplace(structure=Kronecker(), tuning=None, batch_size=10), joint, rows)
    full = work_of(Laplace(structure=Full(), tuning=None, batch_size=10), joint, rows)
    assert diagonal is not None
    assert kronecker is not None
    assert full is not None
    biases = 5 + 4 + 3  # the squares of the library hold them too
    assert diagonal.multiply_adds == 10 * (floor.diagonal(layers, columns) + biases)
    assert kronecker.multiply_adds == 10 * floor.kronecker(layers, columns)
    assert kronecker.once == 8**3 + 5**3 + 6**3 + 4**3 + 5**3 + 3**3
    passes = floor.forward(layers) + columns * floor.column(layers)
    assert full.multiply_adds == 10 * (passes + columns * WEIGHTS**2)
    assert [each.units for each in (diagonal, kronecker, full)] == [4, 4, 4]
    assert (diagonal.summed, full.summed) == (WEIGHTS, WEIGHTS**2)


def test_a_linear_solve_is_counted_by_its_heights() -> None:
    joint = po.Joint(nn.Linear(7, 2), po.likelihoods.Gaussian(scale=1.0), po.priors.Normal(), num_data=40)
    found = work_of(Conjugate(batch_size=10), joint, (torch.zeros(40, 7), torch.zeros(40, 2)))
    assert found is not None
    assert (found.multiply_adds, found.units) == ((10 * 2 + 16) * 16**2, 4)


@pytest.mark.parametrize(
    "method", [MAP(batch_size=None), Laplace(subset=po.methods.LastLayer()), po.methods.FullRank(steps=5)]
)
def test_what_is_not_modelled_says_so(method: Method) -> None:
    joint, rows = problem()
    found = po.plan(method, joint, rows)
    assert found.time is None
    assert str(found).endswith("\ntime: not modelled")


def test_rows_that_are_read_and_rounded_passes_have_no_rates() -> None:
    joint, rows = problem()
    method = MAP(steps=9, batch_size=16, optimizer=po.optim.Adam())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=8)
    assert po.plan(method, joint, rows).time is not None
    assert po.plan(method, joint, loader).time is None
    assert po.plan(method, joint, rows, precision="bf16").time is None


def test_a_time_is_its_work_at_the_rates() -> None:
    joint, rows = problem()
    method = MAP(steps=9, batch_size=16, optimizer=po.optim.Adam())
    work, alone = work_of(method, joint, rows), po.plan(method, joint, rows).time
    assert work is not None
    assert alone is not None
    product, byte, unit, _ = RATES["MAP"]
    assert alone.unit_seconds == pytest.approx(product * work.multiply_adds + byte * work.moved + unit)
    assert alone.total == pytest.approx(9 * alone.unit_seconds)
    shared = po.plan(method, joint, rows, world_size=4)
    own = work_of(replace(method, batch_size=4), joint, tuple(tensor[:10] for tensor in rows))
    assert shared.time is not None
    sent = 2 * 3 * 4 * WEIGHTS // 4
    assert shared.time.sent == sent
    assert own is not None
    seconds = product * own.multiply_adds + byte * own.moved + unit + sent / NETWORK
    assert shared.time.unit_seconds == pytest.approx(seconds)
    assert f"sums over the devices, a step: {WEIGHTS} numbers" in str(shared)
    assert "devices" not in str(po.plan(method, joint, rows))


def test_sums_at_the_end_are_sent_once_and_rates_of_a_gpu_are_rough() -> None:
    joint, rows = problem()
    work = work_of(Laplace(structure=Full(), tuning=None, batch_size=10), joint, rows)
    alone, shared, gpu = estimate(work, "cpu"), estimate(work, "cpu", 2), estimate(work, "cuda")
    assert alone is not None
    assert shared is not None
    assert gpu is not None
    assert shared.unit_seconds == alone.unit_seconds
    assert shared.once - alone.once == pytest.approx(8 * WEIGHTS**2 / NETWORK)
    assert "rough" in gpu.origin
    assert "rough" not in alone.origin
    assert estimate(work, "mps") is None
    assert estimate(None, "cpu") is None
