"""The choice of a temperature on validation rows."""

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posterity.errors import Diverged, NotPositiveDefinite, shown
from posterity.inference.executor import in_halves, largest_group
from posterity.inference.infer import infer
from posterity.inference.memory import plan
from posterity.inference.method import Method
from posterity.inference.validator import Validator
from posterity.model.joint import Joint
from posterity.model.problem import data_of
from posterity.model.tempering import Tempering
from posterity.posteriors.posterior import Posterior

FAILURES = (Diverged, NotPositiveDefinite, FloatingPointError)
logger = logging.getLogger("posterity")


@dataclass(frozen=True, eq=False)
class ChosenTempering:
    """The temperature with the lowest validation loss, and the losses of all temperatures.

    `temperings` has a member for each of the M temperatures, `losses` (M,) in float64 the mean negative log-likelihood
    in nats per validation row, infinite where the fit failed; `posterior` is the fit of the chosen `index`.
    """

    temperings: Tempering
    losses: Tensor
    index: int
    posterior: Posterior

    @property
    def tempering(self) -> Tempering:
        """The chosen temperature."""
        return self.temperings.member(self.index)

    def __str__(self) -> str:
        lines = [f"{'likelihood power':>16}  {'prior power':>11}  {'validation NLL':>14}"]
        for index, loss in enumerate(self.losses.tolist()):
            tempering = self.temperings.member(index)
            mark = "  chosen" if index == self.index else ""
            lines.append(f"{tempering.likelihood_power:>16.4g}  {tempering.prior_power:>11.4g}  {loss:>14.5f}{mark}")
        return "\n".join(lines)


def choose_tempering(
    method: Method | Sequence[Method],
    joint: Joint,
    data: object,
    temperings: Tempering,
    validation: object,
    *,
    start: Posterior | Tensor | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> ChosenTempering:
    """Fit the problem under each temperature and keep the one with the lowest validation loss.

    - `method`: a method, or several that each start from the result of the one before, such as MAP and mean field.
    - `temperings`: M at once, such as `Tempering.tempered(torch.logspace(-3, 0, 7))`; they replace the joint's own.
      Any family works: `cold`, `balanced`, `LITERATURE["zhang-2018"].grid(5)`.
    - `validation`: rows that are not in `data`; they score predictions, whose likelihood is never tempered.
    - `start`, `seed`, `progress`: as in `infer`, shared by all temperatures, with the order of rows and the noise.

    Temperatures step together as members where every method takes members, in groups that fit into memory, else one
    after the other; each fit is the same as alone. A group in which a fit fails is run in halves. The evidence, or a
    bound on it, is no substitute: it is not comparable across temperatures.

    >>> import posterity as po
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> y = 2 * x + 0.5 * po.Key(1).normal((20, 1))
    >>> joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(scale=0.5), po.priors.Normal(), num_data=10)
    >>> grid = po.Tempering.tempered(torch.tensor([0.1, 1.0, 10.0]))
    >>> choice = choose_tempering(po.methods.Conjugate(), joint, (x[::2], y[::2]), grid, (x[1::2], y[1::2]))
    >>> choice.tempering.eta == grid.member(int(choice.losses.argmin())).eta
    True
    """
    stages = _checked(method, joint, temperings)
    count = temperings.num_members
    assert count is not None
    rows = data_of(joint, data)
    validator = Validator(joint, validation)
    indices = list(range(count))

    def room(group: Sequence[int]) -> bool:
        problem = _tempered(joint, temperings, group)
        return all(plan(stage, problem, rows).fits for stage in stages)

    def fit(group: Sequence[int]) -> list[tuple[Posterior, float]]:
        problem, posterior = _tempered(joint, temperings, group), start
        for stage in stages:
            posterior, _ = infer(stage, problem, rows, start=posterior, seed=seed, progress=progress)
        assert isinstance(posterior, Posterior)
        members = [posterior] if len(group) == 1 else [posterior.member(slot) for slot in range(len(group))]
        return [(member, float(validator(member))) for member in members]

    most = count if all(stage.traits.takes_members for stage in stages) else 1
    size = largest_group(indices, most, room, logger.info)
    results: list[tuple[Posterior, float] | Exception] = []
    for low in range(0, count, size):
        for group, result in in_halves(indices[low : low + size], fit, FAILURES, logger.info):
            if isinstance(result, Exception):
                logger.warning("%s failed: %s", temperings.member(group[0]), result)
                results.append(result)
            else:
                results += result
    scores = [math.inf if isinstance(result, Exception) else result[1] for result in results]
    losses = torch.tensor(scores, dtype=torch.float64).nan_to_num(nan=math.inf, posinf=math.inf)
    index = int(losses.argmin())
    best = results[index]
    if isinstance(best, Exception):  # then all are
        raise best
    if not math.isfinite(float(losses[index])):
        raise ValueError("choose_tempering: no temperature has a finite loss on the validation rows. Look at the data.")
    if count > 2 and index in (0, count - 1):
        logger.warning("The best temperature, %s, is at the end of the grid: widen it.", temperings.member(index))
    return ChosenTempering(temperings, losses, index, best[0])


def _checked(method: object, joint: object, temperings: object) -> list[Method]:
    """Return the methods in their order; raises an error for arguments that cannot be used."""
    given = tuple(method) if isinstance(method, Sequence) else (method,)
    stages = [stage for stage in given if isinstance(stage, Method)]
    if not stages or len(stages) < len(given):
        raise TypeError(
            f"choose_tempering: the first argument must be a Method, or a list of them. Got {shown(method)}."
        )
    if not isinstance(joint, Joint):
        raise TypeError(f"choose_tempering: the problem must be a Joint. Got {shown(joint)}.")
    if not isinstance(temperings, Tempering) or temperings.num_members is None:
        raise TypeError(
            "choose_tempering: temperings must be a Tempering with one value for each temperature, such as "
            f"Tempering.tempered(torch.tensor([0.01, 0.1, 1.0])). Got {shown(temperings)}."
        )
    if dataclasses.replace(joint, tempering=Tempering.bayes()).num_members is not None:
        raise ValueError(
            f"choose_tempering: the joint must not have members. Got {joint.num_members}. Use joint.member(0)."
        )
    return stages


def _tempered(joint: Joint, temperings: Tempering, group: Sequence[int]) -> Joint:
    """Return the joint under the temperatures of a group, as members; without members for a single temperature."""
    if len(group) == 1:
        return dataclasses.replace(joint, tempering=temperings.member(group[0]))
    powers = (temperings.likelihood_power, temperings.prior_power)
    chosen = (power[list(group)] if isinstance(power, Tensor) else power for power in powers)
    return dataclasses.replace(joint, tempering=Tempering(*chosen))
