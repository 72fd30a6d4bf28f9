"""One weight vector under random masks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from posterity.model.density import Density
from posterity.model.dropout_sites import dropout_sites
from posterity.model.inputs import Inputs
from posterity.model.joint import Joint
from posterity.model.mask_draws import mask_numbers, outputs_under
from posterity.model.masked_weights import masked_weights
from posterity.model.network import Buffers
from posterity.numerics.masks import KeyedMasks
from posterity.numerics.random import Key
from posterity.posteriors.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Dropout(Posterior):
    """The functions that a network's dropout makes of one theta (P,), or of one for each member, (M, P).

    **Math**: f_s(x) = f(x; theta, keep_s) with every unit of keep_s independently 0 with the rate of its layer; what
    stays is divided by 1 - rate. Masking the inputs of a linear layer is masking columns of its weights, so each
    keep_s is a draw of weights (`sample`). With `one_mask_a_draw` a draw has the same mask for all rows, hence rows
    are correlated as those of one function; without, every row has its own (those of different chunks of rows the
    same again), which leaves each row's own distribution as it is.

    **Limit**: exact for the q that the rates define; `enumerated` sums over all masks where these are few.

    **Cost**: one forward pass for each draw; with `one_mask_a_draw` what comes before the first dropout runs once for
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

    joint: Joint | Density
    theta: Tensor
    buffers: Buffers = field(default_factory=dict)
    one_mask_a_draw: bool = True
    example: Inputs | None = None  # a row of zeros in the form of the inputs, which `sample` runs

    @property
    def num_members(self) -> int | None:
        """M for theta (M, P)."""
        return self.theta.shape[0] if self.theta.dim() > 1 else None

    def member(self, index: int) -> "Dropout":
        """The posterior of one member."""
        if self.num_members is None:
            return self
        buffers = {name: b[index] for name, b in self.buffers.items()}
        return Dropout(self.joint.member(index), self.theta[index], buffers, self.one_mask_a_draw, self.example)

    @property
    def ties_rows(self) -> bool:
        """Whether a draw has one mask for all rows."""
        return self.one_mask_a_draw

    def point(self) -> Tensor:
        """theta."""
        return self.theta

    def sample(self, draws: int, key: Key) -> Tensor:
        """Weights (draws, P) with the same functions as the masks that `outputs` draws under the key.

        A TypeError where dropout comes before anything else than a linear layer or a convolution of whole channels.
        """
        self._alone()
        assert isinstance(self.joint, Joint)
        if self.example is None:
            raise TypeError("Dropout.sample must run the network. Make the posterior with an example row of inputs.")
        return masked_weights(self.joint.network, self.theta, self.example, draws, key)

    def outputs(self, inputs: Inputs, draws: int, key: Key) -> Tensor:
        """One forward pass for each draw of the masks."""
        self._alone()
        assert isinstance(self.joint, Joint)
        network, theta, buffers = self.joint.network, self.theta, self.buffers or None
        known = dropout_sites(network, inputs)
        if self.one_mask_a_draw:
            numbers = mask_numbers(known, draws, key, theta.device)
            return outputs_under(network, theta, inputs, buffers, numbers, known)
        found = []
        for draw in range(draws):
            masks = KeyedMasks(key.fold(draw), known.sites, shared=False)
            with network.dropping(masks, training=known.training):
                found.append(network.outputs(theta, inputs, buffers))
        return torch.stack(found)
