"""How sure a prediction is of its label."""

from torch import Tensor

from posterity.metrics.scored import by_label, classification, labelled, mean_over_rows, per_row
from posterity.predictive.classes import ClassPredictive
from posterity.predictive.predictive import Predictive


@mean_over_rows
def confidence(pred: Predictive, y: Tensor) -> Tensor:
    """Mean over labels of the largest averaged class probability, 1/C to 1; calibrated where it equals the accuracy.

    `y` is checked and not used.

    >>> import torch
    >>> confidence(ClassPredictive(torch.tensor([[0.75, 0.25], [0.5, 0.5]])), torch.tensor([0, 0]))
    0.625
    """
    return per_row(labelled("confidence", pred, y, "interval_width")[0].amax(-1), pred)


@mean_over_rows
def gibbs_confidence(pred: Predictive, y: Tensor) -> Tensor:
    """Mean over labels and posterior draws of the largest class probability: that of a weight drawn at random.

    Never below `confidence`. It needs the posterior draws. `y` is checked and not used.

    >>> import torch
    >>> draws = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> gibbs_confidence(ClassPredictive(draws.mean(0), draws), torch.tensor([0]))
    1.0
    """
    classification("gibbs_confidence", pred, "interval_width")
    labelled("gibbs_confidence", pred, y)
    draws = pred.draws if isinstance(pred, ClassPredictive) else None
    if draws is None:
        raise ValueError(
            "gibbs_confidence needs the class probabilities of each posterior draw. Got averaged probabilities only. "
            "Predict with MonteCarlo(), or use confidence."
        )
    return per_row(by_label(draws.amax(2).movedim(0, 1)).mean(-1), pred)
