"""Doors that must close before work is lost."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import posterity as po
from posterity.errors import BadData, BadFolder

X = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64, device="cpu").unsqueeze(1)


def problem(net=None, **options):
    net = nn.Linear(1, 1) if net is None else net
    likelihood = options.pop("likelihood", po.likelihoods.Gaussian(0.3))
    return po.Joint(net.double(), likelihood, po.priors.Normal(1.0), **{"num_data": 12, **options})


def test_an_unusable_checkpoint_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("mine")
    steps = []

    class Watch(po.inference.Callback):
        def after_step(self, run):
            steps.append(run.step)

    with pytest.raises(BadFolder):
        po.infer(po.methods.MAP(steps=3), problem(), (X, X), checkpoint=tmp_path / "file", callbacks=[Watch()])
    assert steps == []


def test_an_unfinished_run_says_how_to_get_its_posterior(tmp_path):
    po.infer(po.methods.MAP(steps=3), problem(), (X, X), checkpoint=tmp_path / "run")
    with pytest.raises(BadFolder, match="its end"):
        po.load(tmp_path / "run", nn.Linear(1, 1).double())


@pytest.mark.cpu
def test_persistent_workers_cannot_be_resumed(tmp_path):
    loader = DataLoader(TensorDataset(X, X), batch_size=4, num_workers=1, persistent_workers=True)
    with pytest.raises(BadData, match="persistent_workers=False"):
        po.infer(po.methods.MAP(steps=3), problem(), loader, checkpoint=tmp_path / "run")


@pytest.mark.cpu
def test_a_stream_of_other_rows_is_another_run(tmp_path):
    method = po.methods.MAP(steps=3)
    po.infer(method, problem(), DataLoader(TensorDataset(X, X), batch_size=4), checkpoint=tmp_path / "run")
    with pytest.raises(BadFolder, match="data"):
        po.infer(method, problem(), DataLoader(TensorDataset(X, 2 * X), batch_size=4), checkpoint=tmp_path / "run")


def test_members_of_a_fitted_noise_are_members_of_the_joint():
    joint = problem(likelihood=po.likelihoods.Gaussian(1.0, learn=True))
    start = joint.initial() + po.Key(0).normal((12, joint.size), torch.float64)
    q, _ = po.infer(po.methods.MAP(steps=5), joint, (X, X), start=start)
    assert q.joint.num_members == 12  # as many as rows: nothing may take one for the other
    again, _ = po.infer(po.methods.MAP(steps=1), q.joint, (X, X), start=q)
    one, _ = po.infer(po.methods.MAP(steps=1), q.joint.member(3), (X, X), start=q.member(3))
    torch.testing.assert_close(again.member(3).point(), one.point())


def test_a_power_without_an_axis_is_a_number():
    tempering = po.Tempering.tempered(torch.tensor(4.0))
    assert tempering == po.Tempering.tempered(4.0)
    q, _ = po.infer(po.methods.Laplace(tuning=None), problem(tempering=tempering), (X, X))
    assert q.num_members is None


def test_another_density_is_refused(tmp_path):
    density = po.Density(lambda rate: -rate.sum(), {"rate": (2, 3)}, {"rate": po.model.Positive()})
    po.infer(po.methods.MAP(steps=2), density, None)[0].save(tmp_path / "run")
    assert po.load(tmp_path / "run", density).point().shape == (6,)
    for other in (
        dataclasses.replace(density, shapes={"rate": (3, 2)}),
        dataclasses.replace(density, constraints={"rate": po.model.Interval(0.0, 1.0)}),
        dataclasses.replace(density, dtype=torch.float64),
    ):
        with pytest.raises(BadFolder, match="another Density"):
            po.load(tmp_path / "run", other)


def test_instance_norm_learns_its_statistics():
    net = nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), nn.Linear(4, 1)
    )
    x = po.Key(0).normal((12, 4), torch.float64) + 3.0
    q, _ = po.infer(po.methods.MAP(steps=20), problem(net), (x, x[:, :1]))
    assert float(q.buffers["1.running_mean"]) > 1.0
    assert not q.joint.network.mixes_rows


def test_batch_norm_cannot_train_on_one_row():
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    with pytest.raises(BadData, match="Batch norm cannot train on 1 row"):
        po.infer(po.methods.MAP(steps=2), problem(net, num_data=1), (X[:1], X[:1]))


def test_validation_is_refused_at_the_door():
    method = po.methods.MAP(steps=2)
    with pytest.raises(BadData, match="no row has a weight and a target"):
        po.infer(method, problem(), (X, X), validation=(X, X, torch.zeros(12, dtype=torch.float64)))


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside"):
        po.infer(po.methods.MAP(steps=2), problem(), (X, X))


def test_numbers_of_numpy_are_numbers():
    joint = problem(num_data=np.int64(12), likelihood=po.likelihoods.Gaussian(np.float32(0.5)))
    assert type(joint.num_data) is int


def test_the_diagonal_of_a_hessian_is_weighed_as_the_matrix_it_forms(monkeypatch):
    monkeypatch.setattr("posterity.inference.memory.device_memory", lambda device: 60_000)
    method = po.methods.Laplace(tuning=None, curvature=po.curvature.Hessian(), structure=po.curvature.Diagonal())
    net = nn.Linear(1, 20)
    joint = po.Joint(net.double(), po.likelihoods.Gaussian(), po.priors.Normal(), num_data=12)
    with pytest.raises(ValueError, match="GaussNewton"):
        po.infer(method, joint, (X, X.expand(12, 20)))


def test_a_misspelt_name_suggests_the_nearest():
    with pytest.raises(AttributeError, match="Did you mean 'Joint'"):
        po.Jointt  # noqa: B018
