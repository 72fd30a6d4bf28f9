"""The reader of separated text: what csv writers write comes back exactly."""

import csv
import io
import itertools

import hypothesis.strategies as st
import pyarrow as pa
import pytest
import tableoracle as oracle
from hypothesis import assume, given, settings

from posterity.datasets import read_table, splitting
from posterity.datasets.fields import number, trouble
from posterity.datasets.reader import read_records
from posterity.datasets.splitting import SPACES
from posterity.errors import BadData


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("reader") / "table.csv"


LETTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0\ufeff")
TEXT = st.text(LETTERS, max_size=8) | st.text("a \",;|\t\r\n'", max_size=6)
DIALECTS = st.fixed_dictionaries(
    {
        "delimiter": st.sampled_from(",;\t|"),
        "quoting": st.sampled_from((csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC)),
        "lineterminator": st.sampled_from(("\n", "\r\n", "\r")),
    }
)
ENCODINGS = st.sampled_from(("utf-8", "utf-8-sig", "utf-16", "utf-32"))


@st.composite
def tables(draw):
    """Names and rows of fields, at least two columns wide."""
    width = draw(st.integers(2, 5))
    names = draw(st.lists(TEXT, min_size=width, max_size=width))
    rows = draw(st.lists(st.lists(TEXT, min_size=width, max_size=width), max_size=6))
    return [names, *rows]


def written(rows, dialect, encoding):
    text = io.StringIO(newline="")
    if any("\r" in field or "\n" in field for row in rows for field in row):  # some writers leave \r unquoted
        dialect = {**dialect, "quoting": csv.QUOTE_ALL}
    csv.writer(text, **dialect).writerows(rows)
    return text.getvalue().encode(encoding)


def fields(records):
    """The records, as lists of fields."""
    return [list(row) for row in zip(*(column.to_pylist() for column in records.columns), strict=True)]


@settings(deadline=None, max_examples=150)
@given(rows=tables(), dialect=DIALECTS, encoding=ENCODINGS)
def test_reads_back_what_a_csv_writer_wrote(file, rows, dialect, encoding):
    wanted = [[field.strip(SPACES) for field in row] for row in rows]
    assume(any(map(any, wanted)))
    file.write_bytes(written(rows, dialect, encoding))
    found = read_records(file.read_bytes(), file, dialect["delimiter"])
    assert fields(found) == wanted
    assert len(found.lines) == len(rows)
    assert found.lines.tolist() == sorted(set(found.lines.tolist()))


@settings(deadline=None, max_examples=150)
@given(rows=tables(), dialect=DIALECTS, encoding=ENCODINGS)
def test_finds_the_separator_or_says_that_it_cannot(file, rows, dialect, encoding):
    wanted = [[field.strip(SPACES) for field in row] for row in rows]
    assume(any(map(any, wanted)))
    file.write_bytes(written(rows, dialect, encoding))
    fitting = oracle.separators(written(rows, dialect, encoding).decode(encoding))
    if len(fitting) > 1:
        with pytest.raises(BadData, match="fields can be separated by"):
            read_records(file.read_bytes(), file)
    else:
        assert fields(read_records(file.read_bytes(), file)) == wanted


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53).map(float)


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.tuples(NUMBERS, st.booleans()), min_size=2, max_size=20), dialect=DIALECTS, comma=st.booleans()
)
def test_numbers_come_back_to_the_last_bit(file, values, dialect, comma):
    mark = "," if comma else "."
    rows = [["value", "y"], *([repr(value).replace(".", mark), str(kind)] for value, kind in values)]
    assume(len({kind for _, kind in values}) == 2)
    file.write_bytes(written(rows, {**dialect, "quoting": csv.QUOTE_ALL}, "utf-8"))
    table = read_table(file, "y", separator=dialect["delimiter"], decimal=mark)
    assert table.column("value").numbers(mark).tolist() == [value for value, _ in values]
    assert table.roles.task == "classification"


@settings(deadline=None, max_examples=300)
@given(text=st.text("0123456789+-.,eE_ x%", max_size=9) | st.floats().map(str) | st.text(max_size=5))
def test_a_field_is_a_plain_number_or_in_trouble_or_text(text):
    value = number(text)
    if value is not None:
        oracle.check_number(text, ".", value)
        assert trouble(text) is None
    elif oracle.is_numeric(text):  # Python takes more than is taken here
        assert text != text.strip() or trouble(text)
    elif trouble(text) is None:
        assert not oracle.PLAIN.fullmatch(text)


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=30) | st.text('ab12",; \t\r\n\x00\ufeff\u00e9', max_size=20).map(str.encode))
def test_any_bytes_end_in_records_or_one_line(file, data):
    file.write_bytes(data)
    rows, message = [], f"{file}: "
    try:
        rows = fields(read_records(file.read_bytes(), file))
    except BadData as error:
        message = str(error)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    assert len({len(row) for row in rows}) <= 1


def test_arrow_takes_the_same_numbers():
    """Whole columns are parsed by Arrow, whose grammar must be ours but for inf and nan."""
    words = ["".join(letters) for length in (1, 2, 3, 4) for letters in itertools.product("019+-.eE", repeat=length)]
    words += [
        "0x10",
        "1_0",
        "1f",
        "1d5",
        " 1",
        "1 ",
        "\n1",
        "\x0b1",
        "\u0663",
        "\u22121",
        "1,5",
        "0x1p3",
        "true",
        "\uff11",
    ]
    for word in words:
        try:
            value = pa.scalar(word).cast(pa.float64()).as_py()
        except pa.ArrowInvalid:
            value = None
        assert value == number(word), word


@settings(deadline=None, max_examples=150)
@given(rows=tables(), dialect=DIALECTS, blank=st.integers(0, 6))
def test_both_ways_to_split_agree(rows, dialect, blank):
    """Where Arrow is used, the csv module, which reads the rest, finds the same fields on the same lines."""
    lines = written(rows, dialect, "utf-8").split(b"\n")
    data = b"\n".join([*lines[:blank], b" ", b"", *lines[blank:]])
    for separator in ",;\t| ":
        if not splitting._is_simple(data, separator):
            continue
        quick, strict = splitting._by_arrow(data, separator), splitting._parsed(data.decode(), separator)
        assert (quick is None) == (bool(strict.problem) or strict.share != 1)
        if quick is not None:
            assert fields(quick) == strict.rows
            assert quick.lines.tolist() == strict.lines
            assert quick.blanks == strict.blanks
