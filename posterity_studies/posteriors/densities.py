"""The models of posteriordb as batched log densities, and as a `Joint` where that is exact.

Priors are on the constrained scale; constants are left out. Tensors have a leading axis for the chains.

A `Joint` states regressions whose priors are normal, or flat as the limit of wide ones: a `Gaussian` learns its noise
under a normal prior on log sigma, which with mean s^2 and standard deviation s is log sigma +
O((log sigma)^2 / s^2) and a constant, flat in sigma for large s. Half-normal, half-Cauchy and half-t priors on sigma
are none of its limits, so the other regressions are sampled as densities only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from posterity.datasets.posteriordb import posteriordb_data
from posterity.datasets.uci import uci_classification
from posterity.kernels.adaptation import DenseMass, DiagonalMass
from posterity.likelihoods.bernoulli import Bernoulli
from posterity.likelihoods.gaussian import Gaussian
from posterity.methods.nuts import NUTS
from posterity.model.density import Density, Interval, Ordered, Positive
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.priors.normal import Normal

Values = dict[str, Tensor]
SPREAD = 2.0  # of starts, in standard errors: R-hat needs starts wider than the posterior
DEPTH = 7  # of trees: enough with a learnt mass matrix; before, deeper trees would cost far too much


@dataclass(frozen=True, eq=False)
class Model:
    """A problem with its rows (None for a density), and the parameters as the reference names them.

    `reported` makes these, (C, D) or (C, D, K) each, of the values that `Samples.values` gives. Strongly `correlated`
    ones are sampled with a dense mass matrix; `target_accept` is NUTS's option. `start` has centre and scale (P,) of
    normal numbers at which chains start, None for the problem's own.
    """

    name: str
    problem: Density | Joint
    rows: tuple[Tensor, Tensor] | None = None
    reported: Callable[[Values], Values] = dict
    correlated: bool = False
    target_accept: float = 0.8
    start: tuple[Tensor, Tensor] | None = None

    def sampler(self, draws: int, warmup: int, chains: int) -> NUTS:
        """Return NUTS with settings for the model."""
        mass = DenseMass() if self.correlated else DiagonalMass()
        return NUTS(draws, warmup, chains, target_accept=self.target_accept, max_depth=DEPTH, mass=mass)

    def starts(self, chains: int, key: Key) -> Tensor | None:
        """Return the starts of that many chains, (C, P), or None."""
        if self.start is None:
            return None
        centre, scale = self.start
        return centre + SPREAD * scale * key.normal((chains, len(centre)), centre.dtype, centre.device)


def flat(values: Values) -> dict[str, Tensor]:
    """Return each entry of each parameter, (C, D), by names as "beta[1]" and "sigma".

    >>> import torch
    >>> list(flat({"beta": torch.zeros(4, 9, 2), "sigma": torch.ones(4, 9)}))
    ['beta[1]', 'beta[2]', 'sigma']
    """
    results: dict[str, Tensor] = {}
    for name, value in values.items():
        if value.dim() == 2:
            results[name] = value
        else:
            results.update({f"{name}[{index + 1}]": part for index, part in enumerate(value.unbind(-1))})
    return results


def density(name: str) -> Model:
    """Return the posterior of this name in posteriordb, as a `Density` over the parameters of its reference.

    Eight schools is written by standardised effects, theta = mu + tau effect.
    """
    data = posteriordb_data(name)
    return _MODELS[name](name, data)


def regression_inputs(name: str, data: Values) -> tuple[Tensor, Tensor]:
    """Return inputs (N, K) of a regression, with a column of ones for an intercept, and targets (N,)."""
    if name.endswith("-blr"):
        return data["X"], data["y"]
    if name.startswith("kidiq"):
        school, iq = data["mom_hs"], data["mom_iq"]
        several = (school, iq, school * iq) if name.endswith("interaction") else (iq,)
        return _with_ones(*several), data["kid_score"]
    ages = [(data["age_discrete"] == age).double() for age in (2.0, 3.0, 4.0)]
    others = (data["educ1"], data["gender"], data["income"])
    return _with_ones(data["real_ideo"], data["race_adj"], *ages, *others), data["partyid7"]


def _with_ones(*columns: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(columns[0]), *columns], -1)


def _normal(residual: Tensor, scale: Tensor) -> Tensor:
    """log N(residual; 0, scale^2) summed over the last axis: (C, N) and (C,) -> (C,)."""
    return -0.5 * (residual / scale.unsqueeze(-1)).square().sum(-1) - residual.shape[-1] * scale.log()


def _cauchy(value: Tensor, scale: float) -> Tensor:
    return -(value / scale).square().log1p()


def _student(value: Tensor, scale: float) -> Tensor:
    """Student's t with 3 degrees of freedom."""
    return -2.0 * ((value / scale).square() / 3.0).log1p()


def _regression(name: str, data: Values) -> Model:
    """y ~ N(X beta, sigma^2), under the prior of each data set."""
    inputs, targets = regression_inputs(name, data)

    def log_density(beta: Tensor, sigma: Tensor) -> Tensor:
        value = _normal(targets - beta @ inputs.mT, sigma)
        if name.endswith("-blr"):
            return value - (beta.square().sum(-1) + sigma.square()) / 200.0
        return value + _cauchy(sigma, 2.5) if name.startswith("kidiq") else value

    shapes = {"beta": (inputs.shape[1],), "sigma": ()}
    problem = Density(log_density, shapes, {"sigma": Positive()}, batched=True, dtype=torch.float64)
    return Model(name, problem, correlated=True)


def _diamonds(name: str, data: Values) -> Model:
    inputs = data["X"][:, 1:] - data["X"][:, 1:].mean(0)
    targets = data["Y"]

    def log_density(b: Tensor, Intercept: Tensor, sigma: Tensor) -> Tensor:
        value = _normal(targets - Intercept.unsqueeze(-1) - b @ inputs.mT, sigma)
        return value - 0.5 * b.square().sum(-1) + _student(Intercept - 8.0, 10.0) + _student(sigma, 10.0)

    shapes = {"b": (inputs.shape[1],), "Intercept": (), "sigma": ()}
    problem = Density(log_density, shapes, {"sigma": Positive()}, batched=True, dtype=torch.float64)
    # Least squares and its standard errors: from random numbers chains take a thousand trees to get there.
    information = inputs.mT @ inputs
    mode = torch.linalg.solve(information, inputs.mT @ targets)
    scale = (targets - targets.mean() - inputs @ mode).std()
    centre = problem.unconstrained({"b": mode, "Intercept": targets.mean(), "sigma": scale})
    errors = torch.full_like(centre, len(targets) ** -0.5)  # of the log of sigma, at most
    errors[:-1] = scale * torch.cat([information.inverse().diagonal().sqrt(), errors[:1]])
    return Model(name, problem, correlated=True, start=(centre, errors))


def _autoregression(name: str, data: Values) -> Model:
    order, series = int(data["K"]), data["y"]
    inputs = torch.stack([series[order - lag : -lag] for lag in range(1, order + 1)], -1)  # (T - K, K)
    targets = series[order:]

    def log_density(alpha: Tensor, beta: Tensor, sigma: Tensor) -> Tensor:
        value = _normal(targets - alpha.unsqueeze(-1) - beta @ inputs.mT, sigma)
        return value - (alpha.square() + beta.square().sum(-1)) / 200.0 + _cauchy(sigma, 2.5)

    shapes = {"alpha": (), "beta": (order,), "sigma": ()}
    problem = Density(log_density, shapes, {"sigma": Positive()}, batched=True, dtype=torch.float64)
    return Model(name, problem, correlated=True)


def _eight_schools(name: str, data: Values) -> Model:
    targets, errors = data["y"], data["sigma"]

    def log_density(effect: Tensor, mu: Tensor, tau: Tensor) -> Tensor:
        theta = mu.unsqueeze(-1) + tau.unsqueeze(-1) * effect
        value = -0.5 * ((targets - theta) / errors).square().sum(-1) - 0.5 * effect.square().sum(-1)
        return value - 0.5 * (mu / 5.0).square() + _cauchy(tau, 5.0)

    def reported(values: Values) -> Values:
        effect, mu, tau = (values[key] for key in ("effect", "mu", "tau"))
        return {"theta": mu.unsqueeze(-1) + tau.unsqueeze(-1) * effect, "mu": mu, "tau": tau}

    shapes = {"effect": (len(targets),), "mu": (), "tau": ()}
    problem = Density(log_density, shapes, {"tau": Positive()}, batched=True, dtype=torch.float64)
    return Model(name, problem, reported=reported, target_accept=0.95)


def _mixture(name: str, data: Values) -> Model:
    targets = data["y"]

    def log_density(mu: Tensor, sigma: Tensor, theta: Tensor) -> Tensor:
        shares = torch.stack([theta.log(), (-theta).log1p()], -1)  # (C, 2)
        level = shares - sigma.log()
        first, second = (
            level[:, k : k + 1] - 0.5 * ((targets - mu[:, k : k + 1]) / sigma[:, k : k + 1]).square() for k in (0, 1)
        )  # (C, N)
        prior = -(mu.square() + sigma.square()).sum(-1) / 8.0 + 4.0 * shares.sum(-1)
        return torch.logaddexp(first, second).sum(-1) + prior

    shapes = {"mu": (2,), "sigma": (2,), "theta": ()}
    constraints = {"mu": Ordered(), "sigma": Positive(), "theta": Interval()}
    problem = Density(log_density, shapes, constraints, batched=True, dtype=torch.float64)
    # Starts at the halves of the data: from elsewhere some chains spend long where a component has no data.
    halves = targets.sort().values.reshape(2, -1)
    values = {"mu": halves.mean(1), "sigma": halves.std(1), "theta": targets.new_tensor(0.5)}
    centre = problem.unconstrained(values)
    return Model(name, problem, correlated=True, start=(centre, torch.full_like(centre, 0.1)))


def _gaussian_process(name: str, data: Values) -> Model:
    targets = data["y"]
    distances = (data["x"].unsqueeze(-1) - data["x"]).square()  # (N, N)
    unit = torch.eye(len(targets), dtype=torch.float64)

    def log_density(rho: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        rho_, alpha_, sigma_ = (value[:, None, None] for value in (rho, alpha, sigma))
        covariance = alpha_.square() * (-0.5 * distances / rho_.square()).exp() + sigma_ * unit  # (C, N, N)
        factor, failed = torch.linalg.cholesky_ex(covariance)  # an error would end all chains
        white = torch.linalg.solve_triangular(factor, targets.expand(len(rho), -1).unsqueeze(-1), upper=False)
        value = -0.5 * white.square().sum((-2, -1)) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        prior = 24.0 * rho.log() - 4.0 * rho - alpha.square() / 8.0 - 0.5 * sigma.square()
        return torch.where(failed == 0, value + prior, -torch.inf)

    shapes: dict[str, tuple[int, ...]] = {"rho": (), "alpha": (), "sigma": ()}
    constraints = dict.fromkeys(shapes, Positive())
    return Model(name, Density(log_density, shapes, constraints, batched=True, dtype=torch.float64))


def _logistic(name: str, data: Values) -> Model:
    inputs, labels = data["income"].unsqueeze(-1), data["vote"]

    def log_density(alpha: Tensor, beta: Tensor) -> Tensor:
        logits = alpha.unsqueeze(-1) + beta @ inputs.mT  # (C, N)
        return (labels * logits - softplus(logits)).sum(-1)

    problem = Density(log_density, {"alpha": (), "beta": (1,)}, batched=True, dtype=torch.float64)
    return Model(name, problem, correlated=True)


_MODELS = {
    "sblrc-blr": _regression,
    "sblri-blr": _regression,
    "kidiq-kidscore_momiq": _regression,
    "kidiq-kidscore_interaction": _regression,
    "nes2000-nes": _regression,
    "diamonds-diamonds": _diamonds,
    "arK-arK": _autoregression,
    "eight_schools-eight_schools_noncentered": _eight_schools,
    "low_dim_gauss_mix-low_dim_gauss_mix": _mixture,
    "gp_pois_regr-gp_regr": _gaussian_process,
    "nes_logit_data-nes_logit_model": _logistic,
}


GERMAN_CREDIT = "german-credit"
WIDE = 1e4  # a prior scale so wide that the log density of weights of order one varies by 1e-8


def joint(name: str) -> Model:
    """Return the posterior of this name as a linear network under a `Joint`."""
    return JOINTS[name](name)


def _linear(columns: int, bias: bool) -> torch.nn.Linear:
    return torch.nn.Linear(columns, 1, bias=bias, dtype=torch.float64, device="cpu")


def _german_credit(name: str) -> Model:
    data = uci_classification("german-credit")
    inputs = torch.cat([data.train.inputs, data.test.inputs])
    inputs = (inputs - inputs.mean(0)) / inputs.std(0, correction=0)
    rows = inputs, torch.cat([data.train.targets, data.test.targets])
    problem = Joint(_linear(inputs.shape[1], bias=True), Bernoulli(), Normal(1.0), len(inputs))

    def reported(values: Values) -> Values:
        return {"weights": torch.cat([values["weight"].squeeze(-2), values["bias"]], -1)}

    return Model(name, problem, rows, reported, correlated=True)


def _logistic_joint(name: str) -> Model:
    data = posteriordb_data(name)
    inputs = data["income"].unsqueeze(-1)
    problem = Joint(_linear(1, bias=True), Bernoulli(), Normal(WIDE), len(inputs))

    def reported(values: Values) -> Values:
        return {"alpha": values["bias"].squeeze(-1), "beta": values["weight"].squeeze(-2)}

    return Model(name, problem, (inputs, data["vote"].unsqueeze(-1)), reported, correlated=True)


def _flat_regression(name: str) -> Model:
    inputs, targets = regression_inputs(name, posteriordb_data(name))
    likelihood = Gaussian(float(targets.std()), learn=True, log_scale_prior=(WIDE**2, WIDE))
    problem = Joint(_linear(inputs.shape[1], bias=False), likelihood, Normal(WIDE), len(inputs))

    def reported(values: Values) -> Values:
        return {"beta": values["weight"].squeeze(-2), "sigma": values["likelihood.log_scale"].squeeze(-1).exp()}

    return Model(name, problem, (inputs, targets.unsqueeze(-1)), reported, correlated=True)


JOINTS = {
    GERMAN_CREDIT: _german_credit,
    "nes_logit_data-nes_logit_model": _logistic_joint,
    "nes2000-nes": _flat_regression,
}
"""The posteriors that `joint` can state."""
