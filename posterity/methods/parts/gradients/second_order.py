"""The expected log-likelihood to second order around the mean."""

from dataclasses import dataclass, field

import torch

from posterity.curvature import Curvature, GaussNewton
from posterity.methods.parts.gradients.estimator import DataTerm, Estimator, Factorised, Memory, Out
from posterity.model import Batch, Buffers, Problem
from posterity.numerics.random import Key


@dataclass(frozen=True)
class SecondOrder(Estimator):
    """Estimator without draws: the log-likelihood at the mean, less half its curvature times the variances of q.

    **Math**: lp E log p(D | w) ~ lp [log p(D | mean) - sum C_rr scale_r^2 / 2] with C the total of `curvature`; so
    d/dmean = lp d log p(D | mean) / dmean (the change of C with the mean is left out) and d/dscale = -lp C_rr scale_r.

    **Limit**: exact for linear models with Gaussian noise, and noiseless; elsewhere as good as the
    second order is, which is near a mode with narrow scales. `GaussNewton` is never negative, `Hessian` may be.

    **Cost**: a forward and backward pass, and the diagonal of the curvature: for `GaussNewton` as many backward passes
    as there are outputs.

    **References**: Khan et al. (2018), Fast and scalable Bayesian deep learning by weight-perturbation in Adam (VOGN);
    Friston et al. (2007), Variational free energy and the Laplace approximation.

    **Example**:

    >>> import posterity as po
    >>> net = torch.nn.Linear(1, 1, bias=False)
    >>> joint = po.Joint(net, po.likelihoods.Gaussian(1.0), po.priors.Normal(), num_data=4)
    >>> q = Factorised(torch.zeros(1), torch.full((1,), 0.5), None)
    >>> batch = po.model.Batch(torch.ones(2, 1), torch.ones(2, 1))
    >>> term = SecondOrder().data_term(joint, q, batch, {}, {}, po.Key(0))
    >>> term.grad_mean, term.grad_scale  # 4 (1 - 0), and -4 * 0.5
    (tensor([4.]), tensor([-2.]))
    """

    of_batches = False

    curvature: Curvature = field(default_factory=GaussNewton)

    def __post_init__(self) -> None:
        if not isinstance(self.curvature, Curvature):
            raise TypeError(f"SecondOrder.curvature must be of kind Curvature. Got {self.curvature!r}.")

    def data_term(
        self, joint: Problem, q: Factorised, batch: Batch, buffers: Buffers, memory: Memory, key: Key, out: Out = None
    ) -> DataTerm:
        value, grad, after = joint.data_value_and_grad(q.mean, batch, buffers)
        if joint.network is not None and q.mean.dim() > 1:
            each = [
                self._diagonal(joint.member(i), q.mean[i], batch.member(i), {n: b[i] for n, b in buffers.items()}, key)
                for i in range(len(q.mean))
            ]
            diagonal = torch.stack(each)
        else:
            diagonal = self._diagonal(joint, q.mean, batch, buffers, key)
        power = joint.powers[0]
        share = 1.0 if batch is None else joint.num_data / batch.size
        factor = power.unsqueeze(-1) * share if isinstance(power, torch.Tensor) else power * share
        total = (diagonal * factor).to(q.scale.dtype)
        grad_scale = -total * q.scale
        return DataTerm(value + 0.5 * (grad_scale * q.scale).sum(-1), grad, grad_scale, after, {})

    def _diagonal(self, joint: Problem, theta: torch.Tensor, batch: Batch, buffers: Buffers, key: Key) -> torch.Tensor:
        """Diagonal (R,) of the curvature of these rows, at the likelihood's learnt parameters."""
        return self.curvature.diagonal(joint.fitted(theta), theta[: joint.num_weights], batch, buffers, key.seed)
