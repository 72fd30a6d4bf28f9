"""Simulation-based calibration of a method: ranks of true values among draws, and tests of their uniformity."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from posterity.errors import positive_whole
from posterity.inference import Method, infer
from posterity.likelihoods import Bernoulli, Gaussian
from posterity.likelihoods.scaled import Scaled
from posterity.model import Joint
from posterity.model.batch import Batch, Inputs, map_inputs, num_rows
from posterity.model.data import TensorData
from posterity.model.tempering import Tempering
from posterity.networks import MLP
from posterity.numerics.random import Key
from posterity.posteriors import Posterior
from posterity.posteriors.samples import Samples
from posterity.priors import Normal
from posterity_studies.calibration.settings import number_of_bins


@dataclass(frozen=True, eq=False)
class Problem:
    """A joint, the inputs (N, ...) of simulated data, and inputs (K, ...) at which function values are tested.

    Without `probes` every weight is a test quantity by itself. Weights of networks are not identified (hidden units
    can be exchanged), functions are: give probes there. Learnt noise, log likelihood and log prior always count.

    >>> from posterity.likelihoods import Gaussian
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1), Gaussian(scale=1.0), Normal(), num_data=2)
    >>> problem = Problem(joint, torch.tensor([[0.0], [1.0]]))
    >>> theta, data = problem.simulated(5, Key(0))
    >>> theta.shape, data.targets.shape
    (torch.Size([5, 2]), torch.Size([5, 2, 1]))
    """

    joint: Joint
    inputs: Inputs
    probes: Inputs | None = None

    def __post_init__(self) -> None:
        if num_rows(self.inputs) != self.joint.num_data:
            raise ValueError(
                f"Problem.inputs must have a row for each of the joint's {self.joint.num_data} data. "
                f"Got {num_rows(self.inputs)}."
            )
        if self.joint.tempering != Tempering.bayes():
            raise ValueError(
                f"Problem.joint must not be tempered: only Bayes' posterior is calibrated. Got {self.joint.tempering}."
            )
        if self.joint.num_members is not None:
            raise ValueError("Problem.joint must be one problem, without members. Use joint.member(0).")

    def simulated(self, replicates: int, key: Key) -> tuple[Tensor, Batch]:
        """Draw parameters (R, P) from the prior, and data sets (R, N, ...) from the likelihood."""
        joint = self.joint
        weights = joint.bound_prior.sample(
            (replicates, joint.num_weights), key.fold("weights"), joint.network.initial
        )  # (R, P)
        theta = torch.cat([weights, _learnt(joint, replicates, key.fold("noise"))], dim=-1)
        outputs = joint.outputs(theta, self.inputs)  # (R, N, *event)
        targets = joint.fitted(theta).likelihood.sample(outputs, key.fold("targets"))
        inputs = map_inputs(lambda tensor: tensor.expand(replicates, *tensor.shape), self.inputs)
        return theta, Batch(inputs, targets, per_member=True)

    def quantities(self, theta: Tensor, data: Batch) -> dict[str, Tensor]:
        """Return test quantities (R, S) at parameters theta (R, S, P), for data sets (R, N, ...).

        The log likelihood sees errors that no parameter by itself shows: Modrak et al. (2023), section 4.
        """
        joint, result = self.joint, {}
        if self.probes is None:
            result.update(_entries(joint, theta, 0, joint.num_weights))
        else:
            values = torch.stack([joint.outputs(draw, self.probes).flatten(1) for draw in theta.unbind(1)], 1)
            result.update(zip(self._names(values.shape[-1]), values.unbind(-1), strict=True))  # (R, S) each
        result.update(_entries(joint, theta, joint.num_weights, joint.size))
        result["log likelihood"] = torch.stack([joint.log_likelihood(draw, data) for draw in theta.unbind(1)], 1)
        result["log prior"] = joint.log_prior(theta)
        return result

    def _names(self, values: int) -> list[str]:
        """Return names of so many function values, with the input if it is one number."""
        if isinstance(self.probes, Tensor) and self.probes.numel() == values:
            return [f"f({number:g})" for number in self.probes.flatten().tolist()]
        return [f"f{index + 1}" for index in range(values)]


def _entries(joint: Joint, theta: Tensor, low: int, high: int) -> dict[str, Tensor]:
    """Return entries low .. high - 1 of theta (R, S, P), by name."""
    results = {}
    for part in joint.layout:
        if low <= part.offset < high:
            for index in range(part.size):
                name = part.name if part.size == 1 else f"{part.name}[{index}]"
                results[name.removeprefix("likelihood.")] = theta[..., part.offset + index]
    return results


def _learnt(joint: Joint, replicates: int, key: Key) -> Tensor:
    """Draw raw parameters (R, H) of the likelihood from their prior."""
    likelihood, like = joint.likelihood, joint.network.initial
    if not likelihood.num_free:
        return like.new_zeros(replicates, 0)
    if not isinstance(likelihood, Scaled) or likelihood.log_scale_prior is None:
        raise ValueError(
            "Problem: noise that is learnt needs a proper prior, from which it can be drawn. Give the likelihood "
            "log_scale_prior=(mean, standard deviation)."
        )
    mean, deviation = likelihood.log_scale_prior
    return mean + deviation * key.normal((replicates, likelihood.num_free), like.dtype, like.device)


ROWS = 10


def linear() -> Problem:
    """y = a + b x with noise whose log has a N(-0.5, 0.5^2) prior, on 10 rows of two inputs; weights N(0, 1)."""
    likelihood = Gaussian(scale=0.6, learn=True, log_scale_prior=(-0.5, 0.5))
    return Problem(Joint(nn.Linear(2, 1).double(), likelihood, Normal(1.0), ROWS), _inputs())


def logistic() -> Problem:
    """Labels with log odds a + b x, on 10 rows of two inputs; weights N(0, 1)."""
    return Problem(Joint(nn.Linear(2, 1).double(), Bernoulli(), Normal(1.0), ROWS), _inputs())


def network() -> Problem:
    """A network with 3 tanh units and noise of scale 0.7, on 10 rows of one input; weights N(0, 1), 4 probes."""
    joint = Joint(MLP((1, 3, 1), "tanh").double(), Gaussian(scale=0.7), Normal(1.0), ROWS)
    inputs = torch.linspace(-2.0, 2.0, ROWS, dtype=torch.float64).unsqueeze(1)
    return Problem(joint, inputs, torch.tensor([[-3.0], [-1.0], [0.0], [2.0]], dtype=torch.float64))


def _inputs() -> torch.Tensor:
    return Key(0).fold("inputs").normal((ROWS, 2), torch.float64)


MODELS: Mapping[str, Callable[[], Problem]] = MappingProxyType(
    {"linear": linear, "logistic": logistic, "network": network}
)


def ranks_of(truth: Tensor, draws: Tensor, key: Key) -> Tensor:
    """Count the draws (R, S) below the true values (R,), 0 to S; ties are broken at random.

    >>> ranks_of(torch.tensor([0.5, 9.0]), torch.tensor([[0.1, 0.4, 0.9], [1.0, 2.0, 3.0]]), Key(0))
    tensor([2, 3])
    """
    below = (draws < truth.unsqueeze(1)).sum(1)
    equal = (draws == truth.unsqueeze(1)).sum(1)
    coin = key.uniform(tuple(truth.shape), torch.float64, truth.device)
    return below + (coin * (equal + 1)).long()


def counts_of(ranks: Tensor, draws: int, bins: int) -> Tensor:
    """Count the ranks (R,) in each bin, (bins,)."""
    return torch.bincount(ranks.cpu() * bins // (draws + 1), minlength=bins)


def chi_square_p(counts: Tensor) -> float:
    """Return the p-value of counts (bins,) by chi-square, if all bins are equally probable.

    >>> round(chi_square_p(torch.tensor([60, 40])), 4)  # chi-square 4 with one degree of freedom
    0.0455
    """
    expected = counts.sum().double() / len(counts)
    statistic = (counts - expected).square().sum() / expected
    half = statistic.new_full((), 0.5 * (len(counts) - 1))
    return float(torch.special.gammaincc(half, 0.5 * statistic))


def autocorrelation(draws: Tensor) -> float:
    """Return the lag-1 autocorrelation of draws (R, S), pooled over the R chains; 1 if all are equal.

    What the mean of S draws takes away, 1 / S, is given back: it is 0 for independent draws.

    >>> wave = torch.tensor([[1.0, -1.0] * 50])
    >>> round(autocorrelation(wave), 2)
    -0.99
    """
    away = (draws - draws.mean(1, keepdim=True)).double()
    variance = float(away.square().mean())
    if variance == 0.0:
        return 1.0
    return min(1.0, float((away[:, 1:] * away[:, :-1]).mean()) / variance + 1.0 / draws.shape[1])


Stages = Method | Sequence[Method]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Ranks (R,) of the true values among `draws` draws by test quantity, and the correlation of neighbouring draws.

    `accept` is the mean probability of acceptance after the warm-up, where there is one.
    """

    ranks: dict[str, Tensor]
    autocorrelations: dict[str, float]
    draws: int
    accept: float | None = None

    @property
    def replicates(self) -> int:
        """Number R of replicates."""
        return len(next(iter(self.ranks.values())))

    @property
    def bins(self) -> int:
        """Number of bins of the ranks."""
        return number_of_bins(self.replicates, self.draws)

    @property
    def counts(self) -> dict[str, Tensor]:
        """Ranks in each bin, (bins,)."""
        return {name: counts_of(ranks, self.draws, self.bins) for name, ranks in self.ranks.items()}

    @property
    def p_values(self) -> dict[str, float]:
        """The p-value of uniform ranks by chi-square, for each test quantity."""
        return {name: chi_square_p(counts) for name, counts in self.counts.items()}

    @property
    def smallest(self) -> float:
        """The smallest of the p-values."""
        return min(self.p_values.values())

    def document(self) -> dict[str, Any]:
        """Return all numbers as JSON."""
        counts, p_values = self.counts, self.p_values
        return {
            "replicates": self.replicates,
            "draws": self.draws,
            "bins": self.bins,
            "smallest_p": self.smallest,
            "accept": self.accept,
            "quantities": [
                {
                    "quantity": name,
                    "p": p_values[name],
                    "autocorrelation": self.autocorrelations[name],
                    "counts": counts[name].tolist(),
                }
                for name in self.ranks
            ],
        }

    def __str__(self) -> str:
        width = max(len("quantity"), *map(len, self.ranks))
        lines = [f"{'quantity':{width}}  {'p':>8}  {'lag 1':>6}"]
        for name, p in self.p_values.items():
            lines.append(f"{name:{width}}  {p:8.2g}  {self.autocorrelations[name]:6.2f}")
        return "\n".join(lines)


def calibrate(method: Stages, problem: Problem, replicates: int = 1000, draws: int = 31, seed: int = 0) -> Calibration:
    """Test whether the posterior of `method` is calibrated: ranks of true values among its draws, over replicates.

    **Math**: theta ~ prior, y ~ p(y | theta), theta_1 ... theta_S ~ the method's posterior given y. If that is the
    posterior, and the draws are independent, the rank of g(theta) among g(theta_s) is uniform on 0 ... S for every
    test quantity g, of parameters and data.

    `method` is a Method or several, each beginning where the one before ended. A sampler runs one chain for each
    replicate, all at once, with its own `thin`: it must be so large that kept draws are nearly independent (see
    `Calibration.autocorrelations`), as neighbours that are alike make ranks pile up at both ends. Other methods take
    all replicates as members (or in turn, where they cannot), and weights are drawn from their posteriors; noise that
    they fit as a point is that point in every draw.

    **Limit**: a method that ignores the data passes for all g of parameters alone; the log likelihood catches it.

    **Cost**: R runs of the method.

    **References**: Talts et al. (2018), Validating Bayesian inference algorithms with simulation-based calibration;
    Modrak et al. (2023), Simulation-based calibration checking for Bayesian computation: the choice of test quantities.

    **Example**:

    >>> from posterity.likelihoods import Gaussian
    >>> from posterity.methods import HMC
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1), Gaussian(scale=1.0), Normal(), num_data=3)
    >>> problem = Problem(joint, torch.tensor([[-1.0], [0.0], [1.0]]))
    >>> found = calibrate(HMC(warmup=100, steps=5, thin=2), problem, replicates=100, draws=31)
    >>> list(found.p_values), found.smallest > 1e-4
    (['weight', 'bias', 'log likelihood', 'log prior'], True)
    """
    positive_whole("calibrate: replicates", replicates)
    positive_whole("calibrate: draws", draws)
    number_of_bins(replicates, draws)  # refuse early what could not be counted
    key = Key(seed).fold("calibration")
    truth, data = problem.simulated(replicates, key.fold("simulated"))
    stages = sized(method, replicates, draws)
    theta, accept = _drawn(stages, problem.joint, data, draws, key.fold("drawn"))
    with torch.no_grad():
        true = problem.quantities(truth.unsqueeze(1), data)
        result = problem.quantities(theta, data)
    ranks = {name: ranks_of(true[name][:, 0], result[name], key.fold(name)) for name in result}
    return Calibration(ranks, {name: autocorrelation(values) for name, values in result.items()}, draws, accept)


def sized(method: Stages, replicates: int, draws: int) -> tuple[Method, ...]:
    """Return the stages to run; a sampler at the end gets a chain for each replicate, of so many draws.

    >>> from posterity.methods import HMC
    >>> (found,) = sized(HMC(thin=5), replicates=100, draws=31)
    >>> found.chains, found.draws, found.thin
    (100, 31, 5)
    """
    stages = (method,) if isinstance(method, Method) else tuple(method)
    last: Any = stages[-1]
    if _is_sampler(last):
        last = replace(last, chains=replicates, draws=draws)
    return (*stages[:-1], last)


def _is_sampler(method: Method) -> bool:
    """Return whether the method runs Markov chains as rows of theta, with a number of draws."""
    return {"chains", "draws"} <= {field.name for field in fields(method)}  # type: ignore[arg-type]


def _drawn(stages: tuple[Method, ...], joint: Joint, data: Batch, draws: int, key: Key) -> tuple[Tensor, float | None]:
    """Return draws (R, S, P) from the posterior of each replicate, and the mean acceptance probability."""
    replicates = len(data.targets)
    if not _is_sampler(stages[-1]) and not all(stage.traits.takes_members for stage in stages):
        each = [
            _draws_of(_fitted(stages, joint, data.member(i), key), joint, draws, key.fold(i)) for i in range(replicates)
        ]
        return torch.stack(each), None
    q = _fitted(stages, joint, data, key)
    if isinstance(q, Samples):
        accept = q.statistics.get("accept")
        return q.theta.to(joint.device), None if accept is None else float(accept.mean())
    return torch.stack([_draws_of(q.member(i), joint, draws, key.fold(i)) for i in range(replicates)]), None


def _fitted(stages: tuple[Method, ...], joint: Joint, data: Batch, key: Key) -> Posterior:
    q: Posterior | None = None
    for index, stage in enumerate(stages):
        q, _ = infer(stage, joint, TensorData(data), start=q, seed=key.fold(index).seed, progress=False)
    assert q is not None
    return q


def _draws_of(q: Posterior, joint: Joint, draws: int, key: Key) -> Tensor:
    """Return draws (S, P) of one posterior; fitted noise is the same in each draw."""
    weights = q.sample(draws, key)
    assert isinstance(q.joint, Joint)
    raw = joint.likelihood.free_from(q.joint.likelihood, weights)
    return torch.cat([weights, raw.expand(draws, -1)], dim=-1)
