"""Heavy-tailed priors: Cauchy, logistic, Student-t, horseshoe and mixtures of normals."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posterity.errors import positive, shown
from posterity.numerics.random import Key
from posterity.priors.independent import Independent
from posterity.priors.prior import over
from posterity.special.functions import scaled_exponential_integral
from posterity.special.quadrature import normal_expectation


@dataclass(frozen=True, eq=False)
class Cauchy(Independent):
    """Independent weights most of which are small, and some of any size.

    **Math**: p(w) = 1 / (pi scale (1 + (w / scale)^2)). `scale` is half the interquartile range, a number or (M,) with
    one for each member.

    **Limit**: the density is exact; `cross_entropy` is by quadrature, to 1e-10. Neither mean nor variance exist
    (`variance` is nan), so no scale rule can match it. Not log-concave: `precision` is negative where |w| > scale.

    **Cost**: one pass over theta; `cross_entropy` evaluates the density 201 times for each weight, and its gradient
    as often again.

    **References**: Gelman et al. (2008), A weakly informative default prior distribution for logistic and other
    regression models.

    **Example**:

    >>> prior = Cauchy(scale=2.0)
    >>> prior.log_prob(torch.tensor([2.0]))
    tensor(-2.5310)
    >>> prior.variance(torch.zeros(1))
    tensor([nan])
    """

    scale: float | Tensor = 1.0

    @property
    def formula(self) -> str:
        return f"1 / ({math.pi * float(self.scale):.6g} (1 + {_square(float(self.scale))}))"

    def standard_log_prob(self, x: Tensor) -> Tensor:
        return -torch.log1p(x.square()) - math.log(math.pi)

    def standard_precision(self, x: Tensor) -> Tensor:
        square = x.square()
        return 2.0 * (1.0 - square) / (1.0 + square).square()

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        return torch.tan(math.pi * (key.uniform(shape, torch.float64, device) - 0.5))

    @property
    def standard_variance(self) -> float:
        return math.nan


@dataclass(frozen=True, eq=False)
class Logistic(Independent):
    """Independent weights with a smooth peak and exponential tails.

    **Math**: p(w) = exp(-w / scale) / (scale (1 + exp(-w / scale))^2). `scale` is a number or (M,) with one for each
    member; the variance is pi^2 scale^2 / 3.

    **Limit**: the density is exact; `cross_entropy` is by quadrature, to 1e-10. Log-concave, so that `precision` is
    positive; a smooth stand-in for `Laplace(scale)`.

    **Cost**: one pass over theta; `cross_entropy` evaluates the density 201 times for each weight, and its gradient
    as often again.

    **References**: Johnson, Kotz and Balakrishnan (1995), Continuous Univariate Distributions 2, chapter 23.

    **Example**:

    >>> prior = Logistic(scale=0.5)
    >>> prior.log_prob(torch.zeros(1))
    tensor(-0.6931)
    >>> prior.variance(torch.zeros(1))
    tensor([0.8225])
    """

    scale: float | Tensor = 1.0

    @property
    def formula(self) -> str:
        return f"1 / ({4.0 * float(self.scale):.6g} cosh(w{over(2.0 * float(self.scale))})^2)"

    def standard_log_prob(self, x: Tensor) -> Tensor:
        return F.logsigmoid(x) + F.logsigmoid(-x)

    def standard_precision(self, x: Tensor) -> Tensor:
        return 2.0 * torch.sigmoid(x) * torch.sigmoid(-x)

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        return torch.logit(key.uniform(shape, torch.float64, device).clamp_min(2.0**-54))

    @property
    def standard_variance(self) -> float:
        return math.pi**2 / 3.0


@dataclass(frozen=True, eq=False)
class StudentT(Independent):
    """Independent weights with polynomial tails, of any heaviness.

    **Math**: w = scale x with p0(x) = Gamma((d + 1) / 2) / (Gamma(d / 2) sqrt(pi d)) (1 + x^2 / d)^(-(d + 1) / 2),
    d = `degrees`. `scale` is a number or (M,) with one for each member. The variance is scale^2 d / (d - 2) for d > 2,
    infinite for 1 < d <= 2 and undefined (nan) below. x is normal with an inverse-gamma variance.

    **Limit**: the density is exact; `cross_entropy` is by quadrature, to 1e-10. Not log-concave: `precision` is
    negative where x^2 > d. `degrees` to infinity gives `Normal(scale)`, 1 gives `Cauchy(scale)`.

    **Cost**: one pass over theta; `cross_entropy` evaluates the density 201 times for each weight, and its gradient
    as often again.

    **References**: Gelman et al. (2013), Bayesian Data Analysis, section 17.2; Bailey (1994), Polar generation of
    random variates with the t-distribution, for `sample`.

    **Example**:

    >>> prior = StudentT(degrees=3.0, scale=0.5)
    >>> prior.log_prob(torch.zeros(1))
    tensor(-0.3077)
    >>> prior.variance(torch.zeros(1))
    tensor([0.7500])
    """

    degrees: float
    scale: float | Tensor = 1.0

    def __post_init__(self) -> None:
        positive("StudentT.degrees", self.degrees)
        super().__post_init__()

    @property
    def description(self) -> str:
        return f"Student-t, {self.degrees:g} degrees, scale {float(self.scale):.6g}"

    @property
    def formula(self) -> str:
        return f"(1 + {_square(float(self.scale))}{over(self.degrees)})^(-{(self.degrees + 1.0) / 2.0:g}) / Z"

    def standard_log_prob(self, x: Tensor) -> Tensor:
        half = 0.5 * (self.degrees + 1.0)
        constant = math.lgamma(half) - math.lgamma(0.5 * self.degrees) - 0.5 * math.log(math.pi * self.degrees)
        return constant - half * torch.log1p(x.square() / self.degrees)

    def standard_precision(self, x: Tensor) -> Tensor:
        square = x.square()
        return (self.degrees + 1.0) * (self.degrees - square) / (self.degrees + square).square()

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """Return sqrt(d (u^(-2 / d) - 1)) cos(2 pi v) for u, v uniform on (0, 1)."""
        first = key.fold("radius").uniform(shape, torch.float64, device).clamp_min(2.0**-54)
        second = key.fold("angle").uniform(shape, torch.float64, device)
        radius = (self.degrees * torch.expm1(-2.0 / self.degrees * first.log())).sqrt()
        return radius * torch.cos(2.0 * math.pi * second)

    @property
    def standard_variance(self) -> float:
        if self.degrees <= 1.0:
            return math.nan
        return self.degrees / (self.degrees - 2.0) if self.degrees > 2.0 else math.inf

    @property
    def standard_width(self) -> float:
        return math.sqrt(self.degrees)


@dataclass(frozen=True, eq=False)
class Horseshoe(Independent):
    """Independent weights that are either near zero or hardly shrunk at all.

    **Math**: w ~ N(0, scale^2 l^2) with l ~ half-Cauchy(0, 1) for each weight, integrated over l:
    p(w) = (2 pi^3)^(-1/2) / scale * e^x E_1(x) with x = w^2 / (2 scale^2) and the exponential integral E_1. `scale` is
    the global scale, a number or (M,) with one for each member.

    **Limit**: the density is exact; `cross_entropy` is by quadrature, to 1e-7. The density is infinite at 0, as
    log(1 / |w|): `log_prob` is inf there, `precision` is negative everywhere, and there is no mode to find. Sample it
    or fit a distribution under it, from a start without zeros. Neither mean nor variance exist (`variance` is nan).

    **Cost**: some hundred operations for each weight; `cross_entropy` evaluates the density 401 times for each weight,
    and its gradient as often again.

    **References**: Carvalho, Polson and Scott (2010), The horseshoe estimator for sparse signals, theorem 1.

    **Example**:

    >>> prior = Horseshoe(scale=0.1)
    >>> prior.log_prob(torch.tensor([0.001, 1.0]))
    tensor(-1.2207)
    """

    scale: float | Tensor = 1.0

    @property
    def formula(self) -> str:
        return f"mean over s of N(w; 0, ({float(self.scale):.6g} s)^2), s half-Cauchy of scale 1"

    def standard_log_prob(self, x: Tensor) -> Tensor:
        """Return log(e^y E_1(y)) - log(2 pi^3) / 2 with y = x^2 / 2."""
        return scaled_exponential_integral(0.5 * x.square()).log() - 0.5 * math.log(2.0 * math.pi**3)

    def standard_precision(self, x: Tensor) -> Tensor:
        """Return 2 G_2' / G_1 + (4 R^2 - 2 R) / x^2, with G_n(y) = e^y E_n(y), y = x^2 / 2 and R = G_2 / G_1."""
        half = 0.5 * x.square()
        first, second, third = (scaled_exponential_integral(half, order) for order in (1, 2, 3))
        slope = torch.where(half < 1.0, second - first, (second - 2.0 * third) / half)  # G_2' in its stable forms
        ratio = second / first
        return 2.0 * slope / first + (2.0 * ratio - 1.0) * ratio / half

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        """Draw a half-Cauchy scale for each weight, then a normal weight."""
        scale = torch.tan(0.5 * math.pi * key.fold("scale").uniform(shape, torch.float64, device))
        return scale * key.fold("normal").normal(shape, torch.float64, device)

    @property
    def standard_variance(self) -> float:
        return math.nan

    def standard_cross_entropy(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Integrate -log p0 by quadrature; a node on the singularity is moved off it."""
        return normal_expectation(
            lambda x: -self.standard_log_prob(x.abs().clamp_min(1e-150)), mean, scale, points=401, width=0.0
        )


@dataclass(frozen=True, eq=False)
class ScaleMixture(Independent):
    """Independent weights, each from one of several normals around zero.

    **Math**: p(w) = sum over c of weights[c] N(w; 0, (scale scales[c])^2). `weights` are positive and sum to 1. `scale`
    is common to all components, a number or (M,) with one for each member. The variance is
    scale^2 sum over c of weights[c] scales[c]^2.

    **Limit**: the density is exact; `cross_entropy` is by quadrature, to 1e-8 while scales differ by less than 1e5.
    A point mass has infinite cross-entropy with a normal: use a narrow normal for a spike. Not log-concave:
    `precision` may be negative between the components' widths.

    **Cost**: one pass over theta for each component; `cross_entropy` evaluates the density 401 times for each weight,
    and its gradient as often again.

    **References**: Blundell et al. (2015), Weight uncertainty in neural networks, eq. 7.

    **Example**:

    >>> prior = ScaleMixture(weights=(0.5, 0.5), scales=(1.0, 0.05))
    >>> prior.log_prob(torch.tensor([0.0]))
    tensor(1.4324)
    >>> prior.variance(torch.zeros(1))
    tensor([0.5013])
    """

    weights: tuple[float, ...]
    scales: tuple[float, ...]
    scale: float | Tensor = 1.0

    quadrature_points = 401

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "scales"):
            values = getattr(self, name)
            if not isinstance(values, (tuple, list)) or not values:
                raise ValueError(f"ScaleMixture.{name} must be a tuple, one for each component. Got {shown(values)}.")
            for index, value in enumerate(values):
                positive(f"ScaleMixture.{name}[{index}]", value)
            object.__setattr__(self, name, tuple(values))
        if len(self.weights) != len(self.scales):
            raise ValueError(
                "ScaleMixture: weights and scales must have one entry for each component. "
                f"Got {len(self.weights)} weights and {len(self.scales)} scales."
            )
        if abs(sum(self.weights) - 1.0) > 1e-9:
            raise ValueError(
                f"ScaleMixture.weights must sum to 1. Got {shown(self.weights)}, which sum to {sum(self.weights):g}. "
                "Divide each by their sum."
            )

    def standard_log_prob(self, x: Tensor) -> Tensor:
        return torch.logsumexp(self._components(x), dim=0)

    def standard_precision(self, x: Tensor) -> Tensor:
        """Return E[1 / s^2] - x^2 Var[1 / s^2] over the components, given x."""
        shares = torch.softmax(self._components(x), dim=0)  # (components, ...)
        precisions = [scale**-2 for scale in self.scales]
        mean = sum((share * value for share, value in zip(shares, precisions, strict=True)), torch.zeros_like(x))
        spread = sum(
            (share * (value - mean).square() for share, value in zip(shares, precisions, strict=True)),
            torch.zeros_like(x),
        )
        return mean - x.square() * spread

    def standard_sample(self, shape: tuple[int, ...], key: Key, device: torch.device) -> Tensor:
        weights = torch.tensor(self.weights, dtype=torch.float64, device=device)
        uniform = key.fold("component").uniform(shape, torch.float64, device)
        component = torch.bucketize(uniform, weights.cumsum(0)[:-1], right=True)
        scales = torch.tensor(self.scales, dtype=torch.float64, device=device)
        return scales[component] * key.fold("normal").normal(shape, torch.float64, device)

    @property
    def standard_variance(self) -> float:
        return sum(weight * scale**2 for weight, scale in zip(self.weights, self.scales, strict=True))

    @property
    def standard_width(self) -> float:
        return min(self.scales)

    def _components(self, x: Tensor) -> Tensor:
        """Return log(weights[c] N(x; 0, scales[c]^2)), (components, ...)."""
        return torch.stack(
            [
                (math.log(weight) - math.log(scale) - 0.5 * math.log(2.0 * math.pi)) - 0.5 * (x / scale).square()
                for weight, scale in zip(self.weights, self.scales, strict=True)
            ]
        )


def _square(scale: float) -> str:
    """Write (w / scale)^2."""
    return f"(w{divisor})^2" if (divisor := over(scale)) else "w^2"
