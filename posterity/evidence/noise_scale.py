"""The observation noise that fits what a posterior expects of the residuals: an M-step of variational EM."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posterity.errors import of_kinds, shown
from posterity.evidence.gamma import Gamma
from posterity.evidence.maximisation import Expected, Maximisation
from posterity.likelihoods import Gaussian
from posterity.model.joint import Joint
from posterity.posteriors.posterior import Posterior


@dataclass(frozen=True)
class NoiseScale(Maximisation):
    """The scale of Gaussian noise from the expected squares of the residuals, in closed form.

    **Math**: 1 / scale^2 = sum_n w_n D / sum_n w_n E_q |y_n - f(x_n)|^2, for N rows of weights w_n and D entries of an
    output row; for a likelihood with a scale for each output, each from its own entries. With `hyper_prior` =
    Gamma(a, b) on the noise precision beta = 1 / scale^2, q(beta) = Gamma(a + count / 2, b + squares / 2); the joint
    gets E beta, and `bound_terms` makes the ELBO there that of q(w) q(beta).

    **Limit**: exact given the expected squares; unchanged under tempering. A learnt noise becomes a fixed one, as found
    here. Likelihoods that are not Gaussian are refused.

    **Cost**: none beyond the pass over the data that finds the squares.

    **References**: Bishop (2006), eq. 9.68 and section 10.3.

    **Example**:

    >>> import posterity as po
    >>> joint = po.Joint(torch.nn.Linear(2, 1), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=8)
    >>> q = po.posteriors.Point(joint, torch.zeros(3))
    >>> found = Expected(torch.zeros(1), squares=torch.tensor([2.0]), count=torch.tensor(8.0))
    >>> NoiseScale()(joint, q, found).likelihood.scale
    0.5
    """

    hyper_prior: Gamma | None = None

    def __post_init__(self) -> None:
        if self.hyper_prior is not None:
            of_kinds(self, hyper_prior=Gamma)

    @property
    def needs_residuals(self) -> bool:
        """Yes."""
        return True

    def check(self, joint: Joint) -> None:
        """Refuse a likelihood without noise that is found in closed form."""
        _shared(joint)

    def __call__(self, joint: Joint, posterior: Posterior, expected: Expected | None) -> Joint:
        """The joint with the noise found; see `Maximisation`."""
        shared, known = _shared(joint), _known(expected)
        scales = [self._scale(count, squares) for count, squares in _sums(joint, known)]
        return dataclasses.replace(joint, likelihood=Gaussian(scale=scales[0] if shared else tuple(scales)))

    def bound_terms(self, joint: Joint, posterior: Posterior, expected: Expected | None = None) -> float:
        """E log p(beta) / q(beta), and count / 2 (E log beta - log E beta), over the scales; see `Maximisation`."""
        _shared(joint)
        if self.hyper_prior is None:
            return 0.0
        assert isinstance(joint.likelihood, Gaussian)
        scales = torch.as_tensor(joint.likelihood.scale, dtype=torch.float64).reshape(-1).tolist()
        sums = zip(_sums(joint, _known(expected)), scales, strict=True)
        total = sum(self.hyper_prior.bound_terms(0.5 * count, scale**-2) for (count, _), scale in sums)
        return float(joint.tempering.likelihood_power) * total

    def _scale(self, count: float, squares: float) -> float:
        if self.hyper_prior is not None:
            return float(self.hyper_prior.updated(0.5 * count, 0.5 * squares).mean ** -0.5)
        if not (squares > 0.0 and count > 0.0):
            raise ValueError(
                f"NoiseScale: the residuals must have positive squares. Got {squares:g} over {count:g} rows. Does the "
                "network know the targets exactly? Give a hyper_prior=Gamma(shape, rate), or leave NoiseScale out."
            )
        return float((squares / count) ** 0.5)


def _shared(joint: Joint) -> bool:
    """Whether one scale is that of all outputs; refuses what has no closed form."""
    likelihood = joint.likelihood
    if not isinstance(likelihood, Gaussian):
        raise ValueError(
            f"NoiseScale is for a Gaussian likelihood. Got {shown(likelihood)}. Leave NoiseScale out, and let the "
            "likelihood learn its scale (learn=True) where it has one."
        )
    if likelihood.num_members is not None:
        raise ValueError(
            f"NoiseScale is for one problem. Got noise of {likelihood.num_members} members. Use joint.member(i)."
        )
    if likelihood.log_scale_prior is not None:
        raise ValueError(
            "NoiseScale: a normal prior on the log of the noise has no closed form. Give NoiseScale a "
            "hyper_prior=Gamma(shape, rate) instead of log_scale_prior, or leave NoiseScale out."
        )
    return torch.as_tensor(likelihood.scale).dim() == 0


def _known(expected: Expected | None) -> Expected:
    if expected is None:
        raise ValueError("NoiseScale needs the expected squares of the residuals. Pass expected=Expected(...).")
    return expected


def _sums(joint: Joint, expected: Expected) -> Sequence[tuple[float, float]]:
    """(number of entries, sum of their squares) that each scale is found from."""
    count, squares = float(expected.count), expected.squares.double().reshape(-1).tolist()
    if _shared(joint):
        return [(count * len(squares), sum(squares))]
    assert isinstance(joint.likelihood, Gaussian)
    scales = torch.as_tensor(joint.likelihood.scale).numel()
    if len(squares) != scales:
        raise ValueError(f"NoiseScale: the noise has {scales} scales. Got squares of {len(squares)} outputs.")
    return [(count, each) for each in squares]
