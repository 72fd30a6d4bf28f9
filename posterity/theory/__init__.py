"""Theory of wide networks: bounds, their optimum, collapse and gradient flow, function priors, signals.

Everything here is about networks of one hidden layer, or of any width. Fits of real networks are in `methods`.
"""

from posterity.theory.activations import Activation, Moments, Rectified, Smooth
from posterity.theory.flow import Flow, particle_flow
from posterity.theory.function_prior import FunctionPrior, matched_prior, wasserstein_distance
from posterity.theory.losses import Logistic, Loss, OutputLaw, Sampled, Softmax, Square, sampled_excess
from posterity.theory.neurons import NeuronPrior, Neurons
from posterity.theory.signal_propagation import Signals, signal_propagation
from posterity.theory.wide import CollapseLaw, Optimum, WideProblem, collapse_law, neurons_of, optimum, problem_of

__all__ = [
    "Activation",
    "CollapseLaw",
    "Flow",
    "FunctionPrior",
    "Logistic",
    "Loss",
    "Moments",
    "NeuronPrior",
    "Neurons",
    "Optimum",
    "OutputLaw",
    "Rectified",
    "Sampled",
    "Signals",
    "Smooth",
    "Softmax",
    "Square",
    "WideProblem",
    "collapse_law",
    "matched_prior",
    "neurons_of",
    "optimum",
    "particle_flow",
    "problem_of",
    "sampled_excess",
    "signal_propagation",
    "wasserstein_distance",
]
