"""Two models of two weights on the same rows, their potentials over the plane of the weights, and descents on them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posterity.inference import infer
from posterity.likelihoods import Gaussian
from posterity.methods import MAP
from posterity.model import Batch, Joint
from posterity.numerics.random import Key
from posterity.posteriors import Point
from posterity.priors import Normal

ROWS, NOISE, PRIOR_SCALE = 10, 0.35, 2.0
REACH, SIDE = 5.0, 141  # of the grid over the weights
STARTS = ((-3.0, 0.9), (-0.7, 3.6), (3.0, -0.9), (0.7, -3.6), (-3.0, -3.4), (2.6, 3.4), (-1.6, 1.6), (1.6, -1.6))
STEPS, STEP_SIZE, LONGEST = 500, 0.08, 0.03
APART = 0.05  # distance within which ends of descents count as one mode


@dataclass(frozen=True, eq=False)
class Surface:
    """A model with V = -log p(D, w) minus its minimum, (SIDE, SIDE) over the grid, and descents from all starts.

    `curvature` is the least eigenvalue of the Hessian of V, (SIDE, SIDE). `paths` (T, STARTS, 2) are descents, and
    `ends` (STARTS, 2) the modes that L-BFGS reaches from their last places. The first axis of the grid is the first
    weight.
    """

    joint: Joint
    inputs: Tensor
    targets: Tensor
    potential: Tensor
    curvature: Tensor
    paths: Tensor
    ends: Tensor

    @property
    def masses(self) -> Tensor:
        """Posterior probabilities of the points of the grid, (SIDE, SIDE)."""
        return torch.softmax(-self.potential.flatten(), 0).view_as(self.potential)

    @property
    def modes(self) -> Tensor:
        """The modes, each once, (K, 2)."""
        places: list[Tensor] = []
        for end in self.ends:
            if all(float((end - place).norm()) > APART for place in places):
                places.append(end)
        return torch.stack(places)

    @property
    def convex_share(self) -> float:
        """The share of the grid on which V is convex."""
        return float((self.curvature > 0.0).double().mean())


def axis() -> Tensor:
    """Values of a weight, (SIDE,)."""
    return torch.linspace(-REACH, REACH, SIDE, dtype=torch.float64, device="cpu")


def grid() -> Tensor:
    """Weights on the grid, (SIDE * SIDE, 2)."""
    return torch.cartesian_prod(axis(), axis())


def surfaces(key: Key) -> dict[str, Surface]:
    """Compute the line b x + a and the network a tanh(b x), with weights (b, a), on rows of the network."""
    x = torch.linspace(-2.0, 2.0, ROWS, dtype=torch.float64, device="cpu").unsqueeze(1)
    y = 1.4 * torch.tanh(1.2 * x) + NOISE * key.fold("noise").normal((ROWS, 1), torch.float64, "cpu")
    inner, outer = (nn.Linear(1, 1, bias=False) for _ in range(2))
    models = {"line": nn.Linear(1, 1).double(), "network": nn.Sequential(inner, nn.Tanh(), outer).double()}
    return {name: _surface(model, x, y) for name, model in models.items()}


def _surface(model: nn.Module, inputs: Tensor, targets: Tensor) -> Surface:
    joint = Joint(model, Gaussian(NOISE), Normal(PRIOR_SCALE), ROWS)
    batch = Batch(inputs, targets)

    weights = grid().requires_grad_()
    values = -joint.log_density(weights, batch)
    (slopes,) = torch.autograd.grad(values.sum(), weights, create_graph=True)
    rows = [torch.autograd.grad(slope.sum(), weights, retain_graph=True)[0] for slope in slopes.unbind(-1)]
    curvature = torch.linalg.eigvalsh(torch.stack(rows, -1))[:, 0].reshape(SIDE, SIDE)
    potential = values.detach().reshape(SIDE, SIDE)
    paths = _paths(joint, batch)
    modes, _ = infer(MAP(), joint, (inputs, targets), start=paths[-1], progress=False)
    assert isinstance(modes, Point)
    return Surface(joint, inputs, targets, potential - potential.min(), curvature, paths, modes.theta)


def _paths(joint: Joint, batch: Batch) -> Tensor:
    """Return gradient descents from the starts, with steps of at most `LONGEST`, (STEPS + 1, STARTS, 2)."""
    points = [torch.tensor(STARTS, dtype=torch.float64, device="cpu")]
    for _ in range(STEPS):
        gradient = joint.value_and_grad(points[-1], batch, {})[1] / ROWS  # of log p(D, w)
        length = STEP_SIZE * gradient.norm(dim=-1, keepdim=True)
        points.append(points[-1] + STEP_SIZE * gradient * (LONGEST / length.clamp_min(LONGEST)))
    return torch.stack(points)
