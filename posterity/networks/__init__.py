"""Small networks for examples and tests; any `nn.Module` will do in their place."""

from posterity.networks.chain import Chain
from posterity.networks.concrete_dropout import ConcreteDropout
from posterity.networks.cvnn import ConvNet
from posterity.networks.entrywise import Erf, Scaled
from posterity.networks.lenet import LeNet
from posterity.networks.mean_field_network import MeanFieldNetwork
from posterity.networks.mlp import MLP
from posterity.networks.resnet import ResNet
from posterity.networks.vgg import VGG

__all__ = [
    "MLP",
    "VGG",
    "Chain",
    "ConcreteDropout",
    "ConvNet",
    "Erf",
    "LeNet",
    "MeanFieldNetwork",
    "ResNet",
    "Scaled",
]
