"""The memory of a curvature: of the passes that sum it, of the Gaussian that is made of it, and of its predictions."""

from math import prod

import torch

from posterity.curvature import Curvature, Full, GaussNewton, Structure
from posterity.curvature.derivatives import derivative_bytes
from posterity.curvature.survey import Survey
from posterity.inference.method import PREDICTED_ROWS
from posterity.jacobians.jacobian import chunk_size
from posterity.model import Joint
from posterity.predictive.probit import default_integrator

FORMED = 6  # matrices of a dense fit: sums, summands, the precision, its factor, and copies between them
PER_OUTPUT = 6  # numbers for each output of a prediction: moments, logits, probabilities, and copies of them
FEW_OUTPUTS = 64  # up to which the columns of a curvature are counted on a row
LOG_PRIOR = 3  # vectors of all weights for the log prior: theta in float64, whitened, and squared
TUNED = 12  # vectors of all weights in one evaluation of the evidence with its gradient


def formed_bytes(size: int) -> int:
    """Return the bytes of a fit that forms a dense matrix of the curvature, as of a Hessian."""
    return FORMED * 8 * size**2


def _columns(joint: Joint, known: Survey, curvature: Curvature, structure: Structure) -> tuple[int, int]:
    """The columns of a row, by which rows are cut into chunks, and those that are made; 0 in closed form."""
    outputs = max(1, prod(known.event))
    if known.only_output and curvature.in_closed_form(joint.likelihood, known):
        return 0, outputs
    columns = curvature.columns_for(outputs, structure.whole(known), joint.num_data)
    dense = structure.whole(known) and joint.num_data * columns >= known.size
    if dense or not isinstance(curvature, GaussNewton) or outputs > FEW_OUTPUTS:
        return columns, columns
    likelihood = joint.member(0).likelihood
    fixed = likelihood.fixed(likelihood.free(joint.network.initial))
    try:
        root = fixed.output_root(torch.zeros(1, *known.event, dtype=joint.dtype), len(known.event))
    except TypeError:  # a likelihood without Fisher information: the run says what it needs
        return columns, columns
    return columns, len(root)  # classes: one less


def pass_bytes(
    joint: Joint, known: Survey, curvature: Curvature, structure: Structure, batch_size: int | None
) -> dict[str, int]:
    """Return the bytes of a pass over the rows: derivatives, and the sums of all members."""
    columns, made = _columns(joint, known, curvature, structure)
    rows = min(joint.num_data, joint.num_data if batch_size is None else batch_size)
    summed = structure.summed_bytes(known, joint.num_data, made, joint.dtype.itemsize)
    return {
        "derivatives of some rows": derivative_bytes(joint, known, rows, columns, made),
        "curvature and precision": (joint.num_members or 1) * summed,
    }


def end_bytes(
    joint: Joint, known: Survey, curvature: Curvature, structure: Structure, *, tuned: bool, rows: int
) -> list[dict[str, int]]:
    """Return the bytes at the end of a run, of all members, in its phases.

    They are those while precisions are made, with the prior, when the evidence is `tuned`, and when so many `rows` (0:
    none) are predicted.
    """
    made = _columns(joint, known, curvature, structure)[1]
    kept = structure.bytes(known, joint.num_data, made)
    if not curvature.factored:
        kept = max(kept, formed_bytes(known.size))
    name, members = "curvature and precision", joint.num_members or 1
    prior = members * 2 * 8 * joint.num_random
    ends = [
        {name: members * kept + structure.making_bytes(known), "prior": prior},
        {name: members * kept, "prior": prior + LOG_PRIOR * 8 * joint.num_weights},
    ]
    if tuned:  # eigenvalues of a matrix that is kept whole, or of inner products of its rows, by a copy
        side = structure.whole(known)
        side = min(side, joint.num_data * made) if isinstance(structure, Full) else side
        ends.append({name: members * kept, "tuning": 8 * (TUNED * known.size + side**2)})
    if rows:
        ends.append(
            {name: members * kept, "prior": prior, "predictions": predicted_bytes(joint, known, structure, rows)}
        )
    return ends


def predicted_bytes(joint: Joint, known: Survey, structure: Structure, rows: int = PREDICTED_ROWS) -> int:
    """Return the bytes of predictions at so many rows."""
    outputs = max(1, prod(known.event))
    columns = 0 if known.only_output else outputs
    found = derivative_bytes(joint, known, rows, columns)
    if columns:  # they are stacked, and multiplied
        found += 2 * (found - derivative_bytes(joint, known, rows, columns, made=0))
    example = torch.empty(1, *known.event, dtype=joint.dtype)
    marginal = default_integrator(joint.likelihood, example).marginal(joint.likelihood, example)
    found += 8 * rows * outputs * (PER_OUTPUT if marginal else outputs)
    if isinstance(structure, Full):  # rows of a Jacobian
        row = outputs * known.size
        found += 3 * 8 * min(rows * row, max(row, chunk_size(joint.device)))
    return found
