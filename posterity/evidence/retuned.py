"""Hyper-parameters after a Laplace fit: by evidence, on validation rows, or one MacKay step per round of EM."""

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from posterity.errors import BadData, NotPositiveDefinite, of_kinds, positive, positive_whole, shown
from posterity.evidence.m_steps import Expected, Maximisation
from posterity.evidence.marginal import Groups, Marginal, Shared
from posterity.evidence.tuning import MacKay, Tuned, Tuning, tuned_joint, unchanged, with_tuned
from posterity.model.batch import as_batch
from posterity.model.joint import Joint
from posterity.posteriors.gaussian import Gaussian
from posterity.posteriors.linearized import Linearized
from posterity.posteriors.posterior import Posterior
from posterity.priors import Correlated

logger = logging.getLogger("posterity")


@dataclass(frozen=True)
class ValidationGrid:
    """Choose the prior precision with the least validation loss on a logarithmic grid that includes the present one.

    **Math**: argmin over alpha of score(alpha), say the negative log-likelihood of validation rows under the
    predictive of the Gaussian with that prior precision.

    **Limit**: as fine as the grid; the noise stays as it is. Trials that fail or score NaN are skipped.

    **Cost**: `count` + 1 scores.

    **References**: Ritter et al. (2018), section 5.

    **Example**:

    >>> grid = ValidationGrid(lowest=0.01, highest=100.0, count=5)
    >>> [round(value, 4) for value in grid.values]
    [0.01, 0.1, 1.0, 10.0, 100.0]
    """

    lowest: float = 1e-4
    highest: float = 1e4
    count: int = 21

    def __post_init__(self) -> None:
        positive("ValidationGrid.lowest", self.lowest)
        positive("ValidationGrid.highest", self.highest)
        positive_whole("ValidationGrid.count", self.count)
        if self.lowest >= self.highest:
            raise ValueError(
                f"ValidationGrid.lowest must be below ValidationGrid.highest. Got {self.lowest} and {self.highest}."
            )

    @property
    def values(self) -> list[float]:
        """The prior precisions of the grid."""
        logs = torch.linspace(math.log(self.lowest), math.log(self.highest), self.count, dtype=torch.float64)
        return [float(value) for value in logs.exp()]

    def tune(self, marginal: Marginal, score: Callable[[float], float]) -> Tuned:
        """Minimise `score`, the loss of a prior precision; `marginal` has one group.

        The precision is a geometric mean where prior scales differ between weights.
        """
        if len(marginal.names) != 1:
            raise ValueError(
                "ValidationGrid tunes one normal prior precision, shared by all weights. "
                f"Got {len(marginal.names)} groups. Use groups=Shared() and a Normal prior."
            )
        present = float(marginal.prior_precision)
        values = [present, *self.values]
        losses = [_loss(score, value) for value in values]
        best = min(range(len(values)), key=losses.__getitem__)
        if not math.isfinite(losses[best]):
            return unchanged(Shared(), marginal, len(values), "no prior precision has a finite score.", -losses[0])
        if best in (1, self.count) and self.count > 1:
            logger.warning("The best prior precision, %.3g, is at the end of the grid: widen it.", values[best])
        noise = None if marginal.noise is None else marginal.noise.scale
        alpha = torch.full_like(marginal.prior_precision, values[best])
        return Tuned(Shared(), marginal.names, alpha, noise, -losses[0], -losses[best], len(values))


def _loss(score: Callable[[float], float], value: float) -> float:
    """The score of a value, infinite where it fails or is NaN."""
    try:
        loss = float(score(value))
    except (NotPositiveDefinite, FloatingPointError):
        return math.inf
    return math.inf if math.isnan(loss) else loss


AtMode = TypeVar("AtMode", Gaussian, Linearized)


def marginal_likelihood(posterior: Gaussian | Linearized, groups: Groups | None = None) -> Marginal:
    """Return the log evidence of a Laplace posterior as a differentiable function of prior precision and noise.

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 10).unsqueeze(1)
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.1), po.priors.Normal(), num_data=10)
    >>> q, _ = po.infer(po.methods.Conjugate(), joint, (x, 2 * x))
    >>> q, _ = po.infer(po.methods.Laplace(tuning=None), joint, (x, 2 * x), start=q)
    >>> marginal = marginal_likelihood(q)
    >>> torch.allclose(marginal.log_evidence(marginal.prior_precision, torch.tensor(0.1)), q.log_evidence)
    True
    """
    gaussian = posterior.as_gaussian()
    joint, terms = gaussian.joint, gaussian.data_terms
    if terms is None or not isinstance(joint, Joint) or gaussian.num_members is not None:
        raise ValueError(
            "marginal_likelihood needs the posterior of one Laplace run on a Joint, which knows its log-likelihood. "
            "Fit it with methods.Laplace, and choose one of several members by q.member(i)."
        )
    if isinstance(joint.bound_prior, Correlated):
        raise ValueError(
            "marginal_likelihood: a Correlated prior is what earlier data left, and has nothing to tune. "
            "Tune the noise in the fit itself: Laplace(tuning=Evidence())."
        )
    prior = joint.bound_prior.precision(gaussian.mean.to(torch.float64))
    random = prior if joint.random_indices is None else prior[joint.random_indices]
    untempered = gaussian.precision.rescaled(1.0 / float(joint.tempering.likelihood_power), random)
    return Marginal.of(joint, gaussian.mean, untempered, terms[0], terms[1:] if terms.numel() > 1 else None, groups)


def retuned(posterior: AtMode, tuning: Tuning | ValidationGrid, validation: object = None) -> AtMode:
    """Return the posterior at the same mode with hyper-parameters chosen by `tuning`; itself if the search fails.

    `ValidationGrid` maximises the predictive density of `validation`, a pair (inputs, targets).
    """
    if not isinstance(tuning, (Tuning, ValidationGrid)):
        raise TypeError(f"retuned: tuning must be Evidence(), MacKay() or ValidationGrid(). Got {shown(tuning)}.")
    marginal = marginal_likelihood(posterior, tuning.groups if isinstance(tuning, Tuning) else Shared())

    way = "evidence" if isinstance(tuning, Tuning) else "validation"

    def retuned_to(tuned: Tuned) -> AtMode:
        gaussian = with_tuned(posterior.as_gaussian(), marginal, tuned, way)
        return posterior.with_gaussian(gaussian) if tuned.succeeded else posterior

    if isinstance(tuning, Tuning):
        return retuned_to(tuning.tune(marginal))
    if validation is None:
        raise BadData("retuned: ValidationGrid needs rows to score on. Pass validation=(inputs, targets).")
    joint = posterior.joint
    assert isinstance(joint, Joint)
    rows = joint.check(as_batch(validation, "the validation rows", labels=joint.network.labels))

    def score(prior_precision: float) -> float:
        alpha = marginal.prior_precision.new_tensor([prior_precision])
        noise = None if marginal.noise is None else marginal.noise.scale
        trial = retuned_to(Tuned(Shared(), marginal.names, alpha, noise, 0.0, 0.0, 1))
        return -float(trial.predict(rows.inputs).log_prob(rows.targets).mean())

    return retuned_to(tuning.tune(marginal, score))


@dataclass(frozen=True)
class MacKayUpdate(Maximisation):
    """Re-estimate prior precision and noise once from a Laplace posterior: converges faster than the M-steps of EM.

    **Math**: gamma_g = n_g - alpha_g tr Sigma_gg, alpha_g = gamma_g / |m|^2_g and 1 / scale^2 = (N - gamma) / RSS(m),
    from the posterior N(m, Sigma): one step of `MacKay`, after which the next round fits a new mode.

    **Limit**: its fixed point is that of EM for linear models, reached in fewer rounds. A step does not maximise the
    expected log joint, so that the bound may fall. It takes the posterior of `Laplace`, and tunes `Normal` priors and
    Gaussian noise of one scale; `noise=False` leaves the noise.

    **Cost**: one log determinant with its gradient.

    **References**: MacKay (1992), Bayesian interpolation, eq. 4.9-4.14; Bishop (2006), eq. 3.91-3.95.

    **Example**:

    >>> MacKayUpdate(noise=False).climbs
    False
    """

    groups: Groups = field(default_factory=Shared)
    noise: bool = True

    def __post_init__(self) -> None:
        of_kinds(self, groups=Groups)

    climbs = False

    def __call__(self, joint: Joint, posterior: Posterior, expected: Expected | None = None) -> Joint:
        if not isinstance(posterior, (Gaussian, Linearized)):
            raise TypeError(f"MacKayUpdate needs the posterior of Laplace. Got {type(posterior).__name__}.")
        marginal = marginal_likelihood(posterior, self.groups)
        noise = marginal.noise.scale if self.noise and marginal.noise is not None else None
        if not marginal.names and noise is None:
            raise ValueError("MacKayUpdate: there is neither a Normal prior nor Gaussian noise to estimate.")
        update = MacKay(self.groups).step(marginal, marginal.prior_precision, noise)
        scale = None if update.noise_scale is None else float(update.noise_scale)
        tuned = Tuned(self.groups, marginal.names, update.prior_precision, scale, math.nan, math.nan, 1)
        assert isinstance(posterior.joint, Joint)
        after = tuned_joint(dataclasses.replace(joint, random=posterior.joint.random), tuned)
        return dataclasses.replace(after, random=joint.random)
