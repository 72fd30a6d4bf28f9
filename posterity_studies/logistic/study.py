"""The study: curves of one variable, maps and rays of all methods, the document and its tables."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.output import table
from posterity.curvature import Hessian
from posterity.inference import infer
from posterity.methods import MAP, Laplace
from posterity.model import Density
from posterity.optim import SGD
from posterity.posteriors import Gaussian, Linearized
from posterity.predictive import Exact as ExactIntegral
from posterity_studies.frame import notes, remark, title
from posterity_studies.logistic.comparison import Row, claims, compare
from posterity_studies.logistic.exact import (
    FAR,
    INTEGRATORS,
    Decomposition,
    Exact,
    Ray,
    decompositions,
    exact_posterior,
    rays,
    weight_average,
    weight_draws,
)
from posterity_studies.logistic.fits import (
    GAUSSIANS,
    PRIOR_SCALE,
    Fit,
    Regression,
    binary,
    gaussian_fits,
    laplace_fit,
    sampled,
)
from posterity_studies.logistic.langevin import Bias, langevin_bias
from posterity_studies.logistic.multiclass import MultiClass, multiclass
from posterity_studies.logistic.settings import Settings
from posterity_studies.options import Report, silent

SHAPE, RATE = 7.0, 2.0  # of the Gamma variable whose logarithm is u


@dataclass(frozen=True)
class Curve:
    """A density exp(k u - r e^u) on the line, and its Laplace approximation N(mode, 1 / precision)."""

    mode: float
    precision: float
    laplace_log_normaliser: float
    exact_log_normaliser: float

    def log_density(self, u: Tensor) -> Tensor:
        """The exact log density, normalised."""
        return SHAPE * u - RATE * u.exp() - self.exact_log_normaliser

    def laplace_log_density(self, u: Tensor) -> Tensor:
        """The log density of the Gaussian at the mode."""
        return 0.5 * (math.log(self.precision / (2 * math.pi)) - self.precision * (u - self.mode) ** 2)


def laplace_curve() -> Curve:
    """Fit MAP and Laplace to exp(k u - r e^u), the log of a Gamma variable, whose normaliser is Gamma(k) / r^k."""
    density = Density(lambda u: SHAPE * u - RATE * u.exp(), {"u": ()}, dtype=torch.float64)
    method = MAP(steps=300, batch_size=None, optimizer=SGD(step_size=0.1, momentum=0.2))
    mode, _ = infer(method, density, None, progress=False)
    fitted, _ = infer(Laplace(tuning=None, curvature=Hessian()), density, None, start=mode, progress=False)
    assert isinstance(fitted, Gaussian)
    assert fitted.log_evidence is not None
    return Curve(
        mode=float(fitted.mean),
        precision=1.0 / float(fitted.variance),
        laplace_log_normaliser=float(fitted.log_evidence),
        exact_log_normaliser=math.lgamma(SHAPE) - SHAPE * math.log(RATE),
    )


@dataclass(frozen=True)
class ProbitError:
    """The largest distance of Phi(a sqrt(pi / 8)) from sigmoid(a), and the a > 0 where it is."""

    largest: float
    at: float


def probit_difference(a: Tensor) -> Tensor:
    """Phi(a sqrt(pi / 8)) - sigmoid(a)."""
    normal: Tensor = torch.special.ndtr(a * math.sqrt(math.pi / 8))
    return normal - torch.sigmoid(a)


def probit_error() -> ProbitError:
    """Find the largest error on a grid of step 1e-4, which is exact to 1e-9 since the maximum is flat."""
    a = torch.linspace(0.0, 10.0, 100_001, dtype=torch.float64)
    largest, index = probit_difference(a).abs().max(0)
    return ProbitError(float(largest), float(a[index]))


REACH, SIDE = 6.0, 51  # of the map
RING = 30.0  # radius at which the entropy far from the data is computed
DRAWS = 10_000  # at every point of a map
RAY_DRAWS = 1_000_000  # at every point of a ray
FAR_DRAWS = 4_000_000  # at one point of each ray: a standard error below 3e-4


@dataclass(frozen=True, eq=False)
class Study:
    """The results: the fits, the maps of p(y = 1 | x) by method over `axis` x `axis`, rays, samples and comparisons."""

    settings: Settings
    regression: Regression
    fits: dict[str, Fit]
    exact: Exact
    axis: Tensor
    maps: dict[str, Tensor]  # (SIDE * SIDE,), second input fastest
    entropy: dict[str, dict[str, float]]
    rays: list[Ray]
    decompositions: list[Decomposition]
    comparison: list[Row]
    bias: Bias
    curve: Curve
    probit: ProbitError
    multiclass: MultiClass

    @property
    def claims(self) -> dict[str, bool]:
        """Claims about the methods, and whether they hold here."""
        return {**claims(self.comparison), **self.bias.claims()}

    def document(self) -> dict[str, Any]:
        """Return all numbers of the study as JSON."""
        exact_map = self.maps["Exact posterior"]
        laplace = self.regression.laplace
        return {
            **asdict(self.settings),
            "data": {
                "inputs": self.regression.inputs.tolist(),
                "labels": [int(label) for label in self.regression.targets],
                "prior_scale": PRIOR_SCALE,
            },
            "map": {"weights": self.regression.mode.theta.tolist()},
            "laplace": {
                "mean": laplace.point().tolist(),
                "covariance": self.regression.covariance.tolist(),
                "log_evidence": None if laplace.log_evidence is None else float(laplace.log_evidence),
            },
            "gaussians": [
                {"method": name, "mean": q.point().tolist(), "covariance": q.gaussian.precision.covariance().tolist()}
                for name, q in _gaussians(self.fits).items()
            ],
            "exact": {
                "mean": self.exact.mean.tolist(),
                "covariance": self.exact.covariance.tolist(),
                "log_evidence": self.exact.log_evidence,
            },
            "methods": [
                {
                    "method": name,
                    "largest_error": float((values - exact_map).abs().max()),
                    "mean_error": float((values - exact_map).abs().mean()),
                    **self.entropy[name],
                }
                for name, values in self.maps.items()
            ],
            "monte_carlo_draws": {"maps": DRAWS, "along_rays": RAY_DRAWS, "far_along_rays": FAR_DRAWS},
            "rays": [
                {
                    "direction": list(ray.direction),
                    "distance": FAR,
                    "monte_carlo_error": ray.monte_carlo_error,
                    "methods": [
                        {"method": name, "probability": ray.far[name], "limit": ray.limit[name]} for name in ray.far
                    ],
                }
                for ray in self.rays
            ],
            "decomposition": [
                {
                    **asdict(decomposition),
                    "name": _one_line(decomposition.name),
                    "elbo": decomposition.elbo,
                    "sum": decomposition.elbo + decomposition.divergence,
                }
                for decomposition in self.decompositions
            ],
            "comparison": [asdict(row) for row in self.comparison],
            "langevin_bias": self.bias.document(),
            "claims": [{"claim": claim, "holds": holds} for claim, holds in self.claims.items()],
            "laplace_1d": asdict(self.curve),
            "probit": asdict(self.probit),
            "multiclass": [
                {
                    "method": name,
                    "largest_distance": float(self.multiclass.error(name).max()),
                    "mean_distance": float(self.multiclass.error(name).mean()),
                }
                for name in self.multiclass.probs
            ],
        }


PARTS = (2.9, 19.4, 10.1, 3.9)


def run(settings: Settings, folder: Path | None = None, report: Report = silent) -> Study:
    """Run the study; the seed determines all random numbers."""
    chains, length, seed = settings.chains, settings.draws, settings.seed
    report("Gaussian fits")
    regression = binary()
    fits = {"Laplace": laplace_fit(regression), **gaussian_fits(regression, settings.steps, seed)}
    fitted = _gaussians(fits)
    report("chains")
    fits |= sampled(regression, chains, length, seed)
    report("exact posterior, maps, rays, three classes")
    exact = exact_posterior(regression)
    draws, far_draws = (weight_draws(regression, count, seed) for count in (DRAWS, FAR_DRAWS))
    parts = decompositions(regression, exact, fitted)
    elbos = {_one_line(part.name): part.elbo for part in parts if part.name.startswith("Variational")}
    methods = _methods(regression, fitted, exact, draws)
    axis = torch.linspace(-REACH, REACH, SIDE, dtype=torch.float64)
    indices = torch.cartesian_prod(axis, axis)
    angle = torch.linspace(0.0, 2 * torch.pi, 181, dtype=torch.float64)[:-1]
    ring = RING * torch.stack([angle.cos(), angle.sin()], dim=1)
    return Study(
        settings=settings,
        regression=regression,
        fits=fits,
        exact=exact,
        axis=axis,
        maps={name: method(indices) for name, method in methods.items()},
        entropy={
            name: {
                "entropy_on_the_data": float(_entropy(method(regression.inputs)).mean()),
                "entropy_far_away": float(_entropy(method(ring)).mean()),
            }
            for name, method in methods.items()
        },
        rays=rays(regression, fitted, far_draws[:RAY_DRAWS], far_draws),
        decompositions=parts,
        comparison=compare(exact, fits, elbos),
        bias=langevin_bias(regression, exact, chains, length, seed),
        curve=laplace_curve(),
        probit=probit_error(),
        multiclass=multiclass(settings.points, seed),
    )


def _gaussians(fits: Mapping[str, Fit]) -> dict[str, Linearized]:
    """The fitted Gaussians by name, without Laplace."""
    chosen = {name: fits[name].posterior for name in GAUSSIANS}
    return {name: q for name, q in chosen.items() if isinstance(q, Linearized)}


def _one_line(name: str) -> str:
    return " ".join(name.split())


def _methods(
    regression: Regression, fitted: Mapping[str, Linearized], exact: Exact, draws: Tensor
) -> dict[str, Callable[[Tensor], Tensor]]:
    """p(y = 1 | x) of inputs (N, 2) by name, in the order of the figures."""
    results: dict[str, Callable[[Tensor], Tensor]] = {
        "MAP": lambda inputs: regression.mode.predict(inputs).probs[:, 1],
        "Laplace, Monte Carlo": lambda inputs: weight_average(draws, inputs),
    }
    integrals = [(name, regression.laplace, integrator) for name, integrator in INTEGRATORS.items()]
    integrals += [(name, q, ExactIntegral()) for name, q in fitted.items()]
    for name, posterior, integrator in integrals:
        results[name] = lambda inputs, q=posterior, chosen=integrator: q.predict(  # type: ignore[misc]
            inputs, integrator=chosen
        ).probs[:, 1]
    return {**results, "Exact posterior": exact.probability}


def _entropy(probability: Tensor) -> Tensor:
    """Entropy of a binary label with these probabilities, in nats."""
    total: Tensor = torch.special.entr(probability) + torch.special.entr(1 - probability)
    return total


def show(out: Any, study: Study) -> None:
    """Print the tables."""
    document = study.document()
    title(out, "Bayesian logistic regression, 10 rows, 2 weights")
    rows = table("method", "largest error", "mean error", "entropy on data", "far away")
    for row in document["methods"]:
        numbers = ("largest_error", "mean_error", "entropy_on_the_data", "entropy_far_away")
        rows.add_row(row["method"], *(f"{row[key]:.4f}" for key in numbers))
    out.print(rows)
    remark(out, "Error: distance from the exact posterior over the map. Far away: radius 30.")
    out.print()
    title(out, "Along rays: p(y = 1 | c x) at c = 10 000 against its limit by theory")
    rows = table("method", "probability", "limit", "difference", "standard error")
    for ray in document["rays"]:
        rows.add_row(f"x = ({ray['direction'][0]:g}, {ray['direction'][1]:g})", style="bold")
        for row in ray["methods"]:
            error = f"{ray['monte_carlo_error']:.1e}" if "Monte Carlo" in row["method"] else ""
            difference = f"{abs(row['probability'] - row['limit']):.1e}"
            rows.add_row(row["method"], f"{row['probability']:.6f}", f"{row['limit']:.6f}", difference, error)
    out.print(rows)
    draws = document["monte_carlo_draws"]
    note = (
        f"Monte Carlo: {draws['far_along_rays']:,} draws here, {draws['along_rays']:,} in curves, {draws['maps']:,} in "
        "maps."
    )
    remark(out, note)
    out.print()
    title(out, "log p(y) = ELBO(q) + KL(q ‖ posterior), in nats")
    rows = table("q", "log joint", "entropy", "ELBO", "KL", "ELBO + KL")
    for row in document["decomposition"]:
        numbers = ("expected_log_joint", "entropy", "elbo", "divergence")
        rows.add_row(row["name"], *(f"{row[key]:.4f}" for key in numbers), f"{row['sum']:.7f}")
    out.print(rows)
    _show_comparison(out, study)
    curve, probit = document["laplace_1d"], document["probit"]
    classes = {row["method"]: row["mean_distance"] for row in document["multiclass"]}
    lines = (
        f"log evidence: exact {document['exact']['log_evidence']:.6f}, Laplace "
        f"{document['laplace']['log_evidence']:.6f}",
        f"Laplace in one dimension: log normaliser {curve['laplace_log_normaliser']:.6f}, exact "
        f"{curve['exact_log_normaliser']:.6f}",
        f"probit for sigmoid: off by at most {probit['largest']:.5f}, at a = {probit['at']:.3f}",
        "three classes, mean distance from the exact softmax integral: mean-field probit "
        f"{classes['Laplace, mean-field probit']:.4f}, Monte Carlo {classes['Laplace, Monte Carlo']:.4f}, "
        f"MAP {classes['MAP']:.4f}",
    )
    notes(out, lines)


def _show_comparison(out: Any, study: Study) -> None:
    title(out, "Methods against the exact posterior: errors and cost")
    rows = table("method", "mean", "cov.", "evidence", "gradients", "time", "ESS")
    for row in study.comparison:
        rows.add_row(
            row.method,
            f"{row.mean_error:.3f}",
            f"{row.covariance_error:.3f}",
            "" if row.evidence_error is None else f"{row.evidence_error:+.3f}",
            "" if row.gradients is None else f"{row.gradients:,}",
            f"{row.seconds:.1f} s",
            "" if row.ess_per_1000_gradients is None else f"{row.ess_per_1000_gradients:.0f}",
        )
    out.print(rows)
    remark(out, "Mean: in exact standard deviations. Cov.: of whitened weights, minus I.")
    remark(out, "Evidence: the ELBO where variational. ESS: for 1,000 gradients. Time: of a CPU.")
    out.print()
    notes(out, (f"{'holds' if holds else 'FAILS'}: {claim}" for claim, holds in study.claims.items()))
    out.print()
