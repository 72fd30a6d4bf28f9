"""Curvatures of the negative log-likelihood: Gauss-Newton, Hessian, Fisher."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.curvature.curvature import Curvature, score
from posterity.errors import positive_whole
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key

COLUMN_LIMIT = 256  # outputs of a row up to which the Gauss-Newton matrix of all layers takes a column for each
DRAWN = 4  # columns beyond that


@dataclass(frozen=True)
class GaussNewton(Curvature):
    """The generalised Gauss-Newton matrix: the Hessian without the curvature of the network itself.

    **Math**: G = sum_n w_n J_n^T F_n J_n, J_n = d f(x_n) / d theta, F_n the likelihood's `output_fisher`. Its columns
    are a root S_n of F_n: C - 1 of them for C classes, and as many for each position. For rows with more than
    `column_limit` outputs, columns S_n e with random signs e take their place; None takes all, always. There are 4 in a
    row, and more where all rows would have fewer than 10 for each weight of a matrix that is kept whole.

    **Limit**: positive semi-definite always; equals the Hessian when f is linear in theta, or at zero residuals. Random
    columns are unbiased; an entry of a row's diagonal has a relative standard error of at most 0.7, which falls as
    1 / sqrt(N) in sums over rows.

    **Cost**: a forward pass, and a backward pass for each column. Output layers, linear or convolutions, whose outputs
    are logits of many classes or at positions, take no column: the sums of diag(p) - p p^T over N labels are exact, at
    N C^2 for Kronecker factors and N (C I)^2 for the whole matrix of a layer with I inputs. Between layers (`Full` over
    several of them) the columns are shared.

    **References**: Schraudolph (2002); Martens (2020), section 8.

    **Example**:

    >>> import torch, posterity as po
    >>> from posterity.model import Batch
    >>> noise, prior = po.likelihoods.Gaussian(scale=0.5), po.priors.Normal()
    >>> joint = po.Joint(torch.nn.Linear(1, 1, bias=False), noise, prior, num_data=2)
    >>> batch = Batch(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1))
    >>> GaussNewton().matrix(joint, torch.zeros(1), batch, None)  # (1 + 4) / 0.25
    tensor([[20.]], dtype=torch.float64)
    """

    column_limit: int | None = COLUMN_LIMIT

    def __post_init__(self) -> None:
        if self.column_limit is not None:
            positive_whole("GaussNewton.column_limit", self.column_limit, "or None")

    def __repr__(self) -> str:
        return (
            "GaussNewton()" if self.column_limit == COLUMN_LIMIT else f"GaussNewton(column_limit={self.column_limit})"
        )

    def num_columns(self, outputs: int) -> int:
        return DRAWN if self.draws(outputs) else outputs

    def draws(self, outputs: int) -> bool:
        return self.column_limit is not None and outputs > self.column_limit

    def probabilities(self, likelihood: Likelihood, outputs: Tensor) -> Tensor | None:
        fisher = likelihood.fisher_by_position(outputs)
        return None if fisher is None else fisher.probabilities

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        if self.draws(max(1, outputs[:1].numel())):
            return self.drawn(likelihood, outputs, targets, key, DRAWN)
        return likelihood.output_root(outputs, outputs.dim() - 1)

    def drawn(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key, count: int) -> Tensor:
        if count >= outputs[:1].numel():
            return likelihood.output_root(outputs, outputs.dim() - 1)
        fisher = likelihood.fisher_by_position(outputs)
        if fisher is None:
            return MonteCarloFisher(count).columns(likelihood, outputs, targets, key)
        coins = key.uniform((count, *outputs.shape), torch.float32, outputs.device)
        return fisher.signed(torch.where(coins < 0.5, -1.0, 1.0).to(outputs.dtype)) / float(count**0.5)


@dataclass(frozen=True)
class Hessian(Curvature):
    """The exact Hessian of -log p(D | theta).

    **Math**: H = - sum_n w_n d^2 log p(y_n | f_theta(x_n)) / d theta^2.

    **Limit**: exact, but indefinite away from a mode of the likelihood; with the prior it must be positive
    definite at a mode of the posterior.

    **Cost**: R backward passes of the gradient, in chunks; with a structure that asks for products only (`LowRank`,
    `Hutchinson`), one for each product.

    **References**: MacKay (1992), A practical Bayesian framework for backpropagation networks.

    **Example**:

    >>> import torch
    >>> from posterity import Density
    >>> density = Density(lambda u: 7.0 * u - 2.0 * u.exp(), {"u": ()}, dtype=torch.float64)
    >>> Hessian().matrix(density, torch.tensor([3.5], dtype=torch.float64).log(), None, None)
    tensor([[7.]], dtype=torch.float64)
    """

    factored: ClassVar[bool] = False

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        raise TypeError(
            "The Hessian has no columns, because it need not be positive semi-definite. Use GaussNewton() for "
            "structures made of them, or one of Full(), BlockDiagonal(), Diagonal(), LowRank() and Hutchinson()."
        )


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
    >>> torch.allclose(drawn, exact)  # exact for two classes at even odds
    True
    """

    samples: int = 1

    def __post_init__(self) -> None:
        positive_whole("MonteCarloFisher.samples", self.samples)

    def num_columns(self, outputs: int) -> int:
        return self.samples

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        drawn = (likelihood.sample(outputs, key.fold(number)) for number in range(self.samples))
        return torch.stack([score(likelihood, outputs, y) for y in drawn]) / float(self.samples**0.5)


@dataclass(frozen=True)
class EmpiricalFisher(Curvature):
    """The sum of outer products of the gradients at the observed targets.

    **Math**: sum_n w_n g_n g_n^T, g_n = d log p(y_n | f(x_n)) / d theta at the observed y_n.

    **Limit**: equals the Fisher matrix only where the model has the right distribution of y; it vanishes as the
    residuals do, so it underestimates the curvature of a model that fits its data closely.

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
        return 1

    def columns(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, key: Key) -> Tensor:
        return score(likelihood, outputs, targets).unsqueeze(0)
