"""Scales that were left out: of layers before a norm, at every temperature, in members alone, and in resumed runs."""

import dataclasses

import pytest
import torch
from drawn import normal
from killedruns import KillAfter, KilledError
from torch import nn

import posterity as po
from posterity.inference import Checkpoint
from posterity.methods import MAP, NUTS, Ensemble
from posterity.methods.parts import scales
from posterity.model import Tempering
from posterity.model.scales import chosen_scales
from posterity.numerics import Key

X = normal(Key(0), 20, 3)
ROWS = X, X.sum(1, keepdim=True).sin() + 0.3 * normal(Key(1), 20, 1)


def problem(norm: nn.Module | None = None, tempering: Tempering | None = None) -> po.Joint:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Identity() if norm is None else norm, nn.Tanh(), nn.Linear(4, 1))
    tempering = tempering or Tempering.bayes()
    return po.Joint(net.double(), po.likelihoods.Gaussian(), po.priors.Normal(), 20, tempering)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "STEPS", 90)


def prior_scales(joint: po.Joint) -> dict[str, float]:
    return dict(zip(joint.network.layout.names, chosen_scales(joint)["prior_scale"].tolist(), strict=True))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.LayerNorm(4)], ids=["batch norm", "layer norm"])
def test_a_layer_whose_length_a_norm_takes_out_keeps_its_scale(norm: nn.Module) -> None:
    """The evidence of such a layer grows for ever as its scale shrinks, to steps that are too long for any sampler."""
    joint = scales.by_evidence(problem(norm), po.as_data(ROWS), None, Key(0))
    found = prior_scales(joint)
    assert (found["0.weight"], found["0.bias"]) == (1.0, 1.0)
    assert all(found[name] != 1.0 for name in ("1.weight", "1.bias", "3.weight", "3.bias"))
    assert not po.model.scales.leaves_out(joint)


@pytest.mark.usefixtures("quick")
def test_scales_are_the_same_at_every_temperature_and_in_members() -> None:
    data = po.as_data(ROWS)
    found = [scales.by_evidence(problem(tempering=t), data, None, Key(0)) for t in (None, Tempering.tempered(0.1))]
    several = Tempering.tempered(torch.tensor([10.0, 0.3], dtype=torch.float64))
    found.append(scales.by_evidence(problem(tempering=several), data, None, Key(0)))
    assert prior_scales(found[0])["0.weight"] != 1.0
    assert prior_scales(found[0]) == prior_scales(found[1]) == prior_scales(found[2])
    assert len({joint.likelihood.scale for joint in found}) == 1


@pytest.mark.usefixtures("quick")
def test_members_of_an_ensemble_alone_have_the_scales_of_its_start() -> None:
    start, _ = po.infer(MAP(steps=5, batch_size=None), problem(), ROWS, seed=5)
    start = po.posteriors.Point(
        dataclasses.replace(start.joint, prior=po.priors.Normal(0.5, chosen="evidence")), start.theta
    )
    ensemble = Ensemble(MAP(steps=5, batch_size=None), 2)
    together, _ = po.infer(ensemble, problem(), ROWS, start=start)
    for index, task in enumerate(ensemble.tasks(problem(), ROWS, start=start)):
        alone, _ = po.infer(task.method, task.joint, task.data, start=task.start, seed=task.seed)
        assert all(scale == pytest.approx(0.5) for scale in prior_scales(alone.joint).values())
        torch.testing.assert_close(alone.point(), together.posteriors[index].point(), rtol=1e-10, atol=1e-10)


def test_a_run_whose_scales_have_hyper_priors_resumes(tmp_path) -> None:
    method = NUTS(draws=3, warmup=3, chains=2)
    whole, _ = po.infer(method, problem(), ROWS)
    checkpoint = Checkpoint(tmp_path, steps=1, seconds=None)
    with pytest.raises(KilledError):
        po.infer(method, problem(), ROWS, checkpoint=checkpoint, callbacks=[KillAfter(4)])
    resumed, _ = po.infer(method, problem(), ROWS, checkpoint=checkpoint)
    assert torch.equal(resumed.theta, whole.theta)
