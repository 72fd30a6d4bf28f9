"""A round of variational EM: the bound at its posterior, and the problem after its M-steps."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import BoundFell, shown
from posterity.evidence.elbo import Elbo, assembled, exact_kl, in_blocks
from posterity.evidence.m_steps import Expected, Maximisation
from posterity.likelihoods import Gaussian as GaussianNoise
from posterity.likelihoods.scaled import Scaled
from posterity.methods.coordinate_ascent import fell
from posterity.model.joint import Joint
from posterity.numerics.random import Key
from posterity.posteriors import Gaussian, Linearized, Posterior, Samples

E_STEP = "E-step"


@dataclass(frozen=True)
class PlainStep(Maximisation):
    """A function of (joint, posterior) that gives a joint, as an M-step."""

    function: Callable[[Joint, Posterior], Joint]

    def __repr__(self) -> str:
        text = repr(self.function)
        if " at 0x" not in text:  # a value with settings of its own, by which a stored run is known
            return text
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{getattr(self.function, '__module__', '')}.{name}"  # without its place in memory

    def __call__(self, joint: Joint, posterior: Posterior, expected: Expected | None) -> Joint:
        return self.function(joint, posterior)


def m_steps(given: object) -> tuple[Maximisation, ...]:
    """One M-step or several, functions among them; a refusal where something else is, or two move the same."""
    steps = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not steps or not all(callable(step) and not isinstance(step, type) for step in steps):
        raise TypeError(
            "VariationalEM.maximisation must be M-steps, such as (PriorScale(), NoiseScale()), or functions of "
            f"(joint, posterior) that give a Joint. Got {shown(given)}."
        )
    found = tuple(step if isinstance(step, Maximisation) else PlainStep(step) for step in steps)
    for place, step in enumerate(found):
        twice = [other for other in found[:place] if type(other) is type(step) and not isinstance(step, PlainStep)]
        if twice:  # each would overwrite the other, and a bound would have the terms of both hyper-priors
            raise ValueError(
                f"VariationalEM.maximisation must have one M-step of a kind. Got {shown(twice[0])} and {shown(step)}. "
                "Leave one out."
            )
    return found


@dataclass(frozen=True, eq=False)
class Round:
    """The `number`-th round: the problem, its posterior, and what that expects of all rows, by draws of the key."""

    steps: tuple[Maximisation, ...]
    joint: Joint
    posterior: Posterior
    expected: Expected
    key: Key
    number: int

    def bounds(self) -> dict[str, Tensor]:
        """What is known of the bound, under the names of the trace."""
        fits, q = self.expected.log_likelihood, self.posterior
        terms, found = self._terms(self.joint), {"expected_log_likelihood": fits.mean()}
        if isinstance(q, Linearized):
            assert q.log_evidence is not None
            return {**found, "bound": q.log_evidence + terms}
        if isinstance(q, Gaussian):
            with torch.no_grad():
                bound = assembled(q, None, exact_kl(q), [fits, self._ratios(q)])
            error = fits.new_tensor(bound.bound_standard_error)
            return {**found, "bound": fits.new_tensor(bound.bound) + terms, "bound_standard_error": error}
        likelihood_power, prior_power = self._powers
        thetas = q.theta.flatten(0, 1) if isinstance(q, Samples) else q.sample(1, self.key)
        log_prior = q.joint.log_prior(thetas.to(q.joint.device, torch.float64)).mean()
        return {**found, "expected_log_joint": likelihood_power * fits.mean() + prior_power * log_prior + terms}

    def moved(self, *, exact: bool) -> Joint:
        """The problem after the M-steps; if these are exact, an error where one lowers the bound."""
        joint = self.joint
        for step in self.steps:
            new = _checked(step, step(joint, self.posterior, self.expected), joint)
            if exact and step.climbs:
                refuse_fall(self.joint, f"M-step {shown(step)}", self.number, self.exact(joint), self.exact(new))
            joint = new
        return joint

    def exact(self, joint: Joint) -> Tensor | None:
        """The bound of the posterior under other hyper-parameters, for Gaussian noise: one formula for all of them."""
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
        """What hyper-priors add."""
        return sum(step.bound_terms(joint, self.posterior, self.expected) for step in self.steps)

    def _ratios(self, q: Gaussian) -> Tensor:
        """log q(w_s) - log p(w_s) at the draws of the pass, (S,)."""
        draws = len(self.expected.log_likelihood)
        blocks = in_blocks(q.sample, draws, self.joint.num_weights, self.key)
        return torch.cat([q.log_density(some) - q.joint.log_prior(some.to(torch.float64)) for some in blocks])

    @property
    def _powers(self) -> tuple[float, float]:
        return float(self.joint.tempering.likelihood_power), float(self.joint.tempering.prior_power)


def refuse_fall(joint: Joint, step: str, number: int, before: Tensor | None, after: Tensor | None) -> None:
    """Raise `BoundFell` if the bound is lower after a step, by more than the rounding of the problem's number type."""
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
    """Hyper-parameters for the trace: standard deviations of each tensor under the prior (T,), and of the noise."""
    variance = joint.bound_prior.variance(torch.zeros_like(joint.network.initial, dtype=torch.float64))
    logs = torch.split(variance.reshape(-1).log(), [part.size for part in joint.network.layout])
    found = {"prior_scale": torch.stack([(0.5 * each.mean()).exp() for each in logs])}
    if not bool(torch.isfinite(found["prior_scale"]).all()):  # there is none under heavy tails
        found = {}
    fitted = posterior.joint if joint.likelihood.num_free else joint
    if isinstance(fitted, Joint) and isinstance(fitted.likelihood, Scaled) and not fitted.likelihood.learn:
        found["noise_scale"] = torch.as_tensor(fitted.likelihood.scale, dtype=torch.float64).cpu()
    return found


def _checked(step: Maximisation, new: object, joint: Joint) -> Joint:
    """The problem that an M-step gave, if it differs from the one before in prior and likelihood alone."""
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
