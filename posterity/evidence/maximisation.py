"""M-steps of variational EM: hyper-parameters of a problem that fit what is known of its weights."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from posterity.model.joint import Joint
from posterity.posteriors.posterior import Posterior


class Expected(NamedTuple):
    """What a pass over all rows found under q, untempered; w_n are the rows' weights."""

    log_likelihood: Tensor  # (S,) log p(D | w_s) over all data at draws w_s ~ q; S = 1 where in closed form
    squares: Tensor  # (E,) sum_n w_n E_q (y_n - f_n)^2, for each of the E entries of an output row
    count: Tensor  # type: ignore[assignment]  # () sum_n w_n; a tuple has a method of that name


class Maximisation(ABC):
    """An M-step: another prior or likelihood of the problem, under which what q expects is most probable.

    The posterior q over the weights stays as it is. Tempering changes nothing: it multiplies the log-likelihood and the
    log prior by powers, and each M-step makes one of the two alone as large as can be.
    """

    @property
    @abstractmethod
    def needs_residuals(self) -> bool:
        """Whether `Expected.squares` are used, so that a pass over the data is needed."""

    @property
    def climbs(self) -> bool:
        """Whether it is the maximum of the expected log joint, so that no bound falls in it."""
        return True

    def check(self, joint: Joint) -> None:  # noqa: B027  most have nothing to refuse
        """Refuse a problem that has no such hyper-parameters, before a run begins."""

    @abstractmethod
    def __call__(self, joint: Joint, posterior: Posterior, expected: Expected | None) -> Joint:
        """The joint with new hyper-parameters; `expected` may be None where no residuals are needed."""

    def bound_terms(self, joint: Joint, posterior: Posterior, expected: Expected | None = None) -> float:
        """What hyper-priors add to the ELBO at the joint's hyper-parameters, in nats: 0 without hyper-priors.

        Under tempering it is multiplied by the power of the term that the hyper-parameters are in, so that the M-step
        is the maximum of `Elbo.bound` with it. A hyper-prior of the noise asks `expected` for the number of rows.
        """
        return 0.0
