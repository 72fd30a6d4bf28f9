"""Functions that are polynomials plus cosines and sines: what can be inverted exactly."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Expansion:
    """f(t) = sum_n coefficients[n] t^n + sum_j cosines[j] cos(frequencies[j] t) + sines[j] sin(frequencies[j] t)."""

    coefficients: tuple[float, ...] = (0.0,)
    frequencies: tuple[float, ...] = ()
    cosines: tuple[float, ...] = ()
    sines: tuple[float, ...] = ()

    def __call__(self, t: Tensor) -> Tensor:
        """f(t), (...) -> (...)."""
        value = torch.zeros_like(t)
        for coefficient in reversed(self.coefficients):
            value = value * t + coefficient
        for frequency, cosine, sine in zip(self.frequencies, self.cosines, self.sines, strict=True):
            value = value + cosine * torch.cos(frequency * t) + sine * torch.sin(frequency * t)
        return value
