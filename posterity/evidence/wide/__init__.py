"""Wide networks f(x) = (1/N) sum_j a_j sigma(<b_j, x>): tempered bounds, their limit, and the collapse to the prior."""

from posterity.evidence.wide.activation import Activation, Moments
from posterity.evidence.wide.collapse_law import CollapseLaw, collapse_law
from posterity.evidence.wide.logistic import Logistic
from posterity.evidence.wide.loss import Loss
from posterity.evidence.wide.neuron_prior import NeuronPrior
from posterity.evidence.wide.neurons import Neurons
from posterity.evidence.wide.optimum import Optimum, optimum
from posterity.evidence.wide.output_law import OutputLaw
from posterity.evidence.wide.problem import WideProblem
from posterity.evidence.wide.reading import neurons_of, problem_of
from posterity.evidence.wide.rectified import Rectified
from posterity.evidence.wide.sampled import Sampled, sampled_excess
from posterity.evidence.wide.smooth import Smooth
from posterity.evidence.wide.softmax import Softmax
from posterity.evidence.wide.square import Square

__all__ = [
    "Activation",
    "CollapseLaw",
    "Logistic",
    "Loss",
    "Moments",
    "NeuronPrior",
    "Neurons",
    "Optimum",
    "OutputLaw",
    "Rectified",
    "Sampled",
    "Smooth",
    "Softmax",
    "Square",
    "WideProblem",
    "collapse_law",
    "neurons_of",
    "optimum",
    "problem_of",
    "sampled_excess",
]
