"""Temperatures of a sampler, estimated from its momenta and positions: 1 where it draws from its target."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.diagnostics.chains import mcse_mean
from posterity.errors import fraction, positive, shown
from posterity.numerics.layout import Layout


@dataclass(frozen=True, eq=False)
class Temperature:
    """The temperature of each draw, `draws` (..., G) in float64, in G groups of weights with `names` and `sizes`.

    The last axis but one is time: standard errors allow for draws that are correlated along it.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    draws: Tensor

    @property
    def means(self) -> Tensor:
        """Mean temperature of each group, (G,)."""
        return self._series(self.draws).mean((0, 1))

    @property
    def standard_errors(self) -> Tensor:
        """Monte Carlo standard error of each mean, (G,); NaN for fewer than 4 draws."""
        return mcse_mean(self._series(self.draws))

    @property
    def mean(self) -> float:
        """Mean temperature of all weights."""
        return float(self._all().mean())

    @property
    def standard_error(self) -> float:
        """Monte Carlo standard error of `mean`; NaN for fewer than 4 draws."""
        return float(mcse_mean(self._series(self._all()))[0])

    @property
    def expected_scales(self) -> Tensor:
        """Standard deviation of one draw of each group at temperature 1, sqrt(2 / size), (G,)."""
        return (2.0 / self._sizes()).sqrt()

    def interval(self, level: float = 0.95) -> Tensor:
        """Return the interval (G, 2) that holds this share of draws at temperature 1, from chi^2_size / size."""
        fraction("Temperature.interval: level", level)
        half = 0.5 * self._sizes()[:, None]
        tails = torch.tensor([0.5 - 0.5 * level, 0.5 + 0.5 * level], dtype=torch.float64, device=half.device)
        low, high = torch.zeros_like(half * tails), 1.0 + 40.0 * (2.0 / half).sqrt().expand(-1, 2) + 40.0 / half
        for _ in range(80):  # bisections, to rounding
            middle = 0.5 * (low + high)
            less = torch.special.gammainc(half.expand_as(middle), half * middle) < tails
            low, high = torch.where(less, middle, low), torch.where(less, high, middle)
        return 0.5 * (low + high)

    def _sizes(self) -> Tensor:
        return torch.tensor(self.sizes, dtype=torch.float64, device=self.draws.device)

    def _all(self) -> Tensor:
        """Return the temperature of all weights at each draw, (..., 1)."""
        return (self.draws * self._sizes()).sum(-1, keepdim=True) / sum(self.sizes)

    @staticmethod
    def _series(draws: Tensor) -> Tensor:
        """Reshape draws to chains, time and groups, (C, D, G)."""
        return draws.reshape(-1, draws.shape[-2] if draws.dim() > 1 else 1, draws.shape[-1])

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.names, "all weights"))
        means, errors = self.means.tolist(), self.standard_errors.tolist()
        rows = list(zip(self.names, self.sizes, means, errors, strict=True)) if len(self.names) > 1 else []
        rows.append(("all weights", sum(self.sizes), self.mean, self.standard_error))
        lines = [f"{'':<{width}}  {'weights':>9}  {'temperature':>11}  {'error':>8}"]
        lines += [f"{name:<{width}}  {size:>9,}  {mean:>11.4f}  {error:>8.2g}" for name, size, mean, error in rows]
        return "\n".join(lines)


def kinetic_temperature(momenta: Tensor, mass: float | Tensor = 1.0, layout: Layout | None = None) -> Temperature:
    """Return the temperature of momenta (..., P) with a diagonal mass, a number or (P,); by tensor given a layout.

    **Math**: at temperature T momenta are N(0, T M), so K = p^T M^-1 p is T chi^2_P: its mean is T P and its
    variance 2 T^2 P. The temperature of a draw is K / P, with mean T and standard deviation T sqrt(2 / P), whatever
    the target is.

    **Limit**: it shows whether noise and friction balance (gradient noise heats), not whether positions have reached
    their target. Momenta of a discretised sampler are N(0, T M) up to the square of its step only.

    **Cost**: one pass over the momenta.

    **References**: Leimkuhler and Matthews (2015), Molecular dynamics; Wenzel et al. (2020), How good is the Bayes
    posterior in deep neural networks really?

    **Example**:

    >>> from posterity.numerics import Key
    >>> print(kinetic_temperature(2.0 * Key(0).normal((4, 500, 100)), mass=4.0))
                   weights  temperature     error
    all weights        100       1.0004    0.0031
    """
    _check("kinetic_temperature: momenta", momenta, 1)
    positive("kinetic_temperature: mass", mass)
    scale = torch.as_tensor(mass, dtype=torch.float64, device=momenta.device)
    if scale.dim() > 1 or scale.numel() not in (1, momenta.shape[-1]):
        raise ValueError(
            f"kinetic_temperature: mass must be a number or ({momenta.shape[-1]},), one for each weight. "
            f"Got {tuple(scale.shape)}."
        )
    return _grouped(momenta.detach().double().square() / scale, layout)


def configurational_temperature(
    theta: Tensor, grad: Tensor, reference: Tensor | None = None, layout: Layout | None = None
) -> Temperature:
    """Return the temperature of positions (C, D, P) from gradients of the log density; by tensor given a layout.

    **Math**: positions at temperature T have density pi ~ exp(l(theta) / T). With v = theta - r and any constant r,
    integration by parts gives

        E[v^T grad l] = T int v^T grad pi = -T int (div v) pi = -T P,    so    T = -E[v^T grad l] / P,

    which holds for the weights of each tensor alone, too. r affects the variance only: `reference` (P,), or the mean
    of all draws. For a Gaussian target with r at its mean v^T grad l is -v^T Lambda v, and each draw is T chi^2_P / P,
    as for the kinetic temperature.

    **Limit**: the density must vanish at the edge faster than |v| grows. The mean of the same draws as reference biases
    by -T / ESS. Gradients of mini-batches drawn apart from theta leave the mean as it is and add variance; those that
    theta has already moved along do not.

    **Cost**: one pass over both.

    **References**: Leimkuhler and Matthews (2015), Molecular dynamics; Wenzel et al. (2020).

    **Example**:

    >>> from posterity.numerics import Key
    >>> theta = 3.0 + 2.0 * Key(0).normal((4, 500, 100))
    >>> print(configurational_temperature(theta, -(theta - 3.0) / 4.0))
                   weights  temperature     error
    all weights        100       0.9999    0.0031
    """
    _check("configurational_temperature: theta", theta, 3)
    if grad.shape != theta.shape:
        raise ValueError(
            f"configurational_temperature: grad must have the shape of theta, {tuple(theta.shape)}. "
            f"Got {tuple(grad.shape)}."
        )
    theta = theta.detach().double()
    if reference is None:
        reference = theta.mean((0, 1))
    elif reference.shape != theta.shape[-1:]:
        raise ValueError(
            f"configurational_temperature: reference must be {tuple(theta.shape[-1:])}, one value for each weight. "
            f"Got {tuple(reference.shape)}."
        )
    return _grouped(-(theta - reference.to(theta)) * grad.detach().double(), layout)


def _grouped(terms: Tensor, layout: Layout | None) -> Temperature:
    """Average terms (..., P) over the weights of each tensor, or over all weights."""
    if layout is None:
        return Temperature(("all weights",), (terms.shape[-1],), terms.mean(-1, keepdim=True))
    if layout.size != terms.shape[-1]:
        raise ValueError(f"The layout has {layout.size} numbers, the draws {terms.shape[-1]}. Give that of theta.")
    parts = [terms[..., part.offset : part.offset + part.size].mean(-1) for part in layout]
    return Temperature(layout.names, tuple(part.size for part in layout), torch.stack(parts, -1))


def _check(name: str, values: Tensor, axes: int) -> None:
    if not isinstance(values, Tensor) or values.dim() < axes or not values.shape[-1]:
        wanted = "(chains, draws, weights)" if axes > 1 else "(..., weights)"
        raise ValueError(f"{name} must be a tensor {wanted}. Got {shown(values)}.")
