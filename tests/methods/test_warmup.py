"""What a warm-up learns: chains that start badly, and the windows of many chains."""

import pytest
import torch

import posterity as po
from posterity.kernels import windows
from posterity.kernels.adaptation import DenseMass
from posterity.methods import NUTS, Metropolis
from posterity.model.batch import Batch
from posterity.model.data import TensorData
from posterity.model.density import Positive


def regression() -> po.Density:
    """y ~ N(w x, sigma^2) with 100 rows whose x and y are large: steep wherever sigma is small."""
    x = torch.linspace(-100.0, 100.0, 100, dtype=torch.float64)
    y = x + torch.sin(x)

    def log_density(w: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        away = (y - w.unsqueeze(-1) * x) / sigma.unsqueeze(-1)
        return -0.5 * away.square().sum(-1) - 100 * sigma.log()

    return po.Density(log_density, {"w": (), "sigma": ()}, {"sigma": Positive()}, batched=True, dtype=torch.float64)


def test_no_chain_stays_where_it_started_badly() -> None:
    start = torch.zeros(16, 2, dtype=torch.float64)
    start[:2, 1] = -4.0  # two of sixteen where sigma is 0.02 and the residuals are 100
    q, _ = po.infer(
        NUTS(draws=50, warmup=150, chains=16, mass=DenseMass()), regression(), None, start=start, accelerate="off"
    )
    assert not q.statistics["divergent"].any()
    sigma = q.values()["sigma"].mean(1)  # (C,)
    torch.testing.assert_close(sigma, torch.full_like(sigma, 0.7), rtol=0.1, atol=0.0)


def test_chains_of_one_problem_end_with_one_step_size() -> None:
    _, trace = po.infer(NUTS(draws=5, warmup=60, chains=8), regression(), None, accelerate="off")
    steps = trace["step_size"]  # (steps, C)
    assert (steps[20].max() / steps[20].min()) > 1.01
    assert torch.equal(steps[-1], steps[-1, :1].expand(8))


def test_a_chain_by_itself_ends_near_the_acceptance_that_it_wants() -> None:
    """A random walk accepts with probabilities near 0 or 1, all of which count as they are."""
    inputs = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64).reshape(5, 1).expand(200, 5, 1)
    joint = po.Joint(torch.nn.Linear(1, 3).double(), po.likelihoods.Gaussian(scale=1.0), po.priors.Normal(), num_data=5)
    data = TensorData(Batch(inputs, torch.zeros(200, 5, 3, dtype=torch.float64), per_member=True))
    q, _ = po.infer(Metropolis(draws=50, warmup=300, chains=200, thin=1), joint, data, accelerate="off")
    assert 0.14 < float(q.statistics["accept"].mean()) < 0.3


@pytest.mark.parametrize("warmup", [10, 20, 25, 30, 50])
def test_a_short_warm_up_ends_with_steps_that_are_accepted(warmup: int) -> None:
    """Two transitions after the last mass matrix are too few: steps stayed ten times too large, and chains still."""
    scales = torch.logspace(-1.0, 1.0, 10, dtype=torch.float64)
    density = po.Density(
        lambda x: -0.5 * (x / scales).square().sum(-1), {"x": (10,)}, batched=True, dtype=torch.float64
    )
    q, _ = po.infer(NUTS(draws=10, warmup=warmup, chains=8, max_depth=4), density, None, accelerate="off")
    assert float(q.statistics["accept"].mean()) > 0.5


@pytest.mark.parametrize("chains", [1, 4, 5, 16, 1000])
@pytest.mark.parametrize("warmup", [20, 75, 149, 150, 500, 1000])
def test_windows_lie_inside_the_warm_up_and_leave_time_for_the_last_step_size(chains: int, warmup: int) -> None:
    first, ends = windows(warmup, chains)
    assert 0 < first < ends[0]
    assert list(ends) == sorted(set(ends))
    assert ends[-1] <= warmup - min(50, max(5, 0.1 * warmup - 1))
