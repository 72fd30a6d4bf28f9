"""Damaged tables: read exactly as they are, or refused in one line that says where; never read as something else.

POSTERITY_MUTATIONS sets how many are made. All 10,000:

    POSTERITY_MUTATIONS=10000 python -m pytest tests/datasets/test_table_mutations.py
"""

import math
import os
import random
import re

import pytest
import tableoracle as oracle

from posterity.datasets import Preprocessing, read_table
from posterity.errors import BadData

COUNT = int(os.environ.get("POSTERITY_MUTATIONS", "500"))
BATCHES = 10

WHERE = re.compile(r"line \d+|[Cc]olumns? |the target '|the file is empty|fields can be separated by|not a text file")

PEOPLE = (
    "age,height,smokes,town,code,y\n"
    "34,1.75,yes,\"Bonn, Rhein\",7,0.5\n"
    "51,1.62,no,Köln,11,1.25\n"
    "28,,no,Bonn,13,-3e-2\n"
    "45,1.81,yes,Köln,17,4\n"
    "NA,1.70,no,\"Bonn, Rhein\",19,2.5\n"
    "62,1.68,yes,Köln,23,.75\n"
    "39,1.77,?,\"the \"\"old\"\" town\",29,1e1\n"
    "33,1.59,no,Bonn,31,6.02\n"
    "47,1.73,yes,Bonn,37,-8\n"
    "55,1.66,no,Köln,41,0.125\n"
)  # fmt: skip
METERS = (
    "kind;flow;load;y\n"
    "a;1,5;10;0,25\nb;2,75;11;1,5\na;3;12;2\nc;4,125;13;-0,5\nb;5,5;14;1e1\na;6;15;3,75\nc;7,25;16;4\na;8;17;2,5\n"
)
FLOWERS = (
    "longueur\tlargeur\tespèce\r\n"
    + "".join(f'"{5 + row / 8}"\t"{3 - row / 16}"\t"{("sétosa", "virginica")[row % 2]}"\r\n' for row in range(12))
)  # fmt: skip
DIGITS = "".join(f"  {row}   {row * row / 4:.2f}  {row % 3}\n" for row in range(1, 12))
SALES = "day,share,paid,y\n" + "".join(
    f"2021-{1 + row % 3:02d}-{5 + 2 * row:02d},{7 * row % 30}.5 %,${row * row}.25,{row % 4 / 4}\n"
    for row in range(1, 12)
)
BASES = {
    "people": (PEOPLE, "y"),
    "meters": (METERS, "y"),
    "flowers": (FLOWERS, "espèce"),
    "digits": (DIGITS, "x3"),
    "sales": (SALES, "y"),
}
SIGNS = {"people": ",", "meters": ";", "flowers": "\t", "digits": " ", "sales": ","}
NASTY = [
    "1e400",
    "-1e999",
    "9" * 30,
    "1e-400",
    "inf",
    "-inf",
    "0x10",
    "1,234",
    "1_000",
    "NaN",
    "",
    "é",
    "12abc",
    "٣",
    "=1+1",
]
LETTERS = "\u00e9\u0416\u4e2d\u200b\u00a0\ufeff\u2212\U0001f600\x0b\x85\u2028\x1f"


def flip(data, rng):
    data = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def take_out(data, rng):
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randint(1, 12) :]


def double(data, rng):
    start = rng.randrange(len(data))
    end = start + rng.randint(1, 20)
    return data[:end] + data[start:]


def on_lines(change):
    def mutate(data, rng):
        lines = data.decode().split("\n")
        return "\n".join(change(lines, rng)).encode()

    mutate.__name__ = change.__name__
    return mutate


@on_lines
def lines_swapped_or_gone(lines, rng):
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return lines[:first] + lines[first + 1 :] if rng.random() < 0.5 else lines


@on_lines
def line_cut(lines, rng):
    index = rng.randrange(len(lines))
    return [*lines[:index], lines[index][: rng.randint(0, len(lines[index]))], *lines[index + 1 :]]


@on_lines
def strange_field(lines, rng):
    index = rng.randrange(len(lines))
    sign = rng.choice(",;\t ")
    fields = lines[index].split(sign)
    fields[rng.randrange(len(fields))] = rng.choice(NASTY)
    return [*lines[:index], sign.join(fields), *lines[index + 1 :]]


@on_lines
def strange_letter(lines, rng):
    index = rng.randrange(len(lines))
    place = rng.randint(0, len(lines[index]))
    letter = rng.choice(LETTERS + '"\r\t,;| ')
    return [*lines[:index], lines[index][:place] + letter + lines[index][place:], *lines[index + 1 :]]


@on_lines
def signs_exchanged(lines, rng):
    old, new = rng.sample(",;\t| ", 2)
    return [line.replace(old, new) if rng.random() < rng.choice((0.2, 1)) else line for line in lines]


@on_lines
def field_more_or_less(lines, rng):
    sign = rng.choice(",;\t ")
    rows = range(len(lines)) if rng.random() < 0.3 else [rng.randrange(len(lines))]
    place, double_it = rng.randrange(5), rng.random() < 0.5
    for index in rows:
        fields = lines[index].split(sign)
        fields[place : place + 1] = fields[place : place + 1] * (2 if double_it else 0)
        lines[index] = sign.join(fields)
    return lines


@on_lines
def sign_in_every_line(lines, rng):
    sign, old = rng.choice(",;\t|"), rng.choice(",;\t ")
    fields = [line.split(old) for line in lines]
    return [old.join([row[0] + sign, *row[1:]]) if len(row) > 1 else row[0] for row in fields]


@on_lines
def commas_in_numbers(lines, rng):
    digits = rng.choice((r"\1,\2", r"\1,\2", r"\1,500", r"\1.\2", r"1.\1,\2"))
    return [re.sub(r"(\d+)[.,](\d+)", digits, line) if rng.random() < rng.choice((0.5, 1)) else line for line in lines]


ANY = [flip, cut, take_out, double, lines_swapped_or_gone, line_cut, strange_field, strange_letter, signs_exchanged]
ANY += [field_more_or_less, sign_in_every_line, commas_in_numbers]


def mutant(seed):
    """The seed-th damaged file: the name of its base, its bytes and its target."""
    rng = random.Random(f"table/{seed}")
    name = rng.choice(sorted(BASES))
    text, target = BASES[name]
    data = text.encode()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate = rng.choice(ANY)
        if data:
            try:
                data = mutate(data, rng)
            except UnicodeDecodeError:  # bytes that were flipped before are no text any more
                data = flip(data, rng)
    return name, data, target


def check_error(error, path):
    message = str(error)
    assert message.startswith(f"{path}: ")
    assert WHERE.search(message), message
    assert "\n" not in message


def check_fields(table, data, without=None):
    """That the fields of a table are those of the file, all of them, in their rows and under their names."""
    text = oracle.decode(data)
    assert oracle.separators(text) == [table.separator]
    rows = oracle.parse(text, table.separator)
    names = rows.pop(0) if table.named else [""] * len(rows[0])
    names = [name or f"x{place}" for place, name in enumerate(names, start=1)]
    assert list(table.names) == names
    assert len(set(names)) == len(names)
    assert not table.named or names not in rows
    if without is not None:
        rows = [row for row in rows if row[names.index(without)] not in oracle.MISSING]
    assert [list(row) for row in zip(*(column.fields for column in table.columns), strict=True)] == rows
    plain = data.decode("utf-8", "replace")
    assert ("\ufffd" in plain and data[:2] not in (b"\xff\xfe", b"\xfe\xff")) == any(
        "Latin-1" in n for n in table.notes
    )


def check_values(table, preprocessing, inputs, targets, decimal):
    """That each input is what its field says, reckoned anew from the text of the field."""
    place = 0
    for column in preprocessing.inputs:
        fields = table.column(column.name).fields
        for row, field in enumerate(fields):
            got = inputs[row, place : place + len(column.features)].tolist()
            assert len(got) == len(column.features)
            if column.has_indicator:
                assert got.pop() == (field in oracle.MISSING)
            if column.part:
                field = oracle.date_part(field, column.part)
            if column.kind == "category":
                assert got == [float(field == category) for category in column.categories]
                continue
            if field in oracle.MISSING:
                value = column.fill
            elif column.kind == "boolean":
                value = float([word.lower() for word in column.categories].index(field.lower()))
            elif column.part:
                value = float(field)
            else:
                value = oracle.amount(field, decimal, column.sign)
            assert got == [pytest.approx((value - column.mean) / column.scale, rel=1e-5, abs=1e-5)]
        place += len(column.features)
    assert place == inputs.shape[1]
    assert inputs.isfinite().all()
    if targets is None:
        return
    for row, field in enumerate(table.column(preprocessing.target.name).fields):
        if preprocessing.task == "regression":
            value = oracle.amount(field, decimal, preprocessing.target.sign)
            wanted = (value - preprocessing.target.mean) / preprocessing.target.scale
            assert targets[row].tolist() == [pytest.approx(wanted, rel=1e-5, abs=1e-5)]
        else:
            assert preprocessing.target.classes[targets[row]] == field


def check_decimal(table, decimal):
    """That a comma is taken as a decimal mark only where it can be nothing else."""
    numbers = [
        field
        for column in table.columns
        if table.roles.kinds[column.name] == "number"
        for field in column.fields
        if field not in oracle.MISSING
    ]
    commas = [field for field in numbers if "," in field]
    assert bool(commas) == (decimal == ",")
    if commas:
        assert table.separator != ","
        assert not any("." in field for field in numbers)
        assert any(not re.fullmatch(r"[-+]?[1-9]\d?\d?,\d\d\d", field) for field in commas)


def check_training(path, data, target):
    """Whether a damaged file is taken for training, after all checks of what was taken."""
    try:
        table = read_table(path, target)
        preprocessing = Preprocessing.fit(table)
        inputs, targets, _ = preprocessing.transform(table)
    except BadData as error:
        check_error(error, path)
        return False
    check_fields(table, data, without=target)
    decimal = table.roles.decimal
    for column in table.columns:
        present = {field for field in column.fields if field not in oracle.MISSING}
        if table.roles.kinds[column.name] == "category" and len(present) > 1:
            assert not any(map(oracle.is_numeric, present))  # no number became a word
    check_values(table, preprocessing, inputs, targets, decimal)
    check_decimal(table, decimal)
    for column in preprocessing.inputs:
        if column.kind != "number" or column.part:
            continue
        fields = [field for field in table.column(column.name).fields if field not in oracle.MISSING]
        known = [oracle.amount(field, decimal, column.sign) for field in fields]
        assert column.mean == pytest.approx(math.fsum(known) / len(known), rel=1e-9, abs=1e-9 * max(map(abs, known)))
    return True


def check_prediction(path, data, preprocessing):
    """Whether a damaged file is taken for prediction by a model of the sound one, after all checks."""
    try:
        table = read_table(path)
        inputs, _, _ = preprocessing.transform(table)
    except BadData as error:
        check_error(error, path)
        return False
    check_fields(table, data)
    has_comma = table.separator != "," and any(
        re.fullmatch(r"[-+]?\d*,\d*([eE][-+]?\d+)?", field)
        for column in preprocessing.inputs
        if column.kind == "number"
        for field in table.column(column.name).fields
    )
    check_values(table, preprocessing, inputs, None, "," if has_comma else ".")
    return True


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The preprocessing of each sound table."""
    folder = tmp_path_factory.mktemp("sound")
    found = {}
    for name, (text, target) in BASES.items():
        path = folder / f"{name}.csv"
        path.write_bytes(text.encode())
        table = read_table(path, target)
        found[name] = Preprocessing.fit(table)
        check_fields(table, text.encode())
    return found


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_damaged_table_is_read_as_it_is_or_refused(tmp_path, models, batch):
    path = tmp_path / "damaged.csv"
    taken = {"training": 0, "prediction": 0}
    seeds = range(batch, COUNT, BATCHES)
    for seed in seeds:
        name, data, target = mutant(seed)
        path.write_bytes(data)
        taken["training"] += check_training(path, data, target)
        taken["prediction"] += check_prediction(path, data, models[name])
    for count in taken.values():  # both outcomes occur, or the damage is of no use as a test
        assert 0.05 * len(seeds) < count < 0.95 * len(seeds)


@pytest.mark.parametrize("name", [name for name in BASES if name != "people"])
@pytest.mark.parametrize("row", [0, 1, 4, -2])
def test_a_field_more_or_less_is_never_taken(tmp_path, name, row):
    text, target = BASES[name]
    sign = SIGNS[name]
    lines = text.split("\n")
    fields = lines[row].split() if sign == " " else lines[row].split(sign)
    for place in range(len(fields)):
        for times in (0, 2):
            lines[row] = sign.join([*fields[:place], *fields[place : place + 1] * times, *fields[place + 1 :]])
            path = tmp_path / "damaged.csv"
            path.write_bytes("\n".join(lines).encode())
            with pytest.raises(BadData, match=r"line \d+ has \d fields? where line 1 has \d fields?"):
                read_table(path, target)


@pytest.mark.parametrize("name", BASES)
def test_a_field_more_in_every_row_is_never_taken(tmp_path, name):
    text, target = BASES[name]
    sign, lines = SIGNS[name], text.strip("\n").replace("\r", "").split("\n")
    path = tmp_path / "damaged.csv"
    path.write_bytes("\n".join([lines[0], *(f"7{sign}{line}" for line in lines[1:])]).encode())
    with pytest.raises(BadData, match=r"line 2 has \d fields where line 1 has \d fields"):
        read_table(path, target)


@pytest.mark.parametrize("name", ["people", "meters", "flowers", "digits"])
@pytest.mark.parametrize("field", ["1e400", "9" * 30, "-1e999", "inf", "0x10", "1 234", "12abc"])
def test_a_number_that_is_none_is_never_taken(tmp_path, models, name, field):
    text, target = BASES[name]
    lines = text.split("\n")
    sign = SIGNS[name]
    place = {"people": 1, "meters": 1, "flowers": 0, "digits": 1}[name]
    fields = lines[3].split() if sign == " " else lines[3].split(sign)
    fields[place] = field if sign != " " else f'"{field}"'
    lines[3] = sign.join(fields)
    path = tmp_path / "damaged.csv"
    path.write_bytes("\n".join(lines).encode())
    column = models[name].columns[place]
    with pytest.raises(BadData, match=f"line 4, column '{column}'"):
        read_table(path, target)
    with pytest.raises(BadData, match=f"line 4, column '{column}'"):
        models[name].transform(read_table(path))
