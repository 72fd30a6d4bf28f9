"""The methods of the study by name: a new one is a row here, and its name among the options."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from posterity.estimators import fit_automatic
from posterity.inference import Method, infer
from posterity.likelihoods import Gaussian, Heteroscedastic
from posterity.methods import (
    MAP,
    SWAG,
    Ensemble,
    Laplace,
    MCDropout,
    MeanField,
    NaturalGradient,
    OnlineLaplace,
    ProbabilisticBackpropagation,
)
from posterity.metrics import negative_log_likelihood
from posterity.model import Joint
from posterity.optim.optimizer import Adam
from posterity.optim.schedules import Cosine
from posterity.posteriors import Posterior
from posterity.predictive import DrawsPredictive, GaussianPredictive, Predictive
from posterity.priors import Normal
from posterity_studies.uci.protocol import Choice, Split, held_out, hidden_units, mlp, own_start, problem
from posterity_studies.uci.settings import Settings

LEAST = (0.01, 0.05, 0.1, 0.2, 0.3)
"""Standard deviations of the standardised target."""


class LeastNoise(nn.Module):
    """Outputs (..., 2), a mean and the log of a noise r: the latter becomes log sqrt(exp(2 r) + least^2)."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.log_variance = 2.0 * math.log(least)

    def forward(self, outputs: Tensor) -> Tensor:
        """The outputs with the least noise in them."""
        mean, log_scale = outputs.chunk(2, dim=-1)
        least = torch.full_like(log_scale, self.log_variance)
        return torch.cat([mean, 0.5 * torch.logaddexp(2.0 * log_scale, least)], dim=-1)


def ensemble_problem(split: Split, settings: Settings, choice: Choice | None = None) -> Joint:
    """The network of the protocol with a second output for the noise, and the least noise of the choice.

    As Lakshminarayanan et al. (2017): networks with the negative log-likelihood for loss, scored by the Gaussian that
    has the moments of their mixture. They smooth by adversarial examples, and have a least variance of 1e-6; here
    weights have a prior, and the least noise is chosen on held-out training rows, for networks with a noise for each
    row learn small tables by heart.
    """
    least = LEAST[0] if choice is None else choice["least_noise"]
    network = nn.Sequential(mlp(split, settings, outputs=2), LeastNoise(least))
    return Joint(network, Heteroscedastic(), Normal(settings.prior_scale), len(split.train))


def chosen_ensemble(split: Split, settings: Settings, method: Method) -> Choice:
    """The least noise with which an ensemble predicts best a fifth of the training rows, after a fit to the others."""
    part, key = held_out(split, settings), settings.key(split.data_set, split.index).fold("choice")
    scores = {}
    for least in LEAST:
        joint = ensemble_problem(part, settings, {"least_noise": least})
        posterior, _ = infer(method, joint, part.train, seed=key.seed, progress=False)
        scores[least] = negative_log_likelihood(moments(posterior, part.test.inputs), part.test.targets)
    return {"least_noise": min(scores, key=scores.__getitem__)}


def moments(posterior: Posterior, inputs: Tensor) -> Predictive:
    """The Gaussian with mean and variance of the mixture, as in section 2.4 of the paper."""
    result = posterior.predict(inputs)
    return GaussianPredictive(result.mean, result.epistemic, result.aleatoric)


RATES = (0.005, 0.01, 0.05, 0.1)
"""Dropout rates that the published runs chose from, for most of the data sets."""
NOISES = tuple(0.01 * 10 ** (step / 12) for step in range(25))
"""Standard deviations of the standardised target, from 0.01 to 1."""
DRAWS = 1000


def dropout_problem(split: Split, settings: Settings, choice: Choice | None = None) -> Joint:
    """The network of the protocol with dropout before both layers; a choice without noise leaves it to be learnt.

    As Mukhoti et al. (2018), who corrected the protocol of Gal and Ghahramani (2016): no test row takes part in the
    choice. They tried each pair of rate and precision by a fit of its own under a prior so wide that the noise hardly
    matters for the weights; here each rate has one fit, under a prior that does matter and with the noise learnt, and
    its draws tell which noise would have predicted the held-out rows best.
    """
    choice = choice or {"rate": RATES[0]}
    with own_start(split, settings):
        inputs, hidden = split.train.inputs.shape[1], hidden_units(split.data_set)
        layers = (nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(choice["rate"]), nn.Linear(hidden, 1))
    likelihood = Gaussian(choice["noise"]) if "noise" in choice else Gaussian(1.0, learn=True)
    network = nn.Sequential(nn.Dropout(choice["rate"]), *layers)
    return Joint(network, likelihood, Normal(settings.prior_scale), len(split.train))


def chosen_dropout(split: Split, settings: Settings, method: Method) -> Choice:
    """The rate and noise that predict best a fifth of the training rows, after a fit to the others for each rate.

    These fits have half the steps of the method.
    """
    assert isinstance(method, MCDropout)
    shorter = replace(method, steps=max(1, method.steps // 2))
    part, key = held_out(split, settings), settings.key(split.data_set, split.index).fold("choice")
    best, lowest = {"rate": RATES[0], "noise": NOISES[-1]}, math.inf
    for rate in RATES:
        joint = dropout_problem(part, settings, {"rate": rate})
        posterior, _ = infer(shorter, joint, part.train, seed=key.seed, progress=False)
        result = mask_average(posterior, part.test.inputs)
        assert isinstance(result, DrawsPredictive)
        for noise in NOISES:
            predictive = DrawsPredictive(Gaussian(noise), result.outputs)
            nll = negative_log_likelihood(predictive, part.test.targets)
            if nll < lowest:
                best, lowest = {"rate": rate, "noise": noise}, nll
    return best


def mask_average(posterior: Posterior, inputs: Tensor) -> Predictive:
    """The average over masks: its mean is the mean of the draws, its log density the log of the averaged density."""
    return posterior.predict(inputs, draws=DRAWS)


def unscaled_problem(split: Split, settings: Settings) -> Joint:
    """The network of the protocol; the method chooses noise and prior scale."""
    return Joint(mlp(split, settings), Gaussian(), Normal(), len(split.train))


def automatic(split: Split, settings: Settings) -> Predictive:
    """The test rows by the automatic default: linear models, Gaussian processes and networks, stacked by folds.

    It takes no part of the protocol but the splits: it chooses its own networks, on the training rows.
    """
    (inputs, targets), seed = split.train.pair, settings.key(split.data_set, split.index).seed
    mean, scale = (split.target_mean,), (split.target_scale,)
    model = fit_automatic(inputs, targets.double(), "regression", mean=mean, scale=scale, seed=seed, progress=False)
    return model.predict(split.test.inputs)


MEMBERS = 5


@dataclass(frozen=True)
class Recipe:
    """How a method is run: its label, and its stages, each of which starts from the posterior of the one before.

    Further the problem it fits, what it predicts, and for one that chooses settings on held-out training rows, how,
    with what it chooses from in words; then the problem takes the choice as well. `together` says that all splits of a
    data set are fitted at once, as members; such a method has one stage, and a start of its own. `alone` predicts the
    test rows without stages.
    """

    label: str
    stages: Callable[[Settings], tuple[Method, ...]]
    problem: Callable[..., Joint] = problem
    predict: Callable[[Posterior, Tensor], Predictive] = lambda posterior, inputs: posterior.predict(inputs)
    choose: Callable[[Split, Settings, Method], Choice] | None = None
    candidates: str | None = None
    together: bool = False
    alone: Callable[[Split, Settings], Predictive] | None = None


def _map(settings: Settings) -> MAP:
    # Adam comes to rest only if its steps do.
    return MAP(settings.steps, settings.batch_size, Adam(settings.step_size), Cosine())


def _dropout(settings: Settings) -> tuple[Method, ...]:
    """A fifth of the steps, as there are more fits; batches of the size that the published runs had."""
    return (MCDropout(max(1, settings.steps // 5), 128, Adam(settings.step_size), Cosine()),)


def _ensemble(settings: Settings) -> tuple[Method, ...]:
    """Fewer steps than MAP: with a noise for each row a network has more to learn by heart."""
    return (Ensemble(MAP(max(1, settings.steps // 20), 128, Adam(0.01), Cosine()), MEMBERS),)


def _by_default(label: str, *stages: Method) -> Recipe:
    """A method at the defaults of the library, which choose steps, prior and noise by the training rows."""
    return Recipe(label, lambda settings: stages, unscaled_problem)


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "map": Recipe("MAP", lambda settings: (_map(settings),)),
        "laplace": Recipe("Laplace", lambda settings: (_map(settings), Laplace())),
        "dropout": Recipe(
            "MC dropout", _dropout, dropout_problem, mask_average, chosen_dropout, f"rates {RATES}, noises {NOISES}"
        ),
        "ensemble": Recipe(
            f"Ensemble of {MEMBERS}", _ensemble, ensemble_problem, moments, chosen_ensemble, f"least noises {LEAST}"
        ),
        "pbp": Recipe("PBP", lambda settings: (ProbabilisticBackpropagation(),), unscaled_problem, together=True),
        "default-map": _by_default("MAP, chosen", MAP()),
        "default-laplace": _by_default("Laplace, chosen", MAP(), Laplace()),
        "laplace-ensemble": _by_default(f"Laplace x {MEMBERS}", Ensemble(MAP(), MEMBERS), Ensemble(Laplace(), MEMBERS)),
        "mean-field": _by_default("mean field", MeanField()),
        "natural-gradient": _by_default("natural gradient", NaturalGradient()),
        "online-laplace": _by_default("online Laplace", OnlineLaplace()),
        "swag": _by_default("SWAG", SWAG()),
        "auto": Recipe("auto", lambda settings: (), unscaled_problem, alone=automatic),
    }
)
"""Full Gauss-Newton and the linearised predictive are what `Laplace()` does by default; PBP is that of its paper.

MeanField, NaturalGradient, OnlineLaplace and SWAG have no settings of the study: all are the library's.

The steps of the others were chosen on held-out training rows, so that a split takes seconds;
`python -m benchmarks.uci_settings --methods dropout,ensemble` shows what others give there.
"""
