"""Named tensors in one flat vector."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posterity.numerics import Layout

SHAPES = st.dictionaries(
    st.text(min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=5
)


def flat(layout, lead):
    count = layout.size * int(torch.tensor(lead).prod()) if lead else layout.size
    return torch.arange(count, dtype=torch.float64).reshape(*lead, layout.size)


@given(SHAPES, st.lists(st.integers(1, 3), max_size=2).map(tuple))
@settings(deadline=None, max_examples=60)
def test_flatten_undoes_unflatten(shapes, lead):
    layout = Layout.of(shapes)
    theta = flat(layout, lead)
    named = layout.unflatten(theta)
    assert list(named) == list(shapes) == list(layout.names)
    assert all(value.shape == lead + shapes[name] for name, value in named.items())
    assert torch.equal(layout.flatten(named), theta)


@given(SHAPES)
@settings(deadline=None, max_examples=30)
def test_slices_are_contiguous_row_major_and_in_order(shapes):
    layout = Layout.of(shapes)
    theta = flat(layout, ())
    named = layout.unflatten(theta)
    for part in layout:
        assert torch.equal(named[part.name].reshape(-1), theta[part.offset : part.offset + part.size])
        assert all(layout.name_at(index) == part.name for index in range(part.offset, part.offset + part.size))
    assert layout.size == sum(part.size for part in layout)


def test_views_share_memory_with_theta_whatever_its_strides():
    layout = Layout.of({"a": (), "w": (2, 2), "b": (3,)})
    for theta in (torch.zeros(8), torch.zeros(4, 8), torch.zeros(8, 4).T, torch.zeros(16)[::2]):
        for view in layout.views(theta):
            view.fill_(1.0)
        assert bool((theta == 1.0).all())


def test_gradients_flow_through_the_views():
    layout = Layout.of({"a": (), "w": (2, 2)})
    theta = torch.arange(5.0, requires_grad=True)
    named = layout.unflatten(theta)
    (named["a"] * named["w"].sum()).backward()
    assert theta.grad.tolist() == [10.0, 0.0, 0.0, 0.0, 0.0]


def test_flatten_copies_and_takes_extra_tensors():
    layout = Layout.of({"w": (2,)})
    w = torch.zeros(2)
    theta = layout.flatten({"other": torch.ones(1), "w": w})
    theta += 1.0
    assert w.tolist() == [0.0, 0.0]


def test_matching_and_name_at():
    layout = Layout.of({"body.0.weight": (2,), "body.0.bias": (1,), "head.weight": (2,)})
    assert [part.name for part in layout.matching("body.*")] == ["body.0.weight", "body.0.bias"]
    assert [part.name for part in layout.matching("*.weight")] == ["body.0.weight", "head.weight"]
    assert layout.matching("HEAD.*") == ()
    assert layout.name_at(2) == "body.0.bias"
    for index in (5, -1):
        with pytest.raises(IndexError, match="has 5 entries"):
            layout.name_at(index)


def test_a_layout_is_a_value():
    one, other = Layout.of({"w": (2, 3)}), Layout.of({"w": [2, 3]})
    _ = one.size, one.names  # kept once computed, and no part of the value
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != Layout.of({"w": (3, 2)})
