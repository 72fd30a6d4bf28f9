"""The theory's terms, read off a fitted mean-field network and its problem."""

import torch
from torch import Tensor

from posterity.errors import shown
from posterity.likelihoods import Bernoulli, Categorical, Gaussian
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.joint import Joint
from posterity.networks import MeanFieldNetwork
from posterity.posteriors.gaussian import Gaussian as GaussianPosterior
from posterity.posteriors.posterior import Posterior
from posterity.precisions.diagonal import Diagonal
from posterity.priors import Normal
from posterity.theory.activations import Activation, Rectified, Smooth
from posterity.theory.losses import Logistic, Loss, Softmax, Square
from posterity.theory.neurons import NeuronPrior, Neurons
from posterity.theory.wide import WideProblem


def neurons_of(posterior: Posterior) -> Neurons:
    """The neurons of a factorised Gaussian over the weights of a `MeanFieldNetwork`; members are a leading axis.

    >>> import posterity as po
    >>> net = MeanFieldNetwork(inputs=2, width=3)
    >>> joint = po.Joint(net, po.likelihoods.Gaussian(), Normal(), num_data=1)
    >>> q = GaussianPosterior(joint, torch.zeros(9), Diagonal(torch.full((9,), 4.0)))
    >>> neurons_of(q).inner_scale.shape, float(neurons_of(q).outer_scale[0, 0])
    (torch.Size([3, 2]), 0.5)
    """
    factorised = isinstance(posterior, GaussianPosterior) and isinstance(posterior.precision, Diagonal)
    if not isinstance(posterior, GaussianPosterior) or not factorised or not isinstance(posterior.joint, Joint):
        raise TypeError(
            "neurons_of: the posterior must be a factorised Gaussian over a network's weights, as of MeanField. "
            f"Got {shown(type(posterior).__name__)}."
        )
    joint = posterior.joint
    _network(joint)
    if joint.random_indices is not None or joint.size != joint.network.layout.size:
        raise ValueError(
            "neurons_of: all weights must be random, and nothing else. Fit without subset and learnt noise."
        )
    parts = [joint.network.views(value.to(torch.float64)) for value in (posterior.mean, posterior.variance.sqrt())]
    (inner_mean, outer_mean), (inner_scale, outer_scale) = parts
    return Neurons(outer_mean.mT, outer_scale.mT, inner_mean, inner_scale)


def problem_of(joint: Joint, inputs: Tensor, targets: Tensor) -> WideProblem:
    """Loss, prior and activation of a joint over a `MeanFieldNetwork`, with the rows given, as a `WideProblem`.

    Its constants are left out: E log p(D | w) = -sum G^N - p `loss.log_normaliser(outputs)`. The width is
    `joint.network.module.width`, and eta is `joint.tempering.eta`.
    """
    config = _network(joint).config
    activation: Activation = Rectified() if config["activation"] == "relu" else Smooth(config["activation"])
    loss = _loss(joint.likelihood)
    signs = 2.0 * targets.to(torch.float64) - 1.0 if isinstance(loss, Logistic) else targets
    return WideProblem(inputs.flatten(1), signs, loss, _prior(joint), activation)


def _network(joint: Joint) -> MeanFieldNetwork:
    module = joint.network.module
    if not isinstance(module, MeanFieldNetwork):
        raise TypeError(f"The network must be a MeanFieldNetwork. Got {type(module).__name__}.")
    return module


def _loss(likelihood: Likelihood) -> Loss:
    if isinstance(likelihood, Bernoulli):
        return Logistic()
    if isinstance(likelihood, Categorical) and not likelihood.positions:
        return Softmax()
    if isinstance(likelihood, Gaussian) and not likelihood.learn:
        scales = torch.as_tensor(likelihood.scale, dtype=torch.float64).flatten()
        if bool((scales == scales[0]).all()):
            return Square(float(scales[0]) ** -2)
    raise TypeError(
        "problem_of: the likelihood must be Gaussian with one known scale, Bernoulli, or Categorical with one label in "
        f"each row. Got {shown(likelihood)}."
    )


def _prior(joint: Joint) -> NeuronPrior:
    prior = joint.bound_prior
    if not isinstance(prior, Normal) or prior.num_members is not None:
        raise TypeError(
            f"problem_of: the prior must be normal, and one for all members. Got {shown(joint.prior)}. "
            "For one member use joint.member(i)."
        )
    zeros = torch.zeros(joint.network.layout.size, dtype=torch.float64, device=joint.network.device)
    variance = prior.variance(zeros)
    means = prior.value_and_grad(zeros)[1] * variance
    (inner, outer), (inner_mean, outer_mean) = joint.network.views(variance.sqrt()), joint.network.views(means)
    if any(bool((part != part.flatten()[0]).any()) for part in (inner, outer, outer_mean)) or bool(inner_mean.any()):
        raise ValueError(
            "problem_of: the prior must be one for all neurons and coordinates of a layer, with inner means of 0. "
            f"Got {shown(joint.prior)}."
        )
    return NeuronPrior(*(float(part.flatten()[0]) for part in (outer, inner, outer_mean)))
