"""MC dropout on a split: dropout before every layer, its rate and the noise chosen on held-out training rows.

As Mukhoti et al. (2018), who corrected the protocol of Gal and Ghahramani (2016): no test row takes part in the choice.
They tried each pair of rate and precision by a fit of its own under a prior so wide that the noise hardly matters for
the weights; here each rate has one fit, under a prior that does matter and with the noise learnt, and its draws tell
which noise would have predicted the held-out rows best.
"""

import math
from dataclasses import replace

from torch import Tensor, nn

from posterity.inference import Method, infer
from posterity.likelihoods import Gaussian
from posterity.methods import MCDropout
from posterity.metrics import negative_log_likelihood
from posterity.model import Joint
from posterity.posteriors import Posterior
from posterity.predictive import DrawsPredictive, Predictive
from posterity.priors import Normal
from posterity_studies.uci.protocol import Choice, Split, held_out, hidden_units, own_start
from posterity_studies.uci.settings import Settings

RATES = (0.005, 0.01, 0.05, 0.1)
"""Those that the published runs chose from, for most of the data sets."""
NOISES = tuple(0.01 * 10 ** (step / 12) for step in range(25))
"""Standard deviations of the standardised target, from 0.01 to 1."""
DRAWS = 1000


def dropout_problem(split: Split, settings: Settings, choice: Choice | None = None) -> Joint:
    """The network of the protocol with dropout before both layers; a choice without noise leaves it to be learnt."""
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
        found = mask_average(posterior, part.test.inputs)
        assert isinstance(found, DrawsPredictive)
        for noise in NOISES:
            predictive = DrawsPredictive(Gaussian(noise), found.outputs)
            nll = negative_log_likelihood(predictive, part.test.targets)
            if nll < lowest:
                best, lowest = {"rate": rate, "noise": noise}, nll
    return best


def mask_average(posterior: Posterior, inputs: Tensor) -> Predictive:
    """The average over masks: its mean is the mean of the draws, its log density the log of the averaged density."""
    return posterior.predict(inputs, draws=DRAWS)
