"""The log evidence log p(D), its bounds and estimates, hyper-parameters that maximise it, and stacking.

The loops that alternate with a fit are in `methods`; the bounds of wide networks in closed form are in `theory`.
"""

from posterity.evidence.cavities import LeftOutRows, PredictiveFit, left_out_rows
from posterity.evidence.dropout import DropoutObjective, dropout_divergence, dropout_divergence_far
from posterity.evidence.elbo import Elbo, elbo
from posterity.evidence.importance import Importance, LeaveOneOut, importance, leave_one_out, prior_monte_carlo
from posterity.evidence.m_steps import Expected, Gamma, Maximisation, NoiseScale, PriorScale
from posterity.evidence.marginal import Groups, Marginal, PerLayer, PerTensor, Shared, laplace_evidence, residual_sums
from posterity.evidence.retuned import MacKayUpdate, ValidationGrid, marginal_likelihood, retuned
from posterity.evidence.stacking import Stacking, stacked
from posterity.evidence.tuning import Evidence, MacKay, Tuned, Tuning, present_precision, tuned_joint

__all__ = [
    "DropoutObjective",
    "Elbo",
    "Evidence",
    "Expected",
    "Gamma",
    "Groups",
    "Importance",
    "LeaveOneOut",
    "LeftOutRows",
    "MacKay",
    "MacKayUpdate",
    "Marginal",
    "Maximisation",
    "NoiseScale",
    "PerLayer",
    "PerTensor",
    "PredictiveFit",
    "PriorScale",
    "Shared",
    "Stacking",
    "Tuned",
    "Tuning",
    "ValidationGrid",
    "dropout_divergence",
    "dropout_divergence_far",
    "elbo",
    "importance",
    "laplace_evidence",
    "leave_one_out",
    "left_out_rows",
    "marginal_likelihood",
    "present_precision",
    "prior_monte_carlo",
    "residual_sums",
    "retuned",
    "stacked",
    "tuned_joint",
]
