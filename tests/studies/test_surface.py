"""The study of loss surfaces: potentials and curvatures by hand, modes, methods against the grid, figures."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch

from posterity.numerics import Key
from posterity_studies.options import Settings
from posterity_studies.surface import fits, problem
from posterity_studies.surface.figures import _levels, draw
from posterity_studies.surface.study import run

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("SIDE", 41), ("STEPS", 60)):
            patch.setattr(problem, name, value)
        for name, value in (("STEPS", 40), ("WARMUP", 15), ("DRAWS", 10)):
            patch.setattr(fits, name, value)
        result = run(Settings(seed=1))
        result.document()  # with these settings in it
        yield result


def test_the_potential_of_the_network_is_the_formula(study):
    surface, (b, a) = study.surfaces["network"], problem.grid().unbind(-1)
    x, y = surface.inputs.squeeze(1), surface.targets.squeeze(1)
    errors = y - a.unsqueeze(1) * torch.tanh(b.unsqueeze(1) * x)
    values = 0.5 * errors.square().sum(1) / problem.NOISE**2 + 0.5 * (a.square() + b.square()) / problem.PRIOR_SCALE**2
    torch.testing.assert_close(surface.potential.flatten(), values - values.min())
    torch.testing.assert_close(surface.potential, surface.potential.flip(0, 1))  # f(-a, -b) = f(a, b)


def test_the_curvature_of_the_line_is_that_of_its_rows(study):
    surface = study.surfaces["line"]
    features = torch.cat([surface.inputs, torch.ones_like(surface.inputs)], 1)
    eye = torch.eye(2, dtype=torch.float64)
    hessian = features.mT @ features / problem.NOISE**2 + eye / problem.PRIOR_SCALE**2
    least = torch.linalg.eigvalsh(hessian)[0]
    torch.testing.assert_close(surface.curvature, least.expand_as(surface.curvature))
    expected = torch.linalg.solve(hessian, features.mT @ surface.targets).mT / problem.NOISE**2
    torch.testing.assert_close(surface.modes, expected, rtol=0.0, atol=1e-4)


def test_descents_go_down(study):
    for surface in study.surfaces.values():
        values = [float(-surface.joint.log_density(place, _rows(surface)).sum()) for place in surface.paths[::10]]
        assert sorted(values, reverse=True) == values


def test_claims_hold_and_can_fail(study):
    assert all(study.claims().values())
    swapped = replace(study, surfaces={"line": study.surfaces["network"], "network": study.surfaces["line"]})
    assert list(swapped.claims().values())[:5] == [False] * 5
    wide = replace(study, methods={name: study.methods["exact"] for name in study.methods})
    assert list(wide.claims().values())[6:] == [False, False, True]
    cheat = {name: replace(own, divergence=0.1) for name, own in study.methods.items()}
    assert list(replace(study, methods=cheat).claims().values())[6:] == [True, True, False]


def test_methods_are_compared_with_the_exact_posterior(study):
    assert study.methods["exact"].divergence == pytest.approx(0.0, abs=1e-12)
    assert study.methods["exact"].positive == pytest.approx(0.5)
    two, one = study.methods["two Laplace posteriors"], study.methods["Laplace"]
    assert two.positive == pytest.approx(0.5)
    assert one.divergence - two.divergence == pytest.approx(math.log(2.0), abs=0.05)
    for own in study.methods.values():
        assert own.masses is None or float(own.masses.sum()) == pytest.approx(1.0)
    assert study.methods["NUTS"].draws.shape == (40, 2)


def test_lines_enclose_their_shares():
    masses = torch.softmax(Key(0).normal((50,), torch.float64, "cpu"), 0)
    for level, share in zip(_levels(masses), (0.9, 0.5), strict=True):
        assert float(masses[masses >= level].sum()) >= share > float(masses[masses > level].sum())


def test_document_and_figures(study, tmp_path):
    document = study.document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(study, tmp_path / "new") == ["surface.png", "two_modes.png"]
    for name in ("surface.png", "two_modes.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


def _rows(surface):
    return problem.Batch(surface.inputs, surface.targets)
