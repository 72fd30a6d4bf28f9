"""`posterity study`: worked experiments, from data to figures and numbers, found by name in `posterity_studies`."""

import pkgutil
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from posterity.cli.frame.options import BareSwitches


class _Study(BareSwitches, TyperCommand):
    """The command of a study."""


class _Studies(BareSwitches, TyperGroup):
    """The group of studies, with a hint for an unknown name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # the context's class moved between typer's versions
        """Return the command of the first argument; raise a `UsageError` with the nearest name for an unknown one."""
        if args[0] not in self.commands:
            from posterity.cli.frame.output import UsageError
            from posterity.errors import unknown

            message = unknown("study", args[0], self.commands)
            raise UsageError(message, f"the studies are {', '.join(self.commands)}.")
        return super().resolve_command(ctx, args)


study = typer.Typer(cls=_Studies)


@study.callback(invoke_without_command=True)
def studies(
    context: typer.Context,
    deck: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Instead of a study: all figures of lecture deck 1, 2, 3, 4 or all, and a page."
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="With --deck: where they go. Default: deck-N.")
    ] = None,
) -> None:
    """Run a study: figures and numbers in a folder."""
    from posterity.cli.frame.output import UsageError

    if context.invoked_subcommand is None:
        if deck is None and out is not None:
            raise UsageError("--out is the folder of --deck, which is not given.", "try 'study --deck 1 --out FOLDER'.")
        if deck is None:
            context.fail("Missing command.")
        import_module("posterity_studies.decks").run_deck(deck, out)
    elif deck is not None or out is not None:
        name = context.invoked_subcommand
        raise UsageError("--deck takes no study, and --out stands behind one.", f"try 'study {name} --out FOLDER'.")


_frame = import_module("posterity_studies.frame")
for module in pkgutil.iter_modules(import_module("posterity_studies").__path__):
    if module.ispkg:
        examples = _frame.summary_and_examples(module.name)[1]
        study.command(module.name, cls=_Study, epilog=examples)(_frame.make_command(module.name))
