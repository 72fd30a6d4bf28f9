"""The gradient flow of neurons for the mean-field functional, and the optimum at which it must end."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.numerics.random import Key
from posterity.theory import Flow, Neurons, Smooth, Square, WideProblem, optimum, particle_flow
from posterity_studies.grids import log_grid

ROWS, REACH = 16, 2.0
TAU = 0.05
SIDES = (8, 16)  # particles along each side of their square grid at the start
SPREAD = 2.5  # half the side of the square of means
TIMES, FIRST, LAST = 41, 0.02, 150.0
TOLERANCE = 1e-4
OTHERS = 20_000  # random neurons at which F' is compared with its value at the optimum


@dataclass(frozen=True, eq=False)
class Particles:
    """Flows of the neurons a erf(b x), by their number, and the best kind of neuron.

    An odd activation makes a neuron and its mirror image (-a, -b) the same: `best` and its mirror are both optimal,
    with any shares. `certificate` is the largest F'(nu*) at 20,000 other neurons minus its value at the best one: if
    this is not positive there is no better nu, because F is concave.
    """

    problem: WideProblem
    best: Neurons
    highest: float
    certificate: float
    flows: dict[int, Flow]

    def below(self, count: int) -> Tensor:
        """F(nu*) - F(nu_s), (T,)."""
        return self.highest - self.flows[count].values

    def distance(self, count: int) -> float:
        """The largest distance of a parameter from the best neuron or its mirror image, at the end."""
        theta = self.flows[count].neurons.theta[-1]
        mirrored = theta * torch.where(theta[:, :1] < 0.0, theta.new_tensor([-1.0, 1.0, -1.0, 1.0]), 1.0)
        return float((mirrored - self.best.theta).abs().max())

    def claims(self) -> dict[str, bool]:
        """Claims of theory about the flow, and whether they hold here."""
        smallest = min(float(flow.values.diff().min()) for flow in self.flows.values())
        return {
            "F never falls along the flow": smallest >= -1e-12,
            "no neuron has a larger F'(nu*) than the best": self.certificate <= 1e-12,
            "F reaches that of the optimum": max(float(self.below(count)[-1].abs()) for count in self.flows) < 1e-6,
            "all particles reach the optimum or its mirror image": max(map(self.distance, self.flows)) < 1e-3,
        }


def particles(key: Key) -> Particles:
    """Follow the particles to the optimum; the key draws the neurons that certify it."""
    x = torch.linspace(-REACH, REACH, ROWS, dtype=torch.float64, device="cpu")
    problem = WideProblem(x.unsqueeze(1), torch.tanh(2.0 * x), Square(), activation=Smooth("erf"))
    start = torch.tensor([[1.0, 0.4, 1.0, 0.3]], dtype=torch.float64, device="cpu")
    best = optimum(problem, Neurons.from_theta(start), torch.inf, TAU).neurons
    there, elsewhere = (float(problem.first_variation(best, at, TAU).max()) for at in (best, _others(key)))
    times = torch.tensor([0.0, *log_grid(FIRST, LAST, TIMES)], dtype=torch.float64, device="cpu")
    flows = {side**2: particle_flow(problem, _grid(problem, side), TAU, times, tolerance=TOLERANCE) for side in SIDES}
    return Particles(problem, best, float(problem.balanced(best, TAU)), elsewhere - there, flows)


def _grid(problem: WideProblem, side: int) -> Neurons:
    """Outer and inner means on a grid over a square; scales of the prior."""
    levels = SPREAD * (2.0 * (torch.arange(side, dtype=torch.float64, device="cpu") + 0.5) / side - 1.0)
    outer, inner = (mean.reshape(-1, 1) for mean in torch.meshgrid(levels, levels, indexing="ij"))
    ones = torch.ones_like(outer)
    return Neurons(outer, problem.prior.outer_scale * ones, inner, problem.prior.inner_scale * ones)


def _others(key: Key) -> Neurons:
    means = [3.0 * key.fold(index).normal((OTHERS, 1), torch.float64, "cpu") for index in (0, 1)]
    scales = [0.45 * key.fold(index).normal((OTHERS, 1), torch.float64, "cpu").exp() for index in (2, 3)]
    return Neurons(means[0], scales[0], means[1], scales[1])
