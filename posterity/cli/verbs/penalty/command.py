"""`posterity penalty`: which prior a penalty stands for, or why none, and its factors in the layers of a network."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posterity.cli.frame import options as o

if TYPE_CHECKING:
    from posterity.cli.verbs.penalty.networks import Layers
    from posterity.cli.verbs.penalty.reading import Reading


def penalty(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="PENALTY",
            help="l2, l1, rows, columns or channels (the last three: group lasso), or a formula of mu and sigma, as "
            "'mu^4 + 0.3*cos(2*mu)'. With --prior none.",
            show_default=False,
        ),
    ] = None,
    factor: Annotated[
        float | None, typer.Option(metavar="X", help="What the penalty is multiplied with. Default: 1.")
    ] = None,
    prior: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:X",
            help="The way back: the penalty that this prior is. normal, laplace, cauchy, logistic or horseshoe with a "
            "scale, student-t:DEGREES,SCALE, or rows, columns, channels (of the group lasso) with a rate.",
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Who reads the penalty: dirac (points, as penalised training does) or gaussian (with a sigma). "
            "Default: gaussian with --sigma, --prior or sigma in the formula.",
        ),
    ] = None,
    sigma: Annotated[
        str | None,
        typer.Option(metavar="X,...", help="One number: fixed. Several: trained. Default for gaussian: 0.2,0.5,1."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Of the weight tensor (out, in, kernel), for groups. Default: 10,10."),
    ] = None,
    reach: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Where a formula has no exact inverse: it is read at means between -X and X. Default: 4."
        ),
    ] = None,
    net: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Factors for its layers: mlp:784,300,10 (any sizes), lenet, cvnn, vgg19 or resnet-20."
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Prior variance of a layer: fan-in (the default), glorot, he or edge-of-chaos:tanh (any activation).",
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", help="Training rows, for lambda_Th = 1/N and weight decay.")
    ] = None,
    edge_of_chaos: Annotated[
        str | None,
        typer.Option(
            metavar="ACTIVATION",
            help="Instead: sigma_w^2 on the edge of chaos, and signals in deep networks beside it; tanh,0.05 has "
            "biases of variance 0.05.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .png, .pdf or .svg.")] = None,
    as_json: o.Json = False,
) -> None:
    """Tell which prior a penalty stands for, or why it is none; with --prior, which penalty a prior is.

    With --net, also the factor of each layer that gives its weights the variance of --rule.
    """
    from posterity.cli.frame.output import UsageError, option_values

    given = [word for word in (name, prior, edge_of_chaos) if word is not None]
    if len(given) != 1:
        raise UsageError(
            f"One of PENALTY, --prior and --edge-of-chaos is needed. Got {len(given) or 'none'}.",
            "Try 'posterity penalty l1', 'posterity penalty --prior laplace:0.5' or 'posterity penalty --help'.",
        )
    if edge_of_chaos is not None:
        others = {"--factor": factor, "--family": family, "--sigma": sigma, "--shape": shape, "--net": net}
        others |= {"--reach": reach}
        for option, value in {**others, "--rule": rule, "--rows": rows}.items():
            if value is not None:
                raise UsageError(
                    f"{option} has no meaning with --edge-of-chaos, which is about networks of any width.",
                    "Leave it out; for factors of layers try 'penalty l2 --net lenet --rule edge-of-chaos:tanh'.",
                )
        _edge(edge_of_chaos, plot, as_json)
        return
    from posterity.cli.verbs.penalty.networks import layers_of
    from posterity.cli.verbs.penalty.reading import read

    with option_values("penalty"):
        _check_figure(plot)
        for option, value in (("--rows", rows), ("--rule", rule)):
            if net is None and value is not None:
                raise ValueError(f"{option} is for --net, whose layers have factors. Name one, as --net lenet.")
        reading = read(name, factor, prior, family, sigma, shape, reach)
        layers = None if net is None else layers_of(reading.kind, net, rule or "fan-in", rows)
        if plot is not None:
            _drawn(lambda: reading.draw(plot))
    _tell(reading, layers, plot, as_json)


def _tell(reading: "Reading", layers: "Layers | None", plot: Path | None, as_json: bool) -> None:
    from rich.text import Text

    from posterity.cli.frame.output import console, print_json, table

    if as_json:
        document = reading.document()
        if layers is not None:
            document |= layers.document()
        print_json({**document, "figure": None if plot is None else str(plot)})
        return
    out = console()
    out.print(Text(reading.headline(), "bold"), soft_wrap=True)
    for key, text in reading.lines():
        out.print(Text.assemble((f"  {key:<10} ", "dim"), text), soft_wrap=True)
    if reading.prior_given and not reading.points:
        values = table("KL in nats at", *(f"sigma {scale:g}" for scale in reading.family.scales))
        for mean, nats in reading.values():
            values.add_row(f"{reading.variable} = {mean:g}", *(f"{value:.6g}" for value in nats))
        out.print(values)
    if layers is not None:
        out.print()
        out.print(Text(layers.headline(), "bold"), soft_wrap=True)
        listed = table("tensor", *layers.columns)
        for row in layers.cells():
            listed.add_row(*row)
        out.print(listed)
        for note in layers.notes():
            out.print(Text(note), soft_wrap=True)
    if plot is not None:
        out.print(Text(f"figure: {plot}"), soft_wrap=True)


def _edge(activation: str, plot: Path | None, as_json: bool) -> None:
    from rich.text import Text

    from posterity.cli.frame.output import console, one_thread, option_values, print_json, table
    from posterity.cli.verbs.penalty.networks import edge

    with option_values("penalty"), one_thread():
        _check_figure(plot)
        signals = edge(activation)
        if plot is not None:
            _drawn(lambda: signals.draw(plot))
    if as_json:
        print_json({**signals.document(), "figure": None if plot is None else str(plot)})
        return
    out = console()
    out.print(Text(signals.headline(), "bold"), soft_wrap=True)
    rows = table("weights", *signals.columns)
    for row in signals.cells():
        rows.add_row(*row)
    out.print(rows)
    out.print(Text(signals.note(), "dim"), soft_wrap=True)
    if plot is not None:
        out.print(Text(f"figure: {plot}"), soft_wrap=True)


def _check_figure(plot: Path | None) -> None:
    from posterity.report.files import check_figure_path

    if plot is not None:
        check_figure_path(plot)


def _drawn(draw: Callable[[], None]) -> None:
    """Draw; turn the error of a file that cannot be written into a `UsageError`."""
    from posterity.cli.frame.output import UsageError
    from posterity.errors import PosterityError

    try:
        draw()
    except PosterityError as error:
        raise UsageError(
            str(error), "--plot takes a .png, .pdf or .svg file in a folder that can be written."
        ) from error
