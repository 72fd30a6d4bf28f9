"""Numbers of neurons and parameters of a network: the units of a balanced temperature."""

from torch import nn
from torch.nn.modules.conv import _ConvNd

from posterity.model.joint import Joint
from posterity.model.network import Network


def parameters(model: nn.Module | Network | Joint) -> int:
    """Number of weights that have a distribution, as `units` for `Tempering.balanced`.

    Takes a module (counts its trained weights, a tied weight once), a `Network`, or a `Joint` (counts its random
    weights), of any kind and depth. With the same tau a network of one hidden layer has an eta smaller by the number d
    of weights for each neuron than with `neurons`: tau for parameters is d times tau for neurons.

    >>> from posterity.model.tempering import Tempering
    >>> from posterity.networks import MeanFieldNetwork
    >>> net = MeanFieldNetwork(inputs=3, width=50)  # 3 weights into each neuron and 1 out of it
    >>> parameters(net), neurons(net)
    (200, 50)
    >>> Tempering.balanced(4.0, num_data=100, units=parameters(net)).eta
    2.0
    >>> Tempering.balanced(1.0, num_data=100, units=neurons(net)).eta
    2.0
    """
    if isinstance(model, Joint):
        return model.num_random
    return (model if isinstance(model, Network) else Network(model)).layout.size


def neurons(model: nn.Module | Network | Joint) -> int:
    """Number of hidden neurons, as `units` for `Tempering.balanced`.

    Takes a module, a `Network` or a `Joint`. A neuron is an output of a linear layer or a channel of a convolution, in
    all layers but the last one in the module's own order, which is taken for the outputs. This is the N of the theory
    for one hidden layer whose outputs are averages over it (`networks.MeanFieldNetwork`). Without that factor 1/N, with
    more layers or with channels, it is a convention: channels share their weights across positions, and layers differ
    in the number of weights for each neuron; use `parameters` there. Refused are matrices in other kinds of layers
    (attention, recurrence, embeddings), and networks of which only some weights have a distribution.

    >>> from posterity.networks import MLP
    >>> neurons(MLP([784, 200, 100, 10]))
    300
    """
    network = model.network if isinstance(model, Joint) else model if isinstance(model, Network) else Network(model)
    remedy = "Count parameters(...), or give `units` a number of your own."
    if network.frozen or (isinstance(model, Joint) and model.random_indices is not None):
        raise ValueError(f"neurons: all weights must have a distribution, and some are fixed. {remedy}")
    widths = []
    for name, layer in network.module.named_modules():
        if isinstance(layer, (nn.Linear, nn.Bilinear)):
            widths.append(layer.out_features)
        elif isinstance(layer, _ConvNd):
            widths.append(layer.out_channels)
        elif any(weight.dim() > 1 for weight in layer.parameters(recurse=False)):
            where = f" '{name}'" if name else ""
            raise ValueError(
                "neurons: only linear layers and convolutions have outputs that can be counted. "
                f"Got {type(layer).__name__}{where}. {remedy}"
            )
    if len(widths) < 2:
        raise ValueError(f"neurons: the network has no hidden layer. {remedy}")
    return sum(widths[:-1])
