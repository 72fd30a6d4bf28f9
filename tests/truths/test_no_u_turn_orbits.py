"""Trees against the orbit that they grow on: among its points each must be left as often as it is come to."""

import math

import pytest
import torch
from torch import Tensor

from posterity.kernels import Place, leapfrog, no_u_turn, place_at
from posterity.kernels.hamiltonian import log_joint

pytestmark = pytest.mark.cpu  # draws by a generator of the CPU

FLOAT64 = torch.float64
CHAINS = 1000


def bent(x: Tensor) -> tuple[Tensor, Tensor]:
    """x1 ~ N(0, 1), x2 | x1 ~ N(0.7 x1^2, 0.3), without constants."""
    away = (x[:, 1] - 0.7 * x[:, 0].square()) / 0.3
    value = -0.5 * x[:, 0].square() - 0.15 * away.square()
    return value, torch.stack([-x[:, 0] + 1.4 * x[:, 0] * away, -away], -1)


def orbit(step: float, length: int, generator: torch.Generator) -> list[tuple[Place, Tensor]]:
    """Places (1, 2) and momenta of so many leapfrogs to either side of a random point."""
    begin = place_at(bent, 0.7 * torch.randn(1, 2, dtype=FLOAT64, generator=generator))
    momentum = torch.randn(1, 2, dtype=FLOAT64, generator=generator)
    sides = []
    for signed in (-step, step):
        points = [(begin, momentum)]
        for _ in range(length):
            points.append(leapfrog(bent, *points[-1], signed))
        sides.append(points)
    return [*reversed(sides[0][1:]), *sides[1]]


def arrivals(depths: int, first: int, step: float, seed: int, mistake: str = "") -> tuple[float, float]:
    """The weight that comes to a point from all points of its orbit, over its own; and the error of that.

    A tree of `depths` doublings reaches 2^depths - 1 points to either side.
    """
    generator = torch.Generator().manual_seed(seed)
    points = orbit(step, 2**depths - 1, generator)
    levels = torch.stack([log_joint(place.value, momentum) for place, momentum in points])  # (K, 1)
    weights = (levels - levels[len(points) // 2]).exp().squeeze(1)
    place = Place(*(torch.cat([at[k] for at, _ in points]).repeat_interleave(CHAINS, 0) for k in range(3)))
    momentum = torch.cat([own for _, own in points]).repeat_interleave(CHAINS, 0)
    chains = len(momentum)

    def logs(*shape: int) -> Tensor:
        return torch.rand(*shape, chains, dtype=FLOAT64, generator=generator).log()

    def noise(pieces: int) -> Tensor:
        found = logs(pieces, 2)
        if mistake == "the newest piece":
            found[:, 1] = -math.inf
        return found

    directions = 2.0 * (logs(depths + 1) < math.log(0.5)).to(FLOAT64) - 1.0
    scale = torch.ones(1, 2, dtype=FLOAT64)
    steps = torch.full((chains,), step, dtype=FLOAT64)
    drawn, _ = no_u_turn(bent, place, momentum, steps, scale, directions, logs(depths), noise, first=first)
    middle = points[len(points) // 2][0].position
    came = ((place.position + drawn.position - middle).abs().amax(-1) < 1e-7).to(FLOAT64).reshape(-1, CHAINS)
    error = (weights.square() * came.var(1) / CHAINS).sum().sqrt()
    return float((weights * came.mean(1)).sum()), float(error)


def misfit(depths: int, first: int, mistake: str = "") -> float:
    """The mean of six squares of what should be standard normal numbers: 4e-5 of such are above 5."""
    found = [arrivals(depths, first, 0.12 if seed % 2 else 0.25, seed, mistake) for seed in range(6)]
    return sum(((share - 1.0) / error) ** 2 for share, error in found) / len(found)


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("depths", [3, 5])
def test_as_much_comes_to_a_point_as_it_has(depths: int, first: int) -> None:
    assert misfit(depths, first) < 5.0


def test_a_draw_that_prefers_one_piece_of_a_half_is_seen() -> None:
    assert misfit(5, 1, "the newest piece") > 5.0
