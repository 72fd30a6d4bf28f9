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
    result = study("mixtures", seed=2)
    assert "Two normal densities, 200 points" in result.shown
    assert "by EM 0." in result.shown
    assert "-20.916884" in result.shown
    assert "misprint: KL of the first point alone" in result.shown
    assert "k-means++" in result.shown
    assert "variational EM: " in result.shown
    assert "priors of a network: 2 data sets" in result.err
    assert {"example", "miniature", "labels", "clusters", "priors"} < set(result.stored)
