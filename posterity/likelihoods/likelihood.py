"""What every likelihood p(y | f) of network outputs f can do."""

from abc import ABC, abstractmethod

from torch import Tensor

from posterity.numerics.random import Key


class Likelihood(ABC):
    """The density of targets given network outputs, in nats.

    Outputs have shape (..., N, *event) with any leading axes (draws, members); targets have N rows.
    A likelihood is an immutable value. Parameters it learns (an observation noise) are exposed as one raw,
    unconstrained vector of `num_free` numbers that a `Joint` appends to theta.
    """

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets shaped for `log_prob`, or a ValueError that says what was wanted, what came, what to do."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log p(y_n | f_n) for each row, (..., N), summed over the event."""

    @abstractmethod
    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        """One draw of targets for each output row."""

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """E[y | f]; class probabilities for a classification likelihood."""

    @abstractmethod
    def variance(self, outputs: Tensor) -> Tensor:
        """Var[y | f], entry by entry, shaped as `mean`."""

    @abstractmethod
    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Hessian of -log p(y | f) in f, (..., N, D, D) with D the flattened event; equals autodiff."""

    @abstractmethod
    def output_fisher(self, outputs: Tensor) -> Tensor:
        """Fisher information of f, (..., N, D, D), positive semi-definite."""

    @property
    def num_free(self) -> int:
        """How many parameters of the likelihood itself are learnt."""
        return 0

    def free(self, like: Tensor) -> Tensor:
        """Raw values (num_free,) of the learnt parameters, with the dtype and device of `like`."""
        return like.new_zeros(0)

    def free_from(self, other: "Likelihood", like: Tensor) -> Tensor:
        """Raw values (..., num_free) that give this likelihood the parameters of `other`, where they are of a kind."""
        return self.free(like)

    def member(self, index: int) -> "Likelihood":
        """The likelihood of one member (itself when all members share it)."""
        return self

    def free_names(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the learnt raw parameters, in the order of `free`."""
        return {}

    def with_free(self, raw: Tensor) -> "Likelihood":
        """The likelihood with its learnt parameters at `raw` (..., num_free), still differentiable in raw."""
        return self

    def fixed(self, raw: Tensor) -> "Likelihood":
        """The likelihood with its learnt parameters held at `raw` from now on."""
        return self

    def free_log_prior(self, raw: Tensor) -> Tensor:
        """Log density of the declared prior of the raw parameters, (..., num_free) -> (...)."""
        return raw.new_zeros(raw.shape[:-1])
