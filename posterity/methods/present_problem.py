"""The hyper-parameters of a problem as they stand in a run: in its state, and put back into the problem."""

import dataclasses
import hashlib
import json
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from posterity.model.joint import Joint
from posterity.storage import decode, encode

_PARTS = ("prior", "likelihood")
_MOST = 16  # problems that are remembered: those of the members of an ensemble step in turn

_Known = dict[tuple[str, tuple[float, ...]], Joint]
_KNOWN: "WeakKeyDictionary[Joint, _Known]" = WeakKeyDictionary()


class HyperParameters(NamedTuple):
    """Prior and likelihood as JSON with tensors, "" where they are still those of the problem.

    `held` (H,), on the CPU, are learnt parameters of the likelihood that a run does not learn along with the weights.
    """

    text: str
    tensors: dict[str, Tensor]
    held: Tensor

    @classmethod
    def of(cls, joint: Joint, theta: Tensor, *, hold: bool) -> "HyperParameters":
        """Those of the problem; what its likelihood learns is as theta (..., P) says, if it is to be held."""
        raw = joint.split(theta.reshape(-1, theta.shape[-1])[0])[1].detach().to("cpu", torch.float64)
        return cls("", {}, raw if hold else raw[:0])

    def moved(self, joint: Joint, new: Joint) -> "HyperParameters":
        """Those of `new`, which is the problem `joint` with other ones; what is not new is not looked into."""
        known = _KNOWN.get(joint, {})
        known.pop(self._key, None)
        first, tensors = _first(joint, self.held), dict[str, Tensor]()
        config: dict[str, Any] = {
            name: encode(getattr(new, name), tensors, name)
            for name in _PARTS
            if getattr(new, name) is not getattr(first, name)
        }
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return HyperParameters(json.dumps({"parts": config, "tensors": digest.hexdigest()}), tensors, self.held)

    def problem(self, joint: Joint) -> Joint:
        """The problem `joint` with these hyper-parameters: one object for equal ones, while they are in use."""
        key, known = self._key, _KNOWN.setdefault(joint, {})
        if key not in known:
            first = _first(joint, self.held)
            parts = json.loads(self.text)["parts"] if self.text else {}
            values: dict[str, Any] = {name: decode(value, self.tensors) for name, value in parts.items()}
            known[key] = dataclasses.replace(first, **values) if values else first
            if len(known) > _MOST:
                del known[next(iter(known))]
        return known[key]

    @property
    def _key(self) -> tuple[str, tuple[float, ...]]:
        return self.text, tuple(self.held.tolist())


def _first(joint: Joint, held: Tensor) -> Joint:
    """The problem as it is at the start of a run: another object, so that what is kept for one does not keep it."""
    likelihood = joint.likelihood.fixed(held.to(joint.device)) if held.numel() else joint.likelihood
    return dataclasses.replace(joint, likelihood=likelihood)
