"""Two moons: far from all rows, posteriors over weights know that they do not know."""

import pytest

from posterity.inference import infer
from posterity_studies.moons import fits
from posterity_studies.moons.study import NOTHING

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("name", ["MeanField", "NaturalGradient", "Laplace"])
def test_entropy_far_away_exceeds_that_of_map_and_that_on_the_data(name, monkeypatch):
    monkeypatch.setattr(fits, "STEPS", 700)
    data = fits.two_moons(fits.ROWS, fits.NOISE, seed=3)
    found = {}
    for label in ("MAP", name):
        q = None
        for stage in fits.methods()[label]:
            q, _ = infer(stage, fits.problem(data, 3), data.train, start=q, seed=3)
        found[label] = fits.scored(q, data)
    mode, fit = found["MAP"], found[name]
    assert fit.ring_entropy.mean() > 5 * mode.ring_entropy.mean()
    assert (fit.ring_entropy >= mode.ring_entropy - NOTHING).double().mean() > 0.95
    assert fit.ring_entropy.mean() > fit.data_entropy.mean()
    assert mode.ring_entropy.mean() < mode.data_entropy.mean()
