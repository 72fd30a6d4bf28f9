"""Sections of pages: predictions over the inputs, worst rows, importance, loss curves, chains, scales, data."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posterity.cli.frame.importance import column_importance, columns_of
from posterity.cli.frame.options import LEVEL, method_label
from posterity.cli.frame.outcomes import Outcome
from posterity.cli.frame.scores import ROWS
from posterity.cli.frame.sources import Source
from posterity.cli.frame.tasks import has_figure
from posterity.diagnostics import convergence
from posterity.likelihoods import Gaussian
from posterity.model import Joint
from posterity.model.scales import chosen_scales
from posterity.numerics.random import Key
from posterity.posteriors import Samples
from posterity.predictive import Predictive
from posterity.priors import Normal
from posterity.report.charts import bars, curves, histogram, traces
from posterity.report.embedded import GRID, finite, line_numbers, map_numbers, packed
from posterity.report.figures import square, wider
from posterity.report.html import facts, paragraph, section, table
from posterity.report.numbers import number, share, short, with_ends
from posterity.report.sections import place, warnings
from posterity.storage.part import JSON

FEW = 8  # rows in a list of the worst
MOST_DOTS = 250  # training rows in a figure
MOST_INPUTS = 4  # columns beside a row
MOST_COLUMNS = 40  # that are permuted, or listed
PERMUTED = 400  # rows of which importance is computed
ALONG = 120  # points along one input


def fields(methods: Sequence[Outcome], source: Source, levels: Sequence[float]) -> dict[str, Any]:
    """Return predictions over the inputs if they can be drawn: "line" for one input, "map" for two."""
    data, models = source.data, {each.word: each.posterior for each in methods if each.posterior is not None}
    if not models or not len(data.train) or not has_figure(data):
        return {}
    dots = slice(None, None, max(1, len(data.train) // MOST_DOTS))
    inputs = data.train.inputs
    columns = [(f"x{index}", 0.0, 1.0) for index in range(1, 3)]
    if source.preprocessing is not None:
        if any(column.kind != "number" or column.has_indicator for column in source.preprocessing.inputs):
            return {}
        columns = [(column.name, column.mean, column.scale) for column in source.preprocessing.inputs]

    def shown(index: int, values: Tensor) -> Tensor:
        return columns[index][1] + columns[index][2] * values.double().cpu()

    if data.classes is None:
        grid = torch.linspace(*wider(torch.cat([inputs[:, 0], data.test.inputs[:, 0]]), 1.25), ALONG).to(inputs)
        predicted = {w: source.affine_units(model.predict(grid[:, None]))[0] for w, model in models.items()}
        targets = source.shift + source.scale * data.train.targets[dots, 0].double().cpu()
        rows: dict[str, JSON] = {
            "x": list(finite(shown(0, inputs[dots, 0]))),
            "y": list(finite(targets.exp() if source.log_target else targets)),
        }
        numbers: Any = line_numbers(predicted, levels, log=source.log_target)
        return {"line": {"name": columns[0][0], "x": packed(shown(0, grid), "<f8"), "methods": numbers, "train": rows}}
    sides = square(inputs)
    axes = [torch.linspace(low, high, GRID).to(inputs) for low, high in sides]
    points = torch.cartesian_prod(*axes)
    ends = [finite(shown(index, torch.tensor(side, dtype=torch.float64))) for index, side in enumerate(sides)]
    train = [
        {"x": finite(shown(0, some[:, 0])), "y": finite(shown(1, some[:, 1]))}
        for some in (inputs[dots][data.train.targets[dots] == index] for index in range(len(data.classes)))
    ]
    methods_: Any = map_numbers({word: model.predict(points) for word, model in models.items()})
    names = [name for name, _, _ in columns]
    return {"map": {"names": names, "x": ends[0], "y": ends[1], "methods": methods_, "train": train}}


def rows_part(
    label: str, pred: Predictive, targets: Tensor, nll: Tensor, names: Sequence[str], source: Source, index: Tensor
) -> str:
    """Return tables of the least certain and the most surprising rows, with the values of some columns."""
    classes = source.data.classes
    inputs = _written(source, index)
    if classes is None:
        lower, upper = (end[:, 0].double().cpu() for end in pred.interval(LEVEL))
        unsure = upper - lower
        middle = (pred.quantile(0.5) if source.log_target else pred.mean)[:, 0].double().cpu()
        truth, own = targets[:, 0].double(), [middle, lower, upper]
        truth, *own = [each.exp() if source.log_target else each for each in (truth, *own)]
        heads = ["true", "predicted", f"{100 * LEVEL:g} % interval"]
        cells = [
            [short(y), rounded, ends or f"{number(low)} to {number(high)}"]
            for y, m, low, high in zip(truth.tolist(), *(each.tolist() for each in own), strict=True)
            for rounded, ends in [with_ends(m, [low, high])]
        ]
    else:
        probs = pred.probs.double().cpu()
        sure, answer = probs.max(1)
        unsure, labels = torch.special.entr(probs).sum(1), targets.tolist()
        heads = ["true", "answered", "probability of the true class"]
        cells = [
            [classes[label], f"{classes[best]} ({share(p)})", share(float(row[label]))]
            for label, best, p, row in zip(labels, answer.tolist(), sure.tolist(), probs, strict=True)
        ]
    words = (
        () if source.preprocessing is None else {each.name for each in source.preprocessing.inputs if each.categories}
    )
    text = [*((1, 2) if classes else ()), *(at for at, (name, _) in enumerate(inputs, 2 + len(heads)) if name in words)]
    tables = []
    for title, order in (("Least sure", unsure), ("Most surprising", nll)):
        some = order.argsort(descending=True, stable=True)[:FEW].tolist()
        rows = [
            [names[at], *cells[at], number(float(nll[at]), 3), *(column[at] for _, column in inputs)] for at in some
        ]
        tables.append(f"<h3>{title}</h3>")
        tables.append(
            table(f"{title} by {label}", ["row", *heads, "NLL", *(name for name, _ in inputs)], rows, text=text)
        )
    return "\n".join(tables)


def _written(source: Source, index: Tensor) -> list[tuple[str, list[str]]]:
    """Return the first columns of these test rows, as written in the file."""
    if source.table is None:
        chosen = source.data.test.inputs[index].flatten(1)[:, :MOST_INPUTS].double().cpu()
        return [(f"x{at}", [number(value, 3) for value in each.tolist()]) for at, each in enumerate(chosen.T, start=1)]
    assert source.preprocessing is not None
    part = source.table.rows([source.test[row] for row in index.tolist()])
    names = [*dict.fromkeys(column.name for column in source.preprocessing.inputs)][:MOST_INPUTS]
    return [(name, list(part.column(name).fields)) for name in names]


def importance_part(taken: Outcome | None, source: Source, figures: dict[str, Any]) -> str:
    """Return the section on permutation importance; empty for more columns than a figure can show."""
    test = source.data.test
    if taken is None or taken.posterior is None or test.inputs.dim() != 2 or len(test) < 2:
        return ""
    if not 2 <= len(columns_of(source.preprocessing, test.inputs.shape[1])[0]) <= MOST_COLUMNS:
        return ""
    rows = torch.linspace(0, len(test) - 1, min(len(test), PERMUTED), dtype=torch.float64).round().long()
    part = test.rows(rows.to(test.inputs.device))
    rows_of_columns = column_importance(taken.posterior.predict, source.preprocessing, *part.pair)
    names, rises, errors = ([row[key] for row in rows_of_columns] for key in ("column", "nll_rise", "standard_error"))
    label = f"Rise of the NLL of {taken.label} when a column is permuted"
    figures["importance"] = bars(label, "rise of NLL, nats a row", names, rises, errors)
    text = (
        f"By how much the NLL of {taken.label} rises on {len(rows):,} test rows when a column is shuffled among them: "
        "what its values are worth to this fit. Of two columns that say the same, each seems unimportant."
    )
    return section("What the prediction rests on", paragraph(text), place("importance"))


def curves_part(methods: Sequence[Outcome], figures: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Return the curves of the loss of each stage, by method."""
    parts = {}
    for outcome in methods:
        panels = []
        for stage, trace in outcome.traces.items():
            if "loss" not in trace or len(trace["loss"]) < 2:
                continue
            loss, steps = (
                trace["loss"].flatten(1) if trace["loss"].dim() > 1 else trace["loss"][:, None],
                trace.steps("loss"),
            )
            kind = "chain" if isinstance(outcome.posterior, Samples) else "member"
            names = ["loss"] if loss.shape[1] == 1 else [f"{kind} {index}" for index in range(min(8, loss.shape[1]))]
            lines = {name: (steps, each) for name, each in zip(names, loss.T, strict=False)}
            key, label = f"curve-{outcome.word}-{stage}", method_label(stage)
            whose = label if label == outcome.label else f"{label} for {outcome.label}"
            figures[key] = curves(f"Loss over the steps of {whose}", f"step of {label}", "loss", lines)
            panels.append(place(key, "panel"))
        if panels:
            parts[outcome.word, outcome.label] = '<div class="panels">\n' + "\n".join(panels) + "\n</div>"
    return parts


def chains_part(methods: Sequence[Outcome], source: Source, figures: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Return R-hat, effective sample sizes and traces of each method with chains."""
    parts = {}
    for outcome in methods:
        q = outcome.posterior
        if not isinstance(q, Samples) or not len(source.data.train) or q.num_members is not None:
            continue
        inputs = source.data.train.inputs[:ROWS].to(q.joint.device)
        result = convergence(q, inputs)
        rows = [
            (
                each.name if not each.of_network else f"{each.name} (weights)",
                f"{each.rhat.numel():,}",
                number(each.worst_rhat, 4),
                *(number(value, 3) for value in (each.least_bulk_ess, each.least_tail_ess)),
                number(each.worst_error, 2),
            )
            for each in sorted(result.quantities, key=lambda each: each.of_network)
        ]
        heads = ["quantity", "numbers", "R-hat at most", "bulk ESS at least", "tail ESS at least", "MCSE / sd"]
        text = (
            f"{result.num_chains} chains of {result.num_draws:,} draws. Wanted: R-hat at most 1.01, effective sizes of "
        )
        text += f"{100 * result.num_chains:,} or more. Weights may swap places and change no output."
        lines = [paragraph(text, "note"), warnings(result.warnings), table(f"Chains of {outcome.label}", heads, rows)]
        panels = []
        for at, (name, draws) in enumerate(_traced(q, source, inputs).items()):
            figures[key := f"trace-{outcome.word}-{at}"] = traces(f"{name}, by chain", name, draws)
            panels.append(place(key, "panel"))
        parts[outcome.word, outcome.label] = "\n".join([*lines, '<div class="panels">', *panels, "</div>"])
    return parts


def _traced(q: Samples, source: Source, inputs: Tensor) -> dict[str, Tensor]:
    """Return draws (C, D) of the outputs at the first, middle and last training row, and of the log density."""
    rows = sorted({0, len(inputs) // 2, len(inputs) - 1})
    outputs = q.outputs(inputs[rows], q.num_chains * q.num_draws, Key(0)).detach().double().cpu()
    outputs = outputs.reshape(q.num_chains, q.num_draws, len(rows), -1)
    draws = {}
    for at, row in enumerate(rows):
        if source.data.classes is not None:
            draws[f"probability of {source.data.classes[-1]} at training row {row + 1}"] = outputs[:, :, at].softmax(
                -1
            )[..., -1]
        else:
            draws[f"output at training row {row + 1}"] = source.shift + source.scale * outputs[:, :, at, 0]
    density = q.statistics.get("log_density", q.statistics.get("energy"))
    if density is not None and density.dim() == 2:
        draws["log density" if "log_density" in q.statistics else "energy"] = density.detach().double().cpu()
    return draws


def fitted_part(methods: Sequence[Outcome], source: Source) -> dict[tuple[str, str], str]:
    """Return the facts of each method: posterior, network, scales (given or chosen), evidence and seconds."""
    return {(each.word, each.label): facts(known) for each in methods if (known := _fitted(each, source))}


def _fitted(outcome: Outcome, source: Source) -> dict[str, str]:
    known: dict[str, str] = {}
    if chosen := getattr(outcome.posterior, "sentence", None):
        known["Chosen"] = chosen
    joint = getattr(outcome.posterior, "joint", None)
    if isinstance(joint, Joint):
        known["Posterior"] = type(outcome.posterior).__name__
        known["Weights"] = f"{joint.num_weights:,}"
        fitted = joint.as_joint("report")
        scales = chosen_scales(fitted)
        if "prior_scale" in scales:
            values = scales["prior_scale"].double().reshape(-1)
            low, high = number(float(values.min()), 3), number(float(values.max()), 3)
            known["Prior scale"] = f"{low if low == high else f'{low} to {high}, by tensor'} (chosen by the fit)"
        elif isinstance(fitted.prior, Normal) and not isinstance(fitted.prior.scale, Tensor):
            known["Prior scale"] = f"{number(float(fitted.prior.scale), 3)} (given)"
        if isinstance(fitted.likelihood, Gaussian):
            noise = float(torch.as_tensor(fitted.likelihood.scale).double().mean()) * source.scale
            how = (
                "sampled or fitted with the weights; this is its start"
                if fitted.likelihood.num_free
                else "standard deviation"
            )
            of = "the logarithm" if source.log_target else "the target"
            known["Noise"] = f"{number(noise, 3)} ({how}, in units of {of})"
    if (tuned := outcome.numbers.get("evidence")) is not None:
        known["Log evidence"] = f"{number(tuned['log_evidence'], 6)} nats"
    if (weight := outcome.numbers.get("kl_weight")) not in (None, 1.0):
        known["Weight of the KL"] = number(weight, 3)
    if (seconds := outcome.numbers.get("seconds")) is not None:
        known["Seconds"] = number(seconds, 3)
    return known


def data_part(source: Source, figures: dict[str, Any]) -> str:
    """Return the section on the data: rows, targets, columns, and notes of the reader."""
    data = source.data
    parts = {"training": data.train, "test": data.test}
    about = {
        "Data": data.name,
        "Rows": ", ".join(f"{len(part):,} for {name}" for name, part in parts.items() if len(part)),
        "Inputs": f"{data.test.inputs[0].numel() if len(data.test) else data.train.inputs[0].numel():,}",
    }
    content = []
    if data.classes is None:
        shown = {
            name: (source.shift + source.scale * part.targets[:, 0].double().cpu())
            for name, part in parts.items()
            if len(part) and part.targets.shape[1:] == (1,)
        }
        if shown:
            axis = f"logarithm of {source.unit}" if source.log_target else source.unit
            figures["targets"] = histogram(f"Distribution of {axis}", axis, shown)
            content.append(place("targets"))
    else:
        counts = {name: torch.bincount(part.targets.cpu(), minlength=len(data.classes)) for name, part in parts.items()}
        rows = [
            (name, *(f"{int(each[index]):,}" for each in counts.values())) for index, name in enumerate(data.classes)
        ]
        content.append(table("Rows by class", ["class", *(f"{name} rows" for name in counts)], rows))
    if source.table is not None and source.preprocessing is not None:
        content.append(_columns(source))
    if source.notes:
        content += [
            "<ul>",
            *(paragraph(note).replace("<p>", "<li>").replace("</p>", "</li>") for note in source.notes),
            "</ul>",
        ]
    return section("Data", facts(about), *content)


def _columns(source: Source) -> str:
    """Return a table of the columns of a file, with their kinds, values and missing values."""
    assert source.table is not None
    assert source.preprocessing is not None
    rows = []
    for column in source.preprocessing.inputs[:MOST_COLUMNS]:
        missing = int(source.table.column(column.name).missing.sum())
        held = (
            f"{number(column.mean)} ± {number(column.scale, 3)}" if column.kind == "number"
            else f"{len(column.categories):,} values"
        )  # fmt: skip
        rows.append((column.name, column.part or column.kind, held, f"{missing:,}" if missing else ""))
    more = len(source.preprocessing.inputs) - len(rows)
    heads = ["column", "kind", "mean ± standard deviation, or values", "missing"]
    note = paragraph(f"{more:,} more columns are not listed.", "note") if more > 0 else ""
    listed = table("Columns", heads, rows, text=(1,))
    count = len({column.name for column in source.preprocessing.inputs})
    return f"<details>\n<summary>{count:,} columns</summary>\n{listed}\n{note}\n</details>"
