"""Is expectation propagation closer to the posterior than Laplace and full-rank variational inference?

    python -m benchmarks.expectation_propagation

Labels of 20 rows are drawn from logistic and probit regressions of two and three weights, weights from their prior
N(0, 1) and inputs from N(0, 1), ten problems of each kind. Mean, covariance and log evidence of each Gaussian are held
against quadrature over the weights; `FullRank` has its ELBO for an evidence, and fits the ten problems together. Errors
of means and covariances are in units of the exact covariance.
"""

import json
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import context, parser
from posterity.evidence import elbo
from posterity.inference import infer
from posterity.likelihoods import Bernoulli, Likelihood, Probit
from posterity.methods import MAP, ExpectationPropagation, FullRank, Laplace
from posterity.model import Joint, as_data
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity.priors import Normal

ROWS, PROBLEMS, WEIGHTS = 20, 10, (2, 3)
LINKS: dict[str, Likelihood] = {"logistic": Bernoulli(), "probit": Probit()}
GRID = {2: 241, 3: 81}  # points along each axis, over 9 standard deviations on either side
MEASURES = ("mean", "covariance", "log evidence")


class Moments(NamedTuple):
    """Mean (R,), covariance (R, R) and log evidence."""

    mean: Tensor
    covariance: Tensor
    log_evidence: float

    @classmethod
    def of(cls, q: Posterior, log_evidence: float) -> "Moments":
        """Return those of a Gaussian posterior."""
        gaussian = q.as_gaussian()
        assert gaussian is not None
        return cls(gaussian.mean, gaussian.precision.covariance(), log_evidence)

    def errors(self, exact: "Moments") -> list[float]:
        """Return the distances of mean and covariance in units of the exact covariance, and that of the evidence."""
        root = torch.linalg.cholesky(exact.covariance)
        mean = torch.linalg.solve_triangular(root, (self.mean - exact.mean)[:, None], upper=False)
        half = torch.linalg.solve_triangular(root, self.covariance - exact.covariance, upper=False)
        covariance = torch.linalg.solve_triangular(root, half.mT, upper=False)
        return [float(mean.norm()), float(covariance.norm()), abs(self.log_evidence - exact.log_evidence)]


def rows_of(link: str, weights: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs (N, R) and labels (N, 1)."""
    key = Key(seed).fold(link).fold(weights)
    x = key.fold("inputs").normal((ROWS, weights), torch.float64)
    outputs = x @ key.fold("weights").normal((weights, 1), torch.float64)
    return x, LINKS[link].sample(outputs, key.fold("labels"))


def problem(link: str, weights: int) -> Joint:
    """Return the regression without a bias."""
    return Joint(nn.Linear(weights, 1, bias=False).double(), LINKS[link], Normal(scale=1.0), num_data=ROWS)


def exact(joint: Joint, x: Tensor, y: Tensor, near: Moments) -> Moments:
    """Return the moments of the posterior by the trapezoid rule on a grid along the axes of a Gaussian near it."""
    size, root = len(near.mean), torch.linalg.cholesky(near.covariance)
    axis = torch.linspace(-9.0, 9.0, GRID[size], dtype=torch.float64)
    theta = near.mean + torch.cartesian_prod(*[axis] * size) @ root.mT
    log = joint.likelihood.log_prob((theta @ x.mT).unsqueeze(-1), y).sum(-1) + joint.bound_prior.log_prob(theta)
    mass = (log - log.max()).exp()
    mean = mass @ theta / mass.sum()
    covariance = ((theta - mean) * mass[:, None]).mT @ (theta - mean) / mass.sum()
    cell = size * math.log(float(axis[1] - axis[0])) + float(root.diagonal().log().sum())
    return Moments(mean, covariance, float(log.max() + mass.sum().log()) + cell)


def measured(link: str, weights: int, seeds: Sequence[int]) -> dict[str, list[list[float]]]:
    """Return the errors of each method on each problem, in the order of `MEASURES`."""
    joint, pairs = problem(link, weights), [rows_of(link, weights, seed) for seed in seeds]
    stacked = as_data(tuple(torch.stack(parts) for parts in zip(*pairs, strict=True)), per_member=True)
    modes, _ = infer(MAP(), joint, stacked, progress=False)
    together, _ = infer(FullRank(), joint, stacked, start=modes, progress=False)
    errors: dict[str, list[list[float]]] = {"ExpectationPropagation": [], "Laplace": [], "FullRank": []}
    for index, (x, y) in enumerate(pairs):
        at_mode, _ = infer(Laplace(tuning=None), joint, (x, y), start=modes.member(index), progress=False)
        propagated, _ = infer(ExpectationPropagation(), joint, (x, y), progress=False)
        bound = elbo(together.member(index), (x, y), draws=100_000)
        found = {
            "ExpectationPropagation": Moments.of(propagated, float(propagated.as_gaussian().log_evidence)),
            "Laplace": Moments.of(at_mode, float(at_mode.as_gaussian().log_evidence)),
            "FullRank": Moments.of(together.member(index), bound.elbo),
        }
        truth = exact(joint, x, y, found["ExpectationPropagation"])
        for name, moments in found.items():
            errors[name].append(moments.errors(truth))
    return errors


def main() -> None:
    """Measure, and write both results."""
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(options.threads)
    begin, cases = time.perf_counter(), {}
    lines = [
        "# expectation propagation",
        "",
        "Mean error over ten problems, and on how many of them that of `ExpectationPropagation` is the smaller one.",
        "",
        "| problem | measure | ExpectationPropagation | Laplace | FullRank | closer than Laplace | than FullRank |",
        "|---|---|---|---|---|---|---|",
    ]
    for link in LINKS:
        for weights in WEIGHTS:
            seeds = range(options.seed, options.seed + PROBLEMS)
            cases[f"{link}, {weights} weights"] = errors = measured(link, weights, seeds)
            own, *others = (torch.tensor(values) for values in errors.values())
            for column, measure in enumerate(MEASURES):
                means = [f"{float(values[:, column].mean()):.2g}" for values in (own, *others)]
                wins = [f"{int((own < other)[:, column].sum())} of {PROBLEMS}" for other in others]
                lines.append("| " + " | ".join([f"{link}, {weights} weights", measure, *means, *wins]) + " |")
    about = context(options)
    ran_on, versions = about["machine"], ", ".join(f"{name} {value}" for name, value in about["versions"].items())
    lines += [
        "",
        f"Made by `{about['command']}` on {about['date']} in {time.perf_counter() - begin:.0f} s: {ran_on['cpu']}, "
        f"{about['threads']} thread{'' if about['threads'] == 1 else 's'}, seed {about['seed']}; {versions}.",
    ]
    options.results.mkdir(parents=True, exist_ok=True)
    document = {"topic": "expectation_propagation", **about, "measures": MEASURES, "errors": cases}
    (options.results / "expectation_propagation.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.results / "expectation_propagation.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
