"""The files of `benchmarks/`, which is not an installed package."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load(name):
    """`benchmarks/<name>.py` as a module; what it imports from its neighbours is found."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    spec = importlib.util.spec_from_file_location(f"posterity_benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
