"""The generalised Gauss-Newton matrix."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.curvature.curvature import Curvature, weights_function
from posterity.model.data import Batch
from posterity.model.density import Density
from posterity.model.inputs import Inputs, map_inputs, num_rows
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.numerics.autodiff import chunk_rows, row_jacobians


@dataclass(frozen=True)
class GaussNewton(Curvature):
    """The generalised Gauss-Newton matrix: the Hessian without the curvature of the network itself.

    **Math**: G = sum_n w_n J_n^T F_n J_n, J_n = d f(x_n) / d theta, F_n the likelihood's `output_fisher`.

    **Limit**: positive semi-definite always; equals the Hessian when f is linear in theta, or at zero residuals.

    **Cost**: one Jacobian for each row, C backward passes, in chunks; memory (chunk, C, R).

    **References**: Schraudolph (2002); Martens (2020), section 8.

    **Example**:

    >>> from posterity.likelihoods import Gaussian
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Gaussian(scale=0.5), Normal(), num_data=2)
    >>> batch = Batch(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1))
    >>> GaussNewton().matrix(joint, torch.zeros(1), batch, None)  # (1 + 4) / 0.25
    tensor([[20.]], dtype=torch.float64)
    """

    def matrix(self, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None) -> Tensor:
        """Sum of J^T F J over the rows."""
        total: Tensor | None = None
        for jacobian, fisher in self._rows(joint, theta, batch, buffers):
            part = torch.einsum("ncp,ncd,ndq->pq", jacobian, fisher, jacobian)
            total = part if total is None else total + part
        assert total is not None
        return 0.5 * (total + total.T)

    def diagonal(self, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None) -> Tensor:
        """Sum of the diagonals of J^T F J over the rows."""
        total: Tensor | None = None
        for jacobian, fisher in self._rows(joint, theta, batch, buffers):
            part = (jacobian * (fisher @ jacobian)).sum((0, 1))
            total = part if total is None else total + part
        assert total is not None
        return total

    def _rows(
        self, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Jacobians (n, C, R) and weighted Fisher matrices (n, C, C) in float64, chunk by chunk."""
        if not isinstance(joint, Joint):
            raise TypeError("A Density has no network outputs, so no Gauss-Newton matrix. Use the curvature Hessian().")
        assert batch is not None
        likelihood = joint.likelihood.with_free(joint.split(theta)[1]) if joint.likelihood.num_free else joint.likelihood
        for low, jacobian, outputs in jacobian_chunks(joint, theta, batch.inputs, buffers):
            fisher = likelihood.output_fisher(outputs).to(torch.float64)
            if batch.weights is not None:
                fisher = fisher * batch.weights[low : low + outputs.shape[0], None, None]
            yield jacobian.to(torch.float64), fisher


def jacobian_chunks(
    joint: Joint, theta: Tensor, inputs: Inputs, buffers: Buffers | None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first row, Jacobians (n, D, R) over the random weights, outputs (n, *event)), chunk by chunk."""
    rebuild, random = weights_function(joint, theta)

    def one(weights: Tensor, row: Inputs) -> Tensor:
        single = map_inputs(lambda tensor: tensor.unsqueeze(0), row)
        return joint.network.outputs(rebuild(weights), single, buffers).squeeze(0)

    with torch.no_grad():
        probe = joint.network.outputs(rebuild(random), map_inputs(lambda t: t[:1], inputs), buffers)
    event = probe.shape[1:]
    width = max(1, int(probe[0].numel()))
    rows = num_rows(inputs)
    chunk = chunk_rows(3 * 8 * width * random.shape[0])
    for low in range(0, rows, chunk):
        part = map_inputs(lambda t, low=low: t[low : low + chunk], inputs)  # type: ignore[misc]
        outputs, jacobian = row_jacobians(one, random, part)  # type: ignore[arg-type]
        yield low, jacobian.detach(), outputs.detach().reshape(-1, *event)
