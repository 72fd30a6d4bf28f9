"""`posterity data`: lists data sets and their folders, and downloads them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import UsageError, option_values

if TYPE_CHECKING:
    from posterity.datasets.catalogue import Found, Published


def data(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only this data set in files.", show_default=False)
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch the files of NAME that are not there or not right.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="A folder or an address (http, https, file) that holds the files. Default: where they are published.",
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The folder of data sets to fetch into. Default: the user cache."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read the files and compare them with the published SHA-256.")
    ] = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """List the data sets: those made on the spot, and those in files, with where they are looked for.

    With --download, fetch one instead. Exit code 3 if a file is not the published one.
    """
    from posterity.cli.frame.output import console, print_json
    from posterity.datasets import TOYS
    from posterity.datasets.catalogue import catalogue, locate
    from posterity.datasets.files import data_places

    entries = [entry for entry in catalogue() if name in (None, entry.name)]
    if not entries:
        from posterity.errors import unknown

        known = [entry.name for entry in catalogue()]
        raise UsageError(unknown("data set in files", str(name), known), "'posterity data' lists the data sets.")
    if download:
        if name is None:
            raise UsageError("--download needs the NAME of a data set.", "'posterity data' lists the data sets.")
        _download(entries[0], source, into, as_json, quiet)
        return
    if source is not None or into is not None:
        raise UsageError("--from and --into are for --download.", "Add --download, or leave them out.")
    located = {entry: locate(entry, check=check) for entry in entries}
    damaged = any(where.status == "damaged" for where in located.values())
    if as_json:
        print_json(
            {
                "built_in": list(TOYS),
                "places": [str(folder) for folder in data_places()],
                "checked": check,
                "files": [
                    {
                        "name": entry.name,
                        "status": where.status,
                        "folder": None if where.place is None else str(where.place),
                        "missing": list(where.missing),
                        "damaged": list(where.damaged),
                        "files": [file for file, _ in entry.files],
                        "loader": entry.loader,
                        "source": entry.source,
                    }
                    for entry, where in located.items()
                ],
            }
        )
    else:
        from rich.table import Table
        from rich.text import Text

        out = console()
        out.print(Text(f"built in: {', '.join(TOYS)}"), soft_wrap=True)
        out.print(Text(f"files are looked for in: {', '.join(map(str, data_places()))}"), soft_wrap=True)
        styles = {"here": "green", "incomplete": "yellow", "missing": "dim", "damaged": "bold red"}
        table = Table(box=None, show_header=False, pad_edge=False)
        for entry, where in located.items():
            status = "sound" if check and where.status == "here" else where.status
            table.add_row(
                Text(entry.name, no_wrap=True),
                Text(status, styles[where.status], no_wrap=True),
                Text(_detail(entry, where), overflow="fold"),
            )
        out.print(table)
        out.print(
            Text(
                "'posterity data NAME --download' fetches the files; or put them into one of the folders above, "
                "or set POSTERITY_DATA. 'posterity data --json' lists all file names and sources."
            )
        )
    if damaged:
        raise typer.Exit(3)


def _download(entry: "Published", source: str | None, into: Path | None, as_json: bool, quiet: bool) -> None:
    from posterity.cli.frame.output import log, print_json
    from posterity.datasets.catalogue import locate
    from posterity.datasets.download import download

    if source == "":
        raise UsageError("--from must be a folder or an address. Got ''.", "Leave it out for the published address.")
    with option_values("data"):
        got = download(entry, into=into, source=source or "", progress=lambda line: log(line, quiet=quiet))
    if as_json:
        print_json(
            {
                "name": entry.name,
                "folder": str(got.folder),
                "fetched": list(got.fetched),
                "kept": list(got.kept),
                "without_sum": list(got.without_sum),
            }
        )
    else:
        print(f"{entry.name}: {len(got.fetched)} files fetched, {len(got.kept)} already there, in {got.folder}")
        if got.without_sum:
            print(f"{len(got.without_sum)} files have no published SHA-256: checked that their indices fit the table.")
    folder = locate(entry).place
    if folder is None or not got.folder.resolve().is_relative_to(folder.resolve()):
        log(
            f"'{entry.folder}' is looked for {'nowhere there' if folder is None else f'in {folder} first'}: "
            "set POSTERITY_DATA to the folder that was fetched into."
        )


def _detail(entry: "Published", where: "Found") -> str:
    """Describe where the files are, or which are missing or damaged."""
    if where.status == "damaged":
        return f"not the published file: {', '.join(where.damaged)} in {where.place}"
    if where.status == "incomplete":
        return f"{_few(where.missing)} lacking in {where.place}"
    if where.status == "missing":
        return f"put {_few([f'{entry.folder}/{file}' for file, _ in entry.files])} there; from {entry.source}"
    return str(where.place)


def _few(files: list[str] | tuple[str, ...]) -> str:
    return ", ".join(files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")
