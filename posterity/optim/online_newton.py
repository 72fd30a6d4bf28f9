"""The step of the variational online Newton method, and the flat state of its parameters."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import fraction, positive, positive_whole, shown

# Entries of each vector per chunk on a CPU: five such chunks stay in the last-level cache from pass to pass, and
# smaller ones would cost more in calls than a nearer cache saves.
_PIECE = 1 << 19


def online_newton_(
    curvature: Tensor,
    scale: Tensor,
    momentum: Tensor,
    pull: Tensor,
    product: Tensor,
    decay: float | Tensor,
    *,
    weight: float,
    rate: float | Tensor,
    pull_factor: float | Tensor,
    bend: float = 0.5,
    radius: float | Tensor = math.inf,
) -> None:
    """Update the curvature in place by an estimate of the Hessian, and overwrite `product` with the mean's step.

    `curvature` is s = h + decay, with h the Hessian of the loss and `decay` the Hessian of the prior; `scale` is
    s^(-1/2) before and after. `product` is gradient times standard noise, and the estimate h^ = weight product / scale.

    - s <- s (1 + x + bend x^2) with x = rate (h^ + decay - s) / s; with bend = 1/2 at least half of s remains, whatever
      the estimate, and with bend = 0 a rate of 1 takes the estimate itself;
    - product <- (momentum + pull_factor * pull) / s, clipped to [-radius, radius].

    All vectors are contiguous and of one shape, as is the decay unless it is a number. Rate, factor and radius may be
    tensors (), whose values are never read (Shen et al. 2024, Algorithm 1,
    with rate = 1 - beta2; for a constant decay, h^ + decay - s is their h^ - h).

    >>> s, product = torch.full((1,), 4.0), torch.ones(1)
    >>> vectors = torch.full((1,), 0.5), torch.zeros(1), torch.ones(1)
    >>> online_newton_(s, *vectors, product, 1.0, weight=2.0, rate=0.5, pull_factor=1.0)
    >>> s, product  # h = 3, h^ = 4: 4 + 0.5 + 0.125 / 4, and 1 / s
    (tensor([4.5312]), tensor([0.2207]))
    """
    size = _PIECE if curvature.device.type == "cpu" else max(1, curvature.numel())
    vectors = [curvature, scale, momentum, pull, product]
    if isinstance(decay, Tensor):
        vectors.append(decay)
    below = (-rate).to(curvature.dtype) if isinstance(rate, Tensor) else curvature.new_full((), -rate)
    for pieces in zip(*(torch.split(vector.view(-1), size) for vector in vectors), strict=True):
        s, t, m, c, p = pieces[:5]
        if isinstance(decay, Tensor):
            p.addcmul_(pieces[5], t, value=1.0 / weight)
        else:
            p.add_(t, alpha=decay / weight)
        if isinstance(rate, Tensor):
            p.mul_(t).mul_(rate * weight).add_(below)  # x
        else:
            torch.addcmul(below, p, t, value=rate * weight, out=p)
        s.addcmul_(s, torch.addcmul(p, p, p, value=bend, out=t))
        torch.rsqrt(s, out=t)
        if isinstance(pull_factor, Tensor):
            torch.addcmul(m, c, pull_factor.to(c.dtype), out=p)
        else:
            torch.add(m, c, alpha=pull_factor, out=p)
        p.mul_(t).mul_(t)
        if isinstance(radius, Tensor):
            p.clamp_((-radius).to(p.dtype), radius.to(p.dtype))
        elif radius < math.inf:
            p.clamp_(-radius, radius)


_ESTIMATES = ("price", "gradsq")
_SLOW, _POWER, _DELAY = 1e-5, 4.0, 4000.0  # 1 - beta2 where that was left out: 4 / (4000 + t), and at least this
_HALF = (torch.float16, torch.bfloat16)


class Settings(NamedTuple):
    """Settings of one step; those made of a tensor, as a learning rate or a count of steps may be, are tensors ()."""

    lr: float | Tensor  # the whole factor of the mean's step
    beta1: float
    beta2: float | Tensor
    ess: float
    correction: float | Tensor  # 1 - beta1^t, for a momentum that starts at zero
    radius: float
    squares: bool  # whether the Hessian is estimated by squared gradients


def step_settings(group: dict[str, Any]) -> Settings:
    """Settings of the step that `group["step"]` already counts."""
    rescale = group["rescale_lr"] and group["hess_init"] is not None
    return Settings(
        lr=group["lr"] * (group["hess_init"] + group["weight_decay"] if rescale else 1.0),
        beta1=group["beta1"],
        beta2=beta2_at(group["beta2"], group["step"] - 1),
        ess=group["ess"],
        correction=1.0 - group["beta1"] ** group["step"] if group["debias"] else 1.0,
        radius=group["clip_radius"],
        squares=group["hess_approx"] == "gradsq",
    )


def beta2_at(given: float | None, step: int | Tensor) -> float | Tensor:
    """Return beta2 in this step, counted from 0: as given, else 1 - 4 / (4000 + step), and 0.99999 at most.

    >>> [round(beta2_at(None, step), 5) for step in (0, 4000, 10**6)]
    [0.999, 0.9995, 0.99999]
    """
    if given is not None:
        return given
    rate = _POWER / (_DELAY + step)
    return 1.0 - (rate.clamp(min=_SLOW) if isinstance(rate, Tensor) else max(_SLOW, rate))


def first_share(given: float | None, steps: int) -> float:
    """Return the share of its first value in an average after these steps."""
    if given is not None:
        return given**steps
    falling = min(steps, round(_POWER / _SLOW - _DELAY))
    share: float = (_DELAY / (_DELAY + falling)) ** _POWER * (1.0 - _SLOW) ** (steps - falling)
    return share


def check_group(group: dict[str, Any]) -> None:
    """Refuse invalid settings of a parameter group."""
    for name in ("lr", "ess", "hess_init", "weight_decay"):
        if (name, group[name]) != ("hess_init", None):
            positive(f"IVON.{name}", group[name])
    positive_whole("IVON.mc_samples", group["mc_samples"])
    for name in ("beta1", "beta2"):
        if (name, group[name]) != ("beta2", None):
            fraction(f"IVON.{name}", group[name])
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise ValueError(f"IVON.seed must be a whole number. Got {shown(group['seed'])}.")
    if group["clip_radius"] != math.inf:
        positive("IVON.clip_radius", group["clip_radius"], "or infinity")
    if group["hess_approx"] not in _ESTIMATES:
        raise ValueError(f"IVON.hess_approx must be one of {_ESTIMATES}. Got {shown(group['hess_approx'])}.")
    for p in group["params"]:
        if not p.is_floating_point():
            raise ValueError(f"IVON: parameters must be real numbers. Got one of {p.dtype}.")


class Slab:
    """Curvature, scale, momentum, mean and noise of parameters, as one flat vector each with a view per parameter.

    The curvature is h + decay, with h the Hessian of the loss per row, and the scale its power -1/2. Parameters stay
    where they are, read and written by multi-tensor copies; all else runs over whole vectors. State of half-precision
    parameters is kept in float32, where small updates do not get lost.
    """

    def __init__(self, parameters: Sequence[Tensor], hess_init: float, decay: float, begun: bool) -> None:
        """Make the first state for parameters of one device and dtype; `begun` says whether steps were taken before."""
        first, self.parameters, self.decay, self.begun = parameters[0], list(parameters), decay, begun
        self.kind = [(p.device, p.dtype, p.shape) for p in parameters]
        dtype = torch.float32 if first.dtype in _HALF else first.dtype
        size = sum(p.numel() for p in parameters)
        self.curvature = torch.full((size,), hess_init + decay, dtype=dtype, device=first.device)
        self.scale = self.curvature.rsqrt()
        self.momentum = torch.zeros_like(self.curvature)
        self.mean = torch.empty_like(self.curvature)
        self.noise = torch.empty_like(self.curvature)
        self.curvatures, self.scales, self.momenta, self.means, self.noises = (
            _views(flat, parameters) for flat in (self.curvature, self.scale, self.momentum, self.mean, self.noise)
        )
        self.sampled: list[int] = []  # parameters that the last draw moved
        self.moved: list[int] = []  # parameters away from their means now
        self.sums: tuple[Tensor, Tensor] | None = None  # of gradients and products, where a step has several samples
        self.seen: set[int] = set()  # parameters with a gradient in the sums

    @property
    def fits(self) -> bool:
        """Whether device, dtype and shape of the parameters are unchanged."""
        return all((p.device, p.dtype, p.shape) == kind for p, kind in zip(self.parameters, self.kind, strict=True))

    def load(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Load saved curvatures and momenta; parameters without any keep theirs."""
        for state, curvature, momentum in zip(states, self.curvatures, self.momenta, strict=True):
            if state:
                curvature.copy_(state["curvature"])
                momentum.copy_(state["momentum"])
        torch.rsqrt(self.curvature, out=self.scale)

    def settle(self, decay: float) -> None:
        """Change the decay and keep the Hessian."""
        if decay != self.decay:
            self.curvature.add_(decay - self.decay)
            torch.rsqrt(self.curvature, out=self.scale)
            self.decay = decay

    def draw(self, generator: torch.Generator, ess: float) -> None:
        """Store the means, and move the trainable parameters by noise of variance 1 / (ess curvature)."""
        self.sampled = [index for index, p in enumerate(self.parameters) if p.requires_grad]
        torch._foreach_copy_(self.means, self.parameters)
        self.noise.normal_(0.0, ess**-0.5, generator=generator)
        self.moved = self.sampled
        if self.moved:
            noises, scales = _pick(self.moved, self.noises), _pick(self.moved, self.scales)
            torch._foreach_addcmul_(_pick(self.moved, self.parameters), noises, scales)

    def restore(self) -> None:
        """Put the means back."""
        if self.moved:
            torch._foreach_copy_(_pick(self.moved, self.parameters), _pick(self.moved, self.means))
            self.moved = []

    def with_gradient(self) -> list[int]:
        """Indices of the sampled parameters that have a gradient."""
        return [index for index in self.sampled if self.parameters[index].grad is not None]

    def collect(self, squares: bool) -> None:
        """Add the gradients of the last sample to the sums, and clear them."""
        indices = self.with_gradient()
        if not indices:
            return
        gradients = self._gradients(indices)
        if self.sums is None:
            self.sums = torch.zeros_like(self.curvature), torch.zeros_like(self.curvature)
        gradient_sums, product_sums = (_views(flat, self.parameters) for flat in self.sums)
        torch._foreach_add_(_pick(indices, gradient_sums), gradients)
        factors = gradients if squares else _pick(indices, self.noises)
        torch._foreach_addcmul_(_pick(indices, product_sums), gradients, factors)
        self.seen.update(indices)
        for index in indices:
            self.parameters[index].grad = None

    def finite_sums(self) -> bool:
        """Whether the sums of gradients are finite."""
        return self.sums is None or bool(torch.isfinite(self.sums[0]).all())

    def forget(self) -> None:
        """Drop the samples since the last step."""
        self.sampled, self.sums, self.seen = [], None, set()

    def gradient_squares(self, count: int, scale: float) -> tuple[Tensor, int]:
        """Return the sum of squares of the gradients of the next step, (), and their number."""
        indices = self.with_gradient() if self.sums is None else sorted(self.seen)
        known = self._gradients(indices) if self.sums is None else _pick(indices, _views(self.sums[0], self.parameters))
        squares = self.curvature.new_zeros((), dtype=torch.float64)
        for gradient in known:
            squares += gradient.double().square().sum()
        return squares / (count * scale) ** 2, sum(gradient.numel() for gradient in known)

    def begin(self, hessian: Tensor, squares: bool) -> None:
        """Start from this Hessian () instead, before the first step; products with the noise of the samples follow."""
        before = self.scale.clone()
        self.curvature.fill_(hessian.to(self.curvature.device) + self.decay)
        torch.rsqrt(self.curvature, out=self.scale)
        if self.sums is None or not squares:
            products = self.noise if self.sums is None else self.sums[1]
            products.mul_(self.scale / before)

    def update(self, settings: Settings, count: int, scale: float) -> None:
        """Take one step from `count` samples, whose gradients are divided by `scale`."""
        indices = self.with_gradient() if self.sums is None else sorted(self.seen)
        if not indices:
            return
        if self.sums is not None:
            gradient, product = self.sums
            gradients = _pick(indices, _views(gradient.div_(count * scale), self.parameters))
            self.noise.copy_(product).div_(count * (scale**2 if settings.squares else scale))
        else:
            gradients = self._gradients(indices)
            if scale != 1.0:
                torch._foreach_div_(gradients, scale)
            products = _pick(indices, self.noises)
            if settings.squares:
                torch._foreach_copy_(products, gradients)
            torch._foreach_mul_(products, gradients)
        torch._foreach_lerp_(_pick(indices, self.momenta), gradients, 1.0 - settings.beta1)
        for begin, end in self._spans(indices):
            scales, change = self.scale[begin:end], self.noise[begin:end]
            online_newton_(
                self.curvature[begin:end],
                scales,
                self.momentum[begin:end],
                self.mean[begin:end],
                change.mul_(scales) if settings.squares else change,
                self.decay,
                weight=settings.ess,
                rate=1.0 - settings.beta2,
                pull_factor=self.decay * settings.correction,
                radius=settings.radius if settings.radius == math.inf else settings.radius * settings.correction,
            )
        parameters, changes = _pick(indices, self.parameters), _pick(indices, self.noises)
        factor = -settings.lr / settings.correction
        if isinstance(factor, Tensor):
            self.noise.mul_(factor)
            torch._foreach_add_(parameters, changes)
        else:
            torch._foreach_add_(parameters, changes, alpha=factor)

    def _gradients(self, indices: Iterable[int]) -> list[Tensor]:
        """The gradients of these parameters, in the dtype of the state."""
        gradients = []
        for index in indices:
            gradient = self.parameters[index].grad
            assert gradient is not None
            if gradient.is_sparse:
                raise RuntimeError("IVON does not take sparse gradients. Make the embedding with sparse=False.")
            gradients.append(gradient.to(self.curvature.dtype))
        return gradients

    def _spans(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """(begin, end) of these parameters in the flat vectors, with neighbours merged."""
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


def _pick(indices: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[index] for index in indices]


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat vector, one per parameter and with its strides, so that copies run in memory order."""
    views, offset = [], 0
    for p in parameters:
        views.append(flat.as_strided(p.shape, torch.empty_like(p, device="meta").stride(), offset))
        offset += p.numel()
    return views
