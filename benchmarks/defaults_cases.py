"""Problems of `benchmarks.defaults`, with their truths in float64 where there are any.

Generalised linear models have closed forms or quadratures, independent of the library. Networks of one hidden layer
have a batched forward pass of their own; their references are made from a method's own result (`defaults_measures`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from posterity.datasets import two_moons, uci_regression
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from posterity.model import Joint
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.priors import Normal, Prior

LINEAR = 20  # random conjugate regressions
HIDDEN = 50  # units of the networks on two moons and tables, as at the command line
UCI = ("bostonHousing", "energy")
TABLES = ("diabetes", *UCI, "breast-cancer", "wine")
REACH, NODES = 12.0, 401  # standard deviations and nodes of a quadrature, by axis
_LOG_TWO_PI = math.log(2.0 * math.pi)
_HERMITE = tuple(torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(64))

Rows = tuple[Tensor, Tensor]


class Moments(NamedTuple):
    """What a quadrature knows of a posterior: log evidence, means (P,) and standard deviations (P,)."""

    log_evidence: float
    mean: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class Linear:
    """A generalised linear model: design (N, P), targets (N,), prior scales (P,), the noise of a Gaussian family."""

    family: str
    design: Tensor
    targets: Tensor
    prior: Tensor
    noise: float = 1.0

    def log_prob(self, outputs: Tensor) -> Tensor:
        """log p(y_n | f_n), entry by entry, for outputs (..., N)."""
        y = self.targets
        if self.family == "gaussian":
            return -0.5 * ((y - outputs) / self.noise).square() - math.log(self.noise) - 0.5 * _LOG_TWO_PI
        if self.family == "logistic":
            return y * outputs - nn.functional.softplus(outputs)
        return y * outputs - outputs.exp() - torch.lgamma(y + 1.0)

    def log_joint(self, theta: Tensor) -> Tensor:
        """log p(D, theta) for theta (..., P)."""
        prior = -0.5 * (theta / self.prior).square() - self.prior.log() - 0.5 * _LOG_TWO_PI
        return self.log_prob(theta @ self.design.T).sum(-1) + prior.sum(-1)

    def precision(self, theta: Tensor) -> Tensor:
        """Minus the Hessian of the log joint density, (P, P)."""
        outputs = self.design @ theta
        if self.family == "gaussian":
            weights = torch.full_like(outputs, self.noise**-2)
        elif self.family == "logistic":
            weights = outputs.sigmoid() * (-outputs).sigmoid()
        else:
            weights = outputs.exp()
        return self.design.T @ (weights[:, None] * self.design) + self.prior.pow(-2).diag()

    @cached_property
    def mode(self) -> Tensor:
        """The mode (P,), by Newton steps that are halved until they climb."""
        theta = torch.zeros_like(self.prior)
        for _ in range(200):
            leaf = theta.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.log_joint(leaf), leaf)
            step = torch.linalg.solve(self.precision(theta), slope)
            value = self.log_joint(theta)
            while float(self.log_joint(theta + step) - value) < -1e-9 * abs(float(value)):
                step = 0.5 * step
            theta = theta + step
            if float((slope @ step).abs()) < 1e-22:
                break
        return theta

    @cached_property
    def covariance(self) -> Tensor:
        """Covariance (P, P) of the Gaussian at the mode; of the posterior itself where the family is Gaussian."""
        return torch.linalg.inv(self.precision(self.mode))

    @cached_property
    def moments(self) -> Moments:
        """Log evidence and moments: in closed form for the Gaussian family, else on a grid along the whitened axes."""
        root, size = torch.linalg.cholesky(self.covariance), len(self.mode)
        volume = float(root.diagonal().log().sum())
        if self.family == "gaussian":
            log_evidence = float(self.log_joint(self.mode)) + 0.5 * size * _LOG_TWO_PI + volume
            return Moments(log_evidence, self.mode, self.covariance.diagonal().sqrt())
        axis = torch.linspace(-REACH, REACH, NODES, dtype=torch.float64)
        grid = torch.cartesian_prod(*[axis] * size).reshape(-1, size)
        thetas = self.mode + grid @ root.T
        values = torch.cat([self.log_joint(part) for part in thetas.split(20_000)])
        weights = values.softmax(0)
        mean = weights @ thetas
        scale = (weights @ (thetas - mean).square()).sqrt()
        step = size * math.log(2.0 * REACH / (NODES - 1))
        return Moments(float(values.logsumexp(0)) + step + volume, mean, scale)

    def elbo(self, mean: Tensor, factor: Tensor) -> Tensor:
        """ELBO of N(mean, factor factor^T): each row's output is normal, so that one-dimensional rules are exact."""
        nodes, weights = _HERMITE
        center, spread = self.design @ mean, (self.design @ factor).square().sum(-1).sqrt()
        if self.family == "gaussian":
            fit = self.log_prob(center) - 0.5 * (spread / self.noise).square()
        else:
            values = self.log_prob(center + nodes[:, None] * spread)  # (nodes, N)
            fit = weights @ values / weights.sum()
        second = mean.square() + factor.square().sum(-1)
        cross = -0.5 * second / self.prior.square() - self.prior.log() - 0.5 * _LOG_TWO_PI
        entropy = factor.diagonal().abs().log().sum() + 0.5 * len(mean) * (1.0 + _LOG_TWO_PI)
        return fit.sum() + cross.sum() + entropy

    def best_elbo(self, full: bool) -> float:
        """The largest ELBO of a factorised or of any Gaussian."""
        if self.family == "gaussian":
            scale = self.precision(self.mode).diagonal().rsqrt()
            return self.moments.log_evidence if full else float(self.elbo(self.mode, scale.diag()))
        size, scale = len(self.mode), self.precision(self.mode).diagonal().rsqrt()
        rows, columns = torch.tril_indices(size, size, offset=-1)

        def unpacked(values: Tensor) -> tuple[Tensor, Tensor]:
            factor = values[size : 2 * size].exp().diag()
            if full:
                factor = factor.index_put((rows, columns), values[2 * size :])
            return self.mode + scale * values[:size], scale[:, None] * factor

        start = torch.zeros(2 * size + full * len(rows), dtype=torch.float64)
        return -float(minimised(lambda values: -self.elbo(*unpacked(values)), start)[1])

    def best_evidence(self) -> float:
        """The largest log evidence over one prior scale for all weights and, for Gaussian noise, its scale."""
        if self.family != "gaussian":
            raise ValueError(f"best_evidence is for Gaussian noise. Got {self.family}.")
        gram = self.design @ self.design.T
        identity = torch.eye(len(gram), dtype=torch.float64)
        zero = torch.zeros(len(gram), dtype=torch.float64)

        def negative(values: Tensor) -> Tensor:
            marginal = (2.0 * values[0]).exp() * gram + (2.0 * values[1]).exp() * identity
            normal = torch.distributions.MultivariateNormal(zero, marginal, validate_args=False)
            return -normal.log_prob(self.targets)

        start = torch.tensor([float(self.prior.log().mean()), math.log(self.noise)], dtype=torch.float64)
        return -float(minimised(negative, start)[1])


def minimised(function: Callable[[Tensor], Tensor], start: Tensor, iterations: int = 500) -> tuple[Tensor, Tensor]:
    """Return the argument and value that L-BFGS comes to from `start`, (P,) in float64."""
    values = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [values],
        max_iter=iterations,
        max_eval=2 * iterations,
        tolerance_grad=1e-8,
        tolerance_change=1e-13,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = function(values)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return values.detach(), function(values)


@dataclass(frozen=True, eq=False)
class Case:
    """A problem: rows to fit, held-out rows, how to make its joint, and a `Linear` where there is a truth."""

    name: str
    group: str
    train: Rows
    test: Rows
    sizes: tuple[int, ...]
    likelihood: Likelihood
    prior: Prior
    truth: Linear | None = None
    bias: bool = True
    seed: int = 0

    def module(self, dropout: float = 0.0) -> nn.Module:
        """The network with its first weights, which depend on the seed alone."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            if len(self.sizes) == 2:
                return nn.Linear(*self.sizes, bias=self.bias)
            return MLP(self.sizes, activation="tanh", dropout=dropout)

    def joint(self, dropout: float = 0.0) -> Joint:
        """The problem as a user states it."""
        return Joint(self.module(dropout), self.likelihood, self.prior, len(self.train[0]))

    @property
    def is_network(self) -> bool:
        """Whether there is a hidden layer."""
        return len(self.sizes) > 2

    @property
    def scales_given(self) -> bool:
        """Whether the scales of prior and noise are stated, not left to the method."""
        return self.group not in ("moons", "tables")

    def outputs(self, thetas: Tensor, inputs: Tensor) -> Tensor:
        """Outputs (..., N, D) of a linear layer or a network of one hidden layer at weights (..., P)."""
        values, low = inputs.to(thetas.dtype), 0
        for index, (before, after) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            weight = thetas[..., low : low + before * after].unflatten(-1, (after, before))
            low += before * after
            values = (values if index == 0 else values.tanh()) @ weight.mT
            if self.bias:
                values = values + thetas[..., None, low : low + after]
                low += after
        return values

    def baseline(self) -> Tensor:
        """NLL (N,) of the test rows under the mean and scale of the training targets, or their frequencies."""
        seen, targets = self.train[1], self.test[1]
        if isinstance(self.likelihood, Categorical):
            share = torch.bincount(seen, minlength=self.sizes[-1]).double() / len(seen)
            return -share.log()[targets]
        seen, targets = seen.double().flatten(), targets.double().flatten()
        kinds: dict[type, Callable[[], torch.distributions.Distribution]] = {
            Bernoulli: lambda: torch.distributions.Bernoulli(seen.mean()),
            Poisson: lambda: torch.distributions.Poisson(seen.mean()),
            Gaussian: lambda: torch.distributions.Normal(seen.mean(), seen.std()),
        }
        return -kinds[type(self.likelihood)]().log_prob(targets)


def linear(index: int, seed: int = 0) -> Case:
    """A random conjugate regression: 10 to 500 rows, 1 to 8 columns; scales and noise over two orders of magnitude."""
    key = Key(seed).fold("linear").fold(index)
    share = key.fold("settings").uniform((4,), torch.float64)
    rows, columns = round(10.0 * 50.0 ** float(share[0])), 1 + int(8 * share[1])
    prior, noise = (0.05 * 100.0 ** float(part) for part in share[2:])
    scales = 0.1 * 100.0 ** key.fold("scales").uniform((columns,), torch.float64)
    shift = key.fold("shift").normal((columns,), torch.float64)
    raw = key.fold("inputs").normal((rows + 200, columns + 1), torch.float64)
    x = (scales * (shift + raw[:, :-1] + 0.7 * raw[:, -1:])).float()  # columns are correlated
    design = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
    weights = prior * key.fold("weights").normal((columns + 1,), torch.float64)
    y = (design @ weights + noise * key.fold("noise").normal((len(x),), torch.float64)).float()
    truth = Linear("gaussian", design[:rows], y[:rows].double(), torch.full_like(weights, prior), noise)
    held_out = x[rows:], y[rows:, None]
    return Case(
        f"linear-{index:02d}",
        "linear",
        (x[:rows], y[:rows, None]),
        held_out,
        (columns, 1),
        Gaussian(scale=noise),
        Normal(scale=prior),
        truth,
        seed=seed + index,
    )


def glm(family: str, weights: int, seed: int = 0) -> Case:
    """A logistic or Poisson regression of 40 rows with one or two weights."""
    key, rows, prior = Key(seed).fold(family).fold(weights), 40, 1.5
    x = (1.5 * key.fold("inputs").normal((rows + 400, 1), torch.float64)).float()
    design = x.double() if weights == 1 else torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
    outputs = design @ torch.tensor([0.8, -0.5], dtype=torch.float64)[:weights]
    if family == "logistic":
        y = (key.fold("targets").uniform((len(x),), torch.float64) < outputs.sigmoid()).double()
    else:
        y = torch.poisson(outputs.exp(), generator=key.fold("targets").generator("cpu"))
    truth = Linear(family, design[:rows], y[:rows], torch.full((weights,), prior, dtype=torch.float64))
    targets = y.float()[:, None]
    return Case(
        f"{family}-{weights}",
        "glm",
        (x[:rows], targets[:rows]),
        (x[rows:], targets[rows:]),
        (1, 1),
        Bernoulli() if family == "logistic" else Poisson(),
        Normal(scale=prior),
        truth,
        bias=weights == 2,
        seed=seed,
    )


def mlp(sizes: tuple[int, int, int], seed: int = 0) -> Case:
    """A network of one hidden layer on a smooth function, with prior and noise given."""
    key, rows, noise = Key(seed).fold("mlp").fold(sizes[0]), 60 if sizes[0] == 1 else 200, 0.2
    x = 4.0 * key.fold("inputs").uniform((rows + 500, sizes[0]), torch.float64) - 2.0
    y = (2.0 * x[:, :1]).sin()
    if sizes[0] > 1:
        y = y + 0.5 * x[:, 1:2] * x[:, 2:3]
    y = y + noise * key.fold("noise").normal((len(x), 1), torch.float64)
    x, y = x.float(), y.float()
    name = "mlp-" + "-".join(map(str, sizes))
    parts = (x[:rows], y[:rows]), (x[rows:], y[rows:])
    return Case(name, "mlp", *parts, sizes, Gaussian(scale=noise), Normal(scale=1.0), seed=seed)


def split(x: Tensor, y: Tensor, seed: int) -> tuple[Rows, Rows]:
    """A fifth of the rows held out, by the seed."""
    order = Key(seed).fold("split").permutation(len(x), "cpu")
    held_out, kept = order[: len(x) // 5], order[len(x) // 5 :]
    return (x[kept], y[kept]), (x[held_out], y[held_out])


def scikit_learn(name: str) -> tuple[Tensor, Tensor]:
    """The rows of a table of scikit-learn."""
    from sklearn import datasets  # type: ignore[import-untyped, unused-ignore]

    loaders: dict[str, Callable[..., Any]] = {
        "diabetes": datasets.load_diabetes,
        "breast-cancer": datasets.load_breast_cancer,
        "wine": datasets.load_wine,
    }
    inputs, targets = loaders[name](return_X_y=True)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def standardised(name: str, group: str, train: Rows, test: Rows, seed: int) -> Case:
    """A network on inputs and real targets standardised by the training rows; integer targets are classes.

    The scales of prior and noise are left out, as a user leaves them out.
    """
    mean, scale = train[0].mean(0), train[0].std(0).clamp_min(1e-12)
    inputs = [((rows[0] - mean) / scale).float() for rows in (train, test)]
    columns, targets = inputs[0].shape[1], [train[1], test[1]]
    if targets[0].is_floating_point():
        center, width = targets[0].mean(), targets[0].std()
        targets = [((values - center) / width).float().reshape(-1, 1) for values in targets]
        outputs, likelihood = 1, cast(Likelihood, Gaussian())
    else:
        outputs, likelihood = int(targets[0].max()) + 1, Categorical()
    rows = (inputs[0], targets[0]), (inputs[1], targets[1])
    return Case(name, group, *rows, (columns, HIDDEN, outputs), likelihood, Normal(), seed=seed)


def moons(seed: int = 0) -> Case:
    """Two moons, 300 rows."""
    data = two_moons(300, seed=seed)
    train, test = ((part.inputs, part.targets) for part in (data.train, data.test))
    return standardised("two-moons", "moons", train, test, seed)


def table(name: str, seed: int = 0) -> Case:
    """A table of scikit-learn with a fifth held out, or a UCI one with its standard split."""
    if name in UCI:
        data = uci_regression(name, seed % 20)
        train, test = ((part.inputs, part.targets) for part in (data.train, data.test))
    else:
        train, test = split(*scikit_learn(name), seed)
    return standardised(name, "tables", train, test, seed)


def makers(seed: int = 0) -> dict[str, Callable[[], Case]]:
    """Return how to make each case, by name; nothing is computed or read before the call."""
    made: dict[str, Callable[[], Case]] = {}
    for index in range(LINEAR):
        made[f"linear-{index:02d}"] = lambda index=index: linear(index, seed)  # type: ignore[misc]
    for family in ("logistic", "poisson"):
        for weights in (1, 2):
            made[f"{family}-{weights}"] = lambda family=family, weights=weights: glm(family, weights, seed)  # type: ignore[misc]
    for sizes in ((1, 12, 1), (4, 20, 1)):
        made["mlp-" + "-".join(map(str, sizes))] = lambda sizes=sizes: mlp(sizes, seed)  # type: ignore[misc]
    made["two-moons"] = lambda: moons(seed)
    for name in TABLES:
        made[name] = lambda name=name: table(name, seed)  # type: ignore[misc]
    return made


def chosen(names: Sequence[str], seed: int = 0) -> Iterator[tuple[str, Callable[[], Case]]]:
    """The cases whose names begin with one of `names`, all where there are none."""
    wanted = tuple(names)
    for name, maker in makers(seed).items():
        if not wanted or name.startswith(wanted):
            yield name, maker


def with_hyper(truth: Linear, joint: Joint) -> Linear:
    """The same rows under the prior and noise of another joint."""
    precision = joint.bound_prior.precision(truth.mode.to(joint.dtype)).double()
    noise = float(torch.as_tensor(joint.likelihood.scale)) if isinstance(joint.likelihood, Gaussian) else truth.noise
    return replace(truth, prior=precision.rsqrt().expand_as(truth.prior).clone(), noise=noise)
