"""Frames and arrays: typed columns become the inputs that the same values in a file become."""

import datetime
import io
import math

import numpy as np
import pandas as pd
import pytest
import torch

from posterity.datasets import Preprocessing, as_table, read_table
from posterity.errors import BadData
from posterity.storage import decode, encode

pl = pytest.importorskip("polars")
pytestmark = pytest.mark.cpu  # tables are read into the memory of the CPU

VALUES = {
    "size": [1.5, None, 3.25, 1e300, 0.1, -7.0],
    "rooms": [1, 2, 3, 4, 5, 6],
    "new": [True, False, True, True, False, True],
    "town": ["Bonn", "Ulm", None, "Bonn", "Ulm", "Bonn"],
    "sold": [datetime.datetime(2020, 1, day, 12) for day in (1, 2, 3, 4, 5)] + [None],
    "price": [0.5, 1.5, 2.5, 3.5, 4.5, 9.25],
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "table.csv"
    pd.DataFrame(VALUES).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, lambda values: pl.DataFrame(values).to_arrow()])
def test_a_frame_becomes_what_its_file_becomes(file, make):
    frame, written = as_table(make(VALUES), "price"), read_table(file, "price")
    assert frame.names == written.names
    assert frame.roles.kinds == written.roles.kinds
    assert frame.roles.kinds == {
        "size": "number", "rooms": "number", "new": "boolean", "town": "category", "sold": "date", "price": "number"
    }  # fmt: skip
    found, wanted = Preprocessing.fit(frame), Preprocessing.fit(written)
    assert found.inputs == wanted.inputs
    assert found.target == wanted.target
    for one, other in ((found, written), (wanted, frame), (found, frame)):
        inputs, targets, notes = one.transform(other)
        assert torch.equal(inputs, wanted.transform(written).inputs)
        assert torch.equal(targets, wanted.transform(written).targets)
        assert notes == ()


def test_parts_of_dates_are_inputs(file):
    found = Preprocessing.fit(as_table(pd.DataFrame(VALUES), "price"))
    parts = {column.part: column for column in found.inputs if column.name == "sold"}
    assert list(parts) == ["weekday", "days"]  # year, month and hour are the same in all rows
    assert parts["weekday"].categories == ("Fri", "Sat", "Sun", "Thu", "Wed")
    assert parts["days"].features == ("sold days", "sold missing")
    assert not parts["weekday"].has_indicator
    first = (datetime.datetime(2020, 1, 1, 12) - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1)
    assert parts["days"].mean == first + 2
    assert parts["days"].scale == pytest.approx(math.sqrt(2))
    assert (
        "Column 'sold' has dates: inputs are its weekday, days; 1 of 6 are missing, and one more input says where."
        in (found.notes)
    )
    tensors = {}
    stored = encode(found, tensors)
    assert decode(stored, tensors) == found
    found.check()
    weekday = found.features.index("sold weekday=Wed")
    assert found.transform(as_table(pd.DataFrame(VALUES))).inputs[:, weekday].tolist() == [1, 0, 0, 0, 0, 0]


def test_the_order_of_day_and_month_is_that_of_the_training_rows(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("d,y\n13/2/2020,1.5\n1/2/2020,2.5\n5/2/2020,4.5\n")
    found = Preprocessing.fit(read_table(path, "y"))
    assert {column.order for column in found.inputs} == {"day-first"}
    path.write_text("d,z\n1/2/2020,0\n")
    (row,) = found.transform(read_table(path)).inputs.tolist()
    assert row[found.features.index("d weekday=Sat")] == 1
    path.write_text("d,z\n1/22/2020,0\n")
    with pytest.raises(BadData, match=r"line 2, column 'd': '1/22/2020' is no date such as 2020-01-31"):
        found.transform(read_table(path))


@pytest.mark.parametrize("make", [np.asarray, torch.tensor, lambda rows: pd.DataFrame(np.array(rows)), list])
def test_columns_of_arrays_are_known_by_their_place(make):
    rows = [[1.0, 5.0, math.nan], [2.0, 6.0, 1.0], [4.0, 5.0, 3.0]]
    table = as_table(make(rows), y=np.array([0.5, 2.5, 3.5]))
    assert (table.names, table.named) == (("x1", "x2", "x3", "y"), False)
    found = Preprocessing.fit(table)
    assert found.features == ("x1", "x2", "x3", "x3 missing")
    assert torch.equal(found.transform(as_table(make(rows))).inputs, found.transform(table).inputs)
    with pytest.raises(BadData, match="have no names, so there must be 4 of them"):
        found.transform(as_table(make([row[:2] for row in rows])))
    named = as_table(make(rows), names=["x3", "x1", "x2"])
    assert named.named
    moved = as_table(np.array(rows)[:, [1, 2, 0]])
    assert torch.equal(found.transform(named).inputs, found.transform(moved).inputs)


def test_values_are_taken_as_typed():
    frame = pd.DataFrame(
        {
            "code": pd.Categorical([3, 1, 3, 1]),
            "word": ["NA", "?", "NA", "?"],  # words of a frame are never missing
            "whole": pd.array([1, None, 3, 4], dtype="Int64"),
            "small": np.array([1, 2, 3, 5], dtype=np.uint8),
            "flag": pd.array([True, None, False, True], dtype="boolean"),
            "y": np.float32([0.1, 0.2, 0.3, 0.4]),
        }
    )
    table = as_table(frame, "y")
    kinds = ("category", "category", "number", "number", "boolean", "number")
    assert tuple(table.roles.kinds.values()) == kinds
    assert table.column("code").fields == ("3", "1", "3", "1")
    assert table.column("word").words == ("NA", "?")
    assert table.column("whole").numbers(".")[[0, 2, 3]].tolist() == [1, 3, 4]
    assert table.column("flag").fields == ("True", "", "False", "True")
    assert table.column("y").numbers(".").tolist() == [float(np.float32(value)) for value in (0.1, 0.2, 0.3, 0.4)]
    categories = as_table(frame, "y", category=["word", "whole"], drop=["whole"]).roles.kinds
    assert "whole" not in categories


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            [1.0, math.inf, 3.0],
            "table: row 1, column 'a': 'inf' is infinite. Correct it, or leave the column out (drop=",
        ),
        ([10**30, 1, 2], "row 0, column 'a': '1000000000000000000000000000000' would lose digits"),
        ([1, 2**53 + 1, 3], "row 1, column 'a': '9007199254740993' would lose digits"),
        ([1, "x", pd.NA], "row 1, column 'a': 'x' is text, where row 0 has the number '1'"),
        (["p", "q", "r"], "column 'a' is text: 3 different values in 3 fields, none repeated"),
        ([[1], [2], [3]], "column 'a' has values of type list<"),
        ([datetime.timedelta(1), datetime.timedelta(2), None], "column 'a' has values of type duration"),
        ([datetime.datetime(2020, 1, 1), "x", None], "row 0, column 'a': '2020-01-01 00:00:00' is a date or time"),
    ],
)
def test_values_that_cannot_be_used_are_named_by_row(values, said):
    with pytest.raises(BadData) as caught:
        as_table(pd.DataFrame({"a": pd.Series(values), "y": [0.5, 1.5, 2.5]}), "y")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8, np.uint64, bool, object])
def test_numbers_of_every_dtype_keep_their_values(dtype):
    values = np.array([[0, 1], [1, 0], [1, 1]], dtype=dtype)
    table = as_table(values, y=[0.5, 1.5, 2.5])
    assert [table.column("x1").numbers(".").tolist(), table.column("x2").numbers(".").tolist()] == [
        [0, 1, 1],
        [1, 0, 1],
    ]
    assert torch.equal(
        Preprocessing.fit(table).transform(table).inputs[:, 0],
        Preprocessing.fit(as_table(values.astype(float), y=[0.5, 1.5, 2.5]))
        .transform(as_table(values.astype(float)))
        .inputs[:, 0],
    )


def test_bfloat16_tensors_and_gradients_are_taken():
    rows = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.bfloat16, requires_grad=True)
    assert as_table(rows, y=torch.tensor([0.5, 1.5, 2.5])).column("x1").numbers(".").tolist() == [1, 2, 4]


def test_several_targets_are_standardised_each():
    rows = np.random.default_rng(0).normal(size=(20, 2))
    y = pd.DataFrame({"p": rows[:, 0] * 100, "q": rows[:, 1] - 7})
    y.loc[3, "q"] = math.nan
    table = as_table(rows, y=y)
    assert table.roles.targets == ("p", "q")
    assert len(table) == 19
    assert table.notes == ("1 row without a value in the target 'p', 'q' was left out, the first in row 3.",)
    found = Preprocessing.fit(table)
    inputs, targets, _ = found.transform(table)
    assert (inputs.shape, targets.shape) == ((19, 2), (19, 2))
    torch.testing.assert_close(targets.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(targets.std(0, correction=0), torch.ones(2))
    tensors = {}
    assert decode(encode(found, tensors), tensors) == found
    assert "more_targets" not in encode(Preprocessing.fit(as_table(rows, y=rows[:, 0])), {})["fields"]
    assert found.transform(as_table(rows)).targets is None
    found.check()
    with pytest.raises(BadData, match="several targets must be numbers to regress on, and 'k' has classes"):
        as_table(rows, y=pd.DataFrame({"p": rows[:, 0], "k": [0, 1] * 10}))


def test_several_targets_of_a_file(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,p,q\n" + "".join(f"{row},{row / 2},{row % 7 / 3}\n" for row in range(20)))
    table = read_table(path, ["p", "q"])
    assert Preprocessing.fit(table).transform(table).targets.shape == (20, 2)


def test_what_does_not_fit_together_is_said():
    rows = np.ones((3, 2))
    with pytest.raises(BadData, match="every column must have as many rows"):
        as_table(rows, y=np.ones(4))
    with pytest.raises(ValueError, match="not both"):
        as_table(rows, "x1", y=np.ones(3))
    with pytest.raises(ValueError, match="must have rows and columns"):
        as_table(np.ones((2, 2, 2)))
    with pytest.raises(BadData, match="two columns have the same name 'a'"):
        as_table(pd.DataFrame(rows, columns=["a", "a"]))
    with pytest.raises(BadData, match="1 names were given for 2 columns"):
        as_table(rows, names=["a"])
    with pytest.raises(BadData, match="Unknown column 'z'"):
        as_table(rows, "z")
    fitted = Preprocessing.fit(as_table(pd.DataFrame({"a": [1.0, 2, 4], "b": [0.5, 1, 3]}), "b"))
    with pytest.raises(BadData, match="have no names, but the model was fitted with named columns"):
        fitted.transform(as_table(rows))
    with pytest.raises(BadData, match="column 'a' is missing"):
        fitted.transform(as_table(pd.DataFrame({"A": [1.0]})))
    with pytest.raises(BadData, match="row 0, column 'a': 'x' is not a number"):
        fitted.transform(as_table(pd.DataFrame({"a": ["x"]})))
    assert fitted.transform(as_table(pd.DataFrame({"a": ["2.5"]}))).inputs.shape == (1, 1)  # text that is a number


def test_a_frame_in_text_is_a_frame():
    table = as_table(pd.read_csv(io.StringIO("a,y\n1.50,x\n2,x\n3,z\n")), "y")
    assert table.roles.task == "classification"
    assert Preprocessing.fit(table).target.classes == ("x", "z")
