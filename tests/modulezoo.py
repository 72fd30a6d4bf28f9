"""Small modules of every kind, in float64, with inputs for them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.numerics import Key


class Recurrent(nn.Module):
    """The last output of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 4, num_layers=2, batch_first=True, dropout=0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Attention(nn.Module):
    """Self-attention, averaged over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x, x, x, need_weights=False)[0]).mean(1)


class Tied(nn.Module):
    """Encoder and decoder share one weight; it also has a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.decoder = nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.decoder(self.encoder(x).tanh())


class Pair(nn.Module):
    """Two inputs, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(2, 2, bias=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a) * self.right(b)


class Dropping(nn.Module):
    """Dropout as a layer and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.drop(self.layer(x)), 0.5, training=self.training)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(2, 3, 2),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3, 2),
    )


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def conv_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=0.3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2))


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))


def sparse_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))


def transformer() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(24, 2))


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


SHAPES = {
    mlp: (6, 3),
    lenet: (6, 1, 6, 6),
    batch_norm: (6, 3),
    conv_batch_norm: (6, 1, 6, 6),
    layer_norm: (6, 3),
    embedding: (6, 2),
    sparse_embedding: (6, 2),
    Recurrent: (6, 5, 3),
    Attention: (6, 5, 4),
    transformer: (6, 6, 4),
    weight_norm: (6, 3),
    Tied: (6, 3),
    Dropping: (6, 3),
}
KINDS = list(SHAPES)


def make(kind, seed: int = 0) -> nn.Module:
    """The module, in float64, with weights that depend on the seed alone, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind().double()


def inputs(kind, rows: int | None = None, seed: int = 0) -> Tensor:
    """Rows that the module takes."""
    shape = (rows or SHAPES[kind][0], *SHAPES[kind][1:])
    if kind in (embedding, sparse_embedding):
        return (Key(seed).uniform(shape) * 5).long().to(torch.get_default_device())
    return Key(seed).normal(shape, torch.float64).to(torch.get_default_device())


def fork(theta: Tensor, members: int, scale: float = 0.1) -> Tensor:
    """(M, P): theta, disturbed differently for each member."""
    return theta + scale * Key(9).normal((members, theta.shape[-1]), theta.dtype).to(theta.device)
