"""Whether uncertainty tells foreign inputs from familiar ones."""

import torch
from torch import Tensor

from posterity.errors import BadData
from posterity.metrics.scored import classification
from posterity.predictive.predictive import Predictive


def out_of_distribution_auroc(inside: Predictive, outside: Predictive) -> float:
    """Probability that a foreign input has a larger predictive entropy than a familiar one, ties counting half.

    **Math**: the area under the receiver operating characteristic of the entropy as a detector,
    mean over pairs of 1[H_out > H_in] + 1[H_out = H_in] / 2: 1 is perfect, 1/2 is chance. Exact, by ranks.

    **Cost**: O(N log N).

    **References**: Hendrycks and Gimpel (2017), A baseline for detecting misclassified and out-of-distribution
    examples.

    >>> from posterity.predictive.classes import ClassPredictive
    >>> inside = ClassPredictive(torch.tensor([[0.9, 0.1], [0.8, 0.2]]))
    >>> outside = ClassPredictive(torch.tensor([[0.5, 0.5], [0.2, 0.8]]))
    >>> out_of_distribution_auroc(inside, outside)  # (1 + 1 + 1 + 1/2) / 4
    0.875
    """
    for pred in (inside, outside):
        classification("out_of_distribution_auroc", pred, "a classification model")
        if not len(pred):
            raise BadData("out_of_distribution_auroc needs at least one row on either side. Got none. Check the data.")
    return _auroc(_entropy(inside), _entropy(outside))


def _entropy(pred: Predictive) -> Tensor:
    """Entropy of each label, (R,). The order of the classes must not matter, not even in the last digit."""
    probs = pred.probs.double().movedim(1, -1)
    entropy: Tensor = torch.special.entr(probs).sort(-1).values.sum(-1)
    return entropy.reshape(-1).cpu()


def _auroc(low: Tensor, high: Tensor) -> float:
    """Share of pairs with high above low; ties count half."""
    ordered = low.sort().values
    below, upto = torch.searchsorted(ordered, high), torch.searchsorted(ordered, high, right=True)
    return float((below + upto).double().mean()) / (2.0 * len(low))
