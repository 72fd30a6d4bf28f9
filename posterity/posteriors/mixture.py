"""Mixtures of posteriors, and the joint of members that differ in prior and noise."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from posterity.errors import shown
from posterity.likelihoods.likelihood import Likelihood
from posterity.likelihoods.scaled import Scaled
from posterity.model.batch import Inputs
from posterity.model.joint import Joint
from posterity.model.network import Buffers, Network
from posterity.numerics.brief import brief
from posterity.numerics.random import Key
from posterity.posteriors.calibrated import Calibrated
from posterity.posteriors.functions import Evaluation, of_parts
from posterity.posteriors.point import Point, problem_of
from posterity.posteriors.posterior import Posterior, Prediction, WeightPart
from posterity.posteriors.standalone import Mixed
from posterity.predictive import Predictive, mixed
from posterity.predictive.mixture import checked_weights
from posterity.priors.normal import Normal
from posterity.priors.prior import Prior
from posterity.storage import Part
from posterity.storage.part import JSON


def joint_of_members(joint: Joint, each: Sequence[Joint]) -> Joint:
    """Combine the members' joints into one with a noise scale and a normal prior's mean and scale for each member.

    Any other difference is dropped: the prior then comes from `joint`, the likelihood from the first member.
    """
    plain, likelihood = joint.network.initial.double(), each[0].likelihood
    noises = [component.likelihood for component in each if isinstance(component.likelihood, Scaled)]
    if len(noises) == len(each):
        likelihood = _noise_of_members(noises, plain)
    priors = [component.bound_prior for component in each if isinstance(component.bound_prior, Normal)]
    prior: Prior = joint.prior
    if len(priors) == len(each):
        scale = torch.stack([component.variance(plain).sqrt() for component in priors])
        mean = torch.stack([torch.as_tensor(component.mean).to(plain).expand(len(plain)) for component in priors])
        if bool((scale == scale[:, :1]).all()) and bool((mean == mean[0, 0]).all()):
            prior = Normal(scale[:, 0].clone(), float(mean[0, 0]), priors[0].chosen)
        else:
            prior = Normal(scale, mean, priors[0].chosen)
    return dataclasses.replace(joint, prior=prior, likelihood=likelihood)


def _noise_of_members(noises: Sequence[Scaled], like: Tensor) -> Likelihood:
    """The noise with one scale for each member; the first member's where they differ in more than scales."""
    if all(noise == noises[0] for noise in noises) or len({type(noise) for noise in noises}) > 1:
        return noises[0]
    learning = [type(noise)(**{**noise.__getstate__(), "learn": True}) for noise in noises]
    raw = [noise.free(like) for noise in learning]
    return learning[0].fixed(torch.stack(raw)) if len({len(each) for each in raw}) == 1 else noises[0]


@dataclass(frozen=True, eq=False, repr=False)
class Mixture(Posterior):
    """The mixture of posteriors of the same weights: an ensemble.

    **Math**: q(w) = sum_k w_k q_k(w), k over `posteriors`, with `weights` (K,) that are positive and sum to 1 (None:
    equal). The predictive is the mixture sum_k w_k p_k(y | x) of the components' own predictives: closed forms stay
    closed, and `draws` are divided among the components in proportion to their weights. Without `draws`, components
    that are chains use all of theirs, and the others divide 100.

    **Limit**: exact given its components. Each predicts by its own likelihood, whose noise may differ; a point has no
    density, so `log_density` is for mixtures of Gaussians. Draws of weights are stratified: each component has its
    share of them, up to one draw.

    **Cost**: the sum over components.

    **References**: Lakshminarayanan et al. (2017); Wilson and Izmailov (2020), Bayesian deep learning and a
    probabilistic perspective of generalization, section 4.

    **Example**:

    >>> from posterity.likelihoods import Gaussian
    >>> from posterity.priors import Normal
    >>> joint = Joint(torch.nn.Linear(1, 1, bias=False), Gaussian(scale=1.0), Normal(), num_data=1)
    >>> q = Mixture([Point(joint, torch.tensor([-2.0])), Point(joint, torch.tensor([2.0]))])
    >>> pred = q.predict(torch.ones(1, 1))
    >>> pred.mean.item(), pred.epistemic.item()
    (0.0, 4.0)
    """

    posteriors: Sequence[Posterior]
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        given = list(self.posteriors)
        for component in given:
            if not isinstance(component, Posterior):
                raise TypeError(f"Mixture.posteriors must be a list of posteriors. Got {shown(component)} in it.")
            if isinstance(component, Calibrated):
                raise TypeError("Mixture.posteriors must not be calibrated: calibrate the mixture, by Calibrated.fit.")
        shares = checked_weights("Mixture.weights", self.weights, len(given)).tolist()
        flat = [pair for component, share in zip(given, shares, strict=True) for pair in _expanded(component, share)]
        object.__setattr__(self, "posteriors", tuple(component for component, _ in flat))
        object.__setattr__(self, "weights", torch.tensor([share for _, share in flat], dtype=torch.float64))
        joints = [component.joint for component in self.posteriors]
        layouts = [joint.network.layout if isinstance(joint, Joint) else joint.layout for joint in joints]
        if len(set(zip(map(type, joints), layouts, strict=True))) > 1:
            raise ValueError(
                "Mixture.posteriors must be over the same weights of the same problem. Got weights of different names "
                "or shapes. Fit the same network, with the same weights frozen."
            )

    @classmethod
    def of(
        cls,
        modules: Sequence[nn.Module | Network],
        likelihood: Likelihood,
        *,
        prior: Prior | None = None,
        num_data: int = 1,
        weights: Tensor | None = None,
    ) -> "Mixture":
        """Return the ensemble of modules of one architecture that were trained elsewhere, each with its own buffers.

        Predictions need neither the prior nor the number of rows.

        >>> from posterity.likelihoods import Categorical
        >>> q = Mixture.of([torch.nn.Linear(2, 3) for _ in range(5)], Categorical())
        >>> q.predict(torch.zeros(4, 2)).epistemic.shape
        torch.Size([4])
        """
        networks = [module if isinstance(module, Network) else Network(module) for module in modules]
        for index, other in enumerate(networks):
            first = networks[0]
            if (other.layout, other.description, other.dtype) != (first.layout, first.description, first.dtype):
                raise ValueError(
                    f"Mixture.of: the modules must have one architecture and dtype. Got another in number {index}. Mix "
                    "predictions of different networks by predictive.mixed([q.predict(x), ...])."
                )
        joints = [  # one private module serves all
            problem_of(
                "Mixture.of",
                networks[0].replace(initial=n.initial.to(networks[0].device), frozen=n.frozen, buffers=n.buffers),
                likelihood,
                prior,
                num_data,
            )
            for n in networks
        ]
        thetas = [joint.network.initial.clone() for joint in joints]
        points = [Point(j, theta, j.starting_buffers(theta)) for j, theta in zip(joints, thetas, strict=True)]
        return cls(points, weights)

    def start(self) -> "Mixture":
        networks = [c.joint.network for c in self.posteriors if isinstance(c.joint, Joint)]
        fixed = [{**n.frozen, **{name: b for name, b in n.buffers.items() if name not in n.running}} for n in networks]
        differs = [name for other in fixed for name, value in other.items() if not _same(fixed[0].get(name), value)]
        if differs:
            raise ValueError(
                f"start: '{differs[0]}', which is no part of theta, differs between the components of the mixture. "
                "Start one run from each: q.posteriors[0], ..."
            )
        return self

    def lines(self) -> list[str]:
        kinds = Counter(type(component).__name__ for component in self.posteriors)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return [*super().lines(), f"components: {listed}, of weight {brief(self.shares)}"]

    @property
    def shares(self) -> Tensor:
        """The weights of the components, (K,) in float64 on the CPU."""
        return checked_weights("Mixture.weights", self.weights, len(self.posteriors))

    @cached_property
    def joint(self) -> "Joint":  # type: ignore[override]  # never written: the class is frozen
        """The joint that the components share, with one noise and prior for each component where they differ."""
        joints = [component.joint for component in self.posteriors]
        networks = [joint for joint in joints if isinstance(joint, Joint)]
        first = joints[0]
        same = all(j.likelihood == networks[0].likelihood and j.prior == networks[0].prior for j in networks)
        if isinstance(first, Joint) and not same:
            return joint_of_members(first, networks)
        return first  # type: ignore[return-value]  # or a Density

    @cached_property
    def buffers(self) -> Buffers:  # type: ignore[override]
        each = [component.buffers for component in self.posteriors]
        return {name: torch.stack([buffers[name] for buffers in each]) for name in each[0]}

    def weight_parts(self) -> Iterator[WeightPart]:
        for component, share in zip(self.posteriors, self.shares.tolist(), strict=True):
            for part in component.weight_parts():
                yield part._replace(share=share * part.share)

    def point(self) -> Tensor:
        return torch.stack([component.point() for component in self.posteriors])

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        key = key or Key(0)
        parts = [
            component.sample(count, key.fold(index))
            for index, (component, count) in enumerate(zip(self.posteriors, self._counts(draws, key), strict=True))
            if count
        ]
        order = key.fold("order").permutation(draws, "cpu")
        return torch.cat(parts)[order.to(parts[0].device)]

    def log_density(self, theta: Tensor) -> Tensor:
        each = torch.stack([component.log_density(theta) for component in self.posteriors])
        return (each + self.shares.log().to(each).unsqueeze(-1)).logsumexp(0)

    def drawn_functions(self, draws: int, key: Key) -> Evaluation:
        """Functions of the components, as many of each as `sample` draws, in its order."""
        counts = self._counts(draws, key)
        parts = [
            (component.drawn_functions(count, key.fold(index)), count)
            for index, (component, count) in enumerate(zip(self.posteriors, counts, strict=True))
            if count
        ]
        return of_parts(parts, key.fold("order").permutation(draws, "cpu"))

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """Draws of all components in their order, (S, N, *event)."""
        parts = []
        for index, count in enumerate(self._counts(draws, key)):
            if count:
                drawn = self.posteriors[index].outputs(inputs, count, key.fold(index))
                # A point returns one draw, and chains no more than they have, whatever the count.
                parts.append(drawn if len(drawn) == count else drawn[torch.arange(count) % len(drawn)])
        return torch.cat(parts)

    def output_moments(
        self, inputs: Inputs, *, marginal: bool = False, memory_budget: int | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Mean and covariance of the mixture of outputs, which is not Gaussian; None where a component has none."""
        known: list[tuple[Tensor, Tensor]] = []
        for component in self.posteriors:
            moments = component.output_moments(inputs, marginal=marginal, memory_budget=memory_budget)
            if isinstance(component, Point):  # no spread
                mean = component.outputs(inputs, 1, Key(0))[0]
                size = mean[0].numel()
                moments = mean, mean.new_zeros((len(mean), size) if marginal else (len(mean), size, size))
            if moments is None:
                return None
            known.append(moments)
        means = torch.stack([mean for mean, _ in known])  # (K, N, *event)
        shares = self.shares.to(means)
        mean = torch.einsum("k,k...->...", shares, means)
        away = (means - mean).flatten(2) if means.dim() > 2 else (means - mean).unsqueeze(-1)  # (K, N, D)
        between = away.square() if marginal else away.unsqueeze(-1) * away.unsqueeze(-2)
        spread = torch.stack([spread for _, spread in known]) + between
        return mean, torch.einsum("k,k...->...", shares, spread)

    @property
    def by_draws(self) -> bool:
        return all(component.by_draws for component in self.posteriors)

    def standalone(self, draws: int | None, share: float, key: Key) -> nn.Module:
        each = enumerate(zip(self.posteriors, self.shares.tolist(), strict=True))
        parts = [component.standalone(draws, share * own, key.fold(index)) for index, (component, own) in each]
        return Mixed(parts, self.shares)

    def _predicted(self, inputs: object, wanted: Prediction) -> Predictive:
        """Mix the components' predictives, each of its share of the draws and of the memory for them."""
        parts = []
        for index, (component, share) in enumerate(zip(self.posteriors, self.shares.tolist(), strict=True)):
            memory = wanted.kept_bytes // len(self.posteriors)
            own = wanted._replace(share=wanted.share * share, key=wanted.key.fold(index), kept_bytes=memory)
            parts.append(component._predicted(inputs, own))
        return mixed(parts, self.shares)

    def parts(self) -> dict[str, Part]:
        """Return the components as one part; a tensor equal to the first component's is stored once, and named."""
        tensors: dict[str, Tensor] = {"weights": self.shares}
        each = [component.parts()["posterior"] for component in self.posteriors]
        first = each[0].tensors
        configs: list[JSON] = []
        for index, part in enumerate(each):
            shared = [name for name, tensor in part.tensors.items() if index and _same(first.get(name), tensor)]
            tensors.update({f"{index}.{name}": tensor for name, tensor in part.tensors.items() if name not in shared})
            configs.append({**part.config, "shared": [*sorted(shared)]})
        return {"posterior": Part({"mixture": configs}, tensors)}

    def _counts(self, draws: int, key: Key) -> list[int]:
        """The number of draws of each component: its share, rounded at random without bias."""
        start = float(key.fold("share").uniform((), torch.float64, "cpu"))
        ends = (self.shares.cumsum(0) * draws + start).floor()
        ends[-1] = draws  # already so, up to rounding, as the start is below 1
        return [int(count) for count in ends.diff(prepend=ends.new_zeros(1))]


def _same(first: Tensor | None, other: Tensor) -> bool:
    if first is other:
        return True
    return first is not None and (first.shape, first.dtype) == (other.shape, other.dtype) and torch.equal(first, other)


def _expanded(posterior: Posterior, share: float) -> list[tuple[Posterior, float]]:
    """Split a mixture into components and a posterior with members into these, each with its weight."""
    if isinstance(posterior, Mixture):
        inner = zip(posterior.posteriors, posterior.shares.tolist(), strict=True)
        return [(component, share * part) for component, part in inner]
    count = posterior.num_members
    return [(posterior, share)] if count is None else [(posterior.member(i), share / count) for i in range(count)]
