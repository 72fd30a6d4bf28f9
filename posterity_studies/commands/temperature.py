"""`posterity study temperature`: the tempered ELBO of a network against eta, tau and width."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import GRID, Frame, Out, Seed, grid, words

if TYPE_CHECKING:
    from posterity_studies.temperature import Study


def temperature(
    data: Annotated[
        str, typer.Option(metavar="NAME", help="mnist, fashion-mnist, cifar-10, two-moons or blobs.")
    ] = "mnist",
    net: Annotated[str, typer.Option(metavar="NAME", help="one-hidden, mlp, lenet or resnet-20.")] = "one-hidden",
    widths: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="With commas between them, as 50,200,800. resnet-20: 16.")
    ] = None,
    etas: Annotated[str | None, typer.Option(metavar="GRID", help=f"Weights of the KL. {GRID}")] = None,
    taus: Annotated[
        str | None,
        typer.Option(metavar="GRID", help="More of them, eta = tau p/N for p rows, N neurons or parameters."),
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Fits with other first weights and orders of rows.")] = 3,
    method: Annotated[
        str, typer.Option(metavar="NAME", help="bayes-by-backprop, ivon or sghmc.")
    ] = "bayes-by-backprop",
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the rows. Default: by network.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Steps of a fit, instead of passes.")] = None,
    rows: Annotated[int | None, typer.Option(metavar="N", help="Training rows used. Default: all.")] = None,
    held_out: Annotated[
        int | None,
        typer.Option(metavar="N", help="Training rows to choose the best eta by. Default: a twelfth of them."),
    ] = None,
    ood: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Foreign rows: mnist, fashion-mnist, kmnist, cifar-10 or uniform (noise). Default: by data set.",
        ),
    ] = None,
    pixels: Annotated[
        str, typer.Option(metavar="NAME", help="raw, or standard: mean 0 and variance 1 by channel.")
    ] = "raw",
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="Rows in a step. Default: by network.")] = None,
    step_size: Annotated[
        float | None, typer.Option(metavar="X", help="First step size. Default: by network and method.")
    ] = None,
    prior_variance: Annotated[float, typer.Option(metavar="V", help="Of every weight.")] = 0.2,
    draws: Annotated[int, typer.Option(metavar="N", help="Draws of the weights for predictions.")] = 32,
    neuron_draws: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="As many more draws as make so many times neurons, for equal noise at all widths."
        ),
    ] = None,
    device: o.Device = "auto",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float32 or float64.")] = "float32",
    out: Out = Path("study-temperature"),
    seed: Seed = 0,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Accuracy, NLL, calibration and more against the temperature of the ELBO; goes on where it was interrupted."""
    from posterity.cli.frame.output import option_values

    frame = Frame("temperature", out, seed, quiet, as_json)
    from posterity.cli.frame.tasks import find_device
    from posterity_studies.temperature import Settings, draw, temperature

    with option_values("study temperature"):
        settings = Settings(
            data,
            net,
            _widths(widths),
            grid("--etas", etas),
            grid("--taus", taus),
            seeds,
            method,
            epochs,
            steps,
            rows,
            held_out,
            ood,
            pixels,
            batch_size,
            step_size,
            prior_variance,
            draws,
            neuron_draws,
            seed,
            find_device(device).type,
            dtype,
        )
        read = settings.read()
    with one_thread():
        found = temperature(settings, read, folder=out, report=frame.log)
    options = {
        "--data": data,
        "--net": net,
        "--widths": widths,
        "--etas": etas,
        "--taus": taus,
        "--seeds": seeds,
        "--method": method,
        "--epochs": epochs,
        "--steps": steps,
        "--rows": rows,
        "--held-out": held_out,
        "--ood": ood,
        "--pixels": pixels,
        "--batch-size": batch_size,
        "--step-size": step_size,
        "--prior-variance": prior_variance,
        "--draws": draws,
        "--neuron-draws": neuron_draws,
        "--device": settings.device,
        "--dtype": dtype,
    }
    frame.finish(found, draw, _print, options)


def _widths(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        found = tuple(int(word) for word in words(text))
    except ValueError as error:
        raise ValueError(f"--widths must be whole numbers with commas between them. Got '{text}'.") from error
    if not found:
        raise ValueError("--widths must have at least one number. Got none.")
    return found


def _print(out: Any, found: "Study") -> None:
    from rich.text import Text

    from posterity_studies.temperature import METRICS

    settings = found.settings
    for width in found.widths:
        name = settings.architecture.label + ("" if width.width is None else f", width {width.width}")
        out.print(
            Text(f"{settings.data}, {name}: {width.units:,} {settings.architecture.units}", "bold"), soft_wrap=True
        )
        rows = table("eta", "tau", *METRICS.values(), "sigma")
        for row in found.rows(width):
            numbers = [f"{row.scores[key][0]:.4f}" for key in METRICS]
            rows.add_row(f"{row.eta:.2g}", f"{row.tau:.2g}", *numbers, f"{row.scores['mean_sigma'][0]:.3f}")
        out.print(rows)
    seeds = f"Means over {settings.seeds} seeds" if settings.seeds > 1 else "One seed"
    out.print(Text(f"{seeds}, test rows; sigma: mean standard deviation of a weight.", "dim"), soft_wrap=True)
    for line in found.notes():
        out.print(Text(line), soft_wrap=True)
