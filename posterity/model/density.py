"""A log density without a network, and constraints on its parameters."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posterity.errors import BadData, positive, shown, unknown
from posterity.model.data import Data, NoData
from posterity.model.network import Buffers
from posterity.model.tempering import Tempering
from posterity.numerics.layout import Layout
from posterity.numerics.random import Key

if TYPE_CHECKING:
    from posterity.model.joint import Joint


class Constraint(ABC):
    """A bijection T from unconstrained tensors to the set a parameter lives in."""

    def unconstrained_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of u for values of `shape`."""
        return shape

    @abstractmethod
    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        """T(u) and the log |dT/du| of each independent piece (summed by the caller)."""

    @abstractmethod
    def inverse(self, value: Tensor) -> Tensor:
        """u with T(u) = value."""


@dataclass(frozen=True)
class Real(Constraint):
    """No constraint.

    >>> Real().forward(torch.tensor(2.0))
    (tensor(2.), tensor(0.))
    """

    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        return unconstrained, torch.zeros_like(unconstrained)

    def inverse(self, value: Tensor) -> Tensor:
        return value


@dataclass(frozen=True)
class Positive(Constraint):
    """v = exp(u) > 0.

    >>> value, log_jacobian = Positive().forward(torch.tensor(0.0))
    >>> float(value), float(log_jacobian)
    (1.0, 0.0)
    """

    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        return unconstrained.exp(), unconstrained

    def inverse(self, value: Tensor) -> Tensor:
        return value.log()


@dataclass(frozen=True)
class Interval(Constraint):
    """lower < v < upper by a scaled sigmoid.

    >>> float(Interval(0.0, 2.0).forward(torch.tensor(0.0))[0])
    1.0
    """

    lower: float = 0.0
    upper: float = 1.0

    def __post_init__(self) -> None:
        positive("Interval: upper - lower", self.upper - self.lower)

    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        width = self.upper - self.lower
        log_jacobian = math.log(width) + F.logsigmoid(unconstrained) + F.logsigmoid(-unconstrained)
        return self.lower + width * torch.sigmoid(unconstrained), log_jacobian

    def inverse(self, value: Tensor) -> Tensor:
        return (value - self.lower).log() - (self.upper - value).log()


@dataclass(frozen=True)
class Ordered(Constraint):
    """v_1 < v_2 < ... along the last axis: v_1 = u_1, v_k = v_{k-1} + exp(u_k).

    >>> Ordered().forward(torch.zeros(3))[0]
    tensor([0., 1., 2.])
    """

    def unconstrained_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape:
            raise ValueError("Ordered needs an axis to order along. Got shape (). Use Real for a single number.")
        return shape

    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        """Cumulative sums of exponentials; the log-Jacobian is the sum of u_2 .. u_K."""
        first, rest = unconstrained[..., :1], unconstrained[..., 1:]
        return torch.cat([first, rest.exp()], -1).cumsum(-1), rest.sum(-1)

    def inverse(self, value: Tensor) -> Tensor:
        return torch.cat([value[..., :1], value.diff(dim=-1).log()], -1)


@dataclass(frozen=True)
class Simplex(Constraint):
    """v_k > 0, sum v = 1 along the last axis, by stick breaking from K - 1 numbers; u = 0 is the centre.

    >>> Simplex().forward(torch.zeros(3))[0]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def unconstrained_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One number fewer along the last axis, which must have two or more."""
        if not shape or shape[-1] < 2:
            raise ValueError(f"Simplex needs at least two parts along the last axis. Got shape {shape}.")
        return (*shape[:-1], shape[-1] - 1)

    def _offset(self, count: int, like: Tensor) -> Tensor:
        return torch.arange(count, 0, -1, dtype=like.dtype, device=like.device).log()

    def forward(self, unconstrained: Tensor) -> tuple[Tensor, Tensor]:
        """v_k = z_k * (stick left), z_k = sigmoid(u_k - log(K - k))."""
        shifted = unconstrained - self._offset(unconstrained.shape[-1], unconstrained)
        log_left = F.logsigmoid(-shifted).cumsum(-1)  # log of the stick left after each break
        before = F.pad(log_left[..., :-1], (1, 0))
        log_part = F.logsigmoid(shifted) + before
        value = torch.cat([log_part, log_left[..., -1:]], -1).exp()
        return value, (F.logsigmoid(shifted) + F.logsigmoid(-shifted) + before).sum(-1)

    def inverse(self, value: Tensor) -> Tensor:
        """logit of each part's share of the stick left, shifted back."""
        after = value.flip(-1).cumsum(-1).flip(-1)[..., 1:]  # what is left of the stick after each part
        return value[..., :-1].log() - after.log() + self._offset(after.shape[-1], value)


@dataclass(frozen=True, eq=False)
class Density:
    """An unnormalised log density over named, possibly constrained tensors, as a function of flat theta.

    **Math**: with u = theta unconstrained and v = T(u) the constrained values, log_density(u) = log p(T(u)) +
    log |det dT/du|, so that draws of u, mapped by T, follow p.

    **Limit**: a mode is a mode of the density of u; it moves with the parametrisation.

    **Cost**: one call of the user's function, mapped over members by `vmap` (or once for all members when
    `batched`: the function then takes tensors with a leading member axis and returns (M,)). `pointwise`, if given,
    takes the same tensors and returns the log-likelihood of each of N data, (N,) or (M, N) when `batched`: for
    `Samples.log_likelihoods` and nothing else.

    **References**: Carpenter et al. (2017), Stan, section on constrained parameters.

    **Example**:

    >>> density = Density(lambda rate: -rate.sum(), {"rate": (2,)}, {"rate": Positive()})  # two exponentials
    >>> density.size
    2
    >>> float(density.log_density(torch.zeros(2)))  # rate 1, log-Jacobian 0
    -2.0
    """

    function: Callable[..., Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    batched: bool = False
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    device: torch.device = field(default_factory=torch.get_default_device)
    pointwise: Callable[..., Tensor] | None = None

    network = None
    num_data = 1
    num_members = None
    random = "*"
    random_indices = None
    tempering = Tempering.bayes()
    powers = (1.0, 1.0)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Density.function must be callable with the named tensors. Got {shown(self.function)}.")
        for name in ("shapes", "constraints"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(f"Density.{name} must be a dict by parameter. Got {shown(getattr(self, name))}.")
        for name, constraint in self.constraints.items():
            if name not in self.shapes:
                raise ValueError(f"Density.constraints: {unknown('parameter', name, self.shapes)}")
            if not isinstance(constraint, Constraint):
                raise TypeError(f"Density.constraints['{name}'] must be a Constraint. Got {shown(constraint)}.")
        object.__setattr__(self, "device", torch.device(self.device))  # users write "cuda", as for tensors
        if not self.shapes:
            raise ValueError("Density.shapes must name at least one parameter. Got none.")
        for name, shape in self.shapes.items():
            if not isinstance(shape, (tuple, list)):
                raise TypeError(f"Density.shapes['{name}'] must be a tuple such as (2,) or (). Got {shown(shape)}.")
        self.layout  # noqa: B018  refuse a constraint that does not fit its shape now

    def _constraint(self, name: str) -> Constraint:
        return self.constraints.get(name, Real())

    @cached_property
    def layout(self) -> Layout:
        """Names and shapes of the unconstrained tensors in theta."""
        return Layout.of({n: self._constraint(n).unconstrained_shape(tuple(s)) for n, s in self.shapes.items()})

    @property
    def size(self) -> int:
        """Length P of theta."""
        return self.layout.size

    @property
    def num_weights(self) -> int:
        """Length P of theta; a density has no learnt likelihood parameters."""
        return self.size

    @property
    def num_random(self) -> int:
        """Length P of theta."""
        return self.size

    def as_joint(self, user: str, instead: str = "") -> "Joint":
        """Raise a TypeError: a density has no network, prior or likelihood. `instead` says what to use."""
        remedy = f" {instead}" if instead else ""
        raise TypeError(f"{user} needs a Joint, with a network, a prior and a likelihood. Got a Density.{remedy}")

    def check_rows(self, data: Data) -> None:
        """Raise BadData where there are rows: a density contains its data."""
        if not isinstance(data, NoData):
            raise BadData("A Density has its data inside. Pass None as the data.")

    def checked(self, data: Data) -> Data:
        """Return no data: see `check_rows`."""
        self.check_rows(data)
        return data

    def starting_buffers(self, theta: Tensor) -> Buffers:
        """No buffers: there is no network."""
        return {}

    def encode(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Describe parameters, constraints and dtype as JSON; the function itself cannot be stored."""
        return {
            "shapes": [[name, list(shape)] for name, shape in self.shapes.items()],
            "constraints": [[name, repr(self._constraint(name))] for name in self.shapes],
            "dtype": str(self.dtype),
        }

    def member(self, index: int) -> "Density":
        """Itself: members share the density."""
        return self

    def narrowed(self, places: Tensor) -> "Density":
        """Itself: all of theta has a distribution."""
        return self

    def initial(self) -> Tensor:
        """Zeros (P,): the middle of the unconstrained space."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def fresh(self, key: Key) -> Tensor:
        """Standard normal numbers (P,): a density has no layers with their own initialisation."""
        return key.normal((self.size,), torch.float32, "cpu").to(self.device, self.dtype)

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """theta, and no likelihood parameters."""
        return theta, theta[..., self.size :]

    def fitted(self, theta: Tensor) -> "Density":
        """Itself: nothing but theta is fitted."""
        return self

    def constrained(self, theta: Tensor) -> dict[str, Tensor]:
        """The named tensors in their own space: (..., P) -> (..., *shape) each."""
        return {name: self._constraint(name).forward(u)[0] for name, u in self.layout.unflatten(theta).items()}

    def unconstrained(self, values: Mapping[str, Tensor]) -> Tensor:
        """theta (..., P) of constrained values, one for each name."""
        if values.keys() != self.shapes.keys():
            wanted, got = (", ".join(sorted(names)) for names in (self.shapes, values))
            raise ValueError(f"Density.unconstrained needs a value for each of {wanted}. Got {got}.")
        theta = self.layout.flatten({name: self._constraint(name).inverse(values[name]) for name in self.shapes})
        if not bool(torch.isfinite(theta).all()):
            where = self.layout.name_at(int((~torch.isfinite(theta)).nonzero()[0, -1]))
            raise ValueError(
                f"Density.unconstrained: '{where}' must lie inside {self._constraint(where)}, not on its edge or "
                f"outside. Got {shown(values[where])}."
            )
        return theta

    def _evaluate(self, theta: Tensor) -> Tensor:
        total, values = theta.new_zeros(theta.shape[:-1]), {}
        for name, unconstrained in self.layout.unflatten(theta).items():
            values[name], log_jacobian = self._constraint(name).forward(unconstrained)
            extra = tuple(range(theta.dim() - 1, log_jacobian.dim()))
            total = total + (log_jacobian.sum(extra) if extra else log_jacobian)
        value = self.function(**values)
        if not isinstance(value, Tensor) or value.shape != total.shape:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
            raise ValueError(
                f"Density: the function must return one number{' for each member' if self.batched else ''}, a tensor "
                f"of shape {tuple(total.shape)}. Got {got}. Sum over the data and the parameters."
            )
        return total + value

    def log_density(self, theta: Tensor, batch: object = None, buffers: Buffers | None = None) -> Tensor:
        """log p(T(u)) + log |det dT/du|: (P,) -> (), (M, P) -> (M,)."""
        if theta.dim() == 1:
            return self._evaluate(theta.unsqueeze(0)).squeeze(0) if self.batched else self._evaluate(theta)
        return self._evaluate(theta) if self.batched else _mapped(self._evaluate, theta)

    def log_likelihood(self, theta: Tensor, batch: object = None, buffers: Buffers | None = None) -> Tensor:
        """The whole log density: a density does not separate data and prior."""
        return self.log_density(theta)

    def log_likelihoods(self, theta: Tensor) -> Tensor:
        """Log-likelihood of each datum by `pointwise`, (M, N), at theta (M, P)."""
        pointwise = self.pointwise
        if pointwise is None:
            raise TypeError(
                "log_likelihoods: this Density does not tell its data apart. Make it with pointwise=, a function of "
                "the same tensors that returns the log-likelihood of each datum, (N,)."
            )
        values = self.constrained(theta)
        result = pointwise(**values) if self.batched else _mapped(lambda own: pointwise(**own), values)
        if not isinstance(result, Tensor) or result.dim() != 2 or result.shape[0] != theta.shape[0]:
            got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else shown(result)
            raise ValueError(
                f"Density.pointwise must return one number for each datum, (N,), or (M, N) when batched. Got {got} "
                f"at {len(theta)} members."
            )
        return result

    def log_prior(self, theta: Tensor) -> Tensor:
        """Zero: see `log_likelihood`."""
        return theta.new_zeros(theta.shape[:-1])

    def value_and_grad(
        self,
        theta: Tensor,
        batch: object = None,
        buffers: Buffers | None = None,
        *,
        train: bool = True,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Buffers]:
        """Value and gradient of the log density at theta; `out` is for a `Joint`."""
        leaf = theta.detach().requires_grad_()
        with torch.enable_grad():
            value = self.log_density(leaf)
            if not value.requires_grad:
                raise ValueError(
                    "Density: the function's value has no gradient. Compute it from the named tensors by operations of "
                    "torch, without detach(), no_grad() or numpy."
                )
            (grad,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), grad, {}

    def data_value_and_grad(
        self, theta: Tensor, batch: object = None, buffers: Buffers | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Buffers]:
        """Value and gradient of the whole log density, see `log_likelihood`; the gradient is in `out` if given."""
        value, grad, buffers = self.value_and_grad(theta)
        return value, grad if out is None else out.copy_(grad), buffers


def _mapped(function: Callable[[Any], Tensor], values: Any) -> Tensor:
    """Map the user's function over the members of the values."""
    try:
        result: Tensor = torch.func.vmap(function)(values)
    except RuntimeError as error:
        if not str(error).startswith("vmap:"):
            raise
        reason = str(error).removeprefix("vmap:").strip().partition(". ")[0].rstrip(".")
        raise TypeError(
            f"Density: the function cannot be mapped over chains or members: {reason}. Choose by torch.where in place "
            "of if, and call no float() or item(); or take all members at once (batched=True)."
        ) from error
    return result
