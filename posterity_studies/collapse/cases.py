"""Small data from a key, as problems of wide networks, with neurons from which searches begin."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.numerics.random import Key
from posterity.theory import Activation, Logistic, Neurons, Rectified, Smooth, Softmax, Square, WideProblem

ROWS = 30
REACH, NOISE = 2.0, 0.2
CLASS_ROWS = 150  # enough for the narrowest networks to be sure of classes at eta = 1
CENTRES = ((4.8, 0.6), (-2.4, 4.2), (-2.4, -4.2))
SHARES = (0.5, 0.3, 0.2)  # of the classes: a collapsed network does not even tell which is the most frequent
SPREAD = 1.5
FIXED = 4  # kinds of neurons that are not fitted


@dataclass(frozen=True, eq=False)
class Case:
    """A problem with the places (S, J, 2 (C + D)) from which its optima are looked for, the prior first."""

    name: str
    problem: WideProblem
    outputs: int
    starts: Tensor


def rectified(key: Key) -> Case:
    """A noisy |x| on a line, inputs (x, 1), by rectifiers: of two kinds, one for each side."""
    inputs, targets = _bend(key)
    problem = WideProblem(inputs, targets, Square(), activation=Rectified())
    return Case("ReLU", problem, 1, _starts(problem, _sides(), 1))


def odd(key: Key) -> Case:
    """The same rows by an odd activation, with equal neurons."""
    inputs, targets = _bend(key)
    problem = WideProblem(inputs, targets, Square(), activation=Smooth("erf"))
    return Case("erf", problem, 1, _starts(problem, _sides()[:1], 1))


def classes(key: Key) -> Case:
    """Three clusters in the plane, of unequal numbers of rows, by rectifiers: of a kind for each class."""
    counts = [round(CLASS_ROWS * share) for share in SHARES]
    labels = torch.repeat_interleave(torch.arange(3, device="cpu"), torch.tensor(counts, device="cpu"))
    centres = torch.tensor(CENTRES, dtype=torch.float64, device="cpu")
    inputs = centres[labels] + SPREAD * key.fold("classes").normal((len(labels), 2), torch.float64, "cpu")
    problem = WideProblem(inputs, labels, Softmax(), activation=Rectified())
    outer = 3.0 * torch.eye(3, dtype=torch.float64, device="cpu") - 1.0
    small = torch.full((3, 1), 0.3, dtype=torch.float64, device="cpu")
    theta = torch.cat([outer, small.expand(3, 3), centres / 3.0, small.expand(3, 2)], -1)
    return Case("ReLU, 3 classes", problem, 3, _starts(problem, theta, 3))


def signs(key: Key) -> WideProblem:
    """Whether |x| is above its middle, on the same line."""
    inputs, targets = _bend(key)
    return WideProblem(inputs, torch.where(targets > targets.median(), 1.0, -1.0), Logistic())


def fixed_neurons(key: Key, outputs: int) -> Neurons:
    """Four kinds of neurons for two inputs, at random."""
    sizes = (outputs, outputs, 2, 2)
    rows = [key.fold(index).normal((FIXED, size), torch.float64, "cpu") for index, size in enumerate(sizes)]
    return Neurons(rows[0], 0.4 * (0.3 * rows[1]).exp(), rows[2], 0.4 * (0.3 * rows[3]).exp())


def line(points: int, activation: Activation) -> WideProblem:
    """Places along the whole line, to look at predictions there."""
    x = torch.linspace(-REACH, REACH, points, dtype=torch.float64, device="cpu")
    return WideProblem(torch.stack([x, torch.ones_like(x)], -1), torch.zeros_like(x), activation=activation)


def _bend(key: Key) -> tuple[Tensor, Tensor]:
    x = REACH * (2.0 * key.fold("x").uniform((ROWS,), torch.float64, "cpu") - 1.0)
    noise = NOISE * key.fold("noise").normal((ROWS,), torch.float64, "cpu")
    return torch.stack([x, torch.ones_like(x)], -1), x.abs() + noise


def _sides() -> Tensor:
    """A neuron that rises to the right and one to the left, (2, 6)."""
    rows = [[1.4, 0.4, 1.4, 0.0, 0.3, 0.3], [1.4, 0.4, -1.4, 0.0, 0.3, 0.3]]
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _starts(problem: WideProblem, theta: Tensor, outputs: int) -> Tensor:
    prior = problem.prior.neurons(problem.inputs.shape[-1], outputs).theta
    return torch.stack([prior.expand_as(theta), theta])
