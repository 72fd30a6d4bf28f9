"""`posterity study penalties`: accuracy against lambda, with layer factors of a prior and with usual ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posterity.cli.frame import options as o
from posterity.cli.frame.output import one_thread, table
from posterity_studies.commands.frame import GRID, Frame, Out, Seed, grid, words

if TYPE_CHECKING:
    from posterity_studies.penalties import Study


def penalties(
    data: Annotated[str, typer.Option(metavar="NAME", help="mnist, fashion-mnist or cifar-10.")] = "mnist",
    net: Annotated[str, typer.Option(metavar="NAME", help="cvnn, a small convolutional network, or vgg19.")] = "cvnn",
    penalties: Annotated[
        str, typer.Option(metavar="NAMES", help="Of l2, l1, rows, columns and channels (the last three: group lasso).")
    ] = "l2,l1,rows,columns",
    setups: Annotated[
        str, typer.Option(metavar="NAMES", help="Layer factors: usual (1, or the root of a group's size), bayesian.")
    ] = "usual,bayesian",
    ratios: Annotated[
        str | None, typer.Option(metavar="GRID", help=f"lambda / lambda_Th, bayesian setup; 1 is added. {GRID}")
    ] = None,
    lambdas: Annotated[
        str | None,
        typer.Option(metavar="GRID", help="lambda of the usual setup. Default: matches the ratios, see results.json."),
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Fits with other first weights, orders and crops.")] = 2,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the rows. Default: by network.")] = None,
    rows: Annotated[int | None, typer.Option(metavar="N", help="Training rows used. Default: all.")] = None,
    width: Annotated[
        int | None, typer.Option(metavar="N", help="Channels of the first layers. Default: by network and data.")
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Rows in a step.")] = 128,
    step_size: Annotated[
        float | None, typer.Option(metavar="X", help="Largest of SGD. Default: 0.1, without batch norm 0.02.")
    ] = None,
    batch_norm: Annotated[
        bool, typer.Option("--batch-norm/--no-batch-norm", help="Behind convolutions; else they have biases.")
    ] = True,
    augment: Annotated[
        bool | None,
        typer.Option(
            "--augment/--no-augment", help="Crop training images, and flip those of cifar-10. Default: the latter only."
        ),
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(metavar="N", help="Training rows to choose lambda by. Default: a tenth of all.")
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="Of products in training: float32 or bf16.")
    ] = "float32",
    jobs: Annotated[int, typer.Option(metavar="N", help="Processes that fit groups side by side, on a CPU.")] = 1,
    device: o.Device = "auto",
    out: Out = Path("study-penalties"),
    seed: Seed = 0,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Accuracy against lambda for penalties with Bayesian and usual layer factors; goes on where it was interrupted."""
    from posterity.cli.frame.output import option_values

    frame = Frame("penalties", out, seed, quiet, as_json)
    from posterity.cli.frame.tasks import find_device
    from posterity.errors import positive_whole
    from posterity_studies.penalties import Settings, draw
    from posterity_studies.penalties import penalties as study

    with option_values("study penalties"):
        positive_whole("--jobs", jobs)
        settings = Settings(
            data,
            net,
            words(penalties),
            words(setups),
            grid("--ratios", ratios),
            grid("--lambdas", lambdas),
            seeds,
            epochs,
            rows,
            width,
            batch_size,
            step_size,
            batch_norm,
            augment,
            held_out,
            precision,
            seed,
            find_device(device).type,
        )
        if jobs > 1 and settings.device != "cpu":
            raise ValueError(f"--jobs must be 1 on the device {settings.device}. Got {jobs}.")
        read = settings.read()
    with one_thread():
        found = study(settings, read, folder=out, report=frame.log, jobs=jobs)
    options = {
        "--data": data,
        "--net": net,
        "--penalties": ",".join(settings.penalties),
        "--setups": ",".join(settings.setups),
        "--ratios": ratios,
        "--lambdas": lambdas,
        "--seeds": seeds,
        "--epochs": epochs,
        "--rows": rows,
        "--width": width,
        "--batch-size": batch_size,
        "--step-size": step_size,
        "--held-out": held_out,
        "--precision": precision,
        "--jobs": jobs,
        "--device": settings.device,
        "--no-batch-norm": not batch_norm,
        "--augment": augment is True,
        "--no-augment": augment is False,
    }
    frame.finish(found, draw, _print, options)


def _print(out: Any, found: "Study") -> None:
    from rich.text import Text

    settings = found.settings
    name = f"{settings.data}, {settings.architecture.label} of width {settings.actual_width}"
    out.print(Text(f"{name}, n = {found.num_data:,}: test accuracy in per cent", "bold"), soft_wrap=True)
    lines = found.table()
    columns = ("at lambda*", "at lambda_Th", "lambda_Th / lambda*")
    rows = table("penalty, setup", "lambda*", *columns)
    for line in lines:
        ratio = line["theory_over_best"]
        numbers = (_percent(line["accuracy_at_best"]), _percent(line["accuracy_at_theory"]))
        rows.add_row(_name(line), f"{line['lambda_best']:.2g}", *numbers, "" if ratio is None else f"{ratio:.3g}")
    out.print(rows)
    seeds = f"Mean ± standard deviation over {settings.seeds} seeds" if settings.seeds > 1 else "One seed"
    choice = f"lambda* has the best accuracy on {found.held_out:,} held-out training rows."
    out.print(Text(f"{seeds}. {choice}", "dim"), soft_wrap=True)
    if any(line["published"] for line in lines):
        out.print(Text("As the authors had it, with networks and settings of their own", "bold"), soft_wrap=True)
        rows = table("penalty, setup", *columns)
        for line in lines:
            rows.add_row(_name(line), *_published(line["published"]))
        out.print(rows)
    for note in found.notes():
        out.print(Text(note), soft_wrap=True)


def _name(line: dict[str, Any]) -> str:
    return f"{line['penalty']}, {line['setup']}"


def _percent(pair: dict[str, float | None] | None) -> str:
    if pair is None or pair["mean"] is None:
        return ""
    spread = pair["standard_deviation"]
    return f"{100 * pair['mean']:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")


def _published(line: dict[str, float | None] | None) -> tuple[str, str, str]:
    if line is None:
        return "", "", ""
    theory, log_ratio = line["at_theory"], line["log_ratio"]
    return (
        f"{line['best']:.2f}",
        "" if theory is None else f"{theory:.2f}",
        "" if log_ratio is None else f"{10**log_ratio:.3g}",
    )
