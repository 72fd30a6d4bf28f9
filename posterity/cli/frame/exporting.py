"""Export of finished runs: programs that take the columns of a table in the units of the file."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posterity.cli.frame.folders import Run
from posterity.cli.frame.options import AUTO
from posterity.cli.frame.output import UsageError
from posterity.datasets import Preprocessing
from posterity.posteriors import Posterior
from posterity.posteriors.deployable import example_rows
from posterity.posteriors.programs import write_program
from posterity.storage import RunFolder


class TableModule(nn.Module):
    """A module that predicts from the columns of a table in units of the file, and standardises them itself.

    It takes (N, D) in float64: numbers as the file has them, nan where one is missing, and 1 or 0 for each category,
    boolean and indicator of a missing value. Means and standard deviations are in the units of the target, or of its
    logarithm where that was modelled.
    """

    column_mean: Tensor
    column_scale: Tensor
    column_fill: Tensor

    def __init__(self, part: nn.Module, fitted: Preprocessing) -> None:
        super().__init__()
        self.part = part
        rules = [rule for column in fitted.inputs for rule in _rules(column)]
        for name, index in (("mean", 0), ("scale", 1), ("fill", 2)):
            self.register_buffer(f"column_{name}", torch.tensor([rule[index] for rule in rules], dtype=torch.float64))
        self._shift, self._unit = fitted.target.mean, fitted.target.scale

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the predictions at rows of the table."""
        known = torch.where(inputs.isnan(), self.column_fill, inputs)
        values: dict[str, Tensor] = self.part(((known - self.column_mean) / self.column_scale).float())
        if "mean" not in values:
            return values
        return {"mean": values["mean"].double() * self._unit + self._shift, "std": values["std"].double() * self._unit}


def _rules(column: Any) -> list[tuple[float, float, float]]:
    """Return the mean, scale and fill value of each input of an encoded column."""
    own = [(0.0, 1.0, 0.0)] * len(column.features)
    if column.kind != "category":
        own[0] = (column.mean, column.scale, column.fill)
    return own


def described(fitted: Preprocessing) -> list[dict[str, str]]:
    """Describe each input of a `TableModule`, in order."""
    rows = []
    for column in fitted.inputs:
        for name in column.features:
            if name == f"{column.name} missing":
                value = "1 where the field is empty, else 0"
            elif column.kind == "category":
                value = f"1 where the {column.part or 'field'} is {name.removeprefix(f'{column.label}=')}, else 0"
            elif column.kind == "boolean":
                value = f"1 where the field is {column.categories[1]}, else 0" if column.categories else "1 or 0"
            elif column.part:
                value = f"the {column.part} of the date"
            else:
                value = "the number" + ", divided by 100" * (column.sign == "%") + ", nan where it is missing"
            rows.append({"name": name, "column": column.name, "value": value})
    return rows


def check_exportable(opened: Run, path: Path) -> Posterior:
    """Return the posterior of a run; raise a `UsageError` if it or the path cannot be exported."""
    if opened.config["method"] == AUTO or not isinstance(opened.posterior, Posterior):
        raise UsageError(
            "export: the run was fitted by auto, which stacks models that keep training rows; no program holds them.",
            "fit with --method ensemble or --method laplace, or serve this run: posterity serve RUN.",
        )
    if path.suffix and path.suffix.lower() not in (".pt2", ".onnx"):
        raise UsageError(
            f"export: the file must end in .pt2 or .onnx. Got '{path}'.", "a name without a suffix is a folder."
        )
    return opened.posterior


def write_run(run: Path, opened: Run, path: Path, draws: int | None, seed: int) -> dict[str, Any]:
    """Write the program or the folder of a run; return a description of it as JSON."""
    q, fitted, config = check_exportable(opened, path), opened.preprocessing, opened.config
    about = {"data": config["data"], "task": config["task"], "method": config["method"], "classes": config["classes"]}
    columns = [] if fitted is None else described(fitted)
    if not path.suffix:
        scores = {k: v for k, v in RunFolder(run).read("scores").config.items() if isinstance(v, (int, float))}
        inputs = ", ".join(" ".join(column["name"].split()) for column in columns)
        target = "" if fitted is None else f" The target is {fitted.target.name}; the inputs are {inputs}."
        q.save_pretrained(path, scores=scores, data=f"They are of {config['data']}.{target}")
        return {**about, "path": str(path), "scores": scores}
    module: nn.Module = q.predictor(draws, seed=seed)
    rows = example_rows(q.joint.as_joint("export"))
    facts: dict[str, Any] = {**about, "draws": "default" if draws is None else draws, "seed": seed}
    if fitted is not None:
        module, rows = TableModule(module, fitted), rows.double()
        facts |= {"columns": columns, "target": fitted.target.name, "log_target": fitted.target.log}
    write_program(module, path, rows, facts)
    return {**facts, "path": str(path)}
