"""The scores of a fit: how it predicts, and how much of the network is left."""

import torch
from torch import Tensor

from posterity import metrics
from posterity.errors import Diverged
from posterity.penalties.training import penalised
from posterity.posteriors import Point
from posterity.predictive import Predictive
from posterity.pruning.pruning import pruned
from posterity_studies.penalties.protocol import Rows

ROWS = 2048  # of a chunk of predictions
COMPARED = 256  # test images that the smaller module is tried on
VANISHED = "vanished "  # before the name of a layer


def scores(posterior: Point, rows: Rows) -> dict[str, float]:
    """Accuracy and NLL on test and held-out rows; zeros and filters that vanished; whether the smaller module agrees.

    `zeros` is the share of penalised weights that are exactly zero, `filters_left` and `weights_left` are shares of the
    hidden units and of all weights that `pruned` keeps, `vanished <layer>` counts the units that it removes, and
    `pruned_difference` is the largest of the differences between outputs of both modules on 256 test images, in
    float32 and (`exact_difference`) in float64. Diverged where an output is not finite.
    """
    found = {}
    for prefix, part in (("", rows.test), ("held_out_", rows.held_out)):
        predictive = _predicted(posterior, part.inputs)
        found[f"{prefix}accuracy"] = metrics.accuracy(predictive, part.targets)
        found[f"{prefix}nll"] = metrics.negative_log_likelihood(predictive, part.targets)
        found[f"{prefix}ece"] = metrics.expected_calibration_error(predictive, part.targets)
    module = posterior.module()
    weights = [weight.parameter for weight in penalised(module).values()]
    found["zeros"] = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    smaller = pruned(module)
    images = rows.test.inputs[:COMPARED]
    # By default convolutions on a GPU round to ten binary digits, which the difference would show.
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found["pruned_difference"] = float((smaller.module(images) - module(images)).abs().max())
        exact = images.double()
        precise = pruned(module.double()).module
        found["exact_difference"] = float((precise(exact) - module(exact)).abs().max())
    before, after = (sum(one[place] for one in smaller.units.values()) for place in (0, 1))
    found["filters_left"] = after / before
    found["weights_left"] = smaller.weights[1] / smaller.weights[0]
    return found | {VANISHED + name: float(had - has) for name, (had, has) in smaller.units.items()}


def _predicted(posterior: Point, images: Tensor) -> Predictive:
    try:
        return posterior.predict(images, batch_size=ROWS)
    except ValueError as error:
        module = posterior.module()
        with torch.no_grad():
            if all(bool(module(chunk).isfinite().all()) for chunk in torch.split(images, ROWS)):
                raise
        raise Diverged("Its outputs are not finite.", step=0, tensor="the outputs") from error
