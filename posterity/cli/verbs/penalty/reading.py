"""Conversion of a penalty to its prior, or back, for `posterity penalty`: text, figure and JSON."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.output import finite
from posterity.cli.verbs.penalty.words import parse_family, parse_penalty, parse_prior, parse_shape, sized
from posterity.numerics.layout import Layout
from posterity.penalties import (
    Dirac,
    Divergence,
    Family,
    Function,
    Gaussian,
    Penalty,
    Sum,
    Verdict,
    from_prior,
    to_prior,
)
from posterity.penalties import GroupLasso as GroupPenalty
from posterity.penalties.conversion import variance_of_one
from posterity.penalties.expansion import Expansion
from posterity.penalties.explanation import recognise_polynomial, recognise_trigonometric
from posterity.priors import GroupLasso, Prior


def density_of_verdict(penalty: Penalty, verdict: Verdict, *, points: bool) -> str | None:
    """Return the formula of p(w) for the verdict's prior; None if there is no prior, or only a table of it."""
    if verdict.prior is None:
        return None
    if verdict.prior.formula is not None:
        return verdict.prior.formula
    if points:
        if not 0.0 < verdict.kappa < math.inf:
            return f"exp({verdict.K:.6g} - r(w)) with r = {penalty}"
        return f"exp(-r(w)) / {verdict.kappa:.6g} with r = {penalty}"
    if verdict.route in ("spline", "fourier"):
        return None
    recognise = recognise_polynomial if verdict.route == "polynomial" else recognise_trigonometric
    expansion = recognise(_GRID, verdict.log_alpha(_GRID))
    return None if expansion is None else f"exp({_sum(expansion)})"


def _sum(expansion: Expansion) -> str:
    """Format a polynomial with cosines and sines, highest power first."""
    terms = [
        (value, "" if power == 0 else "w" if power == 1 else f"w^{power}")
        for power, value in reversed(list(enumerate(expansion.coefficients)))
    ]
    for frequency, cosine, sine in zip(expansion.frequencies, expansion.cosines, expansion.sines, strict=True):
        inside = "w" if f"{frequency:.6g}" == "1" else f"{frequency:.6g} w"
        terms[-1:-1] = [(cosine, f"cos({inside})"), (sine, f"sin({inside})")]
    largest = max(abs(value) for value, _ in terms)
    text = ""
    for value, what in terms:
        if abs(value) < 1e-10 * largest:  # rounding
            continue
        size = f"{abs(value):.6g}"
        term = what if what and size == "1" else f"{size} {what}".rstrip()
        text += f" {'-' if value < 0.0 else '+'} {term}" if text else f"{'-' if value < 0.0 else ''}{term}"
    return text


_MEANS = (0.0, 0.5, 1.0, 2.0)
_REACH = 4.0
_HERE = {"to_prior: reach": "--reach", "Give reach=": "Give --reach ", "by points, Dirac()": "it by --family dirac"}
_HERE |= {"a family with a width, such as Gaussian(0.5)": "posteriors with a width, as --sigma 0.5"}
_GRID = torch.linspace(-4.0, 4.0, 161, dtype=torch.float64, device="cpu")


def read(
    name: str | None,
    factor: float | None,
    prior: str | None,
    family: str | None,
    sigma: str | None,
    shape: str | None,
    reach: float | None = None,
) -> "Reading":
    """Convert a penalty (name or formula) to a prior, or a prior to a penalty, as a family reads it."""
    sizes = parse_shape(shape)
    if reach is not None:
        sized("--reach", reach)
    if prior is not None:
        if factor is not None:
            raise ValueError(f"--factor is for a PENALTY: a prior has its scale. Got {factor:g} with --prior.")
        if reach is not None:
            raise ValueError("--reach is for a PENALTY that is inverted by numbers: a prior is known. Leave it out.")
        target = parse_prior(prior)
        if isinstance(target, GroupLasso):
            _check_groups(sizes, shape)
        reader = parse_family(family, sigma, "gaussian")
        penalty = from_prior(target, reader)
        by_points = from_prior(target, Dirac())
        kind = by_points.terms[0] if isinstance(by_points, Sum) else by_points
        return Reading(kind, penalty, reader, sizes, True, to_prior(penalty, reader, shape=sizes))
    assert name is not None
    asked = parse_penalty(name, 1.0 if factor is None else factor)
    reader = parse_family(family, sigma, asked.reader)
    if asked.kind.separates:
        _check_values(asked.kind, reader)
    else:
        _check_groups(sizes, shape)
    if reach is not None and isinstance(reader, Dirac):
        raise ValueError("--reach is for --family gaussian: points need no inversion. Leave it out.")
    at = _REACH if reach is None else reach
    try:
        verdict = to_prior(asked.penalty, reader, shape=sizes, reach=at)
    except ValueError as error:
        text = str(error)
        for of_library, here in _HERE.items():
            text = text.replace(of_library, here)
        raise ValueError(text) from error
    return Reading(asked.kind, asked.penalty, reader, sizes, False, verdict, at)


def _check_values(kind: Penalty, reader: Family) -> None:
    """Raise a ValueError if a formula has values that are not finite."""
    for scale in reader.scales:
        scales = torch.full_like(_GRID, scale)
        if isinstance(reader, Dirac) and isinstance(kind, Function) and bool((kind.r(_GRID, scales) == math.inf).all()):
            continue  # it needs a width; `to_prior` says so
        try:
            kind.each(_GRID, scales)
        except ValueError as error:
            text = re.sub(r"\bnu\b", "sigma", str(error)).replace("Function.r", f"r = {kind}")
            raise ValueError(text) from error


def _check_groups(sizes: tuple[int, ...], shape: str | None) -> None:
    if len(sizes) < 2:
        raise ValueError(f"--shape must have at least two numbers, (out, in, kernel), for groups. Got '{shape}'.")


@dataclass(frozen=True)
class Reading:
    """A penalty read by a family: `kind` is the penalty without its factor, `shape` the shape of the weight tensor.

    `reach`: a numerical inversion reads the penalty at means between -reach and reach.
    """

    kind: Penalty
    penalty: Penalty
    family: Family
    shape: tuple[int, ...]
    prior_given: bool
    verdict: Verdict
    reach: float = _REACH

    @property
    def points(self) -> bool:
        """Whether the family is of points, without width."""
        return isinstance(self.family, Dirac)

    @property
    def group(self) -> tuple[int, int]:
        """The shape of one group of weights; (1, 1) without groups."""
        if not isinstance(self.kind, GroupPenalty):
            return (1, 1)
        out, kernel = self.shape[0], math.prod(self.shape[2:])
        sizes = {"rows": (1, self.shape[1] * kernel), "columns": (out, 1), "channels": (out * kernel, 1)}
        return sizes[self.kind.over]

    @cached_property
    def nearest(self) -> Divergence | None:
        """The KL that equals the penalty up to K, or is nearest to it; None for points, and if there is none."""
        if self.points or self.prior_given:
            return None
        if isinstance(self.verdict.nearest, Divergence):
            return self.verdict.nearest
        try:
            return Divergence(self.verdict.prior or self.penalty.prior(), self.family)
        except ValueError:
            return None

    @cached_property
    def alone(self) -> dict[float, Verdict]:
        """The verdicts with a prior at each fixed sigma, if there is none for a trained sigma."""
        if self.verdict.satisfies_star or self.family.is_fixed:
            return {}
        verdicts = {
            scale: to_prior(self.penalty, Gaussian(scale), shape=self.shape, reach=self.reach)
            for scale in self.family.scales
        }
        return {scale: verdict for scale, verdict in verdicts.items() if verdict.satisfies_star}

    @property
    def variable(self) -> str:
        """The argument of the penalty."""
        return "mu" if self.penalty.separates else "||mu_g||"

    def headline(self) -> str:
        """Return the verdict in a line."""
        if self.prior_given:
            assert self.verdict.prior is not None
            return f"prior {self.verdict.prior.description}, as a penalty on {self.family}"
        answer = "a prior" if self.verdict.satisfies_star else "no prior" if self.verdict.decided else "not known"
        if self.verdict.satisfies_star and self.verdict.fitted:
            answer += f", to within {self.verdict.residual:.1g}"
        return f"r = {self.penalty}, read by {self.family}: {answer}"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the details as (label, text)."""
        verdict = self.verdict
        if not self.penalty.separates:
            yield "groups", f"of {math.prod(self.group)} weights, in a tensor of shape {self.shape}"
        if verdict.prior is not None:
            yield "prior", verdict.prior.description
            yield "density", f"p(w) = {self.density or 'known by its values only'}"
            yield "variance", self._variance_in_words(verdict.prior)
        if self.prior_given:
            yield "by points", str(from_prior(verdict.prior, Dirac()))  # type: ignore[arg-type]
        if self.prior_given and not self.points:
            yield "KL", f"r(mu, sigma) = {verdict.prior.kl_formula}"  # type: ignore[union-attr]
        if not self.prior_given:
            yield "why" if verdict.satisfies_star else "why not", verdict.explanation
            if isinstance(verdict.nearest, Divergence):
                yield "nearest", f"{verdict.nearest}: {verdict.nearest.target.kl_formula}"
            elif verdict.nearest is not None:
                yield "nearest", str(verdict.nearest)
            for scale, at_scale in self.alone.items():
                density = density_of_verdict(self.penalty, at_scale, points=False) or "known by its values only"
                yield f"sigma {scale:g}", f"p(w) = {density}"
            yield "numbers", self._numbers()

    @cached_property
    def density(self) -> str | None:
        """The formula of the prior's density, if known."""
        return density_of_verdict(self.penalty, self.verdict, points=self.points)

    def _numbers(self) -> str:
        verdict = self.verdict
        text = "yes" if verdict.satisfies_star else "no" if verdict.decided else "not known"
        if verdict.satisfies_star and verdict.fitted:
            text += f", to within {verdict.residual:.1g}"
        text = f"r = KL + K for one prior: {text}"
        if math.isfinite(verdict.K):
            kappa = f"{verdict.kappa:.6g}" if 0.0 < verdict.kappa < math.inf else f"exp({-verdict.K:.6g})"
            text += f"; kappa {kappa}, K {verdict.K:.6g}"
        elif math.isinf(verdict.kappa):
            text += "; kappa infinite"
        if math.isfinite(verdict.residual):
            text += f", residual {verdict.residual:.2g}, noise amplification {verdict.noise_amplification:.2g}"
        return f"{text}; route: {verdict.route}"

    def variance(self, prior: Prior) -> float:
        """The variance of one weight of a tensor of this shape."""
        return variance_of_one(prior, self.shape)

    def _variance_in_words(self, prior: Prior) -> str:
        value = self.variance(prior)
        return f"{value:.6g} of one weight" if math.isfinite(value) else "none that is finite"

    def values(self) -> list[tuple[float, list[float]]]:
        """Return the penalty at some means, for each sigma."""
        from posterity.report.penalties import penalty_along

        means = torch.tensor(_MEANS, dtype=torch.float64, device="cpu")
        columns = [penalty_along(self.penalty, means, scale, self.group).tolist() for scale in self.family.scales]
        return [(mean, list(row)) for mean, row in zip(_MEANS, zip(*columns, strict=True), strict=True)]

    def draw(self, path: Path) -> None:
        """Draw the penalty, the KL and the density."""
        from posterity.report.penalties import penalty_figure

        of = "the prior"
        priors: dict[str, Callable[[Tensor], Tensor]] = {}
        if self.verdict.prior is not None:
            priors = {of: partial(self._log_density, self.verdict.prior)}
        elif self.alone:
            of = "the priors of fixed scales"
            priors = {f"$\\sigma$ = {scale:g}": verdict.log_alpha for scale, verdict in self.alone.items()}
        elif self.nearest is not None:
            of = "exp($-r$) / Z"
            priors = {of: partial(self._log_density, self.nearest.target)}
        penalty_figure(
            self.penalty,
            self.family,
            priors,
            path,
            nearest=self.nearest,
            near_to="the prior" if self.verdict.satisfies_star else "exp($-r$) / Z",
            of=of,
            group=self.group,
            title=self.headline(),
        )

    def _log_density(self, prior: Prior, lengths: Tensor) -> Tensor:
        if not isinstance(prior, GroupLasso):
            return prior.log_prob(lengths.unsqueeze(-1))
        size = math.prod(self.group)
        theta = (lengths / math.sqrt(size)).unsqueeze(-1).expand(-1, size)
        return prior.bound(Layout.of({"weight": self.group})).log_prob(theta)

    def document(self) -> dict[str, Any]:
        """Return the results as JSON, with None for numbers that are not finite."""
        verdict, prior = self.verdict, self.verdict.prior
        nearest = verdict.nearest
        return {
            "penalty": str(self.penalty),
            "family": str(self.family),
            "sigmas": [] if self.points else list(self.family.scales),
            "shape": list(self.shape),
            "satisfies_star": verdict.satisfies_star,
            "decided": verdict.decided,
            "kappa": finite(verdict.kappa),
            "K": finite(verdict.K),
            "residual": finite(verdict.residual),
            "noise_amplification": finite(verdict.noise_amplification),
            "route": verdict.route,
            "explanation": verdict.explanation,
            "prior": None
            if prior is None
            else {"name": prior.description, "density": self.density, "variance": finite(self.variance(prior))},
            "nearest": None if nearest is None else str(nearest),
            "kl": prior.kl_formula if prior is not None and not self.points else None,
            "priors_at_fixed_sigma": {
                f"{scale:g}": density_of_verdict(self.penalty, verdict, points=False)
                for scale, verdict in self.alone.items()
            },
            "values": [{"mu": mean, "r": finite(row)} for mean, row in self.values()] if self.prior_given else None,
        }
