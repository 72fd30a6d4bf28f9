"""The settings of a parameter group: whether they can be, and what a step makes of them."""

import math
from typing import Any, NamedTuple

from posterity.errors import fraction, positive, positive_whole, shown

_ESTIMATES = ("price", "gradsq")


class Settings(NamedTuple):
    """The numbers of one step, and whether the Hessian comes from squares of gradients."""

    lr: float  # the whole factor of the mean's step
    beta1: float
    beta2: float
    ess: float
    correction: float  # of the momentum's start at zero
    radius: float
    squares: bool


def step_settings(group: dict[str, Any]) -> Settings:
    """The numbers of the step that `group["step"]` counts already."""
    return Settings(
        lr=group["lr"] * (group["hess_init"] + group["weight_decay"] if group["rescale_lr"] else 1.0),
        beta1=group["beta1"],
        beta2=group["beta2"],
        ess=group["ess"],
        correction=1.0 - group["beta1"] ** group["step"] if group["debias"] else 1.0,
        radius=group["clip_radius"],
        squares=group["hess_approx"] == "gradsq",
    )


def check_group(group: dict[str, Any]) -> None:
    """Refuse settings that cannot be."""
    for name in ("lr", "ess", "hess_init", "weight_decay"):
        positive(f"IVON.{name}", group[name])
    positive_whole("IVON.mc_samples", group["mc_samples"])
    for name in ("beta1", "beta2"):
        fraction(f"IVON.{name}", group[name])
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise ValueError(f"IVON.seed must be a whole number. Got {shown(group['seed'])}.")
    if group["clip_radius"] != math.inf:
        positive("IVON.clip_radius", group["clip_radius"], "or infinity")
    if group["hess_approx"] not in _ESTIMATES:
        raise ValueError(f"IVON.hess_approx must be one of {_ESTIMATES}. Got {shown(group['hess_approx'])}.")
    for p in group["params"]:
        if not p.is_floating_point():
            raise ValueError(f"IVON: parameters must be real numbers. Got one of {p.dtype}.")
