"""The benchmark of a language model runs whole on a CPU, and its probabilities are those of the bytes."""

import json
import math

import pytest
import torch
from benchmarkfiles import load

from posterity import metrics
from posterity.predictive import ClassPredictive

parts = load("language_model_parts")
SMALL = parts.Shape(layers=1, heads=2, width=8, context=6, vocabulary=300, rank=2)


def small():
    torch.manual_seed(0)
    net = parts.Transformer(SMALL)
    net.adapt(SMALL.rank)
    return net


def rows(count=3):
    ids = torch.randint(256, (count, SMALL.context + 1), generator=torch.Generator().manual_seed(1))
    return parts.Rows(ids)


def test_the_defaults_have_the_size_of_gpt_2():
    with torch.device("meta"):
        net = parts.Transformer(parts.Shape(context=1024))
    assert sum(p.numel() for p in net.parameters()) == 124_439_808


def test_adapters_begin_at_nothing_and_are_all_that_learns():
    torch.manual_seed(0)
    plain = parts.Transformer(SMALL)
    adapted, ids = small(), rows().inputs
    torch.testing.assert_close(adapted(ids), plain(ids))
    adapted.blocks[0].query.up.weight.data.fill_(0.1)
    adapted.blocks[0].value.up.weight.data.fill_(0.1)
    assert not torch.allclose(adapted(ids), plain(ids))
    names = [name.rsplit(".", 2)[1] for name, p in adapted.named_parameters() if p.requires_grad]
    assert sorted(set(names)) == ["down", "up"]
    assert len(names) == 4


def test_a_token_sees_none_after_it():
    net, given = small(), rows().inputs
    other = given.clone()
    other[:, 4:] += 1
    torch.testing.assert_close(net(given)[:, :4], net(other)[:, :4])
    assert not torch.allclose(net(given)[:, 4:], net(other)[:, 4:])


def test_averaged_probabilities_have_the_likelihood_of_the_bytes():
    net, given = small(), rows()
    draws = {name: torch.cat([values, values + 0.3]) for name, values in parts.adapters(net).items()}
    before = parts.adapters(net)
    probs = parts.averaged(net, draws, given, 2)
    for name, values in parts.adapters(net).items():
        assert torch.equal(values, before[name])
    each = []
    for number in range(2):
        parts.put(net, {name: values[number : number + 1] for name, values in draws.items()})
        with torch.no_grad():
            each.append(net(given.inputs).softmax(-1))
    whole = torch.stack(each).mean(0).flatten(0, 1)
    torch.testing.assert_close(probs[:, :256], whole[:, :256])
    torch.testing.assert_close(probs[:, 256], whole[:, 256:].sum(-1))
    labels = given.targets.flatten()
    nats = metrics.negative_log_likelihood(ClassPredictive(probs), labels)
    assert nats == pytest.approx(-float(whole[torch.arange(len(labels)), labels].log().mean()), rel=1e-5)


def test_no_module_is_in_two_parts_and_windows_predict_every_byte_once():
    found = parts.modules()
    names = [name for own in found.values() for name, _ in own]
    assert len(set(names)) == len(names) > 200
    assert all(len(own) > 20 for own in found.values())
    assert {name.split(".")[0] for name, _ in found["held-out"]} <= set(parts.DOMAIN)
    windows = parts._windows(bytes(range(50)), 7)
    assert windows[:, 1:].flatten().tolist() == list(range(1, 50))


def test_the_whole_benchmark_at_a_tiny_size(tmp_path):
    benchmark = load("language_model")
    small = "--layers 1 --rows 4 --batch 2 --validation 2 --held-out 4 --pretraining-steps 5 --pretraining-batch 2"
    benchmark.main(["--tiny", "--device", "cpu", *small.split(), "--results", str(tmp_path)])
    found = json.loads((tmp_path / "language_model.json").read_text())
    facts = found["facts"]
    assert [stage["error"] for stage in facts["stages"].values()] == [""] * 7
    assert not any(comparison["skipped"] for comparison in found["comparisons"])
    steps, fits = found["comparisons"]
    assert [timing["name"] for timing in steps["timings"]] == [benchmark.ADAMW, benchmark.IVON]
    assert [timing["name"] for timing in fits["timings"]] == [benchmark.EPOCH, *benchmark.FITS]
    scores = facts["held out"]
    assert list(scores) == ["before fine-tuning", "AdamW", "posterity IVON", "posterity Laplace"]
    bits = [score["bits a byte"] for score in scores.values()]
    assert len(set(bits)) == 4
    assert all(0.0 < value < math.log2(300) + 0.5 for value in bits)
    assert "held-out modules" in (tmp_path / "language_model.md").read_text()


def test_a_stage_that_fails_leaves_the_others(tmp_path, capsys):
    benchmark = load("language_model")
    given = ["--tiny", "--device", "cpu", "--stages", "scores,Laplace", "--results", str(tmp_path)]
    benchmark.main(given)
    stages = json.loads((tmp_path / "language_model.json").read_text())["facts"]["stages"]
    assert list(stages) == ["Laplace", "scores"]
    assert "AttributeError" in stages["Laplace"]["error"]
    assert "Stage 'Laplace' failed: AttributeError" in capsys.readouterr().out
