"""Curvature by plain autodiff of the module itself, for tests of the engine that takes it in factors."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.func import functional_call

import posterity as po
from posterity.likelihoods import Likelihood
from posterity.model import Batch
from posterity.numerics import Key

FLOAT64 = torch.float64


def made(build, *options, seed: int = 0) -> nn.Module:
    """The module in float64 and evaluation mode, with weights (and buffers) that depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = build(*options).double().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(0.6 * Key(seed).fold(name).normal(tuple(parameter.shape), FLOAT64) + 0.1)
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(0.5 + Key(seed).fold(name).uniform(tuple(buffer.shape), FLOAT64))
    return module


def run(module: nn.Module, flat: Tensor, inputs) -> Tensor:
    """Outputs with the module's parameters, each once and in order, replaced by the entries of a flat vector."""
    parameters = dict(module.named_parameters())
    pieces = flat.split([p.numel() for p in parameters.values()])
    values = {name: piece.view(p.shape) for (name, p), piece in zip(parameters.items(), pieces, strict=True)}
    if isinstance(inputs, dict):
        return functional_call(module, values, (), inputs)
    return functional_call(module, values, inputs if isinstance(inputs, tuple) else (inputs,))


class Truth(NamedTuple):
    """A problem at given weights, and the dense derivatives of its outputs (n, *event, R)."""

    joint: po.Joint
    theta: Tensor
    batch: Batch
    slopes: Tensor

    @property
    def outputs(self) -> Tensor:
        return self.joint.outputs(self.theta, self.batch.inputs)

    @property
    def columns(self) -> Tensor:
        """Rows J_n^T S_n of the Gauss-Newton matrix (n, D, R), weighted."""
        fisher = self.joint.likelihood.output_fisher(self.outputs, self.outputs.dim() - 1)
        values, vectors = torch.linalg.eigh(fisher)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        flat = self.slopes.reshape(len(root), root.shape[1], -1)
        weights = torch.ones(len(root), dtype=FLOAT64) if self.batch.weights is None else self.batch.weights
        return (root.mT @ flat) * weights.sqrt().view(-1, 1, 1)

    @property
    def matrix(self) -> Tensor:
        rows = self.columns.flatten(0, 1)
        return rows.T @ rows


def truth(
    module: nn.Module, inputs, likelihood: Likelihood | None = None, targets=None, weights=None, random="*"
) -> Truth:
    """The problem of this module, with Gaussian noise of scale 0.7 where nothing else is asked for."""
    likelihood = likelihood or po.likelihoods.Gaussian(0.7)
    theta = torch.cat([p.detach().flatten() for p in module.parameters()])
    outputs = run(module, theta, inputs).detach()
    targets = likelihood.sample(outputs, Key(8)) if targets is None else targets
    joint = po.Joint(module, likelihood, po.priors.Normal(0.8), num_data=len(outputs), random=random)
    with torch.backends.cudnn.flags(enabled=False):  # whose recurrent layers have no gradient in evaluation mode
        slopes = jacobian(lambda flat: run(module, flat, inputs), theta)
    if joint.random_indices is not None:
        slopes = slopes[..., joint.random_indices]
    return Truth(joint, theta, Batch(inputs, targets, weights), slopes)


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    """Equal to the tolerance, in units of the largest entry."""
    assert got.dtype == FLOAT64
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max().clamp_min(1)))
