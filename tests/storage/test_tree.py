"""States become parts and come back to the bit."""

from typing import NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sameness import same

from posterity.errors import BadFolder
from posterity.storage import Part, RunFolder, clone, flatten, restore

pytestmark = pytest.mark.cpu  # files hold tensors of the CPU


class Moments(NamedTuple):
    count: int
    mean: torch.Tensor | None


class State(NamedTuple):
    theta: torch.Tensor
    moments: tuple
    best: float
    buffers: dict
    kept: list
    label: str | None = None


def make(value=0.0, **changes):
    tensor = torch.full((2, 3), value, dtype=torch.float64)
    fields = {
        "theta": tensor,
        "moments": (Moments(int(value), tensor[0]), Moments(1, None)),
        "best": value,
        "buffers": {"0.running_mean": tensor.float(), "1": torch.tensor(3)},
        "kept": [tensor + 1, (True, "text")],
    }
    return State(**{**fields, **changes})


TENSORS = st.sampled_from([torch.tensor(0.1), torch.zeros(0, 2), torch.arange(3), torch.ones(2).half()])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | TENSORS
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.builds(Moments, inner, inner)
    ),
    max_leaves=12,
)


@given(tree=TREES)
@settings(deadline=None, max_examples=150)
def test_trees_come_back_as_they_were(tree):
    assert same(restore(flatten(tree), tree), tree)
    assert same(clone(tree), tree)


def test_a_state_survives_the_disk_with_numbers_of_its_own(tmp_path):
    run = RunFolder(tmp_path)
    state = make(7.25, label="warm", best=float("inf"))
    run.commit({"checkpoint": flatten(state)})
    assert same(restore(run.read("checkpoint"), make(0.0)), state)


def test_tensors_lie_under_dotted_paths():
    assert list(flatten(make()).tensors) == ["theta", "moments.0.mean", "buffers.0.running_mean", "buffers.1", "kept.0"]
    assert list(flatten(torch.ones(1)).tensors) == ["value"]


def test_paths_that_look_alike_are_kept_apart():
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert same(restore(flatten(tree), tree), tree)


def test_tensors_go_to_the_device_of_the_template():
    back = restore(flatten([torch.ones(4), torch.ones(2)]), [torch.zeros(4, device="meta"), None])
    assert (back[0].shape, back[0].device.type) == ((4,), "meta")
    assert back[1].device.type == "cpu"


@pytest.mark.parametrize("tensor", [torch.ones(4).half(), torch.ones(4).long(), torch.ones(3), torch.ones(4, 1)])
def test_a_tensor_of_another_shape_or_dtype_is_refused(tensor):
    with pytest.raises(BadFolder, match=r"does not fit at '0': the method wants a Tensor \(4,\) torch.float32"):
        restore(flatten([tensor]), [torch.zeros(4)])


def test_a_dimension_that_is_empty_in_a_fresh_state_may_have_grown():
    assert restore(flatten([torch.ones(3, 2)]), [torch.zeros(0, 2)])[0].shape == (3, 2)


@pytest.mark.parametrize(("count", "fine"), [(3, True), (None, False), ("3", False), (True, False), ([3], False)])
def test_fields_of_a_state_must_be_what_their_annotations_say(count, fine):
    stored = flatten(Moments(count, None))
    if fine:
        assert restore(stored, Moments(0, None)) == Moments(3, None)
        return
    with pytest.raises(BadFolder, match="does not fit at 'count'"):
        restore(stored, Moments(0, None))


def test_what_a_template_lacks_goes_to_the_device_that_is_named():
    back = restore(flatten({"noise": torch.ones(3), "count": 2}), {}, "meta")
    assert (back["noise"].device.type, back["count"]) == ("meta", 2)
    assert restore(flatten([torch.ones(2)]), [None], "meta")[0].device.type == "meta"
    assert restore(flatten([torch.ones(2)]), [torch.zeros(2, device="cpu")], "meta")[0].device.type == "cpu"


def test_what_a_fresh_state_lacks_may_come_later():
    fresh = make(kept=[], moments=(Moments(0, None), Moments(0, None)), buffers={})
    assert same(restore(flatten(make(2.0)), fresh), make(2.0))
    assert same(restore(flatten(fresh), fresh), fresh)
    assert restore(flatten(Moments(0, None)), Moments(1, torch.ones(1))) == Moments(0, None)
    assert restore(flatten({"best": 3}), {"best": 0.5}) == {"best": 3}


@pytest.mark.parametrize(
    ("stored", "template", "path", "wanted", "came"),
    [
        (make(), make(theta=1), "theta", "a int", "a Tensor"),
        (make(best="x"), make(), "best", "a float", "a str"),
        (make(best=True), make(), "best", "a float", "a bool"),
        (make(), make(buffers={"1": torch.ones(1)}), "buffers", "a dict of 1", "a dict of 0.running_mean, 1"),
        (make(), make(buffers=torch.ones(2)), "buffers", "a Tensor", "a dict of"),
        (make(buffers={}), make(), "buffers", "a dict of 0.running_mean, 1", "a dict of nothing"),
        (make(), make(kept=[torch.ones(1)]), "kept", "a list of 1", "a list of 2"),
        (make(), make(kept=(torch.ones(1), ())), "kept", "a tuple of 2", "a list of 2"),
        (make(), make(kept=torch.ones(2)), "kept", "a Tensor", "a list of 2"),
        (make(moments=()), make(), "moments", "a tuple of 2", "a tuple of 0"),
        (make(), make(moments=()), "moments.0", "a NoneType", "Moments(count, mean)"),
        (make(), make(moments=((1, 2), 3)), "moments.0", "a tuple of 2", "Moments(count, mean)"),
        ((1, None), Moments(1, None), "state", "Moments(count, mean)", "a tuple of 2"),
        (Moments(1, None), make(), "state", "State(theta, moments", "Moments(count, mean)"),
        (1, [1], "state", "a list of 1", "a int"),
    ],
)
def test_a_structure_that_does_not_fit_names_the_path(stored, template, path, wanted, came):
    with pytest.raises(BadFolder) as caught:
        restore(flatten(stored), template)
    text = str(caught.value)
    assert f"does not fit at '{path}'" in text
    assert f"wants {wanted}" in text
    assert f"Got {came}" in text
    assert "Resume with the method and options that wrote it" in text


class Averages(NamedTuple):
    count: int
    mean: float


def test_a_state_of_another_class_does_not_fit():
    with pytest.raises(BadFolder, match=r"wants Moments\(count, mean\)\. Got Averages\(count, mean\)"):
        restore(flatten(Averages(1, 2.0)), Moments(0, None))


def test_fields_that_were_renamed_do_not_fit():
    part = flatten(NamedTuple("Moments", [("count", int), ("average", float)])(1, 2.0))
    with pytest.raises(BadFolder, match=r"wants Moments\(count, mean\)\. Got Moments\(count, average\)"):
        restore(part, Moments(0, None))


@pytest.mark.parametrize("config", [{}, {"state": {"tuple": 1}}, {"state": {"named": "Moments", "fields": [[1]]}}])
def test_a_part_that_is_no_state_is_a_bad_folder(config):
    with pytest.raises(BadFolder, match=r"no stored state|not in a form"):
        restore(Part(config), Moments(0, None))


def test_a_missing_tensor_is_a_bad_folder():
    part = flatten(make())
    with pytest.raises(BadFolder, match="Tensor 'theta' is missing"):
        restore(Part(part.config), make())


@pytest.mark.parametrize("leaf", [object(), {1}, numpy.zeros(1), numpy.int64(1), torch.Generator()], ids=range(5))
def test_leaves_of_other_types_are_refused_with_path_and_type(leaf):
    with pytest.raises(TypeError, match=rf"kept\.1\.inner\.count must be .* Got {type(leaf).__name__}"):
        flatten(make(kept=[1, {"inner": Moments(leaf, None)}]))


def test_keys_must_be_text():
    with pytest.raises(TypeError, match=r"buffers: the keys of a stored dict must be str"):
        flatten(make(buffers={0: torch.ones(1)}))


def test_clone_shares_no_tensor_and_no_graph():
    state = make(1.0, theta=torch.ones(2, requires_grad=True))
    copy = clone(state)
    copy.theta.zero_()
    copy.moments[0].mean.zero_()
    copy.buffers["1"].zero_()
    copy.kept.append(3)
    assert not copy.theta.requires_grad
    assert same(state._replace(theta=state.theta.detach()), make(1.0, theta=torch.ones(2)))


class Earlier(NamedTuple):
    count: int


class Later(NamedTuple):
    count: int
    start: torch.Tensor | None = None


def test_fields_with_a_default_may_be_missing_from_earlier_states() -> None:
    Earlier.__name__ = "Later"
    template = Later(0, torch.ones(2))
    assert same(restore(flatten(Earlier(3)), template), Later(3, torch.ones(2)))
    assert same(restore(flatten(Later(3, torch.zeros(2))), template), Later(3, torch.zeros(2)))
    with pytest.raises(BadFolder, match=r"the method wants Later\(count\). Got Later\(count, start\)"):
        restore(flatten(template), Earlier(0))
