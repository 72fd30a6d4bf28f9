"""What all methods share whose rows of theta are Markov chains."""

from typing import ClassVar

import torch
from torch import Tensor

from posterity.errors import positive_whole, whole
from posterity.inference.method import Method, Target
from posterity.numerics.random import Key


class Chains(Method):
    """Markov chains that step together, theta (C, P): `warmup` steps, then every `thin`-th of `draws * thin` kept."""

    row: ClassVar[str] = "chain"

    draws: int
    warmup: int
    chains: int
    thin: int

    def _check_counts(self) -> None:
        """A one-line error for numbers of draws, chains and steps that cannot be."""
        name = type(self).__name__
        for field in ("draws", "chains", "thin"):
            positive_whole(f"{name}.{field}", getattr(self, field))
        whole(f"{name}.warmup", self.warmup)

    @property
    def takes_members(self) -> bool:
        """No: a row of theta is a chain."""
        return False

    def initial(self, joint: Target, key: Key) -> Tensor:
        """Newly initialised weights for each chain, (C, P)."""
        self._refuse_others(joint)
        return torch.stack([joint.fresh(key.fold(index)) for index in range(self.chains)])

    def each_chain(self, joint: Target, theta: Tensor) -> Tensor:
        """A copy of theta with a row for each chain, (C, P)."""
        self._refuse_others(joint)
        if theta.dim() > 1 and len(theta) != self.chains:
            raise ValueError(
                f"{type(self).__name__}.chains is {self.chains}, so start must be (P,) or ({self.chains}, P), one row "
                f"for each chain. Got {len(theta)} rows. Use chains={len(theta)}."
            )
        return theta.expand(self.chains, -1).clone(memory_format=torch.contiguous_format)

    def _refuse_others(self, joint: Target) -> None:
        """A one-line error for a problem that such chains cannot be those of."""
        name = type(self).__name__
        if joint.num_members not in (None, self.chains):
            raise ValueError(
                f"{name}.chains is {self.chains}, and the joint has {joint.num_members} members. Run one chain for "
                f"each: chains={joint.num_members}."
            )
        if joint.random_indices is not None:
            raise ValueError(
                f"{name} samples all weights, but the joint has some as points (random=). "
                "Freeze them at known values: joint.with_weights(patterns of those to sample)."
            )

    def keeps(self, step: int) -> bool:
        """Every `thin`-th after the warm-up."""
        return step > self.warmup and (step - self.warmup) % self.thin == 0
