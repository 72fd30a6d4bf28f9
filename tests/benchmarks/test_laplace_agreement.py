"""What `benchmarks.laplace_agreement` compares: ours against dense Jacobians, without the peer."""

import pytest
import torch
from benchmarkfiles import load

pytestmark = pytest.mark.cpu  # the benchmark is
agreement = load("laplace_agreement")
CASES = {case.name: case for case in agreement.cases()}


@pytest.mark.parametrize("name", ["U-Net 8 x 8", "transformer with masks", "causal model, tied head", "LSTM", "GRU"])
def test_evidence_covariances_and_probabilities_equal_those_of_dense_jacobians(name):
    module, batches = agreement.trained(CASES[name], 0)
    reference = agreement.dense(CASES[name], module, batches)
    for structure in agreement.STRUCTURES:
        away = agreement.ours(CASES[name], module, batches, structure).away_from(reference[structure])
        assert all(value < 1e-10 for value in away.values()), (structure, away)


def test_another_prior_is_noticed(monkeypatch):
    module, batches = agreement.trained(CASES["GRU"], 0)
    own = agreement.ours(CASES["GRU"], module, batches, "diag")
    monkeypatch.setattr(agreement, "SCALE", 0.501)
    away = own.away_from(agreement.dense(CASES["GRU"], module, batches)["diag"])
    assert min(away.values()) > agreement.TOLERANCE


def test_positions_without_a_label_are_left_out_of_the_fit_and_predicted():
    case = CASES["causal model, tied head"]
    module, batches = agreement.trained(case, 0)
    rows = agreement.Rows(case, module, plain=True)
    inputs, labels = agreement.as_rows(batches[0])
    every, all_labels = agreement.as_rows(batches[0], all_positions=True)
    kept = all_labels != agreement.IGNORED
    assert 0 < int(kept.sum()) < len(kept)
    assert torch.equal(labels, batches[0][1].flatten()[kept])
    assert torch.equal(rows(inputs), rows(every)[kept])
    assert rows(every).shape == (len(kept), agreement.ARCHITECTURES[3].module(0)(batches[0][0]).shape[1])
