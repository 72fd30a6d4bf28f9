"""Archives, Parquet files and Excel workbooks: the same values as in plain text."""

import datetime
import gzip
import io
import random
import sys
import zipfile

import pandas as pd
import pytest
import torch

from posterity.datasets import Preprocessing, as_table, read_table
from posterity.errors import BadData

pytest.importorskip("openpyxl")

pytestmark = pytest.mark.cpu  # files are read into the memory of the CPU

FRAME = pd.DataFrame(
    {
        "size": [1.5, None, 3.25, 0.1],
        "rooms": [1, 2, 3, 5],
        "town": ["Bonn", "Ulm", None, "Bonn"],
        "new": [True, False, True, True],
        "sold": [datetime.datetime(2020, 1, day, 12) for day in (1, 5, 9, 30)],
        "price": [0.5, 1.5, 2.5, 9.25],
    }
)
TEXT = FRAME.to_csv(index=False).encode()


def zipped(**files):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return memory.getvalue()


def written(write):
    memory = io.BytesIO()
    write(memory)
    return memory.getvalue()


FILES = {
    "table.csv.gz": gzip.compress(TEXT),
    "table.zip": zipped(**{"table.csv": TEXT, "__MACOSX/._table.csv": b"\0\0"}),
    "table.parquet": written(FRAME.to_parquet),
    "table.xlsx": written(lambda memory: FRAME.to_excel(memory, index=False)),
}


@pytest.mark.parametrize("name", FILES)
def test_every_form_of_a_table_gives_the_same_inputs(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    table, wanted = read_table(path, "price"), as_table(FRAME, "price")
    assert (table.names, table.notes) == (wanted.names, ())
    assert table.roles.kinds == wanted.roles.kinds
    fitted = Preprocessing.fit(table)
    assert fitted.inputs == Preprocessing.fit(wanted).inputs
    assert torch.equal(fitted.transform(table).inputs, fitted.transform(wanted).inputs)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("two.zip", zipped(a=b"x", b=b"y"), "two.zip: the archive must have one file. Got 2: ['a', 'b']. Unpack it"),
        ("none.zip", zipped(**{"a/": b""}), "none.zip: the archive must have one file. Got 0"),
        ("half.zip", zipped(a=TEXT)[:-30], "half.zip: cannot be unpacked: "),
        ("half.parquet", FILES["table.parquet"][:-50], "half.parquet: not a Parquet file that can be read: "),
        ("bad.xlsx", zipped(**{"xl/workbook.xml": b"<broken"}), "bad.xlsx: not a spreadsheet that can be read: "),
        (
            "bad.csv.gz",
            gzip.compress(b"a,y\n1,2\n3\n", mtime=0),
            "bad.csv.gz: line 3 has 1 field where line 1 has 2 fields",
        ),
    ],
)
def test_what_cannot_be_unpacked_is_refused_in_one_line(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadData) as caught:
        read_table(tmp_path / name, "y")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["table.csv.gz", "table.zip", "table.xlsx"])  # Parquet files have no check sums
def test_a_damaged_file_is_refused_or_gives_the_same_values(tmp_path, name):
    wanted = Preprocessing.fit(as_table(FRAME, "price"))
    path, refused = tmp_path / name, 0
    for seed in range(60):
        rng, data = random.Random(f"{name}/{seed}"), bytearray(FILES[name])
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))
        said, found = f"{path}: ", wanted
        try:
            found = Preprocessing.fit(read_table(path, "price"))
        except BadData as error:
            said, refused = str(error), refused + 1
        assert said.startswith(f"{path}: ")
        assert "\n" not in said
        assert (found.inputs, found.target) == (wanted.inputs, wanted.target)
    assert refused > 30


def sheet(path, rows, more=()):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    for name in more:
        book.create_sheet(name)
    book.save(path)
    return path


def test_sheets_are_read_as_they_stand(tmp_path):
    rows = [[], ["a", None, "y", None], [1, "NA", 0.5, None], [2, " x ", 1.5], [], [3, "x", 2.5]]
    table = read_table(sheet(tmp_path / "book.xlsx", rows, ["other"]), "y")
    assert table.names == ("a", "x2", "y")
    assert table.notes == ("The first of 2 sheets, 'Sheet', was read.",)
    assert table.column("x2").fields == ("", "x", "x")
    assert table.column("a").lines.tolist() == [3, 4, 6]
    path = sheet(tmp_path / "bad.xlsx", [["a", "y"], [1, 2.5], ["old", 3.5], [5, 4.5]])
    with pytest.raises(BadData, match=r"row 3, column 'a': 'old' is text, where row 2 has the number '1'"):
        read_table(path, "y")
    path = sheet(tmp_path / "error.xlsx", [["a", "y"], [1, 2.5], ["#DIV/0!", 3.5], [5, 4.5]])
    with pytest.raises(BadData, match=r"row 3, column 'a': '#DIV/0!' is the error of a spreadsheet"):
        read_table(path, "y")
    path = sheet(tmp_path / "nameless.xlsx", [[1, 2.5], [2, 3.5], [5, 4.5]])
    with pytest.raises(BadData, match="row 1 must name the columns"):
        read_table(path, "y")
    assert read_table(path, "x2", header=False).names == ("x1", "x2")
    with pytest.raises(BadData, match="needs two columns, their names, and rows"):
        read_table(sheet(tmp_path / "empty.xlsx", [["a", "y"]]), "y")
    with pytest.raises(BadData, match="two columns have the same name 'a'"):
        read_table(sheet(tmp_path / "twice.xlsx", [["a", "a"], [1, 2]]), "a")


def test_a_workbook_without_openpyxl_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "table.xlsx").write_bytes(FILES["table.xlsx"])
    with pytest.raises(BadData, match=r"Install it \(pip install 'posterity\[excel\]'\), or export"):
        read_table(tmp_path / "table.xlsx", "price")
