"""What is calibrated: a joint at fixed inputs, from which parameters and data are drawn; the models of the study."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from posterity.likelihoods import Bernoulli, Gaussian
from posterity.likelihoods.scaled import Scaled
from posterity.model import Joint
from posterity.model.batch import Batch, Inputs, map_inputs, num_rows
from posterity.model.tempering import Tempering
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.priors import Normal


@dataclass(frozen=True, eq=False)
class Problem:
    """A joint, the inputs (N, ...) at which its data are drawn, and inputs (K, ...) at which functions are compared.

    Without `probes` every weight is a test quantity by itself. Weights of networks are not identified (hidden units
    can be exchanged), functions are: give probes there. Learnt noise, log likelihood and log prior always count.

    >>> from posterity.likelihoods import Gaussian
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1), Gaussian(scale=1.0), Normal(), num_data=2)
    >>> problem = Problem(joint, torch.tensor([[0.0], [1.0]]))
    >>> theta, data = problem.simulated(5, Key(0))
    >>> theta.shape, data.targets.shape
    (torch.Size([5, 2]), torch.Size([5, 2, 1]))
    """

    joint: Joint
    inputs: Inputs
    probes: Inputs | None = None

    def __post_init__(self) -> None:
        if num_rows(self.inputs) != self.joint.num_data:
            raise ValueError(
                f"Problem.inputs must have a row for each of the joint's {self.joint.num_data} data. "
                f"Got {num_rows(self.inputs)}."
            )
        if self.joint.tempering != Tempering.bayes():
            raise ValueError(
                f"Problem.joint must not be tempered: only Bayes' posterior is calibrated. Got {self.joint.tempering}."
            )
        if self.joint.num_members is not None:
            raise ValueError("Problem.joint must be one problem, without members. Use joint.member(0).")

    def simulated(self, replicates: int, key: Key) -> tuple[Tensor, Batch]:
        """Parameters (R, P) from the prior, and a data set for each from the likelihood, (R, N, ...)."""
        joint = self.joint
        weights = joint.bound_prior.sample(
            (replicates, joint.num_weights), key.fold("weights"), joint.network.initial
        )  # (R, P)
        theta = torch.cat([weights, _learnt(joint, replicates, key.fold("noise"))], dim=-1)
        outputs = joint.outputs(theta, self.inputs)  # (R, N, *event)
        targets = joint.fitted(theta).likelihood.sample(outputs, key.fold("targets"))
        inputs = map_inputs(lambda tensor: tensor.expand(replicates, *tensor.shape), self.inputs)
        return theta, Batch(inputs, targets, per_member=True)

    def quantities(self, theta: Tensor, data: Batch) -> dict[str, Tensor]:
        """The test quantities (R, S) at parameters theta (R, S, P) of the problems whose data are (R, N, ...).

        The log likelihood sees errors that no parameter by itself shows: Modrak et al. (2023), section 4.
        """
        joint, found = self.joint, {}
        if self.probes is None:
            found.update(_entries(joint, theta, 0, joint.num_weights))
        else:
            values = torch.stack([joint.outputs(one, self.probes).flatten(1) for one in theta.unbind(1)], 1)
            found.update(zip(self._names(values.shape[-1]), values.unbind(-1), strict=True))  # (R, S) each
        found.update(_entries(joint, theta, joint.num_weights, joint.size))
        found["log likelihood"] = torch.stack([joint.log_likelihood(one, data) for one in theta.unbind(1)], 1)
        found["log prior"] = joint.log_prior(theta)
        return found

    def _names(self, values: int) -> list[str]:
        """Names of so many function values: by the input, where that is one number."""
        if isinstance(self.probes, Tensor) and self.probes.numel() == values:
            return [f"f({number:g})" for number in self.probes.flatten().tolist()]
        return [f"f{index + 1}" for index in range(values)]


def _entries(joint: Joint, theta: Tensor, low: int, high: int) -> dict[str, Tensor]:
    """Single entries of theta (R, S, P) in the places from low to high, by name."""
    found = {}
    for part in joint.layout:
        if low <= part.offset < high:
            for index in range(part.size):
                name = part.name if part.size == 1 else f"{part.name}[{index}]"
                found[name.removeprefix("likelihood.")] = theta[..., part.offset + index]
    return found


def _learnt(joint: Joint, replicates: int, key: Key) -> Tensor:
    """Raw parameters (R, H) of the likelihood from their declared prior."""
    likelihood, like = joint.likelihood, joint.network.initial
    if not likelihood.num_free:
        return like.new_zeros(replicates, 0)
    if not isinstance(likelihood, Scaled) or likelihood.log_scale_prior is None:
        raise ValueError(
            "Problem: noise that is learnt needs a proper prior, from which it can be drawn. Give the likelihood "
            "log_scale_prior=(mean, standard deviation)."
        )
    mean, deviation = likelihood.log_scale_prior
    return mean + deviation * key.normal((replicates, likelihood.num_free), like.dtype, like.device)


ROWS = 10


def linear() -> Problem:
    """y = a + b x with noise whose log has a N(-0.5, 0.5^2) prior, on 10 rows of two inputs; weights N(0, 1)."""
    likelihood = Gaussian(scale=0.6, learn=True, log_scale_prior=(-0.5, 0.5))
    return Problem(Joint(nn.Linear(2, 1).double(), likelihood, Normal(1.0), ROWS), _inputs())


def logistic() -> Problem:
    """Labels with log odds a + b x, on 10 rows of two inputs; weights N(0, 1)."""
    return Problem(Joint(nn.Linear(2, 1).double(), Bernoulli(), Normal(1.0), ROWS), _inputs())


def network() -> Problem:
    """A network with 3 tanh units and noise of scale 0.7, on 10 rows of one input; weights N(0, 1), 4 probes."""
    joint = Joint(MLP((1, 3, 1), "tanh").double(), Gaussian(scale=0.7), Normal(1.0), ROWS)
    inputs = torch.linspace(-2.0, 2.0, ROWS, dtype=torch.float64).unsqueeze(1)
    return Problem(joint, inputs, torch.tensor([[-3.0], [-1.0], [0.0], [2.0]], dtype=torch.float64))


def _inputs() -> torch.Tensor:
    return Key(0).fold("inputs").normal((ROWS, 2), torch.float64)


MODELS: Mapping[str, Callable[[], Problem]] = MappingProxyType(
    {"linear": linear, "logistic": logistic, "network": network}
)
