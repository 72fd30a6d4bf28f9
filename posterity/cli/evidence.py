"""Hyper-parameters and log evidence of a posterior, as the command line tells them."""

import math

import torch
from torch import Tensor

from posterity.cli.tasks import Task, label
from posterity.likelihoods import Gaussian
from posterity.posteriors import Linearized, Posterior
from posterity.priors import Normal


def evidence(posterior: Posterior, task: Task) -> dict[str, float] | None:
    """Log evidence in nats, and the prior scale and noise for which it is, tuned or not; None where there is none.

    Noise and evidence are those of the targets in the units of the file; the prior is that of the network's weights.
    """
    if not isinstance(posterior, Linearized) or posterior.log_evidence is None:
        return None
    joint, scale = task.joint, task.source.scale
    power, count = float(joint.tempering.likelihood_power), len(task.data.train)
    found = {"log_evidence": float(posterior.log_evidence) - power * count * math.log(scale)}
    prior, likelihood = posterior.joint.prior, posterior.joint.likelihood  # type: ignore[union-attr]
    if isinstance(prior, Normal) and not isinstance(prior.scale, Tensor):
        found["prior_scale"] = float(prior.scale)
    if isinstance(likelihood, Gaussian):
        found["noise"] = float(torch.as_tensor(likelihood.scale)) * scale
    return found


def evidence_line(method: str, task: Task, found: dict[str, float]) -> str:
    """The same in a line."""
    names = {"prior_scale": "prior scale", "noise": "noise"}
    known = [f"{text} {found[key]:.4g}" for key, text in names.items() if key in found]
    how = " tuned by the evidence" if method == "laplace" and task.settings.tune else ""
    return f"{label(method)}{how}: {', '.join(known)}, log evidence {found['log_evidence']:.2f} nats."
