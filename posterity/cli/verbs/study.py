"""`posterity study`: worked experiments, from data to figures and numbers, found by name in `posterity_studies`."""

import pkgutil
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup


class _Studies(TyperGroup):
    """The commands, with an own word on an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # the context's class moved between typer's versions
        """The command that the first word names, or the nearest one in a `UsageError`."""
        if args[0] not in self.commands:
            from posterity.cli.frame.output import UsageError
            from posterity.errors import unknown

            message = unknown("study", args[0], self.commands)
            raise UsageError(message, f"the studies are {', '.join(self.commands)}.")
        return super().resolve_command(ctx, args)


study = typer.Typer(cls=_Studies, help="Run a study: figures and numbers in a folder.")
_frame = import_module("posterity_studies.frame")
for module in pkgutil.iter_modules(import_module("posterity_studies").__path__):
    if module.ispkg:
        examples = _frame.summary_and_examples(module.name)[1]
        study.command(module.name, epilog=examples)(_frame.make_command(module.name))
