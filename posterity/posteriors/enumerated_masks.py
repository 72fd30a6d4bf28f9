"""The predictive of dropout by all masks: a truth for tiny networks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.likelihoods.gaussian import Gaussian
from posterity.likelihoods.likelihood import Likelihood
from posterity.model.dropout_sites import dropout_sites
from posterity.model.inputs import Inputs
from posterity.model.joint import Joint
from posterity.model.mask_draws import outputs_under
from posterity.posteriors.dropout import Dropout
from posterity.predictive import GaussianPredictive

MOST = 1 << 14  # masks


@dataclass(frozen=True, eq=False)
class MaskMixture:
    """p(y) = sum_s weights[s] p(y | outputs[s]): every mask with its probability.

    `outputs` (S, N, *event) are in the network's number type, `weights` (S,) in float64.
    """

    likelihood: Likelihood
    outputs: Tensor
    weights: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean of the outputs, (N, *event), in float64."""
        return torch.einsum("s,s...->...", self.weights, self.outputs.double())

    @property
    def covariance(self) -> Tensor:
        """Covariance of the outputs of each row, (N, D, D), in float64; noise not included."""
        centred = (self.outputs.double() - self.mean).flatten(2)  # (S, N, D)
        return torch.einsum("s,snd,sne->nde", self.weights, centred, centred)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of each row of targets, (N,)."""
        outputs = self.outputs.double()
        each = self.likelihood.log_prob(outputs, self.likelihood.check(outputs[0], y))  # (S, N)
        return (each + self.weights.log().unsqueeze(1)).logsumexp(0)

    def moment_matched(self) -> GaussianPredictive:
        """The Gaussian with the mean and covariance of the mixture, under Gaussian noise."""
        if not isinstance(self.likelihood, Gaussian):
            raise TypeError(f"moment_matched needs a Gaussian likelihood. Got {type(self.likelihood).__name__}.")
        covariance, mean = self.covariance, self.mean
        noise = self.likelihood.variance(mean.unsqueeze(0))[0]
        return GaussianPredictive(mean, covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape), noise, covariance)


def enumerated(q: Dropout, inputs: Inputs, *, most: int = MOST) -> MaskMixture:
    """The outputs of a dropout posterior under each of the 2^U masks of its U units, with their probabilities.

    A ValueError where there are more than `most` masks, or where a mask cannot be the same for all rows.

    >>> from posterity.priors import Normal
    >>> net = torch.nn.Sequential(torch.nn.Dropout(0.25), torch.nn.Linear(1, 1, bias=False))
    >>> q = Dropout(Joint(net, Gaussian(scale=1.0), Normal(), num_data=1), torch.tensor([3.0]))
    >>> exact = enumerated(q, torch.ones(1, 1))
    >>> exact.weights.tolist(), exact.outputs.flatten().tolist()
    ([0.25, 0.75], [0.0, 4.0])
    """
    q._alone()
    assert isinstance(q.joint, Joint)
    known = dropout_sites(q.joint.network, inputs, q.theta)
    units = sum(site.units for site in known.sites)
    if 2**units > most:
        raise ValueError(
            f"enumerated: {units} units that are dropped have {2**units:,} masks, and at most {most:,} are to be "
            "summed. Use a smaller network, or predict(inputs, draws=...)."
        )
    if not all(site.clear for site in known.sites):
        raise ValueError("enumerated: the rows cannot be told in every mask. Use predict(inputs, draws=...).")
    bits = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")] * units)
    bits = bits.reshape(-1, units).to(q.theta.device)  # (S, U)
    sizes = [site.units for site in known.sites]
    weights = torch.ones(len(bits), dtype=torch.float64, device=bits.device)
    for site, some in zip(known.sites, torch.split(bits, sizes, dim=1), strict=True):
        weights = weights * (some * (1.0 - site.rate) + (1.0 - some) * site.rate).prod(1)
    numbers = [
        some.reshape(-1, *site.shape) for some, site in zip(torch.split(bits, sizes, dim=1), known.sites, strict=True)
    ]
    outputs = outputs_under(q.joint.network, q.theta, inputs, q.buffers or None, numbers, known)
    return MaskMixture(q.joint.likelihood, outputs, weights)
