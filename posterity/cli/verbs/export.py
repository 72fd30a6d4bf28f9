"""`posterity export`: a finished run as a program without posterity, or as a folder for a hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import log, option_values, print_json
from posterity.cli.frame.spread import command
from posterity.errors import positive_whole, whole
from posterity.options import check, option


@dataclass(frozen=True)
class ExportOptions:
    """The draws of the weights that the program contains."""

    draws: int | None = option(
        None, help="Draws of the weights in the program.", unit="N", check=positive_whole, usual="as predict"
    )
    seed: int = option(0, help="Seed of these draws.", unit="N", check=whole)

    def __post_init__(self) -> None:
        check(self)


@command
def export(
    run: o.Run,
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="model.pt2, model.onnx, or a folder.", show_default=False)
    ],
    wanted: ExportOptions,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Write the posterior in RUN as a program that runs without posterity, or as a folder with a model card.

    model.pt2 needs torch alone, model.onnx any ONNX runtime. Both take the columns of a file in its own units, one
    input for each category; --json and the metadata of the program name them in order.

    A folder has config.json, model.safetensors and README.md, as the Hugging Face hub has them.
    """
    from posterity.cli.frame.exporting import write_run
    from posterity.cli.frame.folders import find_run

    opened = find_run(run)
    with option_values("export"):
        about = write_run(run, opened, path, wanted.draws, wanted.seed)
    if as_json:
        print_json({"run": str(run), **about})
        return
    log(f"{path} has the predictions of {run}.", quiet=quiet)
    for column in about.get("columns", ()):
        log(f"input {column['name']}: {column['value']}", quiet=quiet)
