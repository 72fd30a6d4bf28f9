"""Small networks for examples, studies and tests; any `nn.Module` takes their place.

Wrapping a module as a function of a flat vector is in `model`.
"""

from posterity.networks.convolutional import VGG, ConvNet, LeNet, ResNet
from posterity.networks.layers import Chain, ConcreteDropout, Erf, Scaled
from posterity.networks.mlp import MLP, MeanFieldNetwork

__all__ = ["MLP", "VGG", "Chain", "ConcreteDropout", "ConvNet", "Erf", "LeNet", "MeanFieldNetwork", "ResNet", "Scaled"]
