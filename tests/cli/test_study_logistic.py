"""`posterity study logistic`: the tables."""

import pytest

pytestmark = pytest.mark.cpu


def test_the_tables_and_the_folder(study):
    small = "--steps 20 --chains 20 --draws 5 --points 3"
    result = study("logistic", *small.split(), told=small, seed=2, once=True)
    assert "Laplace, exact integral 0.969762 0.969762" in result.shown
    assert "Laplace, probit κ 0.952382 0.952382" in result.shown
    assert "log evidence: exact -5.728343, Laplace -5.806578" in result.shown
    assert result.shown.count("-5.7283431") == 7
    assert "Variational, factorised" in result.shown
    assert "Monte Carlo: 4,000,000 draws here, 1,000,000 in curves, 10,000 in maps." in result.shown
    assert "Laplace 0.415 0.254 -0.078" in result.shown
    assert "Expectation propagation 0.009 0.094 -0.024" in result.shown
    assert result.shown.count("holds: ") + result.shown.count("FAILS: ") == len(result.stored["claims"]) == 12
    assert "chains" in result.err
    assert result.stored["seed"] == 2
