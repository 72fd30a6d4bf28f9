"""Linearised chains of linear layers as plain modules: derivatives in tensor operations that can be traced."""

import logging
import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Inputs
from posterity.model.layer_chains import LinearChain, linear_chain
from posterity.model.network import Network
from posterity.posteriors.standalone import LARGEST, Predictor, Summary, module_at
from posterity.precisions.precision import Precision

logger = logging.getLogger("posterity")


def _gelu(given: Tensor, result: Tensor) -> Tensor:
    density = torch.exp(-0.5 * given.square()) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + torch.erf(given / math.sqrt(2.0))) + given * density


def _silu(given: Tensor, result: Tensor) -> Tensor:
    gate = torch.sigmoid(given)
    return gate + result * (1.0 - gate)


SLOPES: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.Identity: lambda given, result: torch.ones_like(given),
    nn.ReLU: lambda given, result: (given > 0).to(given.dtype),
    nn.Tanh: lambda given, result: 1.0 - result.square(),
    nn.Sigmoid: lambda given, result: result * (1.0 - result),
    nn.GELU: _gelu,
    nn.SiLU: _silu,
}
"""Derivatives of activations, from what they are given and what they return."""


def differentiable_chain(network: Network) -> LinearChain | None:
    """Return the chain of a network whose derivatives are known here; None for another, or where weights are shared."""
    chain = linear_chain(network.module)
    if chain is None:
        return None
    others = [layer for layer in chain.layers if not isinstance(layer, nn.Linear)]
    known = all(type(layer) in SLOPES and getattr(layer, "approximate", "none") == "none" for layer in others)
    weights = [id(weight) for layer in chain.layers for weight in layer.parameters()]
    return chain if known and len(set(weights)) == len(weights) else None


@final
class ChainMoments(Predictor):
    """Predictions of a linearised chain: outputs f(x) + J(x) (w - m) with normal weights w of mean m.

    Outputs have variances in closed form, from the covariance of up to 4,096 random weights (with more, all is by
    draws). The mutual information of classes is that of the draws `deviations` (S, R) of w - m.
    """

    covariance: Tensor | None
    deviations: Tensor
    columns: Tensor | None

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        theta: Tensor,
        precision: Precision,
        deviations: Tensor,
        columns: Tensor | None,
    ) -> None:
        """Take the mean (P,), and which of its entries are random (None: all)."""
        super().__init__(likelihood, module_at(network, theta, {}))
        self._layout = tuple(network.layout.names)
        self.register_buffer("columns", columns)
        self.register_buffer("deviations", deviations.detach().clone())
        closed = likelihood.link is not None and precision.size**2 <= LARGEST
        if not closed:
            logger.info("module: all predictions of the linearised network are by draws, none in closed form")
        eye = torch.eye(precision.size, dtype=torch.float64, device=theta.device) if closed else None
        self.register_buffer("covariance", None if eye is None else precision.solve(eye))

    def forward(self, inputs: Inputs) -> Summary:
        assert isinstance(inputs, Tensor)
        outputs, jacobian = self.derivatives(inputs)  # (N, D), (N, D, R)
        needs = self.covariance is None or self.likelihood.link != "identity"
        drawn = outputs + torch.einsum("ndr,sr->snd", jacobian, self.deviations) if needs else None
        if self.covariance is None:
            assert drawn is not None
            return self.of_draws(drawn)
        pair = self.likelihood.link == "softmax" and outputs.shape[1] == 2
        rows = (jacobian[:, 1:] - jacobian[:, :1] if pair else jacobian).double()
        variance = ((rows @ self.covariance.double()) * rows).sum(-1).clamp_min(0.0)
        return self.of_moments(outputs, variance, drawn)

    def derivatives(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (N, D), and their derivatives (N, D, R) in the random weights."""
        assert self.network is not None
        chain = linear_chain(self.network)
        assert chain is not None
        values = [rows]
        for layer in chain.layers:
            values.append(layer(values[-1]))
        outputs = values[-1]
        back = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).expand(outputs.shape[0], -1, -1)
        names, parts = {id(tensor): name for name, tensor in self.network.named_parameters()}, dict[str, Tensor]()
        for layer, given, result in reversed(list(zip(chain.layers, values[:-1], values[1:], strict=True))):
            if not isinstance(layer, nn.Linear):
                back = back * SLOPES[type(layer)](given, result).unsqueeze(1)
                continue
            parts[names[id(layer.weight)]] = (back.unsqueeze(-1) * given[:, None, None, :]).flatten(2)
            if layer.bias is not None:
                parts[names[id(layer.bias)]] = back
            back = back @ layer.weight
        whole = torch.cat([parts[name] for name in self._layout], dim=-1)
        return outputs, whole if self.columns is None else whole.index_select(-1, self.columns)
