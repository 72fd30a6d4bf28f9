"""`posterity doctor`: checks the installation."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import typer

import posterity
from posterity.cli.frame import options as o

OK: Literal["ok"] = "ok"
MISSING: Literal["missing"] = "missing"
FAILED: Literal["FAILED"] = "FAILED"
REQUIRED = ("torch", "numpy", "safetensors", "typer", "rich", "platformdirs", "pyarrow", "scikit-learn")
OPTIONAL = {
    "matplotlib": "figures: pip install 'posterity[report]'",
    "pytest": "the tests: pip install 'posterity[dev]'",
    "hypothesis": "the tests: pip install 'posterity[dev]'",
}


@dataclass(frozen=True)
class Finding:
    """The result of one check: its name, its status and a detail. Only required checks decide the outcome."""

    name: str
    status: Literal["ok", "missing", "FAILED"]
    detail: str
    required: bool = True


def doctor(as_json: o.Json = False) -> None:
    """Check the installation: versions, devices, data folders, and a fit with a known answer."""
    import platform

    from posterity.cli.frame.output import console, print_json

    findings = [Finding("posterity", OK, posterity.__version__), Finding("python", OK, platform.python_version())]
    findings += [_package(name, "", required=True) for name in REQUIRED]
    findings += [_package(name, purpose, required=False) for name, purpose in OPTIONAL.items()]
    for name, look in (("CPU threads", _threads), ("CUDA", _cuda), ("data sets", _data), ("cache folder", _cache)):
        findings.append(_guarded(name, look, required=False))
    findings.append(_guarded("self-check", _self_check, required=True))
    healthy = all(finding.status == OK for finding in findings if finding.required)
    if as_json:
        print_json({"ok": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        from rich.table import Table
        from rich.text import Text

        styles = {OK: "green", MISSING: "yellow", FAILED: "bold red"}
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in findings:
            table.add_row(Text(finding.name), Text(finding.status, styles[finding.status]), Text(finding.detail))
        out = console()
        out.print(table)
        verdict = "Everything required works." if healthy else "Something required does not work: see FAILED above."
        out.print(Text(verdict, "bold green" if healthy else "bold red"))
    if not healthy:
        raise typer.Exit(1)


def _package(name: str, purpose: str, *, required: bool) -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding(name, OK, version(name), required)
    except PackageNotFoundError:
        return Finding(name, FAILED if required else MISSING, purpose or "not installed", required)


def _guarded(name: str, look: Callable[[], str], *, required: bool) -> Finding:
    """Return the finding of `look`, or its error as a finding."""
    try:
        return Finding(name, OK, look(), required)
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        return Finding(name, FAILED, line, required)


def _threads() -> str:
    import torch

    return f"{torch.get_num_threads()} of {os.cpu_count()} cores"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no device; everything runs on the CPU"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _data() -> str:
    from pathlib import Path

    from posterity.datasets import TOYS, cache_folder

    given = os.environ.get("POSTERITY_DATA", "")
    folders = ([Path(given).expanduser()] if given else []) + [cache_folder()]
    lines = [f"built in: {', '.join(TOYS)}"]
    for folder in folders:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
        lines.append(f"in {folder}: {', '.join(names) or 'none'}")
    return "; ".join(lines) + ("" if given else " (POSTERITY_DATA is not set)")


def _cache() -> str:
    from posterity.datasets import cache_folder
    from posterity.storage import disk

    folder = cache_folder()
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        probe = disk.temporary(folder)
        disk.write(probe, [b"posterity"])
        disk.remove(probe)
    finally:
        for path in new:  # innermost first: leave nothing behind that was not there
            path.rmdir()
    return f"{folder} can be written"


def _self_check() -> str:
    """Fit a linear regression whose posterior is known, and compare mean, covariance and evidence."""
    import math

    import torch

    from posterity.inference import infer
    from posterity.likelihoods import Gaussian
    from posterity.methods import Conjugate
    from posterity.model import Joint
    from posterity.networks import MLP
    from posterity.numerics import Key
    from posterity.posteriors import Linearized
    from posterity.priors import Normal

    noise, scale, count = 0.5, 2.0, 20
    x = torch.linspace(-1.0, 1.0, count, dtype=torch.float64)[:, None]
    y = 1.5 * x - 0.5 + noise * Key(0).normal((count, 1), torch.float64)
    joint = Joint(MLP((1, 1)).double(), Gaussian(noise), Normal(scale), count)
    posterior, _ = infer(Conjugate(), joint, (x, y), progress=False)
    assert isinstance(posterior, Linearized)
    assert posterior.log_evidence is not None
    design = torch.cat([x, torch.ones_like(x)], dim=1)  # weight and bias
    covariance = torch.linalg.inv(design.T @ design / noise**2 + torch.eye(2, dtype=torch.float64) / scale**2)
    mean = covariance @ design.T @ y[:, 0] / noise**2
    marginal = noise**2 * torch.eye(count, dtype=torch.float64) + scale**2 * design @ design.T
    evidence = -0.5 * (y.T @ torch.linalg.solve(marginal, y))[0, 0] - 0.5 * torch.logdet(2 * math.pi * marginal)
    errors = (
        (posterior.point() - mean).abs().max(),
        (posterior.gaussian.precision.covariance() - covariance).abs().max(),
        (posterior.log_evidence - evidence).abs(),
    )
    worst = max(float(error) for error in errors)
    if not worst < 1e-8:
        raise ArithmeticError(f"the exact posterior of a linear regression is missed by {worst:.2g}")
    return f"the exact posterior of a linear regression is met to {worst:.0e}"
