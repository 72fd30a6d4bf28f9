"""What may import what, and what must stay optional."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import posterity

ROOT = Path(posterity.__file__).parent
PROJECT = ROOT.parent
INTERNAL = ("cli", "jacobians", "numerics", "recipes", "special", "storage")
HEAVY = ("sklearn", "pandas", "pyarrow", "matplotlib", "typer", "rich", "platformdirs", "scipy", "jinja2")
HEAVY += ("transformers", "accelerate", "lightning", "tensorboard")
SUBPACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def layers():
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    (contract,) = config["tool"]["importlinter"]["contracts"]
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_every_subpackage_has_a_layer():
    named = {name for layer in layers() for name in layer}
    assert {f"posterity.{name}" for name in SUBPACKAGES} <= named


def test_imports_go_down_only():
    pytest.importorskip("importlinter")
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    outcome = subprocess.run(
        [sys.executable, "-c", lint, "--no-cache"], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )
    assert outcome.returncode == 0, outcome.stdout


def test_the_library_imports_and_infers_without_the_optional_packages():
    code = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None
import torch, posterity as po
for name in {[name for name in SUBPACKAGES if name not in ("cli", "report")]!r}:
    __import__(f"posterity.{{name}}")
x = torch.linspace(-1, 1, 8).unsqueeze(1)
joint = po.Joint(torch.nn.Linear(1, 1), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=8)
q, _ = po.infer(po.methods.MAP(steps=3), joint, (x, x))
po.metrics.root_mean_squared_error(q.predict(x), x)
"""
    outcome = run(code)
    assert outcome.returncode == 0, outcome.stderr


def test_importing_the_package_does_not_import_torch():
    outcome = run("import sys, posterity; print('torch' in sys.modules)")
    assert outcome.stdout.strip() == "False", outcome.stderr


def test_every_public_name_resolves_and_unknown_ones_do_not():
    for name in posterity.__all__:
        assert getattr(posterity, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'Joiint'. Did you mean 'Joint'\?"):
        posterity.Joiint  # noqa: B018


def test_the_top_level_has_every_package_that_users_need_and_no_other():
    assert {name for name in SUBPACKAGES if name in posterity.__all__} == {*SUBPACKAGES} - {*INTERNAL}
    outcome = run("import posterity as po; print(*dir(po)); print(po.report.reliability_diagram.__name__)")
    assert outcome.stdout.split() == [*sorted(posterity.__all__), "reliability_diagram"], outcome.stderr


def test_nothing_imports_the_integrations():
    users = [path.relative_to(ROOT) for path in ROOT.rglob("*.py") if "posterity.integrations" in path.read_text()]
    assert {path.parts[0] for path in users} == {"integrations"}


def test_no_file_is_too_long_to_read_in_one_sitting():
    files = (*ROOT.rglob("*.py"), *(PROJECT / "posterity_studies").rglob("*.py"))
    long = {path.name: count for path in files if (count := path.read_text().count("\n")) > 450}
    assert not long


def test_only_infer_loops_over_steps():
    """No method runs a loop of its own: nobody below `inference` or in `methods` asks a Feed for its batches."""
    users = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ".from_step(" in path.read_text()}
    # The validator passes over held-out rows, log-likelihoods of draws and the distance to the mode over all; a Feed is
    # put together of others, and the rows of a loader are read into memory. Batch-norm statistics of what others have
    # trained come from one pass.
    reading = {"posteriors/samples.py", "inference/validator.py", "model/batch.py", "model/data.py"}
    reading |= {"methods/parts/mode_distance.py", "methods/swag.py", "integrations/lightning.py"}
    assert users == {"inference/infer.py", *reading}


def test_no_module_binds_a_name_twice():
    """Modules that were joined must not share a constant or helper by accident."""
    twice = {}
    for path in [*ROOT.rglob("*.py"), *(ROOT.parent / "posterity_studies").rglob("*.py")]:
        names = Counter()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                overload = any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
                names[node.name] += not overload
            elif isinstance(node, ast.Assign):
                targets = (name for target in node.targets for name in ast.walk(target))
                stored = (name for name in targets if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
                names.update(name.id for name in stored)
        if repeated := [name for name, count in names.items() if count > 1]:
            twice[path.name] = repeated
    assert not twice
