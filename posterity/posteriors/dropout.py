"""Dropout posteriors: masks drawn at random, or all enumerated."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from posterity.likelihoods.likelihood import Likelihood
from posterity.model.batch import Inputs, as_inputs, map_inputs
from posterity.model.dropout_sites import dropout_sites, mask_numbers, masked_weights, outputs_under
from posterity.model.joint import Joint
from posterity.model.network import Buffers, Network
from posterity.model.problem import Problem
from posterity.numerics.dropout import KeyedMasks
from posterity.numerics.random import Key
from posterity.posteriors.functions import Evaluation
from posterity.posteriors.point import problem_of
from posterity.posteriors.posterior import Posterior
from posterity.posteriors.standalone import Masks
from posterity.predictive import GaussianPredictive
from posterity.priors.prior import Prior


@dataclass(frozen=True, eq=False, repr=False)
class Dropout(Posterior):
    """The network with random dropout masks at one theta (P,), or at one for each member, (M, P).

    **Math**: f_s(x) = f(x; theta, keep_s) with every unit of keep_s independently 0 with the rate of its layer; the
    others are divided by 1 - rate. Masking the inputs of a linear layer is masking columns of its weights, so each
    keep_s is a draw of weights (`sample`). With `one_mask_a_draw` all rows share the mask of a draw, hence are
    correlated as values of one function; without, every row has its own (repeated in the next chunk of rows), which
    does not change the marginal distribution of a row.

    **Limit**: exact for the q that the rates define; `enumerated` sums over all masks where these are few.

    **Cost**: one forward pass for each draw; with `one_mask_a_draw` the layers before the first dropout run once for
    many draws.

    **References**: Gal and Ghahramani (2016), Dropout as a Bayesian approximation, eq. 6-8.

    **Example**:

    >>> from posterity.likelihoods import Gaussian
    >>> from posterity.priors import Normal
    >>> net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(1, 1, bias=False))
    >>> q = Dropout(Joint(net, Gaussian(scale=1.0), Normal(), num_data=1), torch.tensor([1.0]))
    >>> sorted(set(q.outputs(torch.ones(3, 1), 10, Key(0)).flatten().tolist()))  # 0 or 1 / (1 - 0.5)
    [0.0, 2.0]
    """

    joint: Problem
    theta: Tensor
    buffers: Buffers = field(default_factory=dict)
    one_mask_a_draw: bool = True
    example: Inputs | None = None  # a row of zeros in the form of the inputs, for `sample`

    tensor_shapes: ClassVar[dict[str, str]] = {"theta": "mP"}

    @classmethod
    def of(
        cls,
        module: nn.Module | Network,
        likelihood: Likelihood,
        *,
        prior: Prior | None = None,
        num_data: int = 1,
        one_mask_a_draw: bool = True,
        example: Inputs | None = None,
    ) -> "Dropout":
        """Return Monte Carlo dropout of a module that was trained elsewhere, by its own dropout layers.

        `example`, rows of inputs, shows at once that the module drops, and is needed by `sample`. Predictions need
        neither the prior nor the number of rows.

        >>> from posterity.likelihoods import Categorical
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 20), torch.nn.Dropout(0.2), torch.nn.Linear(20, 3))
        >>> Dropout.of(net, Categorical()).predict(torch.ones(4, 2), draws=50).epistemic.shape
        torch.Size([4])
        """
        joint = problem_of("Dropout.of", module, likelihood, prior, num_data)
        if example is not None:
            example = map_inputs(lambda tensor: tensor.to(joint.device), as_inputs(example))
            dropout_sites(joint.network, example)  # raises where nothing drops
            example = map_inputs(lambda tensor: torch.zeros_like(tensor[:1]), example)
        theta = joint.network.initial.clone()
        return cls(joint, theta, joint.starting_buffers(theta), one_mask_a_draw, example)

    @property
    def num_members(self) -> int | None:
        return self.theta.shape[0] if self.theta.dim() > 1 else None

    def member(self, index: int) -> "Dropout":
        if self.num_members is None:
            return self
        buffers = {name: b[index] for name, b in self.buffers.items()}
        return Dropout(self.joint.member(index), self.theta[index], buffers, self.one_mask_a_draw, self.example)

    @property
    def ties_rows(self) -> bool:
        return self.one_mask_a_draw

    def lines(self) -> list[str]:
        return [*super().lines(), f"masks: one for {'all rows' if self.one_mask_a_draw else 'each row'} of a draw"]

    def point(self) -> Tensor:
        return self.theta

    def sample(self, draws: int, key: Key | None = None) -> Tensor:
        """Weights (draws, P) that give the functions of the masks that `outputs` draws under the key.

        A TypeError unless each dropout precedes a linear layer, or a convolution of whole channels.
        """
        self._alone()
        assert isinstance(self.joint, Joint)
        if self.example is None:
            raise TypeError("Dropout.sample must run the network. Make the posterior with an example row of inputs.")
        return masked_weights(self.joint.network, self.theta, self.example, draws, key or Key(0))

    def drawn_functions(self, draws: int, key: Key) -> Evaluation:
        """Functions with one mask each, whether or not rows share the masks of `outputs`."""
        assert isinstance(self.joint, Joint)
        network, theta, buffers = self.joint.network, self.theta, self.buffers or None

        def evaluate(inputs: Inputs, numbers: Tensor) -> Tensor:
            known = dropout_sites(network, inputs)
            masks = [own[numbers.to(own.device)] for own in mask_numbers(known, draws, key, theta.device)]
            return outputs_under(network, theta, inputs, buffers, masks, known)

        return evaluate

    def standalone(self, draws: int | None, share: float, key: Key) -> nn.Module:
        joint = self.joint.as_joint("module")
        if not self.one_mask_a_draw:
            raise TypeError(
                "module: a mask for each row is not fixed. Make the posterior with one_mask_a_draw=True: rows have the "
                "same distribution then."
            )
        if self.example is None:
            raise TypeError("module: masks have the shape of a row. Make the posterior with an example row of inputs.")
        known = dropout_sites(joint.network, self.example)
        numbers = mask_numbers(known, self.prediction_draws(draws, share), key, self.theta.device)
        return Masks(joint.network, joint.likelihood, self.theta, self.buffers, known, numbers)

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        self._alone()
        assert isinstance(self.joint, Joint)
        network, theta, buffers = self.joint.network, self.theta, self.buffers or None
        known = dropout_sites(network, inputs)
        if self.one_mask_a_draw:
            return self.drawn_functions(draws, key)(inputs, torch.arange(draws, device="cpu"))
        result = []
        for draw in range(draws):
            masks = KeyedMasks(key.fold(draw), known.sites, shared=False)
            with network.dropping(masks, training=known.training):
                result.append(network.outputs(theta, inputs, buffers))
        return torch.stack(result)


MOST = 1 << 14  # masks that `enumerated` sums over by default


@dataclass(frozen=True, eq=False)
class MaskMixture:
    """The mixture p(y) = sum_s weights[s] p(y | outputs[s]) over all masks, with their probabilities.

    `outputs` (S, N, *event) have the network's dtype, `weights` (S,) are float64.
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
        if self.likelihood.link != "identity":
            raise TypeError(f"moment_matched needs a Gaussian likelihood. Got {type(self.likelihood).__name__}.")
        covariance, mean = self.covariance, self.mean
        noise = self.likelihood.variance(mean.unsqueeze(0))[0]
        return GaussianPredictive(mean, covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape), noise, covariance)


def enumerated(q: Dropout, inputs: Inputs, *, most: int = MOST) -> MaskMixture:
    """Enumerate the 2^U masks of a dropout posterior's U units: outputs under each, and their probabilities.

    A ValueError where there are more than `most` masks, or where rows cannot share a mask.

    >>> from posterity.priors import Normal
    >>> net = torch.nn.Sequential(torch.nn.Dropout(0.25), torch.nn.Linear(1, 1, bias=False))
    >>> from posterity.likelihoods import Gaussian
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
    weights, numbers = torch.ones(len(bits), dtype=torch.float64, device=bits.device), []
    for site, keep in zip(known.sites, torch.split(bits, [site.units for site in known.sites], dim=1), strict=True):
        weights = weights * (keep * (1.0 - site.rate) + (1.0 - keep) * site.rate).prod(1)
        numbers.append(keep.reshape(-1, *site.shape))
    outputs = outputs_under(q.joint.network, q.theta, inputs, q.buffers or None, numbers, known)
    return MaskMixture(q.joint.likelihood, outputs, weights)
