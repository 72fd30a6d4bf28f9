"""Parameters of one device and number type with their state in flat vectors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.numerics.online_newton import online_newton_
from posterity.numerics.random import Key

_HALF = (torch.float16, torch.bfloat16)


class Settings(NamedTuple):
    """The numbers of one step, and whether the Hessian comes from squares of gradients."""

    lr: float  # the whole factor of the mean's step
    beta1: float
    beta2: float
    ess: float
    correction: float  # of the momentum's start at zero
    radius: float
    squares: bool


class Slab:
    """Curvature, scale, momentum, mean and noise of some parameters, one vector each, with one view a parameter.

    The curvature is h + decay, h the Hessian of the loss for one row, and the scale its -1/2th power.

    The parameters stay where they are: they are read and written through multi-tensor copies. What is in between runs
    over whole vectors. State of half-precision parameters is kept in float32, where small updates do not get lost.
    """

    def __init__(self, parameters: Sequence[Tensor], hess_init: float, decay: float) -> None:
        """Fresh state for parameters of one device and number type."""
        first = parameters[0]
        self.parameters = list(parameters)
        self.kind = [(p.device, p.dtype, p.shape) for p in parameters]
        dtype = torch.float32 if first.dtype in _HALF else first.dtype
        size = sum(p.numel() for p in parameters)
        self.decay = decay
        self.curvature = torch.full((size,), hess_init + decay, dtype=dtype, device=first.device)
        self.scale = self.curvature.rsqrt()
        self.momentum = torch.zeros_like(self.curvature)
        self.mean = torch.empty_like(self.curvature)
        self.noise = torch.empty_like(self.curvature)
        self.curvatures, self.scales, self.momenta, self.means, self.noises = (
            _views(flat, parameters) for flat in (self.curvature, self.scale, self.momentum, self.mean, self.noise)
        )
        self.sampled: list[int] = []  # the parameters that the last draw moved
        self.sums: tuple[Tensor, Tensor] | None = None  # of gradients and products, where a step has several samples
        self.seen: set[int] = set()  # the parameters that have a gradient in them

    @property
    def fits(self) -> bool:
        """Whether the parameters still are where and what they were."""
        return all((p.device, p.dtype, p.shape) == kind for p, kind in zip(self.parameters, self.kind, strict=True))

    def load(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the saved curvatures and momenta, of those parameters that have them."""
        for state, curvature, momentum in zip(states, self.curvatures, self.momenta, strict=True):
            if state:
                curvature.copy_(state["curvature"])
                momentum.copy_(state["momentum"])
        torch.rsqrt(self.curvature, out=self.scale)

    def settle(self, decay: float) -> None:
        """Another decay from now on, with the same Hessian."""
        if decay != self.decay:
            self.curvature.add_(decay - self.decay)
            torch.rsqrt(self.curvature, out=self.scale)
            self.decay = decay

    def draw(self, key: Key, ess: float) -> None:
        """Note the means, and move the trainable parameters by noise of variance 1 / (ess curvature)."""
        self.sampled = [index for index, p in enumerate(self.parameters) if p.requires_grad]
        torch._foreach_copy_(self.means, self.parameters)
        self.noise.normal_(0.0, ess**-0.5, generator=key.generator(self.noise.device))
        torch._foreach_addcmul_(*self._pick(self.sampled, self.parameters, self.noises, self.scales))

    def restore(self) -> None:
        """Put the means back."""
        torch._foreach_copy_(*self._pick(self.sampled, self.parameters, self.means))

    def with_gradient(self) -> list[int]:
        """The sampled parameters that have a gradient."""
        return [index for index in self.sampled if self.parameters[index].grad is not None]

    def collect(self, squares: bool) -> None:
        """Add the gradients of the last sample to the sums, and take them off the parameters."""
        indices = self.with_gradient()
        gradients = self._gradients(indices)
        if self.sums is None:
            self.sums = torch.zeros_like(self.curvature), torch.zeros_like(self.curvature)
        gradient_sums, product_sums = (_views(flat, self.parameters) for flat in self.sums)
        if indices:
            torch._foreach_add_([gradient_sums[index] for index in indices], gradients)
            factors = gradients if squares else [self.noises[index] for index in indices]
            torch._foreach_addcmul_([product_sums[index] for index in indices], gradients, factors)
        self.seen.update(indices)
        for index in indices:
            self.parameters[index].grad = None

    def forget(self) -> None:
        """Drop what was sampled."""
        self.sampled, self.sums, self.seen = [], None, set()

    def update(self, settings: Settings, count: int, scale: float) -> None:
        """One step from `count` samples, whose gradients are to be divided by `scale`."""
        if self.sums is not None:
            indices = sorted(self.seen)
            gradient, product = self.sums
            views = _views(gradient.div_(count * scale), self.parameters)
            gradients = [views[index] for index in indices]
            self.noise.copy_(product).div_(count * (scale**2 if settings.squares else scale))
        else:
            indices = self.with_gradient()
            gradients = self._gradients(indices)
            if scale != 1.0:
                torch._foreach_div_(gradients, scale)
            products = [self.noises[index] for index in indices]
            if settings.squares:
                torch._foreach_copy_(products, gradients)
            torch._foreach_mul_(products, gradients)
        if not indices:
            return
        torch._foreach_lerp_([self.momenta[index] for index in indices], gradients, 1.0 - settings.beta1)
        for begin, end in self._spans(indices):
            scales, products = self.scale[begin:end], self.noise[begin:end]
            online_newton_(
                self.curvature[begin:end],
                scales,
                self.momentum[begin:end],
                self.mean[begin:end],
                products.mul_(scales) if settings.squares else products,
                self.decay,
                weight=settings.ess,
                rate=1.0 - settings.beta2,
                pull_factor=self.decay * settings.correction,
                radius=settings.radius * settings.correction,
            )
        torch._foreach_add_(
            *self._pick(indices, self.parameters, self.noises), alpha=-settings.lr / settings.correction
        )

    def _gradients(self, indices: Iterable[int]) -> list[Tensor]:
        """The gradients of these parameters, in the number type of the state."""
        found = []
        for index in indices:
            gradient = self.parameters[index].grad
            assert gradient is not None
            if gradient.is_sparse:
                raise RuntimeError("IVON does not take sparse gradients. Make the embedding with sparse=False.")
            found.append(gradient if gradient.dtype == self.curvature.dtype else gradient.to(self.curvature.dtype))
        return found

    def _pick(self, indices: Sequence[int], *lists: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[tensors[index] for index in indices] for tensors in lists]

    def _spans(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Where the vectors of these parameters begin and end, neighbours in one."""
        spans: list[tuple[int, int]] = []
        wanted, begin = set(indices), 0
        for index, p in enumerate(self.parameters):
            end = begin + p.numel()
            if index in wanted:
                if spans and spans[-1][1] == begin:
                    begin = spans.pop()[0]
                spans.append((begin, end))
            begin = end
        return spans


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """One view of a vector for each parameter, with its order in memory, so that copies are straight."""
    views, offset = [], 0
    for p in parameters:
        views.append(flat.as_strided(p.shape, torch.empty_like(p, device="meta").stride(), offset))
        offset += p.numel()
    return views
