"""The entry point of the command line: it registers the verbs, and turns errors into one line and an exit code."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import posterity
from posterity.cli.frame.options import BareSwitches
from posterity.cli.frame.output import error_line, hint_line, log, shown_warnings, spell_out
from posterity.cli.frame.shared import joined, rank, said_by_first
from posterity.cli.start import INTERRUPTED, as_interrupt
from posterity.cli.verbs.compare import compare
from posterity.cli.verbs.data import data
from posterity.cli.verbs.doctor import doctor
from posterity.cli.verbs.evaluate import evaluate
from posterity.cli.verbs.export import export
from posterity.cli.verbs.fit import fit
from posterity.cli.verbs.penalty.command import penalty
from posterity.cli.verbs.plan import plan
from posterity.cli.verbs.predict import predict
from posterity.cli.verbs.serve import serve
from posterity.cli.verbs.study import study

USAGE = 2


class _Verb(BareSwitches, TyperCommand):
    """The command of a verb."""


class _Verbs(BareSwitches, TyperGroup):
    """The group of all verbs."""


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
EXAMPLES = {
    "compare": (
        "posterity compare two-moons",
        "posterity compare sine --methods map,laplace,nuts --hidden 20 --figure sine.png",
        "posterity compare houses.csv --target price --drop id --report page.html",
    ),
    "fit": (
        "posterity fit houses.csv --target price --out run",
        "posterity fit houses.csv --target price --cv 5 --conformal cv+ --out run",
        "posterity fit two-moons --method ensemble --out run",
        "posterity fit sine --method nuts --hidden 10 --draws 500 --out chains",
    ),
    "predict": (
        "posterity predict run",
        "posterity predict run --data new.csv --out predictions.csv",
        "posterity predict run --data new.csv --level 0.9 --quantiles 0.05,0.5,0.95 --conformal",
    ),
    "evaluate": (
        "posterity evaluate run",
        "posterity evaluate run --data later.csv --json",
        "posterity evaluate run --costs 1,5",
    ),
    "export": (
        "posterity export run model.onnx",
        "posterity export run model.pt2 --draws 50",
        "posterity export run folder",
    ),
    "serve": (
        "posterity serve run",
        "posterity serve run --port 8080",
        "POSTERITY_TOKEN=... posterity serve run --host 0.0.0.0 --allow-host model.example.org",
    ),
    "plan": (
        "posterity plan two-moons --hidden 500,500",
        "posterity plan houses.csv --target price --methods laplace --structure kronecker",
    ),
}
for verb in (compare, fit, predict, evaluate, export, serve, plan, penalty, data, doctor):
    examples = EXAMPLES.get(verb.__name__)
    app.command(cls=_Verb, epilog="\n\n".join(("Examples:", *examples)) if examples else None)(verb)
app.add_typer(study, name="study")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"posterity {posterity.__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def commands(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere in the line.")
    ] = False,
) -> None:
    """Approximate Bayesian inference for neural networks: fit, predict, compare."""
    if context.invoked_subcommand is None:
        text = context.get_help()  # with rich, typer prints it itself
        if text:
            print(text)
        raise typer.Exit(USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (by default the process's own) and give its exit code.

    0 ok, 1 failure, 2 usage, 3 bad data, 4 bad run folder, 5 diverged, 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    spell_out()
    try:
        with as_interrupt(), shown_warnings(), joined(words) as has_part:
            code = 0
            if has_part:
                code = get_command(app).main(
                    args=[word for word in words if word != "--debug"],
                    prog_name="posterity",
                    standalone_mode=False,
                    obj=words,
                )
            sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # stdout was closed early, as by `posterity predict RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        if said_by_first(error):
            return 1
        return _failed(error)
    if code == INTERRUPTED and rank() == 0:
        log("interrupted")
    return code if isinstance(code, int) else 0


def _failed(error: Exception) -> int:
    """Print one line about an error, and its hints; return the exit code."""
    usage = getattr(error, "format_message", None)  # typer's usage errors have it; their class moved between versions
    if usage is not None:
        context = getattr(error, "ctx", None)
        error_line(usage())
        hint_line(f"'{context.command_path if context else 'posterity'} --help' shows how it is used.")
        return USAGE
    code = getattr(error, "exit_code", None)
    if not isinstance(code, int):
        error_line(f"unexpected error: {type(error).__name__}: {error}; run with --debug for the traceback")
        return 1
    error_line(str(error))
    for note in getattr(error, "__notes__", ()):
        hint_line(note)
    return code
