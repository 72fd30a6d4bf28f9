"""`posterity data`: which data sets there are, and where."""

from typing import TYPE_CHECKING, Annotated

import typer

from posterity.cli import options as o

if TYPE_CHECKING:
    from posterity.datasets.catalogue import Found, Published


def data(
    check: Annotated[
        bool, typer.Option("--check", help="Read the files and compare them with the published SHA-256.")
    ] = False,
    as_json: o.Json = False,
) -> None:
    """List the data sets: those made on the spot, and those in files, with where they are looked for.

    Exit code 3 if --check finds a file that is not the published one.
    """
    from posterity.cli.output import console, print_json
    from posterity.datasets import TOYS
    from posterity.datasets.catalogue import catalogue, locate
    from posterity.datasets.location import data_places

    found = {entry: locate(entry, check=check) for entry in catalogue()}
    damaged = any(where.status == "damaged" for where in found.values())
    if as_json:
        print_json(
            {
                "built_in": list(TOYS),
                "places": [str(place) for place in data_places()],
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
                    for entry, where in found.items()
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
        for entry, where in found.items():
            status = "sound" if check and where.status == "here" else where.status
            table.add_row(
                Text(entry.name, no_wrap=True),
                Text(status, styles[where.status], no_wrap=True),
                Text(_detail(entry, where), overflow="fold"),
            )
        out.print(table)
        out.print(
            Text(
                "Nothing is downloaded: fetch the files from their source and put them into one of the folders above, "
                "or set POSTERITY_DATA. 'posterity data --json' lists all file names and sources."
            )
        )
    if damaged:
        raise typer.Exit(3)


def _detail(entry: "Published", where: "Found") -> str:
    """What is there, or what would have to be put where."""
    if where.status == "damaged":
        return f"not the published file: {', '.join(where.damaged)} in {where.place}"
    if where.status == "incomplete":
        return f"{_few(where.missing)} lacking in {where.place}"
    if where.status == "missing":
        return f"put {_few([f'{entry.folder}/{file}' for file, _ in entry.files])} there; from {entry.source}"
    return str(where.place)


def _few(files: list[str] | tuple[str, ...]) -> str:
    return ", ".join(files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")
