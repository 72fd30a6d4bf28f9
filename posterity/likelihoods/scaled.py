"""The base of likelihoods of real targets with a scale, known or learnt."""

import math
from abc import abstractmethod
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.likelihoods.likelihood import Entrywise, Likelihood, event_shape, real

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Scaled(Entrywise):
    """A density of (y - f) / scale, entry by entry. Subclasses are frozen dataclasses with at least these fields.

    `scale` is one for all outputs or one for each, (D,). With `learn` it is the starting value of a parameter whose
    raw form is log(scale), with 1 or D entries; members of a batched run each have their own, (M, 1, 1) or (M, 1, D)
    against outputs (M, N, D). `log_scale_prior` is (mean, standard deviation) of a normal prior on each entry of
    log(scale), or None.
    """

    scale: float | tuple[float, ...] | Tensor
    learn: bool
    log_scale_prior: tuple[float, float] | None

    @property
    @abstractmethod
    def _unit_fisher(self) -> float:
        """Fisher information of the location at scale 1."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if isinstance(self.scale, (tuple, list)):
            if not self.scale:
                raise ValueError(f"{name}.scale must be a positive number or one for each output, (D,). Got ().")
            for index, value in enumerate(self.scale):
                positive(f"{name}.scale[{index}]", value)
            object.__setattr__(self, "scale", tuple(self.scale))
        else:
            positive(f"{name}.scale", self.scale, "or one for each output, (D,)")
        shape = self.scale.shape if isinstance(self.scale, Tensor) else ()
        if len(shape) > 1 and (self.learn or len(shape) < 3 or shape[-2] != 1):
            raise ValueError(
                f"{name}.scale must be a number, one for each output (D,), or, when it is not learnt, one for each "
                f"member and output (M, 1, D). Got {shown(self.scale)}."
            )
        if self.log_scale_prior is not None:
            if not self.learn:
                raise ValueError(f"{name}.log_scale_prior is for a learnt scale. Give learn=True as well.")
            if len(self.log_scale_prior) != 2 or not math.isfinite(self.log_scale_prior[0]):
                raise ValueError(
                    f"{name}.log_scale_prior must be (mean, standard deviation) of log(scale). "
                    f"Got {shown(self.log_scale_prior)}."
                )
            positive(f"{name}.log_scale_prior: the standard deviation", self.log_scale_prior[1])
            object.__setattr__(self, "log_scale_prior", tuple(self.log_scale_prior))

    def _content(self) -> tuple[object, ...]:
        scale = torch.as_tensor(self.scale, dtype=torch.float64, device="cpu")
        others = (value for name, value in self.__getstate__().items() if name != "scale")
        return type(self), tuple(scale.shape), tuple(scale.reshape(-1).tolist()), *others

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Scaled) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # not casts

    def check(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return targets shaped as outputs (N, *event); targets (N,) become (N, 1) for outputs (N, 1)."""
        name = type(self).__name__
        targets = real(name, targets, outputs.shape, outputs.dtype)
        if self._num_scales > 1 and outputs.shape[1:] != (self._num_scales,):
            raise ValueError(
                f"{name}.scale has one entry for each of {self._num_scales} outputs. Got outputs of shape "
                f"{tuple(outputs.shape)}. Give one number for all outputs, or one for each."
            )
        return targets

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs

    def output_fisher(self, outputs: Tensor, event_dims: int | None = None) -> Tensor:
        """Return a multiple of I / scale^2 for each row, (..., N, D, D); by default the last axis is the event."""
        rows, size = event_shape(type(self).__name__, outputs, 1 if event_dims is None else event_dims)
        scale = self._cast(outputs)
        precision = scale**-2 if isinstance(scale, Tensor) else outputs.new_full((), scale**-2)
        diagonal = (self._unit_fisher * precision).expand(*precision.shape[:-1], size)  # (D,) or (M, 1, D)
        return torch.diag_embed(diagonal).expand(*rows, size, size)

    @property
    def num_free(self) -> int:
        return self._num_scales if self.learn else 0

    def free(self, like: Tensor) -> Tensor:
        if not self.learn:
            return like.new_zeros(0)
        return torch.as_tensor(self.scale, dtype=torch.float64).log().reshape(-1).to(like)

    def free_from(self, other: Likelihood, like: Tensor) -> Tensor:
        """Return the log scale of another likelihood of this class, where the scale is learnt: (H,) or (M, H)."""
        if not self.learn or not isinstance(other, type(self)) or other._num_scales not in (1, self.num_free):
            return self.free(like)
        scale = torch.as_tensor(other.scale, dtype=torch.float64)
        raw = scale.log().squeeze(-2) if scale.dim() > 2 else scale.log().reshape(-1)
        return raw.expand(*raw.shape[:-1], self.num_free).to(like)

    @property
    def num_members(self) -> int | None:
        return self.scale.shape[0] if isinstance(self.scale, Tensor) and self.scale.dim() > 2 else None

    def member(self, index: int) -> Self:
        if not isinstance(self.scale, Tensor) or self.scale.dim() < 3:
            return self
        scale = self.scale[index, 0]
        return self._held(float(scale) if scale.numel() == 1 else tuple(scale.tolist()))

    def free_names(self) -> dict[str, tuple[int, ...]]:
        return {"log_scale": (self.num_free,)} if self.learn else {}

    def with_free(self, raw: Tensor) -> Self:
        """Return the likelihood with scale exp(raw): (H,) stays (H,), (..., M, H) becomes (..., M, 1, H)."""
        if not self.learn:
            return self
        # Runs at every step, so it skips the checks of the constructor: exp is positive.
        likelihood = object.__new__(type(self))
        scale = raw.exp() if raw.dim() == 1 else raw.exp().unsqueeze(-2)
        vars(likelihood).update(self.__getstate__(), scale=scale, learn=False, log_scale_prior=None)
        return likelihood

    def fixed(self, raw: Tensor) -> Self:
        """Return the likelihood with fixed scale exp(raw): a number or tuple for raw (H,), a tensor for (M, H)."""
        if not self.learn:
            return self
        scale = raw.detach().double().exp()
        if raw.dim() > 1:
            return self._held(scale.unsqueeze(-2))
        shared = not isinstance(self.scale, tuple) and not (isinstance(self.scale, Tensor) and self.scale.dim())
        return self._held(float(scale[0]) if shared else tuple(scale.tolist()))

    def free_log_prior(self, raw: Tensor) -> Tensor:
        """Return the log density of `log_scale_prior` at raw, zero for the flat prior: (..., num_free) -> (...)."""
        if self.log_scale_prior is None:
            return raw.new_zeros(raw.shape[:-1])
        mean, deviation = self.log_scale_prior
        return (-0.5 * ((raw - mean) / deviation).square() - (math.log(deviation) + HALF_LOG_TWO_PI)).sum(-1)

    def _held(self, scale: float | tuple[float, ...] | Tensor) -> Self:
        return type(self)(**{**self.__getstate__(), "scale": scale, "learn": False, "log_scale_prior": None})

    @property
    def _num_scales(self) -> int:
        if isinstance(self.scale, Tensor):
            return self.scale.shape[-1] if self.scale.dim() else 1
        return len(self.scale) if isinstance(self.scale, tuple) else 1

    def _cast(self, outputs: Tensor) -> float | Tensor:
        """Return the scale as a number, or as a tensor with the dtype and device of outputs."""
        scale = self.scale
        if isinstance(scale, (int, float)):
            return scale
        if isinstance(scale, Tensor) and (
            scale.requires_grad or (scale.dtype, scale.device) == (outputs.dtype, outputs.device)
        ):
            return scale.to(outputs)
        # Copied to the device once: a copy at every step would be slow, and cannot be captured in a CUDA graph.
        casts: dict[tuple[torch.dtype, torch.device], Tensor] = vars(self).setdefault("_casts", {})
        key = (outputs.dtype, outputs.device)
        if key not in casts:
            cast = torch.as_tensor(scale, dtype=outputs.dtype, device=outputs.device)
            # A tensor made under a torch.func transform, a trace or inference mode must not outlive it.
            wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
            if type(cast) is not Tensor or cast.is_inference() or wrapped(cast):
                return cast
            casts[key] = cast
        return casts[key]

    def _aligned(self, outputs: Tensor) -> float | Tensor:
        """Return the scale so that it broadcasts against outputs (..., N, *event).

        A scale (*members, 1, H) determines the axes before the rows, so the axes after them are the event.
        """
        scale = self._cast(outputs)
        if not isinstance(scale, Tensor) or scale.dim() < 3:
            return scale
        event_dims = outputs.dim() - (scale.dim() - 2) - 1
        return scale if event_dims == 1 else scale.reshape(*scale.shape[:-2], *(1,) * (1 + event_dims))
