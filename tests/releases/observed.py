"""What is looked at of a posterior, and when two looks agree."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from releases.added import FRAME, Estimator
from releases.cases import Case
from torch import Tensor

from posterity import Key
from posterity.estimators import BayesianRegressor
from posterity.posteriors import Posterior

Tensors = dict[str, Tensor]


def machine() -> dict[str, str]:
    """What the last bits of numbers depend on: matrix products take other ways on processors of another vendor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    vendor = next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "unknown")
    return {"torch": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability(), "cpu_vendor": vendor}


def observed(case: Case, posterior: Posterior) -> Tensors:
    """Weights, draws and predictions; what a posterior does not have, which it says by an error, is left out."""
    q = posterior if case.member is None else posterior.member(case.member)
    found: Tensors = {"point": posterior.point()}

    def look(name: str, at: Callable[[], Tensor]) -> None:
        try:
            found[name] = at()
        except (TypeError, ValueError):
            return

    look("theta", lambda: q.sample(3, Key(7)))
    if "theta" in found:
        look("log_density", lambda: q.log_density(found["theta"]))
    data = case.problem.data(shift=6, rows=4)
    if data is None:
        return {**found, **{f"draws.{name}": value for name, value in q.draws(3, seed=7).items()}}
    x, y = data
    found["outputs"] = q.outputs(x, 4, Key(8))
    predictive = q.predict(x, draws=8, integrator=case.integrator, seed=9)
    found["mean"], found["variance"], found["log_prob"] = predictive.mean, predictive.variance, predictive.log_prob(y)
    look("expected_log_prob", lambda: predictive.expected_log_prob(y))
    look("targets", lambda: predictive.sample(2, Key(10)))
    return found


def estimated(model: Estimator) -> Tensors:
    """What a fitted estimator predicts, with conformal intervals of numbers where it has them."""
    rows = FRAME[:6]
    predictive = model.predict_distribution(rows)
    found = {"mean": predictive.mean, "variance": predictive.variance}
    if isinstance(model, BayesianRegressor):
        found["interval"] = torch.stack([torch.as_tensor(end) for end in model.predict_interval(rows, 0.5)])
    return found


LATER = ("mode_distance",)
"""Columns of a trace that 0.1.0 did not record."""


def trace_of(trace: Any) -> Tensors:
    """The numbers of a run."""
    return {} if trace is None else {f"trace.{name}": trace[name] for name in trace if name not in LATER}


def plain(tensors: Tensors) -> Tensors:
    """As a file takes them."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All that there is to say of a tensor."""
    return tensor.dtype, tuple(tensor.shape), tensor.detach().cpu().contiguous().numpy().tobytes()


def check(found: Tensors, expected: Tensors, exact: bool) -> None:
    """Equal to the bit, or to four digits of the largest number."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if exact:
            assert bits(found[name]) == bits(tensor), f"{name}: {found[name]} and not {tensor}"
        else:
            largest = float(tensor.abs().amax()) if tensor.is_floating_point() and tensor.numel() else 0.0
            close = {"rtol": 1e-4, "atol": 1e-4 * largest, "equal_nan": True}
            torch.testing.assert_close(found[name], tensor, msg=partial("{}: {}".format, name), **close)  # type: ignore[arg-type]
