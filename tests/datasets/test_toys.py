"""Toy data sets: shapes, balance, noise, and the same numbers for the same seed."""

import math

import pytest
import torch

from posterity.datasets import LINE_BIAS, LINE_WEIGHT, TOYS, blobs, line, load, sine, two_moons, waves

EVERY = pytest.mark.parametrize("make", TOYS.values(), ids=TOYS.keys())
CLASSIFICATION = pytest.mark.parametrize(("make", "num_classes"), [(two_moons, 2), (blobs, 3)])


@EVERY
def test_same_arguments_same_numbers_and_another_seed_others(make):
    first, again, other = make(seed=4), make(seed=4), make(seed=5)
    for part in ("train", "test"):
        for one, two in zip(getattr(first, part).pair, getattr(again, part).pair, strict=True):
            assert torch.equal(one, two)
        assert not torch.equal(getattr(first, part).pair[-1], getattr(other, part).pair[-1])


@EVERY
def test_draws_nothing_from_the_global_generator(make):
    before = torch.get_rng_state()
    make()
    assert torch.equal(torch.get_rng_state(), before)


@EVERY
def test_train_and_test_share_no_noise(make):
    data = make(num_data=200, test=200, seed=0)
    assert not torch.equal(data.train.inputs, data.test.inputs)
    assert not torch.equal(data.train.targets, data.test.targets)


@EVERY
def test_sizes_and_types_are_as_asked(make):
    data = make(num_data=31, noise=0.1, test=17)
    assert (len(data.train), len(data.test)) == (31, 17)
    assert data.train.inputs.dtype == data.test.inputs.dtype == torch.float32
    if data.task == "classification":
        assert data.train.inputs.shape == (31, 2)
        assert data.train.targets.shape == (31,)
        assert data.train.targets.dtype == torch.int64
    else:
        assert data.train.inputs.shape == data.train.targets.shape == (31, 1)
        assert data.train.targets.dtype == torch.float32
        assert data.classes is None


@CLASSIFICATION
@pytest.mark.parametrize("num_data", [3, 100, 101])
def test_classes_are_balanced_named_and_mixed(make, num_classes, num_data):
    data = make(num_data=num_data)
    counts = torch.bincount(data.train.targets, minlength=num_classes)
    assert len(data.classes) == len(counts) == num_classes
    assert counts.max() - counts.min() <= 1
    if num_data >= 100:
        assert not torch.equal(data.train.targets.sort().values, data.train.targets)


def test_two_moons_without_noise_lie_on_their_half_circles():
    data = two_moons(num_data=400, noise=0.0).train
    centre = torch.tensor([[0.0, 0.0], [1.0, 0.5]])[data.targets]
    away = data.inputs - centre
    torch.testing.assert_close(away.norm(dim=1), torch.ones(400))
    assert bool((away[data.targets == 0, 1] >= 0).all())
    assert bool((away[data.targets == 1, 1] <= 0).all())


def noise_in(make, noise):
    """What `noise` adds: the difference from the same data without it."""
    noisy, clean = make(num_data=4000, noise=noise, seed=2), make(num_data=4000, noise=0.0, seed=2)
    if noisy.task == "classification":
        return (noisy.train.inputs - clean.train.inputs).double()
    return (noisy.train.targets - clean.train.targets).double()


@EVERY
@pytest.mark.parametrize("noise", [0.05, 0.7])
def test_noise_has_the_stated_level_and_no_bias(make, noise):
    added = noise_in(make, noise)
    count = added.numel()
    # A sample variance of normal numbers has standard error noise^2 sqrt(2 / count).
    assert abs(added.var().item() - noise**2) < 5 * noise**2 * math.sqrt(2 / count)
    assert abs(added.mean().item()) < 5 * noise / math.sqrt(count)


def test_blobs_are_centred_on_a_circle_of_radius_two():
    data = blobs(num_data=6, noise=0.0).train
    torch.testing.assert_close(data.inputs.norm(dim=1), torch.full((6,), 2.0))
    gaps = torch.cdist(data.inputs, data.inputs).max()
    assert gaps.item() == pytest.approx(2 * math.sqrt(3), rel=1e-5)


def test_waves_leave_a_gap_and_are_tested_over_a_wider_range():
    data = waves(num_data=1000, noise=0.0, test=101)
    x, y = data.train.pair
    assert float(x.abs().min()) >= 1
    assert float(x.abs().max()) <= 3
    torch.testing.assert_close(y, (1.5 * x).sin())
    torch.testing.assert_close(data.test.inputs[:, 0], torch.linspace(-4.5, 4.5, 101))


def test_sine_leaves_a_gap_and_tests_over_a_wider_range():
    data = sine(num_data=1000, noise=0.0, test=101)
    distance = data.train.inputs.abs()
    assert 1 <= distance.min() < 1.05
    assert 3.95 < distance.max() <= 4
    assert data.train.inputs.sign().sum() == 0
    assert data.test.inputs.aminmax() == (-6, 6)
    for part in (data.train, data.test):
        torch.testing.assert_close(part.targets, part.inputs.sin() + part.inputs)


def test_line_has_the_stated_weights():
    data = line(num_data=2000, noise=0.5, seed=1).train
    design = torch.cat((data.inputs, torch.ones_like(data.inputs)), dim=1).double()
    covariance = 0.5**2 * torch.linalg.inv(design.T @ design)
    fitted = torch.linalg.lstsq(design, data.targets.double()).solution[:, 0]
    error = fitted - torch.tensor([LINE_WEIGHT, LINE_BIAS], dtype=torch.float64)
    assert bool((error.abs() < 5 * covariance.diagonal().sqrt()).all())
    assert -2 <= data.inputs.min() < data.inputs.max() <= 2


@EVERY
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_data": 0}, r"num_data must be a whole number of at least [123]\. Got 0\.$"),
        ({"test": 2.5}, r"test must be a whole number of at least [123]\. Got 2\.5\.$"),
        ({"noise": -0.1}, r"noise must be a standard deviation, 0 or more\. Got -0\.1\.$"),
        ({"noise": float("inf")}, r"noise must be a standard deviation, 0 or more\. Got inf\.$"),
    ],
)
def test_refuses_arguments(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


@pytest.mark.parametrize("name", TOYS)
def test_load_finds_the_toy_by_its_name_and_seed(name):
    loaded = load(name, seed=6)
    assert loaded.name == name
    assert torch.equal(loaded.train.inputs, TOYS[name](seed=6).train.inputs)
    assert not torch.equal(loaded.train.inputs, load(name).train.inputs)


def test_load_names_the_nearest_toy():
    with pytest.raises(ValueError, match=r"^Unknown data set 'two_moons'\. Did you mean 'two-moons'\?$"):
        load("two_moons")
    with pytest.raises(ValueError, match=r"^Unknown data set 'zzz'\. Known: blobs, line, sine, two-moons, waves\.$"):
        load("zzz")
