"""Is expectation propagation closer to the posterior than Laplace and full-rank variational inference?

    python -m benchmarks.expectation_propagation

Labels are drawn from logistic and probit regressions of two and three weights, weights from their prior and inputs from
N(0, 1), ten problems of each kind. Mean, covariance and log evidence of each Gaussian are held against quadrature over
the weights. VI is the Gaussian of the largest ELBO, found by quadrature and L-BFGS: `FullRank` estimates the same one
from draws. Errors of means and covariances are in units of the exact covariance. Where `ExpectationPropagation` is not
the closer one its sites are moved in turn as well: the same fixed point means an error of the method.
"""

import json
import math
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import context, parser
from posterity.inference import infer
from posterity.likelihoods import Bernoulli, Likelihood, Probit
from posterity.methods import MAP, ExpectationPropagation, Laplace
from posterity.model import Joint
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity.priors import Normal

SETTINGS = ((20, 1.0), (40, 1.0), (20, 2.0))  # rows, prior scale
PROBLEMS, WEIGHTS = 10, (2, 3)
LINKS: dict[str, Likelihood] = {"logistic": Bernoulli(), "probit": Probit()}
GRID = {2: 241, 3: 61}  # points along each axis, over 9 standard deviations on either side
NODES = torch.linspace(-8.0, 8.0, 161, dtype=torch.float64)[:, None]  # of expectations along a row
MEASURES = ("mean", "covariance", "log evidence")


class Moments(NamedTuple):
    """Mean (R,), covariance (R, R) and log evidence."""

    mean: Tensor
    covariance: Tensor
    log_evidence: float

    @classmethod
    def of(cls, q: Posterior) -> "Moments":
        """Return the moments of a Gaussian posterior, with its own estimate of the evidence."""
        gaussian = q.as_gaussian()
        assert gaussian is not None
        assert gaussian.log_evidence is not None
        return cls(gaussian.mean, gaussian.precision.covariance(), float(gaussian.log_evidence))

    def errors(self, exact: "Moments") -> list[float]:
        """Return the errors of mean and covariance in units of the exact covariance, and of the log evidence."""
        root = torch.linalg.cholesky(exact.covariance)
        mean = torch.linalg.solve_triangular(root, (self.mean - exact.mean)[:, None], upper=False)
        half = torch.linalg.solve_triangular(root, self.covariance - exact.covariance, upper=False)
        covariance = torch.linalg.solve_triangular(root, half.mT, upper=False)
        return [float(mean.norm()), float(covariance.norm()), abs(self.log_evidence - exact.log_evidence)]


class Case(NamedTuple):
    """A kind of problems."""

    link: str
    weights: int
    rows: int
    scale: float

    def __str__(self) -> str:
        return f"{self.link}, {self.weights} weights, {self.rows} rows, prior scale {self.scale:g}"

    @property
    def joint(self) -> Joint:
        """The regression without a bias."""
        module = nn.Linear(self.weights, 1, bias=False).double()
        return Joint(module, LINKS[self.link], Normal(scale=self.scale), num_data=self.rows)

    def data(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs (N, R) and labels (N, 1)."""
        key = Key(seed).fold(self.link).fold(self.weights)
        x = key.fold("inputs").normal((self.rows, self.weights), torch.float64)
        weights = self.scale * key.fold("weights").normal((self.weights, 1), torch.float64)
        return x, LINKS[self.link].sample(x @ weights, key.fold("labels"))


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


def best_by_elbo(case: Case, x: Tensor, y: Tensor, near: Moments) -> Moments:
    """Return the Gaussian of the largest ELBO, with the ELBO for an evidence."""
    size = case.weights
    share = torch.softmax(-0.5 * NODES.square(), 0)
    rows, columns = torch.tril_indices(size, size)
    root = torch.linalg.cholesky(near.covariance)
    values = torch.cat([near.mean, root[rows, columns]]).requires_grad_()
    optimizer = torch.optim.LBFGS([values], max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def elbo() -> tuple[Tensor, Tensor]:
        root = torch.zeros(size, size, dtype=torch.float64).index_put((rows, columns), values[size:])
        outputs = x @ values[:size] + (x @ root).norm(dim=1) * NODES
        fit = (share * LINKS[case.link].log_prob(outputs.unsqueeze(-1), y)).sum()
        squares = (root.square().sum() + values[:size].square().sum()) / case.scale**2
        return fit - 0.5 * (squares - size) + root.diagonal().div(case.scale).log().sum(), root

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -elbo()[0]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    bound, root = (value.detach() for value in elbo())
    return Moments(values[:size].detach(), root @ root.mT, float(bound))


class Errors(NamedTuple):
    """Errors (PROBLEMS, 3) of the methods in the order of `MEASURES`, and how far sites moved in turn end elsewhere."""

    own: Tensor
    laplace: Tensor
    variational: Tensor
    in_turn: float  # in standard deviations; 0 where none was tried


def measured(case: Case, first: int) -> Errors:
    """Return the errors on problems of these seeds."""
    joint, errors, in_turn = case.joint, list[list[list[float]]](), 0.0
    for seed in range(first, first + PROBLEMS):
        x, y = case.data(seed)
        propagated, _ = infer(ExpectationPropagation(), joint, (x, y), progress=False)
        mode, _ = infer(MAP(), joint, (x, y), progress=False)
        at_mode, _ = infer(Laplace(tuning=None), joint, (x, y), start=mode, progress=False)
        own, laplace = Moments.of(propagated), Moments.of(at_mode)
        truth = exact(joint, x, y, own)
        found = own.errors(truth), laplace.errors(truth), best_by_elbo(case, x, y, own).errors(truth)
        if any(mine >= its for other in found[1:] for mine, its in zip(found[0], other, strict=True)):
            again, _ = infer(ExpectationPropagation(order="sequential"), joint, (x, y), progress=False)
            in_turn = max(in_turn, *Moments.of(again).errors(own)[:2])
        errors.append([list(each) for each in found])
    own, laplace, variational = torch.tensor(errors).unbind(1)
    return Errors(own, laplace, variational, in_turn)


def main() -> None:
    """Measure, and write both results."""
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(options.threads)
    begin, cases = time.perf_counter(), dict[str, Errors]()
    lines = [
        "# expectation propagation",
        "",
        "Mean error over ten problems, and on how many of them `ExpectationPropagation` (EP) has the smaller error.",
        "",
        "| problem | measure | EP | Laplace | VI | closer than Laplace | than VI |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in [Case(link, w, rows, scale) for rows, scale in SETTINGS for link in LINKS for w in WEIGHTS]:
        cases[str(case)] = errors = measured(case, options.seed)
        own, *others = errors[:3]
        for column, measure in enumerate(MEASURES):
            means = [f"{float(values[:, column].mean()):.2g}" for values in errors[:3]]
            wins = [f"{int((own < other)[:, column].sum())} of {PROBLEMS}" for other in others]
            lines.append("| " + " | ".join([str(case), measure, *means, *wins]) + " |")
    about = context(options)
    ran_on, versions = about["machine"], ", ".join(f"{name} {value}" for name, value in about["versions"].items())
    apart = max(errors.in_turn for errors in cases.values())
    lines += [
        "",
        f"Where another method is closer, sites moved in turn come to the same Gaussian, to {apart:.1g} standard "
        "deviations: EP has settled, and what is left is its own error.",
        "",
        f"Made by `{about['command']}` on {about['date']} in {time.perf_counter() - begin:.0f} s: {ran_on['cpu']}, "
        f"{about['threads']} thread{'' if about['threads'] == 1 else 's'}, seed {about['seed']}; {versions}.",
    ]
    options.results.mkdir(parents=True, exist_ok=True)
    named = {
        name: {"EP": e.own.tolist(), "Laplace": e.laplace.tolist(), "VI": e.variational.tolist(), "in turn": e.in_turn}
        for name, e in cases.items()
    }
    document = {"topic": "expectation_propagation", **about, "measures": MEASURES, "errors": named}
    (options.results / "expectation_propagation.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.results / "expectation_propagation.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
