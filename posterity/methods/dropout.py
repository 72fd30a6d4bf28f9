"""Monte Carlo dropout, with rates fixed or learnt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from posterity.errors import check_batch_size, of_kinds, positive, positive_whole
from posterity.inference.memory import fit_bytes
from posterity.inference.method import Footprint, GradientFit, Info, Traits
from posterity.methods.parts.gradient_runs import SETTLED_LATER, risen, usual_rate, usual_steps
from posterity.methods.parts.scales import by_evidence
from posterity.methods.parts.width_cost import measured_width_cost
from posterity.model import Batch, Buffers, Data, Joint, Problem
from posterity.model.backward import row_log_likelihoods
from posterity.model.batch import map_inputs
from posterity.model.dropout_sites import calls_of, dropout_sites
from posterity.numerics.dropout import Flips, KeyedMasks
from posterity.numerics.layout import Slice
from posterity.numerics.random import Key
from posterity.optim import Adam, Cosine, Optimizer, Schedule
from posterity.posteriors.dropout import Dropout
from posterity.priors.normal import Normal
from posterity.special.functions import binary_entropy

if TYPE_CHECKING:
    from posterity.inference.run import Trace


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
            moved.narrow(-1, rate.logit.offset, 1).zero_()  # an assigned number would be copied from the CPU
            entropy = entropy + rate.units * binary_entropy(logit.squeeze(-1))
        value = joint.bound_prior.log_prob(moved)
        for rate in rates:  # the log density of a logit at 0, which is no part of a flat prior
            value = value + 0.5 * torch.log(2.0 * math.pi * variance[..., rate.logit.offset])
        value = joint.powers[1] * (value + joint.likelihood.free_log_prior(raw)) + entropy
        grad = torch.autograd.grad(value.sum(), leaf)[0]
    return value.detach(), grad


def row_values(joint: Joint, theta: Tensor, batch: Batch, buffers: Buffers) -> Tensor:
    """Tempered log-likelihood of each row, (..., n), times num_data / n; batch norm trains. It has no gradient."""
    weights, raw = joint.split(theta.detach())
    views, own = joint.network.views(weights), batch.per_member
    with torch.no_grad():
        outputs, _ = joint.network.run(
            views, batch.inputs, buffers, members=theta.dim() > 1, per_member=own, train=True
        )
        power = joint.powers[0].unsqueeze(-1) if isinstance(joint.powers[0], Tensor) else joint.powers[0]
        return row_log_likelihoods(joint.likelihood, raw, outputs, batch) * (power * (joint.num_data / batch.size))


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
    datum, and the learnt rates. The derivative of the expectation E in a rate p has two parts, that of f at given
    masks and sum_k E[l(unit k dropped) - l(unit k kept)], l = log p(D | f); the latter is estimated without bias by
    another pass in which one unit, drawn at random for each row, has the opposite mask. Steps in the logit of p follow
    the gradient in p (a natural gradient up to the constant K). With a `temperature` the masks
    of learnt rates are relaxed instead (`ConcreteDropout`), which is biased.

    **Defaults**: `steps` for 100 passes over the data, at least 3,000 and at most 20,000; Adam with step size
    1 / sqrt(number of weights), at most 0.03, falling to 0 along a cosine.

    **Masks**: while training every row has its own, or with `one_mask_a_batch` all rows of a batch have one; members
    have the same ones. A draw of a prediction has one mask for all rows, so that it is a function, or with
    `one_mask_a_draw=False` one for each. Batch norm uses batch statistics while training, running ones in predictions.

    **Limit**: q is as wide as the rates say, whatever the number of data, unless they are learnt; the KL is exact for
    weights far from zero only (`evidence.dropout_divergence`). Batch norm ties the rows of a batch, so that learnt
    rates before it have a bias.

    **Cost**: the cost of MAP and of the random numbers, for learnt rates with a forward pass more and one for each
    rate; predictions take a forward pass for each draw.

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

    steps: int = SETTLED_LATER  # pyright: ignore[reportIncompatibleVariableOverride]
    batch_size: int | None = 128  # pyright: ignore[reportIncompatibleVariableOverride]
    optimizer: Optimizer = SETTLED_LATER  # pyright: ignore[reportIncompatibleVariableOverride]
    schedule: Schedule = SETTLED_LATER  # pyright: ignore[reportIncompatibleVariableOverride]
    one_mask_a_batch: bool = False
    one_mask_a_draw: bool = True
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            trained = "(a trained module needs none: posteriors.Dropout.of(module, likelihood))"
            positive_whole("MCDropout.steps", self.steps, trained)
        check_batch_size("MCDropout.batch_size", self.batch_size)
        kinds = {"optimizer": Optimizer, "schedule": Schedule}
        of_kinds(self, **{name: kind for name, kind in kinds.items() if getattr(self, name) is not None})
        if self.temperature is not None:
            positive("MCDropout.temperature", self.temperature, "or None")
        of_kinds(self, one_mask_a_batch=bool, one_mask_a_draw=bool)

    def with_scales(self, joint: Joint, data: Data, start: Joint | None, key: Key) -> Joint:
        return by_evidence(joint, data, start, key)

    def settled(self, joint: Problem, data: Data) -> "MCDropout":
        usual: dict[str, Any] = {
            "steps": usual_steps(data.num_data, self.batch_size),
            "optimizer": Adam(usual_rate(joint), beta2=0.95),
            "schedule": Cosine(),
        }
        return replace(self, **{name: value for name, value in usual.items() if getattr(self, name) is None})

    def doubts(self, joint: Problem, trace: "Trace") -> Sequence[str]:
        return risen("MCDropout", trace)

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

    @property
    def traits(self) -> Traits:
        return Traits(recordable=True, passes=("bf16",))  # masks are drawn for the rows of a whole batch

    def init(self, joint: Problem, theta: Tensor, key: Key) -> MCDropoutState:
        theta = theta.clone()
        return MCDropoutState(theta, self.optimizer.init(theta), joint.starting_buffers(theta), 0, None)

    def step(self, joint: Problem, state: MCDropoutState, batch: Batch, key: Key) -> tuple[MCDropoutState, Info]:
        joint = joint.as_joint("MCDropout")
        theta, rates = state.theta, learnt_rates(joint)
        inputs = batch.member(0).inputs
        example = map_inputs(lambda t: torch.zeros_like(t[:1]), inputs) if state.example is None else state.example
        known, own = dropout_sites(joint.network, inputs), key.fold("masks")
        relaxed = self.temperature if rates else None
        masks = KeyedMasks(own, known.sites, shared=self.one_mask_a_batch, relaxed=relaxed)
        with joint.network.dropping(masks, training=known.training):
            if rates:
                value, grad, buffers = joint.data_value_and_grad(theta, batch, state.buffers)
                prior, prior_grad = prior_value_and_grad(joint, theta, rates)
                value, grad = value + prior, grad.add_(prior_grad)
            else:
                value, grad, buffers = joint.value_and_grad(theta, batch, state.buffers)
        if rates and self.temperature is None:
            self._add_score(joint, state, batch, own, grad)
        info = {f"rate.{rate.name}": torch.sigmoid(theta[..., rate.logit.offset]) for rate in rates}
        moments = self._ascended(joint, theta, grad, state)
        after = MCDropoutState(theta, moments, buffers, state.step + 1, example)
        return after, {"loss": -value / joint.num_data, **info}

    def _add_score(self, joint: Joint, state: MCDropoutState, batch: Batch, key: Key, grad: Tensor) -> None:
        """Turn the gradient in each logit at given masks into that of the expectation in its rate; see the class."""
        inputs, rates = batch.member(0).inputs, learnt_rates(joint)
        sites = dropout_sites(joint.network, inputs)

        def values(call: int | None) -> tuple[Tensor, Flips | None]:
            masks = KeyedMasks(key, sites.sites, shared=self.one_mask_a_batch, flipped=call)
            with joint.network.dropping(masks, training=sites.training):
                return row_values(joint, state.theta, batch, state.buffers), masks.flips

        plain, _ = values(None)
        for rate, calls in zip(
            rates, calls_of(joint.network, inputs, tuple(r.logit.offset for r in rates)), strict=True
        ):
            p = torch.sigmoid(state.theta[..., rate.logit.offset]).unsqueeze(-1)
            score = torch.zeros_like(p).squeeze(-1)
            for call in calls:
                changed, flips = values(call)
                assert flips is not None
                more = changed - plain
                if len(flips.numbers) == 1:  # one unit for all rows
                    more = more.sum(-1, keepdim=True)
                kept = flips.numbers >= p  # then the flip has dropped it
                score = score + flips.units * torch.where(kept, more, -more).sum(-1)
            # The gradient in p: of the order of its own noise at all rates, where that in the logit vanishes with p.
            slope = (p * (1.0 - p)).squeeze(-1)
            grad[..., rate.logit.offset] = grad[..., rate.logit.offset] / slope + score

    def closing(self, joint: Problem, state: MCDropoutState, data: Data) -> Info:
        """Record "width_cost", the nats a row by which draws predict worse than all units together."""
        seen = self.steps * min(data.num_data, self.batch_size or data.num_data)
        remedy = "Use smaller rates of dropout, or learn them: networks.ConcreteDropout."
        posterior = partial(self.posterior, joint, [state])
        return measured_width_cost("MCDropout", joint, posterior, data, seen, remedy)

    def posterior(self, joint: Problem, kept: Sequence[MCDropoutState]) -> Dropout:
        joint = joint.as_joint("MCDropout")
        last = kept[-1]
        theta = last.theta.detach().clone()
        weights, example = theta[..., : joint.num_weights], last.example
        if example is not None:
            example = map_inputs(lambda tensor: tensor.to(joint.device), example)
        return Dropout(joint.fitted(theta), weights, last.buffers, self.one_mask_a_draw, example)
