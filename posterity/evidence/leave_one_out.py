"""How well a model predicts rows that it has not seen, from the draws that have seen them all."""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.evidence.importance import pareto_smoothed
from posterity.posteriors.samples import Samples

logger = logging.getLogger("posterity")


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """The expected log predictive density of new data, from S draws: a term for each row, with its k-hat.

    `pointwise` (N,) is log p(y_n | all other rows), `in_sample` (N,) is log p(y_n | all rows), `pareto_k` (N,) the
    shape of the tail of each row's weights; all in float64.
    """

    pointwise: Tensor
    in_sample: Tensor
    pareto_k: Tensor
    draws: int

    @property
    def elpd(self) -> float:
        """The sum over the rows, in nats: higher is better."""
        return float(self.pointwise.sum())

    @property
    def standard_error(self) -> float:
        """Of `elpd` as an estimate for new rows: sqrt(N) times the standard deviation of the terms (divisor N)."""
        return math.sqrt(len(self.pointwise)) * float(self.pointwise.std(correction=0))

    @property
    def effective_parameters(self) -> float:
        """How much better the rows are predicted once they are seen, p_loo."""
        return float((self.in_sample - self.pointwise).sum())

    @property
    def threshold(self) -> float:
        """The k-hat up to which as many draws give a usable term: min(1 - 1 / log10(S), 0.7)."""
        return min(1.0 - 1.0 / math.log10(self.draws), 0.7)

    @property
    def unreliable(self) -> Tensor:
        """The rows whose k-hat is above the threshold, (K,)."""
        return (self.pareto_k > self.threshold).nonzero().flatten()

    def __str__(self) -> str:
        return (
            f"elpd {self.elpd:.2f} with standard error {self.standard_error:.2f}, effective parameters "
            f"{self.effective_parameters:.2f}, {len(self.unreliable):,} of {len(self.pointwise):,} rows with a k-hat "
            f"above {self.threshold:.2f}."
        )


def leave_one_out(posterior: Samples, data: object = None, *, efficiency: float = 1.0) -> LeaveOneOut:
    """Leave-one-out cross-validation without a fit for each row, by Pareto-smoothed importance sampling.

    `data` are the rows that the chains have seen; None for a `Density`, which tells its own by `pointwise`.
    `efficiency` is the number of effective draws over that of all.

    **Math**: p(y_n | y_-n) = 1 / E[1 / p(y_n | theta)], the expectation over the posterior of all rows. With weights
    w_s = 1 / p(y_n | theta_s), smoothed, it is sum_s w_s p(y_n | theta_s) / sum_s w_s.

    **Limit**: right where no single row moves the posterior much. k-hat tells: rows above `threshold` are named in a
    warning. Rows must be independent given theta, and the posterior untempered.

    **Cost**: one pass over the data for each draw, and a fit of two numbers for each row.

    **References**: Vehtari, Gelman and Gabry (2017), Practical Bayesian model evaluation using leave-one-out
    cross-validation and WAIC; Vehtari et al. (2024), Pareto smoothed importance sampling.

    **Example**:

    >>> import posterity as po
    >>> y = torch.tensor([-1.0, 0.0, 1.0])
    >>> density = po.Density(  # the mean of three normal numbers
    ...     lambda mean: -0.5 * (y - mean).square().sum(),
    ...     {"mean": ()},
    ...     pointwise=lambda mean: -0.5 * (y - mean).square() - 0.5 * math.log(2 * math.pi),
    ... )
    >>> exact = po.Key(0).normal((1, 20_000, 1), torch.float32) / math.sqrt(3)
    >>> of = leave_one_out(Samples(density, exact))
    >>> abs(of.pointwise[1].item() + 0.5 * math.log(3 * math.pi)) < 0.01  # N(0; 0, 1 + 1/2)
    True
    """
    if not isinstance(posterior, Samples):
        raise TypeError(
            f"leave_one_out needs the draws of chains (Samples). Got {shown(posterior)}. For others make them: "
            "Samples(q.joint, q.sample(1000, key).unsqueeze(0))."
        )
    positive("leave_one_out: efficiency", efficiency)
    if not all(float(power) == 1.0 for power in posterior.joint.powers):
        raise ValueError("leave_one_out needs an untempered posterior. Got another tempering. Fit it without.")
    logs = posterior.log_likelihoods(data).flatten(0, 1).T.contiguous()  # (N, S)
    count = logs.shape[1]
    if count < 25:
        raise ValueError(f"leave_one_out needs 25 draws or more, to see a tail of the weights. Got {count}.")
    smoothed = [pareto_smoothed(-each, efficiency) for each in logs]
    weights = torch.stack([each.log_weights for each in smoothed])
    pointwise = (weights + logs).logsumexp(1) - weights.logsumexp(1)
    found = LeaveOneOut(
        pointwise,
        logs.logsumexp(1) - math.log(count),
        torch.tensor([each.pareto_k for each in smoothed], dtype=torch.float64, device="cpu"),
        count,
    )
    if len(found.unreliable):
        logger.warning(
            "leave_one_out: of %d rows, %d have a Pareto k-hat above %.2f, so their terms are not to be trusted: %s. "
            "Fit again without these rows, or take a likelihood that they surprise less (StudentT).",
            len(pointwise),
            len(found.unreliable),
            found.threshold,
            shown(found.unreliable.tolist()),
        )
    return found
