"""The wide-network problem: its bounds, their optimum, and the law of its collapse."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from posterity.errors import positive, positive_whole, shown
from posterity.likelihoods import Bernoulli, Categorical, Gaussian
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.joint import Joint
from posterity.networks import MeanFieldNetwork
from posterity.posteriors.gaussian import Gaussian as GaussianPosterior
from posterity.posteriors.posterior import Posterior
from posterity.precisions.diagonal import Diagonal
from posterity.priors import Normal
from posterity.theory.activations import Activation, Rectified, Smooth
from posterity.theory.losses import Logistic, Loss, OutputLaw, Softmax, Square
from posterity.theory.neurons import NeuronPrior, Neurons, parts


@dataclass(frozen=True, eq=False)
class WideProblem:
    """Data, loss, prior and activation of a mean-field network, for the bounds of every width.

    **Math**: N = `width`, p = number of rows, nu = `neurons`, q the product of N factorised Gaussians over neurons.

    - `data_terms`: G^N = E_q l(f, y) for each row; `limit_terms`: G~ = l(E f, y).
    - `elbo` = -sum G^N - eta N KL, `functional` F~ = -sum G~ - eta N KL, with `kl` the average over nu of KL(q_theta
      || P0). Constants of the likelihood are left out: p `loss.log_normaliser`.
    - `gap` = F~ - elbo, at least 0 for convex l, at most `gap_bound` = (beta/2) sum tr Cov f = O(p/N).
    - eta = tau p/N: F~/p = `balanced` = -(1/p) sum G~ - tau KL, in which the width is gone.
    - `first_variation` F'(nu)(theta) = -(1/p) sum <grad l(E f), E phi_theta> - tau KL(q_theta || P0): constant on the
      support of an optimal nu, and nowhere larger. `particle_gradient` is its gradient in theta at the neurons
      themselves, equal to N d(F~/p) / d theta_j.

    **Limit**: exact for `Square` and `Logistic`; second order in 1/N for `Softmax`. float64. The theorem is about
    neurons in a compact set. Without one, F of the rectifier need not have a maximum at small tau: neurons k times as
    large, of which there are k^2 times fewer, do the same at no more cost, and there F'(nu) grows as k^2.

    **Cost**: moments of every kind of neuron at every row, whatever the width. Widths, temperatures and leading axes
    of the neurons broadcast.

    **References**: Huix, Majewski, Durmus, Moulines and Korba (2022), Variational inference of overparameterized
    Bayesian neural networks: a theoretical and empirical study.

    **Example**:

    >>> problem = WideProblem(torch.tensor([[1.0, 0.5]]), torch.tensor([0.9]))
    >>> problem.gap(NeuronPrior().neurons(inputs=2), torch.tensor([10, 50]))  # |x|^2 / (50 N)
    tensor([0.0025, 0.0005], dtype=torch.float64)
    """

    inputs: Tensor
    targets: Tensor
    loss: Loss = field(default_factory=Square)
    prior: NeuronPrior = field(default_factory=NeuronPrior)
    activation: Activation = field(default_factory=Rectified)

    def __post_init__(self) -> None:
        if self.inputs.dim() != 2 or self.targets.shape[:1] != self.inputs.shape[:1] or not len(self.inputs):
            raise ValueError(
                "WideProblem: inputs must be (P, D) and targets (P,) or (P, C), with P of at least 1. "
                f"Got {shown(self.inputs)} and {shown(self.targets)}."
            )
        object.__setattr__(self, "inputs", self.inputs.to(torch.float64))

    @property
    def num_data(self) -> int:
        """The number p of rows."""
        return len(self.inputs)

    def law(self, neurons: Neurons, width: float | Tensor) -> OutputLaw:
        """The distribution of f at the rows."""
        if neurons.inner_mean.shape[-1] != self.inputs.shape[-1]:
            raise ValueError(
                f"WideProblem: inner weights must be (..., J, {self.inputs.shape[-1]}), one for each input. "
                f"Got {shown(neurons.inner_mean)}."
            )
        widths = self._tensor(width)
        if not bool((widths >= 1.0).all()):
            raise ValueError(f"WideProblem: width must be at least 1. Got {shown(width)}.")
        return OutputLaw(neurons, self.activation, self.inputs, widths)

    def excess_terms(self, neurons: Neurons, width: float | Tensor) -> Tensor:
        """G^N - G~ for each row, (..., P), computed without the difference of the two."""
        return self.loss.excess(self.law(neurons, width))

    def limit_terms(self, neurons: Neurons) -> Tensor:
        """G~ = l(E f, y) for each row, (..., P)."""
        return self.loss.value(self.law(neurons, 1.0).mean, self._targets(neurons))

    def data_terms(self, neurons: Neurons, width: float | Tensor) -> Tensor:
        """G^N = E l(f, y) for each row, (..., P)."""
        law = self.law(neurons, width)
        return self.loss.value(law.mean, self._targets(neurons)) + self.loss.excess(law)

    def kl(self, neurons: Neurons) -> Tensor:
        """KL(q_theta || P0) averaged over nu, (...): 1 / N of the KL of the network."""
        return neurons.average(self.prior.kl(neurons))

    def elbo(self, neurons: Neurons, width: float | Tensor, eta: float | Tensor = 1.0) -> Tensor:
        """-sum G^N - eta N KL, (...)."""
        return -self.data_terms(neurons, width).sum(-1) - self._penalty(neurons, width, eta)

    def functional(self, neurons: Neurons, width: float | Tensor, eta: float | Tensor = 1.0) -> Tensor:
        """F~ = -sum G~ - eta N KL, (...)."""
        return -self.limit_terms(neurons).sum(-1) - self._penalty(neurons, width, eta)

    def gap(self, neurons: Neurons, width: float | Tensor) -> Tensor:
        """F~ - elbo, (...): the same at every temperature."""
        return self.excess_terms(neurons, width).sum(-1)

    def gap_bound(self, neurons: Neurons, width: float | Tensor) -> Tensor:
        """(beta/2) sum over rows of tr Cov f, (...)."""
        return 0.5 * self.loss.smoothness * self.law(neurons, width).total_variance.sum(-1)

    def balanced(self, neurons: Neurons, tau: float | Tensor) -> Tensor:
        """F(nu) = -(1/p) sum G~ - tau KL, (...): F~/p at eta = tau p/N."""
        positive("WideProblem.balanced: tau", tau)
        return -self.limit_terms(neurons).mean(-1) - self._tensor(tau) * self.kl(neurons)

    def first_variation(self, neurons: Neurons, at: Neurons, tau: float | Tensor) -> Tensor:
        """F'(nu)(theta) for nu = `neurons` and each theta of `at`, (..., K)."""
        positive("WideProblem.first_variation: tau", tau)
        slope = self.loss.slope(self.law(neurons, 1.0).mean, self._targets(neurons))  # (..., P, C)
        pull = (slope.unsqueeze(-3) * self.law(at, 1.0).neuron_means).sum(-1).mean(-1)  # (..., K)
        return -pull - self._tensor(tau).unsqueeze(-1) * self.prior.kl(at)

    def particle_gradient(self, neurons: Neurons, tau: float | Tensor) -> Tensor:
        """Gradient of F'(nu) at each neuron of nu, nu held, (..., J, 2 (C + D)) in the order of `Neurons.theta`.

        The flow d theta_j / ds of this ascends F. It is (1 / share_j) dF / d theta_j: N d(F~/p) / d theta_j for N
        neurons.
        """
        with torch.enable_grad():
            theta = neurons.theta.detach().requires_grad_()
            value = self.first_variation(neurons, Neurons.from_theta(theta, neurons.num_outputs), tau).sum()
            return torch.autograd.grad(value, theta)[0]

    def eta(self, tau: float | Tensor, width: float | Tensor) -> Tensor:
        """The balanced temperature tau p/N."""
        return self._tensor(tau) * self.num_data / self._tensor(width)

    def tau(self, eta: float | Tensor, width: float | Tensor) -> Tensor:
        """eta N/p: `elbo` / p = -(1/p) sum G^N - tau KL."""
        return self._tensor(eta) * self._tensor(width) / self.num_data

    def _penalty(self, neurons: Neurons, width: float | Tensor, eta: float | Tensor) -> Tensor:
        positive("WideProblem: eta", eta)
        return self._tensor(eta) * self._tensor(width) * self.kl(neurons)

    def _targets(self, neurons: Neurons) -> Tensor:
        return self.loss.checked(self.targets, neurons.num_outputs)

    def _tensor(self, value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device=self.inputs.device)


_FLAT = 1e-8  # least curvature of a step, relative to the largest
_ROUNDING = 1e-14  # differences of the objective below this are rounding
_HALVINGS = 40
_LONGEST = 2.0  # change of a mean or of a scale's log in one step


class Optimum(NamedTuple):
    """The end of the search, for each of the leading axes (...)."""

    neurons: Neurons  # with the shares of the start
    gradient: Tensor  # (...), the largest entry, of -elbo / (eta N) in means and logs of scales
    rounds: int


def optimum(
    problem: WideProblem, start: Neurons, width: float | Tensor, tau: float | Tensor, *, rounds: int = 200
) -> Optimum:
    """Find a maximum of elbo / p = -(1/p) sum G^N - tau KL over the parameters of the neurons, near `start`.

    Widths and temperatures (...) broadcast with the leading axes of `start`; all combinations are searched at once. The
    bound at a temperature eta is tau = `problem.tau(eta, width)`; an infinite width is the limit `problem.balanced`. J
    kinds of neurons keep their shares; one kind is the optimum among networks of equal neurons, which is a stationary
    point among all.

    **Math**: Newton's method on KL + sum G^N / (p tau) in means and logs of scales, with absolute eigenvalues of the
    Hessian; steps are halved until they descend.

    **Limit**: a local maximum, to the rounding of float64: gradients end near 1e-15.

    **Cost**: a round is one gradient for each parameter of the J neurons.
    """
    positive("optimum: tau", tau)
    positive_whole("optimum: rounds", rounds)
    scale, widths = problem._tensor(tau), problem._tensor(width)
    lead = torch.broadcast_shapes(scale.shape, widths.shape, start.inner_mean.shape[:-2])  # type: ignore[no-untyped-call]
    outputs, shape = start.num_outputs, start.theta.shape[-2:]

    def neurons(point: Tensor) -> Neurons:
        theta = _scales_mapped(point.reshape(*lead, *shape), outputs, torch.exp)
        return Neurons.from_theta(theta, outputs, start.shares)

    def objective(point: Tensor) -> Tensor:
        candidate = neurons(point)
        return problem.kl(candidate) + problem.data_terms(candidate, widths).mean(-1) / scale

    point = _scales_mapped(start.theta, outputs, torch.log).detach().expand(*lead, *shape).reshape(*lead, -1)
    value, gradient, curvature = _derivatives(objective, point)
    taken = 0
    while taken < rounds:
        moved = _line_search(objective, point, value, gradient, _newton_step(gradient, curvature))
        before, taken = gradient.abs().amax(-1), taken + 1
        value, gradient, curvature = _derivatives(objective, moved)
        still = (moved - point).abs().amax(-1) <= _ROUNDING
        point = moved
        # Newton's method squares the error: once tiny gradients no longer halve they are rounding.
        if bool((still | ((before < 1e-9) & (gradient.abs().amax(-1) > 0.5 * before))).all()):
            break
    return Optimum(neurons(point), gradient.abs().amax(-1), taken)


def _scales_mapped(theta: Tensor, outputs: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to the scales in theta."""
    outer_mean, outer_scale, inner_mean, inner_scale = parts(theta, outputs)
    return torch.cat([outer_mean, function(outer_scale), inner_mean, function(inner_scale)], -1)


def _derivatives(objective: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value (...), gradient (..., K) and Hessian (..., K, K) of independent searches."""
    with torch.enable_grad():
        leaf = point.detach().requires_grad_()
        value = objective(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
        entries = gradient.unbind(-1)
        columns = [torch.autograd.grad(entry.sum(), leaf, retain_graph=True)[0] for entry in entries]
    return value.detach(), gradient.detach(), torch.stack(columns, -1)


def _newton_step(gradient: Tensor, curvature: Tensor) -> Tensor:
    """-|H|^-1 gradient, where |H| has the absolute eigenvalues of H, bounded below; entries are at most `_LONGEST`."""
    eigenvalues, vectors = torch.linalg.eigh(0.5 * (curvature + curvature.mT))
    sizes = eigenvalues.abs()
    sizes = torch.maximum(sizes, _FLAT * sizes.amax(-1, keepdim=True))
    step: Tensor = -(vectors @ ((vectors.mT @ gradient.unsqueeze(-1)) / sizes.unsqueeze(-1))).squeeze(-1)
    return step * (_LONGEST / step.abs().amax(-1, keepdim=True).clamp_min(_LONGEST))


def _line_search(
    objective: Callable[[Tensor], Tensor], point: Tensor, value: Tensor, gradient: Tensor, step: Tensor
) -> Tensor:
    """Return the point after the step, halved in each search until the objective falls or changes by rounding only."""
    promised = -(gradient * step).sum(-1)  # at least 0
    fraction, unseen = torch.ones_like(value), _ROUNDING * value.abs().clamp_min(1.0)
    for _ in range(_HALVINGS):
        with torch.no_grad():
            reached = objective(point + fraction.unsqueeze(-1) * step)
        # a value that is not finite is no descent
        good = (reached <= value - 1e-4 * fraction * promised) | ((promised <= unseen) & (reached <= value + unseen))
        if bool(good.all()):
            break
        fraction = torch.where(good, fraction, 0.5 * fraction)
    return point + fraction.unsqueeze(-1) * step


_NOTHING = 1e-12  # slopes below it are rounding


class CollapseLaw(NamedTuple):
    """The law KL(q* || P0) = constant N^exponent of the whole network for large N."""

    exponent: int  # -1, or -3 where the prior's mean output is already optimal to first order
    constant: float

    def kl(self, width: Tensor) -> Tensor:
        """KL(q* || P0) by the law at these widths."""
        return self.constant * width.to(torch.float64) ** self.exponent


def collapse_law(problem: WideProblem, outputs: int = 1) -> CollapseLaw:
    """The limit of N KL(q* || P0), or of N^3 KL(q* || P0), for the optimum q* of the untempered bound.

    **Math**: near the prior KL is a quadratic form: (mean - mean0)^2 / (2 s0^2) for each mean and v^2 for each v =
    log(scale / s0). Let g be the gradient of sum G~ at the prior. The minimum of N KL + <g, .> gives N KL* -> sum
    over means of s0^2 g^2 / 2 + sum over scales of g^2 / 4. For the square loss and a centred prior this is 2 s0^2
    (sum_i y_i c_i)^2 with c_i = E sigma(<b, x_i>). Odd activations have c = 0 and g = 0: then the scales shrink by
    the gradient h of N times the excess of G^N, by an order of 1/N more, and N^3 KL* -> the same form in h.

    **Limit**: the leading order in 1/N.
    """
    prior = problem.prior.neurons(problem.inputs.shape[-1], outputs, problem.inputs)
    first = _dual_norm(problem, prior, limit=True)
    if first > _NOTHING * problem.num_data:
        return CollapseLaw(-1, first)
    return CollapseLaw(-3, _dual_norm(problem, prior, limit=False))


def _dual_norm(problem: WideProblem, prior: Neurons, limit: bool) -> float:
    """The quadratic form of `collapse_law` in the gradient of sum G~, or of N times its excess to second order."""
    with torch.enable_grad():
        leaf = prior.theta.detach().requires_grad_()
        neurons = Neurons.from_theta(leaf, prior.num_outputs)
        terms = problem.limit_terms(neurons) if limit else problem.loss.second_order(problem.law(neurons, 1.0))
        (gradient,) = torch.autograd.grad(terms.sum(), leaf)
    outer_mean, outer_scale, inner_mean, inner_scale = parts(gradient, prior.num_outputs)

    def form(mean: Tensor, scale: Tensor, own: Tensor) -> float:  # d/dv = s0 d/ds at the prior
        return float((0.5 * (own * mean).square() + 0.25 * (own * scale).square()).sum())

    return form(outer_mean, outer_scale, prior.outer_scale) + form(inner_mean, inner_scale, prior.inner_scale)


def neurons_of(posterior: Posterior) -> Neurons:
    """Read the neurons of a factorised Gaussian over the weights of a `MeanFieldNetwork`; members are a leading axis.

    >>> import posterity as po
    >>> net = MeanFieldNetwork(inputs=2, width=3)
    >>> joint = po.Joint(net, po.likelihoods.Gaussian(), Normal(), num_data=1)
    >>> q = GaussianPosterior(joint, torch.zeros(9), Diagonal(torch.full((9,), 4.0)))
    >>> neurons_of(q).inner_scale.shape, float(neurons_of(q).outer_scale[0, 0])
    (torch.Size([3, 2]), 0.5)
    """
    factorised = isinstance(posterior, GaussianPosterior) and isinstance(posterior.precision, Diagonal)
    if not isinstance(posterior, GaussianPosterior) or not factorised or not isinstance(posterior.joint, Joint):
        raise TypeError(
            "neurons_of: the posterior must be a factorised Gaussian over a network's weights, as of MeanField. "
            f"Got {shown(type(posterior).__name__)}."
        )
    joint = posterior.joint
    _network(joint)
    if joint.random_indices is not None or joint.size != joint.network.layout.size:
        raise ValueError(
            "neurons_of: all weights must be random, and nothing else. Fit without subset and learnt noise."
        )
    inner_mean, outer_mean = joint.network.views(posterior.mean.to(torch.float64))
    inner_scale, outer_scale = joint.network.views(posterior.variance.sqrt().to(torch.float64))
    return Neurons(outer_mean.mT, outer_scale.mT, inner_mean, inner_scale)


def problem_of(joint: Joint, inputs: Tensor, targets: Tensor) -> WideProblem:
    """Convert a joint over a `MeanFieldNetwork`, with the given rows, to a `WideProblem`.

    Its constants are left out: E log p(D | w) = -sum G^N - p `loss.log_normaliser(outputs)`. The width is
    `joint.network.module.width`, and eta is `joint.tempering.eta`.
    """
    config = _network(joint).config
    activation: Activation = Rectified() if config["activation"] == "relu" else Smooth(config["activation"])
    loss = _loss(joint.likelihood)
    signs = 2.0 * targets.to(torch.float64) - 1.0 if isinstance(loss, Logistic) else targets
    return WideProblem(inputs.flatten(1), signs, loss, _prior(joint), activation)


def _network(joint: Joint) -> MeanFieldNetwork:
    module = joint.network.module
    if not isinstance(module, MeanFieldNetwork):
        raise TypeError(f"The network must be a MeanFieldNetwork. Got {type(module).__name__}.")
    return module


def _loss(likelihood: Likelihood) -> Loss:
    if isinstance(likelihood, Bernoulli):
        return Logistic()
    if isinstance(likelihood, Categorical) and not likelihood.positions:
        return Softmax()
    if isinstance(likelihood, Gaussian) and not likelihood.learn:
        scales = torch.as_tensor(likelihood.scale, dtype=torch.float64).flatten()
        if bool((scales == scales[0]).all()):
            return Square(float(scales[0]) ** -2)
    raise TypeError(
        "problem_of: the likelihood must be Gaussian with one known scale, Bernoulli, or Categorical with one label in "
        f"each row. Got {shown(likelihood)}."
    )


def _prior(joint: Joint) -> NeuronPrior:
    prior = joint.bound_prior
    if not isinstance(prior, Normal) or prior.num_members is not None:
        raise TypeError(
            f"problem_of: the prior must be normal, and one for all members. Got {shown(joint.prior)}. "
            "For one member use joint.member(i)."
        )
    zeros = torch.zeros(joint.network.layout.size, dtype=torch.float64, device=joint.network.device)
    variance = prior.variance(zeros)
    means = prior.value_and_grad(zeros)[1] * variance
    (inner, outer), (inner_mean, outer_mean) = joint.network.views(variance.sqrt()), joint.network.views(means)
    if any(bool((part != part.flatten()[0]).any()) for part in (inner, outer, outer_mean)) or bool(inner_mean.any()):
        raise ValueError(
            "problem_of: the prior must be one for all neurons and coordinates of a layer, with inner means of 0. "
            f"Got {shown(joint.prior)}."
        )
    return NeuronPrior(*(float(part.flatten()[0]) for part in (outer, inner, outer_mean)))
