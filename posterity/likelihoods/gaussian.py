"""Gaussian observation noise, known or learnt."""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from posterity.errors import BadData, positive, shown
from posterity.likelihoods.likelihood import Likelihood
from posterity.numerics.random import Key

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, eq=False)
class Gaussian(Likelihood):
    """Independent normal noise around each network output.

    **Math**: y ~ N(f, scale^2), log p = sum over the event of -(y - f)^2 / (2 scale^2) - log scale - log(2 pi) / 2.
    `scale` is one standard deviation for all outputs or one for each, (D,). With `learn=True` it is the starting
    value of a parameter whose raw form is log(scale), with 1 or D entries; members of a batched run each have
    their own, (M, 1, 1) or (M, 1, D) against outputs (M, N, D).

    `log_scale_prior = (mean, standard deviation)` puts a normal prior on each entry of log(scale). None is a flat
    prior on log(scale). It is improper: fine for a mode, a Laplace or a variational fit, but a sampler needs a
    proper one.

    **Limit**: exact for Gaussian noise; one outlier at distance d costs d^2 / (2 scale^2) nats. Hessian and Fisher
    information in f are equal and constant.

    **Cost**: one pass over the outputs.

    **References**: Bishop (2006), Pattern Recognition and Machine Learning, eq. 5.12.

    **Example**:

    >>> likelihood = Gaussian(scale=2.0)
    >>> likelihood.log_prob(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    tensor([-2.1121])
    >>> Gaussian(scale=0.5, learn=True).free(torch.zeros(1))
    tensor([-0.6931])
    """

    scale: float | tuple[float, ...] | Tensor = 1.0
    learn: bool = False
    log_scale_prior: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.scale, (tuple, list)):
            if not self.scale:
                raise ValueError("Gaussian.scale must be a positive number or one for each output, (D,). Got ().")
            for index, value in enumerate(self.scale):
                positive(f"Gaussian.scale[{index}]", value)
            object.__setattr__(self, "scale", tuple(self.scale))
        else:
            positive("Gaussian.scale", self.scale, "or one for each output, (D,)")
        if isinstance(self.scale, Tensor) and not self._has_good_shape(self.scale):
            raise ValueError(
                "Gaussian.scale must be a number, one for each output (D,), or, when it is not learnt, one for each "
                f"member and output (M, 1, D). Got {shown(self.scale)}."
            )
        if self.log_scale_prior is not None:
            if not self.learn:
                raise ValueError("Gaussian.log_scale_prior is for a learnt scale. Give learn=True as well.")
            if len(self.log_scale_prior) != 2 or not math.isfinite(self.log_scale_prior[0]):
                raise ValueError(
                    "Gaussian.log_scale_prior must be (mean, standard deviation) of log(scale). "
                    f"Got {shown(self.log_scale_prior)}."
                )
            positive("Gaussian.log_scale_prior: the standard deviation", self.log_scale_prior[1])
            object.__setattr__(self, "log_scale_prior", tuple(self.log_scale_prior))

    def _has_good_shape(self, scale: Tensor) -> bool:
        return scale.dim() <= 1 or (not self.learn and scale.dim() >= 3 and scale.shape[-2] == 1)

    def _content(self) -> tuple[object, ...]:
        scale = torch.as_tensor(self.scale, dtype=torch.float64, device="cpu")
        return tuple(scale.shape), tuple(scale.reshape(-1).tolist()), self.learn, self.log_scale_prior

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Gaussian) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # casts stay with their device

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets shaped as outputs (N, *event); targets (N,) become (N, 1) for outputs (N, 1)."""
        if not targets.is_floating_point() or targets.dtype != outputs.dtype:
            raise BadData(
                f"Gaussian: targets must have the outputs' dtype {outputs.dtype}. Got {targets.dtype}. "
                f"Convert with y.to({outputs.dtype})."
            )
        if targets.dim() == 1 and outputs.shape == (*targets.shape, 1):
            targets = targets.unsqueeze(-1)
        if targets.shape != outputs.shape or not targets.dim():
            raise BadData(
                f"Gaussian: targets must have the shape of the outputs, {tuple(outputs.shape)}. "
                f"Got {tuple(targets.shape)}. Reshape the targets, or give the network one output for each target."
            )
        finite = torch.isfinite(targets)
        if not finite.all():
            row = int((~finite).reshape(len(targets), -1).any(-1).nonzero()[0])
            raise BadData(
                f"Gaussian: targets must be finite. Got {shown(targets[row])} in row {row}. Drop or repair that row."
            )
        if self._num_scales > 1 and outputs.shape[1:] != (self._num_scales,):
            raise ValueError(
                f"Gaussian.scale has one entry for each of {self._num_scales} outputs. Got outputs of shape "
                f"{tuple(outputs.shape)}. Give one number for all outputs, or one for each."
            )
        return targets

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log N(y; f, scale^2) for each row, (..., N, *event) and (N, *event) -> (..., N)."""
        event_dims = targets.dim() - 1
        scale = self._aligned(outputs, event_dims)
        log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
        entries = -0.5 * ((targets - outputs) / scale).square() - (log_scale + _HALF_LOG_TWO_PI)
        return entries.sum(dim=tuple(range(-event_dims, 0))) if event_dims else entries

    def sample(self, outputs: Tensor, key: Key) -> Tensor:
        """y = f + scale * noise, shaped as outputs."""
        return outputs + self._aligned(outputs) * key.normal(outputs.shape, outputs.dtype, outputs.device)

    def mean(self, outputs: Tensor) -> Tensor:
        """E[y | f] = f."""
        return outputs

    def variance(self, outputs: Tensor) -> Tensor:
        """Var[y | f] = scale^2, shaped as outputs."""
        return torch.zeros_like(outputs) + self._aligned(outputs) ** 2

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """I / scale^2 for each row, (..., N, D, D)."""
        return self._information(outputs, targets.dim() - 1)

    def output_fisher(self, outputs: Tensor) -> Tensor:
        """I / scale^2 for each row; the last axis of outputs (..., N, D) is the event, outputs (N,) have none."""
        return self._information(outputs, min(1, outputs.dim() - 1))

    @property
    def num_free(self) -> int:
        """1 or D when the scale is learnt, else 0."""
        return self._num_scales if self.learn else 0

    def free(self, like: Tensor) -> Tensor:
        """log(scale), (num_free,)."""
        if not self.learn:
            return like.new_zeros(0)
        return torch.as_tensor(self.scale, dtype=torch.float64).log().reshape(-1).to(like)

    def free_from(self, other: Likelihood, like: Tensor) -> Tensor:
        """log of the other Gaussian's scale, where this one learns its own: (num_free,) or (M, num_free)."""
        if not self.learn or not isinstance(other, Gaussian) or other._num_scales not in (1, self.num_free):
            return self.free(like)
        scale = torch.as_tensor(other.scale, dtype=torch.float64)
        raw = scale.log().squeeze(-2) if scale.dim() > 2 else scale.log().reshape(-1)
        return raw.expand(*raw.shape[:-1], self.num_free).to(like)

    def member(self, index: int) -> "Gaussian":
        """The likelihood of one member, where they differ."""
        if not isinstance(self.scale, Tensor) or self.scale.dim() < 3:
            return self
        scale = self.scale[index, 0]
        return Gaussian(float(scale) if scale.numel() == 1 else tuple(scale.tolist()))

    def free_names(self) -> dict[str, tuple[int, ...]]:
        """`log_scale` when the scale is learnt."""
        return {"log_scale": (self.num_free,)} if self.learn else {}

    def with_free(self, raw: Tensor) -> "Gaussian":
        """The likelihood of scale exp(raw): (H,) stays (H,), (..., M, H) becomes (..., M, 1, H)."""
        if not self.learn:
            return self
        # Runs at every step, so it skips the checks of the constructor: exp is positive.
        likelihood = object.__new__(Gaussian)
        scale = raw.exp() if raw.dim() == 1 else raw.exp().unsqueeze(-2)
        likelihood.__dict__.update(scale=scale, learn=False, log_scale_prior=None)
        return likelihood

    def fixed(self, raw: Tensor) -> "Gaussian":
        """The likelihood held at scale exp(raw): a number or tuple for raw (H,), a tensor when members differ."""
        if not self.learn:
            return self
        scale = raw.detach().double().exp()
        if raw.dim() > 1:
            return Gaussian(scale.unsqueeze(-2))
        shared = not isinstance(self.scale, tuple) and not (isinstance(self.scale, Tensor) and self.scale.dim())
        return Gaussian(float(scale[0]) if shared else tuple(scale.tolist()))

    def free_log_prior(self, raw: Tensor) -> Tensor:
        """Log density of `log_scale_prior` at raw, summed; zero for the flat prior. (..., num_free) -> (...)."""
        if self.log_scale_prior is None:
            return raw.new_zeros(raw.shape[:-1])
        mean, deviation = self.log_scale_prior
        return (-0.5 * ((raw - mean) / deviation).square() - (math.log(deviation) + _HALF_LOG_TWO_PI)).sum(-1)

    @property
    def _num_scales(self) -> int:
        if isinstance(self.scale, Tensor):
            return self.scale.shape[-1] if self.scale.dim() else 1
        return len(self.scale) if isinstance(self.scale, tuple) else 1

    def _cast(self, outputs: Tensor) -> float | Tensor:
        """The scale as a number, or as a tensor with the dtype and device of outputs."""
        scale = self.scale
        if isinstance(scale, (int, float)):
            return scale
        if isinstance(scale, Tensor) and (
            scale.requires_grad or (scale.dtype, scale.device) == (outputs.dtype, outputs.device)
        ):
            return scale.to(outputs)
        # Copied to the device once: a copy at every step would be slow, and cannot be captured in a CUDA graph.
        casts: dict[tuple[torch.dtype, torch.device], Tensor] = self.__dict__.setdefault("_casts", {})
        key = (outputs.dtype, outputs.device)
        if key not in casts:
            cast = torch.as_tensor(scale, dtype=outputs.dtype, device=outputs.device)
            # One made under a torch.func transform, a trace or inference mode must not outlive it.
            if type(cast) is not Tensor or cast.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(cast):
                return cast
            casts[key] = cast
        return casts[key]

    def _aligned(self, outputs: Tensor, event_dims: int | None = None) -> float | Tensor:
        """The scale, broadcasting against outputs (..., N, *event).

        A scale of members (M, 1, H) is laid out for one event axis; for no event axis the outputs (M, N) have
        fewer axes than it.
        """
        scale = self._cast(outputs)
        if not isinstance(scale, Tensor) or scale.dim() < 3:
            return scale
        if event_dims is None:
            event_dims = 0 if outputs.dim() < scale.dim() else 1
        return scale if event_dims == 1 else scale.reshape(*scale.shape[:-2], *(1,) * (1 + event_dims))

    def _information(self, outputs: Tensor, event_dims: int) -> Tensor:
        rows = outputs.shape[: outputs.dim() - event_dims]  # (..., N)
        size = math.prod(outputs.shape[outputs.dim() - event_dims :])
        scale = self._cast(outputs)
        precision = scale**-2 if isinstance(scale, Tensor) else outputs.new_full((), scale**-2)
        diagonal = precision.expand(*precision.shape[:-1], size)  # (D,) or (M, 1, D)
        return torch.diag_embed(diagonal).expand(*rows, size, size)
