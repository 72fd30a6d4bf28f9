"""Values become JSON and tensors, and come back as they were."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sameness import same

import posterity.model
from posterity.errors import BadFolder
from posterity.likelihoods import Gaussian
from posterity.model import Tempering
from posterity.priors import FanIn, He, Layerwise, Normal
from posterity.storage import decode, encode, values

TENSORS = st.sampled_from(
    [torch.tensor(1.5), torch.zeros(0), torch.arange(6).reshape(2, 3), torch.tensor([True]), torch.ones(2).bfloat16()]
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
POWERS = st.floats(0.1, 10.0) | st.just(torch.tensor([1.0, 2.0]))
TEMPERINGS = st.builds(Tempering, POWERS, POWERS)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | TENSORS | DTYPES | TEMPERINGS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)


def there_and_back(value):
    tensors = {}
    text = json.dumps(encode(value, tensors), allow_nan=False, sort_keys=True)
    return decode(json.loads(text), tensors)


@given(value=VALUES)
@settings(deadline=None, max_examples=150)
def test_values_come_back_as_they_were(value):
    assert same(there_and_back(value), value)


@given(first=VALUES, second=VALUES)
@settings(deadline=None, max_examples=100)
def test_equal_json_only_for_equal_values(first, second):
    tensors = [{}, {}]
    texts = [json.dumps(encode(value, t)) for value, t in zip((first, second), tensors, strict=True)]
    equal = texts[0] == texts[1] and same(tensors[0], tensors[1])
    assert equal == same(first, second)


def test_tensors_lie_under_their_paths():
    tensors = {"prior.a": torch.zeros(1)}
    stored = encode({"a": torch.ones(1), "b": (torch.ones(2), [torch.ones(3)])}, tensors, "prior")
    assert list(tensors) == ["prior.a", "prior.a~", "prior.b.0", "prior.b.1.0"]
    assert torch.equal(tensors["prior.a"], torch.zeros(1))  # what was there is not overwritten
    assert same(decode(stored, tensors), {"a": torch.ones(1), "b": (torch.ones(2), [torch.ones(3)])})


def test_paths_that_look_alike_are_kept_apart():
    value = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert same(there_and_back(value), value)


def test_stored_tensors_carry_no_gradient():
    back = there_and_back([torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.zeros(1))])
    assert [type(item) for item in back] == [torch.Tensor, torch.Tensor]
    assert not any(item.requires_grad for item in back)


def test_numpy_floats_become_floats():
    assert same(there_and_back(numpy.float64(0.1)), 0.1)


def test_dataclasses_are_named_by_subpackage_and_fields():
    assert encode(Tempering(2.0, 1.0), {}) == {
        "type": "model.Tempering",
        "fields": {"likelihood_power": 2.0, "prior_power": 1.0},
    }
    assert there_and_back(Tempering.tempered(4.0)) == Tempering.tempered(4.0)


@pytest.mark.parametrize(
    "value",
    [
        Normal(0.5),
        Normal(torch.tensor([1.0, 2.0]), mean=3),
        FanIn(1.5),
        Layerwise({"z.*": FanIn(), "a.weight": Normal(torch.tensor([[1.0, 2.0]])), "*": He()}),
        Gaussian(0.1),
        Gaussian(torch.tensor([1.0, 2.0]), learn=True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_priors_and_likelihoods_come_back(value):
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)


def test_a_missing_field_takes_its_default():
    stored = {"type": "model.Tempering", "fields": {"likelihood_power": 2.0}}
    assert decode(stored, {}) == Tempering(2.0, 1.0)


def test_fields_that_init_does_not_take_are_made_again(monkeypatch):
    @dataclass(frozen=True)
    class Derived:
        base: float
        twice: float = field(init=False)

        def __post_init__(self):
            object.__setattr__(self, "twice", 2 * self.base)

    Derived.__module__ = "posterity.model.derived"
    Derived.__qualname__ = "Derived"
    with pytest.raises(TypeError, match=r"Derived must be exported by posterity\.model under its own name"):
        encode(Derived(1.0), {})
    monkeypatch.setattr(posterity.model, "Derived", Derived, raising=False)
    assert encode(Derived(1.0), {}) == {"type": "model.Derived", "fields": {"base": 1.0}}
    assert there_and_back(Derived(1.5)).twice == 3.0
    with pytest.raises(BadFolder, match=r"does not fit .* missing 1 required positional argument: 'base'"):
        decode({"type": "model.Derived", "fields": {}}, {})


@dataclass(frozen=True)
class Foreign:
    value: int = 1


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", numpy.int64(3), numpy.zeros(2), torch.Size([2]), 1j, lambda: 1, Tempering, range(3)],
    ids=range(10),
)
def test_other_types_are_refused_with_path_and_type(value):
    with pytest.raises(TypeError, match=rf"method\.options\.0 must be .* Got {type(value).__name__}"):
        encode({"options": [value]}, {}, "method")


def test_foreign_dataclasses_are_refused():
    with pytest.raises(
        TypeError, match=r"prior must be made of posterity's own classes .*Foreign.*Use one of posterity's"
    ):
        encode(Foreign(), {}, "prior")


def test_classes_that_a_subpackage_only_imports_are_not_known_under_it(monkeypatch):
    monkeypatch.setattr(posterity.model, "Foreign", Foreign, raising=False)
    with pytest.raises(BadFolder, match=r"Unknown type 'model\.Foreign'"):
        decode({"type": "model.Foreign", "fields": {}}, {})


@pytest.mark.parametrize("key", [1, None, (1,)], ids=str)
def test_keys_must_be_text(key):
    with pytest.raises(TypeError, match=r"the keys of a stored dict must be str"):
        encode({key: 1}, {})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("model.Temperin", "Did you mean 'model.Tempering'"),
        ("models.Tempering", "Did you mean 'model.Tempering'"),
        ("model.tempering", "Did you mean 'model.Tempering'"),
        ("model.tempering.Tempering", "Did you mean 'model.Tempering'"),
        ("os.system", ""),
        ("posterity.model.Tempering", "Did you mean 'model.Tempering'"),
        ("errors.BadFolder", ""),
        ("model.torch", ""),
        ("..os.path", ""),
        ("", "Known: "),
    ],
)
def test_unknown_types_are_refused_with_the_nearest_known_one(name, near):
    with pytest.raises(BadFolder) as caught:
        decode({"type": name, "fields": {}}, {})
    assert f"Unknown type '{name}'" in str(caught.value)
    assert near in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_fields_are_refused_with_the_nearest_known_one():
    with pytest.raises(BadFolder, match=r"Unknown field of model\.Tempering 'prior_powers'.*'prior_power'"):
        decode({"type": "model.Tempering", "fields": {"prior_powers": 1.0}}, {})


def test_values_that_a_class_refuses_are_a_bad_folder():
    with pytest.raises(BadFolder, match=r"Stored model\.Tempering does not fit .*prior_power must be a positive"):
        decode({"type": "model.Tempering", "fields": {"prior_power": -1.0}}, {})


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"tuple": 3},
        {"float": "one"},
        {"dtype": "Tensor"},
        {"dtype": "onnx"},
        {"dict": [["a"]]},
        {"dict": [[1, 2]]},
        {"tuple": [], "more": 1},
        {"named": "State", "fields": []},
        [{"type": "model.Tempering"}],
    ],
    ids=str,
)
def test_malformed_values_are_a_bad_folder(stored):
    with pytest.raises(BadFolder, match=r"not in a form that this posterity knows"):
        decode(stored, {})


def test_a_missing_tensor_is_a_bad_folder():
    with pytest.raises(BadFolder, match="Tensor 'theta' is missing"):
        decode({"tensor": "theta"}, {})


def test_decode_imports_nothing_outside_posterity():
    code = (
        "import sys\n"
        "from posterity.storage import decode\n"
        "from posterity.errors import BadFolder\n"
        "before = set(sys.modules)\n"
        "names = 'antigravity.fly', 'this.s', 'turtle.Turtle', '__main__.x', 'storage.folder.RunFolder'\n"
        "for stored in *({'type': name, 'fields': {}} for name in names), {'dtype': '_inductor'}:\n"
        "    try:\n"
        "        decode(stored, {})\n"
        "    except BadFolder:\n"
        "        print(sorted(m for m in set(sys.modules) - before if not m.startswith('posterity')))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.split() == ["[]"] * 6


def test_infinities_are_standard_json():
    assert encode([math.inf, -math.inf, math.nan], {}) == [{"float": "inf"}, {"float": "-inf"}, {"float": "nan"}]


def test_old_names_and_fields_lead_to_new_ones(monkeypatch):
    monkeypatch.setitem(values._RENAMED, "weights.Bell", "priors.Normal")
    monkeypatch.setitem(values._RENAMED_FIELDS, "priors.Normal", {"deviation": "scale"})
    assert decode({"type": "weights.Bell", "fields": {"deviation": 2.0}}, {}) == Normal(scale=2.0)
