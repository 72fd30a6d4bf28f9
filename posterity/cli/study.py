"""`posterity study`: worked experiments, from data to figures and numbers; one command for each."""

from typing import Any

import typer
from typer.core import TyperGroup

from posterity.cli.study_calibration import calibration
from posterity.cli.study_collapse import collapse
from posterity.cli.study_dropout import dropout
from posterity.cli.study_gradients import gradients
from posterity.cli.study_hyperparameters import hyperparameters
from posterity.cli.study_images import images
from posterity.cli.study_logistic import logistic
from posterity.cli.study_mixtures import mixtures
from posterity.cli.study_moons import moons
from posterity.cli.study_penalties import penalties
from posterity.cli.study_posteriors import posteriors
from posterity.cli.study_temperature import temperature
from posterity.cli.study_uci import uci


class _Studies(TyperGroup):
    """The commands, with an own word on an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # the context's class moved between typer's versions
        """The command that the first word names, or the nearest one in a `UsageError`."""
        if args[0] not in self.commands:
            from posterity.cli.errors import UsageError
            from posterity.errors import unknown

            message = unknown("study", args[0], self.commands)
            raise UsageError(message, f"the studies are {', '.join(self.commands)}.")
        return super().resolve_command(ctx, args)


study = typer.Typer(cls=_Studies, help="Run a study: figures and numbers in a folder.")
for one in (
    logistic,
    gradients,
    images,
    uci,
    dropout,
    moons,
    calibration,
    posteriors,
    mixtures,
    hyperparameters,
    collapse,
    temperature,
    penalties,
):
    study.command()(one)
