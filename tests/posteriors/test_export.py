"""Exported programs and hub folders. The whole matrix of programs is `python -m benchmarks.exports`."""

import json
import math
import subprocess
import sys

import pytest
import torch
from contracts.cases import inputs, labels, numbers
from torch import nn

import posterity as po
from benchmarks import exports
from posterity.errors import BadData, BadFolder, PosterityError
from posterity.likelihoods import Bernoulli, Categorical, Gaussian, Heteroscedastic, Probit
from posterity.methods import AllWeights, Laplace, MeanField
from posterity.methods import LastLayer as Last
from posterity.posteriors import Calibrated, Mixture, Point, pretrained
from posterity.posteriors.linear_chains import SLOPES
from posterity.predictive import from_outputs
from posterity.priors import Normal

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]
FLOAT64 = torch.float64
CHOSEN = ("laplace-classes", "chains-heteroscedastic", "calibrated_ensemble", "attention-dropout", "mean_field-probit")


def test_programs_run_without_posterity_and_predict_as_it_does(tmp_path):
    chosen = {name: case for name, case in exports.cases().items() if name in CHOSEN}
    assert len(chosen) == len(CHOSEN)
    exports.stored(tmp_path, chosen, (".pt2", ".onnx"))
    for suffix in (".pt2", ".onnx"):
        away = exports.distances(tmp_path, suffix)
        assert away.keys() == chosen.keys()
        assert max(away.values()) < 1e-5, away


@pytest.mark.parametrize("activation", SLOPES, ids=lambda kind: kind.__name__)
def test_a_linearised_chain_predicts_in_closed_form(activation):
    x = inputs(FLOAT64, 7)
    for noise, outputs, targets in (
        (Gaussian((0.3, 0.7)), 2, numbers(FLOAT64)[1].expand(-1, 2)),
        (Categorical(), 3, torch.arange(20) % 3),
        (Categorical(), 2, torch.arange(20) % 2),
        (Bernoulli(), 2, torch.ones(20, 2, dtype=FLOAT64)),
        (Probit(), 1, torch.ones(20, 1, dtype=FLOAT64)),
        (Heteroscedastic(), 2, numbers(FLOAT64)[1]),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            layers = (nn.Linear(3, 5), activation(), nn.Linear(5, 4, bias=False), activation(), nn.Linear(4, outputs))
            net = nn.Sequential(*layers).double()
        joint = po.Joint(net, noise, Normal(1.0), num_data=20)
        for subset in (AllWeights(), po.methods.Matching("2.*")):
            q, _ = po.infer(Laplace(subset=subset, tuning=None), joint, (inputs(FLOAT64), targets))
            pred, drawn = q.predict(x), from_outputs(noise, q.outputs(x, 30, po.Key(5)))
            result = q.module(draws=30, seed=5)(x)
            if noise.link is None:
                pred = drawn
            if "mean" in result:
                assert torch.allclose(result["mean"], pred.mean, atol=1e-11)
                assert torch.allclose(result["std"], pred.std, atol=1e-10)
            else:
                assert torch.allclose(result["probs"], pred.probs, atol=1e-10)
                assert torch.allclose(result["entropy"], pred.entropy, atol=1e-10)
                assert torch.allclose(result["mutual_information"], drawn.epistemic, atol=1e-10)


class Branching(nn.Module):
    """A branch on a value, which no trace can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x) if float(x.sum()) > 0 else -self.layer(x)


def test_what_cannot_be_exported_says_why_and_what_to_do(tmp_path, monkeypatch):
    q = Point.of(nn.Linear(2, 1), Gaussian(0.1))
    with pytest.raises(ValueError, match=r"must end in .pt2 .*or .onnx.*Got 'model.bin'. Rename it."):
        q.export("model.bin")
    with pytest.raises(TypeError, match=r"cannot trace the network.*without branches on values.*q.save"):
        Point.of(Branching(), Gaussian(0.1)).export(tmp_path / "m.pt2", torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"begins with Branching|begins with Conv2d"):
        Point.of(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten()), Gaussian(0.1)).export(tmp_path / "m.pt2")
    with pytest.raises(BadData, match="inputs must have a few rows"):
        q.export(tmp_path / "m.pt2", torch.zeros(0, 2))
    half = Point.of(nn.Linear(2, 1).bfloat16(), Gaussian(0.1))
    with pytest.raises(TypeError, match=r"onnx.*(?:float32|\.pt2)"):
        half.export(tmp_path / "m.onnx")
    density = po.infer(MeanField(steps=2), po.Density(lambda a: -a.square().sum(), {"a": (2,)}), None)[0]
    with pytest.raises(TypeError, match="a Density has no module"):
        density.export(tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("posterity.posteriors.programs.find_spec", lambda name: None)
    with pytest.raises(PosterityError, match=r"pip install 'posterity\[onnx\]'"):
        q.export(tmp_path / "m.onnx")


def test_a_program_that_predicts_otherwise_is_not_written(tmp_path, monkeypatch):
    from posterity.posteriors import programs

    class Off(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, rows):
            return {name: value + 2e-5 for name, value in self.module(rows).items()}

    traced = programs._traced
    monkeypatch.setattr(programs, "_traced", lambda module, rows: traced(Off(module), rows))
    with pytest.raises(TypeError, match="The program does not predict as the posterior does: its 'mean' is off by"):
        Point.of(nn.Linear(2, 1), Gaussian(0.1)).export(tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


def posteriors():
    problem = po.Joint(exports.normed(3).double(), Categorical(), Normal(1.0), num_data=20)
    mean_field, _ = po.infer(MeanField(steps=3), problem, labels(FLOAT64))
    last, _ = po.infer(Laplace(subset=Last(), tuning=None), problem, labels(FLOAT64))
    calibrated = Calibrated.fit(mean_field, labels(FLOAT64))
    return {
        "mean field": mean_field,
        "last layer": last,
        "calibrated": calibrated,
        "mixture": Mixture([last, mean_field]),
    }


def test_a_hub_folder_has_the_same_bits_and_a_card(tmp_path):
    x = inputs(FLOAT64, 4)
    for name, q in posteriors().items():
        q.save(tmp_path / "run")
        scores = {"NLL": 0.3125, "a|b": math.inf, "RMSE": 29840.4}
        q.save_pretrained(tmp_path / "hub", scores=scores, limits="Only for tests.")
        assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == [
            "README.md",
            "config.json",
            "model.safetensors",
        ]
        loaded, again = (
            make(tmp_path / folder, exports.normed(3).double())
            for make, folder in ((po.load, "run"), (po.from_pretrained, "hub"))
        )
        assert repr(loaded) == repr(again) == repr(q)
        for own, other in zip(loaded.parts().values(), again.parts().values(), strict=True):
            assert own.config == other.config
            assert own.tensors.keys() == other.tensors.keys()
            assert all(torch.equal(tensor, other.tensors[key]) for key, tensor in own.tensors.items())
        assert torch.equal(again.predict(x).probs, q.predict(x).probs), name
        card = (tmp_path / "hub" / "README.md").read_text()
        assert "library_name: posterity" in card
        assert "The posterior is of 20 training rows. They are not described." in card
        assert "| NLL | 0.3125 |\n| a\\|b | not finite |\n| RMSE | 29,840 |" in card
        assert "## Intended use\n\nNot stated." in card
        assert card.count("Only for tests.") == 1
        assert repr(q) in card


def test_a_bad_hub_folder_is_refused(tmp_path, monkeypatch):
    net = nn.Linear(2, 1)
    q = Point.of(net, Gaussian(0.1))
    with pytest.raises(BadFolder, match="There is no folder 'nowhere', and an id of the hub is like owner/name"):
        po.from_pretrained("nowhere", net)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadFolder, match=r"has no config.json"):
        po.from_pretrained(tmp_path / "empty", net)
    with pytest.raises(TypeError, match=r"scores must be numbers by name\. Got 'high' for 'NLL'"):
        q.save_pretrained(tmp_path / "hub", scores={"NLL": "high"})
    q.save_pretrained(tmp_path / "hub")
    config = tmp_path / "hub" / "config.json"
    stored = json.loads(config.read_text())
    for change, said in (
        ({"format": 99}, "Its format is 99"),
        ({"library_name": "transformers"}, "It is for 'transformers'"),
        ({"posterior": 3}, "hub"),
    ):
        config.write_text(json.dumps({**stored, **change}))
        with pytest.raises(BadFolder, match=said):
            po.from_pretrained(tmp_path / "hub", net)
    config.write_text(json.dumps(stored))
    with pytest.raises(BadFolder):
        po.from_pretrained(tmp_path / "hub", nn.Linear(3, 1))
    weights = tmp_path / "hub" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(BadFolder):
        po.from_pretrained(tmp_path / "hub", net)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PosterityError, match="pip install huggingface_hub"):
        po.from_pretrained("owner/name", net)


def test_weights_of_one_save_are_not_read_under_the_configuration_of_another(tmp_path, monkeypatch):
    net, write = nn.Linear(2, 1), pretrained.write_file
    Point.of(net, Gaussian(5.0)).save_pretrained(tmp_path / "hub")

    def interrupted(path, data):
        if path.name == pretrained.CONFIG:
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(pretrained, "write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Point.of(nn.Linear(2, 1), Gaussian(0.1)).save_pretrained(tmp_path / "hub")
    with pytest.raises(BadFolder, match="not of the same save"):
        po.from_pretrained(tmp_path / "hub", net)


def test_the_hub_is_asked_for_an_id(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    net, asked = nn.Linear(2, 1), []
    Point.of(net, Gaussian(0.1)).save_pretrained(tmp_path / "snapshot")
    monkeypatch.setattr(
        hub, "snapshot_download", lambda *given, **options: asked.append((given, options)) or tmp_path / "snapshot"
    )
    assert isinstance(po.from_pretrained("owner/name", net, revision="v1"), Point)
    ((given, options),) = asked
    assert (given, options["revision"]) == (("owner/name",), "v1")


RUN_ALONE = """
import sys
sys.modules["posterity"] = sys.modules["torch"] = None
import json, numpy as np, onnxruntime
session = onnxruntime.InferenceSession("model.onnx")
facts = json.loads(session.get_modelmeta().custom_metadata_map["posterity"])
rows = [[100.0, 3, 1, 1, 0, 0, 0], [float("nan"), 2, 0, 0, 0, 1, 1]]
names = [column["name"] for column in facts["columns"]]
order = ["area", "rooms", "garden", "zone=A", "zone=B", "zone=C", "area missing"]
result = session.run(["mean", "std"], {"inputs": np.array(rows)[:, [order.index(name) for name in names]]})
print(json.dumps([each[:, 0].tolist() for each in result]))
"""


def test_a_run_of_the_command_line_is_a_program_of_its_columns(tmp_path, monkeypatch, capsys):
    from cli.test_serve import TINY, houses

    from posterity.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["fit", str(houses(tmp_path / "houses.csv")), "--target", "price", "--out", "run", *TINY]) == 0
    capsys.readouterr()
    assert main(["export", "run", "model.onnx", "--json"]) == 0
    columns = json.loads(capsys.readouterr().out)["columns"]
    assert {column["name"]: column["value"] for column in columns}["zone=A"] == "1 where the field is A, else 0"
    (tmp_path / "new.csv").write_text("area,rooms,garden,zone\n100,3,yes,A\n,2,no,C\n")
    assert main(["predict", "run", "--data", "new.csv", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    wanted = [[row[told["columns"].index(name)] for row in told["rows"]] for name in ("mean", "std")]
    outcome = subprocess.run([sys.executable, "-c", RUN_ALONE], capture_output=True, text=True, timeout=120, env={})
    assert json.loads(outcome.stdout) == [pytest.approx(values, rel=1e-5) for values in wanted], outcome.stderr
    assert main(["export", "run", "folder"]) == 0
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "test_nll" in card
    assert "The target is price; the inputs are area" in card
    assert main(["export", "run", "model.bin"]) == 2
    assert "must end in .pt2 or .onnx" in capsys.readouterr().err
