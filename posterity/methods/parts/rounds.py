"""Rounds of variational EM: the bound at a posterior, and the problem after the M-steps."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posterity.errors import BoundFell, shown
from posterity.evidence.elbo import Elbo, assembled, exact_kl, in_blocks
from posterity.evidence.m_steps import Expected, Maximisation
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.likelihoods.scaled import Scaled
from posterity.methods.coordinate_ascent import fell
from posterity.model.joint import Joint
from posterity.model.scales import random_log_prior
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Linearized, Posterior, Samples

E_STEP = "E-step"


@dataclass(frozen=True)
class PlainStep(Maximisation):
    """A function of (joint, posterior) that gives a joint, as an M-step."""

    function: Callable[[Joint, Posterior], Joint]

    def __repr__(self) -> str:
        text = repr(self.function)
        if " at 0x" not in text:  # a value with settings, which identify a stored run
            return text
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{getattr(self.function, '__module__', '')}.{name}"  # without its address in memory

    def __call__(self, joint: Joint, posterior: Posterior, expected: Expected | None) -> Joint:
        return self.function(joint, posterior)


def m_steps(given: object) -> tuple[Maximisation, ...]:
    """Convert one or several M-steps or functions; raises an error for anything else, or for two of a kind."""
    steps: tuple[Any, ...] = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not steps or not all(callable(step) and not isinstance(step, type) for step in steps):
        raise TypeError(
            "VariationalEM.maximisation must be M-steps, such as (PriorScale(), NoiseScale()), or functions of "
            f"(joint, posterior) that give a Joint. Got {shown(given)}."
        )
    converted = tuple(step if isinstance(step, Maximisation) else PlainStep(step) for step in steps)
    kinds: dict[type, Maximisation] = {}
    for step in converted:
        if type(step) in kinds and not isinstance(step, PlainStep):  # the bound would have both hyper-priors
            raise ValueError(
                f"VariationalEM.maximisation must have one M-step of a kind. Got {shown(kinds[type(step)])} and "
                f"{shown(step)}. Leave one out."
            )
        kinds[type(step)] = step
    return converted


@dataclass(frozen=True, eq=False)
class Round:
    """Round `number`: the problem, its posterior, and the expectations over all rows at draws of the key."""

    steps: tuple[Maximisation, ...]
    joint: Joint
    posterior: Posterior
    expected: Expected
    key: Key
    number: int

    def bounds(self) -> dict[str, Tensor]:
        """Trace entries of the bound."""
        fits, q = self.expected.log_likelihood, self.posterior
        terms, info = self._terms(self.joint), {"expected_log_likelihood": fits.mean()}
        if isinstance(q, Linearized):
            assert q.log_evidence is not None
            return {**info, "bound": q.log_evidence + terms}
        if isinstance(q, Gaussian):
            with torch.no_grad():  # log q(w_s) - log p(w_s) at the draws of the pass, (S,)
                blocks = in_blocks(q.sample, len(fits), self.joint.num_weights, self.key)
                ratios = torch.cat([q.log_density(w) - random_log_prior(q.joint, w.to(torch.float64)) for w in blocks])
                bound = assembled(q, None, exact_kl(q), [fits, ratios])
            error = fits.new_tensor(bound.bound_standard_error)
            return {**info, "bound": fits.new_tensor(bound.bound) + terms, "bound_standard_error": error}
        tempering = self.joint.tempering
        thetas = q.theta.flatten(0, 1) if isinstance(q, Samples) else q.sample(1, self.key)
        log_prior = q.joint.log_prior(thetas.to(q.joint.device, torch.float64)).mean()
        log_joint = float(tempering.likelihood_power) * fits.mean() + float(tempering.prior_power) * log_prior
        return {**info, "expected_log_joint": log_joint + terms}

    def moved(self, *, exact: bool) -> Joint:
        """The problem after the M-steps; if `exact`, raises an error where one lowers the bound."""
        joint = self.joint
        for step in self.steps:
            new = _checked(step, step(joint, self.posterior, self.expected), joint)
            if exact and step.climbs:
                refuse_fall(self.joint, f"M-step {shown(step)}", self.number, self.exact(joint), self.exact(new))
            joint = new
        return joint

    def exact(self, joint: Joint) -> Tensor | None:
        """Bound of the posterior under the hyper-parameters of `joint`; None without Gaussian noise and an exact KL."""
        q, squares = self.posterior, self.expected.squares
        assert isinstance(q, Linearized)
        if not isinstance(joint.likelihood, GaussianNoise):
            return None
        gaussian = dataclasses.replace(q.gaussian, joint=joint)
        kl = exact_kl(gaussian)
        if kl is None:
            return None
        noise = joint.likelihood.variance(torch.zeros_like(squares).unsqueeze(0)).squeeze(0)  # (E,)
        each = squares / noise + self.expected.count * (2.0 * math.pi * noise).log()
        bound = Elbo(float(-0.5 * each.sum()), kl, float(gaussian.entropy), joint.num_data, joint.tempering)
        return squares.new_tensor(bound.bound) + self._terms(joint)

    def _terms(self, joint: Joint) -> float:
        """Terms of the bound from hyper-priors."""
        return sum(step.bound_terms(joint, self.posterior, self.expected) for step in self.steps)


def refuse_fall(joint: Joint, step: str, number: int, before: Tensor | None, after: Tensor | None) -> None:
    """Raise `BoundFell` if the bound is lower after a step, by more than the rounding of the problem's dtype."""
    if before is None or after is None or not bool(fell(before.to(joint.dtype), after.to(joint.dtype))):
        return
    remedy = "It must give the maximum of the expected log joint in its hyper-parameters."
    if step == E_STEP:  # one of the library, in closed form
        scale = shown(getattr(joint.likelihood, "scale", None))
        remedy = (
            f"Noise of scale {scale} may be too small for {joint.dtype}: does the network know the targets exactly? "
            "Use NoiseScale(hyper_prior=Gamma(shape, rate)), or standardised data in float64."
        )
    raise BoundFell(
        f"The {step} of round {number} lowered the bound from {float(before):.12g} to {float(after):.12g}, which an "
        f"exact one cannot. {remedy}"
    )


def scales(joint: Joint, posterior: Posterior) -> dict[str, Tensor]:
    """Trace entries of hyper-parameters: standard deviations of each tensor under the prior (T,), and of the noise."""
    variance = joint.bound_prior.variance(torch.zeros_like(joint.network.initial, dtype=torch.float64))
    logs = torch.split(variance.reshape(-1).log(), [part.size for part in joint.network.layout])
    prior_scale = torch.stack([(0.5 * each.mean()).exp() for each in logs])
    info = {"prior_scale": prior_scale} if bool(torch.isfinite(prior_scale).all()) else {}  # none under heavy tails
    fitted = posterior.joint if joint.likelihood.num_free else joint
    if isinstance(fitted, Joint) and isinstance(fitted.likelihood, Scaled) and not fitted.likelihood.learn:
        info["noise_scale"] = torch.as_tensor(fitted.likelihood.scale, dtype=torch.float64).cpu()
    return info


def _checked(step: Maximisation, new: object, joint: Joint) -> Joint:
    """Check that the problem of an M-step differs from the one before in prior and likelihood alone."""
    if not isinstance(new, Joint):
        raise TypeError(
            f"VariationalEM.maximisation: {shown(step)} must give a Joint. Got {shown(new)}. "
            "Use dataclasses.replace(joint, prior=...)."
        )
    same = new.num_data == joint.num_data and new.tempering == joint.tempering
    before, after = (
        torch.arange(each.num_weights, device="cpu") if each.random_indices is None else each.random_indices.cpu()
        for each in (joint, new)
    )
    if not same or not torch.equal(before, after) or new.network.layout != joint.network.layout or new.num_members:
        raise ValueError(
            f"VariationalEM.maximisation: {shown(step)} may change prior and likelihood of the Joint, and nothing "
            "else. Use dataclasses.replace(joint, prior=...) of the one that it is given."
        )
    if new.likelihood.num_free != joint.likelihood.num_free:
        raise ValueError(
            f"VariationalEM.maximisation: {shown(step)} must leave what the likelihood learns. Got "
            f"{shown(new.likelihood)} for {shown(joint.likelihood)}. Make the Joint with learn=False."
        )
    return new
