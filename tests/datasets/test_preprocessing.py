"""Preprocessing: learnt from the training rows alone, stored, and applied to other files by name."""

import math
from dataclasses import replace

import pytest
import torch

from posterity.datasets import InputColumn, Preprocessing, TargetColumn, prepare, read_table
from posterity.datasets.table import stratified
from posterity.errors import BadData
from posterity.storage import decode, encode

pytestmark = pytest.mark.cpu  # files are read into the memory of the CPU


@pytest.fixture
def table(tmp_path):
    """A function that writes a text and reads it as a table."""

    def read(text, target=None, name="table.csv", **options):
        path = tmp_path / name
        path.write_text(text)
        return read_table(path, target, **options)

    return read


TRAINING = """\
age,smokes,town,fixed,void,y
20,yes,Bonn,1,,1.5
30,no,Ulm,1,,2.5
,no,,1,,3.0
40,,Bonn,1,,5.0
"""


def test_columns_become_inputs_as_documented(table):
    sheet = table(TRAINING, "y")
    found = Preprocessing.fit(sheet)
    spread = math.sqrt(200 / 3)
    assert [column.name for column in found.inputs] == ["age", "smokes", "town"]
    assert found.features == (
        "age", "age missing", "smokes", "smokes missing", "town=Bonn", "town=Ulm", "town missing",
    )  # fmt: skip
    assert (found.inputs[0].mean, found.inputs[0].fill) == (30, 30)
    assert found.inputs[0].scale == pytest.approx(spread)
    assert found.inputs[1].categories == ("no", "yes")
    assert (found.inputs[1].mean, found.inputs[1].fill) == (pytest.approx(1 / 3), 0)
    assert found.target == TargetColumn("y", "number", 3.0, pytest.approx(math.sqrt(6.5 / 4)))
    assert (found.columns, found.named, found.decimal) == (("age", "smokes", "town", "fixed", "void", "y"), True, ".")
    inputs, targets, notes = found.transform(sheet)
    no, yes = (-1 / 3) / math.sqrt(2 / 9), (2 / 3) / math.sqrt(2 / 9)
    wanted = torch.tensor(
        [
            [-10 / spread, 0, yes, 0, 1, 0, 0],
            [0, 0, no, 0, 0, 1, 0],
            [0, 1, no, 0, 0, 0, 1],
            [10 / spread, 0, no, 1, 1, 0, 0],
        ]
    )
    torch.testing.assert_close(inputs, wanted)
    torch.testing.assert_close(targets, torch.tensor([[-1.5], [-0.5], [0.0], [2.0]]) / math.sqrt(6.5 / 4))
    assert notes == ()
    assert found.notes == (
        "Column 'age': 1 of 4 values are missing; the median 30 stands in for them, and one more input says where.",
        "Column 'smokes': 1 of 4 values are missing; the median 0 stands in for them, and one more input says where.",
        "Column 'town' is taken as 2 categories, and the missing values (1 of 4) as one more.",
        "Column 'fixed' is constant and was dropped.",
        "Column 'void' has no values and was dropped.",
    )


def test_only_the_training_rows_teach(table):
    text = "a,c,d,y\n1,x,5,1.5\n3,z,5,2.5\n5,x,5,4.5\n1000,new,6,900.5\n2000,new,7,800.5\n,z,8,1.5\n"
    sheet = table(text, "y")
    found = Preprocessing.fit(sheet, torch.tensor([0, 1, 2]))
    assert found == Preprocessing.fit(sheet, [0, 1, 2])
    assert found.inputs[0] == InputColumn("a", "number", 3.0, pytest.approx(math.sqrt(8 / 3)), 3.0)
    assert found.inputs[1] == InputColumn("c", "category", categories=("x", "z"))
    assert len(found.inputs) == 2
    assert found.target.mean == pytest.approx(8.5 / 3)
    assert "Column 'd' is constant and was dropped." in found.notes
    inputs, targets, notes = found.transform(sheet)
    assert inputs.shape == (6, 3)
    assert inputs[3:5, 1:].tolist() == [[0, 0], [0, 0]]
    assert inputs[5, 0] == 0  # the median is the mean here
    assert targets.shape == (6, 1)
    assert notes == (
        "Column 'a': 1 of 6 values are missing, as none was in the training rows; the median 3 stands in for them.",
        "Column 'c': 2 of 6 values are categories that no training row has ('new'); no category is set for them.",
    )


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_it_is_stored_and_found_again(table, task):
    found = Preprocessing.fit(table(TRAINING, "y", task=task))
    tensors = {}
    stored = encode(found, tensors)
    assert tensors == {}
    assert decode(stored, tensors) == found


def test_another_file_is_read_by_the_names_of_its_columns(table):
    found = Preprocessing.fit(table(TRAINING, "y"))
    first = found.transform(table(TRAINING))
    assert first.targets is None
    other = table("shoe;town;smokes;age\n40;Bonn;YES;20,0\n41;Ulm;no;30\n42;Köln;no;NA\n", name="new.csv")
    inputs, targets, notes = found.transform(other)
    assert targets is None
    torch.testing.assert_close(inputs[:2], first.inputs[:2])
    torch.testing.assert_close(inputs[2], torch.cat((first.inputs[2, :4], torch.zeros(3))))
    assert notes == (
        "Columns that the model was fitted without are not used: 'shoe'.",
        "Column 'town': 1 of 3 values are categories that no training row has ('Köln'); no category is set for them.",
    )


def test_columns_that_were_dropped_are_not_spoken_of_again(table):
    text = "id,fixed,a,y\nq,1,1,0.5\nw,1,2,1.5\ne,1,3,2.5\n"
    found = Preprocessing.fit(table(text, "y", drop=["id"]))
    assert found.features == ("a",)
    assert found.columns == ("id", "fixed", "a", "y")
    assert found.transform(table(text)).notes == ()
    assert found.transform(table("a\ty\n1\t2\n", name="few.csv")).notes == ()


def test_targets_may_be_asked_for(table):
    found = Preprocessing.fit(table("a,y\n1,no\n2,Yes\n3,Yes\n", "y"))
    assert found.target == TargetColumn("y", "boolean", classes=("no", "Yes"))
    inputs, targets, notes = found.transform(table("y,a\nYES,1\n,2\nyes,3\n"), targets=True)
    assert len(inputs) == 2
    assert targets.tolist() == [1, 1]
    assert targets.dtype == torch.int64
    assert notes == (
        "1 row without a value in the target 'y' was left out, the first in line 3.",
        "The target 'y' has labels that are written otherwise than in the training rows ('YES' for 'Yes', 'yes' for "
        "'Yes'); they are taken as the same classes.",
    )
    assert found.transform(table("a,y\n1,no\n2,yes\n", "y"), targets=False).targets is None
    with pytest.raises(BadData, match="Unknown column 'y'"):
        found.transform(table("a,b\n1,2\n"), targets=True)


@pytest.mark.parametrize(
    ("text", "kind", "classes", "labels"),
    [
        ("10,01,02,02,10", "number", ("01", "02", "10"), [2, 0, 1, 1, 2]),
        ("1.0,0.0,1.0,0.0", "number", ("0.0", "1.0"), [1, 0, 1, 0]),
        ("2,1.0,1,01,2", "number", ("01", "1", "1.0", "2"), [3, 2, 1, 0, 3]),
        ("0.5,-1,-1e0,0.5,.5", "number", ("-1", "-1e0", ".5", "0.5"), [3, 0, 1, 3, 2]),
        ("Yes,No,No,Yes", "boolean", ("No", "Yes"), [1, 0, 0, 1]),
        ("TRUE,FALSE,FALSE,TRUE", "boolean", ("FALSE", "TRUE"), [1, 0, 0, 1]),
        ("t,F,f,T,t", "boolean", ("F", "f", "T", "t"), [3, 0, 1, 2, 3]),
        ("b,a,B,a,10  b", "category", ("10  b", "B", "a", "b"), [3, 2, 1, 2, 0]),
    ],
)
def test_classes_are_labels_as_written_in_a_fixed_order(table, text, kind, classes, labels):
    rows = "".join(f"{row}|{value}\n" for row, value in enumerate(text.split(",")))
    sheet = table(f"a|y\n{rows}", "y", task="classification")
    found = Preprocessing.fit(sheet)
    assert (found.target.kind, found.target.classes) == (kind, classes)
    assert found.transform(sheet).targets.tolist() == labels


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        (
            ("Yes", "No", "yes", "No"),
            "The target 'y' has labels that differ only in case: 'Yes', 'yes'. Each is a class",
        ),
        (
            ("b", "a", "B", "a"),
            "The target 'y' has labels that differ only in case: 'B', 'b'. Each is a class of its own",
        ),
        (("1", "0", "1.0", "0"), "The target 'y' has labels that are the same number: '1', '1.0'. Each is a class"),
        (("Yes", "No", "Yes", "No"), ""),
        (("01", "02", "02", "01"), ""),
    ],
)
def test_labels_that_mean_the_same_are_noted(table, labels, note):
    rows = "".join(f"{row},{label}\n" for row, label in enumerate(labels))
    notes = [line for line in table(f"a,y\n{rows}", "y").notes if "labels" in line]
    assert len(notes) == bool(note)
    assert not note or notes[0].startswith(note)


def test_a_number_that_is_only_written_in_several_ways_is_nothing_to_learn(table):
    with pytest.raises(BadData, match="There is nothing to learn"):
        table("a,y\n1,1\n2,1.0\n3,1\n", "y")


def test_labels_of_another_file_are_found_by_number_only_where_one_class_has_it(table):
    found = Preprocessing.fit(table("a;y\n1;1,5\n2;2\n3;2\n4;02\n", "y", task="classification"))
    assert found.target.classes == ("1,5", "02", "2")
    assert found.transform(table("a,y\n1,1.50\n"), targets=True).targets.tolist() == [0]
    with pytest.raises(BadData, match=r"'2\.0' is not a class of the training rows"):
        found.transform(table("a,y\n1,2.0\n"), targets=True)


def test_words_of_boolean_inputs_are_kept_as_written(table):
    found = Preprocessing.fit(table("a,y\n,0.5\nYes,1.5\nNo,2.5\nYES,3.5\n", "y"))
    assert found.inputs[0].categories == ("No", "Yes")
    assert found.transform(table("a,b\nno,1\nYES,1\n")).inputs[:, 0].diff() > 0
    with pytest.raises(BadData, match=r"No or Yes is wanted\. Got 'maybe'"):
        found.transform(table("a,b\nmaybe,1\n"))


def test_an_earlier_preprocessing_splits_and_encodes_the_rows_again(table):
    """Releases up to 0.2 took spellings as one class, and named it in lower case."""
    rows = "".join(f"{row},{('Yes', 'No', 'yes')[row % 3]}\n" for row in range(30))
    sheet = table(f"a,y\n{rows}", "y")
    old = TargetColumn("y", "boolean", classes=("no", "yes"))
    stored = replace(Preprocessing.fit(sheet), target=old)
    prepared = prepare(sheet, 0.2, 3, stored)
    assert prepared.data.classes == ("no", "yes")
    truth = torch.tensor([int(row % 3 != 1) for row in range(30)])
    train, test = stratified(truth, 0.2, 3)
    assert torch.equal(prepared.test, test)
    assert torch.equal(prepared.data.test.targets, truth[test])
    assert torch.equal(prepared.data.train.targets, truth[train])


REFUSED = {
    "a missing column": (
        "Age,smokes\n1,no\n",
        "column 'age', 'town' is missing, which the model was fitted with. The nearest is 'Age'.",
    ),
    "no column at all": (
        "p,q\n1,no\n",
        "column 'age', 'smokes', 'town' is missing, which the model was fitted with. It has 'p', 'q'.",
    ),
    "no names": (
        "1,no,2\n2,no,3\n",
        "line 1 is data, but the model was fitted with named columns. Name them in the first line: 'age', ",
    ),
    "text in a column of numbers": (
        "age,smokes,town\n1,no,Ulm\nold,no,Ulm\n",
        "line 3, column 'age': 'old' is not a number, which the other rows have there. Correct it, or leave the field",
    ),
    "a long number": ("age,smokes,town\n1,no,Ulm\n1e400,no,Ulm\n", "line 3, column 'age': '1e400' is too large"),
    "a number that is far away": (
        "age,smokes,town\n1,no,Ulm\n1e300,no,Ulm\n",
        "line 3, column 'age': '1e300' is too far from the training rows, whose mean is 30 and standard deviation "
        "8.16497",
    ),
    "no truth value": (
        "age,smokes,town\n1,no,Ulm\n2,maybe,Ulm\n",
        "line 3, column 'smokes': no or yes is wanted. Got 'maybe'.",
    ),
    "thousands or decimals": (
        "age;smokes;town\n1,234;no;Ulm\n",
        "line 2, column 'age': '1,234' has a thousands separator or a",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(table, name):
    found = Preprocessing.fit(table(TRAINING, "y"))
    text, words = REFUSED[name]
    with pytest.raises(BadData) as caught:
        found.transform(table(text, name="new.csv"))
    assert words in str(caught.value)
    assert "new.csv: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_signs_must_be_those_of_the_training_rows(table):
    found = Preprocessing.fit(table("share,paid,y\n5 %,$3,$1\n10 %,$2,$2.50\n20 %,$9,$7\n", "y"))
    assert [(column.sign, column.fill) for column in found.inputs] == [("%", 0.1), ("$", 3.0)]
    assert found.target.sign == "$"
    same = found.transform(table("share,paid\n5%,$ 3\n", name="new.csv")).inputs
    assert torch.equal(same, found.transform(table("share,paid\n5 %,3 $\n", name="new.csv")).inputs)
    for text, words in {
        "share,paid\n0.05,$3\n": "column 'share' has no sign with its numbers, where the training rows have '%'.",
        "share,paid\n5 %,€3\n": "column 'paid' has '€' with its numbers, where the training rows have '$'.",
        "share,paid\n5 %,$3\n5,$3\n": "line 2, column 'share': '5 %' has a percent or currency sign, and not every row",
    }.items():
        with pytest.raises(BadData) as caught:
            found.transform(table(text, name="new.csv"))
        assert words in str(caught.value)
    plain = Preprocessing.fit(table("a,y\n1,0.5\n2,1.5\n", "y"))
    with pytest.raises(BadData, match="column 'a' has '%' with its numbers, where the training rows have none"):
        plain.transform(table("a,b\n5%,0\n", name="new.csv"))
    tensors = {}
    assert decode(encode(found, tensors), tensors) == found
    assert not {"sign", "part", "order"} & encode(plain, {})["fields"]["inputs"]["tuple"][0]["fields"].keys()


def test_a_decimal_comma_is_known_from_the_training_file(table):
    found = Preprocessing.fit(table("a;y\n1,5;0,5\n2,5;1\n3;2\n", "y"))
    assert found.decimal == ","
    for text in ("a;b\n1,500;0\n", "a,b\n1.5,0\n", "a\tb\n1.5\t0\n"):
        assert found.transform(table(text, name="new.csv")).inputs.item() == pytest.approx(
            (1.5 - 7 / 3) / found.inputs[0].scale
        )
    given = table("a;b\n1,500;0\n", name="new.csv", decimal=".")
    with pytest.raises(BadData, match="line 2, column 'a': '1,500' has a thousands separator or a decimal comma"):
        found.transform(given)


def test_a_class_that_no_training_row_has_is_refused(table):
    sheet = table("a,y\n1,p\n2,q\n3,p\n4,r\n", "y")
    found = Preprocessing.fit(sheet, [0, 1, 2])
    with pytest.raises(
        BadData, match=r"line 5, column 'y': 'r' is not a class of the training rows, which are \('p', 'q'\)"
    ):
        found.transform(sheet)


def test_columns_without_names_are_known_by_their_place(table):
    sheet = table("1 5 9 0.5\n2 5 8 1.5\n4 5 9 2.5\n", "x4")
    found = Preprocessing.fit(sheet)
    assert not found.named
    assert [column.name for column in found.inputs] == ["x1", "x3"]
    same = found.transform(table("1 5 9 0.5\n2 5 8 1.5\n", name="all.txt")).inputs
    assert torch.equal(found.transform(table("1 5 9\n2 5 8\n", name="all.txt")).inputs, same)  # the target comes last
    with pytest.raises(BadData, match=r"have no names, so there must be 4 of them, as in the training file\. Got 5"):
        found.transform(table("1 5 9 8 7\n2 5 8 8 7\n"))
    by_name = found.transform(table("x3,x1\n9,1\n8,2\n", name="named.csv")).inputs
    assert torch.equal(by_name, same)
    with pytest.raises(BadData, match=r"column 'x1', 'x3' is missing.* If its first line is data, say --no-header\.$"):
        found.transform(table("p,q\n9,1\n8,2\n"))
    first = Preprocessing.fit(table("1 5 9 0.5\n2 5 8 1.5\n4 5 9 2.5\n", "x1", task="regression"))
    with pytest.raises(BadData, match="there must be 4 of them"):  # without x1 all others would have moved
        first.transform(table("5 9 0.5\n5 8 1.5\n"))


def test_names_like_x1_do_not_fit_a_file_without_names(table):
    found = Preprocessing.fit(table("x2,x1,y\n1,5,0.5\n2,6,1.5\n3,8,2.5\n", "y"))
    with pytest.raises(BadData, match="line 1 is data, but the model was fitted with named columns"):
        found.transform(table("1,5\n2,6\n"))


def test_ids_and_codes_are_kept_and_said(table):
    rows = "".join(f"{1000 + 7 * row},{row % 4:03d},{row / 2},{row}\n" for row in range(12))
    found = Preprocessing.fit(table(f"id,code,a,y\n{rows}", "y"))
    assert found.features == ("id", "code", "a")
    assert found.notes == (
        "Column 'id' has another whole number in every row and is an input. If it only numbers the rows, "
        "use --drop 'id'.",
        "Column 'code' has whole numbers with zeros in front, as 000. If they are codes, use --category 'code'.",
    )


@pytest.mark.parametrize(
    ("numbers", "mean", "scale"),
    [
        ([1e308, 1.5e308, 1.2e308], 3.7 / 3 * 1e308, None),
        ([1e-308, 3e-308, 2e-308], 2e-308, None),
        ([1e16, 1e16 + 2, 1e16 + 4], 1e16 + 2, math.sqrt(8 / 3)),
    ],
)
def test_very_large_and_small_numbers_are_standardised(table, numbers, mean, scale):
    rows = "".join(f"{value!r},{row}.5\n" for row, value in enumerate(numbers))
    sheet = table(f"a,y\n{rows}", "y")
    found = Preprocessing.fit(sheet)
    values = found.transform(sheet).inputs
    assert found.inputs[0].mean == pytest.approx(float(mean), rel=1e-12)
    assert scale is None or found.inputs[0].scale == pytest.approx(scale)
    assert values.double().mean().item() == pytest.approx(0, abs=1e-6)
    assert values.double().std(correction=0).item() == pytest.approx(1, rel=1e-6)


def test_fit_says_what_it_needs(table):
    sheet = table("a,b,y\n1,7,0.5\n1,7,1.5\n2,7,0.5\n", "y")
    with pytest.raises(ValueError, match=r"Preprocessing\.fit: the table must be read with a target"):
        Preprocessing.fit(table("a,y\n1,2\n"))
    with pytest.raises(ValueError, match=r"there must be at least one row\. Got none"):
        Preprocessing.fit(sheet, [])
    with pytest.raises(BadData, match=r"no column is left as an input\. Column 'a' is constant and was dropped\."):
        Preprocessing.fit(sheet, [0, 1])
    with pytest.raises(BadData, match="the target 'y' is the same in all training rows"):
        Preprocessing.fit(sheet, [0, 2])
    with pytest.raises(BadData, match="the target 'y' is the same in all training rows"):
        Preprocessing.fit(table("a,y\n1,p\n2,p\n3,q\n", "y"), [0, 1])


def test_prepare_gives_a_data_set_ready_to_fit(table):
    rows = "".join(f"{row},{'pq'[row % 2]},{('lo', 'hi')[row % 5 < 2]}\n" for row in range(50))
    sheet = table(f"a,c,level\n{rows}", "level", name="levels.csv")
    data, preprocessing, train, test, notes = prepare(sheet, 0.2, seed=1)
    assert (data.name, data.task, data.classes) == ("levels", "classification", ("hi", "lo"))
    assert (len(data.train), len(data.test)) == (40, 10)
    assert torch.bincount(data.test.targets).tolist() == [4, 6]
    assert preprocessing == Preprocessing.fit(sheet, train)
    assert torch.equal(data.test.inputs, preprocessing.transform(sheet).inputs[test])
    torch.testing.assert_close(data.train.inputs[:, 0].mean(), torch.tensor(0.0))
    torch.testing.assert_close(data.train.inputs[:, 0].std(correction=0), torch.tensor(1.0))
    assert "Column 'c' is taken as 2 categories." in notes
    assert prepare(table(TRAINING, "y"), 0.25).data.classes is None
