"""Monte Carlo dropout, with rates fixed or learnt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import of_kinds, positive
from posterity.inference.memory import fit_bytes
from posterity.inference.method import Footprint, GradientFit, Info
from posterity.methods.parts.scales import by_evidence
from posterity.model import Batch, Buffers, Data, Joint, Problem
from posterity.model.batch import map_inputs
from posterity.model.dropout_sites import dropout_sites
from posterity.numerics.dropout import KeyedMasks
from posterity.numerics.layout import Slice
from posterity.numerics.random import Key
from posterity.optim import Adam, Constant, Optimizer, Schedule
from posterity.posteriors.dropout import Dropout
from posterity.priors.normal import Normal
from posterity.special.functions import binary_entropy


class LearntRate(NamedTuple):
    """A learnt rate: the slices of theta with its logit and with the weights behind it, and its number of units."""

    name: str
    logit: Slice
    weight: Slice
    units: int


def learnt_rates(joint: Joint) -> tuple[LearntRate, ...]:
    """The rates of the `ConcreteDropout` layers, in the order of theta."""
    parts = {part.name: part for part in joint.network.layout}
    rates = []
    for name, logit in parts.items():
        owner, _, last = name.rpartition(".")
        if last != "rate_logit":
            continue
        weight = parts.get(f"{owner}.layer.weight" if owner else "layer.weight")
        if weight is None:
            raise ValueError(
                f"MCDropout: the rate '{name}' is learnt but the weights behind it are frozen, so they have no prior. "
                "Freeze both or neither."
            )
        rates.append(LearntRate(owner, logit, weight, weight.shape[1]))
    return tuple(rates)


def prior_value_and_grad(joint: Joint, theta: Tensor, rates: tuple[LearntRate, ...]) -> tuple[Tensor, Tensor]:
    """pp E_q log p(w) + H(masks) up to a constant, in nats, and its gradient in theta (..., T).

    A row of weights W behind a rate p is W / (1 - p) with probability 1 - p and 0 else, so that a normal prior
    of scale s gives -|W|^2 / (2 s^2 (1 - p)), which is its log density at W / sqrt(1 - p). The rates have a flat prior.
    """
    leaf = theta.detach().requires_grad_()
    with torch.enable_grad():
        weights, raw = joint.split(leaf)
        moved, entropy = weights.clone(), torch.zeros((), dtype=leaf.dtype, device=leaf.device)
        variance = joint.bound_prior.variance(weights.detach())
        for rate in rates:
            logit = weights[..., rate.logit.offset : rate.logit.offset + 1]
            own = slice(rate.weight.offset, rate.weight.offset + rate.weight.size)
            moved[..., own] = weights[..., own] * (1.0 + logit.exp()).sqrt()  # 1 / (1 - p) = 1 + exp(logit)
            moved[..., rate.logit.offset] = 0.0
            entropy = entropy + rate.units * binary_entropy(logit.squeeze(-1))
        value = joint.bound_prior.log_prob(moved)
        for rate in rates:  # the log density of a logit at 0, which is no part of a flat prior
            value = value + 0.5 * torch.log(2.0 * math.pi * variance[..., rate.logit.offset])
        value = joint.powers[1] * (value + joint.likelihood.free_log_prior(raw)) + entropy
        grad = torch.autograd.grad(value.sum(), leaf)[0]
    return value.detach(), grad


class MCDropoutState(NamedTuple):
    """theta (P,) or (M, P), the optimiser's moments, batch-norm statistics and the number of steps done.

    `example` is a row of zeros in the form of the inputs, None before the first step.
    """

    theta: Tensor
    optimizer: Any
    buffers: Buffers
    step: int
    example: Any


@dataclass(frozen=True)
class MCDropout(GradientFit):
    """Monte Carlo dropout: the network's own dropout is on while it trains, and in the draws of its predictions.

    **Math**: ascent on lp E_keep log p(D | f_{W, keep}) + pp log p(W), by one draw of the masks a step. It is `MAP` of
    the weights under noise, and up to constants the ELBO of the q that draws rows of W / (1 - p) or 0, if the prior
    on these has the precision l^2 = (1 - p) / s^2 for a N(0, s^2) prior on W (`evidence.DropoutObjective`). Rates
    of `ConcreteDropout` layers are learnt: there the prior is on W / (1 - p), and the objective is
    lp E log p(D | f) - pp |W|^2 / (2 s^2 (1 - p)) + K H(p), with K units, in nats. The trace has "loss", minus that per
    datum, and the learnt rates.

    **Masks**: while training every row has its own, or with `one_mask_a_batch` all rows of a batch have one; members
    have the same ones. A draw of a prediction has one mask for all rows, so that it is a function, or with
    `one_mask_a_draw=False` one for each. Batch norm uses batch statistics while training, running ones in predictions.

    **Limit**: q is as wide as the rates say, whatever the number of data, unless they are learnt; the KL is exact for
    weights far from zero only (`evidence.dropout_divergence`).

    **Cost**: the cost of MAP and of the random numbers; predictions take a forward pass for each draw.

    **References**: Gal and Ghahramani (2016), Dropout as a Bayesian approximation; Gal, Hron and Kendall (2017).

    **Example**:

    >>> import torch, posterity as po
    >>> x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> net = po.networks.MLP([2, 20, 2], dropout=0.2)
    >>> joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(), num_data=50)
    >>> q, trace = po.infer(po.methods.MCDropout(steps=300, batch_size=None), joint, (x, y))
    >>> po.metrics.accuracy(q.predict(x), y) > 0.9
    True
    """

    steps: int = 2000
    batch_size: int | None = 128
    optimizer: Optimizer = field(default_factory=Adam)
    schedule: Schedule = field(default_factory=Constant)
    one_mask_a_batch: bool = False
    one_mask_a_draw: bool = True
    temperature: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("MCDropout.temperature", self.temperature)
        of_kinds(self, one_mask_a_batch=bool, one_mask_a_draw=bool)

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        return by_evidence(joint, data, start, key)

    def prepared(self, joint: Problem, data: Data) -> Problem:
        """Check that the network has dropout, and that the prior of learnt rates is normal with mean zero."""
        joint = joint.as_joint("MCDropout", "Use MAP.")
        dropout_sites(joint.network.member(0), data.first().member(0).inputs)
        prior = joint.bound_prior
        if learnt_rates(joint) and not (isinstance(prior, Normal) and not bool(torch.as_tensor(prior.mean).any())):
            raise ValueError(
                f"MCDropout: learnt rates need normal priors with mean 0. Got {type(joint.prior).__name__}. Use "
                "Normal, or Layerwise of scale rules, or torch.nn.Dropout with rates that are given."
            )
        return joint

    def footprint(self, joint: Problem, data: Data) -> Footprint:
        # Masks are no larger than the activations of a batch.
        fit = fit_bytes(self.optimizer, joint, data, self.batch_size)
        masks = {"activations of a batch, with masks": 2 * fit.pop("activations of a batch")}
        return super().footprint(joint, data).plus({**fit, **masks})

    def init(self, joint: Problem, theta: Tensor, key: Key) -> MCDropoutState:
        theta = theta.clone()
        return MCDropoutState(theta, self.optimizer.init(theta), joint.starting_buffers(theta), 0, None)

    def step(self, joint: Problem, state: MCDropoutState, batch: Batch, key: Key) -> tuple[MCDropoutState, Info]:
        joint = joint.as_joint("MCDropout")
        theta, rates = state.theta, learnt_rates(joint)
        inputs = batch.member(0).inputs
        example = map_inputs(lambda t: torch.zeros_like(t[:1]), inputs) if state.example is None else state.example
        known = dropout_sites(joint.network, inputs)
        relaxed = self.temperature if rates else None
        masks = KeyedMasks(key.fold("masks"), known.sites, shared=self.one_mask_a_batch, relaxed=relaxed)
        with joint.network.dropping(masks, training=known.training):
            if rates:
                value, grad, buffers = joint.data_value_and_grad(theta, batch, state.buffers)
                prior, prior_grad = prior_value_and_grad(joint, theta, rates)
                value, grad = value + prior, grad.add_(prior_grad)
            else:
                value, grad, buffers = joint.value_and_grad(theta, batch, state.buffers)
        info = {f"rate.{rate.name}": torch.sigmoid(theta[..., rate.logit.offset]) for rate in rates}
        moments = self._ascended(joint, theta, grad, state)
        after = MCDropoutState(theta, moments, buffers, state.step + 1, example)
        return after, {"loss": -value / joint.num_data, **info}

    def posterior(self, joint: Problem, kept: Sequence[MCDropoutState]) -> Dropout:
        joint = joint.as_joint("MCDropout")
        last = kept[-1]
        theta = last.theta.detach().clone()
        weights, example = theta[..., : joint.num_weights], last.example
        if example is not None:
            example = map_inputs(lambda tensor: tensor.to(joint.device), example)
        return Dropout(joint.fitted(theta), weights, last.buffers, self.one_mask_a_draw, example)
