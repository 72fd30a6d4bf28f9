"""Predictions as plain modules of torch: from draws that are fixed, or from moments in closed form."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from posterity.likelihoods.bernoulli import labels_only
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Inputs, map_inputs
from posterity.model.dropout_sites import DropoutSites
from posterity.model.layer_chains import linear_chain
from posterity.model.module import copied
from posterity.model.network import Buffers, Network
from posterity.numerics.dropout import Dropping, NoMasks, NumberedMasks
from posterity.posteriors.moments import Chain, forward
from posterity.precisions.precision import Precision
from posterity.predictive import Predictive, from_outputs, mixed
from posterity.predictive.probit import shrunk
from posterity.predictive.quadrature import probit_gaussian, sigmoid_gaussian_rows
from posterity.predictive.scaling import LEAST, Scaling

logger = logging.getLogger("posterity")

LARGEST = 1 << 24  # numbers in the covariances of a last layer


class Summary(NamedTuple):
    """Predictions of rows: probabilities and mean entropy of classes, or mean, aleatoric and epistemic variance."""

    centre: Tensor
    within: Tensor
    between: Tensor | None


def module_at(network: Network, theta: Tensor, buffers: Buffers) -> nn.Module:
    """Return a new module in evaluation mode with these weights (P,), the network's frozen ones, and buffers."""
    module = copied(network.module).eval()  # a step may have left batch norm in training mode
    return _filled(module, network, theta, buffers)


def _filled(module: nn.Module, network: Network, theta: Tensor, buffers: Buffers) -> nn.Module:
    own: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        weights = network.layout.unflatten(theta)
        for name, value in {**network.frozen, **network.buffers, **buffers, **weights}.items():
            own[name].copy_(value)
    return module


class Predictor(nn.Module):
    """The base of what predicts a `Summary` of rows. Tensors of the likelihood are buffers, so that they move along."""

    def __init__(self, likelihood: Likelihood, network: nn.Module | None) -> None:
        super().__init__()
        self.network = None if network is None else network.requires_grad_(False)
        self._likelihood = likelihood
        names = [field.name for field in fields(likelihood)] if is_dataclass(likelihood) else list(vars(likelihood))
        self._values = {name: getattr(likelihood, name) for name in names}
        self._names = [name for name, value in self._values.items() if isinstance(value, Tensor)]
        for name in self._names:
            self.register_buffer(f"likelihood_{name}", getattr(likelihood, name))

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with its tensors on the device of the module."""
        if not self._names:
            return self._likelihood
        likelihood = object.__new__(type(self._likelihood))  # without the checks of a constructor, which read numbers
        vars(likelihood).update(self._values)
        vars(likelihood).update({name: getattr(self, f"likelihood_{name}") for name in self._names})
        return likelihood

    def called(self, inputs: Inputs, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the outputs of the network, with other tensors in place of its own; inputs are copied."""
        assert self.network is not None
        rows = map_inputs(torch.clone, inputs)  # which the network may write into
        args = () if isinstance(rows, Mapping) else rows if isinstance(rows, tuple) else (rows,)
        named = dict(rows) if isinstance(rows, Mapping) else {}
        if tensors is None:
            return cast(Tensor, self.network(*args, **named))
        return cast(Tensor, torch.func.functional_call(self.network, dict(tensors), args, named))

    def predictive(self, inputs: Inputs) -> Predictive | None:
        """Return the predictive of the posterior by the draws that are fixed here; None where it is not by draws."""
        return None

    def of_moments(self, outputs: Tensor, variance: Tensor, drawn: Tensor | None) -> Summary:
        """Return the summary of Gaussian outputs (N, D), by the integrators that `predict` takes by default.

        `variance` (N, D) is that of the outputs, or (N, 1) that of the difference of two logits. The mutual information
        of classes is that of the outputs `drawn` (S, N, D), which regression does not need.
        """
        likelihood = self.likelihood
        if likelihood.link == "identity":
            return Summary(outputs, likelihood.variance(outputs), variance.to(outputs.dtype))
        assert drawn is not None
        probs = _integrated(likelihood, outputs.double(), variance)
        mean, within, _ = self.of_draws(drawn)
        information = (torch.special.entr(mean).sum(1) - within).clamp_min(0.0)
        return Summary(probs, (torch.special.entr(probs).sum(1) - information).clamp_min(0.0), None)

    def of_draws(self, outputs: Tensor) -> Summary:
        """Return the summary of outputs (S, N, *event)."""
        likelihood = self.likelihood
        logs = likelihood.class_log_probs(outputs)
        if logs is not None:  # (S, N, C, *positions), in float64
            draws = logs.exp()
            return Summary(draws.mean(0), torch.special.entr(draws).sum(2).mean(0), None)
        means, variances = likelihood.mean(outputs), likelihood.variance(outputs)
        mean = means.mean(0)
        return Summary(mean, variances.mean(0), (means - mean).square().mean(0))


def _integrated(likelihood: Likelihood, logits: Tensor, variance: Tensor) -> Tensor:
    """Return E p(y | f) by the integrators that `predict` takes by default, from logits (N, D)."""
    if likelihood.link == "softmax" and logits.shape[1] == 2:
        logits, variance = logits[:, 1] - logits[:, 0], variance[:, 0]
    elif likelihood.link == "softmax":
        return shrunk(logits, variance).softmax(1)
    else:
        logits, variance = labels_only(logits, leading=1), labels_only(variance, leading=1)
    flat = variance.reshape(-1)
    integral = probit_gaussian if likelihood.link == "probit" else sigmoid_gaussian_rows
    each = [integral(sign * logits.reshape(-1), flat).reshape(logits.shape) for sign in (-1.0, 1.0)]
    return torch.stack(each, dim=1)


@final
class Draws(Predictor):
    """Predictions by draws of weights (S, P), with buffers that all draws share, or (S, ...) for each."""

    def __init__(
        self, network: Network, likelihood: Likelihood, theta: Tensor, shared: Buffers, each: Buffers | None = None
    ) -> None:
        each = each or {}
        theta = theta[:, : network.layout.size]
        first = {**shared, **{name: tensor[0] for name, tensor in each.items()}}
        super().__init__(likelihood, module_at(network, theta[0], first))
        self._draws = {name: f"draws_{index}" for index, name in enumerate([*network.layout.names, *each])}
        for name, tensor in {**network.layout.unflatten(theta), **each}.items():
            self.register_buffer(self._draws[name], tensor.detach().contiguous().clone())
        self.draws = len(theta)
        assert self.network is not None
        self._chain = None if each else linear_chain(self.network)
        owners = {id(module): name for name, module in self.network.named_modules()}
        self._owners = [] if self._chain is None else [owners[id(layer)] for layer in self._chain.layers]

    def weights(self, draw: int) -> dict[str, Tensor]:
        """Return the weights and buffers of a draw by name."""
        return {name: getattr(self, own)[draw] for name, own in self._draws.items()}

    def forward(self, inputs: Inputs) -> Summary:
        return self.of_draws(self.outputs(inputs))

    def predictive(self, inputs: Inputs) -> Predictive:
        return from_outputs(self.likelihood, self.outputs(inputs))

    def outputs(self, inputs: Inputs) -> Tensor:
        """Return the outputs (S, N, *event) of all draws."""
        if self._chain is not None and self._chain.takes(inputs, per_member=False):
            return self._together(cast(Tensor, inputs))
        return torch.stack([self.called(inputs, self.weights(draw)) for draw in range(self.draws)])

    def _together(self, rows: Tensor) -> Tensor:
        """Return the outputs (S, N, D) of a chain of linear layers, one product for all draws of a layer."""
        assert self._chain is not None

        def drawn(owner: str, kind: str, tensor: Tensor) -> Tensor:  # (S, ...)
            own: Tensor | None = getattr(self, self._draws.get(f"{owner}.{kind}" if owner else kind, ""), None)
            return tensor.expand(self.draws, *tensor.shape) if own is None else own

        values = rows.expand(self.draws, *rows.shape)
        for owner, layer in zip(self._owners, self._chain.layers, strict=True):
            if not isinstance(layer, nn.Linear):
                values = layer(values)
                continue
            bias: Tensor | None = layer.bias  # torch declares it as always there
            if bias is None:
                values = torch.bmm(values, drawn(owner, "weight", layer.weight).mT)
            else:
                weight = drawn(owner, "weight", layer.weight)
                values = torch.baddbmm(drawn(owner, "bias", bias).unsqueeze(1), values, weight.mT)
        return values


@final
class Masks(Predictor):
    """Predictions by dropout masks that are fixed: uniform numbers (S, *shape) of each site."""

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        theta: Tensor,
        buffers: Buffers,
        known: DropoutSites,
        numbers: Sequence[Tensor],
    ) -> None:
        with network.dropping(NoMasks(), training=known.training):  # the copy keeps what its modules see then
            module = copied(network.module)
        for norm in module.modules():
            if isinstance(norm, nn.modules.batchnorm._NormBase):
                norm.eval()
        super().__init__(likelihood, _filled(module, network, theta, buffers))
        self._sites, self.draws = known.sites, len(numbers[0])
        for index, tensor in enumerate(numbers):
            self.register_buffer(f"numbers_{index}", tensor)

    def forward(self, inputs: Inputs) -> Summary:
        outputs = []
        for draw in range(self.draws):
            numbers = [getattr(self, f"numbers_{index}")[draw] for index in range(len(self._sites))]
            with Dropping(NumberedMasks(numbers, self._sites)):
                outputs.append(self.called(inputs))
        return self.of_draws(torch.stack(outputs))


@final
class LastLayer(Predictor):
    """Predictions by a normal last layer, in whose weights the outputs are linear; the layers before it run once.

    `draws` (S, *shape) are its weights by name, in the order of the precision matrix. Outputs of a linear layer have
    variances in closed form. From these follow mean and standard deviation, or class probabilities by the default
    integrators; else all is by draws, as is the mutual information of classes in any case.
    """

    covariances: Tensor | None

    def __init__(
        self, likelihood: Likelihood, module: nn.Module, head: str, draws: Mapping[str, Tensor], precision: Precision
    ) -> None:
        super().__init__(likelihood, module)
        self._head, self._drawn_names = head, tuple(draws)
        for name, tensor in draws.items():
            self.register_buffer(f"draws_{name}", tensor.detach().clone())
        layer = module.get_submodule(head)
        count = layer.out_features if isinstance(layer, nn.Linear) else 0
        width = precision.size // max(1, count)
        self._pair = likelihood.link == "softmax" and count == 2
        if not count or likelihood.link is None or count * width**2 > LARGEST:
            logger.info("module: all of the last layer's predictions are by draws, none in closed form")
            self.register_buffer("covariances", None)
            return
        position = torch.arange(precision.size, device=precision.base.device)
        parts = torch.split(position, [tensor[0].numel() for tensor in draws.values()])
        order = torch.cat([part.view(count, -1) for part in parts], dim=1)  # (D, F), the bias among them
        blocks = []
        for index in order[1:] if self._pair else order:
            unit = torch.zeros(width, precision.size, dtype=torch.float64, device=position.device)
            unit.scatter_(1, index.unsqueeze(1), 1.0)
            if self._pair:  # the difference of two logits
                unit.scatter_(1, order[0].unsqueeze(1), -1.0)
            blocks.append(precision.solve(unit) @ unit.T)
        self.register_buffer("covariances", torch.stack(blocks))  # (D, F, F)

    def forward(self, inputs: Inputs) -> Summary:
        features, outputs = self._features(inputs)
        if self.covariances is None or features.dim() != 2:  # labels at positions
            return self.of_draws(self._drawn(features))
        phi, covariances = features.double(), self.covariances.double()
        if phi.shape[-1] < covariances.shape[-1]:
            ones = torch.ones_like(phi[:, :1])
            phi = torch.cat([ones, phi] if self._drawn_names[0] == "bias" else [phi, ones], dim=-1)
        variance = ((phi @ covariances) * phi).sum(-1).T.clamp_min(0.0)  # (N, D), of phi_n^T covariance_d phi_n
        drawn = None if self.likelihood.link == "identity" else self._drawn(features)
        return self.of_moments(outputs, variance, drawn)

    def _features(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the inputs of the last layer and its outputs, which must be those of the network."""
        assert self.network is not None
        seen: list[tuple[Tensor, Tensor]] = []
        layer = self.network.get_submodule(self._head)

        def note(_: nn.Module, given: Any, output: Any) -> None:
            seen.append((given[0], output))

        handle = layer.register_forward_hook(note)
        try:
            outputs = self.called(inputs)
        finally:
            handle.remove()
        if len(seen) != 1 or outputs is not seen[0][1]:
            raise TypeError(
                f"module: the outputs must be those of the last layer '{self._head}' itself, called once, to be linear "
                "in its weights. Use q.gaussian.module(draws=...), which draws weights of the network."
            )
        return seen[0]

    def _drawn(self, features: Tensor) -> Tensor:
        """Return the outputs (S, N, *event) at the draws of the last layer."""
        assert self.network is not None
        layer = self.network.get_submodule(self._head)
        tensors = {name: getattr(self, f"draws_{name}") for name in self._drawn_names}
        each = [dict(zip(tensors, values, strict=True)) for values in zip(*tensors.values(), strict=True)]
        return torch.stack([torch.func.functional_call(layer, own, (features,)) for own in each])


@final
class Propagation(Predictor):
    """Moments of a ReLU network with independent normal weights, from layer to layer, under Gaussian noise."""

    def __init__(self, likelihood: Likelihood, chain: Chain, mean: Tensor, variance: Tensor) -> None:
        super().__init__(likelihood, None)
        self._chain, self._dtype = chain, mean.dtype
        for kind, flat in (("means", mean.double()), ("variances", variance.double())):
            for index, matrix in enumerate(chain.matrices(flat[chain.order].unsqueeze(0))):
                self.register_buffer(f"{kind}_{index}", matrix)

    def forward(self, inputs: Inputs) -> Summary:
        assert isinstance(inputs, Tensor)
        layers = range(len(self._chain.layers))
        means, variances = ([getattr(self, f"{k}_{i}").double() for i in layers] for k in ("means", "variances"))
        mean, variance, _ = forward(self._chain, means, variances, inputs.double().unsqueeze(0))
        mean, variance = (moment[0].to(self._dtype) for moment in (mean, variance))
        return Summary(mean, self.likelihood.variance(mean), variance)


@final
class Mixed(nn.Module):
    """The mixture of parts with weights (K,)."""

    def __init__(self, parts: Sequence[nn.Module], shares: Tensor) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._shares = shares.tolist()

    def forward(self, inputs: Inputs) -> Summary:
        each: list[Summary] = [part(inputs) for part in self.parts]
        centre, within = (self._mean([part[index] for part in each]) for index in (0, 1))
        spreads = [part.between + (part.centre - centre).square() for part in each if part.between is not None]
        return Summary(centre, within, self._mean(spreads) if spreads else None)

    def predictive(self, inputs: Inputs) -> Predictive | None:
        """Return the mixture of the parts' predictives; None where a part has none."""
        each: list[Predictive | None] = [cast(Predictor, part).predictive(inputs) for part in self.parts]
        known = [pred for pred in each if pred is not None]
        return mixed(known, torch.tensor(self._shares, dtype=torch.float64)) if len(known) == len(each) else None

    def _mean(self, values: Sequence[Any]) -> Any:
        return sum(share * value for share, value in zip(self._shares, values, strict=True))


class ScaledProbabilities(nn.Module):
    """The part's class probabilities after a scaling; the mutual information stays, up to the new entropy."""

    def __init__(self, part: nn.Module, scaling: Scaling) -> None:
        super().__init__()
        self.part = part
        self._scaling = scaling

    def predictive(self, inputs: Inputs) -> Predictive | None:
        """Return the scaled predictive of the part; None where it has none."""
        pred: Predictive | None = cast(Predictor, self.part).predictive(inputs)
        return None if pred is None else self._scaling.apply(pred)

    def forward(self, inputs: Inputs) -> Summary:
        centre, within, _ = self.part(inputs)
        logits = centre.double().clamp_min(LEAST).log().movedim(1, -1)
        probs = self._scaling.scaled(logits).softmax(-1).movedim(-1, 1).to(centre)
        entropy, information = (torch.special.entr(each).sum(1) for each in (probs, centre))
        return Summary(probs, entropy - torch.minimum((information - within).clamp_min(0.0), entropy), None)


@final
class PredictiveModule(nn.Module):
    """A posterior's predictions as a plain module: a dict of tensors from inputs in the form that `predict` takes.

    Regression gives "mean" and "std" (N, *event); classes "probs" (N, C, *positions), "entropy" and
    "mutual_information" (N, *positions) in nats. It always predicts: `train()` changes nothing.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.training = False

    def predictive(self, inputs: Inputs) -> Predictive | None:
        """Return what `predict` gives by the draws that are fixed here; None where it is not by draws."""
        return cast(Predictor, self.part).predictive(inputs)

    def train(self, mode: bool = True) -> "PredictiveModule":
        """Return the module as it is."""
        return self

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the predictions at rows of inputs."""
        centre, within, between = self.part(inputs)
        if between is not None:
            return {"mean": centre, "std": (within + between).sqrt()}
        entropy = torch.special.entr(centre).sum(1)
        return {"probs": centre, "entropy": entropy, "mutual_information": (entropy - within).clamp_min(0.0)}


def last_layer_of(network: Network, names: Sequence[str]) -> str | None:
    """Return the name of the linear or convolutional layer that these tensors are all of the weights of; else None."""
    owners = {name.rpartition(".")[0] for name in names}
    if len(owners) != 1:
        return None
    (owner,) = owners
    layer = network.module.get_submodule(owner)
    own = {f"{owner}.{name}" if owner else name for name, _ in layer.named_parameters(recurse=False)}
    linear = isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd))
    return owner if linear and own == set(names) else None
