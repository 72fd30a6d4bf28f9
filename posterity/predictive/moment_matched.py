"""The Gaussian with the moments of a mixture of draws."""

import torch

from posterity.errors import shown
from posterity.likelihoods.gaussian import Gaussian
from posterity.predictive.draws import DrawsPredictive
from posterity.predictive.gaussian import GaussianPredictive


def moment_matched(predictive: DrawsPredictive, *, unbiased: bool = True) -> GaussianPredictive:
    """N(mean, covariance of the draws + noise) of each row, from S draws of the outputs under Gaussian noise.

    With `unbiased` the scatter of the draws is divided by S - 1, so that its expectation is the posterior's own
    covariance; without, by S, which is the covariance of the mixture of these draws and low by (S - 1) / S.

    >>> pred = DrawsPredictive(Gaussian(scale=1.0), torch.tensor([[[-2.0]], [[2.0]]]))
    >>> moment_matched(pred).variance.item(), moment_matched(pred, unbiased=False).variance.item()
    (9.0, 5.0)
    """
    given: object = predictive
    if not isinstance(given, DrawsPredictive):
        raise TypeError(
            f"moment_matched needs draws of the outputs, of regression. Got {shown(given)}. Other predictives have "
            "their mean and variance."
        )
    likelihood, outputs = predictive.likelihood, predictive.outputs
    if not isinstance(likelihood, Gaussian):
        raise TypeError(f"moment_matched needs a Gaussian likelihood. Got {type(likelihood).__name__}.")
    draws = len(outputs) - 1 if unbiased else len(outputs)
    if draws < 1:
        raise ValueError("moment_matched needs at least 2 draws to be unbiased. Got 1. Predict with more draws.")
    mean = outputs.mean(0)
    centred = (outputs - mean).flatten(2)  # (S, N, D)
    covariance = torch.einsum("snd,sne->nde", centred, centred) / draws
    variance = covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
    return GaussianPredictive(mean, variance, predictive.aleatoric, covariance)
