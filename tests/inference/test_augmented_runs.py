"""Runs on augmented images: resumed to the bit, members as they are alone, curvature of the rows themselves."""

import pytest
import torch
from killedruns import KillAfter, KilledError
from torch import nn

import posterity as po
from posterity.errors import BadData, BadFolder
from posterity.inference import Checkpoint
from posterity.methods import HMC, MAP, SGLD, Ensemble, Laplace
from posterity.model import Compose, Crop, Flip, as_data
from posterity.networks import ConvNet
from posterity.numerics import Key

USUAL = Compose((Crop(2), Flip()))
ROWS = 12


def images():
    return Key(0).uniform((ROWS, 2, 6, 5))


def labels():
    return torch.arange(ROWS) % 3


def problem(device=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
        )
    return po.Joint(net.to(device), po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=ROWS)


METHODS = [MAP(steps=9, batch_size=5), SGLD(draws=6, warmup=3, chains=2, batch_size=5)]


@pytest.mark.parametrize("method", METHODS, ids=["MAP", "SGLD"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(method, tmp_path):
    data = as_data((images(), labels()), augmentation=USUAL)
    whole, trace = po.infer(method, problem(), data)
    checkpoint = Checkpoint(tmp_path, steps=2, seconds=None)
    with pytest.raises(KilledError):
        po.infer(method, problem(), data, checkpoint=checkpoint, callbacks=[KillAfter(5)])
    resumed, again = po.infer(method, problem(), data, checkpoint=checkpoint)
    assert torch.equal(resumed.sample(3, Key(0)), whole.sample(3, Key(0)))
    assert torch.equal(again["loss"], trace["loss"])
    with pytest.raises(BadFolder, match="holds another run: its data"):
        po.infer(method, problem(), (images(), labels()), checkpoint=checkpoint)


def test_a_member_of_an_ensemble_is_what_it_is_alone():
    data = as_data((images(), labels()), augmentation=USUAL)
    ensemble = Ensemble(MAP(steps=6, batch_size=5), size=2)
    together, _ = po.infer(ensemble, problem(), data)
    for index, task in enumerate(ensemble.tasks(problem(), data)):
        alone, _ = po.infer(task.method, task.joint, task.data, start=task.start, seed=task.seed)
        torch.testing.assert_close(together.posteriors[index].point(), alone.point())


def test_curvature_sees_the_rows_as_they_are():
    start, _ = po.infer(MAP(steps=2), problem(), (images(), labels()))
    plain, augmented = (
        po.infer(Laplace(tuning=None), problem(), as_data((images(), labels()), augmentation=policy), start=start)[0]
        for policy in (None, USUAL)
    )
    assert torch.equal(plain.sample(2, Key(0)), augmented.sample(2, Key(0)))


def test_a_run_with_augmentation_learns_what_flips_leave_alone():
    rows = 120
    y = torch.arange(rows) % 2
    x = 0.3 * Key(0).normal((rows, 1, 8, 8))
    x[torch.arange(rows), 0, torch.where(y == 1, 5, 2)] += 1.0  # a bright row, high or low
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=rows)
    data = as_data((x, y), augmentation=Compose((Crop(1), Flip())))
    q, trace = po.infer(MAP(steps=150, batch_size=30), joint, data)
    plain, _ = po.infer(MAP(steps=150, batch_size=30), joint, (x, y))
    moved = Crop(1)(x, Key(9))
    assert po.metrics.accuracy(q.predict(moved), y) > 0.95
    assert not torch.equal(q.point(), plain.point())
    assert float(trace["loss"][-10:].mean()) < float(trace["loss"][:10].mean()) - 0.4  # nats a row


def test_batch_norm_and_members_go_with_augmented_batches():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = ConvNet(num_classes=3, in_channels=1, width=2)
    x = Key(0).uniform((ROWS, 1, 28, 28))
    joint = po.Joint(net, po.likelihoods.Categorical(), po.priors.Normal(1.0), num_data=ROWS)
    data = as_data((x, labels()), augmentation=Compose((Crop(), Flip())))
    q, _ = po.infer(Ensemble(MAP(steps=2, batch_size=4), size=2), joint, data)
    assert q.predict(x).probs.shape == (ROWS, 3)


@pytest.mark.cuda
def test_recorded_steps_see_the_augmented_batches_of_plain_ones():
    joint, data = problem("cuda"), as_data((images().cuda(), labels().cuda()), augmentation=USUAL)
    played, plain = (
        po.infer(MAP(steps=30, batch_size=5), joint, data, accelerate=how)[0].point() for how in ("auto", "off")
    )
    torch.testing.assert_close(played, plain, rtol=1e-4, atol=1e-5)


def test_samplers_of_one_density_refuse_augmented_rows():
    data = as_data((images(), labels()), augmentation=USUAL)
    with pytest.raises(BadData, match=r"^HMC samples one density, and augmented rows make another.* without augment"):
        po.infer(HMC(draws=2, warmup=2), problem(), data)
