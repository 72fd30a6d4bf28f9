"""`posterity study images`: MAP and mean-field inference on MNIST."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import GRID, Frame, Out, Seed, grid, words

if TYPE_CHECKING:
    from posterity_studies.images import Study


def images(
    data: Annotated[str, typer.Option(metavar="NAME", help="mnist or fashion-mnist.")] = "mnist",
    networks: Annotated[str, typer.Option(metavar="NAMES", help="Of mlp and lenet.")] = "mlp,lenet",
    etas: Annotated[
        str, typer.Option(metavar="GRID", help=f"Weights of the KL to choose from. {GRID}")
    ] = "1,0.5,0.3,0.2,0.1",
    seeds: Annotated[int, typer.Option(metavar="N", help="Fits of MAP and of the chosen eta.")] = 3,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of mean-field inference. Default: those of the network.")
    ] = None,
    device: o.Device = "cpu",
    out: Out = Path("study-images"),
    seed: Seed = 0,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Images by MAP and by mean-field inference, its KL weight chosen on held-out images; goes on where it stopped."""
    from posterity.cli.frame.output import option_values

    frame = Frame("images", out, seed, quiet, as_json)
    from posterity.cli.frame.tasks import find_device
    from posterity_studies.images import Settings, check, draw, images

    names = words(networks)
    with option_values("study images"):
        settings = Settings(
            data, grid("--etas", etas), seeds=seeds, steps=steps, seed=seed, device=find_device(device).type
        )
        check(names)
    with one_thread():
        found = images(names, folder=out, settings=settings, report=frame.log)
    options = {
        "--data": data,
        "--networks": ",".join(names),
        "--etas": etas,
        "--steps": steps,
        "--seeds": seeds,
        "--device": settings.device,
    }
    frame.finish(found, draw, _print, options)


def _print(out: Any, found: "Study") -> None:
    from rich.text import Text

    from posterity_studies.images import METRICS, NETWORKS
    from posterity_studies.results import with_error

    settings = found.settings
    for network in found.chosen:
        out.print(Text(f"{settings.data_set}, {NETWORKS[network].label}, test images", "bold"), soft_wrap=True)
        rows = table("", "eta", *METRICS.values(), "mean sigma")
        for row in found.rows(network):
            numbers = [with_error(*row.scores[f"test_{key}"]) for key in METRICS]
            sigma = "" if row.eta is None else f"{row.scores['mean_scale'][0]:.3g}"
            rows.add_row(row.method, "" if row.eta is None else f"{row.eta:g}", *numbers, sigma)
        out.print(rows)
    choice = f"eta chosen by the NLL of the first seed on {settings.held_out} held-out training images."
    out.print(Text(f"Mean ± standard deviation over {settings.seeds} seeds; {choice}", "dim"), soft_wrap=True)
    for line in found.notes():
        out.print(Text(line), soft_wrap=True)
