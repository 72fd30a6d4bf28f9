"""Small instances of the networks that people bring, with rows in the form in which they come."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from posterity.likelihoods import Categorical, Likelihood

ROWS, BATCH, CLASSES = 24, 8, 3
TOKENS, WORDS, WIDTH = 7, 11, 16


class ConvolutionalNet(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(0.1), nn.Linear(8, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C) of images (N, 1, 8, 8)."""
        out: Tensor = self.layers(x)
        return out


class UNet(nn.Module):
    """Two levels with a skip connection; a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.join = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 4, 3, padding=1)
        self.dropout, self.out = nn.Dropout2d(0.1), nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C, 64, 64) of images (N, 1, 64, 64)."""
        first = F.relu(self.down(x))
        deep = F.relu(self.deep(F.max_pool2d(first, 2)))
        joined = torch.cat([first, F.relu(self.up(deep))], 1)
        out: Tensor = self.out(self.dropout(F.relu(self.join(joined))))
        return out


class Encoder(nn.Module):
    """A transformer encoder of padded sequences, averaged over what is no padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.layers, self.out = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits (N, C) of tokens and a mask (N, T), which is 1 where there is a token."""
        hidden = self.layers(self.words(tokens) + self.positions, src_key_padding_mask=mask == 0)
        weights = mask.unsqueeze(-1).to(hidden)
        out: Tensor = self.out((hidden * weights).sum(1) / weights.sum(1))
        return out


class CausalModel(nn.Module):
    """Next tokens by causal attention, with the embedding as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), -torch.inf).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, V, T) of the tokens that follow tokens (N, T)."""
        hidden = self.layer(self.words(tokens) + self.positions, src_mask=self.mask)
        out: Tensor = self.head(hidden).movedim(-1, 1)
        return out


class Recurrent(nn.Module):
    """A recurrent net, read out after the last step."""

    def __init__(self, cells: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.cells, self.dropout, self.out = cells(4, 8, batch_first=True), nn.Dropout(0.1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C) of sequences (N, T, 4)."""
        out: Tensor = self.out(self.dropout(self.cells(x)[0][:, -1]))
        return out


class GraphNet(nn.Module):
    """Two rounds of messages along the edges of graphs with six nodes, then the mean over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.dropout = nn.Dropout(0.1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Logits (N, C) of nodes (N, 6, 4) and edges (N, 6, 6)."""
        share = edges / edges.sum(-1, keepdim=True)
        hidden = F.relu(self.first(share @ nodes))
        out: Tensor = self.out(self.dropout(F.relu(self.second(share @ hidden)).mean(1)))
        return out


class VisionTransformer(nn.Module):
    """Patches of an image and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 4, stride=4)
        self.token, self.positions = (nn.Parameter(0.02 * torch.randn(1, n, WIDTH)) for n in (1, 5))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C) of images (N, 1, 8, 8)."""
        patches = self.patches(x).flatten(2).mT
        hidden = self.layer(torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions)
        out: Tensor = self.out(self.norm(hidden[:, 0]))
        return out


def bert() -> nn.Module:
    """A BERT of one layer, for classes of sequences."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    net: nn.Module = BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, max_position_embeddings=TOKENS, num_labels=CLASSES, **sizes)
    )
    return net


def gpt2_with_lora() -> nn.Module:
    """A GPT-2 of one layer with trainable adapters of rank 2."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=TOKENS, n_embd=WIDTH, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    lora = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    net: nn.Module = get_peft_model(GPT2LMHeadModel(config), lora)
    return net


@dataclass(frozen=True)
class Architecture:
    """A network as people bring it: how it is made, a loader of its rows, its likelihood, and its outputs."""

    name: str
    make: Callable[[], nn.Module]
    rows: Callable[[torch.Generator], list[Any]]
    likelihood: Likelihood
    outputs: Callable[[Any], Tensor] | None = None

    def module(self, seed: int) -> nn.Module:
        """The network with weights by the seed."""
        torch.manual_seed(seed)
        return self.make()

    def loader(self, seed: int) -> DataLoader[Any]:
        """Batches of its rows, the same for the same seed."""
        return DataLoader(self.rows(torch.Generator().manual_seed(seed)), batch_size=BATCH)  # type: ignore[arg-type]


def _images(size: int, *, pixels: bool = False) -> Callable[[torch.Generator], list[Any]]:
    def rows(generator: torch.Generator) -> list[Any]:
        count = ROWS // 3 if pixels else ROWS
        x = torch.randn(count, 1, size, size, generator=generator)
        if pixels:
            return list(zip(x, ((x > 0).long() + (x > 1).long()).squeeze(1), strict=True))
        return list(zip(x, torch.arange(count) % CLASSES, strict=True))

    return rows


def _sequences(generator: torch.Generator) -> list[Any]:
    x = torch.randn(ROWS, TOKENS, 4, generator=generator)
    return list(zip(x, torch.arange(ROWS) % CLASSES, strict=True))


def _tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and a mask that is 0 at the padded ends."""
    tokens = torch.randint(1, WORDS, (ROWS, TOKENS), generator=generator)
    length = torch.randint(3, TOKENS + 1, (ROWS, 1), generator=generator)
    return tokens, (torch.arange(TOKENS) < length).long()


def _padded(generator: torch.Generator) -> list[Any]:
    tokens, mask = _tokens(generator)
    labels = torch.arange(ROWS) % CLASSES
    return [{"tokens": t, "mask": m, "labels": y} for t, m, y in zip(tokens, mask, labels, strict=True)]


def _next_tokens(generator: torch.Generator) -> list[Any]:
    tokens, mask = _tokens(generator)
    following = tokens.roll(-1, 1).masked_fill(mask.roll(-1, 1) == 0, -100)
    following[:, -1] = -100
    return list(zip(tokens, following, strict=True))


def _for_transformers(*, following: bool) -> Callable[[torch.Generator], list[Any]]:
    def rows(generator: torch.Generator) -> list[Any]:
        tokens, mask = _tokens(generator)
        labels = torch.arange(ROWS) % CLASSES
        targets: Any = [y for _, y in _next_tokens(generator)] if following else labels
        names = ("input_ids", "attention_mask", "labels")
        return [dict(zip(names, row, strict=True)) for row in zip(tokens, mask, targets, strict=True)]

    return rows


def _graphs(generator: torch.Generator) -> list[Any]:
    nodes = torch.randn(ROWS, 6, 4, generator=generator)
    edges = (torch.rand(ROWS, 6, 6, generator=generator) < 0.4).float()
    edges = ((edges + edges.mT) > 0).float().maximum(torch.eye(6))
    labels = torch.arange(ROWS) % CLASSES
    return [{"nodes": n, "edges": e, "labels": y} for n, e, y in zip(nodes, edges, labels, strict=True)]


def classes_first(returned: Any) -> Tensor:
    """Logits (N, V, T) of a language model of transformers, which puts the words last."""
    logits: Tensor = returned.logits.movedim(-1, 1)
    return logits


ARCHITECTURES = (
    Architecture("CNN with batch norm", ConvolutionalNet, _images(8), Categorical()),
    Architecture("U-Net 64 x 64", UNet, _images(64, pixels=True), Categorical(positions=2)),
    Architecture("transformer with masks", Encoder, _padded, Categorical()),
    Architecture("causal model, tied head", CausalModel, _next_tokens, Categorical(positions=1)),
    Architecture("LSTM", lambda: Recurrent(nn.LSTM), _sequences, Categorical()),
    Architecture("GRU", lambda: Recurrent(nn.GRU), _sequences, Categorical()),
    Architecture("graph net", GraphNet, _graphs, Categorical()),
    Architecture("ViT, class token", VisionTransformer, _images(8), Categorical()),
    Architecture("BERT", bert, _for_transformers(following=False), Categorical()),
    Architecture(
        "GPT-2 with LoRA", gpt2_with_lora, _for_transformers(following=True), Categorical(positions=1), classes_first
    ),
)
