"""`posterity study mixtures`: the tables."""

import pytest

from posterity_studies.mixtures import clusters, partly, prior

pytestmark = pytest.mark.cpu


def test_the_tables_and_the_folder(study, monkeypatch):
    monkeypatch.setattr(partly, "REPLICATES", 4)
    for name, value in (("COUNT", 60), ("STARTS", 2), ("MOST", 2), ("RESTARTS", 2)):
        monkeypatch.setattr(clusters, name, value)
    for name, value in (("SCALES", (0.5, 2.0)), ("DATA_SETS", 2), ("STEPS", 30), ("ROUNDS", 3), ("TEST", 20)):
        monkeypatch.setattr(prior, name, value)
    found = study("mixtures", seed=2)
    assert "Two normal densities, 200 points" in found.shown
    assert "by EM 0." in found.shown
    assert "-20.916884" in found.shown
    assert "misprint: KL of the first point alone" in found.shown
    assert "k-means++" in found.shown
    assert "variational EM: " in found.shown
    assert "priors of a network: 2 data sets" in found.err
    assert {"example", "miniature", "labels", "clusters", "priors"} < set(found.stored)
