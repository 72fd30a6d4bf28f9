"""Draws of whole functions, as Thompson sampling needs them."""

from collections.abc import Callable, Iterator, Sequence
from typing import final, overload

import torch
from torch import Tensor

from posterity.model.batch import Inputs

Evaluation = Callable[[Inputs, Tensor], Tensor]
"""Outputs (s, N, *event) of the functions of these numbers (s,), on the CPU, at the inputs."""


@final
class Functions(Sequence["Functions"]):
    """Functions drawn from a posterior, each the same at every call; made by `q.functions(draws, key)`.

    `functions(x)` are the network outputs of all of them at x, (S, N, *event), and `functions[s](x)` those of one,
    (N, *event). `x` is what `predict` takes; where it requires a gradient, so do the outputs, so that a function can be
    maximised by gradients. Rows go in chunks of `batch_size`.
    """

    def __init__(
        self, evaluate: Callable[[object, Tensor, int], Tensor], numbers: Tensor, *, single: bool = False
    ) -> None:
        self._evaluate, self._numbers, self._single = evaluate, numbers, single

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> "Functions": ...
    @overload
    def __getitem__(self, index: slice) -> "Functions": ...
    def __getitem__(self, index: int | slice) -> "Functions":
        """One of the functions, or some of them."""
        if isinstance(index, slice):
            return Functions(self._evaluate, self._numbers[index])
        return Functions(self._evaluate, self._numbers[index].reshape(1), single=True)

    def __iter__(self) -> Iterator["Functions"]:
        return (self[index] for index in range(len(self)))

    def __call__(self, inputs: object, *, batch_size: int = 1024) -> Tensor:
        """Outputs at the inputs, (S, N, *event), or (N, *event) of a single function."""
        outputs = self._evaluate(inputs, self._numbers, batch_size)
        return outputs[0] if self._single else outputs

    def __repr__(self) -> str:
        return f"{len(self)} function{'s' * (len(self) > 1)}"


def of_parts(parts: Sequence[tuple[Evaluation, int]], order: Tensor) -> Evaluation:
    """The functions of several evaluations, each of so many, in the order (S,) of a permutation."""
    ends = torch.tensor([count for _, count in parts], device="cpu").cumsum(0).tolist()

    def evaluate(inputs: Inputs, numbers: Tensor) -> Tensor:
        wanted = order[numbers]
        outputs, slots = list[Tensor](), list[Tensor]()
        for (own, count), end in zip(parts, ends, strict=True):
            here = ((wanted >= end - count) & (wanted < end)).nonzero().squeeze(1)
            if len(here):
                outputs.append(own(inputs, wanted[here] - (end - count)))
                slots.append(here)
        return torch.cat(outputs)[torch.cat(slots).argsort().to(outputs[0].device)]

    return evaluate
