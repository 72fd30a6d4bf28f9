"""The generalised Gauss-Newton matrix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from posterity.curvature.curvature import (
    VMAP_REFUSALS,
    Curvature,
    first_row,
    likelihood_at,
    log_refusal,
    num_random,
    torch_kernels,
    weights_function,
)
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
            part = jacobian.flatten(0, 1).T @ (fisher @ jacobian).flatten(0, 1)
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

    def row_bytes(self, joint: Joint, inputs: Inputs) -> int:
        """The Jacobian (C, R) in float64, three times over."""
        return 3 * 8 * max(1, prod(_event(joint, inputs))) * num_random(joint)

    def _rows(
        self, joint: Joint | Density, theta: Tensor, batch: Batch | None, buffers: Buffers | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Jacobians (n, C, R) and weighted Fisher matrices (n, C, C) in float64, chunk by chunk."""
        if not isinstance(joint, Joint):
            raise TypeError("A Density has no network outputs, so no Gauss-Newton matrix. Use the curvature Hessian().")
        assert batch is not None
        likelihood = likelihood_at(joint, theta)
        for low, jacobian, outputs in jacobian_chunks(joint, theta, batch.inputs, buffers):
            fisher = likelihood.output_fisher(outputs, outputs.dim() - 1).to(torch.float64)
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

    event = _event(joint, inputs)
    chunk = chunk_rows(GaussNewton().row_bytes(joint, inputs))
    for low in range(0, num_rows(inputs), chunk):
        part = map_inputs(lambda t, low=low: t[low : low + chunk], inputs)  # type: ignore[misc]
        with torch_kernels(joint.network):
            try:
                outputs, jacobian = row_jacobians(one, random, part)  # type: ignore[arg-type]
            except VMAP_REFUSALS as error:
                outputs, jacobian = _looped_jacobians(one, random, part)  # raises if the model is at fault
                log_refusal("rows", error)
        yield low, jacobian.detach(), outputs.detach().reshape(-1, *event)


def _looped_jacobians(
    function: Callable[[Tensor, Inputs], Tensor], theta: Tensor, rows: Inputs
) -> tuple[Tensor, Tensor]:
    """As `row_jacobians`, without vmap: one row and one output after the other."""
    outputs, jacobians = [], []
    for index in range(num_rows(rows)):
        row = map_inputs(lambda tensor, index=index: tensor[index], rows)  # type: ignore[misc]
        output, backward = torch.func.vjp(lambda w, row=row: function(w, row).reshape(-1), theta)  # type: ignore[misc]
        basis = torch.eye(output.numel(), dtype=output.dtype, device=output.device)
        outputs.append(output)
        jacobians.append(torch.stack([backward(direction)[0] for direction in basis]))
    return torch.stack(outputs), torch.stack(jacobians)


def _event(joint: Joint, inputs: Inputs) -> tuple[int, ...]:
    """Shape of one row of outputs."""
    network = joint.network.member(0)
    with torch.no_grad():
        return tuple(network.outputs(network.initial, first_row(inputs)).shape[1:])
