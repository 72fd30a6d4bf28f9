"""Fisher matrices from gradients: at drawn targets, and at the observed ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.curvature.curvature import Curvature
from posterity.curvature.score import score
from posterity.errors import positive_whole
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key


@dataclass(frozen=True)
class MonteCarloFisher(Curvature):
    """An unbiased estimate of the Gauss-Newton matrix from targets drawn from the model itself.

    **Math**: sum_n w_n 1/K sum_k g_nk g_nk^T, g_nk = d log p(y_nk | f(x_n)) / d theta with y_nk ~ p(y | f(x_n)), and
    K = `samples`.

    **Limit**: expectation `GaussNewton`; the noise falls as 1 / sqrt(K N).

    **Cost**: a forward pass and K backward passes, however many outputs there are.

    **References**: Martens (2020), section 5; Kunstner et al. (2019).

    **Example**:

    >>> import posterity as po
    >>> from posterity.model import Batch
    >>> joint = po.Joint(torch.nn.Linear(1, 2), po.likelihoods.Categorical(), po.priors.Normal(), num_data=1)
    >>> batch = Batch(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    >>> exact = po.curvature.GaussNewton().matrix(joint, torch.zeros(4), batch, None)
    >>> drawn = MonteCarloFisher(samples=1).matrix(joint, torch.zeros(4), batch, None)
    >>> torch.allclose(drawn, exact)  # with two classes at even odds every draw tells all
    True
    """

    samples: int = 1

    def __post_init__(self) -> None:
        positive_whole("MonteCarloFisher.samples", self.samples)

    def num_columns(self, outputs: int) -> int:
        """K."""
        return self.samples

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """Scores at drawn targets, over sqrt(K)."""
        drawn = (likelihood.sample(outputs, key.fold(number)) for number in range(self.samples))
        columns = torch.stack([score(likelihood, outputs, y) for y in drawn])
        return columns / float(self.samples**0.5)


@dataclass(frozen=True)
class EmpiricalFisher(Curvature):
    """The sum of squares of the gradients of the data themselves.

    **Math**: sum_n w_n g_n g_n^T, g_n = d log p(y_n | f(x_n)) / d theta at the observed y_n.

    **Limit**: equals the Fisher matrix only where the model has the right distribution of y; it vanishes as the
    residuals do, so it says too little about a model that fits its data closely. Cheap, and no more than that.

    **Cost**: a forward and a backward pass.

    **References**: Kunstner et al. (2019), Limitations of the empirical Fisher approximation.

    **Example**:

    >>> import posterity as po
    >>> from posterity.model import Batch
    >>> noise = po.likelihoods.Gaussian(scale=1.0)
    >>> joint = po.Joint(torch.nn.Linear(1, 1, bias=False), noise, po.priors.Normal(), num_data=1)
    >>> EmpiricalFisher().matrix(joint, torch.zeros(1), Batch(torch.ones(1, 1), torch.full((1, 1), 3.0)), None)
    tensor([[9.]], dtype=torch.float64)
    """

    scales_with_noise: ClassVar[bool] = False

    def num_columns(self, outputs: int) -> int:
        """One."""
        return 1

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        """The score at the observed targets."""
        return score(likelihood, outputs, targets).unsqueeze(0)
