"""The exact Hessian of the negative log-likelihood."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posterity.curvature.curvature import (
    Curvature,
    first_row,
    likelihood_at,
    num_random,
    torch_kernels,
    weights_function,
)
from posterity.model.data import Batch
from posterity.model.density import Density
from posterity.model.inputs import Inputs
from posterity.model.joint import Joint
from posterity.model.network import Buffers
from posterity.numerics.autodiff import chunk_rows, dense_hessian


@dataclass(frozen=True)
class Hessian(Curvature):
    """The exact Hessian of -log p(D | theta).

    **Math**: H = - sum_n w_n d^2 log p(y_n | f_theta(x_n)) / d theta^2.

    **Limit**: exact, but indefinite away from a mode of the likelihood; with the prior it must be positive
    definite at a mode of the posterior.

    **Cost**: R backward passes of the gradient, in chunks.

    **References**: MacKay (1992), A practical Bayesian framework for backpropagation networks.

    **Example**:

    >>> density = Density(lambda u: 7.0 * u - 2.0 * u.exp(), {"u": ()}, dtype=torch.float64)
    >>> Hessian().matrix(density, torch.tensor([3.5], dtype=torch.float64).log(), None, None)
    tensor([[7.]], dtype=torch.float64)
    """

    forms_matrix: ClassVar[bool] = True

    def matrix(self, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None) -> Tensor:
        """R backward passes."""
        if isinstance(joint, Density):
            return dense_hessian(lambda t: -joint.log_density(t), theta).to(torch.float64)
        assert batch is not None
        rebuild, random = weights_function(joint, theta)
        likelihood = likelihood_at(joint, theta)

        def negative(weights: Tensor) -> Tensor:
            outputs = joint.network.outputs(rebuild(weights), batch.inputs, buffers)
            rows = likelihood.log_prob(outputs, batch.targets)
            return -(rows.sum() if batch.weights is None else (rows * batch.weights).sum())

        with torch_kernels(joint.network):
            return dense_hessian(negative, random).to(torch.float64)

    def diagonal(self, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None) -> Tensor:
        """The diagonal of `matrix`, which is formed."""
        return self.matrix(joint, theta, batch, buffers).diagonal()

    def row_bytes(self, joint: Joint, inputs: Inputs) -> int:
        """What the graph of one row keeps, twice, for each of the backward passes that go together."""
        network = joint.network.member(0)
        theta = network.initial.detach().requires_grad_()
        shared = {t.untyped_storage().data_ptr() for t in (theta, *network.frozen.values(), *network.buffers.values())}
        kept = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            if tensor.untyped_storage().data_ptr() not in shared:  # weights are there once, whatever the rows
                kept += tensor.numel() * tensor.element_size()
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            network.outputs(theta, first_row(inputs))
        size = num_random(joint)
        return 2 * kept * min(size, chunk_rows(4 * joint.dtype.itemsize * size))
