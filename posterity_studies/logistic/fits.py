"""The regression and its fits: the mode and Laplace, and the Gaussians that maximise the ELBO."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posterity.curvature import Hessian
from posterity.inference import Method, infer
from posterity.likelihoods import Bernoulli, Categorical
from posterity.methods import MAP, FullRank, Laplace, MeanField
from posterity.methods.parts.gradients import LocalReparameterisation
from posterity.model import Joint
from posterity.optim import SGD
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Gaussian, Linearized, Point
from posterity.precisions import Dense
from posterity.priors import Normal

# Ten rows that no line through the origin separates, so that the mode is finite without a prior, too.
INPUTS = (
    (1.2, 0.4),
    (0.6, 1.5),
    (-0.3, 0.9),
    (1.8, -0.7),
    (-1.1, -0.4),
    (-0.5, -1.6),
    (0.4, -0.8),
    (-1.9, 0.3),
    (0.2, 0.3),
    (-0.4, -0.2),
)
LABELS = (1, 1, 1, 1, 0, 0, 0, 0, 0, 1)
PRIOR_SCALE = 2.0


@dataclass(frozen=True, eq=False)
class Regression:
    """A fitted logistic regression: its problem and rows, the mode, and the Laplace posterior there."""

    joint: Joint
    inputs: Tensor
    targets: Tensor
    mode: Point
    laplace: Linearized

    @property
    def covariance(self) -> Tensor:
        """Covariance (P, P) of the Laplace posterior."""
        precision = self.laplace.gaussian.precision
        assert isinstance(precision, Dense)
        return precision.covariance()


def binary() -> Regression:
    """The regression of the ten embedded rows on their two labels: p(y = 1 | x) = sigmoid(w . x), w ~ N(0, 4 I)."""
    inputs = torch.tensor(INPUTS, dtype=torch.float64)
    return fit(inputs, torch.tensor(LABELS, dtype=torch.float64), PRIOR_SCALE)


def fit(inputs: Tensor, targets: Tensor, prior_scale: float, num_classes: int = 2) -> Regression:
    """Fit p(y | x) = sigmoid(w . x), or softmax(W x) for more than two classes, to rows (N, D) and labels (N,)."""
    outputs = 1 if num_classes == 2 else num_classes
    net = nn.Linear(inputs.shape[1], outputs, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    likelihood = Bernoulli() if num_classes == 2 else Categorical()
    joint = Joint(net, likelihood, Normal(scale=prior_scale), num_data=len(targets))
    rate = 2.0 / float(inputs.square().sum(1).mean().clamp_min(1.0))
    method = MAP(steps=1000, batch_size=None, optimizer=SGD(step_size=rate, momentum=0.8))
    mode, _ = infer(method, joint, (inputs, targets), progress=False)
    laplace, _ = infer(Laplace(tuning=None, curvature=Hessian()), joint, (inputs, targets), start=mode, progress=False)
    assert isinstance(mode, Point)
    assert isinstance(laplace, Linearized)
    return Regression(joint, inputs, targets, mode, laplace)


STEPS = 2000
METHODS: dict[str, Method] = {
    "Variational, factorised": MeanField(STEPS, None, Adam(0.02), Cosine(), LocalReparameterisation(draws=32)),
    "Variational, full": FullRank(STEPS, None, 4, Adam(0.02), Cosine()),
}


def variational(regression: Regression, seed: int) -> dict[str, Linearized]:
    """The posteriors by name, from the mode on; their logits are Gaussian, so that predictions need no draws."""
    results = {}
    for name, method in METHODS.items():
        rows = regression.inputs, regression.targets
        q, _ = infer(method, regression.joint, rows, start=regression.mode, seed=seed, progress=False)
        assert isinstance(q, Gaussian)
        results[name] = Linearized(q.joint, q)
    return results
