"""What the Laplace approximation takes in memory, and what it would with other structures."""

import dataclasses
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posterity.curvature import CorrectedKronecker, Diagonal, Full, GaussNewton, Kronecker, Structure
from posterity.curvature.curvature import num_random
from posterity.curvature.derivatives import CACHE, DEVICE, LEAST_ROWS
from posterity.curvature.survey import Survey, survey
from posterity.inference.memory import theta_bytes
from posterity.inference.method import Target
from posterity.jacobians.jacobian import chunk_size
from posterity.methods.parts.subset import AllWeights, LastLayer, narrowed
from posterity.model.data import Data
from posterity.model.joint import Joint

if TYPE_CHECKING:
    from posterity.methods.laplace import Laplace

FORMED = 6  # matrices of a dense fit: sums, what is added, the precision, its factor, and copies between them
TUNED = 12  # vectors of all weights that one evaluation of the evidence with its gradient goes through


def laplace_bytes(method: "Laplace", joint: Target, data: Data) -> dict[str, int]:
    """Bytes by what they are for."""
    weights = {"weights": 3 * theta_bytes(joint)}
    if not isinstance(joint, Joint):
        return {**weights, "curvature and precision": FORMED * 8 * joint.size**2}
    inputs = data.first().member(0).inputs
    joint = method.subset.of(joint, inputs)
    known = survey(joint, inputs)
    chosen, choosing = _chosen(method, joint), 0
    outputs, structure = max(1, prod(known.event)), method.structure_for(narrowed(joint, chosen))
    if len(chosen):  # after a pass for the variances of all
        choosing = Diagonal().bytes(known, joint.num_data, outputs)
        known = dataclasses.replace(known, select=chosen)
    columns = method.curvature.num_columns(outputs)
    kept = structure.bytes(known, joint.num_data, columns)
    if not method.curvature.factored:
        kept = max(kept, FORMED * 8 * known.size**2)
    rows = min(joint.num_data, joint.num_data if method.batch_size is None else method.batch_size)
    members = joint.num_members or 1
    return {
        **weights,
        "derivatives of some rows": _derivatives(joint, known, rows, columns),
        "curvature and precision": members * max(kept, choosing),
        **({} if method.tuning is None else {"tuning": TUNED * 8 * known.size}),
    }


def laplace_prediction_bytes(method: "Laplace", joint: Target, data: Data, rows: int) -> int:
    """Bytes of derivatives and covariances of the outputs at so many rows."""
    if not isinstance(joint, Joint):
        return 0
    inputs = data.first().member(0).inputs
    joint = method.subset.of(joint, inputs)
    known = survey(joint, inputs)
    outputs = max(1, prod(known.event))
    found = _derivatives(joint, known, rows, outputs) + 8 * rows * outputs**2
    if not isinstance(method.structure_for(narrowed(joint, _chosen(method, joint))), Full):
        return found
    dense = min(rows * outputs * known.size, max(outputs * known.size, chunk_size(joint.device)))  # rows of a Jacobian
    return found + 3 * 8 * dense


def _chosen(method: "Laplace", joint: Joint) -> Tensor:
    """As many places of theta as single weights will be chosen."""
    count = method.subset.count
    return torch.arange(0 if count is None else min(count, num_random(joint)))


def _derivatives(joint: Joint, known: Survey, rows: int, columns: int) -> int:
    """What the derivatives of one chunk of rows take: see `derivatives`."""
    budget = CACHE if joint.device.type == "cpu" else DEVICE
    entry = joint.dtype.itemsize * max(1, known.row_entries)
    chunk = min(rows, max(LEAST_ROWS, budget // (entry * (2 + columns))))
    together = min(columns, max(1, budget // (entry * chunk) - 2))
    return chunk * (entry * (2 + 2 * together) + joint.dtype.itemsize * known.row_features)


def laplace_alternatives(method: "Laplace", joint: Target, data: Data) -> dict[str, int]:
    """Bytes in all with other structures and with the last layer alone, best first."""
    if not isinstance(joint, Joint):
        return {}
    single = isinstance(joint.random, torch.Tensor) or method.subset.count is not None
    structures = (Full(), Diagonal()) if single else (Full(), CorrectedKronecker(), Kronecker(), Diagonal())
    found = {}
    for structure in structures:
        if method.curvature.factored or isinstance(structure, Full):
            found[f"structure={_name(structure)}"] = dataclasses.replace(method, structure=structure)
        else:
            other = dataclasses.replace(method, structure=structure, curvature=GaussNewton())
            found[f"structure={_name(structure)}, curvature=GaussNewton()"] = other
    if isinstance(method.subset, AllWeights) and not isinstance(joint.random, torch.Tensor):
        try:
            LastLayer().of(joint, data.first().member(0).inputs)
            found["subset=LastLayer()"] = dataclasses.replace(method, subset=LastLayer(), structure=None)
        except ValueError:  # the network has none, or it is not among the random weights
            pass
    return {name: sum(laplace_bytes(other, joint, data).values()) for name, other in found.items()}


def _name(structure: Structure) -> str:
    """The structure as one calls it, without settings that are at their defaults."""
    kind = type(structure)
    return f"{kind.__name__}()" if structure == kind() else str(structure)


def described(method: "Laplace", joint: Target, data: Data) -> str:
    """The settings that decide about the size."""
    if isinstance(joint, Joint):
        joint = method.subset.of(joint, data.first().member(0).inputs)
        joint = narrowed(joint, _chosen(method, joint))
    structure = _name(method.structure_for(joint))
    return f"Laplace with {method.curvature} and {structure} over {num_random(joint):,} weights"
