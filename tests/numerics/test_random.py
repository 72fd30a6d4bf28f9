"""Keys of random streams."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posterity.numerics import Key

LABELS = st.integers() | st.text(max_size=5)


@given(st.integers(0, 2**63 - 1), LABELS, LABELS)
@settings(deadline=None, max_examples=100)
def test_folds_are_equal_only_for_equal_labels(seed, first, second):
    assert (Key(seed).fold(first) == Key(seed).fold(second)) == (first == second)
    assert 0 <= Key(seed).fold(first).seed < 2**63


def test_no_two_of_many_keys_are_equal():
    root = Key(0)
    keys = [root.fold(a).fold(b) for a in ("1", 1, "noise", 2) for b in range(1000)]
    keys += [Key(seed).fold(label) for seed in range(1, 50) for label in (0, "0", "0/1", (), 1)]
    assert len(set(keys)) == len(keys)


def test_fold_does_not_confuse_path_and_label():
    assert Key(1).fold("2/3") != Key(1).fold(2).fold(3)
    assert Key(12).fold(3) != Key(1).fold(23)
    assert Key(0).fold("a").fold("b") != Key(0).fold("b").fold("a")


def test_a_fold_never_changes():
    """Resume depends on these numbers: a change of the hash breaks every checkpoint."""
    assert Key(0).fold("batches").fold(3).seed == 437715374900623698


@pytest.mark.cpu
def test_draws_depend_on_the_key_alone_and_leave_the_global_state_alone():
    before = torch.random.get_rng_state()
    key = Key(3).fold("x")
    first = key.normal((4,)), key.uniform((4,)), key.permutation(10)
    torch.rand(5, generator=torch.Generator().manual_seed(1))
    second = key.normal((4,)), key.uniform((4,)), key.permutation(10)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(key.normal((4,)), key.fold(0).normal((4,)))


def test_shapes_kinds_and_ranges():
    key = Key(0)
    assert key.normal((2, 3), torch.float64).dtype == torch.float64
    assert key.uniform((2, 3)).dtype == torch.get_default_dtype()
    uniform = key.uniform((10_000,))
    assert float(uniform.min()) >= 0.0
    assert float(uniform.max()) < 1.0
    assert abs(float(uniform.mean()) - 0.5) < 5 * (1 / 12) ** 0.5 / 100
    normal = key.normal((10_000,), torch.float64)
    assert abs(float(normal.mean())) < 5 / 100
    assert abs(float(normal.var()) - 1.0) < 5 * 2**0.5 / 100
    assert sorted(key.permutation(50).tolist()) == list(range(50))
    assert key.permutation(0).shape == (0,)


def test_a_key_is_a_value():
    assert pickle.loads(pickle.dumps(Key(5))) == Key(5)
    with pytest.raises(AttributeError):
        Key(5).seed = 6


@pytest.mark.cuda
def test_generators_live_where_they_are_asked_to():
    key = Key(0)
    assert key.normal((3,), device="cuda").device.type == "cuda"
    assert torch.equal(key.normal((3,), device="cuda"), key.normal((3,), device="cuda"))
    assert key.generator("cuda").device.type == "cuda"
    assert key.permutation(5, device="cuda").device.type == "cuda"
