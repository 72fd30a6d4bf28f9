"""Variational inference of wide networks: the tempered bound, its mean-field limit, and what is between them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from posterity.errors import positive, shown
from posterity.evidence.wide.activation import Activation
from posterity.evidence.wide.loss import Loss
from posterity.evidence.wide.neuron_prior import NeuronPrior
from posterity.evidence.wide.neurons import Neurons
from posterity.evidence.wide.output_law import OutputLaw
from posterity.evidence.wide.rectified import Rectified
from posterity.evidence.wide.square import Square


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

    **Cost**: that of the moments, rows times kinds of neurons, whatever the width. Widths, temperatures and leading
    axes of the neurons broadcast: all at once.

    **References**: Huix, Majewski, Durmus, Moulines and Korba (2022), Variational inference of overparameterized
    Bayesian neural networks: a theoretical and empirical study.

    **Example**:

    >>> problem = WideProblem(torch.tensor([[1.0, 0.5]]), torch.tensor([0.9]))
    >>> problem.gap(NeuronPrior().neurons(inputs=2), torch.tensor([10, 100]))  # |x|^2 / (50 N)
    tensor([0.0025, 0.0003], dtype=torch.float64)
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
        """p."""
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
        """G^N - G~ for each row, (..., P), with its digits however small it is."""
        return self.loss.excess(self.law(neurons, width))

    def limit_terms(self, neurons: Neurons) -> Tensor:
        """G~ = l(E f, y) for each row, (..., P)."""
        return self.loss.value(self.law(neurons, 1.0).mean, self._targets(neurons))

    def data_terms(self, neurons: Neurons, width: float | Tensor) -> Tensor:
        """G^N = E l(f, y) for each row, (..., P)."""
        law = self.law(neurons, width)
        return self.loss.value(law.mean, self._targets(neurons)) + self.loss.excess(law)

    def kl(self, neurons: Neurons) -> Tensor:
        """KL(q_theta || P0) averaged over nu, (...): that of the network is N times it."""
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
            moving = Neurons.from_theta(theta, neurons.num_outputs)
            value = self.first_variation(neurons, moving, tau).sum()
            (gradient,) = torch.autograd.grad(value, theta)
        return gradient

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
