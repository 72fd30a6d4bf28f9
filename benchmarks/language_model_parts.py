"""A transformer of GPT-2's size with adapters, and the Python standard library's sources as rows of bytes."""

import hashlib
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
DOMAIN = (
    *("asyncio", "concurrent", "ctypes", "email", "html", "http", "importlib", "json", "logging", "multiprocessing"),
    *("unittest", "urllib", "wsgiref", "xml", "xmlrpc"),
)
"""Packages whose modules are for fine-tuning or held out; the others are for pre-training."""
LEFT_OUT = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "encodings", "pydoc_data")
)
HELD_OUT = 3  # one of so many modules of the domain


@dataclass(frozen=True)
class Shape:
    """Sizes of the transformer; the defaults are those of GPT-2 small, but for the length of a row."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 512
    vocabulary: int = 50_257
    rank: int = 8


class Adapted(nn.Module):
    """A linear layer W x + b, and B A x beside it once `adapt` was called; B starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down: nn.Linear | None = None
        self.up: nn.Linear | None = None

    def adapt(self, rank: int) -> None:
        """Add the adapter."""
        width, device = self.base.in_features, self.base.weight.device
        self.down = nn.Linear(width, rank, bias=False, device=device)
        self.up = nn.Linear(rank, width, bias=False, device=device)
        nn.init.normal_(self.down.weight, std=width**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (..., width)."""
        out: Tensor = self.base(x)
        return out if self.down is None or self.up is None else out + self.up(self.down(x))


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a layer norm and beside a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = Adapted(width), nn.Linear(width, width), Adapted(width)
        self.mix, self.wide, self.narrow = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) to the same shape."""
        rows, length, width = x.shape
        seen = self.norm(x)
        query, key, value = (
            layer(seen).view(rows, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(rows, length, width))
        out: Tensor = x + self.narrow(functional.gelu(self.wide(self.second_norm(x)), approximate="tanh"))
        return out


class Transformer(nn.Module):
    """GPT-2 in plain torch, with random weights: learnt positions, and a head tied to the table of tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(shape.vocabulary, shape.width),
            nn.Embedding(shape.context, shape.width),
        )
        self.blocks, self.norm = nn.ModuleList(Block(shape) for _ in range(shape.layers)), nn.LayerNorm(shape.width)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                into_sum = name.endswith(("mix.weight", "narrow.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.layers) if into_sum else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def adapt(self, rank: int) -> None:
        """Freeze all weights, and add adapters to queries and values."""
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Adapted):
                module.adapt(rank)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (N, T, vocabulary) of the tokens after ids (N, T)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def loss(module: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a token, with the network in bfloat16."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = module(ids)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class Rows:
    """Windows of bytes (N, T + 1): inputs and the bytes after them, (N, T) each."""

    windows: Tensor

    @property
    def inputs(self) -> Tensor:
        """All bytes but the last of each window."""
        return self.windows[:, :-1].long()

    @property
    def targets(self) -> Tensor:
        """All bytes but the first of each window."""
        return self.windows[:, 1:].long()

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: slice | Tensor) -> "Rows":
        return Rows(self.windows[index])

    def chunks(self, size: int) -> Iterator["Rows"]:
        """In order, `size` at a time."""
        return (self[low : low + size] for low in range(0, len(self), size))


@dataclass(frozen=True)
class Corpus:
    """Rows for pre-training, fine-tuning and choosing settings, of modules that no weight has seen, and their sizes."""

    pretraining: Rows
    fine_tuning: Rows
    validation: Rows
    held_out: Rows
    facts: dict[str, int]


def modules() -> dict[str, list[tuple[str, bytes]]]:
    """Name and source of the modules for "pre-training", "fine-tuning" and "held-out", in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[str, list[tuple[str, bytes]]] = {"pre-training": [], "fine-tuning": [], "held-out": []}
    for path in sorted(root.rglob("*.py")):
        own = path.relative_to(root)
        if LEFT_OUT.isdisjoint(own.parts) and not own.name.startswith("test_"):
            name = ".".join(own.with_suffix("").parts)
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
            inside = "held-out" if number % HELD_OUT == 0 else "fine-tuning"
            parts[inside if own.parts[0] in DOMAIN else "pre-training"].append((name, path.read_bytes()))
    return parts


def corpus(context: int, fine_tuning: int, validation: int, held_out: int, seed: int, device: torch.device) -> Corpus:
    """At most so many windows of each part, chosen at random, on the device; all of them for pre-training."""
    parts = modules()
    generator = torch.Generator().manual_seed(seed)
    whole = {part: _windows(b"\n".join(source for _, source in own), context) for part, own in parts.items()}
    chosen = {part: rows[torch.randperm(len(rows), generator=generator)] for part, rows in whole.items()}
    own = chosen["fine-tuning"]
    if len(own) < fine_tuning + validation:
        raise ValueError(f"There must be {fine_tuning + validation} windows for fine-tuning. Got {len(own)}.")
    facts = {f"{part}, modules": len(own) for part, own in parts.items()}
    facts |= {f"{part}, bytes": sum(len(source) for _, source in own) for part, own in parts.items()}

    taken = own[:fine_tuning], own[fine_tuning : fine_tuning + validation], chosen["held-out"][:held_out]
    return Corpus(*(Rows(part.to(device)) for part in (chosen["pre-training"], *taken)), facts)


def _windows(source: bytes, context: int) -> Tensor:
    """Windows (N, context + 1) that do not overlap in what they predict."""
    stream = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    return stream.unfold(0, context + 1, context)


@torch.no_grad()
def averaged(module: nn.Module, draws: dict[str, Tensor], rows: Rows, size: int) -> Tensor:
    """Class probabilities (N T, 257) on the CPU, averaged over draws (S, ...) of the named weights, in float32.

    The classes are the bytes, and all other ids of the vocabulary together, so that log-likelihoods of bytes are exact.
    """
    weights = dict(module.named_parameters())
    before = {name: weights[name].clone() for name in draws}
    count = len(next(iter(draws.values())))
    parts = []
    for part in rows.chunks(size):
        total = torch.zeros((), device=part.inputs.device)
        for number in range(count):
            for name, values in draws.items():
                weights[name].copy_(values[number])
            logits = module(part.inputs).float()
            total = total + (logits[..., :BYTES] - logits.logsumexp(-1, keepdim=True)).exp()
        probs = total / count
        rest = (1.0 - probs.sum(-1, keepdim=True)).clamp_min(0.0)
        parts.append(torch.cat([probs, rest], -1).flatten(0, 1).cpu())
    for name, values in before.items():
        weights[name].copy_(values)
    return torch.cat(parts)


def adapters(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the trainable weights, as one draw (1, ...)."""
    return {name: p.detach().clone()[None] for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def put(module: nn.Module, draw: dict[str, Tensor]) -> None:
    """Set the named weights to a draw (1, ...)."""
    weights = dict(module.named_parameters())
    for name, values in draw.items():
        weights[name].copy_(values[0])
